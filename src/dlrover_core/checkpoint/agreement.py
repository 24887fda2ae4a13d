"""From which memory, disk or storage the ranks of a new world begin: pure, decided by one rank for all.

Every node tells which *pieces* it has, a piece being one rank's part of one saved state. States are compared by (generation,
step): what a newer generation saved counts, although an older one may have got further before it was rolled back. Pieces of two
generations never make one state, nor do pieces of two layouts.

A state in memory is usable if every node of the new world can get all pieces that it *needs*. In a world of the same shape those
are the pieces that its own ranks had: one of each set of `holders` that any of them is in. In a changed world any rank may need
anything, so all sets are needed, and the ranks find out from the tables which chunks of which pieces are theirs. What is on the
disks of nodes is usable if each of them has all of it; what is on storage, by all.

Some ranks have objects of their own (random numbers, a sampler's position), which lie only in pieces of that very rank. In a
world of the same shape a node needs such a piece for each of its ranks, else the state is unusable (`passed_over` says so). In a
changed world the piece is read where there is one. Of *joined* states the first node reads those that no node needs, too: what
all ranks say together counts, so where one of them says nothing the state is unusable.

What failed verification is handed in as *refused*, and the next best plan comes out; so a ladder is climbed down by asking again.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

MEMORY, REPLICA, DISK, STORAGE = "memory", "replica", "disk", "storage"
OBJECTS = "objects"
"""The kind of a copy of what only one rank has: objects, and no tensors that each node has anyway."""

Holders = tuple[tuple[int, ...], ...]


class Piece(NamedTuple):
    """One rank's part of a saved state, in some node's memory.

    ``kind``: `MEMORY`: on the rank's own node; `REPLICA`: a full copy on another node; `OBJECTS`: a light copy there.
    ``rank``, ``world``, ``local_rank``: of the rank that saved it.
    ``generation``, ``step``, ``layout``: of the state.
    """

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


class Lack(NamedTuple):
    """A state with all tensors that was not taken, because the objects of these ``ranks`` are on no node that can be read."""

    generation: int
    step: int
    ranks: tuple[int, ...]


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
    own: Mapping[tuple[int, int], Collection[int]] = MappingProxyType({}),
    joined: Collection[tuple[int, int]] = (),
) -> Plan | None:
    """The newest state that every node can get, from the fastest places; None: there is nothing.

    ``holders`` and ``own`` (the ranks that have objects of their own): by (layout, world) of pieces; pieces of others are of no
    use. ``joined``: forms of states of which the objects of all ranks are needed. ``stored``: (generation, step) of what is whole
    on storage. Own node first; what is fetched is fetched from the node that is asked for the fewest pieces so far.
    """
    failed = frozenset(refused)
    found = _states(nodes, failed)
    disks = [
        {one for one in node.disk if Refusal(DISK, place, -1, *one) not in failed}
        for place, node in enumerate(nodes)
        if node.ranks
    ]
    disk = set[tuple[int, int]].intersection(*disks) if disks else set()
    storage = {one for one in stored if Refusal(STORAGE, -1, -1, *one) not in failed}
    for newest in sorted({*storage, *disk, *((one.generation, one.step) for one in found)}, reverse=True):
        for state in sorted((one for one in found if one[:2] == newest), reverse=True):
            form = state.layout, state.world
            sets, owners = holders.get(form, ()), own.get(form, ())
            read = _read(nodes, state, sets, owners, found[state]) if sets else None
            if read is not None and form in joined:
                read = _with_all(nodes, read, owners, found[state])
            if read is not None:
                reshard = _changed(nodes, state.world, found[state])
                return Plan(*newest, MEMORY, state.layout, state.world, reshard, read)
        if newest in disk:
            return Plan(*newest, DISK)
        if newest in storage:
            return Plan(*newest, STORAGE)
    return None


def passed_over(
    nodes: Sequence[Node],
    holders: Mapping[tuple[int, int], Holders],
    refused: Collection[Refusal],
    own: Mapping[tuple[int, int], Collection[int]],
    taken: Plan | None,
) -> tuple[Lack, ...]:
    """The states in memory, newer than what is ``taken``, that have all tensors and lack objects; the newest first.

    Without states that were never whole: some rank is still there with its memory, and has not saved them.
    """
    lacks = []
    floor = (taken.generation, taken.step) if taken is not None else (-1, -1)
    for state, pieces in sorted(_states(nodes, frozenset(refused)).items(), reverse=True):
        form = state.layout, state.world
        sets, owners = holders.get(form, ()), own.get(form, ())
        if state[:2] <= floor or not sets or _read(nodes, state, sets, (), pieces) is None:
            continue
        saved = {
            piece.rank
            for node in nodes
            for piece in node.pieces
            if piece.rank in node.ranks and (piece.kind, *piece[4:7:2]) == (MEMORY, state.generation, state.layout)
        }
        lacking = tuple(rank for rank in _lacking(nodes, state, owners, pieces) if rank not in saved)
        if lacking:
            lacks.append(Lack(state.generation, state.step, lacking))
    return tuple(lacks)


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


def _states(nodes: Sequence[Node], failed: Collection[Refusal]) -> dict[_State, list[tuple[int, Piece]]]:
    """The pieces in memory by state, each with its node's place; without pieces that failed verification."""
    found: dict[_State, list[tuple[int, Piece]]] = {}
    for place, node in enumerate(nodes):
        for piece in node.pieces:
            if Refusal(piece.kind, place, piece.rank, piece.generation, piece.step) not in failed:
                state = _State(piece.generation, piece.step, piece.layout, piece.world)
                found.setdefault(state, []).append((place, piece))
    return found


