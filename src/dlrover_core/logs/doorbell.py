"""A doorbell per job: who follows a log sleeps on it, who appends rings it.

The count of rings is taken *before* reading and handed to `wait`, so that an append between the read and the wait is never
slept through. A ring says only "look again"; what is there is found by reading.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict


class Doorbell:
    """Wakes the followers of one process. Belongs to one event loop."""

    def __init__(self) -> None:
        self._rung: defaultdict[str, int] = defaultdict(int)
        self._waiting: defaultdict[str, set[asyncio.Future[None]]] = defaultdict(set)

    def rung(self, job: str) -> int:
        """How often this job's bell has rung."""
        return self._rung[job]

    def ring(self, job: str) -> None:
        """Wake every follower of the job."""
        self._rung[job] += 1
        for waiter in self._waiting.pop(job, set()):
            _settle(waiter)

    def ring_all(self) -> None:
        """Wake everybody: the log is closing."""
        for job in list(self._waiting):
            self.ring(job)

    async def wait(self, job: str, seen: int, timeout_s: float | None = None) -> None:
        """Return when the bell has rung more than ``seen`` times, or after ``timeout_s``."""
        if self._rung[job] != seen:
            return
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()
        self._waiting[job].add(waiter)
        timer = loop.call_later(timeout_s, _settle, waiter) if timeout_s is not None else None
        try:
            await waiter
        finally:
            if timer is not None:
                timer.cancel()
            if job in self._waiting:
                self._waiting[job].discard(waiter)


def _settle(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
