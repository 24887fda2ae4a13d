"""The layout: which chunks this rank keeps in memory and which of them it writes to storage, agreed on by all ranks.

Each rank says in a few dozen bytes which form its state has. Where all ranks still have the table of exactly this layout, from
the memory of the generation before, they take it again and nothing else is sent. Otherwise the first rank of each form sends its
chunk list, rank 0 alone assigns the chunks (`division`), and each rank gets its own share.

Names are sent once for all ranks that have the same ones. What differs from rank to rank under FSDP, offsets and shapes, is sent
as compressed integers, and a share comes back as one compressed byte per chunk.

Tensors that only one rank can have (`Capture.own`) are no part of this: their rank keeps and writes them.
"""

from __future__ import annotations

import functools
import hashlib
import sys
import zlib
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import chain
from typing import Any, NamedTuple, Protocol, cast

import msgpack
import torch

from dlrover_adapters.checkpoint.table import ALIGN_BYTES, Item, Table
from dlrover_core.errors import CoreError

from .capture import Signature
from .chunks import Chunk
from .division import INT_BYTES, KEEPS, WRITES, ChunkList, Holders, Names, Piece, divided
from .sources import Path

RULE = 2
"""The version of the assignment. Raise it with every change of `divided`, so that no table of an older rule is taken again."""
_DIGEST_BYTES = 16
_PLACES, _NAMES = 1, 2
_ITSELF = "__itself__"


LIST_BYTES_MAX = 128 * 1024 * 1024
"""The longest list of names or of holders that a rank accepts: the names of about a million tensors."""


class LayoutFailed(CoreError):
    """A rank sent or got wrong data while the ranks agreed on a layout, so nothing can be saved."""


class Meets(Protocol):
    """The part of `Meeting` that is needed here."""

    rank: int
    world: int

    def decide(self, name: str, mine: bytes, how: Callable[[list[bytes]], bytes]) -> bytes:
        """Rank 0 gets the words of all ranks and applies ``how``; every rank returns the outcome."""

    def assign(
        self,
        name: str,
        mine: bytes,
        how: Callable[[dict[int, bytes]], tuple[bytes, Sequence[bytes]]],
        speakers: Sequence[int],
    ) -> tuple[bytes, bytes]:
        """Rank 0 applies ``how`` to the words of the ``speakers``; every rank returns the common outcome and its own."""

    def refusing(self, name: str) -> AbstractContextManager[None]:
        """Pass an error in the block on to all ranks that meet under this name."""


Key = tuple[str, tuple[int, ...], tuple[int, ...]]
"""A chunk of the whole state: name, offsets, shape. Ranks whose chunks have the same key are taken to hold the same values."""


class Share(NamedTuple):
    """One rank's part of a layout.

    ``keeps``: the names of the chunks that it keeps, and whether it writes each.
    ``holders``, ``writers``, ``own``: as in `Table`, without what this rank alone knows.
    """

    keeps: Mapping[str, bool]
    holders: Holders
    writers: tuple[int, ...]
    own: tuple[int, ...]


class _List(NamedTuple):
    """The chunk list of this rank, as it is sent to rank 0.

    ``all``: the names, sorted.
    ``names``: packed; for each name its dtype, full shape, whether it is live, and the tensor that it is tied to.
    ``places``: offsets and shapes as in `ChunkList`.
    ``size``: bytes of all chunks that are not tied.
    """

    all: tuple[str, ...]
    names: bytes
    places: bytes
    size: int

    @classmethod
    def of(cls, chunks: Sequence[Chunk], signature: Signature, own: frozenset[str]) -> _List:
        """The list of the chunks that other ranks may have too: without this rank's ``own``."""
        common = [one for one in signature.chunks if one[0] not in own] if own else signature.chunks
        names = msgpack.packb([(name, dtype, full, live, tied) for name, dtype, full, _, _, live, tied in common])
        numbers = array("q", chain.from_iterable(chain(one[3], one[4]) for one in common))
        size = sum(one.size for one in chunks if not one.same_as and one.name not in own)
        return cls(tuple(one[0] for one in common), names, _little(numbers), size)

    @property
    def names_digest(self) -> bytes:
        """A digest of the names; equal on ranks that have the same names."""
        return hashlib.blake2b(self.names, digest_size=_DIGEST_BYTES).digest()

    @property
    def form(self) -> bytes:
        """A digest of names and places; equal on ranks that have the same chunks."""
        return hashlib.blake2b(self.names_digest + self.places, digest_size=_DIGEST_BYTES).digest()


