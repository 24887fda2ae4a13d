"""The rendezvous: a scheduler for jobs whose hosts come by themselves.

Every host keeps one agent that dials the master and waits as a *standby*. To launch a node is to tell a standby that it is
that node; what a scheduler would see of its machines is read off the agents' sessions:

* A goodbye, or a connection that the agent's kernel ended and that is not back within ``gone_s``: its process is dead, the
  node is gone. A living agent reconnects at once. Where more than half of all nodes go at one moment (the only one, too) it is
  rather the network or this master, and they get as long as an agent that tries again needs at most; counted anew from when
  somebody is connected again, where nobody was left, not even a standby.
* A second agent in the same seat proves that the first one is dead; across masters and restarts of whole hosts too.
* Everything else is silence, and silence is not death: `dlrover_core.rules.silence` judges it.

Which standby: one whose place is asked for by index first, then the one that has waited longest, for it is the warmest; those
that have fallen silent, and those on hosts to be avoided, come last. A standby on an avoided host is taken only after the node
has been wanted for ``last_call_s``: better a doubtful host than no world, better a good one than a doubtful one at once.
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
from dlrover_core.runtime.leader import Leader
from dlrover_core.runtime.masters import RETRY_MAX_S
from dlrover_core.runtime.messages import Assigned, Goodbye, Hello
from dlrover_core.runtime.sessions import GREETING_S, Session, Sessions

# An agent that lost its master is back within this: its longest pause, and half as long again for dialling.
RETURN_S = RETRY_MAX_S * 1.5
FRESH_BEATS = 3
# A timer that is later than this was held up with the whole master.
LATE_S = 0.2

log = structlog.get_logger("dlrover.master")


class Seat(NamedTuple):
    """Where at most one living agent is: a lock on its host says so."""

    host: str
    seat: str


class Sitter(NamedTuple):
    """Who was last seen in a seat; a standby has no ``node``."""

    boot: int
    node: str


class Rendezvous:
    """The `Backend` and the `Reception` of a joining job, over its master's own sessions."""

    def __init__(self, master: Leader, sessions: Sessions) -> None:
        self._master = master
        self._sessions = sessions
        self._sessions.reception = self
        # Nodes that wait for a standby, since when by the loop's clock.
        self._wishes: dict[str, float] = {}
        # Standbys without a promise, by the place they ask for and by boot, the oldest first.
        self._waiting: dict[int, dict[int, Session]] = {}
        self._promises: dict[str, Session] = {}
        self._promised_to: dict[int, str] = {}
        self._known_of: Desired | None = None
        self._known: Mapping[str, NodeLaunch] = {}
        # Nodes whose agent this master has seen, by the boot of that agent.
        self._holders: dict[str, int] = {}
        self._seats: dict[Seat, Sitter] = {}
        self._seated_from_log = False
        self._leaving: dict[str, asyncio.TimerHandle] = {}
        # Who is to go, and why, once it is known again that this master leads.
        self._held_back: dict[str, str] = {}
        # When somebody came though nobody else was connected, and some were missed.
        self._found_at = -RETURN_S
        # Said to be gone, and not yet out of the state.
        self._gone: set[str] = set()
        self._news: asyncio.Queue[Changed] = asyncio.Queue()
        self._again: asyncio.TimerHandle | None = None
        self._token = 0

    # ---- the backend

    async def launch(self, node: NodeLaunch, token: int) -> None:
        """Assign the node to a standby, now or as soon as one comes. Never refused: hosts may come at any time."""
        self._fence(token, f"launch {node.node}")
        if node.node in self._promises or node.node in self._holders or node.node in self._wishes:
            return
        self._wish(node, asyncio.get_running_loop().time())

    async def delete(self, name: str, token: int, grace_s: float) -> None:
        """Tell the agent to leave. One that cannot be told is gone for us: it hears it when it comes back."""
        self._fence(token, f"delete {name}")
        node = name.removeprefix(f"{self._master.state.job.name}-")
        self._wishes.pop(node, None)
        session = self._sessions.of(node)
        if session is not None:
            state = self._master.state
            # Its own order, if it has one, knows of more grace.
            order = self._master.orders.get(node) or (STRANGER if state.job.live else farewell(state))
            session.tell(token, order)
        if node not in self._leaving:
            wait_s = grace_s + self._master.state.job.spec.kill_wait_s + GREETING_S if session else RETURN_S
            self._part_in(node, wait_s, "it did not answer when it was told to leave")

    async def observe(self) -> AsyncIterator[Listed | Changed]:
        """`Listed` at once; joined nodes whose agents have not come back to this master run, for all that is known.

        What happened before comes after it: nobody may have listened yet, and of a planned node its absence says nothing.
        """
        yield Listed(tuple(self._listing()))
        while True:
            yield await self._news.get()

    async def room(self, group: str) -> int | None:
        """How many standbys wait that could be nodes of the group."""
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
                # It has left, or was given up, before this master came; if it lives it will be told to leave.
                continue
            if not here and not (node.joined and node.state in COMING):
                self._part_in(node.node, RETURN_S, "its agent did not come back to the new master")
            yield self._seen(node.node, "running" if node.state not in ("planned", "pending") else "pending")

    def _seen(self, node: str, phase: str, reason: str = "") -> Observation:
        session, known = self._sessions.of(node), self._master.state.nodes.nodes.get(node)
        host = session.hello.host if session is not None else known.host if known is not None else ""
        return Observation(full_name(self._master.state, node), phase, reason=reason, host=host)

    def _say(self, node: str, phase: str, reason: str = "") -> None:
        self._news.put_nowait(Changed(self._seen(node, phase, reason)))

    # ---- the reception

    def refusal(self, hello: Hello) -> Goodbye | None:
        """Standbys that no group can use are told why; so is an agent whose name is another's by now."""
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
        if self._leaving and len(self._sessions) == 1:
            self._found_at = asyncio.get_running_loop().time()
        self._sit(session)
        node = session.node
        if not node:
            self._wait(session)
            return
        self._promises.pop(node, None)
        self._promised_to.pop(session.boot, None)
        self._wishes.pop(node, None)
        self._stay(node)
        self._holders[node] = session.boot
        known = self._master.state.nodes.nodes.get(node)
        if known is not None and known.state == "planned":
            self._say(node, "pending")

    def went(self, session: Session, ended: bool) -> None:
        """A connection is over: what that means, or for how long we wait before it means it."""
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
            why = "its agent died: the kernel ended its connection"
            self._part_in(node, self._master.state.job.spec.gone_s, why, doubt=True)
        elif known is None or known.released or known.state not in COMING or not known.joined:
            self._part_in(node, RETURN_S, "its agent is away, and nothing is expected of it")

    # ---- who goes

    def _part_in(self, node: str, seconds: float, why: str, *, doubt: bool = False) -> None:
        """Unless its agent is back by then, the node is gone; with ``doubt`` only where it is likely that it died."""
        loop = asyncio.get_running_loop()
        self._stay(node)
        self._leaving[node] = loop.call_later(seconds, self._due, node, why, loop.time(), seconds, doubt)

    def _due(self, node: str, why: str, since: float, seconds: float, doubt: bool) -> None:
        waited = asyncio.get_running_loop().time() - since
        doubt = doubt and self._expected(node)
        if not self._master.may_order():
            self._stay(node)
            self._held_back[node] = why
        elif waited > seconds + LATE_S:
            # This master was stopped meanwhile: whoever came back then is still waiting at the door.
            self._part_in(node, RETURN_S, why, doubt=doubt)
        elif doubt and self._deserted():
            self._part_in(node, RETURN_S, why, doubt=True)
        elif doubt and seconds < RETURN_S and self._too_many():
            self._part_in(node, RETURN_S, f"{why}; so did most others", doubt=True)
        else:
            self._part(node, why)

    def _expected(self, node: str) -> bool:
        """Is it, for all that the log knows, at work?"""
        known = self._master.state.nodes.nodes.get(node)
        return self._master.state.job.live and known is not None and known.joined and not known.released

    def _deserted(self) -> bool:
        """Is nobody connected, or was nobody a moment ago? Then who is away says nothing of who is dead: silence will."""
        return not len(self._sessions) or asyncio.get_running_loop().time() - self._found_at < RETURN_S

    def _too_many(self) -> bool:
        """Are more than half of all nodes going at once?"""
        joined = [node.node for node in self._master.state.nodes.nodes.values() if node.joined]
        going = sum(node in self._leaving and self._sessions.of(node) is None for node in joined)
        return going * 2 > len(joined)

    def _stay(self, node: str) -> None:
        self._held_back.pop(node, None)
        timer = self._leaving.pop(node, None)
        if timer is not None:
            timer.cancel()

    def _part(self, node: str, why: str) -> None:
        """It is gone: whoever comes back under its name is a stranger."""
        self._stay(node)
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
        """Who sat where when the last master led."""
        state = self._master.state
        for node in state.nodes.nodes.values():
            sender = state.senders.get(node.node)
            if node.joined and node.seat and sender is not None:
                self._seats.setdefault(Seat(node.host, node.seat), Sitter(sender.boot, node.node))

    def _sit(self, session: Session) -> None:
        """Take a seat. Whoever was seen in it before is dead, whatever its connection looks like."""
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
        """A standby is there: it gets what it was promised on a connection that it has lost, or what is wished for, or waits."""
        if not self._master.state.job.live:
            return
        self._waiting.setdefault(session.hello.place, {})[session.boot] = session
        promised = self._promised_to.get(session.boot)
        if promised is not None:
            self._assign(promised, session)
        else:
            self._offer(session)

    def _wish(self, launch: NodeLaunch, at: float) -> None:
        """Give the node to the best standby there is, or remember it."""
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
        """Smaller is better; of equals the first."""
        silent = now - session.heard_at > FRESH_BEATS * self._master.state.job.spec.heartbeat_s
        return session.hello.host in launch.avoid, silent

    def _offer(self, session: Session) -> None:
        """A standby is free: give it the first node that waits and that it can be."""
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
        """The nodes that should exist and do not, by name; worked out once for what is desired."""
        desired = self._master.desired
        if self._known_of is not desired:
            self._known_of, self._known = desired, {launch.node: launch for launch in desired.launch}
        return self._known

    def _look_again(self, at: float) -> None:
        """Hosts to be avoided may be taken once the wish is so old."""
        if self._again is None:
            loop = asyncio.get_running_loop()
            self._again = loop.call_at(at + self._master.state.job.spec.last_call_s + 1e-6, self._retry)

    def resumed(self) -> None:
        """What was held back comes due: who is to go gets the time to come back once more, wishes meet who waits."""
        for node, why in list(self._held_back.items()):
            self._part_in(node, RETURN_S, why, doubt=True)
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
        """A standby is gone: the node it was told to be is the next one's, at once."""
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
