"""Does a process hang that does not answer? And how it is asked again and again.

A parent asks its child a question that the child's main loop answers within milliseconds. `Watchdog` judges silence by the
parent's own clock. The kernel's view of the child distinguishes a stopped child and a deadlock from a child that computes,
waits for a disk or is held by a debugger. Time in which the parent itself did not run (a suspended machine, a paused
container) does not count, so a machine that stood still costs no child. `Watch` asks, on asyncio.

Silence counts from the last answer, not from the question after it. So a hanging child is known ``hung_s`` after its last
answer, however rarely it is asked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NamedTuple

START_S = 300.0
"""Seconds that a child may take to its first answer: it imports what it needs, perhaps from a slow network file system."""
PERIOD_MAX_S, PERIODS = 1.0, 8
"""A child is asked at least every so many seconds, and so many times in ``hung_s``."""
LATE_PERIODS = 2
"""Of the time between two looks, the part beyond so many periods is time in which the parent itself did not run."""
BUSY_TIMES = 4
"""A child that computes, or waits for a disk or a processor, has so many times ``hung_s``."""
DOUBT_SHARE = 0.7
"""A child is in doubt once it has been silent for this share of the time after which it hangs."""
BUSY_SHARE = 0.1
"""A child computes if it uses this share of one processor while it is silent."""


class Seen(NamedTuple):
    """The kernel's view of a process."""

    state: str = ""
    """Its main thread's, as ps shows it: R runs, S sleeps, D waits for a disk, T is stopped; empty: the process is gone."""
    cpu_s: float = 0.0
    """Processor time of all its threads since it began."""
    tracer: int = 0
    """The process number of the debugger that holds it; 0: none."""


class Verdict(NamedTuple):
    """What to do about a silent child."""

    kill: bool
    """False: a debugger holds it; it is left alone."""
    silent_s: float
    """For how long it has not answered, seconds."""
    why: str
    """What it seems to be doing, for people."""


class Watchdog:
    """Judges one child. All times are of one monotonic clock, in seconds. ``hung_s`` must be more than 0."""

    def __init__(self, hung_s: float, now_s: float, *, start_s: float = START_S) -> None:
        if hung_s <= 0:
            raise ValueError(f"a child that never hangs needs no watchdog: hung_s is {hung_s}")
        self.period_s = min(PERIOD_MAX_S, hung_s / PERIODS)
        self._hung_s, self._limit_s = hung_s, max(hung_s, start_s)
        self._looked_at, self._silent_s = now_s, 0.0
        self._earlier: tuple[float, float] | None = None
        self._said_traced = False

    @property
    def wait_s(self) -> float:
        """Until the next `look`: one period, or less where the silence is about to be a doubt, or too long."""
        bound_s = self._limit_s if self.in_doubt else DOUBT_SHARE * self._limit_s
        left_s = bound_s - self._silent_s
        return min(self.period_s, left_s) if left_s > 0 else self.period_s

    @property
    def in_doubt(self) -> bool:
        """At the last `look` the silence was so long that a successor should be made ready."""
        return self._silent_s >= DOUBT_SHARE * self._limit_s

    def answered(self, now_s: float) -> None:
        """The child has answered: it does not hang."""
        self._limit_s = self._hung_s
        self._begin(now_s)

    def _begin(self, now_s: float) -> None:
        self._looked_at, self._silent_s, self._earlier = now_s, 0.0, None

    def look(self, now_s: float, see: Callable[[], Seen]) -> Verdict | None:
        """Judge the silence now; None: wait on. ``see`` is called only when the silence is already long."""
        self._silent_s += min(now_s - self._looked_at, LATE_PERIODS * self.period_s)
        self._looked_at = now_s
        if self._silent_s < self._limit_s / 2:
            return None
        seen = see()
        if seen.state in ("", "Z", "X"):
            return None  # the process is dead, and the parent is about to learn that by itself
        if self._earlier is None:
            self._earlier = seen.cpu_s, self._silent_s
        if self._silent_s < self._limit_s:
            return None
        if seen.tracer:
            return self._traced(seen, now_s)
        used_s = seen.cpu_s - self._earlier[0]
        works = seen.state != "T" and used_s > BUSY_SHARE * (self._silent_s - self._earlier[1])
        if (works or seen.state in "RD") and self._silent_s < BUSY_TIMES * self._limit_s:
            return None
        return Verdict(True, self._silent_s, _why(seen.state, used_s if works else 0.0))

    def _traced(self, seen: Seen, now_s: float) -> Verdict | None:
        """Leave a debugged child alone, and count its silence anew when the debugger has gone."""
        silent_s, said, self._said_traced = self._silent_s, self._said_traced, True
        self._begin(now_s)
        return None if said else Verdict(False, silent_s, f"process {seen.tracer} debugs it")


def _why(state: str, used_s: float) -> str:
    if used_s > 0:
        return f"it computes without a pause, {used_s:.1f} s of processor time lately"
    return {
        "T": "it is stopped, as by SIGSTOP",
        "D": "it waits for a disk or a network file system",
        "R": "it waits for a processor",
    }.get(state, "it sleeps and does not wake up, as in a deadlock")


class Watch:
    """Asks one child, by ``ask``, from `open` until `close` or until it hangs; ``judged`` is called once for each verdict.

    ``ask`` returns whether the question was sent; if not, the next turn asks again. After a verdict to kill, no more
    questions are asked. ``see`` reads the kernel's view of the child. ``hung_s`` 0: no questions are asked. The first
    answer may take ``start_s``.
    """

    def __init__(
        self,
        hung_s: float,
        *,
        ask: Callable[[], bool],
        see: Callable[[], Seen],
        judged: Callable[[Verdict], None],
        start_s: float = START_S,
        doubted: Callable[[], None] = lambda: None,
    ) -> None:
        self._hung_s, self._start_s = hung_s, start_s
        self._ask, self._see, self._judged, self._doubted = ask, see, judged, doubted
        self._dog: Watchdog | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._asked = False

    def open(self) -> None:
        """Ask from now on."""
        if self._hung_s > 0:
            self._dog = Watchdog(self._hung_s, asyncio.get_running_loop().time(), start_s=self._start_s)
            self._turn()

    def answered(self) -> None:
        """The child has answered."""
        self._asked = False
        if self._dog is not None:
            self._dog.answered(asyncio.get_running_loop().time())

    def close(self) -> None:
        """Ask no more. Idempotent."""
        self._dog = None
        if self._timer is not None:
            self._timer.cancel()

    def _turn(self) -> None:
        loop, dog = asyncio.get_running_loop(), self._dog
        if dog is None:
            return
        verdict = dog.look(loop.time(), self._see)
        if verdict is not None:
            self._judged(verdict)
            if verdict.kill:
                self.close()
        elif dog.in_doubt:
            self._doubted()
        if self._dog is not dog:
            return  # closed, here or by `judged`
        if not self._asked:
            # One question at a time: a child that is stopped for hours must not find thousands of them.
            self._asked = self._ask()
        self._timer = loop.call_later(dog.wait_s, self._turn)
