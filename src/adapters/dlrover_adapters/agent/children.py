"""Children of the agent, each known by its pidfd: their end is an event of the loop, never polled for."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time

UNKNOWN_STATUS = -1000
"""Exit code where the status cannot be had: somebody else reaped the child."""


_known: set[int] = set()
"""Global, because being a parent is the process's affair, not an object's."""


def known() -> frozenset[int]:
    """The pids of all children that somebody here has made a `Child` of and not reaped yet; in any thread."""
    return frozenset(_known.copy())


class Child:
    """One child process, from its pidfd on. `dead` resolves to its exit code, negative for a signal.

    A dead child stays a zombie until `reap`: as long as it does, its process and session number belong to nobody else, so
    that killing what is left of its session cannot hit a stranger.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.died_us = 0
        self._loop = asyncio.get_running_loop()
        self.dead: asyncio.Future[int] = self._loop.create_future()
        self._fd = os.pidfd_open(pid)
        _known.add(pid)
        self._loop.add_reader(self._fd, self.look)

    @property
    def alive(self) -> bool:
        """As far as known; `look` makes sure."""
        return not self.dead.done()

    def look(self) -> None:
        """Learn now whether it is dead, instead of at the loop's next turn."""
        if self.dead.done():
            return
        try:
            result = os.waitid(os.P_PIDFD, self._fd, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            self._died(UNKNOWN_STATUS)
            return
        if result is not None:
            self._died(result.si_status if result.si_code == os.CLD_EXITED else -result.si_status)

    def _died(self, exit_code: int) -> None:
        self.died_us = time.monotonic_ns() // 1000
        self._loop.remove_reader(self._fd)
        self.dead.set_result(exit_code)

    def signal(self, number: int) -> None:
        """Send a signal; nothing happens if it is dead."""
        if self._fd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._fd, number)

    def kill_group(self) -> None:
        """SIGKILL its process group, atomically; nothing happens once it is reaped: the number may be another group's."""
        if self._fd < 0:
            return
        try:
            os.waitid(os.P_PIDFD, self._fd, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return  # somebody else has reaped it
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def reap(self) -> None:
        """Take a dead child out of the process table. Idempotent."""
        assert self.dead.done(), f"process {self.pid} is alive: it cannot be reaped"
        if self._fd >= 0:
            _known.discard(self.pid)
            with contextlib.suppress(ChildProcessError):
                os.waitid(os.P_PIDFD, self._fd, os.WEXITED | os.WNOHANG)
            os.close(self._fd)
            self._fd = -1


async def wait_dead(children: list[Child], timeout_s: float) -> list[Child]:
    """Wait until all ``children`` are dead, at most ``timeout_s``; those that are not."""
    waiting = [one.dead for one in children if one.alive]
    if waiting:
        await asyncio.wait(waiting, timeout=timeout_s)
    return [one for one in children if one.alive]
