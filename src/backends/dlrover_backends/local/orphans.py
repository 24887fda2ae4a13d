"""Orphans of dead nodes: processes that left the node's session, and its mark with their environment, and whose parents are dead.

The launcher is a subreaper, so that they become its children instead of init's. Children that it has started itself bear the
mark of a node or the run, or are in its own session; those that it had before are `strangers`, and left alone. As the first
process of a container it inherits orphans of everybody's: then none is killed, for all end with it; but the dead are reaped, as
init would.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from dlrover_backends.local.strangers import Strangers

PR_SET_CHILD_SUBREAPER = 36
MARKS = (b"DLROVER_LOCAL_NODE=", b"DLROVER_RUN_MARK=")
OURS = frozenset({b"dlrover-sweeper"})
UNREAPED_S = 5.0
"""Whoever started a child reaps it long before."""

started: set[int] = set()
"""First processes of nodes that are not buried yet. Global, because being a parent is the process's affair."""

_adopts: list[bool] = []
_strangers = Strangers()
_dead_since: dict[int, float] = {}


class _Child(NamedTuple):
    pid: int
    name: bytes
    state: bytes
    session: int
    born: int
    """Clock ticks since the host's start. Another process that gets the number later was born later."""


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
        found = [one for one in _children() if one.state not in b"ZXx" and _is_orphan(one)]
        for one in found:
            _kill(one, deadline)
        if not found or time.monotonic() > deadline:
            return len(found)
    return 0


def reap() -> None:
    """Take the dead that nobody reaps out of the process table. Call it now and then."""
    now, own = time.monotonic(), os.getsid(0)
    _strangers.follow()
    dead = {one.pid for one in _children() if one.state in b"ZXx" and one.session != own and one.pid not in started}
    dead = {pid for pid in dead if not _strangers.has_child(pid)}
    for pid in set(_dead_since) - dead:
        del _dead_since[pid]
    for pid in dead:
        if now - _dead_since.setdefault(pid, now) >= UNREAPED_S:
            with contextlib.suppress(ChildProcessError):
                os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG)


def _is_orphan(one: _Child) -> bool:
    if one.session == os.getsid(0) or one.pid in started or one.name in OURS:
        return False
    if _strangers.include(one.pid, one.session):
        return False
    try:
        words = Path(f"/proc/{one.pid}/environ").read_bytes().split(b"\0")
        return not any(word.startswith(MARKS) for word in words)
    except OSError:  # gone, or not ours to look at
        return False


def _kill(one: _Child, deadline: float) -> None:
    try:
        pidfd = os.pidfd_open(one.pid)
    except OSError:
        return
    try:
        # While the orphan before this one was waited for, `reap` in the loop's thread may have made the number another's.
        now = _child(one.pid)
        if now is None or now.born != one.born:
            return
        with contextlib.suppress(OSError):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        select.select([pidfd], [], [], max(0.0, deadline - time.monotonic()))
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOHANG)
    finally:
        os.close(pidfd)


def _children() -> Iterator[_Child]:
    pids = set[int]()
    with contextlib.suppress(OSError):  # a kernel without these files, or a thread that has just ended
        for task in Path("/proc/self/task").iterdir():
            pids.update(map(int, (task / "children").read_text(encoding="ascii").split()))
    for pid in pids:
        one = _child(pid)
        if one is not None:
            yield one


def _child(pid: int) -> _Child | None:
    """None for a process that is gone."""
    try:
        head, _, tail = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")
        fields = tail.split()
        return _Child(pid, head.partition(b"(")[2], fields[0], int(fields[3]), int(fields[19]))
    except (OSError, IndexError, ValueError):
        return None
