"""What the two processes of a detached job inherit from each other, and how one of them starts the other."""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
from typing import NamedTuple

from dlrover_adapters.agent.spawn import module_command
from dlrover_adapters.cli.scratch import MARK

HOST, SUPERVISOR = "host", "supervisor"


class Estate(NamedTuple):
    """Descriptors, open in both processes."""

    port: int
    """The masters' listening socket."""
    papers: int
    """The settings, in a file in memory."""
    claim: int
    """The job's lock."""
    lock: int
    """The run folder's lock."""
    pipe: int
    """Its end lets the sweeper clean up."""

    @classmethod
    def read(cls) -> tuple[Estate, int]:
        """What this process was started with, and its partner's pid; 0: it is to start one."""
        parser = argparse.ArgumentParser()
        parser.add_argument("--partner", type=int, required=True)
        parser.add_argument("--fds", required=True)
        parser.add_argument("--job", required=True)
        found = parser.parse_args()
        estate = cls(*map(int, found.fds.split(",")))
        for fd in estate:
            os.set_inheritable(fd, False)
        return estate, found.partner

    def start(self, role: str, job: str, token: str, mark: str, partner: int, output: int) -> subprocess.Popen[bytes]:
        """Start a node host or a supervisor in a session of its own; its words go to the file ``output``. Raises `OSError`."""
        words = ("--partner", str(partner), "--fds", ",".join(map(str, self)), "--job", job)
        return subprocess.Popen(
            [*module_command(f"dlrover_adapters.cli.detached.{role}"), *words],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, "DLROVER_TOKEN": token, MARK: mark},
            pass_fds=tuple(self),
            start_new_session=True,
        )


async def gone(pid: int) -> None:
    """Wait for the end of a process, a child or not."""
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        return
    loop, end = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(pidfd, end.set)
    try:
        await end.wait()
    finally:
        loop.remove_reader(pidfd)
        os.close(pidfd)


class Partner:
    """Keeps the other process there: started, watched, and started again when it has died."""

    PAUSE_S, PAUSE_MAX_S, STEADY_S = 0.1, 30.0, 60.0

    def __init__(self, estate: Estate, role: str, job: str, token: str, mark: str, pid: int) -> None:
        self._estate, self._role, self._job, self._token, self._mark = estate, role, job, token, mark
        self._pid = pid

    async def keep(self) -> None:
        """Until cancelled."""
        loop, pause_s = asyncio.get_running_loop(), self.PAUSE_S
        while True:
            began, child = loop.time(), None
            if not self._pid:
                try:
                    child = self._estate.start(self._role, self._job, self._token, self._mark, os.getpid(), 2)
                    self._pid = child.pid
                except OSError:  # a limit, which may pass
                    await asyncio.sleep(pause_s)
                    pause_s = min(self.PAUSE_MAX_S, pause_s * 2)
                    continue
            await gone(self._pid)
            if child is not None:
                await asyncio.to_thread(child.wait)
            self._pid = 0
            pause_s = self.PAUSE_S if loop.time() - began >= self.STEADY_S else min(self.PAUSE_MAX_S, pause_s * 2)
            if child is not None:
                await asyncio.sleep(pause_s)
