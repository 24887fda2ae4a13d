"""The position in the data is one publication with the state: the same cut on every rank, on every tier, in every world."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tests.unit.restoring import (  # noqa: E402
    Arena,
    FakeNode,
    Live,
    World,
    ddp,
    everything,
    fsdp,
    objects_of,
    sharded,
    store,
)
from tests.unit.stored import Arena as Stored  # noqa: E402

from dlrover_adapters.agent.checkpoints import storing  # noqa: E402
from dlrover_adapters.checkpoint.manifests import Part  # noqa: E402
from dlrover_adapters.checkpoint.places import Place as Storage  # noqa: E402
from dlrover_adapters.checkpoint.reader import StepReader  # noqa: E402
from dlrover_adapters.checkpoint.slotview import SlotView  # noqa: E402
from dlrover_adapters.checkpoint.table import CUT, TRAINED, cut_in, pack_blob, trained_in  # noqa: E402
from dlrover_adapters.torch.checkpoint.ladder import RestoreFailed  # noqa: E402
from dlrover_adapters.torch.checkpoint.vault import OBJECTS  # noqa: E402
from dlrover_core.checkpoint.arena import ArenaBroken  # noqa: E402
from dlrover_core.data.cut import Cut, Place, pack, unpack  # noqa: E402
from dlrover_core.data.ranges import Ranges  # noqa: E402
from dlrover_core.data.trained import Counted, Trained, counted, pack_counted, unpack_counted  # noqa: E402


def at(position: int) -> Cut:
    """A cut."""
    return (Place("train", 2, position, "of 1000"), Place("val", 0, 7))


class Counts(Live):
    """A worker with datasets."""

    def cut(self) -> dict[str, bytes]:
        """As `Capture`."""
        return {CUT: pack(at(0))}


@pytest.fixture
def cluster() -> dict[str, FakeNode]:
    """Nodes by address."""
    return {}


def saved_by(arenas: list[Arena], step: int, position: Callable[[int], Cut | None]) -> list[Arena]:
    """A step that each rank has saved with a position."""
    for one in arenas:
        cut = position(one.rank)
        one.save(step, cut=pack(cut) if cut else b"")
    return arenas


def test_a_blob_s_cut_is_read_without_the_rest_of_it() -> None:
    """The cut is the first in a blob, and is found in its first bytes, however much comes after; a blob without one has none."""
    cut = pack(at(512))
    blob = pack_blob({"a": bytes(200_000), CUT: cut, "b": b"."})
    assert cut_in(blob) == cut_in(memoryview(blob)) == cut
    assert cut_in(blob[:65_536]) == cut
    assert cut_in(pack_blob({"a": bytes(200_000)})) == cut_in(pack_blob({})) == b""
    with pytest.raises(ArenaBroken, match="no blob"):
        cut_in(b"\xc1")


def test_what_is_said_of_leases_is_read_without_the_rest_of_it() -> None:
    """With a cut and without one."""
    for cut in ({}, {CUT: pack(at(512))}):
        blob = pack_blob({"a": bytes(200_000), TRAINED: b"said", **cut})
        assert (trained_in(blob[:65_536]), cut_in(blob)) == (b"said", cut.get(CUT, b""))
    assert trained_in(pack_blob({"a": b".", CUT: b"."})) == trained_in(pack_blob({})) == b""


def test_what_a_rank_was_trained_on_by_leases_is_no_object() -> None:
    """Agents read it without unpickling, and add up what the ranks of a node say; a rank that says nothing adds nothing."""
    said = [pack_counted(1, 1, counted([Trained("a", "f", Ranges([span]))])) for span in ((0, 4), (4, 10))]
    raw = [{TRAINED: said[0]}, {TRAINED: said[1]}, {}]
    arenas = [Stored([], {"x": 1}, rank=rank, world=3, raw=one) for rank, one in enumerate(raw)]
    views = [SlotView(one.memory, 0) for one in arenas]
    assert set(views[0].objects()) == {"x"}
    assert [view.trained() for view in views] == [*said, b""]
    assert unpack_counted(storing.trained(views)) == (3, 2, (Counted("a", 10, 45),))
    assert storing.trained(views[2:]) == b""
    assert storing.trained([SlotView(Stored([], {}, raw={TRAINED: b"."}).memory, 0)]) == b""


def test_agents_read_the_cut_of_a_slot_and_objects_are_without_it(cluster: dict[str, FakeNode]) -> None:
    """A slot's view tells the cut in one call; among the objects it is none, as those are unpickled."""
    (arena,) = saved_by(fsdp([FakeNode(cluster)], 1), 10, lambda _: at(512))
    view = SlotView(arena.map, 0)
    assert unpack(view.cut()) == at(512)
    assert CUT not in view.objects()
    view.release()