class _Said(NamedTuple):
    """The first message of each rank to rank 0.

    ``node``: the number of its node.
    ``form``, ``names``: digests, as `_List` has them.
    ``own``: it has objects or tensors that no other rank has.
    ``own_bytes``: such tensors are not empty.
    ``have``: numbers of the layouts whose table it has from the generation before.
    ``titles``: a digest of the names of all tensors and objects that it has besides its own.
    """

    node: int
    form: bytes
    names: bytes
    own: bool
    own_bytes: bool
    have: tuple[int, ...]
    titles: bytes

    def packed(self) -> bytes:
        """The message as bytes."""
        return cast(bytes, msgpack.packb(self))


def agreed(
    chunks: Sequence[Chunk],
    signature: Signature,
    paths: Mapping[str, Path],
    own: frozenset[str],
    meeting: Meets,
    node: int,
    *,
    before: Sequence[Table] = (),
    spread: bool = True,
    name: str = "layout",
) -> Table:
    """The table of this rank, once all ranks have told each other what they have.

    ``paths``: of the objects, as those of tensors are in ``chunks``.
    ``own``: names of objects and tensors that no other rank has.
    ``before``: tables of this rank that lie in memory from before.
    ``spread``: as `divided` has it.
    ``name``: of the collective; all ranks give the same.

    A collective: all ranks call it. An error on one of them is an error on all. Raises `MeetingFailed`.
    """
    with meeting.refusing(name):
        mine = _List.of(chunks, signature, own)
        old = {one.layout: one for one in before if (one.world, one.rank) == (meeting.world, meeting.rank)}
        own_bytes = any(one.size for one in chunks if one.name in own and not one.same_as)
        has_own = own_bytes or any(one in own for one in (*signature.objects, *(one.name for one in chunks)))
        titles = _titles((*mine.all, *(one for one in signature.objects if one not in own)))
        said = _Said(node, mine.form, mine.names_digest, has_own, own_bytes, tuple(old), titles)
    told: list[_Said] = []
    answer = meeting.decide(name, said.packed(), functools.partial(_recognised, spread=spread, told=told))
    number, wanted, zeros = msgpack.unpackb(answer)
    if wanted:
        share = _exchanged(mine, wanted, told, meeting, f"{name}/shares", spread=spread)
    else:
        table = old[number]
        # A light copy from a peer has the table, and not the tensors.
        keeps = {one.name: one.write for one in (*table.items, *table.elsewhere)}
        share = Share(keeps, table.holders, table.writers, table.own)
    chunks = _in_order(chunks)
    objects = tuple(name for name in signature.objects if name in own or meeting.rank == 0)
    return Table(
        layout=number,
        world=meeting.world,
        rank=meeting.rank,
        holders=share.holders,
        items=_items(chunks, {**share.keeps, **dict.fromkeys(own, True)}),
        objects=objects,
        paths=_paths(chunks, paths),
        writers=share.writers,
        own=share.own,
        alike=zeros == titles,
    )


# ---- what is said


def _recognised(raw: list[bytes], *, spread: bool, told: list[_Said]) -> bytes:
    """On rank 0: the layout's number, for each rank what it is to send, and rank 0's titles.

    Where all ranks have that layout's table nothing is sent.

    The number depends on the state's form, on the nodes and on the rule alone: whether lists were exchanged makes no difference.
    """
    told += [_Said(*one) for one in map(_unpacked, raw)]
    content = (RULE, spread, [one[:5] for one in told])
    digest = hashlib.blake2b(repr(content).encode(), digest_size=8).digest()
    number = int.from_bytes(digest, "little") >> 1 or 1
    if all(number in one.have for one in told):
        return cast(bytes, msgpack.packb((number, b"", told[0].titles)))
    forms: set[bytes] = set()
    names: set[bytes] = set()
    wanted = bytearray()
    for one in told:
        wanted.append((one.form not in forms) * (_PLACES | _NAMES * (one.names not in names)))
        forms.add(one.form)
        names.add(one.names)
    return cast(bytes, msgpack.packb((number, bytes(wanted), told[0].titles)))


