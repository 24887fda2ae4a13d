"""`ElasticBatch` in one process: weights, accumulation, clipping, schedules, scalers; and what it refuses."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

from dlrover_adapters.data import mixed_of  # noqa: E402
from dlrover_adapters.torch import ElasticBatch, ElasticDataset, FlashCheckpoint  # noqa: E402
from dlrover_adapters.torch.checkpoint.positions import DataSource  # noqa: E402
from dlrover_core.data.permutation import Order  # noqa: E402
from dlrover_core.errors import CoreError, SpecError  # noqa: E402

SIZE = 22
make = torch.Generator().manual_seed(3)
X = torch.randn(SIZE, 3, generator=make, dtype=torch.float64)
Y = torch.randn(SIZE, generator=make, dtype=torch.float64)


def sample(index: int) -> Any:
    """One of the regression's."""
    return X[index], Y[index]


def parts(**more: Any) -> tuple[Any, Any, ElasticDataset]:
    """A model, its optimizer, and data."""
    torch.manual_seed(1)
    model = nn.Linear(3, 1, dtype=torch.float64)
    given: dict[str, Any] = {"size": SIZE, "fetch": sample, "epochs": 2, "seed": 5, **more}
    return model, torch.optim.SGD(model.parameters(), lr=0.1), ElasticDataset("train", **given)


def loss_of(model: Any, content: Any) -> Any:
    """The mean over the samples."""
    x, y = content
    return ((model(x).squeeze(1) - y) ** 2).mean()


def by_hand(*, clip: float | None = None, schedule: Any = None) -> list[torch.Tensor]:
    """The weights after each step of whole global batches of 8."""
    model, optimizer, _data = parts()
    found, seen = [], 0
    for epoch in range(2):
        order = list(Order(SIZE, 5, epoch).indices(0, SIZE))
        for at in range(0, SIZE, 8):
            chosen = order[at : at + 8]
            optimizer.zero_grad()
            loss_of(model, (X[chosen], Y[chosen])).backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            if schedule is not None:
                optimizer.param_groups[0]["lr"] = 0.1 * schedule(seen)
            optimizer.step()
            seen += len(chosen)
            found.append(model.weight.detach().clone())
    return found


@pytest.mark.parametrize("micro", [1, 3, 8, 50])
@pytest.mark.parametrize("clip", [None, 0.3])
def test_accumulated_micro_batches_are_the_global_batch(micro: int, clip: float | None) -> None:
    """However it is cut into micro-batches, a step is that of the whole batch, the short last one of an epoch included."""
    model, optimizer, data = parts()
    batch = ElasticBatch(model, optimizer, global_batch=8, micro_batch=micro, clip=clip)
    found = []
    for content in batch.over(DataLoader(data, batch_size=None)):
        if batch.backward(loss_of(model, content)):
            found.append(model.weight.detach().clone())
            assert (batch.norm is None) == (clip is None)
    wanted = by_hand(clip=clip)
    assert len(found) == len(wanted) == 6
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=0)
    assert data.ended


def test_schedules_go_by_samples() -> None:
    """The learning rate is a function of the samples that were consumed before the step, and the first rate is not lost."""
    model, optimizer, data = parts()
    batch = ElasticBatch(model, optimizer, global_batch=8, micro_batch=3, schedule=lambda samples: 1 / (1 + samples))
    found = []
    for content in batch.over(data):
        before = batch.samples
        if batch.backward(loss_of(model, content)):
            assert optimizer.param_groups[0]["lr"] == 0.1 / (1 + before)
            found.append(model.weight.detach().clone())
    torch.testing.assert_close(found[-1], by_hand(schedule=lambda n: 1 / (1 + n))[-1], rtol=1e-12, atol=0)
    assert batch.samples == 2 * SIZE


def test_tokens_weigh_micro_batches() -> None:
    """With ``tokens`` a step is the mean over all tokens of the global batch, whatever micro-batch they are in."""
    model, optimizer, data = parts(epochs=1)
    batch = ElasticBatch(
        model, optimizer, global_batch=8, micro_batch=3, tokens=lambda content: int(10 * abs(content[1]).sum())
    )
    weights: list[float] = []
    tokens: list[int] = []
    for content in batch.over(data):
        weights.append(batch.weight)
        tokens.append(int(10 * abs(content[1]).sum()))
        if batch.backward(loss_of(model, content)):
            assert weights == [one / sum(tokens) for one in tokens]
            weights, tokens = [], []


