"""Which rank keeps a chunk, and which one writes it."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch")

from examples import examples  # noqa: E402
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from tests.unit.layouts import agree, chunk  # noqa: E402

from dlrover_adapters.checkpoint.table import Item, Table  # noqa: E402
from dlrover_adapters.torch.checkpoint import filling  # noqa: E402
from dlrover_adapters.torch.checkpoint.capture import Target  # noqa: E402
from dlrover_adapters.torch.checkpoint.chunks import Chunk  # noqa: E402
from dlrover_adapters.torch.checkpoint.vault import spread_of  # noqa: E402

DTYPES = (torch.float32, torch.int16, torch.bfloat16)


class Tensor(NamedTuple):
    """One tensor of a state.

    ``dims``: of the tensor that the first and the second dimension of the mesh shard; -1: none, so that there are replicas.
    ``tied``: a second name for the same bytes.
    """

    name: str
    shape: tuple[int, ...]
    dtype: Any
    dims: tuple[int, int]
    live: bool
    tied: bool

    def values(self) -> Any:
        """All elements, others for each name."""
        begin = sum(map(ord, self.name))
        return (torch.arange(prod(self.shape)) + begin).reshape(self.shape).to(self.dtype)


class World(NamedTuple):
    """Ranks in a mesh of three dimensions; the first is of replicas."""

    mesh: tuple[int, int, int]
    nproc: int

    @property
    def nodes(self) -> list[int]:
        """By rank."""
        return [rank // self.nproc for rank in range(prod(self.mesh))]

    def chunks(self, tensors: Sequence[Tensor], rank: int) -> list[Chunk]:
        """What a rank has: rows are dealt as torch deals them, uneven, and the last ranks may have none."""
        _, first, second = self.mesh
        at = (rank // second % first, rank % second)
        found: list[Chunk] = []
        for one in tensors:
            begin, end = [0] * len(one.shape), list(one.shape)
            for place, count, dim in zip(at, self.mesh[1:], one.dims, strict=True):
                if 0 <= dim < len(one.shape):
                    rows = -(-one.shape[dim] // count)
                    begin[dim], end[dim] = (min(one.shape[dim], rows * number) for number in (place, place + 1))
            shape = tuple(b - a for a, b in zip(begin, end, strict=True))
            if prod(one.shape) and not prod(shape):
                continue
            found.append(chunk(one.name, one.shape, tuple(begin), shape, dtype=one.dtype, live=one.live))
            if one.tied:
                found.append(found[-1]._replace(name=f"{one.name}.tied", same_as=one.name))
        return found


@st.composite
def tensors(draw: st.DrawFn) -> list[Tensor]:
    """A state."""
    found = []
    for number in range(draw(st.integers(1, 5))):
        shape = tuple(draw(st.lists(st.integers(0, 7), max_size=3)))
        dims = tuple(draw(st.sampled_from(list(itertools.permutations(range(-1, len(shape)), 2)) or [(-1, -1)])))
        plain = draw(st.booleans())
        found.append(
            Tensor(
                f"model.t{number}",
                shape,
                draw(st.sampled_from(DTYPES)),
                (-1, -1) if plain else dims,
                live=plain and draw(st.booleans()),
                tied=draw(st.booleans()),
            )
        )
    return found


@st.composite
def worlds(draw: st.DrawFn) -> World:
    """Up to eight ranks."""
    mesh = draw(
        st.sampled_from([(a, b, c) for a in (1, 2, 3, 4) for b in (1, 2, 3, 4) for c in (1, 2) if a * b * c <= 8])
    )
    size = prod(mesh)
    return World(mesh, draw(st.sampled_from([one for one in range(1, size + 1) if size % one == 0])))


def box(item: Any) -> tuple[slice, ...]:
    """Of a tensor."""
    return tuple(slice(at, at + length) for at, length in zip(item.offsets, item.shape, strict=True))


def stored(table: Table, values: dict[str, Any]) -> bytearray:
    """A slot's data: each item's bytes at its place, and nothing under another's."""
    data = bytearray(max((one.at + one.size for one in table.items), default=0))
    taken: dict[tuple[int, int], str] = {}
    for one in table.items:
        content = values[one.name][box(one)].contiguous()
        assert content.numel() * content.element_size() == one.size
        raw = bytes(content.reshape(-1).view(torch.uint8).numpy()) if one.size else b""
        data[one.at : one.at + one.size] = raw
        taken.setdefault((one.at, one.at + one.size), one.name)
    spans = sorted(span for span in taken if span[0] != span[1])
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans)), "items lie on each other"
    return data


