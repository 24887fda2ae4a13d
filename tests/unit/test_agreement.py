"""From where a new world begins: the newest state that all can get, read from the fastest places."""

from __future__ import annotations

import functools
from itertools import product

import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from dlrover_core.checkpoint.agreement import (
    DISK,
    MEMORY,
    OBJECTS,
    REPLICA,
    STORAGE,
    Holders,
    Lack,
    Node,
    Piece,
    Plan,
    Refusal,
    Source,
    passed_over,
    plan,
    refusals,
)

FSDP4: Holders = ((0,), (1,), (2,), (3,))
DDP4: Holders = ((0, 2), (1, 3))
"""Two nodes of two ranks."""


def piece(rank: int, step: int = 10, generation: int = 1, kind: str = MEMORY, nproc: int = 2, world: int = 4) -> Piece:
    """Of layout 7."""
    return Piece(kind, rank, world, rank % nproc, generation, step, 7)


def node(ranks: tuple[int, ...], *pieces: Piece, address: str = "there") -> Node:
    """One node."""
    return Node(ranks, pieces, address)


def test_everybody_has_its_own() -> None:
    """After a restart of the workers every node reads its own memory, and nothing is fetched."""
    nodes = [node((0, 1), piece(0), piece(1)), node((2, 3), piece(2), piece(3))]
    found = plan(nodes, {(7, 4): FSDP4})
    assert found == Plan(
        1, 10, MEMORY, 7, 4, False,
        ((Source(MEMORY, 0, 0), Source(MEMORY, 0, 1)), (Source(MEMORY, 1, 2), Source(MEMORY, 1, 3))),
    )  # fmt: skip


def test_a_lost_node_is_served_by_its_partner() -> None:
    """A newcomer reads the copies of its predecessor's pieces; the others read their own."""
    copies = (piece(2, kind=REPLICA), piece(3, kind=REPLICA))
    nodes = [node((0, 1), piece(0), piece(1), *copies), node((2, 3))]
    found = plan(nodes, {(7, 4): FSDP4})
    assert found is not None
    assert found.sources[1] == (Source(REPLICA, 0, 2), Source(REPLICA, 0, 3))
    assert plan([nodes[0]._replace(address=""), nodes[1]], {(7, 4): FSDP4}) is None


OWN = {(7, 4): (0, 1, 2, 3), (7, 8): tuple(range(8))}
"""Every rank has objects of its own."""


def test_a_rank_s_own_objects_make_a_state_whole() -> None:
    """Under DDP any node has all tensors; a newcomer's own objects are with its partner, or the next older state is taken."""
    survivor = [piece(rank, step) for step in (10, 12) for rank in (0, 1)]
    copies = [piece(rank, kind=kind) for rank, kind in ((2, REPLICA), (3, OBJECTS))]
    nodes = [node((0, 1), *survivor, *copies), node((2, 3))]
    found = plan(nodes, {(7, 4): DDP4}, own=OWN)
    assert found is not None
    assert (found.step, found.reshard) == (10, False)
    # All of rank 2 is there, so its tensors are read from there, too.
    assert found.sources[1] == (Source(REPLICA, 0, 2), Source(OBJECTS, 0, 3), Source(MEMORY, 0, 1))
    assert passed_over(nodes, {(7, 4): DDP4}, (), OWN, found) == (Lack(1, 12, (2, 3)),)
    # Without the copies nothing in memory is usable, and storage is.
    nodes = [node((0, 1), *survivor), node((2, 3))]
    assert plan(nodes, {(7, 4): DDP4}, {(1, 5)}, own=OWN) == Plan(1, 5, STORAGE)
    lacks = passed_over(nodes, {(7, 4): DDP4}, (), OWN, None)
    assert lacks == (Lack(1, 12, (2, 3)), Lack(1, 10, (2, 3)))


def test_a_node_that_left_a_save_out_lacks_its_ranks_objects() -> None:
    """Its own memory is a save behind the other node's: the step that both have is taken."""
    nodes = [
        node((0, 1), *(piece(rank, step) for step in (10, 12) for rank in (0, 1))),
        node((2, 3), piece(2), piece(3)),
    ]
    found = plan(nodes, {(7, 4): DDP4}, own=OWN)
    assert found is not None
    assert found.step == 10


