"""The processes of a job on this host, as /proc shows them, and the steps that its workers make, as they make them."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

_SLOT = struct.Struct("=q")
_SLOT_LINK = "/memfd:dlrover-step"
_ATTEMPT = re.compile(r"/attempt_(\d+)/")
_PROC = Path("/proc")


class Process(NamedTuple):
    """A process: its short name, its command line, and who started it."""

    pid: int
    name: str
    line: str
    parent: int

    @property
    def node(self) -> str:
        """The node that it says it belongs to."""
        words = self.line.split()
        return words[words.index("--node") + 1] if "--node" in words[:-1] else ""

    @property
    def rank(self) -> int:
        """The rank of a worker; -1 for anything else."""
        name, _, rank = self.name.rpartition("-")
        return int(rank) if name == "worker" and rank.isdecimal() else -1


def lives(pid: int) -> bool:
    """Zombies do not."""
    return state_of(pid) not in ("", "Z", "X")


def state_of(pid: int) -> str:
    """One letter, as ps shows it; '' for a process that is gone."""
    try:
        return (_PROC / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()[0].decode()
    except OSError:
        return ""


def living(mark: str) -> list[Process]:
    """Every living process that began with ``mark`` in its environment, the oldest number first."""
    found = []
    for pid in sorted(int(one) for one in os.listdir(_PROC) if one.isdecimal()):  # noqa: PTH208  # a tenth of iterdir's cost
        with contextlib.suppress(OSError):  # it ended while we looked, or is another user's
            place = _PROC / str(pid)
            if mark.encode() not in (place / "environ").read_bytes().split(b"\0"):
                continue
            head, _, tail = (place / "stat").read_bytes().rpartition(b")")
            fields = tail.split()
            if fields[0] not in (b"Z", b"X"):
                line = (place / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                found.append(Process(pid, head.partition(b"(")[2].decode(errors="replace"), line, int(fields[1])))
    return found


def workers(found: Iterable[Process]) -> list[Process]:
    """The workers by rank; not what a worker has forked, which has inherited its name."""
    named = {one.pid: one for one in found if one.rank >= 0}
    return sorted((one for one in named.values() if one.parent not in named), key=lambda one: one.rank)


def agents(found: Iterable[Process]) -> list[Process]:
    """The agents that have a name, by it."""
    return sorted((one for one in found if one.name == "dlrover-agent" and one.node), key=lambda one: one.node)


def family(found: Iterable[Process], root: int) -> list[Process]:
    """A process and all that descend from it, each after its parent."""
    known = list(found)
    those = [one for one in known if one.pid == root]
    for one in those:
        those += [other for other in known if other.parent == one.pid]
    return those


def send(pid: int, number: int) -> None:
    """A signal, to a process that may be gone."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


class Stopped:
    """A process under SIGSTOP, which `go_on` ends, whoever has that number by then."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        try:
            self._fd = os.pidfd_open(pid)
        except ProcessLookupError:
            self._fd = -1
        self._send(signal.SIGSTOP)

    def stop(self) -> None:
        """Again."""
        self._send(signal.SIGSTOP)

    def go_on(self) -> None:
        """Let it run."""
        self._send(signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL."""
        self._send(signal.SIGKILL)

    def close(self) -> None:
        """Let it run, and forget it. Idempotent."""
        self.go_on()
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _send(self, number: signal.Signals) -> None:
        if self._fd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._fd, number)


class Life(NamedTuple):
    """One process of a rank: its generation, 0 if that is not known, and the descriptor of its step slot."""

    rank: int
    generation: int
    fd: int

    @property
    def step(self) -> int:
        """The last step that it has made, -1 before the first: exact also when it is dead."""
        return int(_SLOT.unpack(os.pread(self.fd, _SLOT.size, 0))[0])


class Steps:
    """Reads the memory that each worker shares with its agent, where it writes its step as soon as it has made it."""

    def __init__(self) -> None:
        self.lives: list[Life] = []
        self._slots: dict[int, int] = {}
        self._known: set[int] = set()

    @property
    def reached(self) -> int:
        """The highest step that any worker has made; -1 before the first."""
        return max((life.step for life in self.lives), default=-1)

    def last_of(self, generation: int) -> int:
        """The last step of a generation, -1 if none is known."""
        return max((life.step for life in self.lives if life.generation == generation), default=-1)

    def look(self, found: Iterable[Process]) -> None:
        """Take in the workers that have begun since."""
        known = list(found)
        new = [one for one in workers(known) if one.pid not in self._known]
        if not new:
            return
        for agent in agents(known):
            self._open(agent.pid)
        for worker in new:
            inode = _slot_inode(worker.pid)
            if inode in self._slots:
                self._known.add(worker.pid)
                self.lives.append(Life(worker.rank, _generation(worker.pid), self._slots.pop(inode)))

    def _open(self, agent: int) -> None:
        """Open every slot of an agent's that is new."""
        taken = {os.fstat(one).st_ino for one in (*self._slots.values(), *(life.fd for life in self.lives))}
        with contextlib.suppress(OSError):
            for link in (_PROC / str(agent) / "fd").iterdir():
                with contextlib.suppress(OSError):
                    if str(link.readlink()).startswith(_SLOT_LINK) and link.stat().st_ino not in taken:
                        self._slots[link.stat().st_ino] = os.open(link, os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        """Close all slots. Idempotent; what they said is forgotten."""
        for fd in (*self._slots.values(), *(life.fd for life in self.lives)):
            os.close(fd)
        self._slots.clear()
        self.lives.clear()


def _slot_inode(worker: int) -> int:
    with contextlib.suppress(OSError):
        for line in (_PROC / str(worker) / "maps").read_text(errors="replace").splitlines():
            if _SLOT_LINK in line:
                return int(line.split()[4])
    return 0


def _generation(worker: int) -> int:
    """Its output goes to a folder of its generation."""
    with contextlib.suppress(OSError):
        found = _ATTEMPT.search(str((_PROC / str(worker) / "fd" / "1").readlink()))
        return int(found[1]) if found else 0
    return 0