def read(data: bytearray, item: Item) -> Any:
    """An item's tensor."""
    if not item.size:
        return torch.empty(item.shape, dtype=getattr(torch, item.dtype))
    count = prod(item.shape)
    return torch.frombuffer(data, dtype=getattr(torch, item.dtype), count=count, offset=item.at).reshape(item.shape)


def restored(world: World, state: Sequence[Tensor], pieces: list[tuple[bytearray, list[Item]]]) -> None:
    """Every rank of a world fills its tensors from these pieces, and has what was saved."""
    values = {**{one.name: one.values() for one in state}, **{f"{one.name}.tied": one.values() for one in state}}
    chunks: dict[str, list[tuple[bytearray, Item]]] = defaultdict(list)
    for data, items in pieces:
        for item in items:
            chunks[item.name].append((data, item))
    for rank in range(prod(world.mesh)):
        for mine in world.chunks(state, rank):
            target = Target(
                mine.name, torch.zeros(mine.tensor.shape, dtype=mine.tensor.dtype), mine.full_shape, mine.offsets
            )
            theirs = chunks[mine.name]
            for need in filling.needs(target, [item for _, item in theirs]):
                target.tensor[need.there] = read(*theirs[need.number])[need.here]
            expected = values[mine.name][
                tuple(slice(a, a + n) for a, n in zip(mine.offsets, mine.tensor.shape, strict=True))
            ]
            assert torch.equal(target.tensor, expected), (rank, mine.name)


@given(tensors(), worlds(), worlds(), st.randoms(use_true_random=False))
@settings(max_examples=examples(60, 150), deadline=None)
def test_what_one_world_restores_is_what_another_saved(
    state: list[Tensor], saved: World, other: World, chance: Any
) -> None:
    """From storage, and from any choice of one piece of each set of holders, into a world of any other shape."""
    ranks = [saved.chunks(state, rank) for rank in range(prod(saved.mesh))]
    tables = agree(ranks, saved.nodes)
    values = {**{one.name: one.values() for one in state}, **{f"{one.name}.tied": one.values() for one in state}}
    pieces = [(stored(table, values), list(table.items)) for table in tables]
    restored(other, state, [(data, [item for item in items if item.write]) for data, items in pieces])
    chosen = {chance.choice(ranks) for ranks in tables[0].holders}
    restored(other, state, [pieces[rank] for rank in sorted(chosen)])


@given(tensors(), worlds())
@settings(max_examples=examples(60, 150), deadline=None)
def test_every_node_keeps_what_its_ranks_have_and_one_rank_writes_it(state: list[Tensor], world: World) -> None:
    """Of each chunk one rank of each node that has it keeps it, and one rank of all writes it; live ones the first."""
    ranks, nodes = [world.chunks(state, rank) for rank in range(prod(world.mesh))], world.nodes
    tables = agree(ranks, nodes)
    assert agree(ranks, nodes) == tables
    having: dict[Any, set[int]] = defaultdict(set)
    kept: dict[Any, list[int]] = defaultdict(list)
    written: Counter[Any] = Counter()
    for rank, table in enumerate(tables):
        for one in ranks[rank]:
            having[one.name, one.offsets, tuple(one.tensor.shape)].add(rank)
        for item in table.items:
            key = item.name, item.offsets, item.shape
            assert rank in having[key]
            kept[key].append(rank)
            written[key] += item.write
            if item.write:
                assert rank in table.writers
            if item.live:
                assert item.write == (rank == min(having[key]))
            if item.size:
                assert any(rank in one for one in table.holders)
    for key, those in having.items():
        assert sorted(nodes[rank] for rank in kept[key]) == sorted({nodes[rank] for rank in those}), key
        assert written[key] == 1, key


@given(tensors(), worlds())
@settings(max_examples=100, deadline=None)
def test_a_node_that_reads_one_piece_of_each_of_its_sets_has_all_that_its_ranks_had(
    state: list[Tensor], world: World
) -> None:
    """In a world of the same shape, whichever piece of each set is left."""
    ranks, nodes = [world.chunks(state, rank) for rank in range(prod(world.mesh))], world.nodes
    tables = agree(ranks, nodes)
    items = [{(one.name, one.offsets, one.shape) for one in table.items} for table in tables]
    for node in set(nodes):
        own = {rank for rank, at in enumerate(nodes) if at == node}
        sets = [one for one in tables[0].holders if not own.isdisjoint(one)]
        for last in (False, True):
            there = set[Any]().union(*(items[max(one) if last else min(one)] for one in sets))
            for rank in own:
                wanted = {(one.name, one.offsets, tuple(one.tensor.shape)) for one in ranks[rank] if one.size}
                assert wanted <= there


