"""Worlds of ranks that agree on a layout, without tensors' memory: what tests of layouts are made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch._C._distributed_c10d import HashStore

from dlrover_adapters.checkpoint.table import Table
from dlrover_adapters.torch.checkpoint.capture import Signature
from dlrover_adapters.torch.checkpoint.chunks import Chunk
from dlrover_adapters.torch.checkpoint.layout import agreed
from dlrover_adapters.torch.checkpoint.meeting import Meeting, MeetingFailed

LIMIT_S = 20.0


def chunk(
    name: str,
    full: tuple[int, ...],
    offsets: tuple[int, ...] | None = None,
    shape: tuple[int, ...] | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    live: bool = False,
    same_as: str = "",
) -> Chunk:
    """A chunk that has no memory."""
    tensor = torch.empty(full if shape is None else shape, device="meta", dtype=dtype)
    at = (0,) * len(full) if offsets is None else offsets
    return Chunk(name, tuple(name.split(".")), tensor, str(dtype).removeprefix("torch."), full, at, live, same_as)


def signature(chunks: Sequence[Chunk], objects: Sequence[str] = ()) -> Signature:
    """As `Capture.signature` makes it."""
    found = [
        (one.name, one.dtype, one.full_shape, one.offsets, tuple(one.tensor.shape), one.live, one.same_as)
        for one in chunks
    ]
    return Signature(tuple(sorted(found)), tuple(sorted(objects)))


class Posted:
    """What ranks post."""

    def __init__(self) -> None:
        self.all: dict[str, int] = {}

    def watch(self, meeting: Meeting) -> None:
        """From now on."""
        one, many = meeting._set, meeting._set_all

        def set_(key: str, value: bytes) -> None:
            self.all[key] = len(value)
            one(key, value)

        def set_all(values: Sequence[tuple[str, bytes]]) -> None:
            self.all.update((key, len(value)) for key, value in values)
            many(values)

        meeting._set, meeting._set_all = set_, set_all  # type: ignore[method-assign]

    def named(self, name: str) -> dict[str, int]:
        """The bytes of what was posted in rounds of this name."""
        return {key: size for key, size in self.all.items() if key.startswith(f"{name}/")}


def meet(world: int, does: Callable[[Meeting], Any], posted: Posted | None = None) -> list[Any]:
    """What each rank returns; a `MeetingFailed` is returned, too."""
    shared = HashStore()

    def one(rank: int) -> Any:
        try:
            meeting = Meeting(shared if world > 1 else None, rank, world, limit_s=LIMIT_S)
            if posted is not None:
                posted.watch(meeting)
            return does(meeting)
        except MeetingFailed as error:
            return error

    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(one, range(world)))


def agree(
    ranks: Sequence[Sequence[Chunk]],
    nodes: Sequence[int],
    *,
    before: Sequence[Sequence[Table]] = (),
    own: Sequence[frozenset[str]] = (),
    spread: bool = True,
    posted: Posted | None = None,
) -> list[Table]:
    """The tables of all ranks, whose chunks these are."""

    def does(meeting: Meeting) -> Table:
        mine = ranks[meeting.rank]
        alone = own[meeting.rank] if own else frozenset[str]()
        old = before[meeting.rank] if before else ()
        return agreed(mine, signature(mine), {}, alone, meeting, nodes[meeting.rank], before=old, spread=spread)

    tables = meet(len(ranks), does, posted)
    assert all(isinstance(one, Table) for one in tables), tables
    return tables
