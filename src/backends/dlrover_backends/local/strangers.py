"""Processes below this one that are somebody else's: an entry script's that ended with ``exec``, or an embedding program's.

They are known by being there before we started anything, and their descendants by being found below them while these live, or
in their sessions. So a daemon of a stranger's is taken for an orphan of ours only if it left the session of a parent that died
between two looks.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple


class _Process(NamedTuple):
    parent: int
    session: int
    started: int
    """In ticks since the machine's start: with the pid, it names a process for ever."""


class Strangers:
    """None, until `meet`."""

    def __init__(self) -> None:
        self._children: dict[int, int] = {}
        self._known: dict[int, int] = {}
        self._sessions: frozenset[int] = frozenset()

    def meet(self) -> None:
        """Every process that is now below this one is a stranger."""
        try:
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:  # it has no children, as mostly
            return
        me, there = os.getpid(), _all()
        self._children |= {pid: one.started for pid, one in there.items() if one.parent == me}
        self._known |= self._children
        self._follow(there)

    def follow(self) -> None:
        """Learn what strangers have started since. Call it often."""
        if self._known or self._sessions:
            self._follow(_all())

    def _follow(self, there: dict[int, _Process]) -> None:
        # Made whole, then assigned: other threads look meanwhile.
        known = {pid: at for pid, at in self._known.items() if pid in there and there[pid].started == at}
        below: dict[int, list[int]] = {}
        for pid, one in there.items():
            below.setdefault(one.parent, []).append(pid)
        open_ends = [*known]
        while open_ends:
            for pid in below.get(open_ends.pop(), ()):
                if pid not in known:
                    known[pid] = there[pid].started
                    open_ends.append(pid)
        theirs = self._sessions | {there[pid].session for pid in known}
        self._sessions = theirs & {one.session for one in there.values()} - {os.getsid(0)}
        self._known = known

    def include(self, pid: int, session: int) -> bool:
        """Is this process one of them?"""
        return session in self._sessions or (pid in self._known and _started(pid) == self._known[pid])

    def has_child(self, pid: int) -> bool:
        """Was it a child of ours before we started anything, so that somebody else may wait for its end?"""
        return pid in self._children and _started(pid) == self._children[pid]


def _started(pid: int) -> int:
    found = _read(pid)
    return -1 if found is None else found.started


def _all() -> dict[int, _Process]:
    pids = [int(one.name) for one in os.scandir("/proc") if one.name.isdecimal()]
    return {pid: found for pid in pids if (found := _read(pid)) is not None}


def _read(pid: int) -> _Process | None:
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        return _Process(int(fields[1]), int(fields[3]), int(fields[19]))
    except (OSError, IndexError, ValueError):  # gone between the listing and the look
        return None
