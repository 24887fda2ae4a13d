"""One job of several launchers on loopback, as on several hosts: each is a session of its own, and can be killed whole."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from _jobs import BEST, LIMIT_S, OURS, OWN_STORE, Broken, Job, Line, kept

AS_IT_COMES = "keep-alive 5 s x 3, as it comes; TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, without which nobody joins later"
AT_ITS_BEST = "keep-alive 1 s x 3, --shutdown-timeout 1, TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
KEEP_ALIVE = "keep_alive_interval=1,keep_alive_max_attempt=3"


class Hosts(Job):
    """A job whose launchers all get the same command, but for their own state directories. Use `hosts`."""

    def __init__(self, launcher: str, folder: Path, arguments: Sequence[str], nnodes: str, conf: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        conf = f"{conf},{KEEP_ALIVE}" if launcher == BEST else conf
        options = ["--nnodes", nnodes, "--nproc-per-node", "1", "--max-restarts", "3", "--rdzv-backend", "c10d"]
        options += ["--rdzv-endpoint", f"127.0.0.1:{self.port}", "--rdzv-id", "bench", "--rdzv-conf", conf]
        super().__init__(launcher, folder, arguments, [*options, "--local-addr", "127.0.0.1"])
        self.launchers: list[subprocess.Popen[bytes]] = []
        if launcher != OURS:
            self.env = dict(OWN_STORE)

    def start(self) -> None:
        """Start one more launcher, as on a further host. The first is the one that all others meet at."""
        command, first = self.command, self.process
        if self.launcher == OURS:
            home = self.folder / f"host-{len(self.launchers)}"
            self.command = [str(home) if word == str(self.folder) else word for word in command]
        super().start()
        self.command = command
        assert self.process is not None
        self.launchers.append(self.process)
        if first is None:
            self._wait_for_the_host()
        self.process = first or self.process

    def _wait_for_the_host(self) -> None:
        """Whoever binds the port first holds the rendezvous: let it be the first launcher."""
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1.0):
                return
            time.sleep(0.02)
        raise Broken(f"{self.launcher} does not listen on port {self.port}; it said: {self.said()}")

    def end(self) -> list[str]:
        """Kill the launchers and all of the run's processes, and return those that the launchers left behind, in words."""
        for one in self.launchers:
            one.kill()
            one.wait()
        return super().end()


@contextlib.contextmanager
def hosts(launcher: str, arguments: Sequence[str], nnodes: str, count: int, conf: str) -> Iterator[Hosts]:
    """A job on so many hosts."""
    with kept(lambda folder: Hosts(launcher, folder, arguments, nnodes, conf)) as job:
        for _ in range(count - 1):
            job.start()
        yield job


def all_step(lines: Sequence[Line], before: set[int], ranks: int) -> float:
    """When the first world of so many ranks without any of ``before`` had made a common step; 0: not yet.

    A step of a rank counts from the newest process that it has.
    """
    newest: dict[int, int] = {}
    firsts: dict[int, float] = {}
    for line in lines:
        if line.pid not in before:
            if line.what == "begin":
                newest[line.rank] = line.pid
                firsts.pop(line.pid, None)
            elif line.what == "step":
                firsts.setdefault(line.pid, line.at)
    stepped = [firsts[pid] for pid in newest.values() if pid in firsts]
    return max(stepped) if len(stepped) == ranks else 0.0


def stepping(lines: Sequence[Line], ranks: int, step: int) -> bool:
    """Have so many ranks come to this step?"""
    return len({line.rank for line in lines if line.what == "step" and line.step >= step}) == ranks


def wait_all_step(job: Job, before: set[int], ranks: int, limit_s: float) -> float:
    """When a new world of so many ranks had made a common step. Raises `Broken` after ``limit_s``."""
    job.until(lambda lines: all_step(lines, before, ranks) > 0, 0.005, limit_s)
    return all_step(job.lines(), before, ranks)


# ---- whole nodes


def parents() -> Mapping[int, int]:
    """Every process's parent."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                found[int(entry.name)] = int((entry / "stat").read_bytes().rpartition(b")")[2].split()[1])
    return found


def ancestor(pid: int, name: str) -> int:
    """The nearest ancestor of that name. Raises `Broken`."""
    above = parents()
    while (pid := above.get(pid, 0)) > 1:
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/comm").read_text().strip() == name:
                return pid
    raise Broken(f"no {name} above the worker")


def kill_tree(top: int, number: int = signal.SIGKILL) -> float:
    """Send a signal to a process and to all that it has started, SIGKILL as when a node goes down; when that was."""
    tree, above = {top}, parents()
    while more := {pid for pid, parent in above.items() if parent in tree} - tree:
        tree |= more
    at = time.monotonic()
    for pid in (top, *(tree - {top})):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
    return at
