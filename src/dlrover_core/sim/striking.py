"""Faults, as they come: which is awaited, when its moment is there, and what it does to whom.

A number counts around those whom its kind can strike at that moment, in the order of their names. Where there is nobody at all
the fault is missed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from dlrover_core.job import job, operations
from dlrover_core.job.sets import Sets
from dlrover_core.job.state import JobState
from dlrover_core.kernel.events import Record
from dlrover_core.sim import triggers
from dlrover_core.sim.agents import Agent, Agents
from dlrover_core.sim.clock import SECOND_US, Clock, key_of
from dlrover_core.sim.faults import ENGINE, KINDS, Fault, amount, kinds
from dlrover_core.sim.hosts import Host, Hosts
from dlrover_core.sim.leading import Leader
from dlrover_core.sim.log import Log
from dlrover_core.sim.network import Network
from dlrover_core.sim.scenario import Plan, Scenario
from dlrover_core.sim.scheduler import Pod, Scheduler
from dlrover_core.sim.training import Training
from dlrover_core.spec import JobSpec, us

SIGKILL, SIGTERM = -9, -15
DELAYED_S = 60.0
REPAIR_S = 3600.0
ASK_AGAIN_S = 1.0
FAILED = "RuntimeError: chaos"
PREEMPTION = "preemption"
# Faults that wait for each other strike in the order of the plan, whatever the seed.
_KEY = key_of("faults")
_T = TypeVar("_T")


class Site(Protocol):
    """What faults strike in a run."""

    clock: Clock
    plan: Plan
    scenario: Scenario
    spec: JobSpec
    sets: Sets
    agents: Agents
    hosts: Hosts
    log: Log
    network: Network
    scheduler: Scheduler
    training: Training
    trainings: dict[str, Training]
    leader: Leader | None
    standbys: int
    skew_us: int
    over: bool

    def phase(self) -> str:
        """What the job is at, in a word."""
        ...

    def training_of(self, node: str) -> Training:
        """The workers of a node's coupling set."""
        ...

    def crash(self, after_us: int) -> bool:
        """The leader's process is killed."""
        ...

    def pause_leader(self, for_us: int) -> bool:
        """The leader's process is stopped."""
        ...

    def relist(self, ago_us: int) -> bool:
        """The scheduler's stream of changes breaks."""
        ...


