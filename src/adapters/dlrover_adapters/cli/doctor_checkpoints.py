"""Memory for checkpoints: can the states of ranks outlive them here, and how much of them?"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from pathlib import Path

from dlrover_adapters.agent.checkpoints.budget import RESERVE_BYTES, UNKNOWN_BYTES, room
from dlrover_adapters.cli.doctor_check import Finding, fail, ok, size, warn
from dlrover_adapters.cli.doctor_machine import ROOT

MADV_POPULATE_WRITE = 23
"""From Linux 5.14 on; `mmap` does not know it."""
NEED_BYTES_MIN = 1 << 30


def _populates(fd: int) -> bool:
    """Can pages be made ahead of the first save, without writing to them?"""
    with mmap.mmap(fd, mmap.PAGESIZE) as memory:
        try:
            memory.madvise(MADV_POPULATE_WRITE)
        except (OSError, ValueError):
            return False
        return True


def checkpoint_memory(root: Path = ROOT, make: Callable[[str, int], int] = os.memfd_create) -> Finding:
    """Anonymous memory that outlives a worker, how it is populated, and what limits it."""
    try:
        fd = make("dlrover-doctor", os.MFD_CLOEXEC)
    except OSError as error:
        return fail(
            f"memfd_create: {error.strerror}",
            "a seccomp profile forbids it: allow memfd_create; without it no worker can be started",
        )
    try:
        os.ftruncate(fd, mmap.PAGESIZE)
        populates = _populates(fd)
    finally:
        os.close(fd)
    found = room(root)
    free = max(0, found.free - RESERVE_BYTES)
    values = {"free_bytes": free, "populates": populates}
    if found.free >= UNKNOWN_BYTES:
        return warn("how much memory states may take is not known", "is /proc mounted?", **values)
    said = f"states of ranks may take {size(free)}, by {found.limit}"
    said += "" if populates else "; no MADV_POPULATE_WRITE (Linux 5.14), so pages are made by writing to them"
    if free < NEED_BYTES_MIN:
        return warn(
            said,
            "a node keeps 2 states of its ranks (3 where every step is saved), and another node's copy: parameters and optimizer "
            "are about 12 bytes a parameter; raise the container's memory limit",
            **values,
        )
    return ok(f"{said}; 2 states of each rank are kept there, and another node's copy", **values)
