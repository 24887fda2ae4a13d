"""Links between nodes and masters: what is said on them arrives later, in order; or late, twice, crossed, or never.

A link that is silent loses nothing for good by itself: what was sent arrives when it heals, as TCP sends it again, unless one
end has given the connection up meanwhile. Only a reset takes frames with it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from dlrover_core.kernel.engine import Command
from dlrover_core.sim.agents import Agent
from dlrover_core.sim.clock import SECOND_US, Clock
from dlrover_core.sim.links import Frame, Link
from dlrover_core.sim.peers import Leader
from dlrover_core.sim.scenario import Scenario
from dlrover_core.spec import JobSpec, us

CROSSED_US = 2 * SECOND_US
"""A frame that is overtaken comes so much later."""
SYN_US = 2 * SECOND_US
"""Nobody answers at all: TCP itself tries again after about so long."""


class Site(Protocol):
    """What the network needs of a run."""

    clock: Clock
    spec: JobSpec
    scenario: Scenario

    @property
    def leader(self) -> Leader[Agent] | None:
        """Who leads."""
        ...


class Network:
    """All links, and who waits for somebody to lead."""

    def __init__(self, sim: Site) -> None:
        self._sim, self._clock = sim, sim.clock
        self._network_us = us(sim.scenario.network_s)
        self._links: dict[str, Link] = {}
        self._waiting: list[Agent] = []

    def link(self, node: str) -> Link:
        """A node's link. An incarnation has its own."""
        found = self._links.get(node)
        if found is None:
            found = self._links[node] = Link(node)
        return found

    # ---- frames

    def report(self, agent: Agent, number: int, command: Command) -> None:
        """A numbered command is on its way to the leader that the agent talks to."""
        leader, link = agent.leader, agent.link
        if leader is None:
            return
        if link.clean:
            self._clock.later(self._network_us, agent.key, leader.receive, agent, agent.connection, number, command)
            return
        if link.losses:
            link.losses -= 1
            self.reset(agent)
            return
        frame = (leader.receive, (agent, agent.connection, number, command))
        if link.closed_to_master or link.black:
            link.held_to_master.append(frame)
            return
        late = CROSSED_US if link.swaps % 2 else 0
        link.swaps -= bool(link.swaps)
        self._up(link, frame, late)
        if link.doubles:
            link.doubles -= 1
            self._up(link, frame, 0)

    def _up(self, link: Link, frame: Frame, late_us: int) -> None:
        at = self._clock.now + self._network_us + link.extra_us
        if late_us:
            at += late_us
        else:
            at = link.up_at = max(at, link.up_at)
        self._clock.at(at, link.key, frame[0], *frame[1])

    def to_node(self, agent: Agent, call: Callable[..., None], *args: Any) -> None:
        """Something is on its way to an agent."""
        link = agent.link
        if link.closed_to_node:
            link.held_to_node.append((call, args))
        elif not link.black:
            link.down_at = max(self._clock.now + self._network_us + link.extra_us, link.down_at)
            self._clock.at(link.down_at, link.key, call, *args)

    @property
    def hop_us(self) -> int:
        """One frame, one way, on a clean link."""
        return self._network_us

    # ---- connections

    def dial(self, agent: Agent) -> None:
        """An agent asks whoever leads to be taken in."""
        link, leader = agent.link, self._sim.leader
        if link.black:
            return
        if link.closed_to_master or link.closed_to_node:
            self._clock.later(SYN_US, link.key, agent.dial)
        elif link.cut or leader is None or not leader.serving:
            if self._sim.scenario.hosted_masters and not link.cut:
                # A standby keeps it until somebody leads.
                self._waiting.append(agent)
            else:
                agent.no_answer()
        else:
            self._clock.later(self._network_us + link.extra_us, link.key, leader.hello, agent)

    def leads(self) -> None:
        """Somebody leads now: whom a standby keeps is sent there."""
        waiting, self._waiting = self._waiting, []
        for agent in waiting:
            self._clock.later(self._network_us, agent.key, agent.dial)

    def reset(self, agent: Agent) -> None:
        """A connection ends with a reset at both ends."""
        agent.link.held_to_master.clear()
        agent.link.held_to_node.clear()
        if agent.connection:
            agent.disconnected(agent.connection)

    def hang_up(self, agent: Agent) -> None:
        """An agent's process is gone: its kernel ends its connection."""
        if agent.leader is not None:
            agent.leader.closed(agent)
        agent.connection = 0

    # ---- faults

    def partition(self, agent: Agent, for_us: int) -> None:
        """Cut a link with a reset, for a while."""
        link = agent.link
        link.clean, link.cut, link.cuts = False, True, link.cuts + 1
        self._clock.later(for_us, link.key, self._mend, link, link.cuts)
        self.reset(agent)

    def _mend(self, link: Link, cuts: int) -> None:
        if link.cuts == cuts:
            link.cut = False

    def drop(self, agent: Agent, for_us: int, *, to_master: bool, to_node: bool) -> None:
        """Frames vanish, in one direction or both, and nobody is told, for a while."""
        link = agent.link
        link.clean = False
        link.closed_to_master += to_master
        link.closed_to_node += to_node
        if to_master and agent.leader is not None:
            agent.leader.unheard(agent.node)
        # Without a word from its master an agent hangs up; so does it when nobody answers what it says.
        silence_us = us(self._sim.spec.silence_s + self._sim.spec.heartbeat_s)
        self._clock.later(silence_us, link.key, self._given_up, agent, agent.connection)
        self._clock.later(for_us, link.key, self._heal, agent, to_master, to_node)

    def _given_up(self, agent: Agent, connection: int) -> None:
        if agent.link.closed_to_node or agent.link.closed_to_master:
            agent.link.held_to_master.clear()
            agent.link.held_to_node.clear()
            agent.disconnected(connection)

    def _heal(self, agent: Agent, to_master: bool, to_node: bool) -> None:
        link = agent.link
        link.closed_to_master -= to_master
        link.closed_to_node -= to_node
        if not link.closed_to_master:
            held, link.held_to_master = link.held_to_master, []
            for frame in held:
                self._up(link, frame, 0)
            if agent.connection and agent.leader is not None and not agent.ended and not agent.frozen:
                agent.leader.heard(agent.node)
        if not link.closed_to_node:
            held, link.held_to_node = link.held_to_node, []
            for call, args in held:
                self.to_node(agent, call, *args)

    def delay(self, agent: Agent, extra_us: int, for_us: int) -> None:
        """Every frame takes so much longer, for a while."""
        agent.link.clean = False
        agent.link.extra_us += extra_us
        self._clock.later(for_us, agent.link.key, self._hurry, agent.link, extra_us)

    def _hurry(self, link: Link, extra_us: int) -> None:
        link.extra_us -= extra_us
