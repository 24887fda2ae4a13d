"""The assignment of chunks to ranks: which rank of each node stages a chunk, and which rank writes it to storage.

Rank 0 computes it for all ranks from their chunk lists. Two ranks have the same chunk where name, offsets and shape are equal.
Of each chunk one rank per node keeps a copy, so that a node has all that its ranks have, once. One of those keepers writes it.
The work is spread: a chunk goes to the rank of the node that keeps the fewest bytes so far, and is written by the keeper whose
node writes the fewest. Live tensors are the exception: the first rank of a node keeps them, and the first node writes them,
because under DDP the ranks' buffers differ and rank 0's count.

Under FSDP nearly all chunks are on one rank alone, and there is nothing to decide about those. They are recognised by comparing
the bytes of their places, without unpacking them: 256 ranks with 2,892 chunks each take about half a second of one core.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from math import prod
from typing import NamedTuple

KEEPS, WRITES = 1, 2
"""Flags of a chunk in a rank's share: the rank stages the chunk in memory; the rank writes the chunk to storage."""
INT_BYTES = 8

Holders = tuple[tuple[int, ...], ...]


class Piece(NamedTuple):
    """The properties of a chunk that are equal on all ranks with the same model. Its place is in `ChunkList.places`."""

    name: str
    element_bytes: int
    dims: int
    live: bool
    tied: bool
    """The chunk's bytes are another chunk's: it is kept and written with that one, and takes no part here."""


