"""Orphans of dead nodes: processes that left the node's session, and its mark with their environment, and whose parents are dead.

The launcher is a subreaper, so that they become its children instead of init's. Children that it has started itself bear the
mark of a node or the run, or are in its own session; those that it had before are `strangers`, and left alone. As the first
process of a container it inherits orphans of everybody's: then none is killed, for all end with it; but the dead are reaped, as
init would.
"""

from __future__ import annotations

import os
import select
import time
from pathlib import Path

from dlrover_backends.shared.strangers import Strangers
from dlrover_core.host import procfs
from dlrover_core.host.procfs import Member, children_of_ours

PR_SET_CHILD_SUBREAPER = 36
MARKS = (b"DLROVER_LOCAL_NODE=", b"DLROVER_RUN_MARK=")
OURS = frozenset({"dlrover-sweeper"})
UNREAPED_S = 5.0
"""Whoever started a child reaps it long before."""

started: set[int] = set()
"""First processes of nodes that are not buried yet. Global, because being a parent is the process's affair."""

_adopts: list[bool] = []
_strangers = Strangers()
_dead_since: dict[int, float] = {}


def adopt() -> None:
    """Be the parent of all orphans among this process's descendants from now on. What is below it now is somebody else's.

    For a launcher alone: children that another program starts in sessions of their own later would be taken for orphans.
    """
    import ctypes

    _strangers.meet()
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # a kernel that cannot has init do it
    _adopts.append(True)


def end(timeout_s: float) -> int:
    """Kill what dead nodes have orphaned, and what becomes an orphan by that; how many live on. Blocks. For who `adopt`s."""
    deadline = time.monotonic() + timeout_s
    while _adopts and os.getpid() != 1:
        _strangers.follow()
        found = [one for one in children_of_ours() if one.lives and _is_orphan(one)]
        for one in found:
            _kill(one, deadline)
        if not found or time.monotonic() > deadline:
            return len(found)
    return 0


def reap() -> None:
    """Take the dead that nobody reaps out of the process table. Call it now and then."""
    now, own = time.monotonic(), os.getsid(0)
    _strangers.follow()
    found = [one for one in children_of_ours() if not one.lives and one.session != own and one.pid not in started]
    dead = {one.pid: one for one in found if not _strangers.has_child(one)}
    for pid in set(_dead_since) - set(dead):
        del _dead_since[pid]
    for pid, one in dead.items():
        if now - _dead_since.setdefault(pid, now) >= UNREAPED_S:
            procfs.reap(one)


def _is_orphan(one: Member) -> bool:
    if one.session == os.getsid(0) or one.pid in started or one.name in OURS:
        return False
    if one in _strangers:
        return False
    try:
        words = Path(f"/proc/{one.pid}/environ").read_bytes().split(b"\0")
        return not any(word.startswith(MARKS) for word in words)
    except OSError:  # gone, or not ours to look at
        return False


def _kill(one: Member, deadline: float) -> None:
    # While the orphan before this one was waited for, `reap` in the loop's thread may have made the number another's.
    pidfd = procfs.kill(one)
    if pidfd is not None:
        try:
            select.select([pidfd], [], [], max(0.0, deadline - time.monotonic()))
        finally:
            os.close(pidfd)
        procfs.reap(one)
