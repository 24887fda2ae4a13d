"""What a worker has in work of its data: notes that outlive it, and the words that an exception leaves with."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from dlrover_adapters.agent.slot import StepSlot, blank
from dlrover_adapters.torch import ElasticBatch, ElasticDataset, steps
from dlrover_adapters.torch.slot import Slot
from dlrover_core.data import in_work
from dlrover_core.data.cut import Place
from dlrover_core.data.in_work import InWork, Notes, found
from dlrover_core.data.poison import VARIABLE, Spot, told
from dlrover_core.errors import SpecError

SIZE, BATCH, MICRO, BAD = 24, 8, 4, 13


def sample(index: int) -> torch.Tensor:
    """All are well but one."""
    if index == BAD:
        raise ValueError("bad sample")
    return torch.full((2,), float(index))


def good(index: int) -> torch.Tensor:
    """All are well."""
    return torch.full((2,), float(index))


@pytest.fixture
def slot(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[StepSlot]:
    """This process is a worker whose agent looks into the slot."""
    made = StepSlot()
    monkeypatch.setattr(steps, "_signal", steps.StepSignal(1, 0, str(tmp_path / "nobody"), made.fd))
    yield made
    made.close()


def train(data: ElasticDataset, **more: Any) -> list[int]:
    """One run over the data; the indices that entered steps."""
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    batch = ElasticBatch(model, torch.optim.SGD(model.parameters(), lr=1e-3), global_batch=BATCH, micro_batch=MICRO)
    trained: list[int] = []
    for x in batch.over(DataLoader(data, batch_size=None, **more)):
        trained += batch.indices if batch.weight else []
        batch.backward(model(x).square().mean())
    return trained


@pytest.mark.parametrize("more", [{}, {"num_workers": 2}, {"num_workers": 1, "multiprocessing_context": "spawn"}])
def test_an_exception_in_a_fetch_names_its_sample(slot: StepSlot, more: dict[str, Any]) -> None:
    """The exception keeps its type; it, and the note for the agent, name dataset, epoch and index. In loader processes, too."""
    data = ElasticDataset("train", size=SIZE, fetch=sample, global_batch=BATCH, seed=3)
    with pytest.raises(ValueError, match="bad sample") as caught:
        train(data, **more)
    position = data._order_of(0).position(BAD)
    said = f"index {BAD} of dataset 'train' (epoch 0, position {position})"
    notes = getattr(caught.value, "__notes__", [])
    assert said in str(caught.value) or any(said in one for one in notes) or not hasattr(caught.value, "add_note")
    assert slot.in_work(f"ValueError: {caught.value}") == InWork("train", 0, position, position + 1, BAD, 8, True).text


def test_nobody_need_watch() -> None:
    """Under plain Python the exception says the same."""
    with pytest.raises(ValueError, match="bad sample") as caught:
        train(ElasticDataset("train", size=SIZE, fetch=sample, global_batch=BATCH))
    assert any("of dataset 'train'" in one for one in getattr(caught.value, "__notes__", ["of dataset 'train'"]))


def test_a_micro_batch_is_in_work_until_its_backward_has_returned(slot: StepSlot) -> None:
    """Between two micro-batches, and after a step, a death is none of theirs."""
    data = ElasticDataset("train", size=SIZE, fetch=good, order="file")
    model = torch.nn.Linear(2, 1)
    batch = ElasticBatch(model, torch.optim.SGD(model.parameters(), lr=1e-3), global_batch=BATCH, micro_batch=MICRO)
    loop = batch.over(data)
    x = next(loop)
    assert slot.in_work("") == InWork("train", 0, 0, 4, -1, 8, False).text
    batch.backward(model(x).square().mean())
    assert slot.in_work("") == ""
    next(loop)
    assert slot.in_work("") == InWork("train", 0, 4, 8, -1, 8, False).text


def test_a_loop_of_its_own_names_its_share_of_the_step(slot: StepSlot) -> None:
    """It cannot say which micro-batch is in work, as it may have drawn others ahead."""
    data = ElasticDataset("train", size=SIZE, fetch=good, order="file", global_batch=BATCH, micro_batch=MICRO)
    drawn = iter(data)
    next(drawn)
    assert slot.in_work("") == InWork("train", 0, 0, 8, -1, 8, False).text
    next(drawn)
    data.step()
    assert slot.in_work("") == ""


def test_a_loader_process_counts_if_the_error_names_it() -> None:
    """Of a killed loader process torch says its number to the system, of one that raised its own."""
    page = mmap.mmap(-1, 4096)
    blank_page = os.memfd_create("page")
    os.ftruncate(blank_page, 4096)
    blank(blank_page)
    os.close(blank_page)
    notes = Notes(page, 1234)
    loader = notes.of_loader(1, os.getpid())
    assert loader is not None
    assert notes.of_loader(11, 1) is not None
    assert notes.of_loader(12, 1) is None, "it would write over the notes of loader 0"
    loader.fetch(InWork("train", 0, 5, 6, 17, 8, True))
    notes.step(InWork("train", 0, 0, 4, -1, 8, False))
    killed = f"RuntimeError: DataLoader worker (pid {os.getpid()}) is killed by signal: Killed. "
    assert found(page, killed) == InWork("train", 0, 5, 6, 17, 8, True)
    assert found(page, f"RuntimeError: DataLoader worker (pid(s) {os.getpid()}, 1) exited unexpectedly") is not None
    assert found(page, "RuntimeError: DataLoader worker (pid 1) is killed by signal: Killed.") is None
    assert found(page, "Caught ValueError in DataLoader worker process 1.") is None
    loader.failed()
    assert found(page, "Caught ValueError in DataLoader worker process 1.") is not None
    assert found(page, "Caught ValueError in DataLoader worker process 0.") is None
    assert found(page, "") == InWork("train", 0, 0, 4, -1, 8, False)


def test_what_a_broken_worker_writes_is_nothing() -> None:
    """The page is memory of a process that has just crashed."""
    page = mmap.mmap(-1, 4096)
    Notes(page, 1234).step(InWork("train", 0, 0, 4, -1, 8, False))
    page[in_work.NOTES_AT + 24 : in_work.NOTES_AT + 64] = b"\xff" * 40
    assert found(page, "") is None
    page[:] = b"\xff" * 4096
    assert found(page, "DataLoader worker (pid(s) 1, 2) exited") is None
    assert found(page, "") is None


def test_names_without_room_say_nothing() -> None:
    """The page has room for so many names; a dataset of another one is not mistaken for these."""
    page = mmap.mmap(-1, 4096)
    notes = Notes(page, 1234)
    names = [f"{number}{'x' * 120}" for number in range(5)]
    seen = []
    for name in names:
        notes.step(InWork(name, 0, 0, 1, 3, 8, False))
        work = found(page, "")
        seen.append(work.dataset if work is not None else "")
    assert seen == [*names[:4], ""]


# ---- what is left out


def told_of(monkeypatch: pytest.MonkeyPatch, *spots: Spot) -> None:
    """This process's agent has told it so."""
    monkeypatch.setenv(VARIABLE, told(spots, 1))