def _exchanged(mine: _List, wanted: bytes, told: Sequence[_Said], meeting: Meets, name: str, *, spread: bool) -> Share:
    """This rank's share of a layout that is new to some rank."""
    speakers = [rank for rank, what in enumerate(wanted) if what]
    raw = b""
    with meeting.refusing(name):
        if wanted[meeting.rank]:
            names = mine.names if wanted[meeting.rank] & _NAMES else b""
            raw = msgpack.packb((mine.size, zlib.compress(names, 1), zlib.compress(mine.places, 1)))
    assign = functools.partial(_assigned, told=told, spread=spread)
    common, share = meeting.assign(name, raw, assign, speakers)
    of = f"rank 0 sent rank {meeting.rank}"
    holders, writers, own = msgpack.unpackb(
        _inflated(common, LIST_BYTES_MAX, f"{of} a list of holders"), use_list=False
    )
    flags = _inflated(share, len(mine.all), f"{of} a share")
    if len(flags) != len(mine.all):
        raise LayoutFailed(
            f"rank {meeting.rank} got a share of {len(flags)} chunks and has {len(mine.all)}; report this as a bug of dlrover"
        )
    keeps = {name: bool(flag & WRITES) for name, flag in zip(mine.all, flags, strict=True) if flag & KEEPS}
    return Share(keeps, holders, writers, own)


def _assigned(raw: dict[int, bytes], *, told: Sequence[_Said], spread: bool) -> tuple[bytes, list[bytes]]:
    """On rank 0: holders, writers and ranks with state of their own, for all ranks; and each rank's share."""
    names: dict[bytes, Names] = {}
    lists: list[ChunkList] = []
    number_of: dict[bytes, int] = {}
    for rank, one in sorted(raw.items()):
        size, packed, places = msgpack.unpackb(one)
        if told[rank].names not in names:
            names[told[rank].names] = _named(_inflated(packed, LIST_BYTES_MAX, f"rank {rank} sent a list of names"))
        number_of[told[rank].form] = len(lists)
        here = names[told[rank].names]
        unpacked = _inflated(places, here.places_bytes, f"rank {rank} sent a list of places")
        lists.append(ChunkList(here, unpacked, size))
        if len(lists[-1].places) != lists[-1].names.places_bytes:
            raise LayoutFailed(f"rank {rank} sent a chunk list whose names and places do not fit together")
    division = divided(lists, [number_of[one.form] for one in told], [one.node for one in told], spread=spread)
    own = tuple(rank for rank, one in enumerate(told) if one.own)
    alone = {(rank,) for rank, one in enumerate(told) if one.own_bytes}
    holders = tuple(sorted({*division.holders, *alone}))
    writers = tuple(sorted({0, *division.writers, *own}))
    common = zlib.compress(msgpack.packb((holders, writers, own)), 1)
    return common, [zlib.compress(one, 1) for one in division.shares]


def _titles(names: Sequence[str]) -> bytes:
    return hashlib.blake2b(msgpack.packb(sorted(names)), digest_size=8).digest()


def _inflated(raw: bytes, limit: int, what: str) -> bytes:
    """Decompress a message into ``limit`` bytes at most. Anyone who reaches the ranks' store can write there.

    ``what``: the sender and its message, for errors. Raises `LayoutFailed` if the message is longer, or is not compressed.
    """
    stream = zlib.decompressobj()
    try:
        found = stream.decompress(raw, limit + 1)
    except zlib.error as error:
        raise LayoutFailed(f"{what} that cannot be decompressed ({error}); start the job again") from error
    if len(found) > limit:
        raise LayoutFailed(f"{what} of more than the {limit:,} bytes that it can have; start the job again")
    if not stream.eof or stream.unused_data:
        raise LayoutFailed(f"{what} that does not end where it should; start the job again")
    return found