def test_a_loop_that_begins_draws_no_random_numbers() -> None:
    """A loader draws a seed for its processes; dropout after a restart is all the same what it would have been without one."""
    model, optimizer, data = parts()
    batch = ElasticBatch(model, optimizer, global_batch=8, micro_batch=4)
    before = torch.get_rng_state()
    next(iter(batch.over(DataLoader(data, batch_size=None, num_workers=1, multiprocessing_context="fork"))))
    assert torch.equal(torch.get_rng_state(), before)
    assert "initial_lr" not in optimizer.param_groups[0]


def test_indices_say_which_samples_a_micro_batch_has() -> None:
    """Scripts that write down what they train on have it from here, drawn by loader processes or not."""
    model, optimizer, data = parts(epochs=1)
    batch = ElasticBatch(model, optimizer, global_batch=8, micro_batch=3)
    assert batch.indices == []
    found = []
    for content in batch.over(DataLoader(data, batch_size=None, num_workers=2, multiprocessing_context="fork")):
        assert torch.equal(content[0], X[batch.indices])
        found += batch.indices
        batch.backward(loss_of(model, content))
    assert found == list(Order(SIZE, 5, 0).indices(0, SIZE))


def test_a_step_that_the_scaler_skips_consumes_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    """Its samples are not trained on again, and a person can read which they are."""
    model, optimizer, data = parts(epochs=1)
    model.float()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    batch = ElasticBatch(model, optimizer, global_batch=8, micro_batch=8, scaler=scaler)
    before = model.weight.detach().clone()
    with caplog.at_level(logging.WARNING, "dlrover.torch"):
        for number, (x, y) in enumerate(batch.over(data)):
            loss = loss_of(model, (x.float(), y.float()))
            assert batch.backward(loss * float("inf") if number == 0 else loss)
            assert torch.equal(model.weight, before) == (number == 0)
            assert data.place[1:3] == ((0, 8), (0, 16), (1, 0))[number]
    assert batch.skipped == 1
    assert "positions [0, 8) of epoch 0 count as consumed" in caplog.text


def test_a_loop_that_leaves_a_micro_batch_out_is_stopped() -> None:
    """Other ranks would wait for its gradients; and no micro-batch counts twice."""
    model, optimizer, data = parts()
    batch = ElasticBatch(model, optimizer, global_batch=8, micro_batch=4)
    with pytest.raises(CoreError, match=r"did not go through ElasticBatch\.backward"):
        for _content in batch.over(data):
            pass
    content = next(iter(batch.over(data)))
    assert not batch.backward(loss_of(model, content))
    with pytest.raises(CoreError, match="called once for each micro-batch"):
        batch.backward(loss_of(model, content))
    assert data.place[1:3] == (0, 0)


def test_a_loop_that_is_left_within_a_step_leaves_the_model_synchronising(tmp_path: Path) -> None:
    """By ``break``: a loop of one's own after it has synchronised gradients; a loop begun since keeps its own."""
    model, optimizer, data = parts()
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        ddp = nn.parallel.DistributedDataParallel(model)
        batch = ElasticBatch(ddp, optimizer, global_batch=8, micro_batch=4)
        for _content in batch.over(data):
            assert not ddp.require_backward_grad_sync
            break
        assert ddp.require_backward_grad_sync
        earlier, later = batch.over(data), batch.over(data)
        next(earlier)
        next(later)
        del earlier
        assert not ddp.require_backward_grad_sync
        del later, batch, ddp
    finally:
        torch.distributed.destroy_process_group()


def test_a_position_that_changes_within_the_loop_is_told() -> None:
    """By a restore, or by a script that counts steps too: the loader would go on elsewhere than the position."""
    model, optimizer, data = parts()
    batch = ElasticBatch(model, optimizer, global_batch=8, micro_batch=8)
    loop = iter(batch.over(data))
    batch.backward(loss_of(model, next(loop)))
    data.step()
    with pytest.raises(CoreError, match=r"at \(0, 16\), not at \(0, 8\)"):
        next(loop)


