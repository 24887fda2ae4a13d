"""How much memory states may take on this host: what is left, here and within the control group's limits.

Memory of a memfd is counted when its pages are written, not when it is made; so what was promised and is not there yet comes off.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from dlrover_adapters.agent.checks import basic

RESERVE_BYTES = 256 * 2**20
"""Left for everybody else: a host without a page to spare kills somebody, and it is rarely the one at fault."""
UNKNOWN_BYTES = 2**62
_BLOCK = 512  # st_blocks counts in these, whatever the file system


class Room(NamedTuple):
    """``free`` bytes, by whichever ``limit`` leaves least."""

    free: int
    limit: str


def room(root: Path) -> Room:
    """What may still be used. Page cache gives way, so it counts as free."""
    found = [Room(free, f"the limit of control group {folder}") for folder, free in basic.rooms(root)]
    available = _available(root)
    if available is not None:
        found.append(Room(available, "the host's available memory"))
    return min(found, default=Room(UNKNOWN_BYTES, "no limit that is known"))


def _available(root: Path) -> int | None:
    try:
        lines = (root / "proc/meminfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    for line in lines:
        name, _, rest = line.partition(":")
        if name == "MemAvailable" and rest.split():
            return int(rest.split()[0]) * 1024
    return None


def unwritten(fds: Iterable[int]) -> int:
    """Bytes of these files that have no page yet."""
    return sum(max(0, found.st_size - found.st_blocks * _BLOCK) for found in map(os.fstat, fds))


def left(root: Path, fds: Iterable[int]) -> Room:
    """What one more arena may take beside those in ``fds``."""
    found = room(root)
    return found._replace(free=max(0, found.free - unwritten(fds) - RESERVE_BYTES))


def refusal(asked: int, found: Room, held: int, beside: int = 0) -> str:
    """Why there is no arena of ``asked`` bytes, in a sentence that says what to do; empty: there is room.

    ``beside``: what ranks are yet to take for copies that they stage themselves.
    """
    if asked + beside <= found.free:
        return ""
    staged = f" and {_mib(beside)} for copies that ranks stage" if beside else ""
    return (
        f"no memory for checkpoints: {_mib(asked)}{staged} are needed, {_mib(found.free)} may be used beside what arenas hold "
        f"already ({_mib(held)}), by {found.limit}; raise the container's memory limit, save less often (every=2 "
        "without GPUs, every=3 with GPUs, and more need two slots, the fewest), or let more nodes share the state"
    )


def _mib(size: int) -> str:
    return f"{-(-size // 2**20):,} MiB"
