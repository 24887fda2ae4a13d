"""A master while another one leads: it follows the log and sends agents to the leader.

When it takes over, it continues from the state that it has folded, and reads only the newer records. A standby that cannot
fold (an event of a newer version, a damaged log) says so once, remains a standby, and tries again now and then. If it must
lead before that succeeds, it reads the log from the beginning, and any error rises.

A standby tells agents the leader's address. An agent that comes back has not found the leader there, so the standby keeps
it for a moment: the next leader may be about to come, and may be this very master. So the agent waits at a standby instead
of pausing by itself, and is served the moment that a master leads.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple, NoReturn, TypeVar

import structlog

from dlrover_core.errors import LogError, LogUnavailable, StandsBy
from dlrover_core.job.state import FOLD, JobState
from dlrover_core.kernel.log import EventLog, LeaderInfo
from dlrover_core.runtime.messages import Goodbye
from dlrover_core.runtime.pipeline import RETRY_S
from dlrover_core.runtime.restoring import caught_up, snapshotted
from dlrover_core.runtime.trouble import Trouble
from dlrover_core.runtime.within import within

# So many records are folded before the event loop gets its turn.
TURN_RECORDS = 256
# After a failed read, it tries again this much later: the log may have been repaired.
COLD_S = 30.0
LOOK_S, LOOK_LIMIT_S = 0.25, 2.0
# An agent's longest pause between two tries, so that an agent kept here tries no less often.
KEEP_S = 2.0
TOLD_S = 10.0
TOLD_MAX = 16_384

T = TypeVar("T")
log = structlog.get_logger("dlrover.master")


class _Told(NamedTuple):
    """The leader that an agent was sent to, and when, by the loop's clock."""

    token: int
    address: str
    at: float


class Standby:
    """One master's standing by, of ``holder`` at ``address``. ``looks``: it keeps the leader's address up to date for agents.

    ``folded`` is called with the number of every record that was folded.
    """

    def __init__(
        self, event_log: EventLog, job: str, *, holder: str, address: str, wall: Callable[[], int], looks: bool
    ) -> None:
        self._log, self._job, self._holder, self._address, self._looks = event_log, job, holder, address, looks
        self.folded: Callable[[int], None] = lambda _seq: None
        self.state: JobState | None = None
        self.trouble = Trouble(wall)
        self._leader: LeaderInfo | None = None
        self._changed = asyncio.Event()
        self._told: dict[int, _Told] = {}
        self._over = False

    @property
    def leader(self) -> LeaderInfo | None:
        """The other leader, as far as is known. A leader that had this master's own address is gone."""
        found = self._leader
        return None if found is None or found.holder == self._holder or found.address == self._address else found

    async def run(self) -> None:
        """Fold, and follow which master leads, until cancelled."""
        tasks = [asyncio.ensure_future(self._follow())]
        if self._looks:
            tasks.append(asyncio.ensure_future(self._look()))
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    # ---- the state

    async def restored(self) -> JobState:
        """The job's present state, for a new leader: what was folded, and later records. May be called again after an error."""
        if self.state is None:
            self.state = await snapshotted(self._log, self._job)
        return await caught_up(self._log, self._job, self.state)

    async def _follow(self) -> None:
        attempt, cold = 0, False
        while True:
            try:
                if self.state is None:
                    self.state = await snapshotted(self._log, self._job)
                await self._fold(self.state)
            except LogUnavailable as error:
                if not attempt:
                    log.warning("standing by without the log", reason=str(error))
            except Exception as error:  # noqa: BLE001  # a leader that knows less is better than none
                # The record under way may be half folded.
                self.state = None
                if not cold:
                    log.warning("standing by cold", error=f"{type(error).__name__}: {error}")
                cold, attempt = True, -1
                await asyncio.sleep(COLD_S)
            await asyncio.sleep(RETRY_S[min(attempt, len(RETRY_S) - 1)])
            attempt += 1

    async def _fold(self, state: JobState) -> None:
        records = self._log.follow(self._job, state.seq)
        try:
            folded = 0
            async for record in records:
                FOLD.apply(state, record)
                self.folded(record.seq)
                folded += 1
                if folded % TURN_RECORDS == 0:
                    await asyncio.sleep(0)
        finally:
            close = getattr(records, "aclose", None)
            if close is not None:
                await close()

    # ---- who leads

    async def _look(self) -> None:
        while True:
            try:
                found = await within(LOOK_LIMIT_S, self._log.leader(self._job))
            except asyncio.TimeoutError:
                self.trouble.begin(f"LogUnavailable: it did not say within {LOOK_LIMIT_S:g} s who leads")
            except LogError as error:
                self.trouble.begin(f"{type(error).__name__}: {error}")
            else:
                self.trouble.end()
                if found != self._leader:
                    self._leader = found
                    self._ring()
            await asyncio.sleep(LOOK_S)

    def over(self) -> None:
        """This master leads now: agents that it keeps are its own."""
        self._over = True
        self._told.clear()
        self._ring()

    def _ring(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    # ---- who asks

    def status(self) -> dict[str, Any]:
        """This standby's own status, beside the state that it has folded."""
        leader = self.leader
        return {
            "job": self._job,
            "token": 0,
            "role": "standby",
            "leader": leader.holder if leader is not None else "",
            "leader_address": leader.address if leader is not None else "",
            "alarms": 0,
            "degraded": self.trouble.reason,
            "degraded_since": self.trouble.since,
        }

    def refuse(self) -> NoReturn:
        """Refuse a person's command. Raises `StandsBy`, which names the leader."""
        leader = self.leader
        if leader is None:
            raise StandsBy(self._job, self._shown("nobody now"), remedy="ask again")
        raise StandsBy(self._job, leader.holder, leader.address, remedy="ask there")

    async def sent_on(self, boot: int) -> Goodbye | None:
        """The goodbye that names the leader to an agent; None: by now, this master leads."""
        loop = asyncio.get_running_loop()
        until = loop.time() + KEEP_S
        while not self._over and loop.time() < until and not self._is_news(boot, loop.time()):
            with contextlib.suppress(asyncio.TimeoutError):
                await within(until - loop.time(), self._changed.wait())
        if self._over:
            return None
        leader = self.leader
        if leader is None:
            return Goodbye(self._shown("nobody leads now"), leave=False)
        self._remember(boot, _Told(leader.token, leader.address, loop.time()))
        return Goodbye(self._shown(f"{leader.holder} leads"), leave=False, address=leader.address)

    def _is_news(self, boot: int, now: float) -> bool:
        """Is there a leader that this agent was not sent to a moment ago?"""
        leader, told = self.leader, self._told.get(boot)
        if leader is None or not leader.address:
            return False
        return told is None or told[:2] != (leader.token, leader.address) or now - told.at > TOLD_S

    def _remember(self, boot: int, told: _Told) -> None:
        self._told.pop(boot, None)
        while len(self._told) >= TOLD_MAX:
            del self._told[next(iter(self._told))]
        self._told[boot] = told

    def _shown(self, words: str) -> str:
        return f"{words}, as far as is known: {self.trouble.reason}" if self.trouble.reason else words


async def patiently(call: Callable[[], Awaitable[T]]) -> T:
    """The log's answer, once the log can be reached: taking over waits for it, as decisions do."""
    attempt = 0
    while True:
        try:
            return await call()
        except LogUnavailable as error:
            if not attempt:
                log.warning("taking over waits for the log", reason=str(error))
            await asyncio.sleep(RETRY_S[min(attempt, len(RETRY_S) - 1)])
            attempt += 1