def test_what_cannot_be_right_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """By field, value and remedy: loaders that change the micro-batches, losses, clips, ranks that do not meet."""
    model, optimizer, data = parts()
    batch = ElasticBatch(model, optimizer, global_batch=8, micro_batch=4)
    for loader, told in (
        (DataLoader(data, batch_size=2), "batch_size: 2: .*give batch_size=None"),
        (DataLoader([1, 2]), "loader: a DataLoader over an ElasticDataset, got DataLoader over list"),  # type: ignore[arg-type]
        ([1, 2], "loader: a DataLoader over an ElasticDataset, got list over NoneType"),
        (DataLoader(data, batch_size=None, in_order=False), "in_order: False"),
    ):
        with pytest.raises(SpecError, match=told):
            next(iter(batch.over(loader)))
    x, _y = next(iter(batch.over(data)))
    with pytest.raises(SpecError, match=r"loss: of shape \[4\]: give the mean"):
        batch.backward(model(x).squeeze(1))
    with pytest.raises(SpecError, match="clip: 0: give"):
        ElasticBatch(model, optimizer, global_batch=8, micro_batch=4, clip=0)
    with pytest.raises(SpecError, match=r"model: a torch\.nn\.Module, got list"):
        ElasticBatch([model], optimizer, global_batch=8, micro_batch=4)  # type: ignore[arg-type]
    for more, told in (
        ({"quota": "fast"}, "quota: 'fast': give"),
        ({"equal_rounds": True}, 'quota: "measured", and all'),
    ):
        with pytest.raises(SpecError, match=told):
            ElasticBatch(model, optimizer, global_batch=8, micro_batch=4, **{"quota": "measured", **more})
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SpecError, match=r"group: torch\.distributed is not initialized, and WORLD_SIZE is 2"):
        ElasticBatch(model, optimizer, global_batch=8, micro_batch=4)


@pytest.mark.parametrize(
    ("field", "there", "told"),
    [
        (1, 21, "size: 22 on rank 0 and 21 on rank 1"),
        (0, "test", "name: 'train' on rank 0 and 'test' on rank 1"),
        (5, 16, "global_batch: 8 on rank 0 and 16 on rank 1"),
        (8, True, "equal_rounds: False on rank 0 and True on rank 1"),
        (7, (0, 8), r"position: \(0, 0\) on rank 0 and \(0, 8\) on rank 1.*give the dataset to FlashCheckpoint"),
    ],
)
def test_ranks_that_have_unlike_data_are_named(
    monkeypatch: pytest.MonkeyPatch, field: int, there: Any, told: str
) -> None:
    """Before anything is drawn, on all ranks alike."""
    model, optimizer, data = parts()
    batch = ElasticBatch(model, optimizer, global_batch=8, micro_batch=4)

    def two(mine: tuple[Any, ...], _world: int, _group: Any) -> list[tuple[Any, ...]]:
        return [mine, (*mine[:field], there, *mine[field + 1 :])]

    monkeypatch.setattr("dlrover_adapters.torch.data.world.gathered", two)
    with pytest.raises(SpecError, match=told):
        next(iter(batch.over(data)))


# ---- with a checkpoint


def trains(folder: Path, steps: int, found: list[list[int]], **more: Any) -> FlashCheckpoint:
    """A script that saves each step to storage, and goes on where it is; which samples its steps had."""
    model, optimizer, data = parts()
    batch = ElasticBatch(model, optimizer, global_batch=8, micro_batch=3)
    with FlashCheckpoint(
        f"file://{folder}", model=model, optimizer=optimizer, every=1, store_every=1, **more or {"data": data}
    ) as ckpt:
        step = ckpt.restore()
        mine: list[int] = []
        for content in batch.over(DataLoader(data, batch_size=None, num_workers=1, multiprocessing_context="fork")):
            mine += batch.indices
            if batch.backward(loss_of(model, content)):
                found.append(mine)
                mine = []
                step += 1
                ckpt.save(step)
                if step >= steps:
                    break
    return ckpt


def test_a_script_that_starts_again_goes_on_with_the_next_sample(tmp_path: Path) -> None:
    """The position is saved with the state, by a loader that has drawn further; three lives together train each sample once."""
    found: list[list[int]] = []
    for steps in (2, 3, 9):
        trains(tmp_path, steps, found)
    assert [index for step in found for index in step] == [
        index for epoch in range(2) for index in Order(SIZE, 5, epoch).indices(0, SIZE)
    ]
    assert len(found) == 6


def test_a_step_saved_again_by_hand_has_the_position_of_then(tmp_path: Path) -> None:
    """A position that moved since the step was saved makes it another state, as a moved weight does."""
    model, optimizer, data = parts(global_batch=8, last="drop")
    with FlashCheckpoint(
        f"file://{tmp_path}", model=model, optimizer=optimizer, data=data, every=1, store_every=0
    ) as ckpt:
        data.step()
        ckpt.step(1)
        assert ckpt.save(1, to_storage=False)
        saves = ckpt.stats.saves
        data.step()
        assert ckpt.save(1)
        ckpt.wait()
        assert (saves, ckpt.stats.saves) == (1, 2)
    _model, _optimizer, other = parts(global_batch=8, last="drop")
    with FlashCheckpoint(f"file://{tmp_path}", model=model, optimizer=optimizer, data=other, every=1) as ckpt:
        assert ckpt.restore() == 1
        assert other.place == data.place


