"""Agents' sessions, as the master sees them: connections, silence, and the order that each agent was last told.

All of this are levels (heartbeats, steps, connections). None of it is in the log: a new master starts without it, and gives
every agent the full time to be heard. Agents without a node, standbys, wait here; the `Reception` decides what becomes of
them, and what the end of a connection means.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from itertools import count
from typing import Protocol

import structlog

from dlrover_core.errors import ConnectionLost, MalformedMessage
from dlrover_core.job.names import group_of
from dlrover_core.job.orders import STRANGER, Order
from dlrover_core.job.silence import NoteDead
from dlrover_core.kernel.engine import Accepted, Command, NotDone, Reply, Resend
from dlrover_core.kernel.events import Origin
from dlrover_core.kernel.wire import Part
from dlrover_core.rules.desired import farewell
from dlrover_core.runtime import messages
from dlrover_core.runtime.complaints import Complaints
from dlrover_core.runtime.departures import RETURN_S, Departures
from dlrover_core.runtime.keeping import Keeping
from dlrover_core.runtime.leader import Leader
from dlrover_core.runtime.leasing import Leasing
from dlrover_core.runtime.levels import Beat, BeatSeen, Levels
from dlrover_core.runtime.messages import Again, Answer, Goodbye, Hello, Message, Numbered, Welcome
from dlrover_core.runtime.paces import Paces
from dlrover_core.runtime.stalls import Stalls
from dlrover_core.runtime.steps import Steps
from dlrover_core.runtime.transport import Connection, receive_within
from dlrover_core.spec import us

OUTBOX_MAX = 1024
GREETING_S = 10.0
OVERLOAD_S = 1.0
TURN_FRAMES = 16
log = structlog.get_logger("dlrover.master")


class Session:
    """One agent's connection, with a queue that a task of its own sends, so that one slow reader delays no other.

    ``node`` is empty while it is a standby. ``parted``: the agent has said goodbye, and its process ends by itself.
    """

    def __init__(self, connection: Connection, hello: Hello) -> None:
        self.connection, self.hello = connection, hello
        self.node, self.boot, self.version = hello.node, hello.boot, hello.version
        self.told: Order | None = None
        self.heard_at = 0.0
        self.parted = ""
        self._outbox: deque[Message] = deque()
        # An optional method of a transport.
        self._send_now: Callable[[bytes], bool] | None = getattr(connection, "send_now", None)
        self._wake = asyncio.Event()
        self._over = ""

    def push(self, message: Message) -> None:
        """Queue a message. A peer that leaves too many unread loses its connection, and will ask again."""
        if len(self._outbox) >= OUTBOX_MAX:
            self.end(f"it left {OUTBOX_MAX} messages unread")
        else:
            self._outbox.append(message)
        self._wake.set()

    def seen(self, token: int, *parts: Part) -> None:
        """Answer a heartbeat: at once if the transport can and nothing else waits, because there are many."""
        message = BeatSeen(token, parts)
        if self._outbox or self._send_now is None or not self._send_now(messages.encode(message, self.version)):
            self.push(message)

    def tell(self, token: int, order: Order) -> None:
        """Send the order, if the agent was not told the same already."""
        if order != self.told:
            self.told = order
            self.push(messages.level(token, order, self.version))

    def end(self, reason: str) -> None:
        """Cut the connection, once the queue has been sent."""
        self._over = self._over or reason
        self._wake.set()

    async def drain(self) -> None:
        """Send the queue, in order, until cancelled. Raises `ConnectionLost`."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._outbox:
                await self.connection.send(messages.encode(self._outbox.popleft(), self.version))
            if self._over:
                raise ConnectionLost(f"{self.node or 'a standby'}: {self._over}")


class Reception(Protocol):
    """Takes in agents without a node, and draws conclusions from the ends of connections."""

    @property
    def standbys_wanted(self) -> int:
        """How many agents should wait without a node; 0: nobody says."""
        ...

    def refusal(self, hello: Hello) -> Goodbye | None:
        """Why an agent is turned away although its run and node are right; None: it is not."""
        ...

    def came(self, session: Session) -> None:
        """An agent was welcomed, as a standby or under a node's name."""
        ...

    def went(self, session: Session, ended: bool) -> None:
        """An agent's connection is over; ``ended``: its kernel ended it."""
        ...

    def resumed(self) -> None:
        """Orders may be given again, after a time in which it was unknown whether this master still leads."""
        ...


