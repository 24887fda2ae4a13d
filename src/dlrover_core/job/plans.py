"""Planned changes of a world, as facts: which is prepared, who joins and who leaves, and how far it has come.

A generation whose ranks save with us can agree on a step boundary: all of them save there and wait. A world that is changed then
goes on from that very step, so growth, shrinking, drain and migration lose none. `rules.plans` decides; this is what it knows.

A plan goes from `WorldPlanned` (whoever joins gets warm, training goes on) over `BoundaryAsked` (members' ranks are armed: they
look for the boundary between any two steps; once all do, it may be chosen) and what every member holds there, to `WorldFormed`
with the boundary's step; or it ends with `WorldPlanDropped`, and ranks go on. Its number never comes back: ranks that were told
of it, and told that it is off, are never taken for armed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, get_args

from dlrover_core.job import nodes, ranges, world
from dlrover_core.job.checkpoints import KeepingStarted, RanksArmed, StepsHeld
from dlrover_core.job.job import GroupScaled, JobCreated
from dlrover_core.job.names import group_of
from dlrover_core.kernel.engine import Facts
from dlrover_core.kernel.events import Record, event
from dlrover_core.kernel.wire import part

NONE = -1  # no step
NAMED_MAX = 4


@event(42)
class WorldPlanned(NamedTuple):
    """A change is prepared while training goes on. ``deadline`` in microseconds: a drain is then forced, a growth dropped.

    ``joining`` are those who were known to join then; whoever else is there at the boundary is taken in too.
    """

    group: str
    plan: int
    joining: tuple[str, ...]
    leaving: tuple[str, ...]
    deadline: int


@event(43)
class WorldPlanDropped(NamedTuple):
    """A planned change will not happen, or not as this plan: its ranks go on."""

    group: str
    plan: int
    reason: str


@event(49)
class BoundaryAsked(NamedTuple):
    """Members' ranks are to look for the boundary of a plan; with ``go`` all of them look, and it may be chosen."""

    group: str
    plan: int
    go: bool


@event(93, version=2, upcast={1: lambda fields: (*fields, 0)})
class NodeDrained(NamedTuple):
    """A person, or the platform, wants the node's ``host`` free: its workers stop with their grace, a successor keeps off it.

    Without a host nobody does: the node leaves by itself, and whoever comes next may be on the same one. With a ``deadline``, in
    microseconds, it goes at a step boundary, its successor being there, and at that time at the latest; 0: at once.
    """

    node: str
    host: str
    reason: str
    deadline: int = 0


@part(5)
class Boundary(NamedTuple):
    """To members: get ready for this planned change (0: none); ``go``: its boundary may be chosen."""

    plan: int = 0
    go: bool = False


@dataclass(slots=True)
class Leaving:
    """A node that is to go once its world has changed. ``why``: as its release will say; ``out``: the world is without it."""

    why: str
    since: int
    deadline: int
    out: bool = False


# What holds of every planned change after every event; `PlanSlice.check` says what does not.
#
#   N        `number`: the number of the newest plan
#   P        `by_group`: the open plan of a group; p is its number
#   K        `keeping`: the newest generation of a group whose ranks can agree on a boundary
#   J, L     `joining`, `leaving`: the nodes that join and leave by P
#   a, g, h  `asked_at`, `go_at`, `held_at`: when ranks were asked to look for the boundary, when it could be chosen, and when
#            the first node waited there; 0: not yet
#   A, H     `armed`, `held`: the nodes whose ranks all look for the boundary, and the nodes that wait there
#   W        `leaving` of the slice: the nodes that leave; each since `since`, at its `deadline` at the latest
#
#   number   1 <= p <= N, and no two plans have one number
#   aim      P changes generation K of its group; J and L have no node in common, and one of them has a node
#   stages   a is set before g, g before h; A is empty before a, H is empty exactly before h
#   leave    since <= deadline in W