def loads(tables: Sequence[Table], nodes: Sequence[int]) -> tuple[list[int], list[int]]:
    """Bytes that each rank keeps, and that each node writes."""
    kept = [sum(one.size for one in table.items) for table in tables]
    written = [0] * (max(nodes) + 1)
    for rank, table in enumerate(tables):
        written[nodes[rank]] += sum(one.size for one in table.items if one.write)
    return kept, written


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=40), st.integers(1, 4), st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_replicas_are_shared_evenly(sizes: list[int], nodes: int, nproc: int) -> None:
    """Under DDP the ranks of a node differ by one tensor at most in what they keep, and the nodes in what they write."""
    mine = [chunk(f"t{number}", (size,)) for number, size in enumerate(sizes)]
    places = [rank // nproc for rank in range(nodes * nproc)]
    kept, written = loads(agree([mine] * len(places), places), places)
    for node in range(nodes):
        here = kept[node * nproc : (node + 1) * nproc]
        assert max(here) - min(here) <= 4 * max(sizes)
        assert here == kept[:nproc], "all nodes alike"
    assert max(written) - min(written) <= 4 * max(sizes)


def test_ddp_on_two_nodes() -> None:
    """Each node has one copy, half of it in each rank; each node writes half; the first writes what is live."""
    mine = [chunk("a", (100,)), chunk("b", (60,)), chunk("c", (50,)), chunk("buffer", (10,), live=True)]
    tables = agree([mine] * 4, [0, 0, 1, 1])
    assert [sorted(one.name for one in table.items) for table in tables] == [["a", "buffer"], ["b", "c"]] * 2
    assert [sorted(one.name for one in table.items if one.write) for table in tables] == [
        ["a", "buffer"],
        [],
        [],
        ["b", "c"],
    ]
    assert {table.holders for table in tables} == {((0, 2), (1, 3))}
    assert {table.writers for table in tables} == {(0, 3)}


def test_one_file_is_written_by_one_node() -> None:
    """Where the format has one file for all of the state, the first node writes everything."""
    mine = [chunk("a", (100,)), chunk("b", (60,)), chunk("c", (50,))]
    tables = agree([mine] * 4, [0, 0, 1, 1], spread=False)
    assert [len([one for one in table.items if one.write]) for table in tables] == [1, 2, 0, 0]
    assert tables[0].layout != agree([mine] * 4, [0, 0, 1, 1])[0].layout


def test_shards_are_everybodys_own() -> None:
    """FSDP on four ranks: each keeps and writes what nobody else has; a scalar that all have adds no set of holders."""
    ranks = [[chunk("a", (40,), (10 * rank,), (10,)), chunk("step", ())] for rank in range(4)]
    tables = agree(ranks, [0, 0, 1, 1])
    assert {table.holders for table in tables} == {((0,), (1,), (2,), (3,))}
    assert all([one.write for one in table.items if one.name == "a"] == [True] for table in tables)
    assert [any(one.name == "step" for one in table.items) for table in tables] == [True, False, True, False]


def test_hsdp_is_written_by_all_replicas() -> None:
    """Eight replicas of two shards, a node each: the busiest node writes no more than a tenth above the mean."""
    names = [(f"t{number}", 16 * (1 + number % 7)) for number in range(200)]
    ranks = [
        [chunk(name, (size,), (rank % 2 * size // 2,), (size // 2,)) for name, size in names] for rank in range(16)
    ]
    nodes = [rank // 2 for rank in range(16)]
    tables = agree(ranks, nodes)
    _, written = loads(tables, nodes)
    assert max(written) <= 1.1 * sum(written) / len(written)
    assert tables[0].holders == (tuple(range(0, 16, 2)), tuple(range(1, 16, 2)))
    assert spread_of(tables[0].holders, 2, 8) == 1


def test_what_is_live_is_the_first_ranks() -> None:
    """DDP ranks' buffers differ, and those of the first are broadcast."""
    mine = [chunk("a", (1,)), chunk("mean", (10_000,), live=True)]
    tables = agree([mine] * 2, [0, 0])
    assert [[one.name for one in table.items] for table in tables] == [["mean"], ["a"]]


def test_ranks_with_other_names_share_what_they_have_alike() -> None:
    """Stages of a pipeline: the tied embedding of the first and the last is kept by each node, and written once."""
    ranks = [[chunk("first", (9,)), chunk("tied", (5,))], [chunk("last", (7,)), chunk("tied", (5,))]]
    for nodes in ([0, 0], [0, 1]):
        tables = agree(ranks, nodes)
        both = [(rank, one.write) for rank, table in enumerate(tables) for one in table.items if one.name == "tied"]
        assert len(both) == len(set(nodes))
        assert sum(write for _, write in both) == 1