class Names:
    """The pieces of a chunk list, sorted by name, and where each one's place begins and ends in `ChunkList.places`."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self.pieces = tuple(pieces)
        self.number = {one.name: number for number, one in enumerate(self.pieces)}
        self.spans: list[tuple[int, int]] = []
        at = 0
        for one in self.pieces:
            self.spans.append((at, at + 2 * one.dims * INT_BYTES))
            at = self.spans[-1][1]
        self.places_bytes = at
        self.untied = [number for number, one in enumerate(self.pieces) if not one.tied]


class ChunkList(NamedTuple):
    """The chunks of one rank, or of several that have the same ones.

    ``names``: one object for all lists with the same names.
    ``places``: offsets and shape of each chunk as little-endian 64-bit integers, in the order of the names.
    ``size``: bytes of all chunks that are not tied.
    """

    names: Names
    places: bytes
    size: int


class Division(NamedTuple):
    """The assignment of all chunks to ranks.

    ``shares``: by rank, one byte for each chunk of its list: `KEEPS`, `WRITES`.
    ``holders``: as in `checkpoint.table.Table`.
    ``writers``: the ranks that write any chunk, ascending.
    """

    shares: list[bytearray]
    holders: Holders
    writers: tuple[int, ...]


class _Contested(NamedTuple):
    """A chunk that several ranks have. Sorts by size, the largest first, then by name and place."""

    minus_size: int
    name: str
    place: bytes
    live: bool
    lists: tuple[int, ...]


def divided(lists: Sequence[ChunkList], which: Sequence[int], nodes: Sequence[int], *, spread: bool = True) -> Division:
    """Assign all chunks; ``which`` of the lists each rank has, and on which of the ``nodes`` it is.

    ``spread`` False: of the nodes that keep a chunk the first one writes it, for formats in which one node writes everything.
    """
    ranks: list[list[int]] = [[] for _ in lists]
    for rank, number in enumerate(which):
        ranks[number].append(rank)
    contested = sorted(_contested(lists, ranks))
    alone, alone_bytes = _alone(lists, contested)
    shares = [_own_alone(lists[number].names) for number in which]
    load = [alone_bytes[number] for number in which]
    written: dict[int, int] = dict.fromkeys(nodes, 0)
    for rank, node in enumerate(nodes):
        written[node] += load[rank]
    writers = {rank for rank, number in enumerate(which) if alone[number]}
    holders: set[tuple[int, ...]] = {(rank,) for rank in range(len(which)) if load[rank]}
    homes: dict[tuple[int, ...], list[list[int]]] = {}
    for minus_size, name, _place, live, members in contested:
        by_node = homes.get(members)
        if by_node is None:
            by_node = homes[members] = _by_node([rank for number in members for rank in ranks[number]], nodes)
        keepers = []
        for here in by_node:
            keeper = here[0] if live or len(here) == 1 else min(here, key=load.__getitem__)
            load[keeper] -= minus_size
            keepers.append(keeper)
            for rank in here:
                shares[rank][lists[which[rank]].names.number[name]] = 0
        writer = keepers[0]
        if spread and not live and len(keepers) > 1:
            writer = min(keepers, key=lambda rank: written[nodes[rank]])
        written[nodes[writer]] -= minus_size
        writers.add(writer)
        for rank in keepers:
            shares[rank][lists[which[rank]].names.number[name]] = KEEPS | WRITES * (rank == writer)
        if minus_size:
            holders.add(tuple(sorted(keepers)))
    return Division(shares, _needed(holders) or ((0,),), tuple(sorted(writers)))


def _contested(lists: Sequence[ChunkList], ranks: Sequence[Sequence[int]]) -> list[_Contested]:
    """The chunks that are on several ranks."""
    blocks: dict[int, list[int]] = {}
    for number, one in enumerate(lists):
        blocks.setdefault(id(one.names), []).append(number)
    having: dict[str, list[tuple[int, list[int]]]] = {}
    for numbers in blocks.values():
        names = lists[numbers[0]].names
        for at in names.untied:
            having.setdefault(names.pieces[at].name, []).append((at, numbers))
    single = all(len(one) == 1 for one in ranks)
    found: list[_Contested] = []
    for name, everywhere in having.items():
        places: list[bytes] = []
        for at, numbers in everywhere:
            begin, end = lists[numbers[0]].names.spans[at]
            places += [lists[number].places[begin:end] for number in numbers]
        if single and len(set(places)) == len(places):
            continue
        groups: dict[bytes, list[int]] = {}
        for place, number in zip(places, [one for _at, numbers in everywhere for one in numbers], strict=True):
            groups.setdefault(place, []).append(number)
        pieces = [lists[numbers[0]].names.pieces[at] for at, numbers in everywhere]
        live, element_bytes = any(one.live for one in pieces), max(one.element_bytes for one in pieces)
        found += [
            _Contested(-element_bytes * _count(place), name, place, live, tuple(members))
            for place, members in groups.items()
            if len(members) > 1 or len(ranks[members[0]]) > 1
        ]
    return found


def _count(place: bytes) -> int:
    """Elements of a chunk."""
    numbers = struct.unpack(f"<{len(place) // INT_BYTES}q", place)
    return prod(numbers[len(numbers) // 2 :])


def _alone(lists: Sequence[ChunkList], contested: Sequence[_Contested]) -> tuple[list[int], list[int]]:
    """For each list the number of its chunks that only one rank has, and the bytes of those chunks."""
    count, size = [len(one.names.untied) for one in lists], [one.size for one in lists]
    for one in contested:
        for number in one.lists:
            count[number] -= 1
            size[number] += one.minus_size
    return count, size


def _own_alone(names: Names) -> bytearray:
    """The share of a rank that shares no chunk with others."""
    share = bytearray(len(names.pieces))
    for number in names.untied:
        share[number] = KEEPS | WRITES
    return share


def _by_node(ranks: Sequence[int], nodes: Sequence[int]) -> list[list[int]]:
    """Ranks by their node; ranks ascending, and nodes by their first rank."""
    found: dict[int, list[int]] = {}
    for rank in sorted(ranks):
        found.setdefault(nodes[rank], []).append(rank)
    return list(found.values())


def _needed(holders: set[tuple[int, ...]]) -> Holders:
    """The sets of holders without those that are the union of smaller sets.

    Each member of such a set is in a smaller one as well. A node that reads a piece of the smaller set has the larger set's chunk
    as well, because every member of the smaller set keeps both. Without this a few hundred scalars that are on all ranks would
    fill every table.
    """
    found: list[tuple[int, ...]] = []
    of_rank: dict[int, list[frozenset[int]]] = {}
    for one in sorted(holders, key=lambda ranks: (len(ranks), ranks)):
        whole = frozenset(one)
        if not all(any(smaller < whole for smaller in of_rank.get(rank, ())) for rank in one):
            found.append(one)
            for rank in one:
                of_rank.setdefault(rank, []).append(whole)
    return tuple(sorted(found))
