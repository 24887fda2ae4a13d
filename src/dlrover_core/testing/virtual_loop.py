"""An asyncio event loop whose time jumps: hours in milliseconds, the same order of callbacks every time.

When nothing is ready, time moves to the next timer. When there is no timer either, everybody waits for ever: that is a
deadlock and is reported as one, with all who wait. A thread that tries to wake the loop, or is asked to work for it, is an
error, because threads would bring back chance; and so is work without end at one moment.

Callbacks belong to whoever `spawn` started them for, and one owner can be frozen as SIGSTOP freezes a process: nothing of
it runs, time goes on, and what reached it meanwhile is waiting when it is thawed. An owner may have a clock of its own that
runs fast or slow: what `time` says to it, and how long its timers take.

It touches private names of `asyncio.base_events` that have been stable from Python 3.10 to 3.14.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import math
import zlib
from collections import deque
from collections.abc import Coroutine
from contextvars import ContextVar, copy_context
from typing import Any, NamedTuple, TypeVar, cast
from weakref import WeakKeyDictionary

T = TypeVar("T")
_OWNER: ContextVar[str] = ContextVar("owner", default="")
# Turns of the loop at one moment. A frame takes time and so does an append: what honestly happens at once is short.
TURNS_MAX = 100_000


class Deadlock(RuntimeError):
    """Nothing is ready and no timer is set: every task waits for something that cannot come. ``waiting`` says who, and where."""

    def __init__(self, waiting: list[str]) -> None:
        super().__init__(f"{len(waiting)} tasks wait, and nothing will ever come:\n  " + "\n  ".join(waiting))
        self.waiting = tuple(waiting)


class ThreadHop(RuntimeError):
    """Work was given to a thread, or came from one: when it is done is chance."""


class Runaway(RuntimeError):
    """Something goes on and on at one moment, and time never moves."""


class _Clock(NamedTuple):
    """An owner's own clock: what it said when the true one said ``at``, and how fast it has run since."""

    at: float
    said: float
    rate: float


class _Timer(asyncio.TimerHandle):
    """A timer whose moment can be moved. Whoever holds the heap puts it in order."""

    __slots__ = ()

    def move(self, when: float) -> None:
        """Be for another moment."""
        cast(Any, self)._when = when


# A place in the heap: of two timers for the same moment the older comes first, which a heap of timers does not promise.
# Unless there is a seed: then it orders owners, and each owner's own keep theirs. The third number decides at the latest.
_Due = tuple[float, int, int, _Timer]


class _NoSelector:
    """Stands where the selector is, which the base closes."""

    def close(self) -> None:
        """Nothing is held."""