@pytest.mark.parametrize("nodes", [1, 2])
def test_ranks_without_tensors_are_missed_too(nodes: int) -> None:
    """All tensors lie with the first rank of each node, and the other ranks died before they saved step 12: it is not used.

    That no piece of theirs is there does not make it a state of a world of one rank per node.
    """
    world = 2 * nodes
    of = functools.partial(piece, world=world)
    firsts = [of(rank, 12) for rank in range(0, world, 2)]
    every = [node((2 * at, 2 * at + 1), of(2 * at), of(2 * at + 1), firsts[at]) for at in range(nodes)]
    holders: dict[tuple[int, int], Holders] = {(7, world): (tuple(range(0, world, 2)),)}
    own = {(7, world): tuple(range(world))}
    found = plan(every, holders, own=own)
    assert found is not None
    assert (found.step, found.reshard) == (10, False)


def test_refused_objects_are_missing_objects() -> None:
    """A piece of objects that failed verification is not used again; where it was the only one, the state is over."""
    nodes = [node((0, 1), piece(0), piece(1), piece(2, kind=OBJECTS), piece(3, kind=OBJECTS)), node((2, 3))]
    first = plan(nodes, {(7, 4): DDP4}, own=OWN)
    assert first is not None
    refused = refusals(first, 1, 3)
    assert refused == (Refusal(OBJECTS, 0, 3, 1, 10),)
    assert plan(nodes, {(7, 4): DDP4}, refused=refused, own=OWN) is None
    assert passed_over(nodes, {(7, 4): DDP4}, refused, OWN, None) == (Lack(1, 10, (3,)),)


def test_in_another_shape_own_objects_are_read_where_they_are() -> None:
    """Half of the nodes is gone: the state is used, and the ranks that are left have their own objects."""
    nodes = [node((0,), piece(0), piece(1), piece(3, kind=OBJECTS)), node((1,))]
    found = plan(nodes, {(7, 4): DDP4}, own=OWN)
    assert found is not None
    assert found.reshard
    assert [{source.rank for source in one} for one in found.sources] == [{0, 1}, {0, 1}]
    assert passed_over(nodes, {(7, 4): DDP4}, (), OWN, found) == ()


def test_of_joined_states_one_node_reads_what_no_node_needs() -> None:
    """In any shape: the objects of all ranks count together, so where one is nowhere the state is not used."""
    nodes = [node((0,), piece(0), piece(1), piece(3, kind=OBJECTS)), node((1,), piece(2, kind=OBJECTS))]
    found = plan(nodes, {(7, 4): DDP4}, own=OWN, joined=[(7, 4)])
    assert found is not None
    assert [{source.rank for source in one} for one in found.sources] == [{0, 1, 2, 3}, {0, 1}]
    assert plan(nodes[:1], {(7, 4): DDP4}, own=OWN, joined=[(7, 4)]) is None
    assert plan(nodes[:1], {(7, 4): DDP4}, own=OWN) is not None


def test_replicated_states_need_no_copies() -> None:
    """Under DDP a newcomer reads what any other node has, where ranks have nothing of their own."""
    nodes = [node((0, 1), piece(0), piece(1)), node((2, 3))]
    found = plan(nodes, {(7, 4): DDP4})
    assert found is not None
    assert not found.reshard
    assert found.sources[1] == (Source(MEMORY, 0, 0), Source(MEMORY, 0, 1))


def test_the_newest_that_all_have() -> None:
    """A step that one rank lacks is not whole; the one before it is taken."""
    nodes = [
        node((0, 1), piece(0, 12), piece(1, 12), piece(0), piece(1)),
        node((2, 3), piece(2, 12), piece(2), piece(3)),
    ]
    found = plan(nodes, {(7, 4): FSDP4})
    assert found is not None
    assert found.step == 10


def test_a_newer_generation_is_newer_at_a_lower_step() -> None:
    """What was saved after a roll-back counts, and pieces of two generations make no state."""
    old = [piece(rank, 20, 1) for rank in range(4)]
    new = [piece(rank, 15, 2) for rank in range(4)]
    nodes = [node((0, 1), *old[:2], *new[:2]), node((2, 3), *old[2:], *new[2:])]
    found = plan(nodes, {(7, 4): FSDP4})
    assert found is not None
    assert (found.generation, found.step) == (2, 15)
    nodes = [node((0, 1), *old[:2], *new[:2]), node((2, 3), *old[2:], new[2])]
    found = plan(nodes, {(7, 4): FSDP4})
    assert found is not None
    assert (found.generation, found.step) == (1, 20)


