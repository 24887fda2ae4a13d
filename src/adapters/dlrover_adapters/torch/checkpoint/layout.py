"""Who keeps what: once per layout the ranks tell each other their chunks, and each decides the same by itself.

A chunk that several ranks of a node hold is kept by one of them, so that a node has one copy and its ranks share the work; of a
chunk that several nodes hold, every node keeps a copy and the first one writes it to storage. What is live is kept by the first
rank of a node: under DDP ranks' buffers differ, and rank 0's are those that count.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import msgpack

from dlrover_adapters.checkpoint.table import Item, Table

from .capture import Chunk, Signature
from .sources import Path

ALIGN_BYTES = 64
_ITSELF = "__itself__"


class Meets(Protocol):
    """The part of `Meeting` that is needed here."""

    rank: int
    world: int

    def all_gather(self, name: str, mine: bytes) -> list[bytes]:
        """What every rank has to say."""


Key = tuple[str, tuple[int, ...], tuple[int, ...]]
"""A chunk of the whole state: name, offsets, shape."""


class Piece(NamedTuple):
    """One chunk of the whole state, as all ranks know it."""

    key: Key
    size: int
    live: bool


class Share(NamedTuple):
    """One rank's part: chunks that it keeps, those of them that it writes, who keeps what, and who writes any."""

    keeps: frozenset[Key]
    writes: frozenset[Key]
    holders: tuple[tuple[int, ...], ...]
    writers: frozenset[int]


def divided(pieces: Sequence[Sequence[Piece]], nodes: Sequence[int], rank: int) -> Share:
    """Rank ``rank``'s part, where ``pieces`` are those of all ranks, and ``nodes`` says on which node each rank is."""
    having: dict[Key, list[int]] = defaultdict(list)
    known: dict[Key, Piece] = {}
    for one, mine in enumerate(pieces):
        for piece in mine:
            having[piece.key].append(one)
            first = known.setdefault(piece.key, piece)
            if piece.live and not first.live:
                known[piece.key] = piece
    load = [0] * len(pieces)
    keepers: dict[Key, list[int]] = {}
    # The largest first, each to the rank of its node that has the least; in the same order everywhere.
    for key, piece in sorted(known.items(), key=lambda one: (-one[1].size, one[0])):
        by_node: dict[int, list[int]] = defaultdict(list)
        for one in having[key]:
            by_node[nodes[one]].append(one)
        chosen = [min(ranks) if piece.live else min(ranks, key=lambda r: (load[r], r)) for ranks in by_node.values()]
        for one in chosen:
            load[one] += piece.size
        keepers[key] = sorted(chosen)
    keeps = frozenset(key for key, ranks in keepers.items() if rank in ranks)
    writes = frozenset(key for key in keeps if keepers[key][0] == rank)
    holders = sorted({tuple(ranks) for key, ranks in keepers.items() if known[key].size} or {(0,)})
    return Share(keeps, writes, tuple(holders), frozenset(ranks[0] for ranks in keepers.values()))


def agreed(
    chunks: Sequence[Chunk],
    signature: Signature,
    paths: Mapping[str, Path],
    own: frozenset[str],
    meeting: Meets,
    node: int,
) -> Table:
    """The table of this rank, once all ranks have told each other what they have.

    ``paths``: of the objects, as those of tensors are in ``chunks``. ``own``: objects that no other rank has.

    A collective: all ranks call it. Raises `MeetingFailed`.
    """
    mine = msgpack.packb([[*_key(one), one.size, one.live] for one in chunks if not one.same_as])
    form = hashlib.blake2b(repr(signature.chunks).encode(), digest_size=16).digest()
    told = [msgpack.unpackb(one) for one in meeting.all_gather("forms", msgpack.packb((node, form, bool(own))))]
    nodes, forms = [one[0] for one in told], [one[1] for one in told]
    # Replicas have the same: only the first of them says what.
    lists = meeting.all_gather("chunks", mine if forms.index(form) == meeting.rank else b"")
    by_form = {forms[one]: _pieces(raw) for one, raw in enumerate(lists) if raw}
    share = divided([by_form[one] for one in forms], nodes, meeting.rank)
    number = hashlib.blake2b(repr((nodes, forms)).encode(), digest_size=8).digest()
    writes_objects = [name for name in signature.objects if name in own or meeting.rank == 0]
    return Table(
        layout=int.from_bytes(number, "little") >> 1 or 1,
        world=meeting.world,
        rank=meeting.rank,
        holders=share.holders,
        items=_items(chunks, share),
        objects=tuple(writes_objects),
        paths=tuple(_apart({**{one.name: one.path for one in chunks}, **paths}).items()),
        writers=tuple(sorted({0, *share.writers, *(rank for rank, one in enumerate(told) if one[2])})),
        own=tuple(rank for rank, one in enumerate(told) if one[2]),
    )


def _apart(paths: Mapping[str, Path]) -> dict[str, Path]:
    """Paths that make one nested state: none leads through another's end, and a list has all of its places.

    Of a list in which not all is a tensor the rest lies elsewhere, serialised; what is left are keys of a dict.
    """
    below: dict[Path, set[Any]] = defaultdict(set)
    for path in paths.values():
        for end, key in enumerate(path):
            below[path[:end]].add(key)
    found: dict[str, Path] = {}
    for name, path in paths.items():
        whole = [
            key if below[path[:end]] == set(range(len(below[path[:end]]))) else str(key) for end, key in enumerate(path)
        ]
        found[name] = (*whole, *([_ITSELF] if path in below else []))
    return found


def with_own(
    table: Table, chunks: Sequence[Chunk], objects: Iterable[str], paths: Mapping[str, Path], own: Callable[[str], bool]
) -> Table:
    """The table with what only this rank has as it is now: nobody else needs to know, and the layout stays."""
    shared = {(one.name, tuple(one.offsets), tuple(one.shape)): one.write for one in table.items if not own(one.name)}
    mine = {_key(one) for one in chunks if own(one.name)}
    share = Share(
        frozenset({*shared, *mine}),
        frozenset({*mine, *(key for key, write in shared.items() if write)}),
        (),
        frozenset(),
    )
    return table._replace(
        items=_items(chunks, share),
        objects=tuple(sorted(name for name in objects if own(name) or table.rank == 0)),
        paths=tuple(_apart({**{one.name: one.path for one in chunks}, **paths}).items()),
    )


def _key(chunk: Chunk) -> Key:
    return chunk.name, chunk.offsets, tuple(chunk.tensor.shape)


def _pieces(raw: bytes) -> list[Piece]:
    return [
        Piece((name, tuple(offsets), tuple(shape)), size, live)
        for name, offsets, shape, size, live in msgpack.unpackb(raw)
    ]


def _items(chunks: Sequence[Chunk], share: Share) -> tuple[Item, ...]:
    """What this rank keeps, one after the other; a second name for the same bytes takes no room."""
    items: list[Item] = []
    places: dict[str, tuple[int, bool]] = {}
    at = 0
    for one in chunks:
        if one.same_as:
            if one.same_as not in places:
                continue
            here, write = places[one.same_as]
        else:
            if _key(one) not in share.keeps:
                continue
            here, write = at, _key(one) in share.writes
            places[one.name] = here, write
            at += -(-one.size // ALIGN_BYTES) * ALIGN_BYTES
        shape = tuple(one.tensor.shape)
        items.append(Item(one.name, one.dtype, one.full_shape, one.offsets, shape, here, one.size, one.live, write))
    return tuple(items)


def data_bytes(table: Table) -> int:
    """What a slot of this table needs."""
    return max((one.at + one.size for one in table.items), default=0)
