"""The pipeline: commands in, one append at a time, replies out after the commit.

While an append is in flight nothing is decided and nothing released; what queued meanwhile becomes the next batch. So
latency is one append, and throughput scales itself without a timer. The log's own thread does the commit: with it on the
loop, groups would never form.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from dlrover_core.errors import CoreError, LogError, LogFull, LogUnavailable
from dlrover_core.job.job import NotePause
from dlrover_core.job.state import JobState
from dlrover_core.kernel.engine import Command, Engine, Reply
from dlrover_core.kernel.events import GROUP_BYTES_MAX, Batch, Origin
from dlrover_core.kernel.log import AlreadyAppended, Appended, Conflict, Fenced, Leadership
from dlrover_core.runtime.trouble import Trouble
from dlrover_core.runtime.unrecorded import has_ended_well, owed

QUEUE_MAX = 65_536
# Deciding holds the loop: in between it is the heartbeats' turn.
GROUP_COMMANDS_MAX = 512
# Decisions that waited for longer than this were away, as a master is whose process was stopped.
PAUSE_US = 2_000_000
# An append that is found to last too long is given so long to end: a process that was stopped finds every append so.
OVERDUE_US = 500_000
RETRY_S = (0.05, 0.2, 0.5, 1.0, 2.0)


class Deposed(CoreError):
    """A newer leader exists: this master must stop deciding."""


class Overloaded(CoreError):
    """Too many commands wait for the log. Send again later."""


class _Waiting(NamedTuple):
    command: Command
    origin: Origin | None
    reply: asyncio.Future[Reply]


class Pipeline:
    """One engine, one leadership, one append in flight. ``calm`` is called when decisions were possible again after a while."""

    def __init__(
        self,
        engine: Engine[JobState],
        lead: Leadership,
        now: Callable[[], int],
        committed: Callable[[Batch], None],
        calm: Callable[[], None] = lambda: None,
    ) -> None:
        self._calm = calm
        self._engine, self._lead, self._now, self._committed = engine, lead, now, committed
        self._queue: deque[_Waiting] = deque()
        self._wake = asyncio.Event()
        self._stopping = self._closed = self._ended = self._failing = False
        self._trouble = Trouble(now)
        self._append_since: int | None = None
        self._overdue_since: int | None = None

    @property
    def degraded(self) -> str:
        """Why decisions wait; empty: they do not."""
        return self._trouble.reason

    @property
    def degraded_since(self) -> int:
        """Since when they wait, by the leader's clock; 0: they do not."""
        return self._trouble.since

    def unrecorded_end(self) -> tuple[bool, str]:
        """Have all workers ended well, whether the log takes it or not? And why is their last state not on storage; or empty."""
        state, waiting = self._engine.state, [one.command for one in self._queue]
        return has_ended_well(state, waiting), owed(state, waiting)

    def submit(self, command: Command, origin: Origin | None = None) -> asyncio.Future[Reply]:
        """Queue a command; the future is done when its outcome is durable, cancelled when `run` has ended before."""
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        if self._ended or self._closed:
            future.cancel()
            return future
        if len(self._queue) >= QUEUE_MAX:
            future.set_exception(
                Overloaded(f"{QUEUE_MAX} commands wait for the log{': ' + self.degraded if self.degraded else ''}")
            )
            return future
        self._queue.append(_Waiting(command, origin, future))
        self._wake.set()
        return future

    async def run(self) -> None:
        """Decide and commit until `stop`. Raises `Deposed` when fenced; other log errors that are bugs rise too."""
        try:
            while not self._stopping or self._queue:
                await self._wake.wait()
                self._wake.clear()
                while self._queue:
                    await self._group()
        finally:
            self._fail_rest()

    def stop(self, *, taking: bool = True) -> None:
        """Finish what is queued, then end `run`; unless ``taking``, whatever is submitted from now on is for the next leader."""
        self._stopping, self._closed = True, not taking
        self._wake.set()

    def look(self) -> None:
        """Notice by what the leadership knows, though nothing is appended, that decisions would wait, or no longer."""
        wrong = self._lead.trouble() or (
            "" if self._lead.valid() else "it is not known whether this master still leads"
        )
        hangs = self._hangs()
        # An append that fails again and again knows better.
        if self._failing:
            return
        if wrong:
            self._trouble.begin(wrong)
        elif hangs:
            self._trouble.begin(hangs, self._append_since)
        else:
            self._resume(self._trouble.end())

    def _hangs(self) -> str:
        """Why an append is taken to hang, which has not failed; empty: it is not."""
        now, hung_s, since = self._now(), self._engine.state.job.spec.hung_s, self._append_since
        if since is None or hung_s <= 0 or now - since < hung_s * 1_000_000:
            self._overdue_since = None
            return ""
        if self._overdue_since is None:
            self._overdue_since = now
        if now - self._overdue_since < OVERDUE_US:
            return ""
        lasts_s = (now - since) // 1_000_000
        return f"the log has not answered for {lasts_s} s: look at the disk or network that it is on, and at `dmesg`"

    def _resume(self, lasted_us: int) -> None:
        """Nobody's silence counts while nothing could be recorded: that is decided before whatever has queued up since."""
        if lasted_us < PAUSE_US:
            return
        self._calm()
        self._queue.appendleft(_Waiting(NotePause(lasted_us), None, asyncio.get_running_loop().create_future()))
        self._wake.set()

    async def _group(self) -> None:
        engine, queue = self._engine, self._queue
        now = self._now()
        answers: list[tuple[asyncio.Future[Reply], Reply]] = []
        while queue and engine.pending_bytes < GROUP_BYTES_MAX and len(answers) < GROUP_COMMANDS_MAX:
            waiting = queue.popleft()
            answers.append((waiting.reply, engine.handle(waiting.command, now, waiting.origin)))
        batch = engine.take()
        if batch is not None:
            try:
                await self._append(batch)
            except BaseException:
                for future, _ in answers:
                    future.cancel()
                raise
            self._committed(batch)
        for future, reply in answers:
            if not future.done():
                future.set_result(reply)

    async def _append(self, batch: Batch) -> None:
        attempt = 0
        while True:
            self._append_since = self._now()
            try:
                outcome = await self._lead.append(batch)
            except (LogUnavailable, LogFull) as error:
                self._failing, self._append_since = True, None
                self._trouble.begin(f"{type(error).__name__}: {error}")
                await asyncio.sleep(RETRY_S[min(attempt, len(RETRY_S) - 1)])
                attempt += 1
                continue
            self._append_since = None
            match outcome:
                case Appended() | AlreadyAppended():
                    if self.degraded:
                        self._failing = False
                        self.look()
                    return
                case Fenced(mine, current):
                    raise Deposed(f"token {mine} is older than {current}: another master leads")
                case Conflict(expected, found):
                    raise LogError(
                        f"the log's head is {found}, this leader believed {expected}: a bug; its working state is void"
                    )

    def _fail_rest(self) -> None:
        self._ended = True
        while self._queue:
            self._queue.popleft().reply.cancel()
