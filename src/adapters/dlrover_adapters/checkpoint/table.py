"""The layout table: what lies where in the data of an arena's slots, and which ranks hold what of the whole state.

Written once by the worker, read by whoever reads slots: the next worker, the saver, another node. msgpack only: the blob, which
holds what is no tensor, is a map from names to opaque bytes, and nobody but a worker ever unpickles those.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import msgpack

from dlrover_core.checkpoint.arena import ArenaBroken

FORMAT = 2
ALIGN_BYTES = 64
"""Of items in the data."""
CUT = "data.cut"
"""In a blob, under this name: how far each dataset is consumed, packed by `dlrover_core.data.cut`, and never pickled.

It is the first in the blob, and in no table: on storage it lies in the manifests of the parts."""
TRAINED = "data.trained"
"""In a blob, under this name: on how many positions of each leased dataset its rank was trained, by
`dlrover_core.data.trained.pack_counted`, never pickled, and in no table."""

_CUT_BYTES_MAX = 64 * 1024
"""Of a blob, what is looked at for the cut: more than the name and the largest cut take."""


class Item(NamedTuple):
    """One chunk of one tensor: ``shape`` elements of ``dtype`` that begin at ``offsets`` of the tensor's ``full_shape``.

    Row-major, from byte ``at`` of the data on, ``size`` bytes. ``dtype`` as torch names it without ``torch.``. ``live``: others
    than the optimizer write it, so it is copied while training stands. ``write``: this rank writes it to storage; of a chunk that
    several hold only one does.
    """

    name: str
    dtype: str
    full_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    at: int
    size: int
    live: bool = False
    write: bool = True


class Table(NamedTuple):
    """A rank's items. ``layout`` is the same number on all ranks of a world whose states fit together.

    ``holders``: of each part of the whole state the ranks that have it in memory; a step is whole where of each of these sets
    somebody holds it. ``objects``: the names in the blob that this rank writes to storage. ``paths``: of each name, items and
    objects, the keys that lead to it in the nested state. ``writers``: the ranks that write anything of it to storage; empty: it
    is not said. ``elsewhere``: in a light copy the items that were left out, because each node has the same.
    ``own``: the ranks that have objects or tensors of their own, without which their part of a state is not whole.
    ``alike``: the names that this rank has besides its own are those that rank 0 has.
    """

    layout: int
    world: int
    rank: int
    holders: tuple[tuple[int, ...], ...]
    items: tuple[Item, ...]
    objects: tuple[str, ...] = ()
    paths: tuple[tuple[str, tuple[Any, ...]], ...] = ()
    writers: tuple[int, ...] = ()
    elsewhere: tuple[Item, ...] = ()
    own: tuple[int, ...] = ()
    alike: bool = False

    def packed(self) -> bytes:
        """As it lies in the arena."""
        return cast(bytes, msgpack.packb((FORMAT, *self)))

    @classmethod
    def unpacked(cls, raw: bytes) -> Table:
        """From an arena. Raises `ArenaBroken`."""
        try:
            found = msgpack.unpackb(raw, use_list=False)
            if found[0] != FORMAT:
                raise ArenaBroken(f"a table of format {found[0]}, this version reads {FORMAT}")
            table = cls(*found[1:])
            items, elsewhere = (tuple(Item(*one) for one in each) for each in (table.items, table.elsewhere))
            return table._replace(items=items, elsewhere=elsewhere)
        except (ValueError, TypeError, IndexError, msgpack.UnpackException) as error:
            raise ArenaBroken(f"{len(raw)} bytes are no layout table: {error}") from error


def own_name(name: str, rank: int) -> bool:
    """Whether only ``rank`` has the object or tensor of this name."""
    return name.startswith(f"rank.{rank}.") or (rank == 0 and (name == "extra" or name.startswith("extra.")))


def said_names(table: Table) -> tuple[str, ...]:
    """What a part of this rank says that a state has, sorted: every name; where rank 0 says the same, only this rank's own."""
    names = [name for name, _ in table.paths]
    if table.alike and table.rank:
        names = [name for name in names if own_name(name, table.rank) or name in table.objects]
    return tuple(sorted(names))


def light(table: Table) -> tuple[Table, tuple[Item, ...]]:
    """The table of a copy without the tensors that are the same on every node; and the items that are left, as they lie now.

    What is live stays: under DDP the ranks' buffers differ between two steps, and those of rank 0 count.
    """
    kept = tuple(one for one in table.items if one.live or own_name(one.name, table.rank))
    items: list[Item] = []
    at = 0
    for one in kept:
        items.append(one._replace(at=at))
        at += -(-one.size // ALIGN_BYTES) * ALIGN_BYTES
    elsewhere = tuple(one for one in table.items if not (one.live or own_name(one.name, table.rank)))
    return table._replace(items=tuple(items), elsewhere=elsewhere), kept


def pack_blob(objects: Mapping[str, bytes]) -> bytes:
    """The blob of a slot: serialised objects by name, `CUT` and `TRAINED` first."""
    first = {name: objects[name] for name in (CUT, TRAINED) if name in objects}
    return cast(bytes, msgpack.packb({**first, **objects}))


def cut_in(raw: bytes | memoryview) -> bytes:
    """The cut in a blob, packed as `dlrover_core.data.cut` packs it; empty: the state has none. Reads no more than the cut.

    Raises `ArenaBroken`.
    """
    return _said_in(raw, CUT)


def trained_in(raw: bytes | memoryview) -> bytes:
    """What is said under `TRAINED` in a blob; empty: nothing. Otherwise as `cut_in`."""
    return _said_in(raw, TRAINED)


def _said_in(raw: bytes | memoryview, name: str) -> bytes:
    unpacker = msgpack.Unpacker(max_buffer_size=_CUT_BYTES_MAX)
    try:
        unpacker.feed(bytes(raw[:_CUT_BYTES_MAX]))
        for _ in range(min(unpacker.read_map_header(), 2)):
            key = unpacker.unpack()
            if key not in (CUT, TRAINED):
                return b""
            found = unpacker.unpack()
            if not isinstance(found, bytes):
                raise ArenaBroken(f"{key} in a blob is bytes")
            if key == name:
                return found
    except (ValueError, msgpack.UnpackException) as error:
        raise ArenaBroken(f"{len(raw)} bytes are no blob: {error}") from error
    return b""


def unpack_blob(raw: bytes | memoryview) -> dict[str, bytes]:
    """The objects in a blob, still serialised. Raises `ArenaBroken`."""
    try:
        found = msgpack.unpackb(raw)
    except (ValueError, msgpack.UnpackException) as error:
        raise ArenaBroken(f"{len(raw)} bytes are no blob: {error}") from error
    if not isinstance(found, dict) or not all(isinstance(one, bytes) for one in found.values()):
        raise ArenaBroken("a blob is a map from names to bytes")
    return found


def whole(holders: Sequence[Sequence[int]], here: frozenset[int]) -> bool:
    """Is everything there, if the ranks in ``here`` hold theirs?"""
    return all(not here.isdisjoint(one) for one in holders)
