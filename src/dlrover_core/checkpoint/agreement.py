"""From which memory, disk or storage the ranks of a new world begin: pure, decided by one rank for all.

Every node tells which *pieces* it has, a piece being one rank's part of one saved state. States are compared by (generation,
step): what a newer generation saved counts, although an older one may have got further before it was rolled back. Pieces of two
generations never make one state, nor do pieces of two layouts.

A state in memory is usable if every node of the new world can get all pieces that it *needs*. In a world of the same shape those
are the pieces that its own ranks had: one of each set of `holders` that any of them is in. In a changed world any rank may need
anything, so all sets are needed, and the ranks find out from the tables which chunks of which pieces are theirs. What is on the
disks of nodes is usable if each of them has all of it; what is on storage, by all.

What failed verification is handed in as *refused*, and the next best plan comes out; so a ladder is climbed down by asking again.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

MEMORY, REPLICA, DISK, STORAGE = "memory", "replica", "disk", "storage"

Holders = tuple[tuple[int, ...], ...]


class Piece(NamedTuple):
    """What ``rank`` of ``world`` saved: in the `MEMORY` of its node, or as a `REPLICA` on another one."""

    kind: str
    rank: int
    world: int
    local_rank: int
    generation: int
    step: int
    layout: int


class Node(NamedTuple):
    """One node: its ranks in the new world (none: it has left, and lends), what it has in memory, and where others can fetch that
    from (empty: nowhere). ``disk``: (generation, step) of states of which all is on its own disk.
    """

    ranks: tuple[int, ...]
    pieces: tuple[Piece, ...]
    address: str = ""
    disk: tuple[tuple[int, int], ...] = ()


class Source(NamedTuple):
    """Where a node reads the piece of an old rank: from which kind of memory on which node (an index; its own: no transfer)."""

    kind: str
    node: int
    rank: int


class Refusal(NamedTuple):
    """What failed verification, and is not to be used again. Of `DISK` the rank is -1, of `STORAGE` the node too."""

    kind: str
    node: int
    rank: int
    generation: int
    step: int


class Plan(NamedTuple):
    """From what all ranks begin: ``tier`` is `MEMORY`, anybody's, or `DISK` or `STORAGE`. ``sources``: by node, what it reads.

    ``reshard``: the world has another shape than the one that saved, so who needs what is to be found out from the tables.
    """

    generation: int
    step: int
    tier: str
    layout: int = 0
    world: int = 0
    reshard: bool = False
    sources: tuple[tuple[Source, ...], ...] = ()


class _State(NamedTuple):
    """Which pieces belong together. Sorted by what is newer."""

    generation: int
    step: int
    layout: int
    world: int


def plan(
    nodes: Sequence[Node],
    holders: Mapping[tuple[int, int], Holders],
    stored: Collection[tuple[int, int]] = (),
    refused: Collection[Refusal] = (),
) -> Plan | None:
    """The newest state that every node can get, from the fastest places; None: there is nothing.

    ``holders``: by (layout, world) of pieces; pieces of others are of no use. ``stored``: (generation, step) of what is whole on
    storage. Own node first; what is fetched is fetched from the node that is asked for the fewest pieces so far.
    """
    failed = frozenset(refused)
    found: dict[_State, list[tuple[int, Piece]]] = {}
    for place, node in enumerate(nodes):
        for piece in node.pieces:
            if Refusal(piece.kind, place, piece.rank, piece.generation, piece.step) not in failed:
                state = _State(piece.generation, piece.step, piece.layout, piece.world)
                found.setdefault(state, []).append((place, piece))
    disks = [
        {one for one in node.disk if Refusal(DISK, place, -1, *one) not in failed}
        for place, node in enumerate(nodes)
        if node.ranks
    ]
    disk = set[tuple[int, int]].intersection(*disks) if disks else set()
    storage = {one for one in stored if Refusal(STORAGE, -1, -1, *one) not in failed}
    for newest in sorted({*storage, *disk, *((one.generation, one.step) for one in found)}, reverse=True):
        for state in sorted((one for one in found if one[:2] == newest), reverse=True):
            sets = holders.get((state.layout, state.world))
            read = _read(nodes, state, sets, found[state]) if sets else None
            if read is not None:
                reshard = _changed(nodes, state.world, found[state])
                return Plan(*newest, MEMORY, state.layout, state.world, reshard, read)
        if newest in disk:
            return Plan(*newest, DISK)
        if newest in storage:
            return Plan(*newest, STORAGE)
    return None


def refusals(plan: Plan, place: int, rank: int) -> tuple[Refusal, ...]:
    """What to refuse when the node at ``place`` could not use the piece of old ``rank``; -1: any of what it reads."""
    if plan.tier == STORAGE:
        return (Refusal(STORAGE, -1, -1, plan.generation, plan.step),)
    if plan.tier == DISK:
        return (Refusal(DISK, place, -1, plan.generation, plan.step),)
    return tuple(
        Refusal(one.kind, one.node, one.rank, plan.generation, plan.step)
        for one in plan.sources[place]
        if rank in {one.rank, -1}
    )


def _changed(nodes: Sequence[Node], world: int, pieces: Sequence[tuple[int, Piece]]) -> bool:
    """Is the new world of another shape? Of the old one its size is known, and its nodes' by the local ranks of the pieces."""
    ranks = sorted(rank for node in nodes for rank in node.ranks)
    sizes = {len(node.ranks) for node in nodes if node.ranks}
    old = 1 + max(piece.local_rank for _place, piece in pieces)
    return ranks != list(range(world)) or sizes != {old}


def _read(
    nodes: Sequence[Node], state: _State, sets: Holders, pieces: Sequence[tuple[int, Piece]]
) -> tuple[tuple[Source, ...], ...] | None:
    """By node what it reads; None where one of them cannot get something that it needs."""
    changed = _changed(nodes, state.world, pieces)
    asked: Counter[int] = Counter()
    by_rank: dict[int, list[Source]] = {}
    for place, piece in pieces:
        by_rank.setdefault(piece.rank, []).append(Source(piece.kind, place, piece.rank))
    read = []
    for place, node in enumerate(nodes):
        own = frozenset(node.ranks)
        mine: list[Source] = []
        for one in sets:
            if not own or (not changed and own.isdisjoint(one)):
                continue
            usable = [
                source
                for rank in one
                for source in by_rank.get(rank, ())
                if source.node == place or nodes[source.node].address
            ]
            if not usable:
                return None
            best = min(usable, key=functools.partial(_cost, place, own, mine, asked))
            asked[best.node] += best.node != place and best not in mine
            if best not in mine:
                mine.append(best)
        read.append(tuple(mine))
    return tuple(read)


def _cost(
    place: int, own: frozenset[int], chosen: Sequence[Source], asked: Mapping[int, int], source: Source
) -> tuple[bool, bool, bool, int, bool, int, int]:
    """Own memory, a copy in it, another node's. Of one's own ranks first: what only they have is with it."""
    away = source.node != place
    load = asked.get(source.node, 0) if away else 0
    return (away, source.rank not in own, source not in chosen, load, source.kind != MEMORY, source.node, source.rank)
