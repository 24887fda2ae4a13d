"""States that come whole, in memory that an agent holds: torch.distributed.checkpoint's and Lightning's, beyond their process."""

from __future__ import annotations

import itertools
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dlrover_adapters.checkpoint.hashing import digests
from dlrover_adapters.checkpoint.parts import write_part
from dlrover_adapters.checkpoint.places import Place
from dlrover_adapters.checkpoint.seal import seal
from dlrover_adapters.checkpoint.slotview import SlotView
from dlrover_adapters.torch.checkpoint.dcp import FlashStorageReader, FlashStorageWriter
from dlrover_adapters.torch.checkpoint.shelf import SLOTS, TOLD_S, NoSlot, Shelf, layout_of, whole
from dlrover_adapters.torch.checkpoint.vault import (
    MEMORY,
    Arena,
    Fetched,
    Holding,
    Inventory,
    Keeping,
    Told,
    Vault,
    VaultGone,
)
from dlrover_core.checkpoint.arena import Control, Geometry

# torch's own: what it says about a single process, and about its older calls.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


class Agent:
    """Holds memory as an agent does, for one rank; what workers say to it. Its lines are `line`."""

    def __init__(self) -> None:
        self.arenas: dict[int, tuple[int, tuple[int, Geometry]]] = {}
        self.kept: list[Keeping] = []
        self.due: list[tuple[int, bool]] = []
        self.generation = 1
        self._ids = itertools.count(1)

    def close(self) -> None:
        """Let the memory go."""
        for fd, _ in self.arenas.values():
            os.close(fd)

    def views(self) -> Iterator[tuple[int, int, SlotView]]:
        """All slots that hold something: arena, slot, what is in it."""
        for number, (fd, _) in self.arenas.items():
            memory = mmap.mmap(fd, 0)
            for slot, _stamp in Control(memory).stamps():
                yield number, slot, SlotView(memory, slot)

    def hash(self) -> None:
        """What the saver does at publication."""
        for _, slot, view in self.views():
            words = b"".join(one.to_bytes(8, "little") for one in digests(view.data))
            at = view.control.geometry.digests_at(slot)
            view.memory[at : at + len(words)] = words
            view.control.note_hashed(slot, view.stamp.sequence)


class Line:
    """A worker's line to the agent, with what `Shelf` and `recalled` use of a `Vault`."""

    rank, local_rank, world, nproc, gone = 0, 0, 1, 1, ""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self.told = Told(agent.generation, "worker-0", 1, 0, "run", "", -1, False, 2**40)

    def arena(self, layout: int, geometry: Geometry) -> Arena:
        """The same again where it fits."""
        for number, (fd, like) in self._agent.arenas.items():
            if like == (layout, geometry):
                return Arena(number, False, os.dup(fd))
        fd, number = os.memfd_create("test"), next(self._agent._ids)
        os.ftruncate(fd, geometry.total_bytes)
        self._agent.arenas[number] = (fd, (layout, geometry))
        return Arena(number, True, os.dup(fd))

    def ready(self, arena: int, holders: Any = None) -> None:
        """Its words make sense."""
        Control(mmap.mmap(self._agent.arenas[arena][0], 0))
        assert holders == ((0,),)

    def keeping(self, keeping: Keeping) -> None:
        """For the master."""
        self._agent.kept.append(keeping)

    def saved(self, arena: int, slot: int, step: int, *, due: bool) -> None:
        """Published."""
        self._agent.due.append((step, due))

    def inventory(self) -> Inventory:
        """As the agent looks."""
        return Inventory(
            tuple(
                Holding(one, MEMORY, 0, 1, view.stamp.generation, view.stamp.step, view.table.layout, slot)
                for one, slot, view in self._agent.views()
            ),
            "",
            -1,
        )

    def borrow(self, holding: int) -> int:
        """To be read."""
        if self.gone:
            raise VaultGone(self.gone)
        return os.dup(self._agent.arenas[holding][0])

    def fetch(self, *_args: Any, **_kwargs: Any) -> Fetched:
        """There is nobody else."""
        raise AssertionError

    def close(self) -> None:
        """The line."""
        self.gone = "closed"


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> Iterator[Agent]:
    """This process runs under it."""
    one = Agent()
    monkeypatch.setattr(Vault, "here", classmethod(lambda _cls: True))
    monkeypatch.setattr(Vault, "connect", classmethod(lambda _cls: Line(one)))
    yield one
    one.close()


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


def shelf_of(line: Line, *, world: int = 1, **how: Any) -> Any:
    """One whose states nobody writes to storage."""
    return Shelf("", rank=0, world=world, kind="dcp", vault=line, **how)  # type: ignore[arg-type]  # as good as a vault


