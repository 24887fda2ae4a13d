"""Planned changes of a world, as facts: the plan that is prepared, which nodes join and leave, and how far it has come.

Ranks that save with FlashCheckpoint can agree on a step boundary: all of them save there and wait. A world that is changed
at a boundary resumes from that very step, so growth, shrinking, drain and migration lose no step. `rules.plans` decides;
this module is what it knows.

A plan begins with `WorldPlanned`: joining nodes start while training goes on. `BoundaryAsked` asks the members' ranks to
look for the boundary between any two steps (they are then *armed*). Once all ranks are armed, a second `BoundaryAsked` lets
rank 0 choose the boundary. When every member has reported what it holds there, `WorldFormed` names the boundary's step. Or
the plan ends with `WorldPlanDropped`, and the ranks go on. Plan numbers are never used twice, so that a late report for a
dropped plan is not counted for the next one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, get_args

from dlrover_core.job import nodes, ranges, world
from dlrover_core.job.checkpoints import KeepingStarted, RanksArmed, StepsHeld
from dlrover_core.job.job import GroupScaled, JobSuspended
from dlrover_core.job.names import group_of
from dlrover_core.job.sets import Coupled
from dlrover_core.kernel.engine import Facts
from dlrover_core.kernel.events import Record, event
from dlrover_core.kernel.state import lasting
from dlrover_core.kernel.wire import part
from dlrover_core.words import first_few

NODES_NAMED_MAX = 4
NONE = -1  # no step


@event(42)
class WorldPlanned(NamedTuple):
    """A change is prepared while training goes on.

    joining:  nodes known to join so far; other nodes that are there at the boundary join too
    leaving:  nodes that leave; with no node joining or leaving, the job is suspended at the boundary
    deadline: microseconds; at that time a drain is forced, and a growth is dropped
    """

    group: str
    plan: int
    joining: tuple[str, ...]
    leaving: tuple[str, ...]
    deadline: int


@event(43)
class WorldPlanDropped(NamedTuple):
    """A planned change will not happen, or not by this plan. Its ranks go on."""

    group: str
    plan: int
    reason: str


@event(49)
class BoundaryAsked(NamedTuple):
    """Members' ranks must look for the boundary of a plan. ``go``: all of them look, and rank 0 may choose it."""

    group: str
    plan: int
    go: bool


@event(93, version=2, upcast={1: lambda fields: (*fields, 0)})
class NodeDrained(NamedTuple):
    """A person or the platform wants a node's ``host`` free: its workers stop with their grace, its successor avoids it.

    host:     empty: the node leaves by itself, and its successor may use the same host
    deadline: the node leaves at a step boundary with its successor ready, and at this time (microseconds) at the latest; 0:
              at once
    """

    node: str
    host: str
    reason: str
    deadline: int = 0


@part(5)
class Boundary(NamedTuple):
    """To members: prepare for this planned change (0: none). ``go``: rank 0 may choose its boundary."""

    plan: int = 0
    go: bool = False


@dataclass(slots=True)
class Leaving:
    """A node that must leave once its world has changed.

    ``why``: reason of its release; ``out``: the present world is without it.
    """

    why: str
    since: int
    deadline: int
    out: bool = False


# Invariants of planned changes, after every event; `PlanSlice.check` yields the broken ones.
#
#   N        `number`: the number of the newest plan
#   P        `by_group`: the open plan of a group; p is its number
#   K        `keeping`: the newest generation of a group whose ranks can agree on a boundary
#   J, L     `joining`, `leaving`: the nodes that join and leave by P
#   a, g, h  `asked_at`, `go_at`, `held_at`: when ranks were asked to look for the boundary, when rank 0 was allowed to choose
#            it, and when the first node waited there; 0: not yet
#   A, H     `armed`, `at_boundary`: the nodes whose ranks all look for the boundary, and the nodes that wait there
#   W        `leaving` of the slice: the nodes that leave; each since `since`, at its `deadline` at the latest
#
#   number   1 <= p <= N, and no two plans have one number
#   aim      P changes generation K of its group; no node is in J and L, and both are empty where the job will be suspended
#   stages   a is set before g, g before h; A is empty before a, H is empty exactly before h
#   leave    since <= deadline in W


