"""What `FlashCheckpoint` does where something is in its way: other ranks' tensors, used folders, ends, and what users mistake."""

from __future__ import annotations

import contextlib
import functools
import gc
import io
import logging
import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flashing import saved
from torch import nn
from torch.distributed import HashStore

from dlrover_adapters.checkpoint import listing
from dlrover_adapters.checkpoint.places import Place
from dlrover_adapters.torch.checkpoint import filling
from dlrover_adapters.torch.checkpoint.copier import Flight
from dlrover_adapters.torch.checkpoint.flash import FlashCheckpoint
from dlrover_adapters.torch.checkpoint.generators import drawn
from dlrover_adapters.torch.checkpoint.ladder import RestoreFailed
from dlrover_adapters.torch.checkpoint.meeting import Meeting
from dlrover_adapters.torch.checkpoint.opening import opened
from dlrover_core.errors import CoreError, SpecError

LIMIT_S = 60.0
pytestmark = pytest.mark.usefixtures("alone")


class Training:
    """A model of one layer, whose values say which step it is."""

    def __init__(self, **more: Any) -> None:
        self.model = nn.Linear(8, 8)
        nn.init.zeros_(self.model.bias)  # alike on all ranks
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.parts = {"model": self.model, "optimizer": self.optimizer, **more}

    def steps(self, ckpt: FlashCheckpoint, first: int, last: int) -> None:
        """Each writes its number; storage has time to take what is due."""
        for step in range(first, last + 1):
            self.optimizer.zero_grad()
            self.model(torch.ones(1, 8)).sum().backward()
            self.optimizer.step()
            with torch.no_grad():
                self.model.weight.fill_(float(step))
            ckpt.step(step)
            ckpt.wait()

    @property
    def at(self) -> float:
        """The step whose values it has."""
        return float(self.model.weight.detach().flatten()[0])


def complete(url: Path) -> list[int]:
    """Steps that are whole on storage."""
    return [one.step for one in listing.steps(Place(str(url))) if one.state == listing.COMPLETE]


# ---- tensors of one rank alone


class Grows:
    """A thing whose state has as many numbers as are asked for."""

    def __init__(self, count: int = 10) -> None:
        self.seen = torch.zeros(count)

    def state_dict(self) -> dict[str, Any]:
        """One tensor."""
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """As it was."""
        self.seen = state["seen"]


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> Iterator[HashStore]:
    """Threads named "0" and "1" are ranks of one world."""
    store = HashStore()

    def mine(**_: Any) -> Meeting:
        return Meeting(store, int(threading.current_thread().name), 2, limit_s=LIMIT_S)

    monkeypatch.setattr(Meeting, "of_environment", mine)
    return store


def test_what_one_rank_has_alone_may_change_its_form_without_the_others(two: HashStore, tmp_path: Path) -> None:
    """Its tensor crosses the size from which on it lies apart, grows, and shrinks: nobody waits for anybody, and all is saved."""
    together = threading.Barrier(2, timeout=LIMIT_S)
    counts = {3: 100_000, 5: 200_000, 7: 300_000, 9: 10}
    layouts: dict[int, int] = {}

    def rank(number: int) -> None:
        threading.current_thread().name = str(number)
        extra = Grows()
        run = Training(extra=extra)
        with FlashCheckpoint(str(tmp_path), **run.parts, every=1, slots=4, store_every=2) as ckpt:
            ckpt.restore()
            for step in range(1, 11):
                if number == 1:
                    extra.seen = torch.full((counts.get(step, extra.seen.numel()),), float(step))
                run.steps(ckpt, step, step)
                together.wait()
            ckpt.wait()
            layouts[number] = ckpt.stats.layouts
            assert ckpt.stats.saves == 10
            kept = saved(ckpt)[2]["rank.1.extra" if number else "extra"]
            assert torch.load(io.BytesIO(kept))["seen"].shape == extra.seen.shape

    with ThreadPoolExecutor(2) as pool:
        for one in [pool.submit(rank, number) for number in range(2)]:
            one.result(LIMIT_S)
    assert layouts[0] == 1
    assert layouts[1] <= 3
    assert complete(tmp_path)[-1] == 10


