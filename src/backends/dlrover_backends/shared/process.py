"""Processes of one node, as the kernel shows them: started, waited for, and killed to the last one.

A node is everything that carries its mark in the environment, or lives in its first process's session: what fled into a
session of its own is found by the mark, what was born with an empty environment by the session; what did both becomes an
orphan (`orphans`). (Build servers have killed process trees by such a mark for as long as they exist.)

A node's first process may be started before anybody knows which node it will be: it is a *blank* then, and is told over a
socket. Light to import: the launcher starts blanks before anything else.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from dlrover_backends.shared import orphans
from dlrover_core.host import cgroups

MARK = "DLROVER_LOCAL_NODE"
ROUNDS_MAX = 100
WORDS_BYTES_MAX = 64 * 1024
_WRAPPER = Path(__file__).with_name("_exec.py")
_DEAD = frozenset((b"Z", b"X", b"x"))
_READ_BYTES = 65536
# Fields of /proc/PID/stat behind the name.
_STATE, _SESSION, _BEGAN = 0, 3, 19


class LocalCommand(NamedTuple):
    """How a node's agent is started: a program, what its environment has beside the launcher's, and where it runs.

    ``fds`` are descriptors of ours that it inherits. ``output``: where it prints; negative: where we do.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str] = MappingProxyType({})
    cwd: str | None = None
    fds: tuple[int, ...] = ()
    output: int = -1


class Started:
    """A node's first process, from its execution on. Nobody watches it yet; it dies with us, so start it in the main thread.

    ``report`` ends when the program runs; what can be read from it before is why it does not. ``control`` is our end of a
    blank's socket.
    """

    def __init__(self, command: LocalCommand, control: socket.socket | None = None) -> None:
        self.mark, self.control = os.urandom(16).hex(), control
        env = {**os.environ, **command.env, MARK: self.mark}
        self.child, self.report = spawn(command.argv, env, command.cwd, command.fds, command.output)
        self.pidfd = os.pidfd_open(self.child.pid)
        orphans.started.add(self.child.pid)

    def signal(self, number: int) -> None:
        """Send it a signal; to a dead one, nothing."""
        if self.pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, number)

    def tell(self, **words: Any) -> None:
        """Say something to a blank. Raises `OSError` where it is dead."""
        assert self.control is not None, "only a blank can be told something"
        self.control.send(json.dumps(words).encode())

    def hear(self) -> dict[str, Any] | None:
        """What a blank says; None at its end. Raises `BlockingIOError` where it says nothing now."""
        assert self.control is not None, "only a blank says something"
        with contextlib.suppress(ConnectionError):
            said = self.control.recv(WORDS_BYTES_MAX)
            return dict(json.loads(said)) if said else None
        return None

    def bury(self, timeout_s: float) -> tuple[int | None, int]:
        """It is dead: kill what is left of its node, reap it. Its exit code, if it can be had, and how many live on. Blocks."""
        code = exit_code(self.pidfd)
        alive = kill_all(self.mark, self.child.pid, timeout_s)
        cgroups.end_all(cgroups.own(), timeout_s, node=self.mark)
        alive += orphans.end(timeout_s)
        self.child.wait()
        orphans.started.discard(self.child.pid)
        return code, alive

    def close(self) -> None:
        """Release our descriptors; it is dead and buried. Idempotent."""
        if self.control is not None:
            self.control.close()
        for fd in (self.pidfd, self.report):
            if fd >= 0:
                os.close(fd)
        self.pidfd = self.report = -1

    def end(self, timeout_s: float = 5.0) -> None:
        """Kill it and all of its node, and release everything. Blocks. Nothing happens to one that was closed."""
        if self.pidfd < 0:
            return
        self.signal(signal.SIGKILL)
        select.select([self.pidfd], [], [], timeout_s)
        self.bury(timeout_s)
        self.close()


def blank(command: Callable[[int], LocalCommand]) -> Started:
    """Start a process that waits to be told who it is; ``command`` is given the number of its end of the socket.

    Raises `OSError` and `ValueError`.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        try:
            made = command(theirs.fileno())
            started = Started(made._replace(fds=(*made.fds, theirs.fileno())), ours)
        except BaseException:
            ours.close()
            raise
    ours.setblocking(False)
    return started


def spawn(
    argv: Sequence[str], env: Mapping[str, str], cwd: str | None, fds: Sequence[int] = (), output: int = -1
) -> tuple[subprocess.Popen[bytes], int]:
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
            stdout=output if output >= 0 else None,
            stderr=output if output >= 0 else None,
            pass_fds=(writing, *fds),
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
