"""An asyncio event loop whose time jumps: hours in milliseconds, the same order of callbacks every time.

When nothing is ready, time moves to the next timer. When there is no timer either, everybody waits for ever: that is a
deadlock and is reported as one. A thread that tries to wake the loop is an error, because threads would bring back chance.
It touches private names of `asyncio.base_events` that have been stable from Python 3.10 to 3.14.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Deadlock(RuntimeError):
    """Nothing is ready and no timer is set: every task waits for something that cannot come."""


class _Jump:
    """Stands where the selector is: instead of waiting it moves time."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop

    def select(self, timeout: float | None) -> list[Any]:
        if timeout is None:
            waiting = [str(task.get_coro()) for task in asyncio.all_tasks(self._loop)]
            raise Deadlock("every task waits: " + "; ".join(waiting)[:2000])
        self._loop.jump(timeout)
        return []

    def close(self) -> None:
        """Nothing is held."""


class VirtualLoop(asyncio.BaseEventLoop):
    """Time starts at 0 and moves only by `jump`, which the loop itself calls when nothing is ready."""

    def __init__(self) -> None:
        super().__init__()
        self._virtual = 0.0
        self._selector = _Jump(self)
        self._clock_resolution = 1e-9

    def time(self) -> float:
        """Virtual seconds."""
        return self._virtual

    def jump(self, seconds: float) -> None:
        """Move time on without running anything: what a stopped process sees when it is continued."""
        if seconds > 0:
            self._virtual += seconds

    def _process_events(self, event_list: object) -> None:
        """There are none."""

    def _write_to_self(self) -> None:
        raise RuntimeError("a thread tried to wake a virtual-time loop")


def run(main: Coroutine[Any, Any, T], *, limit_s: float = 1e6) -> T:
    """Run ``main`` on a new virtual loop, for at most ``limit_s`` virtual seconds; whatever is left running is cancelled."""
    loop = VirtualLoop()
    try:
        asyncio.set_event_loop(loop)
        return loop.run_until_complete(asyncio.wait_for(main, limit_s))
    finally:
        _clean_up(loop)


def _clean_up(loop: VirtualLoop) -> None:
    try:
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        with contextlib.suppress(Deadlock):
            loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        asyncio.set_event_loop(None)
        loop.close()