def test_a_large_tensor_of_one_rank_is_restored_wherever_it_lay(tmp_path: Path) -> None:
    """Apart from the rest, or among it once it has changed its form."""
    extra = Grows()
    run = Training(extra=extra)
    with FlashCheckpoint(str(tmp_path), **run.parts, every=1, store_every=1, keep=0) as ckpt:
        for step, count in enumerate((10, 100_000, 200_000, 300_000), 1):
            extra.seen = torch.full((count,), float(step))
            run.steps(ckpt, step, step)
            ckpt.wait()
    for step, count in enumerate((10, 100_000, 200_000, 300_000), 1):
        with FlashCheckpoint(str(tmp_path), **run.parts, every=1, store_every=0) as ckpt:
            assert ckpt.restore(step) == step
        assert torch.equal(extra.seen, torch.full((count,), float(step)))


# ---- torn copies of whatever strides


def transposed() -> torch.Tensor:
    """Dense, not contiguous."""
    return torch.randn(64, 96).t()


@pytest.mark.parametrize("verify", ["sample", "full"])
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(4, 8, 16, 16).to(memory_format=torch.channels_last),
        transposed,
        lambda: torch.randn(64, 96)[:, ::2],
    ],
    ids=["channels_last", "transposed", "sliced"],
)
def test_a_torn_copy_of_strided_tensors_is_thrown_away(make: Any, verify: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written while it is copied is found, and what is not passes."""
    weight = nn.Parameter(torch.zeros(1))
    weight.data = make()
    optimizer = torch.optim.SGD([weight], lr=0.1)
    model = nn.Module()
    model.register_parameter("weight", weight)
    began, go = threading.Event(), threading.Event()
    finish = Flight.finish

    def later(flight: Flight) -> None:
        began.set()
        assert go.wait(LIMIT_S)
        finish(flight)

    monkeypatch.setattr(Flight, "finish", later)
    with FlashCheckpoint("", model=model, optimizer=optimizer, every=1, verify=verify) as ckpt:
        go.set()
        ckpt.step(1)
        ckpt.wait()
        assert (ckpt.stats.torn, ckpt.stats.saves) == (0, 1)
        assert torch.equal(saved(ckpt)[1]["model.weight"], weight)
        began.clear()
        go.clear()
        ckpt.step(2)
        assert began.wait(LIMIT_S)
        weight.data.add_(1.0)
        go.set()
        with pytest.warns(RuntimeWarning, match="thrown away"):
            ckpt.wait()
        assert (ckpt.stats.torn, ckpt.stats.saves) == (1, 1)


# ---- a line that was left


def test_going_back_empties_what_is_newer_in_memory(tmp_path: Path) -> None:
    """A state of the line that was left is taken by nobody."""
    run = Training()
    with FlashCheckpoint(str(tmp_path), **run.parts, every=1, store_every=1, keep=0) as ckpt:
        ckpt.restore()
        run.steps(ckpt, 1, 6)
        ckpt.wait()
        assert ckpt.restore(3) == 3
        assert ckpt._engine is not None
        assert ckpt._engine.control is not None
        assert [stamp.step for _, stamp in ckpt._engine.control.stamps() if stamp.step > 3] == []
        run.steps(ckpt, 4, 4)
        ckpt.wait()
    with FlashCheckpoint(str(tmp_path), **run.parts, every=1) as again:
        assert again.restore() == 4


def test_a_step_that_is_saved_twice_is_the_newer_one_on_storage(tmp_path: Path) -> None:
    """Nobody takes it for written."""
    run = Training()
    with FlashCheckpoint(str(tmp_path), **run.parts, every=1, store_every=1) as ckpt:
        run.steps(ckpt, 1, 1)
        ckpt.wait()
        with torch.no_grad():
            run.model.weight.fill_(77.0)
        assert ckpt.save(1)
        ckpt.wait()
        assert ckpt.restore(1) == 1
        assert run.at == 77.0


def test_a_new_run_in_a_used_folder_keeps_what_it_writes(tmp_path: Path) -> None:
    """Though its steps have smaller numbers than those that lie there."""
    run = Training()
    with FlashCheckpoint(str(tmp_path), **run.parts, every=1, store_every=1, keep=2) as ckpt:
        run.steps(ckpt, 100, 103)
    assert complete(tmp_path) == [102, 103]
    with FlashCheckpoint(str(tmp_path), **run.parts, every=1, store_every=1, keep=2) as fresh:
        run.steps(fresh, 1, 1)
        fresh.wait()
        assert complete(tmp_path) == [1, 103]
        run.steps(fresh, 2, 3)
    assert complete(tmp_path) == [2, 3]


# ---- whom to trust


class Opens:
    """What unpickling it does, is told."""

    told: list[str] = []  # noqa: RUF012  # of all of them

    def __reduce__(self) -> Any:
        return (self.told.append, ("opened",))


class Anything:
    """A state of whatever kind."""

    def __init__(self, value: object) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        """As it is."""
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """As it was."""
        self.value = state["value"]


def test_storage_runs_no_code_unless_it_is_trusted(tmp_path: Path) -> None:
    """The error names the object and the way out; nothing is overwritten."""
    run = Training(extra=Anything(random.Random(3)))
    with FlashCheckpoint(str(tmp_path), **run.parts, every=1, store_every=1) as ckpt:
        run.steps(ckpt, 1, 1)
    with torch.no_grad():
        run.model.weight.fill_(5.0)
    with (
        FlashCheckpoint(str(tmp_path), **run.parts, every=1) as other,
        pytest.raises(RestoreFailed, match=r"extra is not of a kind.*trusted=True"),
    ):
        other.restore()
    assert run.at == 5.0
    with FlashCheckpoint(str(tmp_path), **run.parts, every=1, trusted=True) as trusting:
        assert trusting.restore() == 1
    assert run.at == 1.0


def test_generators_numbers_and_schedules_need_no_trust() -> None:
    """What states are made of: random generators, numpy's arrays and numbers, schedulers."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedules = torch.optim.lr_scheduler
    values: dict[str, Any] = {
        "rng": drawn(),
        "numpy": {"row": np.arange(3.0), "one": np.float64(2), "many": np.zeros(2, np.int32), "b": np.bool_(1)},
        "steps": schedules.MultiStepLR(optimizer, [2, 3]).state_dict(),
        "cycle": schedules.OneCycleLR(optimizer, 0.1, total_steps=10).state_dict(),
    }
    raw = {}
    for name, value in values.items():
        stream = io.BytesIO()
        torch.save(value, stream)
        raw[name] = stream.getvalue()
    found = opened(raw, trusted=False)
    assert found["numpy"]["row"].tolist() == [0.0, 1.0, 2.0]
    assert found["steps"] == values["steps"]
    stream = io.BytesIO()
    torch.save(np.array([Opens()], dtype=object), stream)
    with pytest.raises(RestoreFailed, match="bad is not"):
        opened({"bad": stream.getvalue()}, trusted=False)
    assert Opens.told == []


def test_no_password_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """Whatever lies in the URL."""
    with (
        caplog.at_level(logging.DEBUG),
        contextlib.suppress(CoreError, OSError, ImportError, ValueError),
        FlashCheckpoint(
            "memory://me:secret@nowhere.invalid/run", model=nn.Linear(2, 2), every=1, store_every=0
        ) as ckpt,
    ):
        ckpt.step(1)
    assert "nowhere.invalid" in caplog.text
    assert "secret" not in caplog.text


# ---- ends


def test_what_is_closed_saves_nothing_and_says_so() -> None:
    """Rather than to say that all is well."""
    run = Training()
    ckpt = FlashCheckpoint("", **run.parts, every=1)
    run.steps(ckpt, 1, 1)
    ckpt.close()
    for call in (lambda: ckpt.step(2), lambda: ckpt.save(2), ckpt.restore):
        with pytest.raises(CoreError, match="closed"):
            call()


@pytest.mark.parametrize("store_every", [None, 1000])
def test_the_newest_state_is_on_storage_at_a_good_end(tmp_path: Path, store_every: int | None) -> None:
    """Though it was not due there."""
    run = Training()
    with FlashCheckpoint(str(tmp_path), **run.parts, every=3, store_every=store_every) as ckpt:
        run.steps(ckpt, 1, 8)
    assert complete(tmp_path) == [6]
    with FlashCheckpoint(str(tmp_path), **run.parts, every=3) as again:
        assert (again.restore(), run.at) == (6, 6.0)
    assert complete(tmp_path) == [6]


def test_neither_after_an_error_nor_where_storage_is_by_hand(tmp_path: Path) -> None:
    """Other ranks may be gone; and who says ``store_every=0`` chooses what is written."""
    run = Training()

    def fails() -> None:
        with FlashCheckpoint(str(tmp_path), **run.parts, every=1, store_every=1000) as ckpt:
            run.steps(ckpt, 1, 2)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    with FlashCheckpoint(str(tmp_path), **run.parts, every=1, store_every=0) as ckpt:
        run.steps(ckpt, 1, 2)
    assert complete(tmp_path) == []


def test_memory_of_layouts_before_is_let_go(tmp_path: Path) -> None:
    """Once what was due of it is written."""
    run = Training()
    state = {"history": ""}
    with FlashCheckpoint(str(tmp_path), **run.parts, state=state, every=1, store_every=1) as ckpt:
        for step in range(1, 5):
            state["history"] += "x" * 1_500_000
            run.steps(ckpt, step, step)
        ckpt.wait()
        line: Any = ckpt._opened()
        assert line._made > 1
        assert len(line._arenas) == 1


def test_what_nobody_has_any_more_leaves_no_thread(tmp_path: Path) -> None:
    """Also if nobody closed it."""
    before = set(threading.enumerate())

    def use() -> list[threading.Thread]:
        run = Training()
        ckpt = FlashCheckpoint(str(tmp_path), **run.parts, every=1, store_every=1)
        run.steps(ckpt, 1, 2)
        ckpt.wait()
        return [one for one in threading.enumerate() if one not in before]

    threads = use()
    assert {one.name for one in threads} >= {"dlrover-checkpoint-copy", "dlrover-checkpoint-write"}
    gc.collect()
    for one in threads:
        one.join(LIMIT_S)
        assert not one.is_alive(), one.name


# ---- arguments


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"keep": "3"}, "keep: a number"),
        ({"keep": None}, "keep: a number"),
        ({"local": 5}, "local: a folder"),
        ({"url": None}, "url: where"),
        ({"slots": "2"}, "slots: 2 to 8"),
    ],
    ids=lambda one: one if isinstance(one, str) else next(iter(one)),
)
def test_wrong_kinds_of_arguments(wrong: dict[str, Any], said: str) -> None:
    """By name, at once."""
    given: dict[str, Any] = {"url": "", "model": nn.Linear(2, 2), **wrong}
    with pytest.raises(SpecError, match=said):
        FlashCheckpoint(given.pop("url"), **given)


