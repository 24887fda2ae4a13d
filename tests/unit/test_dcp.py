"""torch.distributed.checkpoint's hooks under an agent: states beyond their process, saves at once, ranks that read alike."""

from __future__ import annotations

import logging
import pickle
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from tests.unit.shelving import Agent, running
from torch.distributed import HashStore
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.storage import WriteResult

from dlrover_adapters.checkpoint.parts import write_part
from dlrover_adapters.checkpoint.places import Place
from dlrover_adapters.checkpoint.seal import seal
from dlrover_adapters.torch.checkpoint import staged
from dlrover_adapters.torch.checkpoint.dcp import FlashStager, FlashStorageReader, FlashStorageWriter
from dlrover_adapters.torch.checkpoint.meeting import Meeting
from dlrover_adapters.torch.checkpoint.remembered import Remembered
from dlrover_adapters.torch.checkpoint.shelf import TOLD_S, WAIT_S
from dlrover_adapters.torch.checkpoint.vault import Vault, VaultGone
from dlrover_core.errors import CoreError, SpecError

# torch's own: what it says about a single process, and about its older calls.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
BOUND_S = 60.0
BESIDE_S = 0.3
"""For this long it is seen that something does not happen."""


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> Iterator[Agent]:
    """This process runs under it."""
    with running(monkeypatch) as one:
        yield one


def state(step: int) -> dict[str, Any]:
    """Of a step."""
    return {"w": torch.full((300, 7), float(step)), "deep": {"b": torch.arange(5) + step}, "note": f"step {step}"}


def saved(url: Path, *steps: int) -> None:
    """By a worker that is gone afterwards."""
    writer = FlashStorageWriter(str(url), keep=3)
    for step in steps:
        dcp.save(state(step), checkpoint_id=step, storage_writer=writer)
    writer.close()


def loaded(url: Path, step: int | None = None) -> tuple[int | None, str]:
    """By another worker, and compared: which step, and from where."""
    reader, found = FlashStorageReader(str(url)), state(0)
    dcp.load(found, checkpoint_id=step, storage_reader=reader)
    assert reader.step is not None
    wanted = state(reader.step)
    assert torch.equal(found["w"], wanted["w"])
    assert torch.equal(found["deep"]["b"], wanted["deep"]["b"])
    assert found["note"] == wanted["note"]
    return reader.step, reader.tier


def test_what_a_worker_saved_its_successor_loads_from_memory(agent: Agent, tmp_path: Path) -> None:
    """Memory outlives the worker: the newest step is loaded from it, and an older one by its number, with storage untouched."""
    saved(tmp_path / "ckpts", 10, 20, 30)
    agent.hash()
    assert loaded(tmp_path / "ckpts") == (30, "memory")
    assert loaded(tmp_path / "ckpts", 20) == (20, "memory")
    assert not (tmp_path / "ckpts").exists()
    assert agent.due == [(10, True), (20, True), (30, True)]
    assert [(one.url, one.keep, one.format) for one in agent.kept] == [(str(tmp_path / "ckpts"), 3, "dcp")]


def test_the_next_generation_saves_into_the_same_memory(agent: Agent, tmp_path: Path) -> None:
    """A new worker with the same state takes its predecessor's memory over, and what is in it stays until it is the oldest."""
    saved(tmp_path, 10, 20)
    agent.generation = 2
    saved(tmp_path, 15)
    assert len(agent.arenas) == 1
    agent.hash()
    assert loaded(tmp_path) == (15, "memory"), "the newer generation is the newer state"


def test_damage_in_memory_falls_to_what_is_older(agent: Agent, tmp_path: Path) -> None:
    """One flipped bit in memory: that step is passed over for the one before; with all damaged storage is read."""
    saved(tmp_path, 10, 20)
    agent.hash()
    views = {view.stamp.step: view for _, _, view in agent.views()}
    write_part(views[10], Place(str(tmp_path)), run="run")
    seal(Place(str(tmp_path)), 10, [0])
    for step, found in ((20, (10, "memory")), (10, (10, "storage"))):
        view = views[step]
        at = view.control.geometry.data_at(view.slot) + 100
        view.memory[at : at + 1] = bytes([view.memory[at] ^ 1])
        assert loaded(tmp_path) == found