@pytest.mark.parametrize("more", [{}, {"num_workers": 2}])
def test_what_is_quarantined_is_left_out_and_counted(monkeypatch: pytest.MonkeyPatch, more: dict[str, Any]) -> None:
    """All others are trained once in each epoch; the cut says how often the sample was left out, and names it."""
    told_of(monkeypatch, Spot("train", 1, BAD), Spot("other", 1, 4))
    data = ElasticDataset("train", size=SIZE, fetch=sample, epochs=2, seed=3)
    assert sorted(train(data, **more)) == sorted([one for one in range(SIZE) if one != BAD] * 2)
    assert data.left_out == (BAD,)
    assert data.places == (data.place, Place(f"train/quarantined/{BAD}", 0, 2))


def test_the_mean_is_over_the_samples_that_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch without a sample has the gradient of its others' mean loss."""
    told_of(monkeypatch, Spot("train", 1, 2))
    data = ElasticDataset("train", size=8, fetch=good, order="file")
    model = torch.nn.Linear(2, 1)
    batch = ElasticBatch(model, torch.optim.SGD(model.parameters(), lr=1e-3), global_batch=8, micro_batch=4)
    weights = []
    for x in batch.over(data):
        weights.append((len(x), batch.weight))
        batch.backward(model(x).square().mean())
    assert weights == [(3, 3 / 7), (4, 4 / 7)]


