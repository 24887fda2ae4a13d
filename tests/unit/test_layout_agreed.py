"""How ranks come to one layout: what is sent, what is recognised, and what an error on one rank is to the others."""

from __future__ import annotations

import mmap
import os
import tracemalloc
import zlib
from typing import Any

import pytest

msgpack = pytest.importorskip("msgpack")
torch = pytest.importorskip("torch")

from tests.unit.layouts import Posted, agree, chunk, meet, signature  # noqa: E402

from dlrover_adapters.checkpoint.hashing import digest  # noqa: E402
from dlrover_adapters.checkpoint.table import Table  # noqa: E402
from dlrover_adapters.torch.checkpoint import layout  # noqa: E402
from dlrover_adapters.torch.checkpoint.layout import agreed, with_own  # noqa: E402
from dlrover_adapters.torch.checkpoint.line import old_tables  # noqa: E402
from dlrover_adapters.torch.checkpoint.meeting import Meeting, MeetingFailed  # noqa: E402
from dlrover_adapters.torch.checkpoint.vault import MEMORY, REPLICA, Holding, Inventory, VaultGone  # noqa: E402
from dlrover_core.checkpoint.arena import PAGE, Control, Geometry, Stamp  # noqa: E402

NODES = [0, 0, 1, 1]


def fsdp(rank: int, world: int = 4, count: int = 5) -> list[Any]:
    """A shard of each tensor, and a scalar that all have."""
    found = [chunk(f"model.w{number}", (8 * world, 3), (8 * rank, 0), (8, 3)) for number in range(count)]
    return [*found, chunk("optimizer.step", ())]


def test_names_are_sent_once_and_shares_come_back_without_any() -> None:
    """Ranks whose shards differ send their places alone; ranks with equal chunks send nothing; a share is a few bytes."""
    posted = Posted()
    agree([fsdp(rank % 2, 2, 200) for rank in range(4)], NODES, posted=posted)
    lists = {
        key[-2:]: size
        for key, size in posted.named("layout/shares").items()
        if "/for/" not in key and "decided" not in key
    }
    shares = [size for key, size in posted.named("layout/shares").items() if "/for/" in key]
    assert set(lists) == {"/1"}, "rank 0's own list is not sent, and ranks 2 and 3 have the same as 0 and 1"
    assert lists["/1"] < 400, "places without names"
    assert len(shares) == 3
    assert max(shares) < 100


def test_a_layout_that_all_ranks_still_have_is_recognised() -> None:
    """No list is sent, and every table is what it was."""
    ranks = [fsdp(rank) for rank in range(4)]
    first = agree(ranks, NODES)
    posted = Posted()
    again = agree(ranks, NODES, before=[[table] for table in first], posted=posted)
    assert again == first
    assert not posted.named("layout/shares")
    assert max(size for size in posted.all.values()) < 100


def test_the_table_is_the_same_in_whatever_order_the_tensors_come() -> None:
    """A restored optimizer lists its tensors in another order: with another table the states in memory would be lost."""
    ranks = [
        [*fsdp(rank), chunk("model.also", (32, 3), (8 * rank, 0), (8, 3), same_as="model.w0")] for rank in range(4)
    ]
    first = agree(ranks, NODES)
    assert agree([one[::-1] for one in ranks], NODES) == first
    assert agree([one[::-1] for one in ranks], NODES, before=[[table] for table in first]) == first
    there = {one.name: one.at for one in first[0].items}
    assert there["model.also"] == there["model.w0"]
    assert with_own(first[0], ranks[0][::-1], [], {}, lambda _name: False) == first[0]


def test_a_light_copys_table_is_as_good() -> None:
    """A new node's rank that fetched a copy without tensors has the same table all the same: it keeps and writes what it did."""
    ranks = [[chunk(f"w{number}", (64,)) for number in range(8)] for _rank in range(4)]
    first = agree(ranks, NODES)
    lightened = first[3]._replace(items=(), elsewhere=first[3].items)
    again = agree(ranks, NODES, before=[[first[0]], [first[1]], [first[2]], [lightened]])
    assert again == first
    assert {item.name for table in again for item in table.items if item.write} == {f"w{number}" for number in range(8)}


def test_a_rank_with_rank_0_s_names_knows_it() -> None:
    """Their shards may differ, and what each has of its own does not count; and it holds for a layout that is recognised, too."""
    ranks = [[*fsdp(0), chunk("rank.0.x", (3,))], fsdp(1), fsdp(2), [*fsdp(3), chunk("stage1.w", (8,))]]
    own = [frozenset({"rank.0.x"}), *[frozenset[str]()] * 3]
    first = agree(ranks, NODES, own=own)
    assert [one.alike for one in first] == [True, True, True, False]
    again = agree(ranks, NODES, own=own, before=[[one] for one in first])
    assert again == first


