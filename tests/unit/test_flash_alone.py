"""`FlashCheckpoint` by itself: what it takes and refuses, and storage without an agent."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from flashing import Training, averaged_as_extra, batch_norm, net, plain, same, scheduled
from torch import nn

from dlrover_adapters.torch.checkpoint.closing import NotStored
from dlrover_adapters.torch.checkpoint.flash import FlashCheckpoint
from dlrover_adapters.torch.checkpoint.sources import Mismatch
from dlrover_core.errors import CoreError, SpecError

pytestmark = pytest.mark.usefixtures("alone")


# ---- arguments


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"mode": "sync"}, "mode: 'async' or 'blocking'"),
        ({"verify": True}, "verify: 'sample', 'full' or 'off'"),
        ({"format": "safetensors"}, "format: 'dcp' or 'torch'"),
        ({"keep": -1}, "keep: a number"),
        ({"slots": 1}, "slots: 2 to 8"),
        ({"every": 0}, "every="),
        ({"every": "sometimes"}, "every="),
        ({"every": 5, "store_every": "auto"}, "store_every"),
        ({"model": {}}, "nothing to save"),
        ({"model": torch.zeros(2)}, "a torch.nn.Module"),
        ({"optimizer": nn.Linear(1, 1)}, "param_groups"),
        ({"extra": object()}, "state_dict"),
        ({"state": [1]}, "a dict"),
        ({"frozen": 3.0}, "names or tensors"),
    ],
    ids=lambda one: one if isinstance(one, str) else next(iter(one)),
)
def test_wrong_arguments_are_refused_with_what_to_do(wrong: dict[str, Any], said: str) -> None:
    """At once, by name."""
    given: dict[str, Any] = {"model": nn.Linear(2, 2), "frozen": (), **wrong}
    with pytest.raises(SpecError, match=said):
        FlashCheckpoint("/tmp/nowhere", **given)


@pytest.mark.parametrize("mode", ["async", "blocking"])
def test_a_closed_one_holds_no_model(mode: str, tmp_path: Path) -> None:
    """The script's `del model` is its end, without the garbage collector: a DDP model must go before its gloo group."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    alive = [weakref.ref(model), weakref.ref(model.weight), weakref.ref(optimizer)]
    with FlashCheckpoint(
        str(tmp_path), model=model, optimizer=optimizer, live=[model.bias], every=1, mode=mode
    ) as ckpt:
        for step in range(1, 4):
            optimizer.zero_grad()
            model(torch.ones(2)).sum().backward()
            optimizer.step()
            ckpt.step(step)
    gc.disable()
    try:
        del model, optimizer
        assert [one() for one in alive] == [None] * 3
    finally:
        gc.enable()
    assert (ckpt.stats.saves, ckpt.stats.failed) == (3, 0)
    with pytest.raises(CoreError, match="closed"):
        ckpt.step(4)


def test_a_name_of_nothing_is_a_mistake() -> None:
    """At the first save at the latest."""
    with (
        FlashCheckpoint("", model=nn.Linear(2, 2), frozen=["encoder.*"], every=1) as ckpt,
        pytest.raises(SpecError, match="encoder"),
    ):
        ckpt.step(1)


# ---- storage without an agent


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")  # torch's reader, in one process
def test_without_an_agent_states_are_written_by_a_thread(tmp_path: Path) -> None:
    """Complete checkpoints, the newest ones, that torch's own reader opens."""
    import torch.distributed.checkpoint as dcp

    run = Training(batch_norm)
    with FlashCheckpoint(f"file://{tmp_path}", **run.parts, every=1, store_every=2, keep=2) as ckpt:
        left = list(run.train(1, 7, lambda step: (ckpt.step(step), ckpt.wait())))
    found = sorted(one.name for one in tmp_path.iterdir())
    assert found == ["step-0000000006", "step-0000000007"]
    state = {"model": {name: torch.zeros_like(one) for name, one in run.parts["model"].state_dict().items()}}
    dcp.load(state, checkpoint_id=str(tmp_path / found[-1]), no_dist=True)
    assert same(state["model"], left[6]["model"])


@pytest.mark.parametrize("build", [batch_norm, averaged_as_extra, scheduled], ids=lambda build: build.__name__)
def test_a_run_restored_from_storage_equals_the_undisturbed_one(
    build: Callable[[], dict[str, Any]], tmp_path: Path
) -> None:
    """By the calls that users make, and nothing else."""
    undisturbed = list(Training(build).train(1, 10))
    run = Training(build)
    with FlashCheckpoint(str(tmp_path), **run.parts, every=2, store_every=4) as ckpt:
        assert ckpt.restore() == 0
        list(run.train(1, 7, ckpt.step))
    other = Training(build, seed=99)
    other.data = run.data
    with FlashCheckpoint(str(tmp_path), **other.parts, every=2, store_every=4) as again:
        assert again.restore() == 6
        assert same(list(other.train(7, 10, again.step)), undisturbed[6:])
        again.wait()
        assert again.restore() == 8


def test_a_restore_says_what_differs_and_refuses_another_optimizer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A scheduler that was added later is named; Adam's state is not taken for SGD's, and nothing is written."""
    run = Training(plain)
    with FlashCheckpoint(str(tmp_path), **run.parts, every=1, store_every=1) as ckpt:
        list(run.train(1, 2, ckpt.step))
    model, optimizer = run.parts["model"], run.parts["optimizer"]
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with FlashCheckpoint(str(tmp_path), model=model, optimizer=optimizer, scheduler=scheduler, every=1) as ckpt:
        assert ckpt.restore() == 2
    assert "scheduler is not in this checkpoint" in caplog.text
    other = net()
    before = [one.detach().clone() for one in other.parameters()]
    with (
        FlashCheckpoint(str(tmp_path), model=other, optimizer=torch.optim.SGD(other.parameters()), every=1) as ckpt,
        pytest.raises(Mismatch, match="saved from Adam, and is SGD now"),
    ):
        ckpt.restore()
    assert all(map(torch.equal, before, other.parameters()))


def test_a_storage_that_fails_does_not_stop_training(tmp_path: Path) -> None:
    """It is said, and said again to who waits."""
    run = Training(plain)
    blocked = tmp_path / "file"
    blocked.write_text("no folder")
    ckpt = FlashCheckpoint(str(blocked / "run"), **run.parts, every=1, store_every=1)
    list(run.train(1, 4, ckpt.step))
    with pytest.raises(OSError, match="file"):
        ckpt.wait()
    assert ckpt.stats.saves == 4
    with pytest.raises(NotStored, match="step 4, the last state of this script, is not on storage"):
        ckpt.close()


@pytest.mark.parametrize(("nodes", "copies", "share"), [(2, True, 0.1), (2, False, 1.0), (1, True, 1.0)])
def test_copies_on_other_nodes_make_storage_less_urgent(nodes: int, copies: bool, share: float) -> None:
    """The interval of ``every="auto"`` counts the failures that memory does not survive: few where partners have copies."""
    model = torch.nn.Linear(4, 4)
    with FlashCheckpoint("", model=model, every="auto") as ckpt:
        line = ckpt._opened()
        line.told = line.told._replace(nodes=nodes, copies=copies)
        ckpt.step(1)
        assert ckpt._cadence.bounds.lost_share == share
