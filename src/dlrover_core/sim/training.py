"""Training, without an event per step: a world steps at a rate, and what it has made by now is worked out when asked.

A world whose members' workers have all run for ``load_s`` steps from the last checkpoint on. Whatever stops it (a death, a hang,
an order) settles the account: whole steps are made, the one in the making is lost, and those since the last checkpoint will be
made again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from dlrover_core.diagnosis import hanging, stall
from dlrover_core.diagnosis.changepoint import BLOCK_STEPS, BLOCKS, SOUGHT, WINDOWS
from dlrover_core.diagnosis.hanging import Facts
from dlrover_core.diagnosis.stacks import Frame
from dlrover_core.job import hangs, stragglers
from dlrover_core.job.sets import Sets
from dlrover_core.kernel.engine import Command
from dlrover_core.sim.agents import TIMED_OUT, Agent
from dlrover_core.sim.clock import SECOND_US, Clock
from dlrover_core.sim.scenario import Scenario
from dlrover_core.spec import JobSpec, us

CASCADE = "RuntimeError: [gloo] Connection closed by peer"
# Torch's own default for NCCL: peers of a rank that neither dies nor comes raise after it.
COLLECTIVE_S = 600.0
NEVER = 10**9
"""So many steps are never made."""
SLOW_S = 60.0
# What the agents' detector needs: steps before it knows what is normal, and steps of evidence (`diagnosis.changepoint`).
BASELINE_STEPS, EVIDENCE_STEPS = 400, 53
ELSEWHERE = Frame("train.py", 1, "step")
WAITING = Frame("torch/distributed/distributed_c10d.py", 1, "all_reduce")


class Position(NamedTuple):
    """How far a stretch of training has come: steps made, the share of the next one, and the time in checkpoints so far."""

    made: int
    saved: int
    part: float
    checkpoint_us: int


@dataclass(slots=True)
class Stretch:
    """Training at one rate: step ``base``, the last one before a checkpoint's period, was made at ``since``.

    Periods are of ``every`` steps of ``step_us`` and a checkpoint of ``checkpoint_us``.
    """

    base: int
    since: int
    step_us: int
    every: int
    checkpoint_us: int

    def at(self, now: int) -> Position:
        """Where training is at an instant."""
        period = self.every * self.step_us + self.checkpoint_us
        full, rest = divmod(max(0, now - self.since), period)
        within = min(rest // self.step_us, self.every)
        base = self.base + full * self.every
        over = rest - within * self.step_us
        saving = within == self.every
        return Position(
            base + within,
            base,
            0.0 if saving else over / self.step_us,
            full * self.checkpoint_us + (over if saving else 0),
        )

    def when(self, step: int) -> int:
        """When a step is made."""
        full, within = divmod(step - self.base, self.every)
        if within == 0 and full:
            full, within = full - 1, self.every
        return self.since + full * (self.every * self.step_us + self.checkpoint_us) + within * self.step_us

    def at_rate(self, step_us: int, now: int) -> Stretch:
        """The same place from now on, at another rate."""
        here = self.at(now)
        within = here.made - here.saved
        over = here.part * step_us
        if within == self.every:
            over = (now - self.since) % (self.every * self.step_us + self.checkpoint_us) - within * self.step_us
        return Stretch(here.saved, now - round(within * step_us + over), step_us, self.every, self.checkpoint_us)


@dataclass(slots=True)
class World:
    """One generation's workers. ``stretch`` while it steps.

    ``hung`` counts the times that somebody lived and made no step, or did again; ``who`` it was last, ``hung_at`` since when.
    """

    generation: int
    nodes: int
    members: dict[str, Agent] = field(default_factory=dict)
    full: bool = False
    broken: bool = False
    cascaded: bool = False
    done: bool = False
    hung: int = 0
    hung_at: int = 0
    who: int = -1
    slowed: float = 1.0
    stretch: Stretch | None = None
    epoch: int = 0
    first_told: bool = False
    begun: bool = False
    began: int = 0


class Leader(Protocol):
    """Who is told of standstills."""

    def stalled(self, name: str, world: World, step: int, idle_us: int, limit: stall.Threshold) -> None:
        """Nobody of a set has made a step for so long."""
        ...

    def submit(self, command: Command) -> None:
        """Hear this."""
        ...


class Meter:
    """Who measures the job's time. Of a set whose time is not the job's this one hears, and measures nothing."""

    def made(self, new: float, again: float, step_us: int, checkpoint_us: float) -> None:
        """Steps were made."""

    def cut_short(self, part: float, step_us: int) -> None:
        """A step was begun in vain."""

    def loading(self) -> None:
        """A world loads."""

    def trains(self, again_us: float = 0.0) -> None:
        """Steps are made from now on."""

    def hung(self) -> None:
        """No steps are made, and nobody knows."""

    def broke(self) -> None:
        """A worker is dead."""

    def halted(self) -> None:
        """Steps are made no more."""

    def done(self) -> None:
        """All steps are made."""


class Strikes(Protocol):
    """Who waits for steps."""

    def step_made(self) -> None:
        """The awaited step."""
        ...


class Site(Protocol):
    """What training needs of a run."""

    clock: Clock
    spec: JobSpec
    scenario: Scenario

    @property
    def leader(self) -> Leader | None:
        """Who leads."""
        ...

    @property
    def meter(self) -> Meter:
        """Who measures."""
        ...

    @property
    def strikes(self) -> Strikes:
        """Who waits for steps."""
        ...

    def steps_again(self, name: str) -> None:
        """The training of a set makes steps again."""
        ...


class Training:
    """All worlds of one coupling set, of which one at most makes steps; ``steps`` are made in all.

    Those of the set whose steps are the job's are measured and waited for (``first``); those of a ``quiet`` one are never told.
    """

    def __init__(self, sim: Site, name: str, *, first: bool) -> None:
        self._sim, self._clock, self._scenario, self.name = sim, sim.clock, sim.scenario, name
        sets = Sets(sim.spec.groups)
        groups = [sim.spec.group(group) for group in sets.groups(name)]
        self.steps = sim.scenario.steps if sets.ends(name) else NEVER
        self._quiet = any(group.name in sim.scenario.quiet for group in groups)
        self._nodes = sum(group.nodes_max if group.coupled else 1 for group in groups)
        self._hang_s = sim.spec.in_force(groups[0].name).hang_s
        self._meter: Meter = sim.meter if first else Meter()
        self.made = 0
        self.saved = 0
        self.reached = 0
        self.lost = 0
        self.world: World | None = None
        self._full_us = us(self._scenario.step_s)
        self._settled: Position | None = None
        self._step_epoch = 0
        self.awaited_step = 0

    # ---- who runs

    def joined(self, agent: Agent, generation: int, nodes: int) -> None:
        """A node's workers run."""
        world = self.world
        if world is None or world.generation < generation:
            if world is not None:
                self.halt(world)
            world = self.world = World(generation, nodes)
        if world.generation != generation or world.broken:
            return
        world.members[agent.node] = agent
        if len(world.members) == world.nodes:
            world.full = True
            self._meter.loading()
            self._clock.later(us(self._scenario.load_s), 0, self._begin, world, world.epoch)

    def left(self, agent: Agent, generation: int) -> None:
        """A node's workers are stopped, or gone with their host: nobody steps any more."""
        world = self.world
        if world is not None and world.generation == generation and not world.done:
            world.members.pop(agent.node, None)
            if not world.broken:
                self.halt(world)

    def died(self, agent: Agent, generation: int, *, cascades: bool) -> None:
        """One worker is dead; its peers notice, where their kernels tell them."""
        world = self.world
        if world is None or world.generation != generation or world.done:
            return
        first, scenario = not world.broken, self._scenario
        if first:
            self._meter.broke()
        self.halt(world)
        if world.full and cascades and scenario.cascade_s >= 0 and not world.cascaded:
            world.cascaded = True
            self._clock.later(us(scenario.cascade_s), 0, self._cascade, world, agent.node, CASCADE)
        elif world.full and first:
            self._clock.later(us(COLLECTIVE_S), 0, self._cascade, world, agent.node, TIMED_OUT)

    def _cascade(self, world: World, source: str, error: str) -> None:
        """The peers of lowest rank say so, those that still run."""
        left = self._scenario.cascade_ranks
        for agent in sorted(world.members.values(), key=lambda one: one.first_rank):
            if left <= 0:
                return
            if agent.node != source and agent.generation == world.generation:
                left -= agent.fail(world.generation, left, error)

    # ---- stepping

    def _begin(self, world: World, epoch: int) -> None:
        if world is self.world and world.epoch == epoch and not world.broken:
            world.begun = True
            again = self.made - self.saved
            self._meter.trains(again * self._rate_us(world))
            self.lost += again
            self.made = world.began = self.saved
            self._go(world)

    def _rate_us(self, world: World) -> int:
        share = self._nodes / world.nodes if self._scenario.fixed_batch else 1.0
        return max(1, round(self._full_us * share * world.slowed))

    def _go(self, world: World) -> None:
        """From the last checkpoint on, or from where it was slowed or held up."""
        scenario, step_us = self._scenario, self._rate_us(world)
        if world.stretch is not None:
            world.stretch = world.stretch.at_rate(step_us, self._clock.now)
        else:
            base = self.made - self.made % scenario.checkpoint_steps
            since = self._clock.now - (self.made - base) * step_us
            world.stretch = Stretch(base, since, step_us, scenario.checkpoint_steps, us(scenario.checkpoint_s))
        world.epoch += 1
        self._settled = world.stretch.at(self._clock.now)
        if not world.first_told and not self._quiet:
            self._clock.at(world.stretch.when(self.made + 1), 0, self._first, world, world.epoch)
        self._clock.at(world.stretch.when(self.steps), 0, self._finish, world, world.epoch)
        self._await_step(world)
        self._sim.steps_again(self.name)

    def _first(self, world: World, epoch: int) -> None:
        if world is self.world and world.epoch == epoch:
            self.settle()
            world.first_told = True
            leading = next((one for one in world.members.values() if one.order.work.node_rank == 0), None)
            if leading is not None:
                leading.first_step(world.generation, self.made)

    def _finish(self, world: World, epoch: int) -> None:
        if world is not self.world or world.epoch != epoch:
            return
        self.settle()
        world.done, world.stretch, self._settled = True, None, None
        world.epoch += 1
        self._meter.done()
        for agent in list(world.members.values()):
            agent.finish(world.generation, self.made)

    def halt(self, world: World) -> None:
        """Nobody steps any more in this world. What was made since the last checkpoint will be made again."""
        self.settle()
        self._cut_short(world)
        if not world.broken and not world.done:
            world.broken = True
            self._meter.halted()
        world.stretch, self._settled = None, None
        world.epoch += 1

    def _cut_short(self, world: World) -> None:
        """The step in the making is not made. One that would have been made again is accounted for as that already."""
        if world.stretch is not None and self.made >= self.reached:
            self._meter.cut_short(world.stretch.at(self._clock.now).part, world.stretch.step_us)

    def settle(self) -> None:
        """Account for all time until now."""
        world = self.world
        if world is None or world.stretch is None or self._settled is None:
            return
        here, before = world.stretch.at(self._clock.now), self._settled
        self._settled = here
        steps = here.made - before.made + here.part - before.part
        again = max(0.0, min(self.reached, here.made + here.part) - (before.made + before.part))
        self._meter.made(steps - again, again, world.stretch.step_us, here.checkpoint_us - before.checkpoint_us)
        self.made, self.saved = here.made, max(self.saved, here.saved)
        self.reached = max(self.reached, here.made)

    @property
    def stepping(self) -> bool:
        """Is somebody making steps?"""
        return self.world is not None and self.world.stretch is not None

    def step_now(self) -> int:
        """The last step made."""
        world = self.world
        return world.stretch.at(self._clock.now).made if world is not None and world.stretch is not None else self.made

    def when(self, step: int) -> int | None:
        """When a step will be made, as things are; None: they are not made now."""
        world = self.world
        return world.stretch.when(step) if world is not None and world.stretch is not None else None

    def await_step(self, step: int) -> None:
        """Tell the plan as soon as this step is made."""
        self.awaited_step = step
        if self.world is not None:
            self._await_step(self.world)

    def _await_step(self, world: World) -> None:
        if self.awaited_step and world.stretch is not None:
            self._step_epoch += 1
            self._clock.at(world.stretch.when(self.awaited_step), 0, self._step_made, world, self._step_epoch)

    def _step_made(self, world: World, epoch: int) -> None:
        if self._step_epoch == epoch and world is self.world and self.step_now() >= self.awaited_step:
            self.awaited_step = 0
            self._sim.strikes.step_made()

    # ---- hurt

    def hang(self, generation: int, for_us: int, who: int) -> bool:
        """A worker lives and makes no step, so nobody does; the leader looks for it; after torch's own patience peers raise."""
        world = self.world
        if world is None or world.generation != generation or world.done or world.broken or not world.full:
            return False
        self.settle()
        self._cut_short(world)
        world.hung += 1
        world.hung_at, world.who = self._clock.now, who
        self._mind_stall(world)
        world.stretch, self._settled = None, None
        world.epoch += 1
        self._meter.hung()
        self._clock.later(us(COLLECTIVE_S), 0, self._weary, world, world.hung)
        if for_us:
            self._clock.later(for_us, 0, self._unhang, world, world.hung)
        return True

    def _mind_stall(self, world: World) -> None:
        """When nobody making steps is a hang, by the rule of the real leader: what heartbeats would tell it is known here."""
        spec = self._sim.spec
        if self._hang_s and not self._quiet:
            step_us = self._rate_us(world) if world.first_told else 0
            pulse = stall.Pulse(self.made, 0, step_us, us(self._scenario.checkpoint_s) + step_us)
            limit = stall.threshold(hangs.limits(spec, self._hang_s), pulse, 0)
            self._clock.later(limit.us, 0, self._stalled, world, world.hung, limit)

    def _stalled(self, world: World, hung: int, limit: stall.Threshold) -> None:
        if world is not self.world or world.hung != hung or world.broken or world.done or world.stretch is not None:
            return
        leader = self._sim.leader
        if leader is not None:
            leader.stalled(self.name, world, self.made, self._clock.now - world.hung_at, limit)
        # It may not lead yet, or not hear everybody.
        self._clock.later(us(self._sim.spec.heartbeat_s), 0, self._stalled, world, hung, limit)

    def shown(self, agent: Agent) -> tuple[str, ...]:
        """What the ranks of a node are at, as its agent would show it while the world stands still."""
        world = self.world
        if world is None or world.generation != agent.generation:
            return ()
        idle_us = 0 if world.stretch is not None else self._clock.now - world.hung_at
        ranks = range(agent.first_rank, agent.first_rank + agent.nproc)
        found = (Facts(one, "S", "", idle_us, stack=(ELSEWHERE if one == world.who else WAITING,)) for one in ranks)
        return tuple(hanging.to_text(one) for one in found)

    def _weary(self, world: World, hung: int) -> None:
        if world is self.world and world.hung == hung and not world.broken and world.stretch is None and not world.done:
            self._cascade(world, "", TIMED_OUT)

    def _unhang(self, world: World, hung: int) -> None:
        if world is self.world and world.hung == hung and not world.broken:
            world.hung += 1
            if world.begun:
                self._meter.trains()
                self._go(world)
            else:
                self._clock.later(us(self._scenario.load_s), 0, self._begin, world, world.epoch)

    def slow(self, generation: int, times: float, node: str, rank: int) -> bool:
        """A worker is slow, so the whole world is, for a while; who leads hears of it, if that lasts for enough steps."""
        world = self.world
        if world is None or world.generation != generation or world.broken:
            return False
        normal_us = self._rate_us(world)
        self._at_rate(world, times)
        self._clock.later(round(SLOW_S * SECOND_US), 0, self._at_rate, world, 1.0 / times)
        evidence_us = round(EVIDENCE_STEPS * normal_us * times)
        if times >= SOUGHT and evidence_us < us(SLOW_S) and self.made - world.began >= BASELINE_STEPS:
            steps = WINDOWS * BLOCKS * BLOCK_STEPS
            seen = stragglers.NoteSlow(
                node,
                generation,
                rank,
                normal_us,
                round(normal_us * times),
                steps,
                stragglers.PARTS,
                self.made + EVIDENCE_STEPS,
            )
            ended = stragglers.NoteRecovered(node, generation, rank)
            self._clock.later(evidence_us, 0, self._paced, world, seen)
            self._clock.later(us(SLOW_S) + EVIDENCE_STEPS * normal_us, 0, self._paced, world, ended)
        return True

    def _paced(self, world: World, note: stragglers.NoteSlow | stragglers.NoteRecovered) -> None:
        """What beats would tell of a world that goes on; again, while nobody leads."""
        if world is not self.world or world.broken or world.done:
            return
        if self._sim.leader is None:
            self._clock.later(us(self._sim.spec.heartbeat_s), 0, self._paced, world, note)
        else:
            self._sim.leader.submit(note)

    def _at_rate(self, world: World, times: float) -> None:
        world.slowed *= times
        if world is self.world and world.stretch is not None:
            self.settle()
            self._go(world)
