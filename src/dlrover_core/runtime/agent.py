"""The agent of one node: makes its workers match the leader's order, and reports what happens to them.

Everything here is logic over two ports, without a process or a socket. The agent keeps its workers running while no master
answers. Only without a master *and* without steps does it stop them, after half the time in which it would itself be given
up.

An agent may start without a node, as a *standby*: it prepares everything, waits, and becomes the node that a master, or the
process that started it, assigns to it. It needs no new connection for that.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from functools import partial
from typing import Any

import structlog

from dlrover_core.errors import ConnectionLost, LaunchFailed, MalformedMessage, TokenRefused
from dlrover_core.job import budgets, incidents, nodes, notices, operations, progress, world
from dlrover_core.job.orders import Order
from dlrover_core.kernel.wire import since
from dlrover_core.runtime import messages
from dlrover_core.runtime.beats import Beats, beat_of
from dlrover_core.runtime.duties import LOST, Desk, Duty, settled
from dlrover_core.runtime.ending import Ending
from dlrover_core.runtime.granted import Granted, launch_of
from dlrover_core.runtime.greeting import UNANSWERED_BEATS, Greeted, Greeter, Unanswered
from dlrover_core.runtime.launcher import (
    Launcher,
    Pulsing,
    StoreGone,
    StoreReady,
    WorkerExit,
    WorkersGone,
    WorkersStuck,
    WorkerStep,
)
from dlrover_core.runtime.levels import BeatSeen
from dlrover_core.runtime.masters import Masters
from dlrover_core.runtime.messages import Again, Answer, Assigned, Goodbye, Hello, Level, Welcome
from dlrover_core.runtime.outbox import SECOND_US, Outbox
from dlrover_core.runtime.transport import Connection, Dialer
from dlrover_core.runtime.within import any_within, within

STEADY_S = 1.0
LAST_WORD_S = 5.0
PART_S = 1.0
REASON_MAX = 500
NOTHING = Order(leave=False, reason="no master has spoken yet", grace_us=0)

log = structlog.get_logger("dlrover.agent")


class Agent:
    """One node's agent. ``boot``: a number drawn once per process; ``address``: where peers reach this host.

    Without a ``node`` it is a standby: it dials and waits for a node, or, without ``dial_before_name``, dials no master
    before `name` is called. ``seat`` and ``place`` as in `Hello`. ``steps_told``: workers report their steps; if not, a
    standstill says nothing, and workers without a master run on.
    """

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
        seat: str = "",
        place: int = -1,
        dial_before_name: bool = True,
        steps_told: bool = True,
        duties: Sequence[Duty] = (),
    ) -> None:
        self.node, self._launcher, self._dialer = node, launcher, dialer
        self._seat, self._place, self._dial_before_name = seat, place, dial_before_name
        self._steps_told, self._duties = steps_told, duties
        self._desk: Desk | None = None
        self._named = asyncio.Event()
        if node:
            self._named.set()
        self._masters, self._boot, self._host, self._address = Masters(masters), boot, host, address
        self._greeter = Greeter(dialer, self._masters)
        self._closing: set[asyncio.Future[None]] = set()
        self._settings = Granted(run=run)
        self._outbox = Outbox()
        self._order, self._token = NOTHING, 0
        self._levelled = asyncio.Event()
        self._launched = 0
        self._gone = asyncio.Event()
        self._gone.set()
        self._generation = 0
        self._living = 0
        self._finished: set[int] = set()
        self._finishing: asyncio.Future[None] | None = None
        self._step = -1
        self._stepped_at = self._mastered_at = 0.0
        self._reported_first = self._told_over = 0
        self._connected = self._stranger = False
        self._sent_away: Goodbye | None = None
        self._gave_up = self._seen = 0
        self._stores: list[str] = []
        self._beats = Beats()
        self._connection: Connection | None = None
        self._peer_version = messages.VERSION
        self._parting, self._parting_number = "", 0
        self.ending = Ending()
        self.result: world.ReportFinished | incidents.ReportExit | None = None

    @property
    def leaving(self) -> str:
        """Why it is leaving; empty: it is not."""
        return self.ending.reason

    @property
    def working(self) -> bool:
        """Are there workers? ``result`` says how they ended, reported to a master or not; None: they have not."""
        return self._generation > 0

    @property
    def unmastered_s(self) -> float:
        """Seconds since a master was last heard, or since the start."""
        return asyncio.get_running_loop().time() - self._mastered_at

    def name(self, node: str) -> None:
        """Become this node. For agents that dial no master before; the others get a name from their master."""
        if self.node:
            raise ValueError(f"this agent is {self.node} already, and cannot be {node}")
        self.node = node
        self._named.set()

    def masters_are(self, addresses: Sequence[str]) -> None:
        """Take these masters in place of the known ones. Raises `SpecError`, and then nothing has changed."""
        self._masters.name(addresses, served=self._connected)

    async def run(self) -> str:
        """Serve until told to leave; returns why. Raises `LaunchFailed` when workers could never run here, `TokenRefused`."""
        loop = asyncio.get_running_loop()
        self._stepped_at = self._mastered_at = loop.time()
        talking = asyncio.ensure_future(self._talk())
        levelling = asyncio.ensure_future(self._level())
        tasks: list[asyncio.Future[Any]] = [talking, levelling]
        tasks.append(asyncio.ensure_future(self._join(tasks)))
        try:
            while not levelling.done():
                waiting = [task for task in tasks if not task.done()]
                await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in tasks:
                    if task.done():
                        task.result()
            await self._last_word(talking, self.leaving)
            return self.leaving
        except LaunchFailed as error:
            if self.node:
                self._outbox.add(nodes.ReportFault(self.node, str(error)))
            await self._last_word(talking, str(error))
            raise
        finally:
            tasks += [self._finishing] if self._finishing is not None else []
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, *self._closing, return_exceptions=True)
            await self._launcher.close()
            await self._dialer.close()

    async def _join(self, tasks: list[asyncio.Future[Any]]) -> None:
        """Prepare everything, and once there is a node, join under its name."""
        await self._launcher.open()
        await self._named.wait()
        joined = nodes.ReportJoined(self.node, self._host, self._address, self._launcher.nproc, self._seat)
        self._outbox.add(joined)
        tasks.append(asyncio.ensure_future(self._watch()))
        self._desk = Desk(self.node, self._settings.run, self._order, self._duty_sends)
        tasks.extend(asyncio.ensure_future(duty.run(self._desk)) for duty in self._duties)
        if self._steps_told:
            tasks.append(asyncio.ensure_future(self._mind_silence()))

    def _tell_generation(self) -> None:
        if self._desk is not None:
            self._desk.generation = self._generation

    def _duty_sends(self, command: messages.Message) -> int:
        return self._outbox.add(command) if self._peer_version >= since(type(command)) else LOST

    async def _last_word(self, talking: asyncio.Future[Any], reason: str) -> None:
        """Let the outbox empty and say goodbye, for a bounded time: there may be no master."""

        async def emptied() -> None:
            while not self._outbox.empty and not talking.done() and not self._stranger:
                self._outbox.changed.clear()
                await self._outbox.changed.wait()

        with contextlib.suppress(asyncio.TimeoutError):
            await within(LAST_WORD_S, emptied())
        connection = self._connection
        if connection is not None and self._connected and not self._stranger:
            parting = messages.encode(Goodbye(reason[:REASON_MAX], leave=True))
            with contextlib.suppress(asyncio.TimeoutError, ConnectionLost):
                await within(PART_S, connection.send(parting))

    def leave(self, reason: str) -> None:
        """Stop the workers with the grace of a planned stop and leave, whatever the master orders."""
        self._end(Ending("", reason))

    def part(self, reason: str) -> None:
        """Ask the master to be drained, and leave when it orders that. A signal to the agent ends up here.

        So other nodes' workers get their grace too, and no failure is recorded. Without an answer, or refused, it is
        `leave`.
        """
        if self._parting or not (self._connected and self.node):
            self.leave(reason)
            return
        self._parting = reason
        self._parting_number = self._outbox.add(operations.LeaveNode(self.node, reason[:REASON_MAX]))
        asyncio.get_running_loop().call_later(LAST_WORD_S, self._part_unanswered)

    def _part_unanswered(self, *, waits: bool = True) -> None:
        if waits and self._parting_number < 0:
            # `LeaveNode` is accepted: stay until the planned change is done (peers may read this memory), then use force. The
            # platform's deadline may be later than the own one.
            later = partial(self._part_unanswered, waits=False)
            departs_s = self._order.part(notices.Departure).within_us / SECOND_US - LAST_WORD_S
            asyncio.get_running_loop().call_later(max(self._settings.stop_grace_s, departs_s), later)
        elif not self._order.leave:
            self.leave(self._parting)

    def _end(self, ending: Ending) -> None:
        if not self.leaving:
            self.ending = ending
        self._levelled.set()

    # ---- workers: levelled to the order

    async def _level(self) -> None:
        while True:
            await self._levelled.wait()
            self._levelled.clear()
            order = self._order
            if self.leaving or order.leave:
                ours = bool(self.leaving) and not order.leave and not self._stranger
                self._end(self._ending_of(order))
                grace_us = int(self._settings.stop_grace_s * SECOND_US)
                last = order._replace(grace_us=grace_us) if ours else order
                settling = asyncio.ensure_future(settled(self._duties, last, grace_us))
                await self._stop(last)
                await settling
                if self.node:
                    self._outbox.add(nodes.ReportLeft(self.node))
                return
            if order.generation != self._generation or order.over > self._told_over:
                await self._change(order)

    def _ending_of(self, order: Order) -> Ending:
        """The ending that an order to leave means. An agent that asked for it gives its own reason."""
        if self._parting and order.outcome in (nodes.DRAINED, nodes.LEAVING):
            return Ending("", self._parting)
        return Ending(order.outcome, order.reason, order.root)

    async def _change(self, order: Order) -> None:
        if order.linger_us:
            # Workers may end by themselves unless a newer order comes: the rank that caused the failure may report late.
            await any_within(order.linger_us / SECOND_US, self._gone, self._levelled)
        if order is not self._order:
            self._levelled.set()
            return
        if not await self._stop(order):
            return
        if order is not self._order:
            # A newer order came while stopping: it is levelled next.
            self._levelled.set()
        if order.over > self._told_over:
            # The report that the workers have stopped must come after every exit.
            with contextlib.suppress(asyncio.TimeoutError):
                await within(LAST_WORD_S, self._gone.wait())
            self._told_over = order.over
            self._outbox.add(world.ReportStopped(self.node, order.over, self._step))
        if order.generation == 0:
            return
        if order is self._order:
            await self._start(order)

    async def _stop(self, order: Order) -> bool:
        if not self._launched:
            return True
        stopped = await self._launcher.stop(order.grace_us / SECOND_US, self._settings.kill_wait_s)
        self._generation = self._living = 0
        self._tell_generation()
        if not stopped:
            self._outbox.add(
                nodes.ReportFault(self.node, f"workers survived SIGKILL for {self._settings.kill_wait_s:g} s")
            )
        return stopped

    async def _start(self, order: Order) -> None:
        self._generation, self._living, self._finished = order.generation, order.work.nproc, set()
        self._step, self._stepped_at, self.result = -1, asyncio.get_running_loop().time(), None
        self._launched = order.generation
        self._tell_generation()
        self._gone.clear()
        try:
            await self._launcher.start(launch_of(self.node, order, self._settings))
        except LaunchFailed as error:
            self._gone.set()
            log.error("workers cannot be started", generation=order.generation, error=str(error))
            self._outbox.add(nodes.ReportFault(self.node, f"workers cannot be started: {error}"))
            return
        self._outbox.add(world.ReportStarted(self.node, order.generation))

    # ---- what happens to them

    async def _watch(self) -> None:
        async for notice in self._launcher.notices():
            for duty in self._duties:
                duty.noticed(notice)
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
                    self._finishing = asyncio.ensure_future(self._finish(gone.generation))
            return
        # A worker that was killed while it wrote its error file had failed before: that is evidence.
        if gone.asked and not gone.error:
            return
        if gone.last:
            self._outbox.add(budgets.SpendRestarts(self.node, gone.generation))
        age = max(0, int(asyncio.get_running_loop().time() * SECOND_US) - gone.died_us)
        told = incidents.ReportExit(
            self.node,
            gone.generation,
            gone.rank,
            gone.exit_code,
            gone.asked,
            gone.step,
            age,
            gone.tail,
            gone.error,
            gone.signature,
            gone.place,
            gone.work,
        )
        self.result = told if gone.generation == self._generation else self.result
        self._outbox.add(told)

    async def _finish(self, generation: int) -> None:
        if self._desk is not None:
            await self._desk.until_at_rest()
        unstored = self._desk.unstored() if self._desk is not None else ("", -1)
        if generation == self._generation:
            self.result = world.ReportFinished(self.node, generation, self._step, *unstored)
            self._outbox.add(self.result)

    def _stepped(self, step: WorkerStep) -> None:
        if step.generation != self._generation:
            return
        self._step = max(self._step, step.step)
        self._stepped_at = asyncio.get_running_loop().time()
        # Rank 0's node reports for all ranks of a step.
        if self._order.work.node_rank == 0 and self._reported_first < step.generation:
            self._reported_first = first = step.generation
            age = max(0, int(self._stepped_at * SECOND_US) - step.at_us)
            self._outbox.add(progress.ReportFirstStep(self.node, first, step.step, age, step.told, step.imports_us))

    async def _mind_silence(self) -> None:
        """Without a master and without steps, stop the workers before another node replaces this one."""
        loop = asyncio.get_running_loop()
        while True:
            patience = self._settings.unreachable_s / 2
            since = max(self._stepped_at, self._mastered_at)
            # Checked repeatedly, because a master may change the setting meanwhile.
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
        # A later leader must not believe that this generation runs.
        rank, why = self._order.work.first_rank, "stopped by its agent: no master and no steps"
        told = incidents.ReportExit(self.node, generation, rank, -9, False, self._step, 0, "", why)
        self.result = self.result or told
        self._outbox.add(told)

    # ---- the master

    async def _talk(self) -> None:
        loop, masters = asyncio.get_running_loop(), self._masters
        found: Greeted | None = None
        if not self._dial_before_name:
            await self._named.wait()
        while True:
            address, began = masters.address, loop.time()
            masters.dials(began)
            self._sent_away = None
            here, found = found, None
            try:
                connection = here.connection if here else await self._greeter.dial(address, self._settings.silence_s)
                try:
                    found = await self._converse(connection, here.welcome if here else None)
                finally:
                    closing = asyncio.ensure_future(connection.close())
                    self._closing.add(closing)
                    closing.add_done_callback(self._closing.discard)
                    if found is None:  # another master has this agent, so a stopped one is not waited for
                        await closing
            except TokenRefused as refused:
                if not self._token or len(masters.known) == 1:
                    raise
                # One master was started with another token. Masters that took this agent in before know it.
                log.warning("a master refuses our token, the others are asked", address=address, reason=str(refused))
            except (ConnectionLost, MalformedMessage) as lost:
                log.debug("no master", address=address, reason=str(lost))
            if found is not None:
                masters.moved(found.address)
                continue
            steady = self._connected and loop.time() - began >= STEADY_S
            self._connected = False
            away, jitter_of = self._parted(), self.node or str(self._boot)
            silent = self._unanswered().wait_s <= 0
            pause_s = masters.lost(loop.time(), steady=steady, away=away, jitter_of=jitter_of, silent=silent)
            await masters.rest(pause_s)

    def _parted(self) -> Goodbye | None:
        """The goodbye that ended the last conversation, if there was one."""
        return self._sent_away

    async def _converse(self, connection: Connection, first: Welcome | None) -> Greeted | None:
        """Talk until the connection ends; returns another master that took the agent in, because this one was silent."""
        said = first or await self._greeter.greet(connection, self._hello(self.node), self._settings.silence_s)
        if isinstance(said, Goodbye):
            self._turned_away(said)
            return None
        self._welcomed(said)
        self._connection = connection
        self._outbox.rewind()
        looks = asyncio.ensure_future(self._greeter.elsewhere(self._unanswered))
        talk = (self._beat(connection), self._send(connection), self._hear(connection))
        tasks = [looks, *(asyncio.ensure_future(one) for one in talk)]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if looks in done:
                return looks.result()
            for task in done:
                task.result()
            return None
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _hello(self, node: str) -> Hello:
        told = Hello(messages.VERSION, self._settings.run, node, self._boot, self._generation, self._token)
        return told._replace(host=self._host, nproc=self._launcher.nproc, seat=self._seat, place=self._place)

    def _unanswered(self) -> Unanswered:
        due = self._mastered_at + UNANSWERED_BEATS * self._settings.heartbeat_s
        wait_s = due - asyncio.get_running_loop().time()
        return Unanswered(wait_s, self._hello(self.node), self._token, self._settings.silence_s)

    def _turned_away(self, goodbye: Goodbye) -> None:
        log.info("turned away", reason=goodbye.reason, leave=goodbye.leave, address=goodbye.address)
        self._sent_away = goodbye
        if goodbye.leave:
            # No master here listens to a stranger, so there is nothing to wait for.
            self._stranger = True
            self._outbox.changed.set()
            self._end(Ending(goodbye.outcome, goodbye.reason))

    def _welcomed(self, welcome: Welcome) -> None:
        if welcome.token < self._token:
            raise ConnectionLost(f"a master with token {welcome.token} greets; {self._token} is newer")
        self._token = welcome.token
        self._connected, self._peer_version = True, welcome.version
        self._mastered_at = asyncio.get_running_loop().time()
        self._settings = Granted.by(welcome)
        if self._desk is not None:
            self._desk.run = welcome.run

    async def _beat(self, connection: Connection) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._beats.due(self._settings.heartbeat_s, self._desk)
            if loop.time() - self._mastered_at > self._settings.silence_s:
                raise ConnectionLost(f"the master has been silent for {self._settings.silence_s:g} s")
            pulse = self._launcher.pulse() if isinstance(self._launcher, Pulsing) else None
            beat = beat_of(self._generation, self._step, self._beats.lag_us, pulse, self._desk)
            await connection.send(messages.encode(beat, self._peer_version))

    async def _send(self, connection: Connection) -> None:
        while True:
            self._outbox.changed.clear()
            item = self._outbox.next()
            if item is None:
                await self._outbox.changed.wait()
            else:
                told = messages.numbered(*item, self._peer_version)
                await connection.send(messages.encode(told, self._peer_version))

    async def _hear(self, connection: Connection) -> None:
        while True:
            message = messages.decode(await connection.receive(), self._peer_version)
            self._mastered_at = asyncio.get_running_loop().time()
            match message:
                case Level(token, _):
                    self._ordered(token, messages.order_of(message, self._peer_version))
                case Answer(number, _, reason):
                    if reason:
                        log.debug("refused", number=number, reason=reason)
                    if number == self._parting_number:
                        if reason:
                            self.leave(self._parting)
                        self._parting_number = -1
                    self._outbox.answered(number)
                    if self._desk is not None:
                        self._desk.answered(number, reason)
                case Again(expected):
                    self._outbox.expected(expected)
                case BeatSeen(token, parts):
                    self._fence(token)
                    if self._desk is not None:
                        self._desk.seen(parts)
                case Assigned(token, node):
                    self._fence(token)
                    await self._take_name(connection, node)
                case Welcome():
                    self._welcomed(message)
                case Goodbye():
                    self._turned_away(message)
                    raise ConnectionLost(message.reason)
                case _:
                    raise MalformedMessage(f"{type(message).__name__} is not for agents")

    async def _take_name(self, connection: Connection, node: str) -> None:
        """Say hello under the new name. Once that is sent, the name is in force, and what waits for it begins."""
        if self.node:
            raise MalformedMessage(f"{self.node} cannot become {node}")
        await connection.send(messages.encode(self._hello(node)._replace(version=self._peer_version)))
        log.info("assigned", node=node)
        self.name(node)

    def _ordered(self, token: int, order: Order) -> None:
        self._fence(token)
        self._order = order
        if self._desk is not None:
            self._desk.order = order
        for duty in self._duties:
            duty.ordered(order)
        self._count_worlds(order)
        if store := order.work.store:
            self._launcher.spend_store(store)
            self._stores = [one for one in self._stores if one != store]
        self._levelled.set()

    def _count_worlds(self, order: Order) -> None:
        """Offer further stores: worlds formed while no master was heard may have used this node's stores."""
        seen, newest = self._seen, max(order.generation, order.over)
        self._seen = max(seen, newest)
        if (newest > seen + 1 and seen) or (newest > seen and not order.generation):
            for address in self._stores:
                self._outbox.add(world.WithdrawStore(self.node, address))
                self._launcher.spend_store(address)
            self._stores = []

    def _fence(self, token: int) -> None:
        """Raises for an order of a leader that is older than the newest known one."""
        if token < self._token:
            raise ConnectionLost(f"orders under token {token} are refused: {self._token} is newer")
        self._token = token
