"""A whole run of one job: hosts, scheduler, agents, training, network and log around the real engine, in virtual time.

What a master, an agent and a scheduler do to the engine is what the real ones do; what is simulated is that there are none. A run
follows from its plan alone. It ends when the job is over and nothing of it is left; a job that could go on and does not is
`Stalled`.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Sequence

from dlrover_core.errors import PlanError
from dlrover_core.job import progress
from dlrover_core.job.sets import Sets
from dlrover_core.job.state import FOLD, JobState
from dlrover_core.kernel.events import Record
from dlrover_core.kernel.state import digest
from dlrover_core.sim.agents import Agents
from dlrover_core.sim.clock import SECOND_US, Clock
from dlrover_core.sim.faults import ENGINE
from dlrover_core.sim.hosts import Hosts
from dlrover_core.sim.leading import Leader
from dlrover_core.sim.log import Log
from dlrover_core.sim.meter import MARKS, Meter
from dlrover_core.sim.network import Network
from dlrover_core.sim.run import TRAINING, Broken, Input, Run, Stalled, Watcher
from dlrover_core.sim.scenario import Plan
from dlrover_core.sim.scheduler import Scheduler
from dlrover_core.sim.striking import Strikes
from dlrover_core.sim.training import Training
from dlrover_core.spec import us

__all__ = ["EPOCH_US", "Input", "Watcher", "simulate"]

EPOCH_US = 1_700_000_000_000_000
RUN = "run-1"
LEASE_S = 5.0
# As in runtime/master.py: from a hand-over to the next leader.
HAND_OVER_S = 0.1
STALLED_S = 7200.0
LIMIT_S = 400 * 86_400.0


def simulate(
    plan: Plan,
    *,
    watch: Sequence[Watcher] = (),
    every: int = 1,
    keep: bool = True,
    inputs: bool = False,
    limit_s: float = LIMIT_S,
) -> Run:
    """Run a plan. Each of ``watch`` is called after every record, or with ``every`` after those of every so many batches.

    Raises `Broken` when one of them raises AssertionError, `Stalled` when the job does not end, and `PlanError`.
    """
    with uncollected():
        return Simulation(plan, tuple(watch), every, keep=keep, inputs=inputs).run(limit_s)


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Nothing that a run makes and drops is in a cycle: looking for cycles among millions of tuples is a third of its time."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


class Simulation:
    """One run. ``commands`` counts what the engines were given; ``standbys`` are masters that wait."""

    def __init__(self, plan: Plan, watch: tuple[Watcher, ...], every: int, *, keep: bool, inputs: bool) -> None:
        plan.check()
        if plan.level != ENGINE:
            raise PlanError(f"a plan for the level {plan.level!r} is not simulated: ask for {ENGINE!r}")
        self.plan, self.scenario = plan, plan.scenario
        self.spec = plan.scenario.spec()
        self.sets = Sets(self.spec.groups)
        self.first = next(self.sets.all(self.spec))
        self.clock = Clock(plan.seed)
        self.inputs: list[Input] | None = [] if inputs else None
        self.stop_us, self.start_us = us(plan.scenario.stop_s), us(plan.scenario.start_s)
        self.exit_us = us(plan.scenario.exit_s)
        self.commands = self.skew_us = 0
        self.standbys = plan.scenario.standbys
        self.leader: Leader | None = None
        self.over = False
        self.strikes = Strikes(self)
        self.meter = Meter(self)
        self.training = Training(self, self.first, first=True)
        self.trainings = {self.first: self.training}
        self.hosts = Hosts(plan.scenario, self.clock)
        self.network = Network(self)
        self.agents = Agents(self)
        self.scheduler = Scheduler(self)
        self.log = Log(self, watch, every, keep=keep, follow=plan.scenario.standbys > 0)
        self._leads = self._epoch = 0
        self._ended = False
        self._moved_at = 0

    # ---- masters

    def lead(self, after_us: int, why: str) -> None:
        """Another master leads after a while."""
        self._epoch += 1
        self.clock.later(after_us, 0, self._lead, self._epoch, why)

    def _lead(self, epoch: int, why: str) -> None:
        if epoch != self._epoch or self._ended:
            return
        if self.clock.now < self.log.troubles.down_until:
            # Taking over waits for the log, as decisions do.
            self.clock.at(self.log.troubles.down_until, 0, self._lead, epoch, why)
            return
        self._leads += 1
        self.log.token += 1
        state = self.log.restored() if self.log.seq else FOLD.new()
        wall_us = EPOCH_US + self.clock.now + self.skew_us
        self.leader = leader = Leader(self, state, self.log.token, f"master-{self._leads}", wall_us)
        self.scheduler.tell = leader.observed
        leader.begin(RUN, self.spec.to_json())

    def crash(self, after_us: int) -> bool:
        """The leader's process is killed; its successor leads after so long."""
        leader = self.leader
        if leader is None or not leader.alive:
            return False
        self.log.crashed()
        leader.die()
        self.leader = None
        self.lead(after_us, "the last one crashed")
        return True

    def pause_leader(self, for_us: int) -> bool:
        """The leader's process is stopped; where another one stands by, that leads when the lease is over."""
        leader = self.leader
        if leader is None or not leader.alive or leader.paused:
            return False
        leader.pause(for_us)
        if self.standbys and for_us > us(LEASE_S):
            self.lead(us(LEASE_S), "the last one is silent")
        return True

    def deposed(self, leader: Leader) -> None:
        """A leader has found that another one leads."""
        if self.leader is leader:
            self.leader = None

    def handed_over(self, leader: Leader) -> None:
        """A leader has gone, as asked."""
        if self.leader is leader:
            self.leader = None
            self.lead(us(HAND_OVER_S), "the last one handed over")

    def relist(self, ago_us: int) -> bool:
        """The scheduler's stream of changes breaks: it lists anew, or what was a while ago; the changes since come after it."""
        leader = self.leader
        if leader is None or not leader.serving:
            return False
        leader.leveller.observe(ago_us)
        if ago_us:
            leader.leveller.observe()
        return True

    # ---- what happens

    def durable(self, records: Sequence[Record], state: JobState) -> None:
        """Records have landed; ``state`` is what they fold to."""
        if self.strikes.listens:
            for record in records:
                self.strikes.durable(record)
        for record in records:
            kind = type(record.event)
            if kind in MARKS:
                self.meter.durable(record)
            if kind is progress.FirstStep:
                self._moved_at = self.clock.now
        self.strikes.look(state)
        if state.job.over:
            self.over = True
            self.look()

    def training_of(self, node: str) -> Training:
        """The workers of a node's coupling set."""
        name = self.sets.of(node)
        known = self.trainings.get(name)
        if known is None:
            known = self.trainings[name] = Training(self, name, first=False)
        return known

    def steps_again(self, name: str) -> None:
        """The training of a set makes steps again."""
        if name == self.first:
            self.strikes.look()
        if self.leader is not None and self.leader.serving:
            self.leader.await_progress(name)

    def look(self) -> None:
        """Is it over?"""
        if self.over and self.scheduler.empty:
            self._ended = True

    def phase(self) -> str:
        """What the job is at, in a word: for the table of what was hit when."""
        leader = self.leader
        if leader is None or not leader.serving:
            return "leaderless"
        state = leader.state
        world = state.world.at(self.first)
        if not state.job.forms:
            return state.job.state
        if not world.active:
            return "waiting" if world.generation else "created"
        if len(world.started) < len(world.members):
            return "starting"
        if state.progress.of(self.first).generation < world.generation:
            return "loading"
        return "finishing" if world.finished else "training"

    # ---- liveness

    def _watch(self) -> None:
        """Steps should be made, once everything has healed and there are hosts enough."""
        if self._ended:
            return
        if self.training.stepping:
            self._moved_at = self.clock.now
        leader = self.leader
        waits = leader is not None and leader.state.job.state == "suspended"
        since = max(self._moved_at, self.strikes.healed_at)
        patience = us(STALLED_S) + 3 * us(self.scenario.step_s)
        enough = self.hosts.usable() >= self._needed() and not self.scheduler.stuck
        if waits or not enough:
            self._moved_at = self.clock.now
        elif self.clock.now - since > patience:
            raise self._stalled(
                f"no step for {(self.clock.now - since) / SECOND_US:g} s though nothing is wrong any more"
            )
        self.clock.later(patience // 4, 0, self._watch)

    def _needed(self) -> int:
        """How many hosts the first set needs, whatever the others hold."""
        ours = self.sets.groups(self.first)
        return sum(group.floor if group.name in ours else group.nodes_max for group in self.spec.groups)

    def _stalled(self, why: str) -> Stalled:
        state = self.leader.state if self.leader is not None else None
        told = [why, f"at {self.clock.now_s:g} s, record {self.log.seq}", f"the job is at {self.phase()!r}"]
        if state is not None:
            world = state.world.worlds.get(self.first)
            told.append(f"job {state.job.state}")
            if world is not None:
                told.append(
                    f"world {world.generation} {'active' if world.active else 'over'}: {len(world.members)} members, "
                    f"{len(world.started)} started, {len(world.stopped)} stopped, {len(world.finished)} finished"
                )
            by_state: dict[str, int] = {}
            for node in state.nodes.nodes.values():
                shown = (
                    f"{node.state}{' joined' if node.joined else ''}{f' ({node.released})' if node.released else ''}"
                )
                by_state[shown] = by_state.get(shown, 0) + 1
            told.append(f"nodes: {', '.join(f'{count} {shown}' for shown, count in sorted(by_state.items()))}")
            open_ = [str(one.number) for one in state.incidents.by_number.values() if not one.closed]
            told.append(f"open incidents: {', '.join(open_) or 'none'}")
        living = self.agents.living()
        told.append(
            f"{len(living)} agents ({sum(not one.connection for one in living)} cut off, "
            f"{sum(one.running for one in living)} with workers), {self.hosts.usable()} hosts up, "
            f"{len(self.scheduler.pods)} nodes in the scheduler"
        )
        return Stalled("; ".join(told), self.log.seq, "")

    # ---- the run

    def run(self, limit_s: float) -> Run:
        """Live it."""
        self.lead(0, "the job begins")
        self.strikes.begin()
        self.clock.later(us(STALLED_S), 0, self._watch)
        if not self.clock.run(lambda: self._ended, us(limit_s)):
            raise self._stalled("nothing is left to happen" if self.clock.idle else "it has not ended in time")
        return self._told()

    def _told(self) -> Run:
        leader = self.leader
        # What a leader has decided and not made durable never was.
        durable = leader is not None and leader.state.seq == self.log.seq
        state = leader.state if leader is not None and durable else self.log.restored()
        follower = self.log.follower
        if follower is not None and digest(follower) != digest(state):
            raise Broken(f"the leader's state is not the fold of its log at record {self.log.seq}")
        by_class = self.meter.over()
        virtual_s = sum(by_class.values())
        training = self.training
        return Run(
            plan=self.plan,
            outcome=state.job.state,
            root=state.job.root or state.job.reason,
            state=state,
            records=self.log.records,
            log_hash=self.log.hash,
            events=self.log.seq,
            virtual_s=virtual_s,
            steps=training.reached,
            lost_steps=training.lost,
            goodput=by_class[TRAINING] / virtual_s if virtual_s else 0.0,
            by_class=by_class,
            struck=self.strikes.struck,
            missed=self.strikes.rest(),
            hits=self.strikes.hits,
            recoveries=self.meter.recoveries,
            inputs=self.inputs or [],
        )