def _named(raw: bytes) -> Names:
    sizes: dict[str, int] = {}
    pieces = []
    for name, dtype, full, live, tied in msgpack.unpackb(raw):
        if dtype not in sizes:
            sizes[dtype] = getattr(torch, dtype).itemsize
        pieces.append(Piece(name, sizes[dtype], len(full), live, bool(tied)))
    return Names(pieces)


def _unpacked(raw: bytes) -> list[Any]:
    """Unpack a message; lists become tuples, as they were packed."""
    return cast("list[Any]", msgpack.unpackb(raw, use_list=False))


def _little(numbers: array[int]) -> bytes:
    """Little-endian, on any machine."""
    assert numbers.itemsize == INT_BYTES
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tobytes()


# ---- the table


def _apart(paths: Mapping[str, Path]) -> dict[str, Path]:
    """Paths that make one nested state: none leads through another's end, and a list has all of its places.

    Of a list in which not all is a tensor the rest lies elsewhere, serialised; what is left are keys of a dict.
    """
    below: dict[Path, set[Any]] = defaultdict(set)
    for path in paths.values():
        for end, key in enumerate(path):
            below[path[:end]].add(key)
    lists = {path for path, keys in below.items() if 0 in keys and keys == set(range(len(keys)))}
    found: dict[str, Path] = {}
    for name, path in paths.items():
        whole: Path = path
        if not all(type(key) is str for key in path):
            whole = tuple(key if path[:end] in lists else str(key) for end, key in enumerate(path))
        found[name] = (*whole, _ITSELF) if path in below else whole
    return found


def with_own(
    table: Table, chunks: Sequence[Chunk], objects: Iterable[str], paths: Mapping[str, Path], own: Callable[[str], bool]
) -> Table:
    """The table with what only this rank has as it is now: nobody else needs to know, and the layout stays."""
    chunks = _in_order(chunks)
    keeps = {one.name: one.write for one in table.items if not own(one.name)}
    return table._replace(
        items=_items(chunks, {**keeps, **{one.name: True for one in chunks if own(one.name)}}),
        objects=tuple(sorted(name for name in objects if own(name) or table.rank == 0 or name in table.objects)),
        paths=_paths(chunks, paths),
    )


def _in_order(chunks: Sequence[Chunk]) -> list[Chunk]:
    """By name, those that have bytes of their own before their second names.

    A restored optimizer may list its tensors in another order than it did. A table that differed in that alone would be another
    one, and what lies in memory from before would be lost with the old one.
    """
    return sorted(chunks, key=lambda one: (bool(one.same_as), one.name, one.offsets))


def _paths(chunks: Sequence[Chunk], objects: Mapping[str, Path]) -> tuple[tuple[str, Path], ...]:
    return tuple(sorted(_apart({**{one.name: one.path for one in chunks}, **objects}).items(), key=lambda one: one[0]))


def _key(chunk: Chunk) -> Key:
    return chunk.name, chunk.offsets, tuple(chunk.tensor.shape)


def _items(chunks: Sequence[Chunk], keeps: Mapping[str, bool]) -> tuple[Item, ...]:
    """The items that this rank keeps, one after the other in a slot. A second name for the same bytes takes no room.

    ``keeps``: names of chunks, and whether this rank writes them.
    """
    items: list[Item] = []
    places: dict[str, tuple[int, bool]] = {}
    at = 0
    for one in chunks:
        size = one.size
        if one.same_as:
            if one.same_as not in places:
                continue
            here, write = places[one.same_as]
        else:
            if one.name not in keeps:
                continue
            here, write = at, keeps[one.name]
            places[one.name] = here, write
            at += -(-size // ALIGN_BYTES) * ALIGN_BYTES
        shape = tuple(one.tensor.shape)
        items.append(Item(one.name, one.dtype, one.full_shape, one.offsets, shape, here, size, one.live, write))
    return tuple(items)


def data_bytes(table: Table) -> int:
    """What a slot of this table needs."""
    return max((one.at + one.size for one in table.items), default=0)