def test_storage() -> None:
    """Storage is read where it is newer than what memory has whole; for the same state memory is."""
    nodes = [node((0, 1), piece(0), piece(1)), node((2, 3), piece(2), piece(3))]
    assert plan(nodes, {(7, 4): FSDP4}, {(1, 11)}) == Plan(1, 11, STORAGE)
    same = plan(nodes, {(7, 4): FSDP4}, {(1, 10)})
    assert same is not None
    assert same.tier == MEMORY
    assert plan([node((0,))], {}) is None


def test_the_ladder() -> None:
    """What fails verification is not used again: the copy, then the disk, then storage, then an older state, then nothing."""
    sets: Holders = ((0,),)
    pieces = [piece(0, kind=kind, world=1, nproc=1) for kind in (MEMORY, REPLICA)]
    nodes = [Node((0,), (*pieces, piece(0, 8, world=1, nproc=1)), "", ((1, 10), (1, 7)))]
    refused: list[Refusal] = []
    told = []
    while (found := plan(nodes, {(7, 1): sets}, {(1, 10)}, refused)) is not None:
        told.append((found.step, found.sources[0][0].kind if found.sources else found.tier))
        refused += refusals(found, 0, 0)
    assert told == [(10, MEMORY), (10, REPLICA), (10, DISK), (10, STORAGE), (8, MEMORY), (7, DISK)]


def test_another_shape() -> None:
    """Where the world's size or its nodes' changed, every node can read everything."""
    for ranks in (((0,), (1,)), ((0, 1, 2, 3), ()), ((0, 1, 2), (3, 4, 5))):
        nodes = [node(ranks[0], piece(0), piece(1)), node(ranks[1], piece(2), piece(3))]
        found = plan([one for one in nodes if one.ranks] if ranks[1] else [
            nodes[0]._replace(pieces=(*nodes[0].pieces, *nodes[1].pieces))
        ], {(7, 4): FSDP4})  # fmt: skip
        assert found is not None
        assert found.reshard
        assert all({source.rank for source in one} == {0, 1, 2, 3} for one in found.sources)


def test_fetches_are_spread() -> None:
    """Newcomers do not all ask the same node."""
    nodes = [node((place,), piece(place, nproc=1, world=8)) if place < 4 else node((place,)) for place in range(8)]
    sets: Holders = (tuple(range(8)),)
    found = plan(nodes, {(7, 8): sets})
    assert found is not None
    assert sorted(one[0].node for one in found.sources[4:]) == [0, 1, 2, 3]


def test_the_disk_of_another_node_is_out_of_reach() -> None:
    """A disk is its own node's: only what all have whole on theirs is of use."""
    nodes = [Node((0, 1), (), "there", ((1, 5), (1, 4))), Node((2, 3), (), "there", ((1, 4),))]
    assert plan(nodes, {}) == Plan(1, 4, DISK)
    assert plan([nodes[0], nodes[1]._replace(disk=())], {}) is None


# ---- against brute force

SETS = {
    (7, 4): FSDP4,
    (7, 2): ((0,), (1,)),
    (8, 4): DDP4,
    (8, 2): ((0, 1),),
}
PIECES = [
    Piece(kind, rank, world, rank % 2, generation, step, layout)
    for (layout, world), kind, generation, step in product(SETS, (MEMORY, REPLICA, OBJECTS), (1, 2), (5, 6))
    for rank in range(world)
]
OWNERS = {(7, 4): (0, 1, 2, 3), (7, 2): (), (8, 4): (1, 2, 3), (8, 2): (0, 1)}
STORED = list(product((1, 2), (4, 5, 6)))


@st.composite
def worlds(draw: st.DrawFn) -> tuple[list[Node], set[tuple[int, int]], list[Refusal]]:
    """One to three nodes of one or two ranks; states are there on most of them."""
    places, nproc = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    states = draw(st.lists(st.sampled_from(PIECES), max_size=4))
    having: list[set[Piece]] = [set(draw(st.lists(st.sampled_from(PIECES), max_size=3))) for _ in range(places)]
    for state in states:
        for rank in range(state.world):
            for place in draw(st.sets(st.integers(0, places - 1), max_size=2)):
                kind = draw(st.sampled_from((MEMORY, REPLICA, OBJECTS)))
                having[place].add(state._replace(rank=rank, local_rank=rank % 2, kind=kind))
    nodes = [
        Node(
            tuple(range(place * nproc, (place + 1) * nproc)),
            tuple(sorted(having[place])),
            draw(st.sampled_from(("there", "there", ""))),
            tuple(draw(st.lists(st.sampled_from(STORED), max_size=3))),
        )
        for place in range(places)
    ]
    stored = set(draw(st.lists(st.sampled_from(STORED), max_size=2)))
    every = [
        Refusal(one.kind, place, one.rank, one.generation, one.step)
        for place, found in enumerate(having)
        for one in sorted(found)
    ]
    every += [Refusal(STORAGE, -1, -1, *one) for one in sorted(stored)]
    every += [Refusal(DISK, place, -1, *one) for place, each in enumerate(nodes) for one in each.disk]
    refused = draw(st.lists(st.sampled_from(every), max_size=4)) if every else []
    return nodes, stored, refused


