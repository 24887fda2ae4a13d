"""Processes as /proc shows them, children of this one above all, and the taking away of the dead."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from typing import NamedTuple

DEAD = frozenset("ZXx")
"""States of a process that has ended; its parent may not have reaped it yet."""


class Member(NamedTuple):
    """One process. A number is another process's as soon as its owner is reaped; with ``born`` it is one process's for ever."""

    pid: int
    name: str
    """Its short name, as `ps -o comm` shows it."""
    state: str
    """Its letter, as ps shows it."""
    parent: int
    session: int
    born: int
    """Its start, in clock ticks since the host's. A pid is another process's as soon as its owner is reaped; pid and ``born``
    together belong to one process for ever."""

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


def hold(one: Member) -> int | None:
    """A pidfd of this very process; None if it is gone. Another process that has its number by now is not taken for it."""
    try:
        fd = os.pidfd_open(one.pid)
    except OSError:
        return None
    # The descriptor is bound to whoever had the number when it was opened: look again, whose that is.
    now = read_stat(one.pid)
    if now is not None and now.born == one.born:
        return fd
    os.close(fd)
    return None


def kill(one: Member) -> int | None:
    """SIGKILL this very process through a pidfd, which is returned; None if it is gone."""
    fd = hold(one)
    if fd is not None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            signal.pidfd_send_signal(fd, signal.SIGKILL)
    return fd


def reap(one: Member) -> None:
    """Take this very process, if it is a dead child of ours, out of the process table; a living one stays."""
    fd = hold(one)
    if fd is None:
        return
    try:
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PIDFD, fd, os.WEXITED | os.WNOHANG)
    finally:
        os.close(fd)