def _lacking(
    nodes: Sequence[Node], state: _State, owners: Collection[int], pieces: Sequence[tuple[int, Piece]]
) -> tuple[int, ...]:
    """The ranks whose own objects their nodes cannot get, in a world of the same shape; none in a world of another shape.

    Missing pieces do not prove another shape: only a piece that is there can.
    """
    if _other_shape(nodes, state.world, pieces):
        return ()
    by_rank = _sources(pieces)
    return tuple(
        rank
        for place, node in enumerate(nodes)
        for rank in node.ranks
        if rank in owners and not _usable(nodes, place, by_rank.get(rank, ()))
    )


def _sources(pieces: Iterable[tuple[int, Piece]]) -> dict[int, list[Source]]:
    by_rank: dict[int, list[Source]] = {}
    for place, piece in pieces:
        by_rank.setdefault(piece.rank, []).append(Source(piece.kind, place, piece.rank))
    return by_rank


def _usable(nodes: Sequence[Node], place: int, sources: Iterable[Source]) -> list[Source]:
    """The sources that the node at a place can read."""
    return [source for source in sources if source.node == place or nodes[source.node].address]


def _changed(nodes: Sequence[Node], world: int, pieces: Sequence[tuple[int, Piece]]) -> bool:
    """Whether the new world has another shape than the old one. The pieces' local ranks show the old nodes' sizes."""
    ranks = sorted(rank for node in nodes for rank in node.ranks)
    sizes = {len(node.ranks) for node in nodes if node.ranks}
    old = 1 + max(piece.local_rank for _place, piece in pieces)
    return ranks != list(range(world)) or sizes != {old}


def _other_shape(nodes: Sequence[Node], world: int, pieces: Sequence[tuple[int, Piece]]) -> bool:
    """Has the new world other ranks, or a rank of a piece another number on its node?"""
    local_ranks = {rank: at for node in nodes for at, rank in enumerate(sorted(node.ranks))}
    return sorted(local_ranks) != list(range(world)) or any(
        local_ranks[piece.rank] != piece.local_rank for _place, piece in pieces
    )


def _read(
    nodes: Sequence[Node],
    state: _State,
    sets: Holders,
    owners: Collection[int],
    pieces: Sequence[tuple[int, Piece]],
) -> tuple[tuple[Source, ...], ...] | None:
    """For each node the sources that it reads; None where a node cannot get something that it needs."""
    if _lacking(nodes, state, owners, pieces):
        return None
    changed = _changed(nodes, state.world, pieces)
    asked: Counter[int] = Counter()
    by_rank = _sources(pieces)
    read = []
    for place, node in enumerate(nodes):
        own = frozenset(node.ranks)
        mine: list[Source] = []

        def take(
            usable: list[Source], place: int = place, own: frozenset[int] = own, mine: list[Source] = mine
        ) -> None:
            best = min(usable, key=functools.partial(_cost, place, own, mine, asked))
            asked[best.node] += best.node != place and best not in mine
            if best not in mine:
                mine.append(best)

        for rank in node.ranks:
            usable = _usable(nodes, place, by_rank.get(rank, ())) if rank in owners else []
            # A whole piece, even from afar: of one rank a node reads one piece.
            usable = [one for one in usable if one.kind != OBJECTS] or usable
            if usable:
                take(usable)
        for one in sets:
            if not own or (not changed and own.isdisjoint(one)):
                continue
            usable = _usable(
                nodes, place, (source for rank in one for source in by_rank.get(rank, ()) if source.kind != OBJECTS)
            )
            if not usable:
                return None
            take(usable)
        read.append(tuple(mine))
    return tuple(read)


def _with_all(
    nodes: Sequence[Node],
    read: tuple[tuple[Source, ...], ...],
    owners: Collection[int],
    pieces: Sequence[tuple[int, Piece]],
) -> tuple[tuple[Source, ...], ...] | None:
    """Let the first node read what no node reads of the owners' pieces; None where a piece is nowhere."""
    place = next((place for place, node in enumerate(nodes) if node.ranks), 0)
    by_rank, more = _sources(pieces), list(read[place])
    known = {source.rank for sources in read for source in sources}
    for rank in sorted(set(owners) - known):
        usable = _usable(nodes, place, by_rank.get(rank, ()))
        if not usable:
            return None
        more.append(min(usable, key=functools.partial(_cost, place, frozenset(), more, {})))
    return (*read[:place], tuple(more), *read[place + 1 :])


def _cost(
    place: int, own: frozenset[int], chosen: Sequence[Source], asked: Mapping[int, int], source: Source
) -> tuple[bool, bool, bool, int, bool, int, int]:
    """Sort key of a source: own memory, then a copy in it, then another node. Own ranks first, for their objects."""
    away = source.node != place
    load = asked.get(source.node, 0) if away else 0
    return (away, source.rank not in own, source not in chosen, load, source.kind != MEMORY, source.node, source.rank)
