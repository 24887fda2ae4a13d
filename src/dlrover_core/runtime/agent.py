"""The agent of one node: makes its workers match what the leader desires, and reports what happens to them.

Levelled state, outbox, reconnect, stop policy: all of it logic over two ports, no process and no socket in sight. The agent
keeps its workers running while no master answers; only without a master *and* without steps does it, after half the time
in which it would itself be given up, stop them.
"""

from __future__ import annotations

import asyncio
import contextlib
import zlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import structlog

from dlrover_core.errors import ConnectionLost, LaunchFailed, MalformedMessage, TokenRefused
from dlrover_core.job import failures, nodes, progress, world
from dlrover_core.job.state import Order
from dlrover_core.runtime import messages
from dlrover_core.runtime.launcher import (
    Launcher,
    StoreGone,
    StoreReady,
    WorkerExit,
    WorkersGone,
    WorkersLaunch,
    WorkersStuck,
    WorkerStep,
)
from dlrover_core.runtime.messages import Again, Answer, Beat, BeatSeen, Goodbye, Hello, Level, Message, Welcome
from dlrover_core.runtime.transport import Connection, Dialer, receive_within
from dlrover_core.runtime.within import within

UNANSWERED_MAX = 16
SECOND_US = 1_000_000
RETRY_FIRST_S, RETRY_MAX_S = 0.05, 2.0
STEADY_S = 1.0
LAST_WORD_S = 5.0
NOTHING = Order(leave=False, reason="no master has spoken yet", grace_us=0)

log = structlog.get_logger("dlrover.agent")


@dataclass(slots=True)
class Settings:
    """What a master tells its agents; until one has, the defaults."""

    run: str = ""
    heartbeat_s: float = 1.0
    silence_s: float = 15.0
    unreachable_s: float = 300.0
    kill_wait_s: float = 30.0
    max_restarts: int = 0
    stop_grace_s: float = 30.0


class Outbox:
    """Commands with their numbers: contiguous, at most 16 unanswered on the wire, sent again in order to whoever leads."""

    def __init__(self) -> None:
        self._next = 1
        self._unanswered: deque[tuple[int, Message, float]] = deque()
        self._sent = 0
        self.changed = asyncio.Event()

    def add(self, command: Message) -> int:
        """Number a command and queue it."""
        number = self._next
        self._next += 1
        self._unanswered.append((number, command, asyncio.get_running_loop().time()))
        self.changed.set()
        return number

    def rewind(self) -> None:
        """A new connection: everything unanswered goes out again."""
        self._sent = 0
        self.changed.set()

    def expected(self, number: int) -> None:
        """The leader asks again from ``number`` on. Raises `ConnectionLost` where that was answered: it forgot this node."""
        if self._unanswered and number < self._unanswered[0][0]:
            raise ConnectionLost(
                f"command {number} was answered long ago; a leader that asks for it does not know this node"
            )
        self._sent = sum(1 for one, _, _ in self._unanswered if one < number)
        self.changed.set()

    def answered(self, number: int) -> None:
        """``number`` and all before it are durable."""
        while self._unanswered and self._unanswered[0][0] <= number:
            self._unanswered.popleft()
            self._sent = max(0, self._sent - 1)
        self.changed.set()

    def next(self) -> tuple[int, Message] | None:
        """The next command to put on the wire, if one may go. What bears an age has grown older by its wait here."""
        if self._sent >= min(len(self._unanswered), UNANSWERED_MAX):
            return None
        self._sent += 1
        number, command, added = self._unanswered[self._sent - 1]
        if isinstance(command, (failures.ReportExit, progress.ReportFirstStep)):
            waited_us = int((asyncio.get_running_loop().time() - added) * SECOND_US)
            command = command._replace(age_us=command.age_us + waited_us)
        return number, command

    @property
    def empty(self) -> bool:
        """Is everything answered?"""
        return not self._unanswered