class NoStandbys:
    """The reception of a job whose nodes are launched by its scheduler.

    The scheduler tells how nodes end. A connection that the agent's kernel ended, and that is not back within the longest pause
    of an agent that tries again, tells it where the scheduler is slow.
    """

    standbys_wanted = 0

    def __init__(self, master: Leader, sessions: Sessions) -> None:
        self._master, self._sessions = master, sessions
        self._away = Departures(master, sessions, self._gone)

    def refusal(self, hello: Hello) -> Goodbye | None:
        """An agent without a node has nothing to wait for."""
        if hello.node:
            return None
        return Goodbye(
            "the nodes of this job are launched by its scheduler: an agent without a node has no use here", True
        )

    def came(self, session: Session) -> None:
        """A node's agent is there."""
        self._away.came()
        self._away.stay(session.node)

    def went(self, session: Session, ended: bool) -> None:
        """A connection has ended: if its kernel ended it, the agent has died, unless it is back at once."""
        node = self._master.state.nodes.nodes.get(session.node)
        at_work = node is not None and node.joined and not node.released
        if ended and at_work and not session.parted and self._sessions.of(session.node) is None:
            # The scheduler is about to say that the node ended, if it has. A link may have been cut for a while, too: an agent
            # that lives is back within its longest pause. Of a host that it cannot reach it has said all that it will say.
            gone_s, said = self._master.state.job.spec.gone_s, session.node in self._master.state.notices.unreached
            self._away.died(session.node, gone_s if said else max(RETURN_S, gone_s))

    def _gone(self, node: str, why: str) -> None:
        log.info("agent gone", node=node, reason=why)
        self._master.tell(NoteDead(node, why))

    def resumed(self) -> None:
        """Orders may be given again, after a time in which this master might have lost the lead."""
        self._away.resumed()


