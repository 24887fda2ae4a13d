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
HELD = "the queue is held"


@dataclass(slots=True)
class Pod:
    """A node as the scheduler knows it.

    ``stuck``: it will never be placed. ``flaps``: it is shown as gone. ``lost``: its host cannot be reached, so nothing new is
    seen of it; ``unseen`` is how it has ended meanwhile. ``waits``: why it is on no host. ``notice``: why it will be taken away,
    at ``goes_at``.
    """

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
    lost: bool = False
    unseen: tuple[int, str] | None = None
    waits: str = ""
    notice: str = ""
    goes_at: int = 0

    def seen(self, now: int) -> Observed:
        """As an observer is told."""
        host, rack = (self.host.name, f"rack-{self.host.rack}") if self.host is not None else ("", "")
        phase = "lost" if self.lost and self.phase == "running" else self.phase
        reason = "its host does not answer" if phase == "lost" else self.reason
        left_us = max(1, self.goes_at - now) if self.notice else 0
        return Observed(
            self.launch.node,
            phase,
            self.exit_code,
            reason,
            host,
            rack=rack,
            waits=self.waits,
            notice=self.notice,
            notice_us=left_us,
        )


@dataclass(slots=True)
class Lies:
    """What is wrong with the scheduler's word: the next launches that fail though they succeed, or never start; until when
    there is no quota, and until when nobody is placed.
    """

    errors: int = 0
    stuck: int = 0
    no_quota_until: int = -1
    held_until: int = -1


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
        host = self._sim.hosts.find(pod.launch.avoid) if not self._held else None
        if host is None:
            self._waiting.append(pod)
            self._wait(pod, HELD if self._held else self._sim.hosts.why_not())
            return
        self._wait(pod, "")
        pod.host = host
        self._sim.hosts.take(host, pod.launch.node)
        self._sim.clock.later(us(self._sim.scenario.boot_s), pod.key, self._boot, pod, host)

    @property
    def _held(self) -> bool:
        return self._sim.clock.now < self.lies.held_until

    def _wait(self, pod: Pod, why: str) -> None:
        if pod.waits != why:
            before = self._seen(pod)
            pod.waits = why
            self._changed(pod, before)

    def hold(self, for_us: int) -> None:
        """Place nobody for so long."""
        self.lies.held_until = max(self.lies.held_until, self._sim.clock.now + for_us)
        self._sim.clock.at(self.lies.held_until, key_of(HELD), self._place_waiting)

    def _place_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        for pod in waiting:
            if self.pods.get(pod.launch.name) is pod and not pod.deleting:
                self._place(pod)

    def _boot(self, pod: Pod, host: Host) -> None:
        if pod.phase != "pending" or pod.host is not host:
            return
        before = self._seen(pod)
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
        if self.pods.get(pod.launch.name) is not pod or pod.lost:
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
        if pod.lost:
            pod.unseen = code, reason
            return
        before = self._seen(pod)
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
        if self.pods.get(pod.launch.name) is not pod or pod.lost:
            return
        before = self._seen(pod)
        pod.phase = "gone"
        del self.pods[pod.launch.name]
        self._changed(pod, before)
        self._sim.look()

    def lose(self, pod: Pod) -> None:
        """The host of a running node cannot be reached: what becomes of the node is not seen, and it cannot be ended."""
        if self.pods.get(pod.launch.name) is pod and pod.phase == "running" and not pod.lost:
            before = self._seen(pod)
            pod.lost = True
            self._changed(pod, before)

    def reach(self, pod: Pod) -> None:
        """Its host can be reached again."""
        if self.pods.get(pod.launch.name) is not pod or not pod.lost:
            return
        before, pod.lost = self._seen(pod), False
        self._changed(pod, before)
        if pod.unseen is not None:
            self._end_seen(pod, *pod.unseen)
        elif pod.deleting:
            self._kill(pod)

    def warn(self, pod: Pod, notice: str, goes_at: int = 0) -> None:
        """Say that a node will be taken away then; without a notice that it will not."""
        if self.pods.get(pod.launch.name) is pod and pod.phase == "running":
            before = self._seen(pod)
            pod.notice, pod.goes_at = notice, goes_at
            self._changed(pod, before)

    def flap(self, pod: Pod, for_us: int) -> None:
        """Call a running node gone, and running again after so long."""
        pod.flaps = True
        self._say(self._seen(pod)._replace(phase="gone", reason="lost"))
        self._sim.clock.later(for_us, pod.key, self._flapped, pod)

    def _flapped(self, pod: Pod) -> None:
        if pod.flaps and self.pods.get(pod.launch.name) is pod:
            pod.flaps = False
            self._say(self._seen(pod))

    # ---- what is told

    def _changed(self, pod: Pod, before: Observed | None) -> None:
        if self._journal is not None:
            now = self._sim.clock.now
            while self._journal and self._journal[0][0] < now - JOURNAL_US:
                self._journal.popleft()
            self._journal.append((now, pod.launch.node, before))
        self._say(self._seen(pod))

    def _seen(self, pod: Pod) -> Observed:
        return pod.seen(self._sim.clock.now)

    def _say(self, seen: Observed) -> None:
        if self.tell is not None:
            self.tell(seen)

    def listed(self, ago_us: int = 0) -> tuple[Observed, ...]:
        """Everything there is, or was a while ago."""
        there = {pod.launch.node: self._seen(pod) for pod in self.pods.values() if not pod.flaps}
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