class Agent:
    """One node's agent. ``boot`` is drawn once per process by whoever starts it; ``address`` is where peers reach this host."""

    def __init__(
        self,
        node: str,
        *,
        launcher: Launcher,
        dialer: Dialer,
        masters: Sequence[str],
        boot: int,
        host: str,
        address: str,
        run: str = "",
    ) -> None:
        self.node, self._launcher, self._dialer = node, launcher, dialer
        self._masters, self._boot, self._host, self._address = list(masters), boot, host, address
        self._settings = Settings(run=run)
        self._outbox = Outbox()
        self._order, self._token = NOTHING, 0
        self._levelled = asyncio.Event()
        self._launched = 0
        self._gone = asyncio.Event()
        self._gone.set()
        self._generation = 0
        self._living = 0
        self._finished: set[int] = set()
        self._step = -1
        self._stepped_at = self._mastered_at = 0.0
        self._reported_first = self._told_over = 0
        self._connected = self._stranger = False
        self._gave_up = self._seen = 0
        self._stores: list[str] = []
        self._lag_us = 0
        self.leaving = ""

    async def run(self) -> str:
        """Serve until told to leave; returns why. Raises `LaunchFailed` when workers could never run here, `TokenRefused`."""
        loop = asyncio.get_running_loop()
        self._stepped_at = self._mastered_at = loop.time()
        talking = asyncio.ensure_future(self._talk())
        tasks: list[asyncio.Future[Any]] = [talking]
        try:
            await self._launcher.open()
            self._outbox.add(nodes.ReportJoined(self.node, self._host, self._address, self._launcher.nproc))
            tasks += [asyncio.ensure_future(self._watch()), asyncio.ensure_future(self._mind_silence())]
            levelling = asyncio.ensure_future(self._level())
            tasks.append(levelling)
            while not levelling.done():
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
            await self._last_word(talking)
            return self.leaving
        except LaunchFailed as error:
            self._outbox.add(nodes.ReportFault(self.node, str(error)))
            await self._last_word(talking)
            raise
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._launcher.close()
            await self._dialer.close()

    async def _last_word(self, talking: asyncio.Future[Any]) -> None:
        """Let the outbox empty, for a bounded time: nobody may be listening any more."""

        async def emptied() -> None:
            while not self._outbox.empty and not talking.done() and not self._stranger:
                self._outbox.changed.clear()
                await self._outbox.changed.wait()

        with contextlib.suppress(asyncio.TimeoutError):
            await within(LAST_WORD_S, emptied())

    def leave(self, reason: str) -> None:
        """Stop the workers with the grace of a planned stop and go: what a signal to the agent means."""
        self.leaving = self.leaving or reason
        self._levelled.set()

    # ---- workers: levelled to the order

    async def _level(self) -> None:
        while True:
            await self._levelled.wait()
            self._levelled.clear()
            order = self._order
            if self.leaving or order.leave:
                ours = bool(self.leaving) and not order.leave and not self._stranger
                self.leaving = self.leaving or order.reason
                await self._stop(
                    order._replace(grace_us=int(self._settings.stop_grace_s * SECOND_US)) if ours else order
                )
                self._outbox.add(nodes.ReportLeft(self.node))
                return
            if order.generation != self._generation or order.over > self._told_over:
                await self._change(order)

    async def _change(self, order: Order) -> None:
        if order.linger_us:
            await self._linger(order.linger_us / SECOND_US)
        if order is not self._order:
            self._levelled.set()
            return
        if not await self._stop(order):
            return
        if order is not self._order:
            # Overtaken while stopping: the newest order is levelled next.
            self._levelled.set()
        if order.over > self._told_over:
            # Whoever hears that we have stopped must have heard every exit before.
            with contextlib.suppress(asyncio.TimeoutError):
                await within(LAST_WORD_S, self._gone.wait())
            self._told_over = order.over
            self._outbox.add(world.ReportStopped(self.node, order.over, self._step))
        if order.generation == 0:
            return
        if order is self._order:
            await self._start(order)

    async def _linger(self, seconds: float) -> None:
        """Let workers end by themselves, unless something else is ordered meanwhile: the one who knows why may be slow."""
        waits = [asyncio.ensure_future(self._gone.wait()), asyncio.ensure_future(self._levelled.wait())]
        try:
            await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for one in waits:
                one.cancel()

    async def _stop(self, order: Order) -> bool:
        stopped = await self._launcher.stop(order.grace_us / SECOND_US, self._settings.kill_wait_s)
        self._generation = self._living = 0
        if not stopped:
            self._outbox.add(
                nodes.ReportFault(self.node, f"workers survived SIGKILL for {self._settings.kill_wait_s:g} s")
            )
        return stopped

    async def _start(self, order: Order) -> None:
        self._generation, self._living, self._finished = order.generation, order.nproc, set()
        self._step, self._stepped_at = -1, asyncio.get_running_loop().time()
        self._launched = order.generation
        self._gone.clear()
        try:
            await self._launcher.start(self._launch(order))
        except LaunchFailed as error:
            self._gone.set()
            log.error("workers cannot be started", generation=order.generation, error=str(error))
            self._outbox.add(nodes.ReportFault(self.node, f"workers cannot be started: {error}"))
            return
        self._outbox.add(world.ReportStarted(self.node, order.generation))

    def _launch(self, order: Order) -> WorkersLaunch:
        return WorkersLaunch(
            run=self._settings.run,
            generation=order.generation,
            first_rank=order.first_rank,
            nproc=order.nproc,
            world_size=order.world_size,
            node_rank=order.node_rank,
            nodes=order.nodes,
            store=order.store,
            restart_count=order.restarts,
            max_restarts=self._settings.max_restarts,
            resume_step=order.resume_step,
            node=self.node,
        )

    # ---- what happens to them

    async def _watch(self) -> None:
        async for notice in self._launcher.notices():
            match notice:
                case WorkerExit():
                    self._exited(notice)
                case WorkerStep():
                    self._stepped(notice)
                case StoreReady(address):
                    self._stores.append(address)
                    self._outbox.add(world.OfferStore(self.node, address))
                case StoreGone(address):
                    self._stores = [one for one in self._stores if one != address]
                    self._outbox.add(world.WithdrawStore(self.node, address))
                case WorkersGone(generation):
                    if generation == self._launched:
                        self._gone.set()
                case WorkersStuck(generation, pids):
                    log.error("workers survive SIGKILL", generation=generation, pids=pids)

    def _exited(self, gone: WorkerExit) -> None:
        if gone.generation == self._generation:
            self._step = max(self._step, gone.step)
        if gone.exit_code == 0 and not gone.asked:
            if gone.generation == self._generation:
                self._finished.add(gone.local_rank)
                if len(self._finished) == self._living:
                    self._outbox.add(world.ReportFinished(self.node, gone.generation, self._step))
            return
        # One that we killed while it told its own error had failed before: that is evidence.
        if gone.asked and not gone.error:
            return
        age = max(0, int(asyncio.get_running_loop().time() * SECOND_US) - gone.died_us)
        self._outbox.add(
            failures.ReportExit(
                self.node, gone.generation, gone.rank, gone.exit_code, gone.asked, gone.step, age, gone.tail, gone.error
            )
        )

    def _stepped(self, step: WorkerStep) -> None:
        if step.generation != self._generation:
            return
        self._step = max(self._step, step.step)
        self._stepped_at = asyncio.get_running_loop().time()
        # One node speaks for all ranks of a step: the one with rank 0.
        if self._order.node_rank == 0 and self._reported_first < step.generation:
            self._reported_first = step.generation
            age = max(0, int(self._stepped_at * SECOND_US) - step.at_us)
            self._outbox.add(progress.ReportFirstStep(self.node, step.generation, step.step, age, step.told))

    async def _mind_silence(self) -> None:
        """Without a master and without steps there is nothing to wait for: stop, before we are replaced elsewhere."""
        loop = asyncio.get_running_loop()
        while True:
            patience = self._settings.unreachable_s / 2
            since = max(self._stepped_at, self._mastered_at)
            # Looked at again and again: a master may grant another patience meanwhile.
            await asyncio.sleep(min(max(0.01, since + patience - loop.time()), self._settings.heartbeat_s))
            since = max(self._stepped_at, self._mastered_at)
            if self._generation > self._gave_up and loop.time() - since >= patience:
                log.error("no master and no steps: workers are stopped", for_s=round(loop.time() - since, 1))
                await self._give_up_workers(self._generation)

    async def _give_up_workers(self, generation: int) -> None:
        self._gave_up = generation
        if not await self._launcher.stop(0.0, self._settings.kill_wait_s):
            self._outbox.add(
                nodes.ReportFault(self.node, f"workers survived SIGKILL for {self._settings.kill_wait_s:g} s")
            )
        # Whoever leads later must not believe that this generation runs.
        why = "stopped by its agent: no master and no steps"
        self._outbox.add(
            failures.ReportExit(self.node, generation, self._order.first_rank, -9, False, self._step, 0, "", why)
        )

    # ---- the master

    async def _talk(self) -> None:
        loop, attempt, target = asyncio.get_running_loop(), 0, 0
        while True:
            address, began = self._masters[target % len(self._masters)], loop.time()
            try:
                connection = await self._dialer.connect(address)
                try:
                    await self._converse(connection)
                finally:
                    await connection.close()
            except TokenRefused:
                raise
            except (ConnectionLost, MalformedMessage) as lost:
                log.debug("no master", address=address, reason=str(lost))
            steady = self._connected and loop.time() - began >= STEADY_S
            self._connected = False
            if steady:
                # At once to whoever leads now; only then with growing pauses.
                attempt = 0
                continue
            await asyncio.sleep(self._pause(attempt))
            attempt, target = attempt + 1, target + 1

    def _pause(self, attempt: int) -> float:
        """Growing pauses with a jitter that is this node's own."""
        jitter = zlib.crc32(f"{self.node}:{attempt}".encode()) / 2**32
        return min(RETRY_MAX_S, RETRY_FIRST_S * 2.0 ** min(attempt, 10)) * (0.5 + jitter / 2)

    async def _converse(self, connection: Connection) -> None:
        hello = Hello(messages.VERSION, self._settings.run, self.node, self._boot, self._generation, self._token)
        await connection.send(messages.encode(hello))
        first = messages.decode(await receive_within(connection, self._settings.silence_s))
        if isinstance(first, Goodbye):
            self._turned_away(first)
            return
        if not isinstance(first, Welcome):
            raise MalformedMessage(f"a master greets with Welcome, not {type(first).__name__}")
        self._welcomed(first)
        self._outbox.rewind()
        beats = asyncio.ensure_future(self._beat(connection))
        sends = asyncio.ensure_future(self._send(connection))
        hears = asyncio.ensure_future(self._hear(connection))
        tasks = (beats, sends, hears)
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _turned_away(self, goodbye: Goodbye) -> None:
        log.info("turned away", reason=goodbye.reason, leave=goodbye.leave)
        if goodbye.address and goodbye.address not in self._masters:
            self._masters.insert(0, goodbye.address)
        if goodbye.leave:
            # Nobody here takes the word of a stranger: there is nothing to wait for.
            self._stranger = True
            self._outbox.changed.set()
            self.leave(goodbye.reason)

    def _welcomed(self, welcome: Welcome) -> None:
        if welcome.token < self._token:
            raise ConnectionLost(f"a master with token {welcome.token} greets; {self._token} is newer")
        self._token = welcome.token
        self._connected = True
        self._mastered_at = asyncio.get_running_loop().time()
        self._settings = Settings(
            welcome.run,
            welcome.heartbeat_us / SECOND_US,
            welcome.silence_us / SECOND_US,
            welcome.unreachable_us / SECOND_US,
            welcome.kill_wait_us / SECOND_US,
            welcome.max_restarts,
            welcome.stop_grace_us / SECOND_US,
        )

    async def _beat(self, connection: Connection) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + self._settings.heartbeat_s
            await asyncio.sleep(self._settings.heartbeat_s)
            self._lag_us = int((loop.time() - due) * SECOND_US)
            if loop.time() - self._mastered_at > self._settings.silence_s:
                raise ConnectionLost(f"the master has been silent for {self._settings.silence_s:g} s")
            await connection.send(messages.encode(Beat(self._generation, self._step, max(0, self._lag_us))))

    async def _send(self, connection: Connection) -> None:
        while True:
            self._outbox.changed.clear()
            item = self._outbox.next()
            if item is None:
                await self._outbox.changed.wait()
            else:
                await connection.send(messages.encode(messages.numbered(*item)))

    async def _hear(self, connection: Connection) -> None:
        while True:
            message = messages.decode(await connection.receive())
            self._mastered_at = asyncio.get_running_loop().time()
            match message:
                case Level(token, _):
                    self._ordered(token, messages.order_of(message))
                case Answer(number, _, reason):
                    if reason:
                        log.debug("refused", number=number, reason=reason)
                    self._outbox.answered(number)
                case Again(expected):
                    self._outbox.expected(expected)
                case BeatSeen(token):
                    self._fence(token)
                case Goodbye():
                    self._turned_away(message)
                    raise ConnectionLost(message.reason)
                case _:
                    raise MalformedMessage(f"{type(message).__name__} is not for agents")

    def _ordered(self, token: int, order: Order) -> None:
        self._fence(token)
        self._order = order
        self._count_worlds(order)
        if order.store:
            self._launcher.spend_store(order.store)
            self._stores = [one for one in self._stores if one != order.store]
        self._levelled.set()

    def _count_worlds(self, order: Order) -> None:
        """Worlds that came and went unheard of may have used our stores: offer others, or one day none would be left."""
        seen, newest = self._seen, max(order.generation, order.over)
        self._seen = max(seen, newest)
        if (newest > seen + 1 and seen) or (newest > seen and not order.generation):
            for address in self._stores:
                self._outbox.add(world.WithdrawStore(self.node, address))
                self._launcher.spend_store(address)
            self._stores = []

    def _fence(self, token: int) -> None:
        """An order of a leader older than the newest seen must not be obeyed."""
        if token < self._token:
            raise ConnectionLost(f"orders under token {token} are refused: {self._token} is newer")
        self._token = token