@dataclass(slots=True)
class Plan:
    """A change of ``generation`` that is being prepared.

    ``asked_at``: since when members' ranks are to look for its boundary; ``go_at``: since when it may be chosen; ``armed``: the
    nodes whose ranks all look, and since when; ``held``: what is whole in the memory of those that wait there, since ``held_at``.
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
    held: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def awaited(self, members: int) -> int:
        """How many members' ranks have not done yet what they were asked: to look for the boundary, or to reach it."""
        return members - len(self.held if self.go_at else self.armed)

    def check(self) -> Iterator[str]:
        """What of the formula above does not hold of this plan by itself."""
        if set(self.joining) & set(self.leaving) or not (self.joining or self.leaving):
            yield f"aim: J = {self.joining}, L = {self.leaving}"
        set_at = [at for at in (self.asked_at, self.go_at, self.held_at) if at]
        stages = f"a = {self.asked_at}, g = {self.go_at}, h = {self.held_at}"
        if set_at != sorted(set_at) or (self.go_at and not self.asked_at) or (self.held_at and not self.go_at):
            yield f"stages: {stages}"
        if (self.armed and not self.asked_at) or bool(self.held) != bool(self.held_at):
            yield f"stages: {stages}, A = {list(self.armed)}, H = {list(self.held)}"

    def boundary(self, members: Iterable[str]) -> int:
        """The step that all members hold there; -1: they do not all wait yet, or have none in common."""
        common: set[int] | None = None
        for name in members:
            steps = self.held.get(name)
            if steps is None:
                return NONE
            common = set(steps) if common is None else common & set(steps)
        return max(common, default=NONE) if common is not None else NONE


@dataclass(slots=True)
class Drops:
    """How many plans of a generation came to nothing once its ranks had been told, and when the newest was dropped."""

    count: int = 0
    at: int = 0


@dataclass(slots=True)
class PlanSlice:
    """What is planned. ``keeping``: each group's newest generation whose ranks can agree on a boundary; ``leaving`` by node."""

    number: int = 0
    keeping: dict[str, int] = field(default_factory=dict)
    by_group: dict[str, Plan] = field(default_factory=dict)
    leaving: dict[str, Leaving] = field(default_factory=dict)
    drops: dict[str, Drops] = field(default_factory=dict)

    def asked(self, group: str) -> tuple[int, bool]:
        """What members are told: the plan whose boundary their ranks look for (0: none), and may it be chosen?"""
        plan = self.by_group.get(group)
        return (plan.number, plan.go_at > 0) if plan is not None and plan.asked_at else (0, False)

    def waits(self, group: str) -> bool:
        """Do ranks of a group stand at a boundary, as they were told to?"""
        plan = self.by_group.get(group)
        return plan is not None and bool(plan.held)

    def check(self) -> Iterator[str]:
        """What of the formula above `Plan` does not hold."""
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
    """Who joins and who leaves: 'worker-1-1 joins, worker-1-0 leaves'."""
    said = ((joining, "join"), (leaving, "leave"))
    return ", ".join(f"{named(who)} {verb}{'s' if len(who) == 1 else ''}" for who, verb in said if who)


def named(names: Sequence[str]) -> str:
    """The first few."""
    more = f" and {len(names) - NAMED_MAX} more" if len(names) > NAMED_MAX else ""
    return f"{', '.join(names[:NAMED_MAX])}{more}"


# ---- evolve


def _on_created(slice_: PlanSlice, fact: JobCreated, record: Record) -> None:
    slice_.keeping.clear()
    slice_.by_group.clear()
    slice_.leaving.clear()
    slice_.drops.clear()


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
        # It is in a hurry now.
        known.since, known.deadline = record.at, fact.deadline


def _on_scaled(slice_: PlanSlice, fact: GroupScaled, record: Record) -> None:
    """Places that were to go and are wanted again keep their nodes."""
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
    plan = slice_.by_group.get(group_of(fact.node))
    if plan is not None and plan.number == fact.plan:
        plan.armed[fact.node] = record.at


def _on_held(slice_: PlanSlice, fact: StepsHeld, record: Record) -> None:
    plan = slice_.by_group.get(group_of(fact.node))
    if plan is not None and fact.plan == plan.number and fact.generation == plan.generation and plan.go_at:
        plan.held[fact.node] = fact.steps
        plan.held_at = plan.held_at or record.at


def _on_formed(slice_: PlanSlice, fact: world.WorldFormed, record: Record) -> None:
    """Planned or not: what was prepared was a change of the generation before."""
    slice_.by_group.pop(fact.group, None)
    slice_.keeping.pop(fact.group, None)
    slice_.drops.pop(fact.group, None)
    members = {member.node for member in ranges.from_ranges(fact.group, fact.members)} if slice_.leaving else set()
    for name, leaving in slice_.leaving.items():
        if group_of(name) == fact.group and name not in members:
            leaving.out = True


def _on_left(slice_: PlanSlice, fact: world.Ended, record: Record) -> None:
    slice_.leaving.pop(fact.node, None)


EVENTS = (WorldPlanned, WorldPlanDropped, BoundaryAsked, NodeDrained)

FACTS = Facts(
    kinds=EVENTS,
    evolve={
        JobCreated: _on_created,
        GroupScaled: _on_scaled,
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
