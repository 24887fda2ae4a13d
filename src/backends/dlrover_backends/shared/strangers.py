"""Processes below this one that are somebody else's: an entry script's that ended with ``exec``, or an embedding program's.

They are known by being there before we started anything, and their descendants by being found below them while these live, or
in their sessions. So a daemon of a stranger's is taken for an orphan of ours only if it left the session of a parent that died
between two looks.
"""

from __future__ import annotations

import os

from dlrover_core.host.procfs import Member, processes


class Strangers:
    """None, until `meet`."""

    def __init__(self) -> None:
        self._children: dict[int, int] = {}
        """By pid, when they started; so below."""
        self._known: dict[int, int] = {}
        self._sessions: frozenset[int] = frozenset()

    def meet(self) -> None:
        """Every process that is now below this one is a stranger."""
        try:
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:  # it has no children, as mostly
            return
        me, there = os.getpid(), _all()
        self._children |= {pid: one.born for pid, one in there.items() if one.parent == me}
        self._known |= self._children
        self._follow(there)

    def follow(self) -> None:
        """Learn what strangers have started since. Call it often."""
        if self._known or self._sessions:
            self._follow(_all())

    def _follow(self, there: dict[int, Member]) -> None:
        # Made whole, then assigned: other threads look meanwhile.
        known = {pid: at for pid, at in self._known.items() if pid in there and there[pid].born == at}
        below: dict[int, list[int]] = {}
        for pid, one in there.items():
            below.setdefault(one.parent, []).append(pid)
        open_ends = [*known]
        while open_ends:
            for pid in below.get(open_ends.pop(), ()):
                if pid not in known:
                    known[pid] = there[pid].born
                    open_ends.append(pid)
        theirs = self._sessions | {there[pid].session for pid in known}
        self._sessions = theirs & {one.session for one in there.values()} - {os.getsid(0)}
        self._known = known

    def __contains__(self, one: Member) -> bool:
        """Is this process one of them?"""
        return one.session in self._sessions or self._known.get(one.pid) == one.born

    def has_child(self, one: Member) -> bool:
        """Was it a child of ours before we started anything, so that somebody else may wait for its end?"""
        return self._children.get(one.pid) == one.born


def _all() -> dict[int, Member]:
    return {one.pid: one for one in processes()}
