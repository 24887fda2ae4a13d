"""An asyncio event loop whose time jumps: hours in milliseconds, the same order of callbacks every time.

When nothing is ready, time moves to the next timer. When there is no timer either, everybody waits for ever: that is a
deadlock and is reported as one. A thread that tries to wake the loop is an error, because threads would bring back chance.

Callbacks belong to whoever `spawn` started them for, and one owner can be frozen as SIGSTOP freezes a process: nothing of
it runs, time goes on, and what reached it meanwhile is waiting when it is thawed.

It touches private names of `asyncio.base_events` that have been stable from Python 3.10 to 3.14.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import math
from collections import deque
from collections.abc import Coroutine
from contextvars import ContextVar, copy_context
from typing import Any, TypeVar, cast

T = TypeVar("T")
_OWNER: ContextVar[str] = ContextVar("owner", default="")


class Deadlock(RuntimeError):
    """Nothing is ready and no timer is set: every task waits for something that cannot come."""


class _Timer(asyncio.TimerHandle):
    """A timer; of two for the same moment the older comes first, which a heap alone does not promise."""

    __slots__ = ("order",)
    order: int

    def __lt__(self, other: object) -> bool:
        if not isinstance(other, _Timer):
            return NotImplemented
        return (self.when(), self.order) < (other.when(), other.order)


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

    _ready: deque[asyncio.Handle]
    _scheduled: list[asyncio.TimerHandle]

    def __init__(self) -> None:
        super().__init__()
        self._virtual = 0.0
        self._selector = _Jump(self)
        self._clock_resolution = math.ulp(0.0)
        self._orders = itertools.count()
        self._frozen: set[str] = set()
        self._held: list[asyncio.Handle] = []
        self._held_timers: list[asyncio.TimerHandle] = []

    def time(self) -> float:
        """Virtual seconds."""
        return self._virtual

    def jump(self, seconds: float) -> None:
        """Move time on without running anything: what a stopped process sees when it is continued."""
        if seconds > 0:
            self._virtual += seconds
            # No timer fires early: one that did, and were set again for the rest, would stop time.
            self._clock_resolution = math.ulp(self._virtual)

    def freeze(self, owner: str) -> None:
        """Run nothing of ``owner`` from now on: what SIGSTOP does to a process."""
        self._frozen.add(owner)

    def thaw(self, owner: str) -> None:
        """Let ``owner`` run again, beginning with all that has reached it and all its timers that are overdue."""
        self._frozen.discard(owner)
        held, self._held = self._held, []
        self._ready.extend(held)
        timers, self._held_timers = self._held_timers, []
        for timer in timers:
            heapq.heappush(self._scheduled, timer)

    def thaw_all(self) -> None:
        """Let everybody run again."""
        for owner in list(self._frozen):
            self.thaw(owner)

    def _run_once(self) -> None:
        if self._frozen:
            self._hold_back()
        super()._run_once()  # type: ignore[misc]  # private, and there since 3.4

    def _hold_back(self) -> None:
        ready = list(self._ready)
        self._ready.clear()
        for handle in ready:
            (self._held if self._is_frozen(handle) else self._ready).append(handle)
        mine = [timer for timer in self._scheduled if self._is_frozen(timer)]
        if mine:
            self._held_timers += mine
            self._scheduled[:] = [timer for timer in self._scheduled if not self._is_frozen(timer)]
            heapq.heapify(self._scheduled)

    def _is_frozen(self, handle: asyncio.Handle) -> bool:
        return not handle.cancelled() and cast(Any, handle)._context.get(_OWNER, "") in self._frozen

    def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> asyncio.TimerHandle:  # type: ignore[override]  # *args are typed by position only from 3.11 on
        """Call back at a moment; in the order of asking, among those of the same moment."""
        timer = _Timer(when, callback, args, self, context)
        timer.order = next(self._orders)
        heapq.heappush(self._scheduled, timer)
        cast(Any, timer)._scheduled = True
        return timer

    def _process_events(self, event_list: object) -> None:
        """There are none."""

    def _asyncgen_finalizer_hook(self, generator: Any) -> None:
        """Close a generator that nobody holds any more; asyncio's own way is for garbage of other threads, and there are none."""
        cast(Any, self)._asyncgens.discard(generator)
        if not self.is_closed():
            self.call_soon(self.create_task, generator.aclose())

    def _write_to_self(self) -> None:
        raise RuntimeError("a thread tried to wake a virtual-time loop")


def spawn(owner: str, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """A task of ``owner``; whatever it starts is its owner's too."""
    context = copy_context()
    context.run(_OWNER.set, owner)
    return context.run(asyncio.ensure_future, work)


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
        for owner in list(loop._frozen):
            loop.thaw(owner)
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        with contextlib.suppress(Deadlock):
            loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        asyncio.set_event_loop(None)
        loop.close()
