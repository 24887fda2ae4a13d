"""The pipeline: commands in, one append at a time, replies out after the commit.

While an append is in flight, nothing is decided and no reply is sent; commands queued meanwhile become the next batch. So
latency is one append, and throughput adapts without a timer. The commit runs in the log's own thread: on the event loop,
batches would never form.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from dlrover_core.errors import CoreError, LogError, LogFull, LogUnavailable
from dlrover_core.job.job import NotePause
from dlrover_core.job.state import JobState
from dlrover_core.kernel.engine import Command, Engine, Reply
from dlrover_core.kernel.events import GROUP_BYTES_MAX, Batch, Origin, Record
from dlrover_core.kernel.log import AlreadyAppended, Appended, Conflict, Fenced, Leadership
from dlrover_core.runtime.trouble import Trouble
from dlrover_core.runtime.unrecorded import failure, has_ended_well, owed

QUEUE_MAX = 65_536
# Deciding blocks the event loop: heartbeats get their turn in between.
GROUP_COMMANDS_MAX = 512
# If decisions waited longer than this, the master counts as having been away.
PAUSE_US = 2_000_000
# An append that seems to hang gets so much more time: to a process that was stopped, every append seems to hang.
OVERDUE_US = 500_000
RETRY_S = (0.05, 0.2, 0.5, 1.0, 2.0)


class Deposed(CoreError):
    """A newer leader exists: this master must stop deciding."""


class Overloaded(CoreError):
    """Too many commands wait for the log. Send the command again later."""


class _Waiting(NamedTuple):
    command: Command
    origin: Origin | None
    reply: asyncio.Future[Reply]


class Pipeline:
    """One engine, one leadership, one append in flight. ``calm`` is called when decisions are possible again after a while."""

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
        self._unwritten: Sequence[Record] = ()
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

    def unrecorded_end(self) -> tuple[bool, str, str]:
        """How the job has ended while the log takes no records.

        Returns whether all workers have ended well; why their last state is not on storage (empty: it is); and what has
        failed for good (empty: nothing).
        """
        state, waiting = self._engine.state, [one.command for one in self._queue]
        return has_ended_well(state, waiting), owed(state, waiting), failure(state, waiting, self._unwritten)

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
        """Finish the queue, then end `run`. ``taking`` False: later commands are for the next leader."""
        self._stopping, self._closed = True, not taking
        self._wake.set()

    def look(self) -> None:
        """Check by the leadership's clock, without an append, whether decisions have begun or ceased to wait."""
        wrong = self._lead.trouble() or (
            "" if self._lead.valid() else "it is not known whether this master still leads"
        )
        hangs = self._hangs()
        # A failing append gives the better reason.
        if self._failing:
            return
        if wrong:
            self._trouble.begin(wrong)
        elif hangs:
            self._trouble.begin(hangs, self._append_since)
        else:
            self._resume(self._trouble.end())

    def _hangs(self) -> str:
        """Why an append is taken to hang, although it has not failed; empty: it does not."""
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
        """Record that silence did not count while the log took no records, before what has queued up since."""
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
                self._failing, self._append_since, self._unwritten = True, None, batch.records
                self._trouble.begin(f"{type(error).__name__}: {error}")
                await asyncio.sleep(RETRY_S[min(attempt, len(RETRY_S) - 1)])
                attempt += 1
                continue
            self._append_since = None
            match outcome:
                case Appended() | AlreadyAppended():
                    self._unwritten = ()
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