def test_slots_that_are_read_are_not_overwritten(agent: Agent) -> None:
    """With every other slot pinned a save takes none of them; with none left it fails, is counted, and what was there stays."""
    shelf = shelf_of(Line(agent))
    pieces = [whole("w", torch.ones(4))]
    layout = layout_of("one")
    slots = [shelf.put(step, pieces, {}, layout=layout, holders=((0,),)) for step in range(1, SLOTS + 1)]
    assert sorted(slots) == list(range(SLOTS))
    control = shelf._control
    for slot in slots[1:]:
        control.pin(slot)
    assert shelf.put(9, pieces, {}, layout=layout, holders=((0,),)) == slots[0]
    control.pin(slots[0])
    with pytest.raises(NoSlot, match="faster than storage or the partner"):
        shelf.put(10, pieces, {}, layout=layout, holders=((0,),))
    assert control.skipped == 1
    assert sorted(stamp.step for _, stamp in control.stamps()) == [2, 3, 9]
    shelf.close()


def test_a_save_waits_for_whoever_reads(agent: Agent, caplog: pytest.LogCaptureFixture) -> None:
    """While all slots are read, a save that may wait does, and says why; it takes what is let go."""
    now, paused = 0.0, 0

    def pause(seconds: float) -> None:
        nonlocal now, paused
        now, paused = now + seconds, paused + 1
        if now > TOLD_S + 1:
            shelf._control.unpin(slots[1])

    shelf = shelf_of(Line(agent), clock=lambda: now, pause=pause)
    how: Any = {"layout": layout_of("one"), "holders": ((0,),)}
    pieces = [whole("w", torch.ones(4))]
    slots = [shelf.put(step, pieces, {}, **how) for step in range(1, SLOTS + 1)]
    for slot in slots:
        shelf._control.pin(slot)
    assert shelf.put(9, pieces, {}, wait_s=60, **how) == slots[1]
    assert now > TOLD_S + 1
    assert paused < 100
    assert [one.message for one in caplog.records].count(
        "step 9 waits for memory: states come faster than storage or the partner node takes them"
    ) == 1
    assert sorted(stamp.step for _, stamp in shelf._control.stamps()) == [1, 3, 9]
    assert shelf._control.skipped == 0
    shelf._control.pin(slots[1])
    shelf._control.pin(slots[0])
    now = 0.0
    with pytest.raises(NoSlot, match=r"for 2 s: .*save less often"):
        shelf.put(10, pieces, {}, wait_s=2, **how)
    shelf.close()


@pytest.mark.parametrize(
    ("nodes", "replica", "holders", "more"),
    [(1, "h:1", ((0,), (1,)), 0), (2, "", ((0,), (1,)), 0), (2, "h:1", ((0,), (1,)), 2), (2, "h:1", ((0, 1),), 0)],
)
def test_room_for_what_is_copied_to_other_nodes(
    agent: Agent, nodes: int, replica: str, holders: Any, more: int
) -> None:
    """Two slots more where parts of a state are copied to a partner: these stay pinned from copy to copy."""
    line = Line(agent)
    line.world, line.told = 2, line.told._replace(nodes=nodes, replica=replica)
    line.ready = lambda *_: None  # type: ignore[method-assign]
    shelf = shelf_of(line, world=2)
    shelf.put(1, [whole("w", torch.ones(4))], {}, layout=layout_of("one"), holders=holders)
    assert shelf._control.geometry.slots == SLOTS + more
    shelf.close()


def test_lightnings_newest_is_in_memory_though_its_file_is_not(agent: Agent, tmp_path: Path) -> None:
    """A worker that died before a file was written: `newest` writes it from memory and names it; loading takes memory."""
    pytest.importorskip("lightning")
    from dlrover_adapters.torch.lightning import FlashCheckpointIO

    path = tmp_path / "epoch=0-step=7.ckpt"
    plugin = FlashCheckpointIO()
    plugin.save_checkpoint({"global_step": 7, "state_dict": {"w": torch.full((9,), 7.0)}, "hyper": {"a": (1, 2)}}, path)
    plugin.teardown()
    path.unlink()
    agent.hash()
    successor = FlashCheckpointIO()
    assert successor.newest() == str(path)
    assert torch.load(path, weights_only=True)["hyper"] == {"a": (1, 2)}
    path.write_bytes(b"nobody reads this")
    found = successor.load_checkpoint(path)
    assert found["state_dict"]["w"].eq(7).all()
    assert found["hyper"] == {"a": (1, 2)}
    successor.teardown()
