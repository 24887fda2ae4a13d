"""Standbys of a job whose scheduler starts the nodes: agents without a name wait in seats that the backend has made for them.

A backend that turns a standby into a node names its *seat*: with the answer to the launch, and with every observation of the
node. So the name that an agent gets follows from what the platform shows, and a master that takes over gives the names that the
one before has left to give. A node's name is given to one agent at a time, and to none while another one has it.
"""

from __future__ import annotations

import asyncio

import structlog

from dlrover_core.job.node_lifecycle import COMING
from dlrover_core.job.orders import STRANGER
from dlrover_core.rules.desired import farewell
from dlrover_core.runtime.leader import Leader
from dlrover_core.runtime.messages import Assigned, Goodbye, Hello
from dlrover_core.runtime.sessions import GREETING_S, NoStandbys, Session, Sessions

FRESH_BEATS = 3
SEATS_MAX = 4096

log = structlog.get_logger("dlrover.master")


class Seats(NoStandbys):
    """The reception of a job whose backend may keep standbys, as `GroupSpec.standby` asks. ``reserves``: it does."""

    def __init__(self, master: Leader, sessions: Sessions) -> None:
        super().__init__(master, sessions)
        sessions.reception = self
        self.reserves = False
        # The node that each seat's standby is to be, and the standbys that were told so and have not said hello again.
        self._nodes: dict[str, str] = {}
        self._promised: dict[str, Session] = {}

    # ---- what the leveller says and asks

    def given(self, seat: str, node: str) -> None:
        """The backend has made the standby in this seat the node."""
        if self._nodes.get(seat) != node:
            present = self._master.state.nodes.nodes
            self._nodes = {one: name for one, name in self._nodes.items() if name in present}
            if len(self._nodes) >= SEATS_MAX:
                return  # the next observation says it again
            self._nodes[seat] = node
        session = next((one for one in self._sessions.standbys.values() if one.hello.seat == seat), None)
        if session is not None:
            self._name(node, session)

    def heard(self) -> frozenset[str]:
        """The seats whose standbys answer."""
        fresh_s = FRESH_BEATS * self._master.state.job.spec.heartbeat_s
        since = asyncio.get_running_loop().time() - fresh_s
        return frozenset(one.hello.seat for one in self._sessions.standbys.values() if one.heard_at >= since)

    # ---- the reception

    @property
    def standbys_wanted(self) -> int:  # type: ignore[override]  # it varies here
        """How many agents should wait in seats."""
        state = self._master.state
        return sum(one.standby for one in state.job.spec.groups) if self.reserves and state.job.run else 0

    def refusal(self, hello: Hello) -> Goodbye | None:
        """Agents without a node may wait in a seat, where the job has standbys; another agent's name is refused."""
        state = self._master.state
        if hello.node:
            promised, session = self._promised.get(hello.node), self._sessions.of(hello.node)
            rival = promised if promised is not None else session
            if rival is not None and rival.boot != hello.boot and rival.hello.seat != hello.seat:
                return Goodbye(f"{hello.node} is another agent's by now", True, outcome=STRANGER.outcome)
            return None
        if not hello.seat or not self.standbys_wanted:
            return super().refusal(hello)
        if not state.job.live:
            return Goodbye(f"the job is {state.job.state}", True, outcome=farewell(state).outcome)
        return None

    def came(self, session: Session) -> None:
        """A node's agent is there, or a standby, which may be a node already."""
        super().came(session)
        if session.node:
            self._promised.pop(session.node, None)
        elif session.hello.seat in self._nodes:
            self._name(self._nodes[session.hello.seat], session)

    def went(self, session: Session, ended: bool) -> None:
        """A connection has ended: a standby that comes back is told its name again."""
        for node in [node for node, one in self._promised.items() if one is session]:
            del self._promised[node]
        super().went(session, ended)

    def resumed(self) -> None:
        """Orders may be given again: so may names."""
        super().resumed()
        for session in list(self._sessions.standbys.values()):
            if session.hello.seat in self._nodes:
                self._name(self._nodes[session.hello.seat], session)

    # ---- names

    def _name(self, node: str, session: Session) -> None:
        known = self._master.state.nodes.nodes.get(node)
        if known is None or known.joined or known.released or known.state not in COMING:
            return
        if node in self._promised or self._sessions.of(node) is not None or not self._master.may_order():
            return
        self._promised[node] = session
        log.info("standby assigned", node=node, host=session.hello.host, peer=session.connection.peer)
        session.push(Assigned(self._master.token, node))
        asyncio.get_running_loop().call_later(GREETING_S, self._expire, node, session)

    def _expire(self, node: str, session: Session) -> None:
        if self._promised.get(node) is session:
            session.end(f"it did not become {node} within {GREETING_S:g} s")
