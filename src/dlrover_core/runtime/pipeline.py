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

import structlog

from dlrover_core.errors import CoreError, LogError, LogFull, LogUnavailable
from dlrover_core.job.state import JobState
from dlrover_core.kernel.engine import Command, Engine, Reply
from dlrover_core.kernel.events import GROUP_BYTES_MAX, Batch, Origin
from dlrover_core.kernel.log import AlreadyAppended, Appended, Conflict, Fenced, Leadership

QUEUE_MAX = 65_536
# Deciding holds the loop: in between it is the heartbeats' turn.
GROUP_COMMANDS_MAX = 512
RETRY_S = (0.05, 0.2, 0.5, 1.0, 2.0)

log = structlog.get_logger("dlrover.master")


class Deposed(CoreError):
    """A newer leader exists: this master must stop deciding."""


class Overloaded(CoreError):
    """Too many commands wait for the log. Send again later."""


class _Waiting(NamedTuple):
    command: Command
    origin: Origin | None
    reply: asyncio.Future[Reply]


class Pipeline:
    """One engine, one leadership, one append in flight. ``degraded`` says why decisions wait; empty: they do not."""

    def __init__(
        self, engine: Engine[JobState], lead: Leadership, now: Callable[[], int], committed: Callable[[Batch], None]
    ) -> None:
        self._engine, self._lead, self._now, self._committed = engine, lead, now, committed
        self._queue: deque[_Waiting] = deque()
        self._wake = asyncio.Event()
        self._stopping = self._ended = False
        self.degraded = ""
        self.degraded_at = 0

    def submit(self, command: Command, origin: Origin | None = None) -> asyncio.Future[Reply]:
        """Queue a command; the future is done when its outcome is durable, cancelled when `run` has ended before."""
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        if self._ended:
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

    def stop(self) -> None:
        """Finish what is queued, then end `run`."""
        self._stopping = True
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
            try:
                outcome = await self._lead.append(batch)
            except (LogUnavailable, LogFull) as error:
                self._degrade(error)
                await asyncio.sleep(RETRY_S[min(attempt, len(RETRY_S) - 1)])
                attempt += 1
                continue
            match outcome:
                case Appended() | AlreadyAppended():
                    self._recover()
                    return
                case Fenced(mine, current):
                    raise Deposed(f"token {mine} is older than {current}: another master leads")
                case Conflict(expected, found):
                    raise LogError(
                        f"the log's head is {found}, this leader believed {expected}: a bug; its working state is void"
                    )

    def _degrade(self, error: LogError) -> None:
        if not self.degraded:
            self.degraded_at = self._now()
            log.error(
                "control plane degraded", reason=str(error), remedy="training goes on; decisions wait for the log"
            )
        self.degraded = f"{type(error).__name__}: {error}"

    def _recover(self) -> None:
        if self.degraded:
            log.warning("control plane back", after_us=self._now() - self.degraded_at)
            self.degraded = ""

    def _fail_rest(self) -> None:
        self._ended = True
        while self._queue:
            self._queue.popleft().reply.cancel()
