"""How one rank saves, and what it has cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass
class Stats:
    """What saving has done and cost so far; the ``*_s`` are seconds of the newest save unless they say ``total``.

    ``stall_s``: the training thread stood in our hands; ``live_s``: of that, for copying what others than the optimizer write,
    and what is no tensor; ``copy_s``: the copy, beside training or not. ``copied_bytes`` is all of it, ``live_bytes`` what is
    live. ``skipped``: saves left out because every slot was in use; ``early``: as the memory was not populated yet; ``torn``:
    copies thrown away; ``failed``: errors that left a save out, as `alarms` says. ``unstored``: states that were due on storage
    and made room in memory for newer ones before it took them. ``populated``: all of the memory is there; ``pinned``: and all of
    it is pinned for CUDA.
    """

    saves: int = 0
    skipped: int = 0
    early: int = 0
    torn: int = 0
    failed: int = 0
    unstored: int = 0
    layouts: int = 0
    stall_s: float = 0.0
    stall_total_s: float = 0.0
    live_s: float = 0.0
    copy_s: float = 0.0
    copied_bytes: int = 0
    live_bytes: int = 0
    blob_bytes: int = 0
    populated: bool = False
    pinned: bool = False


class Options(NamedTuple):
    """How saves are made: ``beside`` training or not, ``verify`` as `FlashCheckpoint`, ``slots`` of the arena.

    ``spread``: replicas are written by several nodes, each its share; else by the first node that has all of it.
    """

    beside: bool
    verify: str
    coupled: bool
    slots: int
    lag: int = 2
    device_bytes: int = 0
    """Bytes of each GPU's memory for copies of live tensors, as in `FlashCheckpoint`."""
    spread: bool = True