def test_a_checkpoint_without_a_position_is_told_and_restores_nothing(tmp_path: Path) -> None:
    """Data that is given to a checkpoint that was saved without does not begin anew in silence; and `begin` is the way out."""
    model, optimizer, _data = parts()
    with FlashCheckpoint(f"file://{tmp_path}", model=model, optimizer=optimizer, every=1, store_every=1) as ckpt:
        ckpt.save(7)
    with pytest.raises(SpecError, match="data: the checkpoint has no position of dataset 'train'"):
        trains(tmp_path, 9, [])
    model, optimizer, data = parts()
    data.begin(position=16)
    with FlashCheckpoint(f"file://{tmp_path}", model=model, optimizer=optimizer, data=[data], every=1) as ckpt:
        assert ckpt.restore() == 7
        assert data.place[1:3] == (0, 16)


def test_a_checkpoint_of_other_data_is_refused_and_one_with_more_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Another seed is another order; a dataset that nothing asks for any more is a word in the log."""
    model, optimizer, data = parts()
    val = ElasticDataset("val", size=3, fetch=sample)
    with FlashCheckpoint(
        f"file://{tmp_path}", model=model, optimizer=optimizer, data={"a": data, "b": val}, every=1, store_every=1
    ) as ckpt:
        ckpt.save(7)
    for given, told in (
        (
            {"data": parts(seed=6)[2]},
            "in dataset 'train' with 'size=22 seed=5 order=shuffled', and it has 'size=22 seed=6",
        ),
        ({"data": [val, ElasticDataset("test", size=3, fetch=sample)]}, "no position of dataset 'test'"),
    ):
        with (
            pytest.raises(SpecError, match=told),
            FlashCheckpoint(f"file://{tmp_path}", model=model, optimizer=optimizer, every=1, **given) as ckpt,
        ):
            ckpt.restore()
    for given, told in (
        ({"data": val}, "has a position in 'train', which no dataset"),
        ({}, "which nothing here asks for"),
    ):
        caplog.clear()
        with FlashCheckpoint(f"file://{tmp_path}", model=model, optimizer=optimizer, every=1, **given) as ckpt:
            assert ckpt.restore() == 7
        assert told in caplog.text


def test_data_that_is_no_elastic_dataset_and_two_of_one_name_are_refused() -> None:
    """Where the checkpoint is made."""
    model, _optimizer, data = parts()
    with pytest.raises(SpecError, match="data: an ElasticDataset, got DataLoader"):
        FlashCheckpoint("", model=model, data=DataLoader(data, batch_size=None))
    with pytest.raises(SpecError, match="'train' is there twice"):
        FlashCheckpoint("", model=model, data=[data, parts()[2]])


def test_how_many_samples_a_step_has_is_registered_once_the_loop_divides_them() -> None:
    """The checkpoint is opened, and restored, before the loop says so; then what is new is told, once."""
    model, optimizer, data = parts(epochs=1)
    told: list[int] = []
    source = DataSource({("data",): data})
    vault: Any = SimpleNamespace(dataset=lambda terms: told.append(terms[6]))
    source.register(vault)
    batch = ElasticBatch(model, optimizer, global_batch=8, micro_batch=8)
    for content in batch.over(data):
        batch.backward(loss_of(model, content))
        source.register(vault)
    assert told == [0, 8]


class Sequel(list[int]):
    """A source whose samples may have to come first."""

    waits = True

    def fingerprint_at(self, size: int) -> str:
        """Whatever its size."""
        return f"sequel:{size > 0}"


@pytest.mark.parametrize("waits", [True, False])
def test_the_wait_for_a_streams_loader_is_announced(monkeypatch: pytest.MonkeyPatch, waits: bool) -> None:
    """What loader processes wait for, the worker's agent sees as a phase; other sources have none."""
    monkeypatch.setattr(Sequel, "waits", waits)
    named: list[str] = []

    @contextlib.contextmanager
    def phase(name: str) -> Iterator[None]:
        named.append(name)
        yield

    monkeypatch.setattr("dlrover_adapters.torch.steps.phase", phase)
    model, optimizer, _ = parts()
    data = ElasticDataset.of("train", mixed_of([Sequel(range(SIZE))], [1.0], seed=1))
    batch = ElasticBatch(model, optimizer, global_batch=SIZE, micro_batch=SIZE // 2)
    for content in batch.over(DataLoader(data, batch_size=None)):
        batch.backward(model(content.double().unsqueeze(1).expand(-1, 3)).mean())
    assert named == (["waiting for data"] * 2 if waits else [])