def reachable(nodes: list[Node], refused: list[Refusal], place: int, state: tuple[int, int, int, int]) -> set[Source]:
    """What of a state a node can read at all."""
    return {
        Source(one.kind, at, one.rank)
        for at, other in enumerate(nodes)
        for one in other.pieces
        if (one.generation, one.step, one.layout, one.world) == state
        and Refusal(one.kind, at, one.rank, one.generation, one.step) not in refused
        and (at == place or other.address)
    }


@settings(max_examples=examples(150, 500), deadline=None)
@given(worlds())
def test_against_brute_force(case: tuple[list[Node], set[tuple[int, int]], list[Refusal]]) -> None:
    """The newest state that all can get; each source is there, not refused, of one state; own node first; memory first."""
    nodes, stored, refused = case
    usable = {one for one in stored if Refusal(STORAGE, -1, -1, *one) not in refused}
    disk = set[tuple[int, int]].intersection(
        *({one for one in each.disk if Refusal(DISK, at, -1, *one) not in refused} for at, each in enumerate(nodes))
    )
    whole: dict[tuple[int, int, int, int], bool] = {}
    for state in {(one.generation, one.step, one.layout, one.world) for each in nodes for one in each.pieces}:
        sets = SETS[state[2:]]
        there = [
            (place, one) for place, each in enumerate(nodes) for one in each.pieces
            if (one.generation, one.step, one.layout, one.world) == state
            and Refusal(one.kind, place, one.rank, one.generation, one.step) not in refused
        ]  # fmt: skip
        if not there:
            continue
        nproc = 1 + max(one.local_rank for _, one in there)
        reshard = sum(len(each.ranks) for each in nodes) != state[3] or any(len(each.ranks) != nproc for each in nodes)
        # The number of ranks per node that pieces show is too low where those of the last local ranks are missing.
        nproc = len(nodes[0].ranks)
        other = sum(len(each.ranks) for each in nodes) != state[3] or any(
            one.local_rank != one.rank % nproc for _, one in there
        )
        if all(
            any(source.rank in one and source.kind != OBJECTS for source in reachable(nodes, refused, place, state))
            for place, each in enumerate(nodes)
            for one in sets
            if reshard or set(one) & set(each.ranks)
        ) and (
            other
            or all(
                any(source.rank == rank for source in reachable(nodes, refused, place, state))
                for place, each in enumerate(nodes)
                for rank in each.ranks
                if rank in OWNERS[state[2:]]
            )
        ):
            whole[state] = reshard
    best = max([*usable, *disk, *(state[:2] for state in whole)], default=None)
    found = plan(nodes, SETS, stored, refused, OWNERS)
    for lack in passed_over(nodes, SETS, refused, OWNERS, found):
        assert lack.ranks
        assert found is None or (lack.generation, lack.step) >= (found.generation, found.step)
    assert (found and (found.generation, found.step)) == best
    if found is None:
        return
    in_memory = best in {state[:2] for state in whole}
    assert found.tier == (MEMORY if in_memory else DISK if best in disk else STORAGE)
    if not in_memory:
        return
    state = (found.generation, found.step, found.layout, found.world)
    assert found.reshard == whole[state]
    for place, (each, read) in enumerate(zip(nodes, found.sources, strict=True)):
        can = reachable(nodes, refused, place, state)
        assert set(read) <= can
        needed = [one for one in SETS[state[2:]] if found.reshard or set(one) & set(each.ranks)]
        assert len(read) == len(set(read))
        assert len(read) == len({source.rank for source in read})
        for rank in set(each.ranks) & set(OWNERS[state[2:]]):
            assert found.reshard <= (any(one.rank == rank for one in read) == any(one.rank == rank for one in can))
            assert found.reshard or any(one.rank == rank for one in read)
        for one in needed:
            got = [source for source in read if source.rank in one and source.kind != OBJECTS]
            assert got
            if any(other.rank in one and other.node == place and other.kind != OBJECTS for other in can):
                assert any(source.node == place for source in got)