@pytest.mark.parametrize(("old", "new"), [(2, 2), (4, 4), (4, 2), (2, 4)])
def test_the_cut_comes_back_from_memory_at_any_world_size(cluster: dict[str, FakeNode], old: int, new: int) -> None:
    """Every rank of the new world has the one cut that every rank of the old one saved."""
    nodes = [FakeNode(cluster), FakeNode(cluster)]
    saved_by(fsdp(nodes, old), 10, lambda _: at(512))
    world = World(nodes, [Counts(rank, sharded(rank, new)) for rank in range(new)])
    assert {one.step for one in world.restore()} == {10}
    assert [one.objects[CUT] for one in world.lives] == [at(512)] * new


def test_a_rank_that_lost_its_node_takes_the_cut_of_the_others(cluster: dict[str, FakeNode]) -> None:
    """Under DDP, with a new node in the place of a lost one: its ranks go on where the others do."""
    nodes = [FakeNode(cluster), FakeNode(cluster)]
    saved_by(ddp(nodes, 4, own=True), 10, lambda _: at(512))
    nodes[1].arenas.clear()
    for copy in saved_by([objects_of(rank, 4, 2) for rank in (2, 3)], 10, lambda _: at(512)):
        nodes[0].has(copy, OBJECTS)
    world = World(nodes, [Counts(rank, everything()) for rank in range(4)])
    assert [one.tier for one in world.restore()] == ["memory", "memory", "peer", "peer"]
    assert [one.objects[CUT] for one in world.lives] == [at(512)] * 4


@pytest.mark.parametrize("new", [2, 3])
def test_the_cut_comes_back_from_storage(cluster: dict[str, FakeNode], tmp_path: Path, new: int) -> None:
    """It lies in every part's manifest, in plain JSON, and is restored from there at any world size."""
    place = f"file://{tmp_path}"
    store(place, saved_by(fsdp([FakeNode(cluster)], 2), 10, lambda _: at(512)))
    told = json.loads((tmp_path / "step-0000000010" / "part-1.json").read_text())
    assert told["cut"] == [["train", 2, 512, "of 1000"], ["val", 0, 7, ""]]
    assert told["format"] == 3
    assert [part.cut for part in StepReader(Storage(place), 10).parts.values()] == [at(512)] * 2
    world = World([FakeNode(cluster)], [Counts(rank, sharded(rank, new)) for rank in range(new)])
    assert {one.tier for one in world.restore(url=place)} == {"storage"}
    assert [one.objects[CUT] for one in world.lives] == [at(512)] * new


def test_a_part_without_a_cut_is_as_it_was(cluster: dict[str, FakeNode], tmp_path: Path) -> None:
    """Older versions read what has no position: its manifest has the old format, and no word of a cut."""
    store(f"file://{tmp_path}", saved_by(fsdp([FakeNode(cluster)], 1), 10, lambda _: None))
    raw = (tmp_path / "step-0000000010" / "part-0.json").read_bytes()
    assert json.loads(raw)["format"] == 2
    assert "cut" not in json.loads(raw)
    assert Part.unpacked(raw, "part-0.json").packed() == raw


@pytest.mark.parametrize("tier", ["memory", "storage", "resharded"])
def test_ranks_that_differ_are_named_and_nothing_is_restored(
    cluster: dict[str, FakeNode], tmp_path: Path, tier: str
) -> None:
    """Where one rank saved another position, no rank chooses: all are told which ranks differ, and in what."""
    nodes = [FakeNode(cluster), FakeNode(cluster)]
    arenas = saved_by(fsdp(nodes, 4), 10, lambda rank: at(480 if rank == 2 else 512))
    more: dict[str, Any] = {}
    if tier == "storage":
        more["url"] = f"file://{tmp_path}"
        store(more["url"], arenas)
        nodes = [FakeNode(cluster), FakeNode(cluster)]
    new = 2 if tier == "resharded" else 4
    world = World(nodes, [Counts(rank, sharded(rank, new)) for rank in range(new)])
    with pytest.raises(RestoreFailed) as failed:
        world.restore(**more)
    told = "rank 2: dataset 'train': position is 480 here, 512 there ('there': rank 0, 1, 3)"
    assert told in str(failed.value)
    assert all(one.untouched() for one in world.lives)


def test_a_rank_without_a_position_differs_too(cluster: dict[str, FakeNode]) -> None:
    """A rank that was started without data= does not take over in silence what the others have."""
    nodes = [FakeNode(cluster)]
    saved_by(fsdp(nodes, 2), 10, lambda rank: at(512) if rank else None)
    world = World(nodes, [Counts(rank, sharded(rank, 2)) for rank in range(2)])
    with pytest.raises(RestoreFailed, match=r"dataset 'train': (here, not there|there, not here)"):
        world.restore()


def test_a_script_without_datasets_restores_all_the_same(cluster: dict[str, FakeNode]) -> None:
    """Positions that nobody asks for are compared by nobody."""
    nodes = [FakeNode(cluster)]
    saved_by(fsdp(nodes, 2), 10, at)
    world = World(nodes, [Live(rank, sharded(rank, 2)) for rank in range(2)])
    assert {one.step for one in world.restore()} == {10}