@dataclass(slots=True)
class Plan:
    """A change of one generation that is being prepared. Times are microseconds by the leader's clock.

    number:      counts the plans of the job
    generation:  the generation that it changes
    joining:     nodes that the next generation gains
    leaving:     nodes that the next generation loses
    deadline:    when the plan is carried out, or dropped, at the latest
    asked_at:    when the members' ranks were asked to look for a step boundary; 0: not yet
    go_at:       when rank 0 was allowed to choose that boundary, because all ranks looked for it; 0: not yet
    held_at:     when the first node reached the boundary; 0: none has
    armed:       nodes whose ranks all look for the boundary, and since when
    at_boundary: nodes that wait at the boundary, and the steps that are complete in their memory
    """

    number: int
    generation: int
    joining: tuple[str, ...]
    leaving: tuple[str, ...]
    deadline: int
    asked_at: int = 0
    go_at: int = 0
    held_at: int = 0
    armed: dict[str, int] = field(default_factory=dict)
    at_boundary: dict[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def pauses(self) -> bool:
        """Is the job suspended at the boundary of this plan?"""
        return not (self.joining or self.leaving)

    def awaited(self, members: int) -> int:
        """How many members' ranks have not done yet what they were asked: look for the boundary, or reach it."""
        return members - len(self.at_boundary if self.go_at else self.armed)

    def check(self) -> Iterator[str]:
        """Yields what breaks the invariants above, as far as one plan shows it."""
        if set(self.joining) & set(self.leaving):
            yield f"aim: J = {self.joining}, L = {self.leaving}"
        set_at = [at for at in (self.asked_at, self.go_at, self.held_at) if at]
        stages = f"a = {self.asked_at}, g = {self.go_at}, h = {self.held_at}"
        if set_at != sorted(set_at) or (self.go_at and not self.asked_at) or (self.held_at and not self.go_at):
            yield f"stages: {stages}"
        if (self.armed and not self.asked_at) or bool(self.at_boundary) != bool(self.held_at):
            yield f"stages: {stages}, A = {list(self.armed)}, H = {list(self.at_boundary)}"

    def boundary(self, members: Iterable[str]) -> int:
        """The step that all members hold at the boundary; -1: not all wait there yet, or they have no step in common."""
        common: set[int] | None = None
        for name in members:
            steps = self.at_boundary.get(name)
            if steps is None:
                return NONE
            common = set(steps) if common is None else common & set(steps)
        return max(common, default=NONE) if common is not None else NONE


@dataclass(slots=True)
class Drops:
    """How many plans of a generation were dropped after its ranks were asked, and when the newest was."""

    count: int = 0
    at: int = 0


@dataclass(slots=True)
class PlanSlice(Coupled):
    """All planned changes.

    number:   of the newest plan
    keeping:  newest generation whose ranks can agree on a boundary, by set
    by_group: the open plan, by set
    leaving:  nodes that must leave, by name
    drops:    dropped plans of the present generation, by set
    """

    number: int = lasting(int)
    keeping: dict[str, int] = field(default_factory=dict)
    by_group: dict[str, Plan] = field(default_factory=dict)
    leaving: dict[str, Leaving] = field(default_factory=dict)
    drops: dict[str, Drops] = field(default_factory=dict)

    def asked(self, group: str) -> tuple[int, bool]:
        """What orders tell members: the plan whose boundary their ranks look for (0: none), and whether rank 0 may choose it."""
        plan = self.by_group.get(group)
        return (plan.number, plan.go_at > 0) if plan is not None and plan.asked_at else (0, False)

    def waits(self, group: str) -> bool:
        """Do ranks of a set wait at a boundary, as they were asked to?"""
        plan = self.by_group.get(group)
        return plan is not None and bool(plan.at_boundary)

    def check(self) -> Iterator[str]:
        """Yields what breaks the invariants above `Plan`."""
        numbers = [plan.number for plan in self.by_group.values()]
        if len(set(numbers)) < len(numbers) or not all(1 <= number <= self.number for number in numbers):
            yield f"number: p = {numbers}, N = {self.number}"
        for group, plan in self.by_group.items():
            if plan.generation != self.keeping.get(group):
                yield f"aim: plan {plan.number} of {group} changes {plan.generation}, K = {self.keeping.get(group)}"
            yield from (f"{group}: {wrong}" for wrong in plan.check())
        for node, leaving in self.leaving.items():
            if leaving.since > leaving.deadline:
                yield f"leave: {node} leaves since {leaving.since}, and until {leaving.deadline}"


def in_words(joining: Sequence[str], leaving: Sequence[str]) -> str:
    """Which nodes join and leave, in words: 'worker-1-1 joins, worker-1-0 leaves'."""
    said = ((joining, "join"), (leaving, "leave"))
    return ", ".join(
        f"{first_few(who, NODES_NAMED_MAX)} {verb}{'s' if len(who) == 1 else ''}" for who, verb in said if who
    )


# ---- evolve


def _on_keeping(slice_: PlanSlice, fact: KeepingStarted, record: Record) -> None:
    slice_.keeping.pop(fact.group, None)
    if fact.planned:
        slice_.keeping[fact.group] = fact.generation


def _on_drained(slice_: PlanSlice, fact: NodeDrained, record: Record) -> None:
    if not fact.deadline:
        return
    known = slice_.leaving.get(fact.node)
    if known is None:
        why = nodes.DRAINED if fact.host else nodes.LEAVING
        slice_.leaving[fact.node] = Leaving(why, record.at, fact.deadline)
    elif fact.deadline < known.deadline:
        # The new deadline is too near to wait for a plan.
        known.since, known.deadline = record.at, fact.deadline


def _on_scaled(slice_: PlanSlice, fact: GroupScaled, record: Record) -> None:
    """Places that were to leave and are wanted again keep their nodes."""
    for name, leaving in list(slice_.leaving.items()):
        wanted = group_of(name) == fact.group and int(name.rsplit("-", 2)[1]) < fact.nodes_max
        if wanted and leaving.why == nodes.SCALED_DOWN and not leaving.out:
            del slice_.leaving[name]


def _on_planned(slice_: PlanSlice, fact: WorldPlanned, record: Record) -> None:
    slice_.number = fact.plan
    generation = slice_.keeping[fact.group]
    slice_.by_group[fact.group] = Plan(fact.plan, generation, fact.joining, fact.leaving, fact.deadline)
    for name in fact.leaving:
        if name not in slice_.leaving:
            slice_.leaving[name] = Leaving(nodes.SCALED_DOWN, record.at, fact.deadline)


def _on_dropped(slice_: PlanSlice, fact: WorldPlanDropped, record: Record) -> None:
    plan = slice_.by_group.pop(fact.group)
    if plan.asked_at:
        drops = slice_.drops.setdefault(fact.group, Drops())
        drops.count, drops.at = drops.count + 1, record.at


def _on_asked(slice_: PlanSlice, fact: BoundaryAsked, record: Record) -> None:
    plan = slice_.by_group[fact.group]
    if fact.go:
        plan.go_at = record.at
    else:
        plan.asked_at = record.at


def _on_armed(slice_: PlanSlice, fact: RanksArmed, record: Record) -> None:
    plan = slice_.by_group.get(slice_.set_of(fact.node))
    if plan is not None and plan.number == fact.plan:
        plan.armed[fact.node] = record.at


def _on_held(slice_: PlanSlice, fact: StepsHeld, record: Record) -> None:
    plan = slice_.by_group.get(slice_.set_of(fact.node))
    if plan is not None and fact.plan == plan.number and fact.generation == plan.generation and plan.go_at:
        plan.at_boundary[fact.node] = fact.steps
        plan.held_at = plan.held_at or record.at


def _on_formed(slice_: PlanSlice, fact: world.WorldFormed, record: Record) -> None:
    """Whatever was planned was a change of the generation before."""
    slice_.by_group.pop(fact.group, None)
    slice_.keeping.pop(fact.group, None)
    slice_.drops.pop(fact.group, None)
    members = {member.node for member in ranges.from_ranges(fact.group, fact.members)} if slice_.leaving else set()
    for name, leaving in slice_.leaving.items():
        if slice_.set_of(name) == fact.group and name not in members:
            leaving.out = True


def _on_suspended(slice_: PlanSlice, fact: JobSuspended, record: Record) -> None:
    """The plan of a suspension is over. Nodes that wait at its boundary report what they hold when their workers stop."""
    for group in [group for group, plan in slice_.by_group.items() if plan.pauses]:
        del slice_.by_group[group]


def _on_left(slice_: PlanSlice, fact: world.Ended, record: Record) -> None:
    slice_.leaving.pop(fact.node, None)


EVENTS = (WorldPlanned, WorldPlanDropped, BoundaryAsked, NodeDrained)

FACTS = Facts(
    kinds=EVENTS,
    evolve={
        GroupScaled: _on_scaled,
        JobSuspended: _on_suspended,
        KeepingStarted: _on_keeping,
        NodeDrained: _on_drained,
        WorldPlanned: _on_planned,
        WorldPlanDropped: _on_dropped,
        BoundaryAsked: _on_asked,
        RanksArmed: _on_armed,
        StepsHeld: _on_held,
        world.WorldFormed: _on_formed,
        **dict.fromkeys(get_args(world.Ended), _on_left),
    },
)