def test_a_step_that_is_not_there(tmp_path: Path) -> None:
    """The error says so, and which there are."""
    run = Training()
    with FlashCheckpoint(str(tmp_path), **run.parts, every=1, store_every=2) as ckpt:
        run.steps(ckpt, 1, 4)
        ckpt.wait()
        with pytest.raises(RestoreFailed, match=r"step 7 cannot be restored.*complete are: 2, 4"):
            ckpt.restore(7)


# ---- a system without threads


def test_a_save_without_a_thread_costs_that_save_alone(tmp_path: Path, refused: dict[str, int]) -> None:
    """The save is left out; the next one starts the thread and is whole."""
    refused["dlrover-checkpoint-copy"] = 1
    training = Training()
    with FlashCheckpoint(str(tmp_path / "c"), **training.parts, every=1, store_every=1) as ckpt:
        training.steps(ckpt, 1, 3)
    assert ckpt.stats.failed == 1
    assert complete(tmp_path / "c")[-1] == 3


def test_a_step_that_no_thread_can_write_costs_that_step_alone(tmp_path: Path, refused: dict[str, int]) -> None:
    """Whoever waits for it hears why; the next step starts the thread."""
    refused["dlrover-checkpoint-write"] = 1
    training = Training()
    with FlashCheckpoint(str(tmp_path / "c"), **training.parts, every=1, store_every=1) as ckpt:
        with pytest.raises(RuntimeError, match="new thread"):
            training.steps(ckpt, 1, 1)
        training.steps(ckpt, 2, 3)
    assert complete(tmp_path / "c")[-1] == 3


