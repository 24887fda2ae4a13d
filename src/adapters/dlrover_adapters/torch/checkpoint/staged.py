"""Counts the host memory that this process's stagers take beside the arenas, for the check whether there is room."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import torch


class Stager(Protocol):
    """A stager. ``sets``: the sets of tensors that take turns, keyed by the tensors that they copy; empty: not made yet."""

    sets: tuple[dict[tuple[Any, ...], torch.Tensor], ...]


_STAGERS: weakref.WeakSet[Any] = weakref.WeakSet()


class Beside(NamedTuple):
    """Bytes that all sets of all stagers take once they are made, and how many of those are yet ``to_come``."""

    total: int
    to_come: int


def count(stager: Stager) -> None:
    """Include this stager in `beside` for as long as it lives."""
    _STAGERS.add(stager)


def beside() -> Beside:
    """The bytes of all stagers of this process. A set that is not made yet counts like the largest set of its stager."""
    total = there = 0
    for stager in list(_STAGERS):
        sizes = [_size(one) for one in stager.sets]
        total += len(sizes) * max(sizes, default=0)
        there += sum(sizes)
    return Beside(total, total - there)


def _size(room: Mapping[Any, torch.Tensor]) -> int:
    """Pinned memory is given in powers of two."""
    pins = torch.cuda.is_available()
    return sum(
        1 << (one.nbytes - 1).bit_length() if pins and one.nbytes and one.is_pinned() else one.nbytes
        for one in room.values()
    )