class Sessions:
    """All sessions of one master: the newest connection of each node, and standbys by boot, oldest first."""

    def __init__(self, master: Leader) -> None:
        self._master = master
        self.reception: Reception = NoStandbys(master, self)
        self._by_node: dict[str, Session] = {}
        self.standbys: dict[int, Session] = {}
        self._heard: dict[str, float] = {}
        self._calm = 0.0
        self._complaints = Complaints(log)
        self.steps, self.stalls, self.keeping = Steps(), Stalls(master), Keeping()
        self._levels: tuple[Levels, ...] = (self.steps, self.stalls, Paces(), self.keeping, Leasing())
        self._pressing: set[Levels] = set()

    def __len__(self) -> int:
        """How many agents are connected."""
        return len(self._by_node) + len(self.standbys)

    def of(self, node: str) -> Session | None:
        """The session of a node's agent; None: it is not connected."""
        return self._by_node.get(node)

    async def accept(self, connection: Connection) -> None:
        """Serve one connection until it is lost."""
        session: Session | None = None
        ended = False
        try:
            session = await self._greeted(connection)
            if session is not None:
                await self._serve(session)
        except ConnectionLost as lost:
            ended = lost.ended
            node = session.node if session is not None else ""
            self._complaints.info(
                "agent connection lost", peer=connection.peer, node=node, reason=str(lost), ended=ended
            )
        except MalformedMessage as bad:
            self._complaints.warning("agent connection closed", peer=connection.peer, reason=str(bad))
        finally:
            if session is not None:
                self._forget(session, ended)
            await connection.close()
            self._master.left.set()

    def _forget(self, session: Session, ended: bool) -> None:
        if self._by_node.get(session.node) is session:
            del self._by_node[session.node]
        if self.standbys.get(session.boot) is session:
            del self.standbys[session.boot]
        self.reception.went(session, ended)

    async def _greeted(self, connection: Connection) -> Session | None:
        hello = messages.decode(await receive_within(connection, GREETING_S))
        if not isinstance(hello, Hello):
            raise MalformedMessage(f"the first frame must be Hello, not {type(hello).__name__}")
        refusal = await self._master.sent_on(hello) or self._refusal(hello)
        if refusal is not None:
            await connection.send(messages.encode(refusal, hello.version))
            return None
        session = Session(connection, hello)
        self._open(session)
        return session

    def _refusal(self, hello: Hello) -> Goodbye | None:
        refusal = self._why_not(hello)
        if refusal is not None:
            served = messages.OLDEST_VERSION <= hello.version <= messages.VERSION
            say = self._complaints.info if served else self._complaints.warning
            say("agent turned away", node=hello.node, host=hello.host, reason=refusal.reason, leave=refusal.leave)
        return refusal

    def _why_not(self, hello: Hello) -> Goodbye | None:
        state, token = self._master.state, self._master.token
        if not messages.OLDEST_VERSION <= hello.version <= messages.VERSION:
            return Goodbye(
                f"an agent that speaks protocol {hello.version} is not served here: "
                f"{messages.OLDEST_VERSION} to {messages.VERSION} are; "
                f"install dlrover-core {self._master.version} on its host, as on this master's",
                True,
            )
        if hello.token > token:
            return Goodbye("another master leads", False)
        if not self._master.may_order():
            return Goodbye("this master does not lead, or does not know whether it still does", False)
        if hello.run and hello.run != state.job.run:
            return Goodbye(f"run {hello.run} is over: this is run {state.job.run}", True, outcome=STRANGER.outcome)
        if hello.node and hello.node not in self._master.present:
            return self.estranged(hello.node)
        speaker, node = state.senders.get(hello.node), state.nodes.nodes.get(hello.node)
        if speaker is not None and speaker.boot != hello.boot and node is not None and node.joined:
            return Goodbye(f"{hello.node} has an agent already", True, outcome=STRANGER.outcome)
        return self.reception.refusal(hello)

    def estranged(self, node: str) -> Goodbye:
        """The order for an agent whose node is no more: how its job ended, or that its identity alone is over."""
        state = self._master.state
        outcome = STRANGER.outcome if state.job.live else farewell(state).outcome
        return Goodbye(f"{node} is {STRANGER.reason}", True, outcome=outcome)

    def _open(self, session: Session) -> None:
        state, spec = self._master.state, self._master.state.job.spec
        if session.node:
            self._by_node[session.node] = session
        else:
            self.standbys[session.boot] = session
        self._hear(session)
        session.push(
            Welcome(
                min(messages.VERSION, session.version),
                state.job.run,
                self._master.token,
                us(spec.heartbeat_s),
                us(spec.silence_s),
                us(spec.unreachable_s),
                us(spec.kill_wait_s),
                state.job.policy(group_of(session.node)).max_restarts if session.node else spec.max_restarts,
                us(spec.stop_grace_s),
            )
        )
        order = self._master.orders.get(session.node)
        if order is None and not state.job.live:
            order = farewell(state)
        if order is not None:
            session.tell(self._master.token, order)
        self.reception.came(session)

    def _rename(self, session: Session, hello: Hello) -> None:
        """A standby has become a node: the questions asked of a new connection are asked again."""
        if session.node or not hello.node or hello.boot != session.boot:
            raise MalformedMessage(f"{session.node or 'a standby'} cannot become {hello.node or 'a standby'}")
        refusal = self._refusal(hello)
        if refusal is not None:
            session.push(refusal)
            session.end(f"it cannot be {hello.node}")
            return
        if self.standbys.get(session.boot) is session:
            del self.standbys[session.boot]
        session.node, session.hello = hello.node, hello
        self._open(session)

    async def _serve(self, session: Session) -> None:
        drain, listen = asyncio.ensure_future(session.drain()), asyncio.ensure_future(self._listen(session))
        try:
            await asyncio.wait({drain, listen}, return_when=asyncio.FIRST_COMPLETED)
            (drain if drain.done() else listen).result()
        finally:
            for task in (drain, listen):
                task.cancel()
            await asyncio.gather(drain, listen, return_exceptions=True)

    async def _listen(self, session: Session) -> None:
        # One task per connection: a task for every frame costs more than the frame.
        for number in count(1):
            self._take(session, messages.decode(await session.connection.receive(), session.version))
            if session.parted:
                return
            if number % TURN_FRAMES == 0:
                # A peer that sends without waiting for answers must not keep others from being heard.
                await asyncio.sleep(0)

    def _take(self, session: Session, message: Message) -> None:
        self._hear(session)
        match message:
            case Beat():
                session.seen(self._master.token, *(self._heard_of(session, message) if session.node else ()))
            case Numbered():
                self._command(session, message)
            case Hello():
                self._rename(session, message)
            case Goodbye(reason):
                session.parted = reason or "it left"
            case _:
                raise MalformedMessage(f"{type(message).__name__} is not for masters")

    def _heard_of(self, session: Session, beat: Beat) -> list[Part]:
        """Hand a node's heartbeat to all listeners; returns their answers."""
        state, node = self._master.state, session.node
        for one in self._levels:
            if one.heard(state, node, beat):
                self._pressing.add(one)
                self._master.look_soon()
        self._remind(session)
        return [part for one in self._levels if (part := one.answer(state, node)) is not None]

    def findings(self, now_us: int, *, pressing: bool = False) -> Iterator[Command]:
        """The commands that follow from heartbeats: of listeners with ``pressing`` news alone, or of all."""
        asked = [one for one in self._levels if one in self._pressing or not pressing]
        self._pressing.clear()
        for one in asked:
            yield from one.findings(self._master.state, now_us)

    def _remind(self, session: Session) -> None:
        """Send the order with the answer to a heartbeat, if the agent was last told another one."""
        order = self._master.orders.get(session.node)
        if order is not None and order is not session.told and self._master.may_order():
            session.tell(self._master.token, order)

    def _command(self, session: Session, message: Numbered) -> None:
        if not session.node:
            raise MalformedMessage("a standby has nothing to report")
        if session.node not in self._master.present:
            # The node has gone meanwhile: its reports no longer count.
            session.push(self.estranged(session.node))
            return
        command = messages.command_of(message)
        # An agent speaks for its own node and for no other.
        if getattr(command, "node", session.node) != session.node:
            raise MalformedMessage(f"{session.node} speaks for {getattr(command, 'node', '')}")
        for one in self._levels:
            one.reported(command)
        origin = Origin(session.node, session.boot, message.number)
        future = self._master.submit(command, origin)

        def answer(done: asyncio.Future[Reply]) -> None:
            # Cancelled, so not durable: the agent sends it again to the next leader.
            if done.cancelled():
                return
            if done.exception() is None:
                session.push(_reply(message.number, done.result()))
            else:
                # Too many commands wait for the log: ask the agent to send this one again.
                asyncio.get_running_loop().call_later(OVERLOAD_S, session.push, Again(message.number))

        future.add_done_callback(answer)

    def _hear(self, session: Session) -> None:
        session.heard_at = asyncio.get_running_loop().time()
        if session.node:
            self._heard[session.node] = session.heard_at

    def calm(self) -> None:
        """Silence of all agents starts anew: the master itself was away."""
        self._calm = asyncio.get_running_loop().time()

    def silence(self, node: str) -> float:
        """Seconds since a node was heard, or since silence last started anew."""
        return asyncio.get_running_loop().time() - max(self._heard.get(node, self._calm), self._calm)

    def heard_since(self, node: str, at: float) -> bool:
        """Has the node been heard since that moment of the loop's clock?"""
        heard = self._heard.get(node)
        return heard is not None and heard >= at

    def level(self, token: int, orders: Mapping[str, Order]) -> None:
        """Send all connected agents their present orders; later, if it is unknown whether this master still leads."""
        if not self._master.may_order():
            return
        state = self._master.state
        for node, session in list(self._by_node.items()):
            order = orders.get(node)
            if order is not None:
                session.tell(token, order)
            elif not state.job.live:
                session.tell(token, farewell(state))
            elif node not in state.nodes.nodes:
                session.tell(token, STRANGER)
        for session in list(self.standbys.values()) if not state.job.live else ():
            session.tell(token, farewell(state))

    def dismiss(self, reason: str) -> None:
        """Send all agents away to look for the leader."""
        for session in [*self._by_node.values(), *self.standbys.values()]:
            session.push(Goodbye(reason, False))
            session.end(reason)

    def close(self) -> None:
        """No agent comes any more: log the number of suppressed complaints."""
        for one in self._levels:
            one.close()
        self._complaints.close()

    def forget_absent(self) -> None:
        """Forget what is remembered of nodes that are gone."""
        present = self._master.state.nodes.nodes
        for node in [node for node in self._heard if node not in present and node not in self._by_node]:
            del self._heard[node]
            for one in self._levels:
                one.forget(node)


def _reply(number: int, reply: Reply) -> Message:
    match reply:
        case Accepted(seq):
            return Answer(number, seq)
        case NotDone(seq, reason):
            return Answer(number, seq, reason)
        case Resend(expected):
            return Again(expected)
