"""A container as a process group, and the end of everything that it started."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Mapping
from pathlib import Path

from dlrover_backends.fake_k8s.kubelet.sandbox import MARK

MESSAGE_BYTES_MAX = 4096
CANNOT_START = 128
PROC = Path("/proc")


class Container:
    """One run of one container.

    Args:
        command: what is run.
        environment: all its variables.
        folder: where it runs.
        log: where its output goes; appended.
    """

    def __init__(self, command: list[str], environment: Mapping[str, str], folder: Path, log: Path) -> None:
        self._command = command
        self._environment = dict(environment)
        self._folder = folder
        self._log = log
        self._process: asyncio.subprocess.Process | None = None
        self.reason = ""  # the platform's word for its end, told by who ended it

    @property
    def pid(self) -> int | None:
        """The process; None before the start."""
        return self._process.pid if self._process is not None else None

    async def start(self) -> str:
        """Start; returns why it could not, empty if it could."""
        if not self._command:
            return "no command specified"
        with self._log.open("ab") as out:
            try:
                self._process = await asyncio.create_subprocess_exec(
                    *self._command,
                    env=self._environment,
                    cwd=self._folder,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=out,
                    stderr=out,
                    start_new_session=True,
                )
            except OSError as error:
                return f"exec: {self._command[0]!r}: {error.strerror}"
        return ""

    async def ended(self) -> int:
        """Wait for the end; the exit code as a container runtime reports it."""
        assert self._process is not None
        code = await self._process.wait()
        return code if code >= 0 else 128 - code

    def signal(self, number: int) -> None:
        """Signal the process group."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    async def stop(self, grace_s: float) -> None:
        """SIGTERM to the process, and SIGKILL to all after the grace."""
        if self._process is None or self._process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process.pid, signal.SIGTERM)
        try:
            await asyncio.wait_for(asyncio.shield(self._process.wait()), grace_s)
        except asyncio.TimeoutError:
            self.signal(signal.SIGKILL)


def of_pod(mark: str) -> list[int]:
    """All processes that a pod started and that live: its mark, or only its uid, is in their environment."""
    found = []
    for entry in PROC.iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            environment = (entry / "environ").read_bytes().decode(errors="replace").split("\0")
            if any(one.startswith(f"{MARK}=") and one.endswith(mark) for one in environment):
                found.append(int(entry.name))
    return found


def kill_pod(mark: str) -> int:
    """SIGKILL to all that a pod started, as the end of its cgroup; returns how many."""
    total = 0
    for _ in range(20):  # who forks meanwhile is found in the next round
        pids = of_pod(mark)
        for pid in pids:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        total += len(pids)
        if not pids:
            break
    return total


def last_words(message: Path, log: Path, *, policy: str, failed: bool) -> str:
    """A container's termination message: what it left, or the end of its output if that is asked for."""
    with contextlib.suppress(OSError):
        left = message.read_bytes()[-MESSAGE_BYTES_MAX:].decode(errors="replace")
        if left:
            return left
    if policy == "FallbackToLogsOnError" and failed:
        with contextlib.suppress(OSError):
            return log.read_bytes()[-2048:].decode(errors="replace")
    return ""