class Strikes:
    """The faults of a plan, in order. ``newest`` is what struck last, in its own words."""

    def __init__(self, sim: Site) -> None:
        self._sim, self._clock = sim, sim.clock
        self.struck: list[tuple[Fault, int]] = []
        self.missed: list[Fault] = []
        self.hits: dict[tuple[str, str], int] = {}
        self.newest = ""
        self.healed_at = 0
        self._triggers = [triggers.parse(fault.at) for fault in sim.plan.faults]
        self._next = self._coming = 0
        self._gone: set[int] = set()
        self._wishes: list[tuple[object, ...]] = []
        self._by_kind: dict[str, Callable[[Fault], bool]] = {kind: getattr(self, f"_{kind}") for kind in kinds(ENGINE)}

    # ---- when

    def begin(self) -> None:
        """Faults at a time come at that time; each other one is awaited from the fault before it on."""
        for place, (fault, trigger) in enumerate(zip(self._sim.plan.faults, self._triggers, strict=True)):
            if trigger.kind == "time":
                self._clock.at(trigger.number, key_of(f"fault {fault}"), self._strike, place)
        self._arm()

    @property
    def _awaited(self) -> triggers.Trigger | None:
        return self._triggers[self._next] if self._next < len(self._triggers) else None

    def _arm(self) -> None:
        while self._next in self._gone:
            self._next += 1
        awaited = self._awaited
        if awaited is not None and awaited.kind == "step":
            if self._sim.training.step_now() >= awaited.number:
                self._hit()
            else:
                self._sim.training.await_step(awaited.number)
        elif awaited is not None and awaited.kind == "seq" and self._sim.log.seq >= awaited.number:
            self._hit()
        elif awaited is not None and awaited.kind == "state":
            self._clock.later(0, _KEY, self.look)

    def step_made(self) -> None:
        """Training has made the step that was awaited."""
        awaited = self._awaited
        if awaited is not None and awaited.kind == "step":
            self._hit()

    def durable(self, record: Record) -> None:
        """A record is durable."""
        awaited = self._awaited
        if awaited is not None and awaited.kind in ("record", "seq") and awaited.hit(record):
            self._hit()

    @property
    def listens(self) -> bool:
        """Does the next fault wait for a record?"""
        awaited = self._awaited
        return awaited is not None and awaited.kind in ("record", "seq")

    def look(self, state: JobState | None = None) -> None:
        """The state has changed."""
        awaited = self._awaited
        # What held before the last fault struck says nothing about what it has led to.
        if awaited is not None and awaited.kind == "state" and not self._coming:
            leader = self._sim.leader
            here = state if state is not None else leader.state if leader is not None else None
            # Training itself knows first that it does not run any more.
            runs = awaited.name == "job over" or self._sim.training.stepping
            if here is not None and runs and awaited.holds(here):
                self._hit()

    def _hit(self) -> None:
        """The moment of the next fault is there. It strikes in a turn of its own; the one after it is awaited from here on."""
        place = self._next
        self._gone.add(place)
        self._coming += 1
        self._clock.later(0, _KEY, self._come, place)
        self._arm()

    def _come(self, place: int) -> None:
        self._coming -= 1
        self._strike(place)

    def rest(self) -> list[Fault]:
        """Those whose moment never came, and those that found nobody."""
        never = [fault for place, fault in enumerate(self._sim.plan.faults) if place not in self._gone]
        return [*self.missed, *never]

    def _strike(self, place: int) -> None:
        fault = self._sim.plan.faults[place]
        timed = self._triggers[place].kind == "time"
        self._gone.add(place)
        phase, before = self._sim.phase(), self.newest
        # Where it leads to something at once, that is already its doing.
        self.newest = fault.cause or fault.kind
        if self._by_kind[fault.kind](fault):
            self.struck.append((fault, self._sim.log.seq))
            self.hits[fault.kind, phase] = self.hits.get((fault.kind, phase), 0) + 1
            self._heals(amount(fault) if KINDS[fault.kind].unit == "s" else 0.0)
        else:
            self.newest = before
            self.missed.append(fault)
        if timed and place == self._next:
            self._arm()

    def _heals(self, after_s: float) -> None:
        self.healed_at = max(self.healed_at, self._clock.now + us(min(after_s, 1e9)))

    # ---- whom

    def _agent(self, target: str | int) -> Agent | None:
        return _chosen(self._sim.agents.living(), target, lambda agent: agent.node)

    def _worker(self, target: str | int) -> tuple[Agent, int] | None:
        """A living worker: of a node by name, or by number among all, in the order of their ranks."""
        agents = [
            one for one in self._sim.agents.living() if one.running and not one.asked and len(one.dead) < one.nproc
        ]
        if isinstance(target, str):
            agent = _chosen(agents, target, lambda agent: agent.node)
            return None if agent is None else (agent, 0)
        order = list(self._sim.trainings)
        agents.sort(key=lambda one: (order.index(self._sim.sets.of(one.node)), one.generation, one.first_rank))
        total = sum(agent.nproc - len(agent.dead) for agent in agents)
        if not total:
            return None
        left = target % total
        for agent in agents:
            alive = agent.nproc - len(agent.dead)
            if left < alive:
                return agent, left
            left -= alive
        return None

    def _host_of(self, target: str | int) -> Host | None:
        """A host by name; by number one of those that a node runs on; a node by name, its host."""
        hosts = self._sim.hosts
        if isinstance(target, str) and target.startswith("host-"):
            return hosts[target]
        if isinstance(target, str):
            agent = self._agent(target)
            return agent.host if agent is not None else None
        return _chosen([host for host in hosts.hosts if host.node], target, lambda host: host.name)

    def _pod_of(self, agent: Agent) -> Pod | None:
        return self._sim.scheduler.pods.get(agent.name)

    # ---- processes and machines

    def _kill_worker(self, fault: Fault) -> bool:
        found = self._worker(fault.target)
        return found is not None and bool(found[0].fail(found[0].generation, found[1], "", SIGKILL))

    def _fail_worker(self, fault: Fault) -> bool:
        found = self._worker(fault.target)
        return found is not None and bool(found[0].fail(found[0].generation, found[1], fault.cause or FAILED))

    def _interrupt(self, _: Fault) -> bool:
        agents = [one for one in self._sim.agents.living() if one.running and not one.asked]
        for agent in agents:
            for _worker in range(agent.nproc - len(agent.dead)):
                agent.fail(agent.generation, 0, "", SIGTERM)
        return bool(agents)

    def _end(self, agent: Agent, code: int, reason: str, notice_us: int) -> bool:
        pod = self._pod_of(agent)
        agent.killed()
        if pod is not None:
            self._sim.scheduler.ended(pod, code, reason, notice_us)
        return True

    @property
    def _notice_us(self) -> int:
        return us(self._sim.scenario.notice_s)

    def _kill_node(self, fault: Fault) -> bool:
        agent = self._agent(fault.target)
        return agent is not None and self._end(agent, SIGKILL, "SIGKILL", self._notice_us)

    def _take_down(self, host: Host, for_us: int) -> None:
        for agent in [one for one in self._sim.agents.living() if one.host is host]:
            self._end(agent, SIGKILL, "its host is gone", self._notice_us)
        self._sim.hosts.take_down(host, for_us)

    def _kill_host(self, fault: Fault) -> bool:
        host = self._host_of(fault.target)
        if host is not None:
            self._take_down(host, us(amount(fault)))
        return host is not None

    def _kill_rack(self, fault: Fault) -> bool:
        for host in self._sim.hosts.rack(fault.target):
            self._take_down(host, us(amount(fault)))
        return True

    def _lose_host(self, fault: Fault) -> bool:
        host = self._host_of(fault.target)
        if host is None:
            return False
        # Back in service only well after its scheduler has noticed.
        self._sim.hosts.take_down(host, us(amount(fault) + REPAIR_S))
        for agent in [one for one in self._sim.agents.living() if one.host is host]:
            pod = self._pod_of(agent)
            agent.lost()
            if pod is not None:
                self._sim.scheduler.ended(pod, SIGKILL, "its host does not answer", us(amount(fault)))
        return True

    def _sick_host(self, fault: Fault) -> bool:
        host = self._host_of(fault.target)
        if host is None:
            return False
        self._sim.hosts.sicken(host, us(amount(fault)), fault.cause)
        for agent in [one for one in self._sim.agents.living() if one.host is host and one.running]:
            self._clock.later(0, agent.key, agent.sicken, agent.generation)
        return True

    def _silence_node(self, fault: Fault) -> bool:
        agent = self._agent(fault.target)
        if agent is not None:
            agent.freeze(us(amount(fault)))
        return agent is not None

    def _hang_worker(self, fault: Fault) -> bool:
        found = self._worker(fault.target)
        if found is None:
            return False
        agent, local = found
        return self._sim.training_of(agent.node).hang(agent.generation, us(fault.amount), agent.first_rank + local)

    def _slow_worker(self, fault: Fault) -> bool:
        found = self._worker(fault.target)
        if found is None:
            return False
        agent, index = found
        return self._sim.training_of(agent.node).slow(
            agent.generation, amount(fault), agent.node, agent.first_rank + index
        )

    def _unreach_node(self, fault: Fault) -> bool:
        agent = self._agent(fault.target)
        pod = self._pod_of(agent) if agent is not None else None
        if pod is not None:
            self._sim.scheduler.lose(pod)
            self._clock.later(us(amount(fault)), pod.key, self._sim.scheduler.reach, pod)
        return pod is not None

    def _dark_host(self, fault: Fault) -> bool:
        host = self._host_of(fault.target)
        if host is None:
            return False
        self._sim.hosts.take_down(host, us(amount(fault) + REPAIR_S))
        for agent in [one for one in self._sim.agents.living() if one.host is host]:
            pod = self._pod_of(agent)
            agent.lost()
            if pod is not None:
                self._clock.later(self._notice_us, pod.key, self._sim.scheduler.lose, pod)
                self._clock.later(us(amount(fault)), pod.key, self._dark_seen, pod)
        return True

    def _dark_seen(self, pod: Pod) -> None:
        self._sim.scheduler.reach(pod)
        self._sim.scheduler.ended(pod, SIGKILL, "its host had no power", 0)

    def _flap_node(self, fault: Fault) -> bool:
        agent = self._agent(fault.target)
        pod = self._pod_of(agent) if agent is not None else None
        if pod is not None:
            self._sim.scheduler.flap(pod, us(amount(fault)))
        return pod is not None

    # ---- networks

    def _partition(self, fault: Fault) -> bool:
        agent = self._agent(fault.target)
        if agent is not None:
            self._sim.network.partition(agent, us(amount(fault)))
        return agent is not None

    def _dropped(self, fault: Fault, *, to_master: bool, to_node: bool) -> bool:
        agent = self._agent(fault.target)
        if agent is not None:
            self._sim.network.drop(agent, us(amount(fault)), to_master=to_master, to_node=to_node)
        return agent is not None

    def _drop(self, fault: Fault) -> bool:
        return self._dropped(fault, to_master=True, to_node=True)

    def _drop_to_master(self, fault: Fault) -> bool:
        return self._dropped(fault, to_master=True, to_node=False)

    def _drop_to_node(self, fault: Fault) -> bool:
        return self._dropped(fault, to_master=False, to_node=True)

    def _delay(self, fault: Fault) -> bool:
        agent = self._agent(fault.target)
        if agent is not None:
            self._sim.network.delay(agent, us(amount(fault)), us(DELAYED_S))
        return agent is not None

    def _messages(self, fault: Fault, what: str) -> bool:
        agent = self._agent(fault.target)
        if agent is not None:
            agent.link.clean = False
            setattr(agent.link, what, getattr(agent.link, what) + int(amount(fault)))
        return agent is not None

    def _lose_messages(self, fault: Fault) -> bool:
        return self._messages(fault, "losses")

    def _double_messages(self, fault: Fault) -> bool:
        return self._messages(fault, "doubles")

    def _reorder_messages(self, fault: Fault) -> bool:
        return self._messages(fault, "swaps")

    # ---- the log and clocks

    def _ack_lost(self, _: Fault) -> bool:
        self._sim.log.troubles.ack_lost += 1
        return True

    def _log_slow(self, fault: Fault) -> bool:
        self._sim.log.troubles.slow_us += us(amount(fault))
        return True

    def _log_down(self, fault: Fault) -> bool:
        self._sim.log.troubles.down_until = self._clock.now + us(amount(fault))
        return True

    _log_full = _log_down

    def _log_fenced(self, _: Fault) -> bool:
        self._sim.log.troubles.fenced += 1
        return True

    def _clock_jump(self, fault: Fault) -> bool:
        # A leader's own time goes on evenly (`Master.now`): whoever takes over on this host meets the new one.
        self._sim.skew_us += round(amount(fault) * SECOND_US)
        return True

    _clock_skew = _clock_jump

    # ---- masters

    def _crash_master(self, fault: Fault) -> bool:
        return self._sim.crash(self._after_us(fault))

    def _after_us(self, fault: Fault) -> int:
        return us(fault.amount or self._sim.scenario.failover_s)

    def _crash_before_append(self, fault: Fault) -> bool:
        troubles = self._sim.log.troubles
        troubles.crash_before, troubles.crash_for_us = troubles.crash_before + 1, self._after_us(fault)
        return True

    def _crash_after_append(self, fault: Fault) -> bool:
        troubles = self._sim.log.troubles
        troubles.crash_after, troubles.crash_for_us = troubles.crash_after + 1, self._after_us(fault)
        return True

    def _pause_master(self, fault: Fault) -> bool:
        return self._sim.pause_leader(us(amount(fault)))

    def _second_master(self, _: Fault) -> bool:
        self._sim.standbys += 1
        return True

    def _hand_over(self, _: Fault) -> bool:
        leader = self._sim.leader
        if leader is None or not leader.serving or leader.paused:
            return False
        leader.hand_over()
        return True

    # ---- schedulers

    def _create_error(self, fault: Fault) -> bool:
        self._sim.scheduler.lies.errors += int(amount(fault))
        return True

    def _create_stuck(self, fault: Fault) -> bool:
        self._sim.scheduler.lies.stuck += int(amount(fault))
        return True

    def _stale_list(self, fault: Fault) -> bool:
        return self._sim.relist(us(amount(fault)))

    def _relist(self, _: Fault) -> bool:
        return self._sim.relist(0)

    def _quota(self, fault: Fault) -> bool:
        self._sim.scheduler.lies.no_quota_until = self._clock.now + us(amount(fault))
        return True

    def _hold_queue(self, fault: Fault) -> bool:
        self._sim.scheduler.hold(us(amount(fault)))
        return True

    def _preempt(self, fault: Fault) -> bool:
        return self._announced(fault) is not None

    def _preempt_sooner(self, fault: Fault) -> bool:
        return self._moved(fault, 0.25, 0.5)

    def _preempt_later(self, fault: Fault) -> bool:
        return self._moved(fault, 0.5, 2.0)

    def _preempt_withdrawn(self, fault: Fault) -> bool:
        agent = self._announced(fault)
        if agent is not None:
            self._clock.later(us(amount(fault) / 2), agent.key, self._withdraw, agent)
        return agent is not None

    def _moved(self, fault: Fault, when: float, to: float) -> bool:
        """Its end is announced; after such a part of the time another one is, of such a part."""
        agent = self._announced(fault)
        if agent is not None:
            goes_at = self._clock.now + us(amount(fault) * to)
            self._clock.later(us(amount(fault) * when), agent.key, self._announce, agent, goes_at)
        return agent is not None

    def _announced(self, fault: Fault) -> Agent | None:
        agent = self._agent(fault.target)
        if agent is not None:
            self._announce(agent, self._clock.now + us(amount(fault)))
        return agent

    def _announce(self, agent: Agent, goes_at: int) -> None:
        pod = self._pod_of(agent)
        if pod is not None and not agent.ended:
            self._sim.scheduler.warn(pod, PREEMPTION, goes_at)
            self._clock.at(goes_at, agent.key, self._taken, agent, pod, goes_at)

    def _taken(self, agent: Agent, pod: Pod, goes_at: int) -> None:
        """Unless it was said later that it stays, or goes at another time."""
        if pod.goes_at == goes_at:
            self._preempted(agent)

    def _withdraw(self, agent: Agent) -> None:
        pod = self._pod_of(agent)
        if pod is not None and not agent.ended:
            self._sim.scheduler.warn(pod, "")

    def _preempted(self, agent: Agent) -> None:
        if not agent.ended:
            self._end(agent, SIGTERM, "preempted", 0)

    def _preempt_now(self, fault: Fault) -> bool:
        agent = self._agent(fault.target)
        if agent is not None:
            self._preempted(agent)
        return agent is not None

    # ---- people

    def _scale(self, fault: Fault) -> bool:
        to = int(amount(fault))
        groups = [group.name for group in self._sim.spec.groups]
        group = fault.target if isinstance(fault.target, str) else groups[fault.target % len(groups)]
        self._ask(operations.ScaleGroup(group, 0, to, fault.cause or "somebody asked"))
        return True

    def _drain(self, fault: Fault) -> bool:
        agent = self._agent(fault.target)
        if agent is not None:
            self._ask(operations.DrainNode(agent.node, fault.cause or "somebody asked"))
        return agent is not None

    def _suspend(self, fault: Fault) -> bool:
        # Every other time, by its length, the nodes are given back.
        keeps = round(amount(fault)) % 2 == 0
        self._ask(job.SuspendJob(fault.cause or "somebody asked", keep_nodes=keeps, lose=True))
        self._clock.later(us(amount(fault)), 0, self._ask, job.ResumeJob("somebody asked"))
        return True

    def _ask(self, command: tuple[object, ...]) -> None:
        """A person asks whoever leads, one thing after the other, each until it is durable."""
        self._wishes.append(command)
        if len(self._wishes) == 1:
            self._say()

    def _say(self) -> None:
        leader = self._sim.leader
        if self._sim.over:
            return
        if leader is None or not leader.serving:
            self._clock.later(us(ASK_AGAIN_S), 0, self._say)
        else:
            leader.submit(self._wishes[0])
            self._clock.later(us(ASK_AGAIN_S), 0, self._answered, leader)

    def _answered(self, leader: Leader) -> None:
        if self._sim.leader is leader and leader.alive:
            if not leader.idle:
                self._clock.later(us(ASK_AGAIN_S), 0, self._answered, leader)
                return
            self._wishes.pop(0)
        if self._wishes:
            self._say()


def _chosen(candidates: Sequence[_T], target: str | int, name: Callable[[_T], str]) -> _T | None:
    """A candidate by its name, or the last of those whose name begins with it (``worker-1``), or by its number."""
    if isinstance(target, str):
        named = [one for one in candidates if name(one) == target or name(one).startswith(f"{target}-")]
        return named[-1] if named else None
    return candidates[target % len(candidates)] if candidates else None
