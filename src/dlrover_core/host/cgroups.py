"""Control groups (version 2) of a run's own, in which nothing that its workers start can hide.

A process may leave its session, empty its environment and outlive its parents; it stays in its control group. A group lies
below the one that this process is in, and is made only where that is permitted: for root, and where a manager has delegated
it (systemd's ``Delegate=``, a container with a writable /sys/fs/cgroup). No controller is enabled in it, so limits and their
accounting stay where they were. Whoever cannot have a group goes on without.

Everything here works in the standard library alone, and without the rest of this package: the sweeper runs it as a file.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import time
from collections.abc import Iterator

PREFIX = "dlrover-"
SWITCH = "DLROVER_CGROUP"
"""An environment variable; ``off``: no group is made."""
KILL_ROUNDS_MAX = 100
_WORD = re.compile(r"[A-Za-z0-9_]{4,64}")


def name_of(run: str, node: str) -> str:
    """The name of the group of one node of a run; empty where the two cannot make one."""
    whole = _WORD.fullmatch(run) and _WORD.fullmatch(node)
    return f"{PREFIX}{run}-{node}" if whole and os.environ.get(SWITCH) != "off" else ""


def own(mountinfo: str | None = None, membership: str | None = None) -> str:
    """The folder of the group that this process is in; empty where there is none, or it cannot be seen from here.

    ``mountinfo`` and ``membership`` are the texts of /proc/self/mountinfo and /proc/self/cgroup, for tests.
    """
    try:
        lines = (_read("/proc/self/mountinfo") if mountinfo is None else mountinfo).splitlines()
        groups = (_read("/proc/self/cgroup") if membership is None else membership).splitlines()
    except OSError:
        return ""
    path = next((line[3:] for line in groups if line.startswith("0::")), "")
    for line in lines:
        mount, _, rest = line.partition(" - ")
        if not path or rest.split()[:1] != ["cgroup2"]:
            continue
        fields = mount.split()
        root, point = (re.sub(r"\\(\d{3})", lambda octal: chr(int(octal[1], 8)), one) for one in fields[3:5])
        root = root.rstrip("/")
        if path == root or path.startswith(f"{root}/"):
            return f"{point.rstrip('/')}{path[len(root) :].rstrip('/')}"
    return ""


class Group:
    """The group in ``folder``. It is ours: nobody else is in it but processes that were put there, and what they started."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    @classmethod
    def made(cls, name: str, base: str) -> Group:
        """A new one below ``base``, the group that this process is in. Raises `OSError` where none can be had."""
        if str(os.getpid()) not in _read(f"{base}/cgroup.procs").split():
            raise OSError(f"{base} is not the control group that this process is in")
        # Moving a process from one group to another takes the right to write here.
        os.close(os.open(f"{base}/cgroup.procs", os.O_WRONLY | os.O_CLOEXEC))
        group = cls(f"{base}/{name}")
        os.mkdir(group.folder)
        try:
            if _read(f"{group.folder}/cgroup.type").strip() != "domain":
                raise OSError(f"{base} is a threaded control group")  # noqa: TRY301
            os.close(os.open(f"{group.folder}/cgroup.procs", os.O_WRONLY | os.O_CLOEXEC))
        except BaseException:
            with contextlib.suppress(OSError):
                os.rmdir(group.folder)
            raise
        return group

    def take(self, pid: int) -> None:
        """Put a process in; its children of later are in it, too. Takes 10 ms. Raises `OSError`."""
        _write(f"{self.folder}/cgroup.procs", str(pid))

    def members(self) -> list[int]:
        """Everything alive in it, and in groups that were made below it. Those of other process namespaces are left out."""
        found: list[int] = []
        for folder in self._folders():
            with contextlib.suppress(OSError, ValueError):  # gone meanwhile, or a threaded one
                found += [pid for word in _read(f"{folder}/cgroup.procs").split() if (pid := int(word)) > 0]
        return found

    def kill(self) -> None:
        """SIGKILL everything in it, at one blow where the kernel can (Linux 5.14)."""
        try:
            _write(f"{self.folder}/cgroup.kill", "1")
        except FileNotFoundError:
            # Frozen, it can start nothing more; SIGKILL reaches the frozen, too.
            with contextlib.suppress(OSError):
                _write(f"{self.folder}/cgroup.freeze", "1")
            for pid in self.members():
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
        except OSError:  # it is gone, or read-only by now
            return

    def end(self, bound_s: float) -> bool:
        """Kill everything in it and remove it; False: something lives on after ``bound_s``, or it cannot be removed. Blocks."""
        deadline = time.monotonic() + bound_s
        for _ in range(KILL_ROUNDS_MAX):
            self.kill()
            self._await_empty(deadline)
            if self._removed() or time.monotonic() >= deadline:
                break
            time.sleep(0.01)  # the last of them is on its way out
        return not os.path.exists(self.folder)

    def _await_empty(self, deadline: float) -> None:
        try:
            fd = os.open(f"{self.folder}/cgroup.events", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return
        try:
            poll = select.poll()
            poll.register(fd, select.POLLPRI)
            while b"populated 1" in os.pread(fd, 4096, 0) and (left_s := deadline - time.monotonic()) > 0:
                poll.poll(left_s * 1000)
        except OSError:  # removed by somebody else
            return
        finally:
            os.close(fd)

    def _removed(self) -> bool:
        for folder in reversed(list(self._folders())):
            with contextlib.suppress(OSError):
                os.rmdir(folder)
        return not os.path.exists(self.folder)

    def _folders(self) -> Iterator[str]:
        for folder, below, _ in os.walk(self.folder):
            below.sort()
            yield folder


def end_all(base: str, bound_s: float, *, run: str = "", node: str = "") -> bool:
    """End the groups of a run that lie below ``base``, or those of one of its nodes; is none left? Blocks."""
    if not base or not any(_WORD.fullmatch(one) for one in (run, node)):
        return True
    begin, end = f"{PREFIX}{run}-" if run else PREFIX, f"-{node}" if node else ""
    try:
        names = [one for one in os.listdir(base) if one.startswith(begin) and one.endswith(end)]
    except OSError:
        return True
    alive = [one for one in names if not Group(f"{base}/{one}").end(bound_s)]
    return not alive


def _read(path: str) -> str:
    with open(path, "rb") as file:
        return os.fsdecode(file.read())


def _write(path: str, text: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)