def test_what_the_saver_writes_is_torchs_own(agent: Agent, tmp_path: Path) -> None:
    """The slot of a planned state, written and sealed as the agent does, is loaded by torch's own reader, nested as it was."""
    saved(tmp_path, 10)
    (_, _, view) = next(agent.views())
    write_part(view, Place(str(tmp_path)), run="run")
    seal(Place(str(tmp_path)), 10, [0])
    found = state(0)
    dcp.load(found, storage_reader=dcp.FileSystemReader(tmp_path / "step-0000000010"))
    assert torch.equal(found["deep"]["b"], state(10)["deep"]["b"])
    assert found["note"] == "step 10"


def stored(agent: Agent, url: Path, step: int) -> None:
    """By the saver, and sealed."""
    view = next(view for _, _, view in agent.views() if view.stamp.step == step)
    write_part(view, Place(str(url)), run="run")
    seal(Place(str(url)), step, [0])


# ---- who may run code


class Evil:
    """Runs code where it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self.mark,)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an agent: storage only."""
    monkeypatch.setattr(Vault, "here", classmethod(lambda _cls: False))


@pytest.mark.usefixtures("alone")
def test_objects_on_storage_run_no_code(tmp_path: Path) -> None:
    """Torch's planner unpickles what it gets: from storage that is nothing that could run code, unless somebody says so."""
    writer, mark = FlashStorageWriter(str(tmp_path / "ckpts")), tmp_path / "ran"
    dcp.save({"w": torch.ones(3), "evil": Evil(mark)}, checkpoint_id=1, storage_writer=writer)
    writer.close()
    with pytest.raises(
        CheckpointException, match=r"evil is not of a kind .* FlashStorageReader\(\.\.\., trusted=True\)"
    ):
        dcp.load({"w": torch.zeros(3), "evil": 0}, storage_reader=FlashStorageReader(str(tmp_path / "ckpts")))
    assert not mark.exists()
    trusting = FlashStorageReader(str(tmp_path / "ckpts"), trusted=True)
    dcp.load({"w": torch.zeros(3), "evil": 0}, storage_reader=trusting)
    assert mark.exists()


@pytest.mark.usefixtures("alone")
def test_usual_objects_need_no_trust(tmp_path: Path) -> None:
    """Plain Python, numpy's arrays and small tensors come back as they were."""
    numpy = pytest.importorskip("numpy")
    kept = {"note": "x", "row": [1, 2.5, None], "array": numpy.arange(3), "pair": (1, torch.ones(2))}
    writer, found = FlashStorageWriter(str(tmp_path)), dict.fromkeys(kept)
    dcp.save(dict(kept), checkpoint_id=1, storage_writer=writer)
    writer.close()
    dcp.load(found, storage_reader=FlashStorageReader(str(tmp_path)))
    assert (found["note"], found["row"], found["array"].tolist()) == ("x", [1, 2.5, None], [0, 1, 2])  # type: ignore[union-attr]
    assert found["pair"][1].tolist() == [1, 1]  # type: ignore[index]


# ---- saves at once