class VirtualLoop(asyncio.BaseEventLoop):
    """Time starts at 0 and moves only by `jump`, which the loop itself calls when nothing is ready.

    A ``seed`` other than 0 orders what different owners have set for one moment.
    """

    _ready: deque[asyncio.Handle]
    _scheduled: list[_Due]
    _stopping: bool
    _closed: bool

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self._salt = seed
        self._virtual = 0.0
        self._selector = _NoSelector()
        self._clock_resolution = math.ulp(0.0)
        self._orders = itertools.count()
        self._frozen: set[str] = set()
        self._held: list[asyncio.Handle] = []
        self._held_timers: list[_Due] = []
        self._clocks: dict[str, _Clock] = {}
        self._turns = 0
        self.asked = 0  # how often somebody has asked for the time
        self._owners: WeakKeyDictionary[asyncio.Task[Any], str] = WeakKeyDictionary()

    def time(self) -> float:
        """Virtual seconds, by the clock of whoever asks."""
        self.asked += 1
        return self.time_of(_OWNER.get()) if self._clocks else self._virtual

    def time_of(self, owner: str) -> float:
        """Virtual seconds by the clock of ``owner``."""
        clock = self._clocks.get(owner)
        return self._virtual if clock is None else clock.said + (self._virtual - clock.at) * clock.rate

    def skew(self, owner: str, rate: float) -> None:
        """From now on the clock of ``owner`` runs ``rate`` times as fast; what it waits for already comes accordingly."""
        before = self._clocks.get(owner, _Clock(0.0, 0.0, 1.0)).rate
        self._clocks[owner] = _Clock(self._virtual, self.time_of(owner), rate)

        def moved(due: _Due) -> _Due:
            when, turn, order, timer = due
            if _owner_of(timer) != owner or when <= self._virtual:
                return due
            timer.move(self._virtual + (when - self._virtual) * before / rate)
            return (timer.when(), turn, order, timer)

        self._scheduled[:] = map(moved, self._scheduled)
        self._held_timers = list(map(moved, self._held_timers))
        heapq.heapify(self._scheduled)

    def _true(self, when: float) -> float:
        """The true moment at which the clock of whoever asks says ``when``; never one at which it does not say so yet."""
        owner = _OWNER.get()
        clock = self._clocks.get(owner)
        if clock is None:
            return when
        true = clock.at + (when - clock.said) / clock.rate
        while clock.said + (true - clock.at) * clock.rate < when:
            true = math.nextafter(true, math.inf)
        return true

    def waiting(self) -> list[str]:
        """Every task that has not ended, whose it is, and where it waits; sorted."""
        return sorted(self._describe(task) for task in asyncio.all_tasks(self))

    def _describe(self, task: asyncio.Task[Any]) -> str:
        owner = self._owners.get(task, "")
        inner = outer = cast(Any, task.get_coro())
        while getattr(getattr(inner, "cr_await", None), "cr_frame", None) is not None:
            inner = inner.cr_await
        frame = getattr(inner, "cr_frame", None)
        where = f" at {frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}" if frame is not None else ""
        names = dict.fromkeys(getattr(one, "__qualname__", str(one)) for one in (outer, inner))
        return f"{owner or '-'}{' (frozen)' if owner in self._frozen else ''}: {' > '.join(names)}{where}"

    def jump(self, seconds: float) -> None:
        """Move time on without running anything: what a stopped process sees when it is continued."""
        if seconds > 0:
            self._virtual += seconds
            # No timer fires early: one that did, and were set again for the rest, would stop time.
            self._clock_resolution = math.ulp(self._virtual)
            self._turns = 0

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
        self._turns += 1
        if self._turns > TURNS_MAX:
            self._turns = 0
            busy = {_owner_of(handle) for handle in self._ready}
            who = sorted(self._describe(task) for task in asyncio.all_tasks(self) if self._owners.get(task, "") in busy)
            raise Runaway(
                f"time stands still at {self._virtual:g} s for {TURNS_MAX} turns; busy is one of:\n  "
                + "\n  ".join(who)
            )
        ready, scheduled = self._ready, self._scheduled
        while scheduled and scheduled[0][-1]._cancelled:
            heapq.heappop(scheduled)
        if not ready and not self._stopping:
            if not scheduled:
                raise Deadlock(self.waiting())
            self.jump(scheduled[0][0] - self._virtual)
        end = self._virtual + self._clock_resolution
        while scheduled and scheduled[0][0] < end:
            ready.append(heapq.heappop(scheduled)[-1])
        for _ in range(len(ready)):  # what these add comes in the next turn
            handle = ready.popleft()
            if not handle._cancelled:
                handle._run()

    async def tick(self, every_s: float) -> None:
        """Sleep for ``every_s``, or so many times as long that something has run meanwhile: for who looks and looks again."""
        when = self._virtual + every_s
        if every_s > 0 and not self._ready and not self._clocks and self._scheduled:
            next_ = self._scheduled[0][0]
            while when < next_:
                when += every_s
        future = self.create_future()
        timer = self.call_at(when, _wake, future)
        try:
            await future
        finally:
            timer.cancel()

    def _hold_back(self) -> None:
        ready = list(self._ready)
        self._ready.clear()
        for handle in ready:
            (self._held if self._is_frozen(handle) else self._ready).append(handle)
        mine = [due for due in self._scheduled if self._is_frozen(due[-1])]
        if mine:
            self._held_timers += mine
            self._scheduled[:] = [due for due in self._scheduled if not self._is_frozen(due[-1])]
            heapq.heapify(self._scheduled)

    def _is_frozen(self, handle: asyncio.Handle) -> bool:
        return not handle.cancelled() and _owner_of(handle) in self._frozen

    def _turn_of(self, owner: str, when: float) -> int:
        return zlib.crc32(f"{self._salt} {when!r} {owner}".encode())

    def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> asyncio.TimerHandle:  # type: ignore[override]  # *args are typed by position only from 3.11 on
        """Call back at a moment; in the order of asking, among those of the same moment."""
        when = self._true(when) if self._clocks else when
        timer = _Timer(when, callback, args, self, context)
        turn = self._turn_of(_owner_of(timer), when) if self._salt else 0
        heapq.heappush(self._scheduled, (when, turn, next(self._orders), timer))
        return timer

    def call_soon(self, callback: Any, *args: Any, context: Any = None) -> asyncio.Handle:  # type: ignore[override]  # as above
        """Call back in the next turn: as asyncio's own, which looks first whether threads are to be watched."""
        if self._closed:
            raise RuntimeError("Event loop is closed")
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def _process_events(self, event_list: object) -> None:
        """There are none."""

    def _asyncgen_finalizer_hook(self, generator: Any) -> None:
        """Close a generator that nobody holds any more; asyncio's own way is for garbage of other threads, and there are none."""
        cast(Any, self)._asyncgens.discard(generator)
        if not self.is_closed():
            self.call_soon(self.create_task, generator.aclose())

    def create_task(self, coro: Any, **how: Any) -> asyncio.Task[Any]:
        """A task; whose it is, is kept for reports."""
        task = super().create_task(coro, **how)
        self._owners[task] = how["context"].get(_OWNER, "") if how.get("context") is not None else _OWNER.get()
        return task

    def call_soon_threadsafe(self, callback: Any, *args: Any, context: Any = None) -> asyncio.Handle:  # type: ignore[override]
        """From the loop's own thread as `call_soon`; from another never, and that is said before anything is queued."""
        if asyncio._get_running_loop() is self:
            return self.call_soon(callback, *args, context=context)
        raise ThreadHop(f"a thread tried to wake a virtual-time loop with {callback!r}")

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> Any:  # type: ignore[override]  # noqa: ARG002  # as above
        """Never: when a thread is done is chance. `asyncio.to_thread` and name look-ups come here too."""
        raise ThreadHop(
            f"{func!r} would run in a thread, and a virtual-time loop has none: call it, or put a fake in its place"
        )

    def _write_to_self(self) -> None:
        raise ThreadHop("a thread tried to wake a virtual-time loop")


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _owner_of(handle: asyncio.Handle) -> str:
    return handle._context.get(_OWNER, "")  # type: ignore[attr-defined,no-any-return]


def spawn(owner: str, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """A task of ``owner``; whatever it starts is its owner's too."""
    context = copy_context()
    context.run(_OWNER.set, owner)
    return context.run(asyncio.ensure_future, work)


def time_of(owner: str) -> float:
    """The running loop's time by the clock of ``owner``; on a real loop there is but one."""
    loop = asyncio.get_running_loop()
    return loop.time_of(owner) if isinstance(loop, VirtualLoop) else loop.time()


def run(main: Coroutine[Any, Any, T], *, limit_s: float = 1e6, seed: int = 0) -> T:
    """Run ``main`` on a new virtual loop, for at most ``limit_s`` virtual seconds; whatever is left running is cancelled."""
    loop = VirtualLoop(seed)
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
