"""Agents' sessions, as the master sees them: who is connected, who is silent, and what each was last told.

What is here are levels: heartbeats, steps, connections. None of it is in the log; a new master starts without it and gives
everybody the full time to be heard.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING

import structlog

from dlrover_core.errors import ConnectionLost, MalformedMessage
from dlrover_core.job.state import STRANGER, Order
from dlrover_core.kernel.engine import Accepted, NotDone, Reply, Resend
from dlrover_core.kernel.events import Origin
from dlrover_core.runtime import messages
from dlrover_core.runtime.messages import (
    Again,
    Answer,
    Beat,
    BeatSeen,
    Goodbye,
    Hello,
    Level,
    Message,
    Numbered,
    Welcome,
)
from dlrover_core.runtime.transport import Connection, receive_within
from dlrover_core.spec import us

if TYPE_CHECKING:
    from dlrover_core.runtime.master import Master

OUTBOX_MAX = 1024
GREETING_S = 10.0
OVERLOAD_S = 1.0
log = structlog.get_logger("dlrover.master")


class Session:
    """One agent's connection: an outbox drained by a task of its own, so that one slow reader stalls nobody else."""

    def __init__(self, connection: Connection, node: str, boot: int) -> None:
        self.connection, self.node, self.boot = connection, node, boot
        self.told: Order | None = None
        self._outbox: deque[Message] = deque()
        self._wake = asyncio.Event()
        self.overflowed = False

    def push(self, message: Message) -> None:
        """Queue a message. A peer that leaves too many unread loses its connection; it will ask again."""
        if len(self._outbox) >= OUTBOX_MAX:
            self.overflowed = True
        else:
            self._outbox.append(message)
        self._wake.set()

    def tell(self, token: int, order: Order) -> None:
        """Say what the agent should be doing, if it was not told so already."""
        if order != self.told:
            self.told = order
            self.push(Level(token, tuple(order)))

    async def drain(self) -> None:
        """Send what is queued, in order, until cancelled. Raises `ConnectionLost`."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._outbox:
                await self.connection.send(messages.encode(self._outbox.popleft()))
            if self.overflowed:
                raise ConnectionLost(f"{self.node} left {OUTBOX_MAX} messages unread")


class Sessions:
    """All sessions of one master, by node; the newest connection of a node is its session."""

    def __init__(self, master: Master) -> None:
        self._master = master
        self._by_node: dict[str, Session] = {}
        self._heard: dict[str, float] = {}
        self._calm = 0.0
        self.steps: dict[str, tuple[int, int]] = {}

    def __len__(self) -> int:
        """How many agents are connected."""
        return len(self._by_node)

    async def accept(self, connection: Connection) -> None:
        """Serve one connection until it is lost."""
        session: Session | None = None
        try:
            hello = await self._greeted(connection)
            if hello is None:
                return
            session = Session(connection, hello.node, hello.boot)
            self._open(session)
            await self._serve(session)
        except ConnectionLost as lost:
            log.debug("agent connection lost", peer=connection.peer, reason=str(lost))
        except MalformedMessage as bad:
            log.warning("agent connection closed", peer=connection.peer, reason=str(bad))
        finally:
            if session is not None and self._by_node.get(session.node) is session:
                del self._by_node[session.node]
            await connection.close()
            self._master.left.set()

    async def _greeted(self, connection: Connection) -> Hello | None:
        hello = messages.decode(await receive_within(connection, GREETING_S))
        if not isinstance(hello, Hello):
            raise MalformedMessage(f"the first frame must be Hello, not {type(hello).__name__}")
        refusal = self._refusal(hello)
        if refusal is not None:
            log.info("agent turned away", node=hello.node, reason=refusal.reason, leave=refusal.leave)
            await connection.send(messages.encode(refusal))
            return None
        return hello

    def _refusal(self, hello: Hello) -> Goodbye | None:
        state, token = self._master.state, self._master.token
        if not messages.OLDEST_VERSION <= hello.version <= messages.VERSION:
            return Goodbye(
                f"protocol {hello.version} is not served here: {messages.OLDEST_VERSION} to {messages.VERSION} are",
                True,
            )
        if hello.token > token or not self._master.leading:
            return Goodbye("another master leads", False)
        if hello.run and hello.run != state.job.run:
            return Goodbye(f"run {hello.run} is over: this is run {state.job.run}", True)
        if hello.node not in self._master.present:
            return Goodbye(f"{hello.node} is {STRANGER.reason}", True)
        speaker, node = state.senders.get(hello.node), state.nodes.nodes.get(hello.node)
        if speaker is not None and speaker.boot != hello.boot and node is not None and node.joined:
            return Goodbye(f"{hello.node} has an agent already", True)
        return None

    def _open(self, session: Session) -> None:
        state, spec = self._master.state, self._master.state.job.spec
        self._by_node[session.node] = session
        self.heard(session.node)
        session.push(
            Welcome(
                messages.VERSION,
                state.job.run,
                self._master.token,
                us(spec.heartbeat_s),
                us(spec.silence_s),
                us(spec.unreachable_s),
                us(spec.kill_wait_s),
                spec.max_restarts,
                us(spec.stop_grace_s),
            )
        )
        order = self._master.orders.get(session.node)
        if order is not None:
            session.tell(self._master.token, order)

    async def _serve(self, session: Session) -> None:
        drain = asyncio.ensure_future(session.drain())
        receive: asyncio.Future[bytes] | None = None
        try:
            while True:
                receive = asyncio.ensure_future(session.connection.receive())
                await asyncio.wait({drain, receive}, return_when=asyncio.FIRST_COMPLETED)
                if drain.done():
                    drain.result()
                    return
                self._take(session, messages.decode(receive.result()))
        finally:
            tasks = [task for task in (drain, receive) if task is not None]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _take(self, session: Session, message: Message) -> None:
        self.heard(session.node)
        if isinstance(message, Beat):
            self.steps[session.node] = (message.generation, message.step)
            session.push(BeatSeen(self._master.token))
        elif isinstance(message, Numbered):
            self._command(session, message)
        else:
            raise MalformedMessage(f"{type(message).__name__} is not for masters")

    def _command(self, session: Session, message: Numbered) -> None:
        if session.node not in self._master.present:
            # Gone meanwhile: nothing it reports counts.
            session.push(Goodbye(f"{session.node} is {STRANGER.reason}", leave=True))
            return
        command = messages.command_of(message)
        # An agent speaks for its own node and for no other.
        if getattr(command, "node", session.node) != session.node:
            raise MalformedMessage(f"{session.node} speaks for {getattr(command, 'node', '')}")
        origin = Origin(session.node, session.boot, message.number)
        future = self._master.submit(command, origin)

        def answer(done: asyncio.Future[Reply]) -> None:
            # Cancelled: not durable; the agent will send it again to whoever leads.
            if done.cancelled():
                return
            if done.exception() is None:
                session.push(_reply(message.number, done.result()))
            else:
                # Too much waits for the log: it is asked for again, or it would wait for the next word of this agent.
                asyncio.get_running_loop().call_later(OVERLOAD_S, session.push, Again(message.number))

        future.add_done_callback(answer)

    def heard(self, node: str) -> None:
        """Note that a node spoke now."""
        self._heard[node] = asyncio.get_running_loop().time()

    def calm(self) -> None:
        """Everybody's silence starts afresh: the master itself was away."""
        self._calm = asyncio.get_running_loop().time()

    def silence(self, node: str) -> float:
        """Seconds since a node spoke, or since silence was last forgiven."""
        return asyncio.get_running_loop().time() - max(self._heard.get(node, self._calm), self._calm)

    def heard_since(self, node: str, at: float) -> bool:
        """Has it spoken since that moment of the loop's clock?"""
        heard = self._heard.get(node)
        return heard is not None and heard >= at

    def steps_of(self, group: str, generation: int | None = None) -> list[int]:
        """The steps that a group's agents reported last, of one generation or of any."""
        return [
            step
            for node, (seen, step) in self.steps.items()
            if generation in (seen, None) and node.rsplit("-", 2)[0] == group
        ]

    def level(self, token: int, orders: Mapping[str, Order]) -> None:
        """Tell everybody connected what they should be doing now."""
        for node, session in list(self._by_node.items()):
            order = orders.get(node)
            if order is not None:
                session.tell(token, order)
            elif node not in self._master.state.nodes.nodes:
                session.tell(token, STRANGER)

    def forget_absent(self) -> None:
        """Drop what is remembered of nodes that are gone."""
        present = self._master.state.nodes.nodes
        for node in [node for node in self._heard if node not in present and node not in self._by_node]:
            del self._heard[node]
            self.steps.pop(node, None)


def _reply(number: int, reply: Reply) -> Message:
    match reply:
        case Accepted(seq):
            return Answer(number, seq)
        case NotDone(seq, reason):
            return Answer(number, seq, reason)
        case Resend(expected):
            return Again(expected)
