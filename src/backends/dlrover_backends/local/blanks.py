"""Blanks: agents started ahead, so that a node need not wait for what takes an agent seconds to import.

A blank has no name. It gets one when a node is to be launched: `Blanks.take`. One that dies unnamed is replaced, the later the
more often that happens. One that hangs is killed, also while it is getting warm: as a node it would never join.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import signal
from collections.abc import Callable, Sequence
from typing import NamedTuple

import structlog

from dlrover_backends.shared.process import LocalCommand, Started, blank
from dlrover_core.runtime.watchdog import START_S, Seen, Verdict, Watch

REFILL_S = 3.0
"""A blank that was taken is replaced only then: what replaces the dead needs the processor first."""

BACK_OFF_MAX_S = 60.0
KILL_WAIT_S = 5.0

log = structlog.get_logger("dlrover.host")


def _unseen(_pid: int) -> Seen:
    return Seen("S")


class Ahead(NamedTuple):
    """How agents are started ahead."""

    command: Callable[[int], LocalCommand]
    """How a blank is started, given the number of its end of the socket."""
    first: Sequence[Started] = ()
    """Those that were started already."""
    keep: int = 0
    """How many to keep."""
    hung_s: float = 0.0
    """A blank that has answered once, and then has not for this long, hangs; 0: it is not asked."""
    see: Callable[[int], Seen] = _unseen
    """What the kernel says of a process."""
    ready_s: float = START_S
    """A blank may take this long to its first answer: it imports what it needs."""


def watched(one: Started, ahead: Ahead) -> Watch:
    """A watch, not yet open, that asks a blank whether it hangs, and kills it if it does.

    A blank's event loop answers (``here``) while its workers' imports go on in another process.
    """

    def ask() -> bool:
        with contextlib.suppress(OSError):  # it is dead, and about to be buried
            one.tell(ask=True)
            return True
        return False

    def judged(verdict: Verdict) -> None:
        silent_s, pid = round(verdict.silent_s, 1), one.child.pid
        log.warning("a blank hangs", pid=pid, silent_s=silent_s, why=verdict.why, killed=verdict.kill)
        if verdict.kill:
            one.signal(signal.SIGKILL)

    see = functools.partial(ahead.see, one.child.pid)
    return Watch(ahead.hung_s, ask=ask, see=see, judged=judged, start_s=ahead.ready_s)


class Blanks:
    """The blanks of one host. Open, use and close it in one event loop of the main thread."""

    def __init__(self, ahead: Ahead) -> None:
        self._ahead = ahead
        self._waiting: list[Started] = []
        self._warm: set[Started] = set()
        self._watches: dict[Started, Watch] = {}
        self._deaths: set[asyncio.Task[None]] = set()
        self._early = 0
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False
        self.settled = asyncio.Event()

    def open(self) -> None:
        """Watch those that are there."""
        for one in self._ahead.first:
            self._watch(one)
        self._settle()

    def _watch(self, one: Started) -> None:
        assert one.control is not None, "a blank has a socket"
        self._waiting.append(one)
        loop = asyncio.get_running_loop()
        loop.add_reader(one.pidfd, self._died, one)
        loop.add_reader(one.control, self._hear, one)
        self._mind(one)

    def _unwatch(self, one: Started) -> None:
        self._waiting.remove(one)
        self._warm.discard(one)
        self._watches.pop(one).close()
        loop = asyncio.get_running_loop()
        loop.remove_reader(one.pidfd)
        if one.control is not None:
            loop.remove_reader(one.control)

    def _hear(self, one: Started) -> None:
        try:
            said = one.hear()
        except BlockingIOError:
            return
        if said is None:
            assert one.control is not None
            asyncio.get_running_loop().remove_reader(one.control)  # its pidfd tells the rest
            return
        self._watches[one].answered()
        if said.get("warm"):
            self._warm.add(one)
            self._early = 0
            self._settle()

    def _mind(self, one: Started) -> None:
        watch = self._watches[one] = watched(one, self._ahead)
        watch.open()

    def _settle(self) -> None:
        """``settled``: no blank is getting warm any more."""
        if not set(self._waiting) - self._warm:
            self.settled.set()

    # ---- taking and making

    def take(self, **words: object) -> Started:
        """A process that has been told ``words``: a warm one before others, or one started now. Raises `OSError`."""
        for one in sorted(self._waiting, key=lambda one: one not in self._warm):
            try:
                one.tell(**words)
            except OSError:
                continue  # it is dead, and about to be buried
            self._unwatch(one)
            self._settle()
            self._refill_in(REFILL_S)
            return one
        fresh = blank(self._ahead.command)
        try:
            fresh.tell(**words)
        except OSError:
            fresh.end()
            raise
        self._refill_in(REFILL_S)
        return fresh

    def _refill_in(self, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        if not self._closed and len(self._waiting) < self._ahead.keep:
            self._timer = asyncio.get_running_loop().call_later(seconds, self._refill)

    def _refill(self) -> None:
        self._timer = None
        while len(self._waiting) < self._ahead.keep and not self._closed:
            try:
                self._watch(blank(self._ahead.command))
            except OSError as error:
                self._failed(f"it cannot be started: {error}")
                return

    def _failed(self, reason: str) -> None:
        self._early += 1
        pause = min(BACK_OFF_MAX_S, float(2 ** min(self._early, 10)))
        log.warning("a blank is lost", reason=reason, next_in_s=pause)
        self._refill_in(pause)

    # ---- deaths

    def _died(self, one: Started) -> None:
        self._unwatch(one)
        self._settle()
        death = asyncio.ensure_future(self._bury(one))
        self._deaths.add(death)
        death.add_done_callback(self._deaths.discard)

    async def _bury(self, one: Started) -> None:
        code, _ = await asyncio.to_thread(one.bury, KILL_WAIT_S)
        one.close()
        if not self._closed:
            self._failed(f"it ended with {code}")

    async def close(self) -> None:
        """Kill them all and wait for their end."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        for one in list(self._waiting):
            one.signal(signal.SIGKILL)
        while self._waiting or self._deaths:
            waits: list[asyncio.Future[None]] = [*self._deaths]
            if not waits:
                one = self._waiting[0]
                self._unwatch(one)
                await asyncio.to_thread(one.end, KILL_WAIT_S)
            else:
                await asyncio.wait(waits)
