"""A simulated scheduler: it starts nodes on hosts, sees them end, deletes them; and lies, if told to.

It tells whoever leads of every change, and lists everything for a new leader. A node ends for it ``notice_s`` after it ended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from dlrover_core.errors import LaunchRefused
from dlrover_core.job.nodes import Observed
from dlrover_core.job.orders import NodeLaunch
from dlrover_core.sim.agents import Agent, Agents
from dlrover_core.sim.clock import SECOND_US, Clock, key_of
from dlrover_core.sim.hosts import Host, Hosts
from dlrover_core.sim.scenario import Plan, Scenario
from dlrover_core.spec import us

JOURNAL_US = 3600 * SECOND_US


@dataclass(slots=True)
class Pod:
    """A node as the scheduler knows it. ``stuck``: it will never be placed. ``flaps``: it is shown as gone."""

    launch: NodeLaunch
    key: int
    phase: str = "pending"
    exit_code: int = 0
    reason: str = ""
    host: Host | None = None
    agent: Agent | None = None
    stuck: bool = False
    flaps: bool = False
    deleting: bool = False

    def seen(self) -> Observed:
        """As an observer is told."""
        host, rack = (self.host.name, f"rack-{self.host.rack}") if self.host is not None else ("", "")
        return Observed(self.launch.node, self.phase, self.exit_code, self.reason, host, rack=rack)


@dataclass(slots=True)
class Lies:
    """What is wrong with the scheduler's word: the next launches that fail though they succeed, or never start; until when
    there is no quota.
    """

    errors: int = 0
    stuck: int = 0
    no_quota_until: int = -1


class Site(Protocol):
    """What the scheduler needs of a run."""

    clock: Clock
    plan: Plan
    scenario: Scenario
    hosts: Hosts
    agents: Agents

    def look(self) -> None:
        """Is it over?"""
        ...


class Scheduler:
    """All nodes there are. ``tell`` is the leader's ear, while there is a leader."""

    def __init__(self, sim: Site) -> None:
        self._sim = sim
        self.pods: dict[str, Pod] = {}
        self._used: set[str] = set()
        self._token = 0
        self._waiting: list[Pod] = []
        self.lies = Lies()
        self.tell: Callable[[Observed], None] | None = None
        self._journal: deque[tuple[int, str, Observed | None]] | None = (
            deque() if any(fault.kind == "stale_list" for fault in sim.plan.faults) else None
        )
        sim.hosts.back = self._place_waiting

    # ---- what a master asks

    def _fence(self, token: int) -> None:
        if token < self._token:
            raise PermissionError(f"token {token} is older than {self._token}")
        self._token = token

    def launch(self, launch: NodeLaunch, token: int) -> None:
        """Start a node, once per name. Raises `LaunchRefused` without quota; and where it lies, though it starts it."""
        self._fence(token)
        if self._sim.clock.now < self.lies.no_quota_until:
            raise LaunchRefused("quota exceeded", permanent=False)
        if launch.name not in self._used:
            self._create(launch)
        if self.lies.errors:
            self.lies.errors -= 1
            raise TimeoutError("the answer was lost")

    def _create(self, launch: NodeLaunch) -> None:
        self._used.add(launch.name)
        pod = self.pods[launch.name] = Pod(launch, key_of(launch.node))
        if self.lies.stuck:
            self.lies.stuck -= 1
            pod.stuck = True
        self._changed(pod, None)
        if not pod.stuck:
            self._place(pod)

    def _place(self, pod: Pod) -> None:
        host = self._sim.hosts.find(pod.launch.avoid)
        if host is None:
            self._waiting.append(pod)
            return
        pod.host = host
        self._sim.hosts.take(host, pod.launch.node)
        self._sim.clock.later(us(self._sim.scenario.boot_s), pod.key, self._boot, pod, host)

    def _place_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        for pod in waiting:
            if self.pods.get(pod.launch.name) is pod and not pod.deleting:
                self._place(pod)

    def _boot(self, pod: Pod, host: Host) -> None:
        if pod.phase != "pending" or pod.host is not host:
            return
        before = pod.seen()
        pod.phase = "running"
        pod.agent = self._sim.agents.begin(pod.launch, host)
        self._changed(pod, before)

    def delete(self, name: str, token: int, grace_s: float) -> None:
        """Delete a node; one that runs may end by itself within the grace. An unknown name is fine."""
        self._fence(token)
        pod = self.pods.get(name)
        if pod is None or pod.deleting:
            return
        pod.deleting = True
        if pod.phase == "pending":
            self._free(pod)
            self._sim.clock.later(0, pod.key, self._gone, pod)
        elif pod.agent is None or pod.agent.ended:
            self._sim.clock.later(0, pod.key, self._gone, pod)
        else:
            self._sim.clock.later(us(grace_s), pod.key, self._kill, pod)

    def _kill(self, pod: Pod) -> None:
        if self.pods.get(pod.launch.name) is not pod:
            return
        if pod.agent is not None and not pod.agent.ended:
            if pod.host is not None and pod.host.down_until > self._sim.clock.now:
                # Nobody can reach it there, and nobody knows: as soon as it is seen it goes.
                return
            pod.agent.killed()
            self._free(pod)
        self._gone(pod)

    # ---- what happens

    def ended(self, pod: Pod, code: int, reason: str, after_us: int) -> None:
        """Its agent has ended; that is seen after so long."""
        self._free(pod)
        self._sim.clock.later(after_us, pod.key, self._end_seen, pod, code, reason)

    def left(self, name: str) -> None:
        """The agent of this node has ended by itself, well."""
        pod = self.pods.get(name)
        if pod is not None:
            self.ended(pod, 0, "", us(self._sim.scenario.notice_s))

    def _end_seen(self, pod: Pod, code: int, reason: str) -> None:
        if self.pods.get(pod.launch.name) is not pod or pod.phase not in ("pending", "running"):
            return
        before = pod.seen()
        pod.phase, pod.exit_code, pod.reason = "failed" if code else "succeeded", code, reason
        pod.flaps = False
        self._changed(pod, before)
        if pod.deleting:
            self._gone(pod)

    def _free(self, pod: Pod) -> None:
        if pod.host is not None and self._sim.hosts.free(pod.host, pod.launch.node):
            # Whoever waits for a host is placed in a turn of its own.
            self._sim.clock.later(0, pod.key, self._place_waiting)

    def _gone(self, pod: Pod) -> None:
        if self.pods.get(pod.launch.name) is not pod:
            return
        before = pod.seen()
        pod.phase = "gone"
        del self.pods[pod.launch.name]
        self._changed(pod, before)
        self._sim.look()

    def flap(self, pod: Pod, for_us: int) -> None:
        """Call a running node gone, and running again after so long."""
        pod.flaps = True
        self._say(pod.seen()._replace(phase="gone", reason="lost"))
        self._sim.clock.later(for_us, pod.key, self._flapped, pod)

    def _flapped(self, pod: Pod) -> None:
        if pod.flaps and self.pods.get(pod.launch.name) is pod:
            pod.flaps = False
            self._say(pod.seen())

    # ---- what is told

    def _changed(self, pod: Pod, before: Observed | None) -> None:
        if self._journal is not None:
            now = self._sim.clock.now
            while self._journal and self._journal[0][0] < now - JOURNAL_US:
                self._journal.popleft()
            self._journal.append((now, pod.launch.node, before))
        self._say(pod.seen())

    def _say(self, seen: Observed) -> None:
        if self.tell is not None:
            self.tell(seen)

    def listed(self, ago_us: int = 0) -> tuple[Observed, ...]:
        """Everything there is, or was a while ago."""
        there = {pod.launch.node: pod.seen() for pod in self.pods.values() if not pod.flaps}
        for at, node, before in reversed(self._journal or ()) if ago_us else ():
            if at < self._sim.clock.now - ago_us:
                break
            there.pop(node, None)
            if before is not None:
                there[node] = before
        return tuple(there[node] for node in sorted(there))

    @property
    def stuck(self) -> bool:
        """Is somebody kept waiting for nothing, or about to be?"""
        return self.lies.stuck > 0 or any(pod.stuck for pod in self.pods.values())

    @property
    def empty(self) -> bool:
        """Is nothing of the job left?"""
        return not self.pods
