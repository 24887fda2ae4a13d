"""Copies of memory beside training: few foreign calls without the GIL, past the caches where the C library can.

What is copied beside a step must not ask for the GIL between any two tensors (a hand-over takes up to `sys.getswitchinterval`),
nor push the step's own data out of the caches. ``memmove`` of a large block stores past them above glibc's
``x86_non_temporal_threshold``, which the launcher sets to 16 MiB. Small tensors are copied many in one call of torch's.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch

BATCH_BYTES = 64 * 1024 * 1024
"""Of one foreign call: what another thread that helps waits for at most; 6 ms."""
_PAGE = 4096
SMALL_BYTES = 256 * 1024
"""Tensors below are copied many at once."""


class Copy(NamedTuple):
    """``size`` bytes from address ``of`` to address ``to``; the tensors that are there, both contiguous."""

    to: int
    of: int
    size: int
    place: torch.Tensor
    tensor: torch.Tensor


class Blocks(NamedTuple):
    """Large blocks: (to, of, size)."""

    blocks: list[tuple[int, int, int]]

    def run(self) -> None:
        """Copy them."""
        for to, of, size in self.blocks:
            ctypes.memmove(to, of, size)


class Many(NamedTuple):
    """Small tensors."""

    places: list[torch.Tensor]
    tensors: list[torch.Tensor]

    def run(self) -> None:
        """Copy them, in one call."""
        foreach: Any = torch._foreach_copy_
        foreach(self.places, self.tensors)


Batch = Blocks | Many


def batches(copies: Iterable[Copy]) -> list[Batch]:
    """What one foreign call each does, or a few."""
    small: list[Copy] = []
    large: list[Copy] = []
    for one in copies:
        (small if one.size < SMALL_BYTES else large).append(one)
    done: list[Batch] = [Blocks([block]) for block in _blocks(large)]
    now: list[Copy] = []
    filled = 0
    for one in small:
        now.append(one)
        filled += one.size
        if filled >= BATCH_BYTES:
            done.append(_many(now))
            now, filled = [], 0
    if now:
        done.append(_many(now))
    return done


def _many(copies: list[Copy]) -> Many:
    return Many([one.place for one in copies], [one.tensor for one in copies])


def _blocks(copies: list[Copy]) -> Iterator[tuple[int, int, int]]:
    """Neighbours in both places are one; what is too large is several."""
    merged: list[tuple[int, int, int]] = []
    for one in copies:
        if merged and (merged[-1][0] + merged[-1][2], merged[-1][1] + merged[-1][2]) == (one.to, one.of):
            to, of, size = merged.pop()
            merged.append((to, of, size + one.size))
        else:
            merged.append((one.to, one.of, one.size))
    for to, of, size in merged:
        # All alike: a small rest would go through the caches.
        piece = -(-size // -(-size // BATCH_BYTES)) if size else 1
        piece = -(-piece // _PAGE) * _PAGE
        for at in range(0, size, piece):
            yield to + at, of + at, min(piece, size - at)