def test_where_one_rank_has_lost_its_table_all_agree_anew() -> None:
    """A new node's ranks have nothing: the layout comes out the same, number and all, so that others' memory stays good."""
    ranks = [fsdp(rank) for rank in range(4)]
    first = agree(ranks, NODES)
    posted = Posted()
    assert agree(ranks, NODES, before=[[first[0]], [], [first[2]], [first[3]]], posted=posted) == first
    assert posted.named("layout/shares")


@pytest.mark.parametrize("what", ["another rank's", "another world's", "another layout's"])
def test_a_table_of_something_else_is_not_taken(what: str) -> None:
    """It counts only if it is this rank's, of this world, of this layout."""
    ranks = [fsdp(rank) for rank in range(4)]
    first = agree(ranks, NODES)
    other = {
        "another rank's": first[2]._replace(items=()),
        "another world's": first[1]._replace(world=5, items=()),
        "another layout's": first[1]._replace(layout=first[1].layout + 1, items=()),
    }[what]
    assert agree(ranks, NODES, before=[[first[0]], [other], [first[2]], [first[3]]]) == first


def test_the_number_is_of_the_content(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another shard, dtype, node or rule is another layout; the same is the same."""
    ranks = [fsdp(rank) for rank in range(4)]
    known = {agree(ranks, NODES)[0].layout}
    others = [
        ([fsdp(rank, count=6) for rank in range(4)], NODES),
        ([[one._replace(dtype="int32") for one in mine] for mine in ranks], NODES),
        (ranks, [0, 1, 0, 1]),
        ([ranks[one] for one in (1, 0, 2, 3)], NODES),
    ]
    for mine, nodes in others:
        numbers = {table.layout for table in agree(mine, nodes)}
        assert len(numbers) == 1
        assert not numbers & known
        known |= numbers
    monkeypatch.setattr(layout, "RULE", layout.RULE + 1)
    assert agree(ranks, NODES)[0].layout not in known


def test_what_only_one_rank_has_is_its_own_matter() -> None:
    """Tensors of its own are kept and written by it, whatever they are now, and are nobody else's business."""
    own = [frozenset({f"rank.{rank}.extra.buffer"}) for rank in range(4)]
    ranks = [[*fsdp(rank), chunk(f"rank.{rank}.extra.buffer", (5 + rank,))] for rank in range(4)]
    posted = Posted()
    first = agree(ranks, NODES, own=own, posted=posted)
    assert not any(size > 300 for key, size in posted.named("layout/shares").items()), "names are sent by rank 0 alone"
    assert all(table.items[-1].write and table.items[-1].name in own[rank] for rank, table in enumerate(first))
    assert {table.own for table in first} == {(0, 1, 2, 3)}
    grown = [[*fsdp(rank), chunk(f"rank.{rank}.extra.buffer", (50,))] for rank in range(4)]
    alone = with_own(first[1], grown[1], (), {}, lambda name: name in own[1])
    again = agree(grown, NODES, own=own, before=[[first[0]], [alone], [first[2]], [first[3]]])
    assert again[1] == alone
    assert again[2].layout == first[2].layout
    assert again[2].items[-1].shape == (50,)


def test_objects_of_its_own_make_a_rank_a_writer() -> None:
    """All ranks know who has state that no other rank has."""

    def does(meeting: Meeting) -> Table:
        mine = [chunk("a", (4,)), chunk("b", (4,))]
        names = frozenset({"rank.1.rng"}) if meeting.rank == 1 else frozenset[str]()
        return agreed(mine, signature(mine, ["scheduler", *names]), {}, names, meeting, 0)

    zero, one = meet(2, does)
    assert (zero.objects, one.objects) == (("scheduler",), ("rank.1.rng",))
    assert zero.own == one.own == (1,)
    assert zero.writers == one.writers == (0, 1)


def test_an_error_of_one_rank_is_everybodys() -> None:
    """A rank that cannot say what it has does not leave the others waiting: they hear who and why. It has its own error."""

    def does(meeting: Meeting) -> Any:
        mine = fsdp(meeting.rank)
        try:
            broken = signature(mine)
            if meeting.rank == 2:
                broken = broken._replace(chunks=(*broken.chunks, ("short",)))  # type: ignore[arg-type]
            return agreed(mine, broken, {}, frozenset(), meeting, 0)
        except ValueError as error:
            return error

    told = meet(4, does)
    assert isinstance(told[2], ValueError)
    for error in (told[0], told[1], told[3]):
        assert isinstance(error, MeetingFailed)
        assert "rank 2: ValueError" in str(error)


def test_an_error_of_the_assignment_is_everybodys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 assigns for all, and fails for all."""

    def fails(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no assignment")

    monkeypatch.setattr(layout, "divided", fails)

    def does(meeting: Meeting) -> Any:
        mine = fsdp(meeting.rank)
        try:
            return agreed(mine, signature(mine), {}, frozenset(), meeting, 0)
        except RuntimeError as error:
            return error

    told = meet(3, does)
    assert str(told[0]) == "no assignment"
    assert all("RuntimeError on rank 0: no assignment" in str(one) for one in told[1:])


# ---- tables from memory


class Line:
    """An agent with memory."""

    rank, world = 1, 4

    def __init__(self, held: dict[Holding, bytes]) -> None:
        self._held, self.borrowed = held, list[int]()

    def inventory(self) -> Inventory:
        """What it has."""
        return Inventory(tuple(self._held), "", -1)

    def borrow(self, number: int) -> int:
        """An arena with this table, and one state."""
        self.borrowed.append(number)
        raw = next(raw for one, raw in self._held.items() if one.id == number)
        sizes = Geometry(1, max(1, len(raw)), 0, 0)
        fd = os.memfd_create("arena")
        os.ftruncate(fd, sizes.total_bytes)
        if raw:
            memory = mmap.mmap(fd, 0)
            memory[PAGE : PAGE + len(raw)] = raw
            control = Control(memory, sizes)
            control.make(layout=7, rank=1, world=4, local_rank=1, table_bytes=len(raw), table_digest=digest(raw))
            control.publish(0, Stamp(1, 1, 1, 0, digest(b"")))
            control.release()
            memory.close()
        return fd


def test_tables_are_read_from_this_nodes_memory() -> None:
    """This rank's own, and a copy of them that was fetched; a broken one is left out, others' are not looked at."""
    table = agree([fsdp(rank) for rank in range(4)], NODES)[1]
    old, broken = table._replace(layout=8), b""
    held = {
        Holding(1, MEMORY, 0, 4, 2, 30, 7, 0): table.packed(),
        Holding(2, MEMORY, 1, 4, 2, 30, 6, 0): broken,
        Holding(3, REPLICA, 1, 4, 2, 30, 7, 0): table.packed(),
        Holding(4, MEMORY, 1, 4, 2, 29, 7, 1): table.packed(),
        Holding(5, MEMORY, 1, 4, 1, 20, 8, 0): old.packed(),
        Holding(6, MEMORY, 1, 4, 1, 10, 9, 0): old.packed(),
    }
    line = Line(held)
    assert old_tables(line) == [table, old]  # type: ignore[arg-type]
    assert line.borrowed == [2, 3, 5]


def test_no_agent_has_no_tables() -> None:
    """One that does not answer is no reason not to save."""

    class Gone(Line):
        def inventory(self) -> Inventory:
            raise VaultGone("gone")

    assert old_tables(Gone({})) == []  # type: ignore[arg-type]


BOMB = zlib.compress(bytes(64 * 1024 * 1024), 1)


class Forged:
    """A meeting in which whoever reaches the store has put something else in the place of one message."""

    def __init__(self, common: bytes | None = None, share: bytes | None = None, said: Any = None) -> None:
        self.rank, self.world = 0, 1
        self._common, self._share, self._said = common, share, said
        self.refusing = Meeting(None, 0, 1).refusing
        self.decide = Meeting(None, 0, 1).decide

    def assign(self, _name: str, mine: bytes, how: Any, _speakers: Any) -> tuple[bytes, bytes]:
        """As `Meeting`."""
        if self._said is not None:
            mine = msgpack.packb(self._said(*msgpack.unpackb(mine)))
        common, shares = how({0: mine})
        return self._common or common, self._share or shares[0]


@pytest.mark.parametrize(
    ("forged", "said"),
    [
        ({"common": BOMB}, r"rank 0 sent rank 0 a list of holders of more than the 1,048,576 bytes"),
        ({"share": BOMB}, r"rank 0 sent rank 0 a share of more than the 6 bytes"),
        ({"said": lambda size, _names, places: (size, BOMB, places)}, r"rank 0 sent a list of names of more than"),
        ({"said": lambda size, names, _places: (size, names, BOMB)}, r"rank 0 sent a list of places of more than"),
        ({"share": b"no zlib"}, r"rank 0 sent rank 0 a share that cannot be decompressed"),
        ({"share": zlib.compress(bytes(6))[:-1]}, r"a share that does not end where it should"),
    ],
)
def test_a_message_is_decompressed_no_further_than_it_can_go(
    forged: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few kilobytes in the store do not become gigabytes in a rank: there is an error that says whose message it is."""
    monkeypatch.setattr(layout, "LIST_BYTES_MAX", 1024 * 1024)
    chunks = fsdp(0, 1)
    tracemalloc.start()
    try:
        with pytest.raises(layout.LayoutFailed, match=said):
            agreed(chunks, signature(chunks), {}, frozenset(), Forged(**forged), 0)
        assert tracemalloc.get_traced_memory()[1] < 8 * 1024 * 1024
    finally:
        tracemalloc.stop()
