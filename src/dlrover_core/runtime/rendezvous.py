"""The rendezvous: a scheduler for jobs whose hosts come by themselves.

Every host runs one agent that dials the master and waits as a *standby*. To launch a node is to assign it to a standby.
What a scheduler would observe of its machines follows from the agents' sessions:

* A goodbye ends a node. So does a connection that the agent's kernel ended and that is not back within ``gone_s``, because
  a living
  agent reconnects at once. If more than half of all nodes (or the only one) lose their connections at one moment, a network
  fault or
  a fault of this master is assumed, and agents get ``gone_s`` plus one retry period. If no agent is left, not even a
  standby, that
  time counts from the first that reconnects.
* A second agent in the same seat proves that the first one is dead, across masters and restarts of whole hosts too.
* Everything else is silence, which does not mean death: `dlrover_core.rules.silence` judges it.

The standby for a node is, in this order: one that asks for the node's index; the one that has waited longest, because it is
the warmest. Silent standbys and standbys on avoided hosts come last. A standby on an avoided host is taken only after the
node has been wanted for ``last_call_s``.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from typing import NamedTuple

import structlog

from dlrover_core.job.node_lifecycle import COMING
from dlrover_core.job.orders import STRANGER, Desired, NodeLaunch
from dlrover_core.rules.desired import farewell, full_name
from dlrover_core.runtime.backend import Changed, Listed, Observation
from dlrover_core.runtime.departures import LATE_S, RETURN_S, Departures
from dlrover_core.runtime.leader import Leader
from dlrover_core.runtime.messages import Assigned, Goodbye, Hello
from dlrover_core.runtime.sessions import GREETING_S, Session, Sessions

FRESH_BEATS = 3

log = structlog.get_logger("dlrover.master")


class Seat(NamedTuple):
    """A place on a host that at most one living agent holds, by a file lock."""

    host: str
    seat: str


class Sitter(NamedTuple):
    """The agent last seen in a seat; a standby has no ``node``."""

    boot: int
    node: str


class Rendezvous:
    """The `Backend` and the `Reception` of a joining job, over its master's own sessions."""

    standbys_wanted = 0

    def __init__(self, master: Leader, sessions: Sessions) -> None:
        self._master = master
        self._sessions = sessions
        self._sessions.reception = self
        # Nodes that wait for a standby, and since when, by the loop's clock.
        self._wishes: dict[str, float] = {}
        # Standbys without a promised node, by the index they ask for, then by boot, oldest first.
        self._waiting: dict[int, dict[int, Session]] = {}
        self._promises: dict[str, Session] = {}
        self._promised_to: dict[int, str] = {}
        self._known_of: Desired | None = None
        self._known: Mapping[str, NodeLaunch] = {}
        # The boot of the agent that this master has seen, by node.
        self._holders: dict[str, int] = {}
        self._seats: dict[Seat, Sitter] = {}
        self._seated_from_log = False
        self._away = Departures(master, sessions, self._part)
        # Nodes reported as gone that are still in the state.
        self._gone: set[str] = set()
        self._news: asyncio.Queue[Changed] = asyncio.Queue()
        self._again: asyncio.TimerHandle | None = None
        self._token = 0

    # ---- the backend

    async def launch(self, node: NodeLaunch, token: int) -> None:
        """Assign the node to a standby, now or as soon as one comes. Never refused, because hosts may come at any time."""
        self._fence(token, f"launch {node.node}")
        if node.node in self._promises or node.node in self._holders or node.node in self._wishes:
            return
        self._wish(node, asyncio.get_running_loop().time())

    async def delete(self, name: str, token: int, grace_s: float) -> None:
        """Tell the agent to leave. An agent that cannot be told counts as gone, and is told when it comes back."""
        self._fence(token, f"delete {name}")
        node = name.removeprefix(f"{self._master.state.job.name}-")
        self._wishes.pop(node, None)
        session = self._sessions.of(node)
        if session is not None:
            state = self._master.state
            # The node's own order, if it has one, may grant more grace.
            order = self._master.orders.get(node) or (STRANGER if state.job.live else farewell(state))
            session.tell(token, order)
        if node not in self._away:
            wait_s = grace_s + self._master.state.job.spec.kill_wait_s + GREETING_S if session else RETURN_S
            self._away.part_in(node, wait_s, "it did not answer when it was told to leave")

    async def observe(self) -> AsyncIterator[Listed | Changed]:
        """`Listed` at once: a joined node whose agent has not come back to this master counts as running. Then each change.

        Earlier changes come after the list: the reader may not have been there, and a planned node's absence says nothing.
        """
        yield Listed(tuple(self._listing()))
        while True:
            yield await self._news.get()

    async def room(self, group: str) -> int | None:
        """How many waiting standbys could be nodes of the group."""
        nproc = self._master.state.job.spec.group(group).nproc
        return sum(one.hello.nproc == nproc for waiting in self._waiting.values() for one in waiting.values())

    def _fence(self, token: int, what: str) -> None:
        if token < self._token:
            raise PermissionError(f"{what} under token {token}: {self._token} is newer")
        self._token = token

    def _listing(self) -> Iterable[Observation]:
        for node in self._master.state.nodes.nodes.values():
            here = node.node in self._holders
            if node.node in self._gone or not (here or node.state != "planned"):
                continue
            if not here and (node.state in ("lost", "succeeded") or (node.released and not node.joined)):
                # The node left, or was given up, before this master led; if its agent lives, it will be told to leave.
                continue
            if not here and not (node.joined and node.state in COMING):
                self._away.part_in(node.node, RETURN_S, "its agent did not come back to the new master")
            yield self._seen(node.node, "running" if node.state not in ("planned", "pending") else "pending")

    def _seen(self, node: str, phase: str, reason: str = "") -> Observation:
        session, known = self._sessions.of(node), self._master.state.nodes.nodes.get(node)
        host = session.hello.host if session is not None else known.host if known is not None else ""
        return Observation(full_name(self._master.state, node), phase, reason=reason, host=host)

    def _say(self, node: str, phase: str, reason: str = "") -> None:
        self._news.put_nowait(Changed(self._seen(node, phase, reason)))

    # ---- the reception

    def refusal(self, hello: Hello) -> Goodbye | None:
        """Why an agent is turned away: no group can use this standby, or another agent has the node's name; None: it is not."""
        if not hello.node:
            return self._useless(hello)
        promised, session = self._promises.get(hello.node), self._sessions.of(hello.node)
        rival = promised.boot if promised is not None else session.boot if session is not None else hello.boot
        if hello.node in self._gone or rival != hello.boot:
            return Goodbye(f"{hello.node} is another agent's by now", True, outcome=STRANGER.outcome)
        return None

    def _useless(self, hello: Hello) -> Goodbye | None:
        state = self._master.state
        if not state.job.live:
            return Goodbye(f"the job is {state.job.state}", True, outcome=farewell(state).outcome)
        groups = [group for group in state.job.spec.groups if group.nproc == hello.nproc]
        if not groups:
            runs = ", ".join(f"{group.nproc} ({group.name})" for group in state.job.spec.groups)
            return Goodbye(
                f"host {hello.host} offers {hello.nproc} workers and this job runs {runs} on each node: "
                "start it with the same --nproc-per-node everywhere",
                True,
            )
        if hello.place >= max(group.nodes_max for group in groups):
            places = max(group.nodes_max for group in groups)
            return Goodbye(
                f"host {hello.host} asks for place {hello.place} and this job has places 0 to {places - 1}: "
                "give each host its own --node-rank",
                True,
            )
        return None

    def came(self, session: Session) -> None:
        """A standby waits for a node, or a node's agent is there."""
        self._away.came()
        self._sit(session)
        node = session.node
        if not node:
            self._wait(session)
            return
        self._promises.pop(node, None)
        self._promised_to.pop(session.boot, None)
        self._wishes.pop(node, None)
        self._away.stay(node)
        self._holders[node] = session.boot
        known = self._master.state.nodes.nodes.get(node)
        if known is not None and known.state == "planned":
            self._say(node, "pending")

    def went(self, session: Session, ended: bool) -> None:
        """A connection has ended: draw the conclusion, or wait before drawing it."""
        node = session.node
        if not node:
            self._withdraw(session)
            return
        if self._sessions.of(node) is not None or node in self._gone:
            return
        known = self._master.state.nodes.nodes.get(node)
        if session.parted:
            self._part(node, f"its agent left: {session.parted}")
        elif ended:
            self._away.died(node)
        elif known is None or known.released or known.state not in COMING or not known.joined:
            self._away.part_in(node, RETURN_S, "its agent is away, and nothing is expected of it")

    # ---- who goes

    def _part(self, node: str, why: str) -> None:
        """The node is gone: an agent that comes back under its name is a stranger."""
        self._away.stay(node)
        self._holders.pop(node, None)
        present = self._master.state.nodes.nodes
        self._gone = {one for one in self._gone if one in present}
        if node in self._gone:
            return
        self._gone.add(node)
        session = self._sessions.of(node)
        if session is not None:
            session.push(self._sessions.estranged(node))
            session.end(why)
        log.info("node gone", node=node, reason=why)
        self._say(node, "gone", why)

    # ---- seats

    def _sit_down(self) -> None:
        """Read from the log which agents sat where when the last master led."""
        state = self._master.state
        for node in state.nodes.nodes.values():
            sender = state.senders.get(node.node)
            if node.joined and node.seat and sender is not None:
                self._seats.setdefault(Seat(node.host, node.seat), Sitter(sender.boot, node.node))

    def _sit(self, session: Session) -> None:
        """Take a seat. The agent seen in it before is dead, whatever its connection looks like."""
        if not session.hello.seat:
            return
        if not self._seated_from_log:
            self._seated_from_log = True
            self._sit_down()
        seat = Seat(session.hello.host, session.hello.seat)
        before = self._seats.get(seat)
        self._seats[seat] = Sitter(session.boot, session.node)
        if before is None or before.boot == session.boot:
            return
        why = f"another agent sits in its seat on {seat.host}"
        if before.node in self._master.state.nodes.nodes:
            self._part(before.node, why)
        elif before.boot in self._sessions.standbys:
            self._sessions.standbys[before.boot].end(why)

    # ---- who becomes what

    def _wait(self, session: Session) -> None:
        """A standby is there: it gets the node promised on its lost connection, or a wanted node, or waits."""
        if not self._master.state.job.live:
            return
        self._waiting.setdefault(session.hello.place, {})[session.boot] = session
        promised = self._promised_to.get(session.boot)
        if promised is not None:
            self._assign(promised, session)
        else:
            self._offer(session)

    def _wish(self, launch: NodeLaunch, at: float) -> None:
        """Assign the node to the best standby, or remember that it is wanted."""
        now = asyncio.get_running_loop().time()
        best, fits = None, False
        for session in self._fitting(launch):
            fits = True
            if session.hello.host in launch.avoid and now < at + self._master.state.job.spec.last_call_s:
                continue
            merit = self._merit(session, launch, now)
            if best is None or merit < best[0]:
                best = merit, session
            if not any(merit):
                break
        if best is not None and self._master.may_order():
            self._assign(launch.node, best[1])
            return
        self._wishes[launch.node] = at
        if fits:
            self._look_again(at)

    def _fitting(self, launch: NodeLaunch) -> Iterator[Session]:
        for place in (launch.index, -1):
            for session in self._waiting.get(place, {}).values():
                if session.hello.nproc == launch.nproc:
                    yield session

    def _merit(self, session: Session, launch: NodeLaunch, now: float) -> tuple[bool, bool]:
        """Sort key of a standby: smaller is better, and of equals the first."""
        silent = now - session.heard_at > FRESH_BEATS * self._master.state.job.spec.heartbeat_s
        return session.hello.host in launch.avoid, silent

    def _offer(self, session: Session) -> None:
        """A standby is free: assign it the first wanted node that it can be."""
        now, last_call_s = asyncio.get_running_loop().time(), self._master.state.job.spec.last_call_s
        wanted, chosen, stale = self._launchable(), "", []
        for node, at in self._wishes.items():
            launch = wanted.get(node)
            if launch is None:
                stale.append(node)
            elif _fits(session.hello, launch):
                if session.hello.host not in launch.avoid or now >= at + last_call_s:
                    chosen = node
                    break
                self._look_again(at)
        for node in stale:
            del self._wishes[node]
        if chosen and self._master.may_order():
            del self._wishes[chosen]
            self._assign(chosen, session)

    def _launchable(self) -> Mapping[str, NodeLaunch]:
        """The nodes that should exist and do not, by name; cached for the present desired state."""
        desired = self._master.desired
        if self._known_of is not desired:
            self._known_of, self._known = desired, {launch.node: launch for launch in desired.launch}
        return self._known

    def _look_again(self, at: float) -> None:
        """Assign wanted nodes to avoided hosts once they have been wanted long enough."""
        if self._again is None:
            loop = asyncio.get_running_loop()
            self._again = loop.call_at(at + self._master.state.job.spec.last_call_s + 1e-6, self._retry)

    def resumed(self) -> None:
        """Orders may be given again: missing nodes get their time once more, and wanted nodes meet waiting standbys."""
        self._away.resumed()
        self._retry()

    def _retry(self) -> None:
        if self._again is not None:
            self._again.cancel()
        self._again = None
        for session in [one for waiting in self._waiting.values() for one in waiting.values()]:
            self._offer(session)

    def _assign(self, node: str, session: Session) -> None:
        self._promises[node] = session
        self._promised_to[session.boot] = node
        self._waiting[session.hello.place].pop(session.boot, None)
        log.info("standby assigned", node=node, host=session.hello.host, peer=session.connection.peer)
        session.push(Assigned(self._master.token, node))
        loop = asyncio.get_running_loop()
        loop.call_later(GREETING_S, self._expire, node, session, loop.time())

    def _expire(self, node: str, session: Session, since: float) -> None:
        loop = asyncio.get_running_loop()
        if self._promises.get(node) is not session:
            return
        if loop.time() - since > GREETING_S + LATE_S:
            loop.call_later(RETURN_S, self._expire, node, session, loop.time())
        else:
            session.end(f"it did not become {node} within {GREETING_S:g} s")
            self._withdraw(session)

    def _withdraw(self, session: Session) -> None:
        """A standby is gone: the node that it was assigned goes to the next one at once."""
        waiting = self._waiting.get(session.hello.place, {})
        if waiting.get(session.boot) is session:
            del waiting[session.boot]
        node = self._promised_to.get(session.boot, "")
        if self._promises.get(node) is session:
            del self._promises[node], self._promised_to[session.boot]
            launch = self._launchable().get(node)
            if launch is not None:
                self._wish(launch, asyncio.get_running_loop().time())


def _fits(hello: Hello, launch: NodeLaunch) -> bool:
    return hello.nproc == launch.nproc and hello.place in (-1, launch.index)
