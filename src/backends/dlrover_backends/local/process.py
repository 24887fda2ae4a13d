"""Processes of one node, as the kernel shows them: started, waited for, and killed to the last one.

A node is everything that carries its mark in the environment, or lives in its first process's session: what fled into a
session of its own is found by the mark, what was born with an empty environment by the session. (Build servers have killed
process trees by such a mark for as long as they exist.)
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

MARK = "DLROVER_LOCAL_NODE"
ROUNDS_MAX = 100
_WRAPPER = Path(__file__).with_name("_exec.py")
_DEAD = frozenset((b"Z", b"X", b"x"))
_READ_BYTES = 65536
# Fields of /proc/PID/stat behind the name.
_STATE, _SESSION, _BEGAN = 0, 3, 19


def spawn(argv: Sequence[str], env: Mapping[str, str], cwd: str | None) -> tuple[subprocess.Popen[bytes], int]:
    """Start ``argv`` in a session of its own; it dies with this process, so call it from the main thread.

    Returns the process and a descriptor that ends when the program runs; what can be read from it before is why it does not.
    Raises `OSError` and `ValueError`.
    """
    reading, writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        child = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_WRAPPER), str(os.getpid()), str(writing), *argv],
            env=dict(env),
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            pass_fds=(writing,),
            start_new_session=True,
        )
    except BaseException:
        os.close(reading)
        raise
    finally:
        os.close(writing)
    return child, reading


def exit_code(pidfd: int) -> int | None:
    """How a dead child ended, negative for a signal, without reaping it; None if somebody else has."""
    try:
        # Not reaped, its pid cannot become another's, nor can its session's number.
        status = os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    if status is None:
        return None
    return status.si_status if status.si_code == os.CLD_EXITED else -status.si_status


def told(code: int) -> str:
    """An exit code in words."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


def kill_all(mark: str, session: int, timeout_s: float) -> int:
    """Kill every process of a node; return how many live on. Blocks until they are dead, or ``timeout_s`` is over.

    ``session`` is the pid of the node's first process, dead and not yet reaped: so neither number can be another's.
    Again and again, because what is being killed may still be starting others.
    """
    deadline = time.monotonic() + timeout_s
    try:
        born = int(_stat(session)[_BEGAN])
    except (OSError, IndexError, ValueError):
        born = 0  # reaped by somebody else; then every process is looked at
    node = _Node(f"{MARK}={mark}".encode(), session, born)
    for _ in range(ROUNDS_MAX):
        found = [pidfd for pid in node.members() if (pidfd := node.kill(pid)) is not None]
        try:
            alive = _await_deaths(found, deadline)
        finally:
            for pidfd in found:
                os.close(pidfd)
        if alive or not found:
            return alive
    return 1


class _Node(NamedTuple):
    """How the processes of a node are known. ``born``: when its first began, in the clock ticks of ``/proc``."""

    mark: bytes
    session: int
    born: int

    def members(self) -> list[int]:
        """Those alive now."""
        return [pid for pid in _pids() if self.owns(pid)]

    def owns(self, pid: int) -> bool:
        try:
            fields = _stat(pid)
            if fields[_STATE] in _DEAD or int(fields[_BEGAN]) < self.born:
                return False
            return int(fields[_SESSION]) == self.session or self.mark in _environment(pid)
        except (OSError, IndexError, ValueError):
            return False  # gone meanwhile, or another user's

    def kill(self, pid: int) -> int | None:
        """Kill a member; its pidfd, or None if it is gone and its pid perhaps another's."""
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:
            return None
        if not self.owns(pid):
            os.close(pidfd)
            return None
        with contextlib.suppress(OSError):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        return pidfd


def _pids() -> list[int]:
    with os.scandir("/proc") as entries:
        return [int(entry.name) for entry in entries if entry.name.isdigit()]


def _stat(pid: int) -> list[bytes]:
    # The name, in parentheses, may hold anything; numbers follow the last one.
    return _read(pid, "stat").rpartition(b")")[2].split()


def _environment(pid: int) -> list[bytes]:
    return _read(pid, "environ").split(b"\0")


def _read(pid: int, name: str) -> bytes:
    """A file of ``/proc``, of every process of the host while somebody waits: by the shortest way."""
    fd = os.open(f"/proc/{pid}/{name}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return b"".join(iter(lambda: os.read(fd, _READ_BYTES), b""))
    finally:
        os.close(fd)


def _await_deaths(pidfds: Sequence[int], deadline: float) -> int:
    """How many are still alive when all are dead or the deadline has passed."""
    poll, waiting = select.poll(), set(pidfds)
    for pidfd in pidfds:
        poll.register(pidfd, select.POLLIN)
    while waiting and (left_s := deadline - time.monotonic()) > 0:
        for pidfd, _ in poll.poll(left_s * 1000):
            poll.unregister(pidfd)
            waiting.discard(pidfd)
    return len(waiting)