def test_memory_without_a_thread_is_populated_at_once(tmp_path: Path, refused: dict[str, int]) -> None:
    """It costs training a moment, and not its start; nor does the end wait for a thread that never began."""
    refused["dlrover-checkpoint-memory"] = 1
    training = Training()
    with FlashCheckpoint(str(tmp_path / "c"), **training.parts, every=1, store_every=1) as ckpt:
        training.steps(ckpt, 1, 3)
    assert ckpt.stats.failed == 0
    assert complete(tmp_path / "c")[-1] == 3


@pytest.mark.parametrize("most", [0, 1])
def test_what_threads_were_to_do_is_done_by_those_that_there_are(most: int, refused: dict[str, int]) -> None:
    """By this one, if there is none. The first error is raised, and what was not begun then is left out."""
    done: list[int] = []

    def work(number: int) -> None:
        if number == 5:
            raise OSError("this file cannot be read")
        done.append(number)

    refused["restore_" if not most else "restore_1"] = 1
    filling._beside(3, [functools.partial(work, number) for number in range(4)])
    assert sorted(done) == [0, 1, 2, 3]
    refused["restore_" if not most else "restore_1"] = 1
    with pytest.raises(OSError, match="this file"):
        filling._beside(3, [functools.partial(work, number) for number in range(4, 8)])
    assert set(done) <= {0, 1, 2, 3, 4, 6, 7}
    assert done.count(4) == 1