def test_a_micro_batch_of_which_nothing_is_left_is_stood_in_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A healthy sample of weight zero takes its place, as other ranks may wait in a collective."""
    told_of(monkeypatch, *(Spot("train", 1, one) for one in range(4)))
    data = ElasticDataset("train", size=8, fetch=good, order="file")
    assert train(data) == [4, 5, 6, 7]


@pytest.mark.parametrize("tokens", [None, len])
def test_a_batch_of_which_nothing_is_left_makes_no_step(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tokens: Any
) -> None:
    """Its samples are consumed; neither momentum nor weight decay moves the model, and a warning names the positions."""
    told_of(monkeypatch, *(Spot("train", 1, one) for one in range(4, 8)))
    data = ElasticDataset("train", size=12, fetch=good, order="file")
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=0.1)
    batch = ElasticBatch(model, optimizer, global_batch=4, micro_batch=2, tokens=tokens)
    moved, places = [], []
    for x in batch.over(data):
        before = model.weight.detach().clone()
        if batch.backward(model(x).square().mean()):
            moved.append(not torch.equal(model.weight, before))
            places.append(data.place[1:3])
    assert (moved, places) == ([True, False, True], [(0, 4), (0, 8), (1, 0)])
    assert "positions [4, 8) of epoch 0 count as consumed, and the optimizer makes no step" in caplog.text
    assert {one.dataset for one in data.places} == {"train", *(f"train/quarantined/{one}" for one in range(4, 8))}


def test_a_loop_of_its_own_cannot_leave_a_micro_batch_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told what to do."""
    told_of(monkeypatch, Spot("train", 1, 0))
    data = ElasticDataset("train", size=8, fetch=good, order="file", global_batch=4, micro_batch=1)
    with pytest.raises(SpecError, match="micro_batch: all samples of a micro-batch of dataset 'train' are quarantined"):
        next(iter(data))


def test_a_suspected_range_divides_the_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """At its ends and its middle, so that the next failure tells which half it is; each sample is trained once all the same."""
    told_of(monkeypatch, Spot("train", 1, -1, 0, 8, 12))
    data = ElasticDataset("train", size=SIZE, fetch=good, order="file")
    assert train(data) == list(range(SIZE))
    micros = [[(one.start, one.end) for one in step.micros] for step in _again(data)]
    assert micros == [[(0, 4), (4, 8)], [(8, 10), (10, 12), (12, 16)], [(16, 20), (20, 24)]]


def _again(data: ElasticDataset) -> list[Any]:
    data.begin()
    return list(data.steps())


def test_a_restored_cut_says_what_was_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A later run, whose agents know nothing of it, leaves the sample out, too."""
    data = ElasticDataset("train", size=SIZE, fetch=sample, epochs=2, seed=3)
    places = {
        one.dataset: one
        for one in (Place("train", 1, 0, data.place.fingerprint), Place(f"train/quarantined/{BAD}", 0, 1))
    }
    assert all(data.owns(one) for one in places)
    assert not data.owns("train/quarantined/x")
    assert data.accept_places(places) == ""
    data.go_on_places(places)
    assert sorted(train(data)) == [one for one in range(SIZE) if one != BAD]
    assert data.places[1].position == 2


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"poison": "skip"}, "poison: 'skip' of dataset 'train': give \"quarantine\" or \"fail\""),
        ({"quarantine_max": 0}, "quarantine_max: 0 of dataset 'train': give 1 to 32 samples"),
        ({"name": "a/quarantined/3"}, "is how a sample of another dataset is called"),
    ],
)
def test_what_cannot_be_right_is_refused(more: dict[str, Any], message: str) -> None:
    """With field, value and remedy."""
    with pytest.raises(SpecError) as caught:
        ElasticDataset(**{"name": "train", "size": 8, "fetch": good, **more})
    assert message in str(caught.value)


def test_a_spawned_loader_process_has_its_workers_page(slot: StepSlot) -> None:
    """So what it waits for is known to the agent, which would take the worker for hanging otherwise."""
    assert isinstance(steps._signal, steps.StepSignal)
    assert isinstance(steps._signal.slot, Slot)
    data = ElasticDataset("train", size=8, fetch=_waits, global_batch=8, micro_batch=8)
    before = slot.pulse(0, 10**15).idle_us
    next(iter(DataLoader(data, batch_size=None, num_workers=1, multiprocessing_context="spawn")))
    assert slot.pulse(0, 10**15).idle_us < before


def _waits(index: int) -> torch.Tensor:
    with steps.waiting("for a message"):
        return good(index)
