"""Processes as /proc shows them, children of this one above all, and the taking away of the dead."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import NamedTuple

DEAD = frozenset("ZXx")
"""States of a process that has ended; its parent may not have reaped it yet."""


class Member(NamedTuple):
    """One process."""

    pid: int
    name: str
    """Its short name, as `ps -o comm` shows it."""
    state: str
    """Its letter, as ps shows it."""
    parent: int
    session: int
    started: int
    """In ticks since the machine's start: with the pid, it names a process for ever."""

    @property
    def lives(self) -> bool:
        """Has it not ended yet?"""
        return self.state not in DEAD


def read_stat(pid: int) -> Member | None:
    """One process; None: there is none."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            head, _, tail = stat.read().rpartition(b")")
        fields, name = tail.split(), head.partition(b"(")[2].decode(errors="replace")
        return Member(pid, name, fields[0].decode(), int(fields[1]), int(fields[3]), int(fields[19]))
    except (OSError, IndexError, ValueError):
        return None  # gone between the listing and the look


def processes() -> Iterator[Member]:
    """Every process there is, zombies included. One pass over /proc, about 15 us a process."""
    with os.scandir("/proc") as entries:
        for entry in entries:
            member = read_stat(int(entry.name)) if entry.name.isdecimal() else None
            if member is not None:
                yield member


def children_of_ours() -> list[Member]:
    """Every child of this process, zombies included: a few small files, where the kernel has them."""
    try:
        pids = []
        for task in os.listdir("/proc/self/task"):
            with open(f"/proc/self/task/{task}/children", "rb") as children:
                pids += [int(pid) for pid in children.read().split()]
    except OSError:  # a kernel without them, or a thread has just ended
        me = os.getpid()
        return [one for one in processes() if one.parent == me]
    return [one for pid in pids if (one := read_stat(pid)) is not None]


def reap(pid: int) -> None:
    """Take a dead child of ours out of the process table; a living one stays."""
    with contextlib.suppress(ChildProcessError):
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG)