@pytest.mark.parametrize("where", ["memory", "storage"])
def test_two_saves_at_once_are_two_states(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """A second asynchronous save that begins before the first is over waits for it, and both are whole, under their numbers."""
    if where == "memory":
        request.getfixturevalue("agent")
    else:
        monkeypatch.setattr(Vault, "here", classmethod(lambda _cls: False))
    writer, stager, beside = FlashStorageWriter(str(tmp_path)), FlashStager(), threading.Event()
    later: list[Any] = []

    class Planner(dcp.DefaultSavePlanner):
        def create_local_plan(self) -> Any:
            if not later:
                later.append(async_save(20))
                beside.wait(BESIDE_S)  # in vain
            else:
                beside.set()
            return super().create_local_plan()

    planner = Planner()  # one for both, as it may be given

    def async_save(step: int) -> Any:
        return dcp.async_save(
            state(step), checkpoint_id=f"step-{step}", storage_writer=writer, async_stager=stager, planner=planner
        )

    async_save(10).result(timeout=BOUND_S)
    later[0].result(timeout=BOUND_S)
    writer.close()
    if where == "memory":
        for step in (10, 20):
            request.getfixturevalue("agent").hash()
            assert loaded(tmp_path, step) == (step, "memory")
    else:
        for step in (10, 20):
            assert loaded(tmp_path, step) == (step, "storage")


@pytest.mark.parametrize("second", ["asynchronous", "not"])
def test_saves_keep_the_order_in_which_they_were_begun(
    agent: Agent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, second: str
) -> None:
    """A thread of torch's that gets to its save late is waited for by what was begun after it: so it is alike on all ranks."""
    from torch.distributed.checkpoint import _async_thread_executor as executor

    writer, planned, beside, save = FlashStorageWriter(str(tmp_path)), [], threading.Event(), executor.save_wrapper

    class Planner(dcp.DefaultSavePlanner):
        def create_local_plan(self) -> Any:
            planned.append(self.step)
            beside.set()
            return super().create_local_plan()

    def saving(*what: Any, checkpoint_id: Any, **how: Any) -> Any:
        if checkpoint_id == 10:
            beside.wait(BESIDE_S)  # in vain
        return save(*what, checkpoint_id=checkpoint_id, **how)

    def planner(step: int) -> Any:
        found = Planner()
        found.step = step  # type: ignore[attr-defined]
        return found

    monkeypatch.setattr(executor, "save_wrapper", saving)
    first: Any = dcp.async_save(state(10), checkpoint_id=10, storage_writer=writer, planner=planner(10))
    if second == "asynchronous":
        later: Any = dcp.async_save(state(20), checkpoint_id=20, storage_writer=writer, planner=planner(20))
        later.result(timeout=BOUND_S)
    else:
        dcp.save(state(20), checkpoint_id=20, storage_writer=writer, planner=planner(20))
    first.result(timeout=BOUND_S)
    writer.close()
    assert planned == [10, 20]


def test_a_save_that_fails_keeps_no_other_waiting(agent: Agent, tmp_path: Path) -> None:
    """Neither the main thread's own save before, nor one that failed in planning, is waited for."""
    writer = FlashStorageWriter(str(tmp_path))
    dcp.save(state(1), checkpoint_id=1, storage_writer=writer)

    class Planner(dcp.DefaultSavePlanner):
        def create_local_plan(self) -> Any:
            raise ValueError("no plan")

    with pytest.raises(CheckpointException, match="no plan"):
        dcp.save(state(2), checkpoint_id=2, storage_writer=writer, planner=Planner())
    saves: Any = dcp.async_save(state(3), checkpoint_id=3, storage_writer=writer)
    saves.result(timeout=BOUND_S)
    writer.close()
    agent.hash()
    assert loaded(tmp_path) == (3, "memory")


def test_ranks_that_save_different_steps_are_told(tmp_path: Path) -> None:
    """What torch took for one save, and was two, is no checkpoint: an error on all ranks, with both numbers."""
    writer = FlashStorageWriter(str(tmp_path))
    results = [[WriteResult(MetadataIndex("w"), 4, step)] for step in (10, 10, 20)]
    with pytest.raises(CoreError, match="rank 1 step 10, rank 2 step 20; wait for the future"):
        writer.finish(Metadata({}), results)


def test_a_save_without_a_number_has_not_the_one_before(agent: Agent, tmp_path: Path) -> None:
    """Where torch is given no id it does not say that a new save begins: refused, and what was saved stays."""
    writer = FlashStorageWriter(str(tmp_path))
    dcp.save(state(10), checkpoint_id=10, storage_writer=writer)
    with pytest.raises((CheckpointException, SpecError), match="checkpoint_id"):
        dcp.save(state(11), storage_writer=writer)
    writer.close()
    agent.hash()
    assert loaded(tmp_path) == (10, "memory")


def test_a_writer_goes_to_another_process() -> None:
    """Torch's executor in a process of its own takes the writer along."""
    writer = pickle.loads(pickle.dumps(FlashStorageWriter("file:///ckpts", keep=2)))  # noqa: S301
    assert (writer.url, writer.keep) == ("file:///ckpts", 2)
    writer.reset("step-3")


def test_a_stager_touches_nothing_that_is_still_read() -> None:
    """Two staged states are whole while a third one waits for the memory of the first, which it then takes; or it gives up."""
    now, pauses, staged = 0.0, 0, []

    def pause(_seconds: float) -> None:
        nonlocal now, pauses
        now, pauses = now + TOLD_S, pauses + 1
        if now > TOLD_S + 1 and staged:
            staged.pop(0)

    stager = FlashStager(clock=lambda: now, pause=pause)
    staged += [stager.stage({"w": torch.full((9,), float(step))}) for step in (1, 2)]
    places = [one["w"].data_ptr() for one in staged]
    third = stager.stage({"w": torch.full((9,), 3.0)})
    assert pauses
    assert [third["w"].data_ptr(), staged[0]["w"].data_ptr()] == places
    assert staged[0]["w"].eq(2).all()
    assert third["w"].eq(3).all()
    kept, staged = staged, []
    now = 0.0
    with pytest.raises(CoreError, match="wait for the future of each save"):
        stager.stage({"w": torch.zeros(9)})
    assert now >= WAIT_S
    assert kept[0]["w"].eq(2).all()


def test_memory_of_a_save_that_failed_is_used_again() -> None:
    """What a failed save's error refers to in a circle is not in use for ever."""
    now = 0.0

    def pause(_seconds: float) -> None:
        nonlocal now
        now += TOLD_S

    stager = FlashStager(clock=lambda: now, pause=pause)
    for step in range(2):
        circle: list[Any] = [stager.stage({"w": torch.full((9,), float(step))})]
        circle.append(circle)
        del circle
    stager.stage({"w": torch.zeros(9)})
    assert now < WAIT_S


# ---- the agent


def test_an_agent_that_does_not_answer_is_told_to_all(
    agent: Agent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save fails where a rank has no line to its agent: else the others' parts would go where this one's never comes.

    The next save is made, where the agent answers again.
    """
    connect = Vault.connect

    def gone(_cls: type[Vault]) -> Vault:
        raise VaultGone("no answer to 'hello' within 300 s")

    monkeypatch.setattr(Vault, "connect", classmethod(gone))
    writer = FlashStorageWriter(str(tmp_path / "ckpts"))
    with pytest.raises(CheckpointException, match="nothing is saved on any rank"):
        dcp.save(state(10), checkpoint_id=10, storage_writer=writer)
    assert not (tmp_path / "ckpts").exists()
    monkeypatch.setattr(Vault, "connect", connect)
    dcp.save(state(20), checkpoint_id=20, storage_writer=writer)
    writer.close()
    agent.hash()
    assert loaded(tmp_path) == (20, "memory")


def test_a_line_that_failed_is_made_anew(agent: Agent, tmp_path: Path) -> None:
    """An agent that was too slow once is asked again: also a state of another layout is saved afterwards."""
    writer = FlashStorageWriter(str(tmp_path))
    dcp.save({"w": torch.zeros(3)}, checkpoint_id=1, storage_writer=writer)
    assert writer._shelf is not None
    line: Any = writer._shelf.vault
    line.gone = "no answer to 'arena' within 300 s"
    dcp.save(state(2), checkpoint_id=2, storage_writer=writer)
    assert writer._shelf.vault is not line
    writer.close()
    agent.hash()
    assert loaded(tmp_path) == (2, "memory")


# ---- ranks that read alike


def test_all_ranks_read_what_the_first_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint that is committed while ranks look for the newest is read by none of them, or by all."""
    monkeypatch.setattr(Vault, "here", classmethod(lambda _cls: False))
    saved(tmp_path, 10)
    readers = [FlashStorageReader(str(tmp_path)) for _ in range(2)]
    first, store, mine = readers[0]._newest_stored(), HashStore(), threading.local()
    saved(tmp_path, 20)
    monkeypatch.setattr(readers[0], "_newest_stored", lambda: first)
    monkeypatch.setattr(Meeting, "of_environment", classmethod(lambda cls: cls(store, mine.rank, 2, limit_s=BOUND_S)))

    def read(rank: int) -> Any:
        mine.rank = rank
        readers[rank].reset(None)
        readers[rank].read_metadata()
        return readers[rank].step, readers[rank].tier

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(read, range(2))) == [(10, "storage")] * 2


def test_different_steps_are_not_mixed(tmp_path: Path) -> None:
    """Where each rank looked for itself and found another step, nothing is read, and all are told what to do."""
    plans, reader = [], FlashStorageReader(str(tmp_path), memory=False)
    for step in (10, 10, 20):
        reader.step, reader.tier = step, "storage"
        plans.append(reader.prepare_local_plan(LoadPlan([])))
    with pytest.raises(CoreError, match=r"rank 1 step 10, rank 2 step 20; load again, and name the step"):
        reader.prepare_global_plan(plans)
    assert reader.prepare_global_plan(plans[:2]) == plans[:2]


def test_what_cannot_be_brought_is_read_from_storage(
    agent: Agent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A part that its node does not hand out: all go on from storage, loudly, where the same was saved; else they say why."""
    saved(tmp_path, 10, 20)
    agent.hash()
    stored(agent, tmp_path, 10)
    monkeypatch.setattr(Remembered, "bring", lambda *_: "the part of rank 3: VaultRefused: nobody answers")
    with caplog.at_level(logging.WARNING):
        assert loaded(tmp_path) == (10, "storage")
    assert "step 20 in memory is passed over for step 10 on storage, rank 0 says: the part of rank 3" in caplog.text
    with pytest.raises((CheckpointException, OSError, CoreError)):
        loaded(tmp_path, 20)
    other = FlashStorageWriter(str(tmp_path / "other"))
    monkeypatch.setattr(Vault, "here", classmethod(lambda _cls: False))
    dcp.save(state(30) | {"w": torch.ones(7, 300)}, checkpoint_id=30, storage_writer=other)
    monkeypatch.setattr(Vault, "here", classmethod(lambda _cls: True))
    with pytest.raises((CheckpointException, CoreError), match="memory=False"):
        dcp.load(state(0), storage_reader=FlashStorageReader(str(tmp_path / "other")))


def test_what_stagers_take_is_counted() -> None:
    """Two sets once both are made; the second one is yet to come after the first save. A stager that is gone takes nothing."""
    before = staged.beside()
    stager = FlashStager()
    first = stager.stage({"a": torch.zeros(1000), "b": [torch.zeros(10, dtype=torch.int64)]})
    assert staged.beside() == (before.total + 2 * 4080, before.to_come + 4080)
    second = stager.stage({"a": torch.zeros(1000), "b": [torch.zeros(10, dtype=torch.int64)]})
    assert staged.beside() == (before.total + 2 * 4080, before.to_come)
    del first, second
    stager.close()
    assert staged.beside() == before


def test_a_position_in_the_data_is_a_part_of_the_state(tmp_path: Path) -> None:
    """A script's own state_dict with the position of an ElasticDataset, saved by dcp.save through us, goes on exactly there."""
    from dlrover_adapters.torch import ElasticDataset
    from dlrover_adapters.torch.data.plan import division

    def dataset() -> ElasticDataset:
        made = ElasticDataset("train", size=100, fetch=torch.tensor, seed=3, epochs=2)
        made.divide(division(8, 8, 1, 0))
        return made

    data, again = dataset(), dataset()
    for _ in range(15):
        data.step()
    writer = FlashStorageWriter(str(tmp_path))
    dcp.save({"w": torch.ones(3), "data": data.state_dict()}, checkpoint_id=15, storage_writer=writer)
    writer.close()
    found = {"w": torch.zeros(3), "data": again.state_dict()}
    dcp.load(found, storage_reader=FlashStorageReader(str(tmp_path)))
    again.load_state_dict(found["data"])
    assert (again.place, again.place[1:3]) == (data.place, (1, 16))
    assert next(iter(again)).tolist() == next(iter(data)).tolist()
