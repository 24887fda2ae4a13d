"""What Linux offers for owning processes and the standard library does not: prctl, titles, and whole sessions.

A worker is the leader of a session of its own, and whatever it starts (DataLoader workers, compilers) stays in that session
unless it leaves on purpose. Killing "a worker" therefore means killing its session: its process group in one atomic call,
then, by their session number in /proc, members that made groups of their own.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import functools
import os
import select
import signal
import socket
import time
from collections.abc import Callable, Iterable

from dlrover_core.host.procfs import Member, hold, kill, processes, reap

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
COMM_BYTES_MAX = 15  # the kernel's TASK_COMM_LEN, less its NUL

# A session that goes on forking is scanned again, this often at most: SIGKILL outruns any fork loop of user code.
SCANS_MAX = 20


@functools.cache
def libc() -> ctypes.CDLL:
    """The C library this process runs on."""
    return ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, argument: int | bytes) -> None:
    if libc().prctl(option, argument, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}): {os.strerror(number)}")


def become_subreaper() -> None:
    """Orphans among this process's descendants become its children, instead of init's. Descendants of today included."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent: int) -> bool:
    """Have the kernel SIGKILL this process when its parent dies; False if ``parent`` is not (or no longer) its parent.

    The signal is bound to the parent's *thread* that forked, or for an adopted process to its main thread.
    """
    if os.getppid() != parent:
        return False
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # The parent may have died between the look and the order; then the order came too late.
    return os.getppid() == parent


def outlive_parent() -> None:
    """Take `die_with_parent` back."""
    _prctl(_PR_SET_PDEATHSIG, 0)


def set_name(name: str) -> None:
    """The short name that `ps -o comm` and `top` show; cut to 15 bytes."""
    _prctl(_PR_SET_NAME, name.encode()[:COMM_BYTES_MAX])


def set_title(title: str) -> None:
    """The command line that `ps` shows, cut to the room that the real one had.

    The interpreter has copied its arguments long ago, so the kernel's copy is free to be overwritten. Nothing happens where
    /proc is not what it should be: a title is worth no risk.
    """
    with contextlib.suppress(OSError, ValueError, IndexError), open("/proc/self/stat", "rb") as stat:
        fields = stat.read().rpartition(b")")[2].split()
        start, end = int(fields[45]), int(fields[46])
        with open("/proc/self/cmdline", "rb") as line:
            room = len(line.read())
        if 0 < room <= end - start:
            ctypes.memmove(start, os.fsencode(title)[: room - 1].ljust(room, b"\0"), room)


def own_link(fd: int) -> socket.socket:
    """The socket that this executed process was given; whatever else it inherited beyond the standard streams is closed."""
    for other in [int(name) for name in os.listdir("/proc/self/fd")]:
        if other > 2 and other != fd:
            with contextlib.suppress(OSError):  # the listing's own
                os.close(other)
    link = socket.socket(fileno=fd)
    link.set_inheritable(False)
    return link


def run_executed(prog: str, arguments: list[str], serve: Callable[[socket.socket], int]) -> int:
    """Be a servant of the agent's that was executed, not forked, where there is no zygote; its exit code."""
    parser = argparse.ArgumentParser(prog=prog)
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--agent", type=int, required=True)
    told, _ = parser.parse_known_args(arguments)
    if not die_with_parent(told.agent):
        return 0
    os.setsid()
    return serve(own_link(told.fd))


# ---- sessions


def members_of(sessions: frozenset[int]) -> list[Member]:
    """Every process whose session is one of ``sessions``."""
    return [one for one in processes() if one.session in sessions]


def busy_sessions(leaders: Iterable[int]) -> frozenset[int]:
    """Those of these sessions in which somebody lives besides the leader."""
    wanted = frozenset(leaders)
    if not wanted:
        return wanted
    return frozenset(one.session for one in members_of(wanted) if one.pid != one.session and one.lives)


def end_sessions(sessions: Iterable[int], bound_s: float) -> list[int]:
    """SIGKILL all members of ``sessions``, wait until they are dead, reap those that are ours; blocks.

    Session leaders are killed but never reaped: whoever watches them does that. Returns the members alive after ``bound_s``.
    """
    wanted = frozenset(sessions)
    deadline = time.monotonic() + bound_s
    alive: list[int] = []
    for _ in range(SCANS_MAX):
        members = [one for one in members_of(wanted) if one.state not in {"Z", "X"} or one.pid not in wanted]
        alive = [one.pid for one in members if one.state not in {"Z", "X"}]
        dying = [fd for one in members if one.pid in alive and (fd := kill(one)) is not None]
        wait_all(dying, deadline)
        # Orphans become children of the subreaper only when their parent is dead, so they are reaped in a second pass.
        for one in members:
            if one.pid not in wanted:
                reap(one)
        if not alive or time.monotonic() >= deadline:
            break
    return alive


def await_sessions_end(session: int, bound_s: float) -> None:
    """Wait until nobody but the dead leader is left in ``session``, at most ``bound_s``; blocks."""
    deadline = time.monotonic() + bound_s
    for _ in range(SCANS_MAX):
        members = [one for one in members_of(frozenset({session})) if one.state not in {"Z", "X"}]
        if not members or time.monotonic() >= deadline:
            return
        wait_all([fd for one in members if (fd := hold(one)) is not None], deadline)


def end_strays(names: frozenset[str], known: frozenset[int], bound_s: float) -> None:
    """SIGKILL and reap children of ours that go by one of ``names`` and of whom we were never told; blocks."""
    me, deadline = os.getpid(), time.monotonic() + bound_s
    strays = [one for one in processes() if one.parent == me and one.name in names and one.pid not in known]
    wait_all([fd for one in strays if (fd := kill(one)) is not None], deadline)
    for one in strays:
        reap(one)


def poll_ms(seconds: float) -> int:
    """``seconds`` as `poll` takes them: at least 0, at most 24 days; a longer number would be an error."""
    return min(max(0, round(seconds * 1000)), 2**31 - 1)


def wait_all(fds: list[int], deadline: float) -> None:
    """Wait until every pidfd has fired or the deadline is over, and close them."""
    for fd in fds:
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        poll.poll(poll_ms(deadline - time.monotonic()))
        os.close(fd)
