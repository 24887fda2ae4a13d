"""Planned changes of a world, decided: growth, shrinking, drain and migration that lose no step.

Where the ranks of the running generation can agree on a step boundary (`KeepingStarted`), whoever is to leave stays at work until
its successor is there, and whoever is to join waits until the ranks have come to one. Then the world is changed in one batch:
what its workers had made is whole in memory, and they only wait to be stopped. Nodes that have left stay without work until the
next world has made a step, so that what only they hold can be had from them.

One plan of a group is open at a time. What is wished for before its boundary was asked for joins it (as a new plan); a drain
that comes later follows it, and shrinking takes its place. Nothing waits for ever: whoever leaves has a deadline, and shortly
before it goes without its successor; at the deadline it is forced, as in a world that saves nothing. A growth is dropped then,
and planned again, a few times and after longer and longer pauses. Ranks wait `boundary_s` at a boundary, no more. A failure forms
a world as ever: with those who are there to join, and without those who leave, if their successors are there. Where ranks cannot
agree, or have not said so yet, everything is as it is without plans.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import get_args

from dlrover_core.errors import Refused
from dlrover_core.job import checks, nodes, plans, progress, ranges, world
from dlrover_core.job.checkpoints import KeepingStarted, RanksArmed, ReportArmed, StepsHeld
from dlrover_core.job.names import group_of
from dlrover_core.job.state import JobState
from dlrover_core.kernel.engine import Rules, Telling, Tells, always
from dlrover_core.kernel.events import Event, Record
from dlrover_core.rules import membership, slots, worlds
from dlrover_core.spec import us

TRIES_MAX = 3
"""Plans of one generation that may come to nothing once ranks were told; then it is let be."""


# ---- who leaves


def works(state: JobState, node: nodes.Node) -> bool:
    """Is it a member of the running world, and not done?"""
    current = state.world.of(node.node)
    return current.active and current.member(node.node) is not None and not current.done(node.node)


def drained(state: JobState, node: nodes.Node, host: str, reason: str, now: int, within_us: int) -> plans.NodeDrained:
    """The event of a node's leave: at a step boundary within so long, where there can be one, else at once.

    Who has left its world at one already stays for the next world's first step, if that is made in time.
    """
    known = state.plans.leaving.get(node.node)
    lends = known is not None and known.out
    planned = within_us > 0 and (lends or (works(state, node) and membership.able(state, node.group)))
    return plans.NodeDrained(node.node, host, reason, now + within_us if planned else 0)


def _going(state: JobState, group: str) -> tuple[str, ...]:
    """Members that are to leave."""
    leaving, here = state.plans.leaving, state.nodes.nodes
    return tuple(name for name in leaving if group_of(name) == group and works(state, here[name]))


def _hurry_at(state: JobState, leaving: plans.Leaving) -> int:
    """From when on it waits for no successor."""
    left = leaving.deadline - leaving.since
    return leaving.deadline - min(us(state.job.spec.stop_grace_s), left // 2)


def _ripe(state: JobState, going: Sequence[str], now: int) -> tuple[str, ...]:
    """Those whose leave can be planned: all, if everybody's successor is on the way who has one; else whoever is in a hurry."""
    known = state.plans.leaving
    waiting = [name for name in going if name in known and not _followed(state, name, known[name])]
    if not waiting:
        return tuple(going)
    return tuple(name for name in going if name not in known or now >= _hurry_at(state, known[name]))


def _followed(state: JobState, name: str, leaving: plans.Leaving) -> bool:
    """Is its successor on the way, or nobody to come?"""
    node = state.nodes.nodes[name]
    slot = state.nodes.slots[f"{node.group}-{node.index}"]
    return leaving.why == nodes.SCALED_DOWN or slot.given_up or membership.successor(state, node) is not None


# ---- the course of a plan


def advance(state: JobState, group: str, now: int, scaled: Sequence[str] = ()) -> Iterator[Event]:
    """Bring a group's planned change as far as it comes now; begin one where there is cause. ``scaled``: members too many."""
    plan = state.plans.by_group.get(group)
    if not membership.able(state, group):
        if plan is not None and membership.resume(state, group) < 0:
            yield plans.WorldPlanDropped(group, plan.number, "its world has ended")
        return
    going = (*_going(state, group), *scaled)
    if plan is not None:
        why = _void(state, plan, group, going, scaled, now)
        if why:
            yield plans.WorldPlanDropped(group, plan.number, why)
            plan = None
    if plan is None:
        proposed = _proposed(state, group, going, now)
        if proposed is None:
            return
        yield proposed
    plan = state.plans.by_group[group]
    if not plan.asked_at and _warm(state, plan, now):
        yield plans.BoundaryAsked(group, plan.number, go=False)
    yield from _proceed(state, group, now)


def _proceed(state: JobState, group: str, now: int) -> Iterator[Event]:
    """Everybody looks: the boundary may be chosen. Everybody is there: the world is changed."""
    plan = state.plans.by_group.get(group)
    if plan is None or not plan.asked_at or not membership.able(state, group):
        return
    if plan.awaited(len(state.world.worlds[group].members)) > 0:
        return
    if not plan.go_at:
        yield plans.BoundaryAsked(group, plan.number, go=True)
        return
    if membership.resume(state, group) < 0:
        yield plans.WorldPlanDropped(group, plan.number, "the nodes hold no step in common at its boundary")
        return
    why = f"planned change {plan.number}: {plans.in_words(plan.joining, plan.leaving)}"
    formed = list(worlds.form(state, group, now, why, at_once=True))
    yield from worlds.dissolve(state, group, why, planned=True)
    yield from formed


def _warm(state: JobState, plan: plans.Plan, now: int) -> bool:
    """Are those who join there? Whoever is in a hurry does not wait for them."""
    if any(now >= _hurry_at(state, state.plans.leaving[name]) for name in plan.leaving):
        return True
    return not membership.unready(state, plan)


def _void(state: JobState, plan: plans.Plan, group: str, going: Sequence[str], scaled: Sequence[str], now: int) -> str:
    """Why a plan has to be given up; empty: it need not."""
    spec, leaving = state.job.spec, state.plans.leaving
    ripe = set(_ripe(state, going, now)) - set(plan.leaving)
    hurried = [name for name in ripe if name not in leaving or now >= _hurry_at(state, leaving[name])]
    if set(plan.leaving) - set(going):
        return "who was to leave stays, or is gone"
    if ripe and not plan.asked_at:
        return "another change joins it"
    if hurried:
        return "another change cannot wait for it"
    if _bereft(state, plan, now):
        return "who was to come instead is gone"
    if not plan.leaving and not worlds.larger(state, group):
        return "who was to join is gone"
    if not plan.leaving and now >= plan.deadline:
        return f"ranks came to no boundary within {spec.plan_s:g} s"
    if plan.held and now >= _held_until(state, plan):
        return f"{len(plan.held)} nodes waited {spec.boundary_s:g} s at its boundary for the others"
    return ""


def _bereft(state: JobState, plan: plans.Plan, now: int) -> bool:
    """Has the successor of somebody who leaves ended, and is there time for another?"""
    for name in plan.leaving:
        leaving, node = state.plans.leaving[name], state.nodes.nodes[name]
        place = f"{node.group}-{node.index}-"
        awaited = leaving.why != nodes.SCALED_DOWN and any(one.startswith(place) for one in plan.joining)
        coming = membership.successor(state, node)
        if awaited and now < _hurry_at(state, leaving) and (coming is None or coming.node not in plan.joining):
            return True
    return False


def _held_until(state: JobState, plan: plans.Plan) -> int:
    # While nobody led nobody could say that it waits.
    return max(plan.held_at, state.job.calm_at) + us(state.job.spec.boundary_s)


# ---- when one begins


def _grows(state: JobState, group: str) -> int:
    """The size a world can grow to at a boundary; 0: it cannot, or must not."""
    return worlds.larger(state, group) if state.job.spec.on_join != "never" else 0


def _not_before(state: JobState, group: str) -> int | None:
    """When the next plan of this generation may begin; None: none may any more."""
    drops = state.plans.drops.get(group)
    if drops is None:
        return 0
    return None if drops.count >= TRIES_MAX else drops.at + us(state.job.spec.boundary_s * 2 ** (drops.count - 1))


def _proposed(state: JobState, group: str, going: Sequence[str], now: int) -> plans.WorldPlanned | None:
    known, not_before = state.plans.leaving, _not_before(state, group)
    leaving = _ripe(state, going, now)
    hurried = any(name not in known or now >= _hurry_at(state, known[name]) for name in leaving)
    if not_before is None or (now < not_before and not hurried):
        return None
    size = _grows(state, group)
    grows = size and worlds.grow_at(state, group) <= now
    if not leaving and not grows:
        return None
    current, here = state.world.worlds[group], state.nodes.nodes
    coming = [membership.successor(state, here[name]) for name in leaving if name in known]
    joining = [one.node for one in coming if one is not None and current.member(one.node) is None]
    if grows:
        late = [one.node for one in membership.ready_nodes(state, group) if current.member(one.node) is None]
        joining += [name for name in late if name not in joining][: size - len(current.members)]
    latest = now + us(state.job.spec.plan_s)
    deadline = min([known[name].deadline for name in leaving if name in known], default=latest)
    return plans.WorldPlanned(group, state.plans.number + 1, tuple(joining), leaving, deadline)


# ---- when it is late


def _force(state: JobState, group: str, names: Sequence[str], now: int) -> Iterator[Event]:
    """Whoever is to leave leaves now, as in a world that saves nothing."""
    here, plan = state.nodes.nodes, state.plans.by_group.get(group)
    why = f"{plans.named(names)}: time to leave is over"
    if any(works(state, here[name]) for name in names):
        if plan is not None:
            yield plans.WorldPlanDropped(group, plan.number, why)
        yield from worlds.dissolve(state, group, why, planned=True)
    for name in names:
        node, leaving = here[name], state.plans.leaving[name]
        yield from slots.release(state, node, leaving.why)
        if leaving.why != nodes.SCALED_DOWN and slots.vacant(state, group, node.index):
            yield from slots.plan(state, group, node.index)
    if membership.waits(state, group):
        yield from slots.complete(state, group)
    yield from worlds.form_where_awaited(state, group, now, why)


def _overdue(state: JobState, now: int) -> dict[str, list[str]]:
    """Whose deadline is over, by group."""
    found: dict[str, list[str]] = {}
    for name, leaving in state.plans.leaving.items():
        if leaving.deadline <= now:
            found.setdefault(group_of(name), []).append(name)
    return found


def _due(state: JobState) -> int | None:
    if not state.job.live:
        return None
    times = [leaving.deadline for leaving in state.plans.leaving.values()]
    for group in state.plans.keeping:
        if membership.able(state, group):
            times += _times(state, group)
    return min(times, default=None)


def _times(state: JobState, group: str) -> Iterator[int]:
    """When time alone brings a group's change on."""
    plan, known, going = state.plans.by_group.get(group), state.plans.leaving, _going(state, group)
    if plan is not None:
        if not plan.leaving:
            yield plan.deadline
        if plan.held:
            yield _held_until(state, plan)
        yield from (_hurry_at(state, known[name]) for name in going if name not in plan.leaving or not plan.asked_at)
        return
    not_before = _not_before(state, group)
    if not_before is None:
        return
    if _grows(state, group):
        yield max(not_before, worlds.grow_at(state, group))
    if going and all(_followed(state, name, known[name]) for name in going):
        yield max(not_before, state.at) if not_before else state.at
    yield from (_hurry_at(state, known[name]) for name in going)


def _tick(state: JobState, now: int) -> Iterator[Event]:
    if not state.job.live:
        return
    for group, names in _overdue(state, now).items():
        yield from _force(state, group, names, now)
    for group in list(state.plans.keeping):
        yield from advance(state, group, now)


# ---- decide


def _armed(state: JobState, command: ReportArmed, now: int) -> Iterator[Event]:
    node = slots.present(state, command.node)
    plan = state.plans.by_group.get(node.group)
    if plan is None or plan.number != command.plan or not plan.asked_at or not works(state, node):
        raise Refused(f"plan {command.plan} is over")
    if command.node in plan.armed:
        raise Refused(f"node {command.node!r} looks for the boundary of plan {command.plan} already")
    yield RanksArmed(command.node, command.plan)


# ---- react


def _on_group(state: JobState, fact: KeepingStarted | checks.CheckJudged, record: Record) -> Iterator[Event]:
    yield from advance(state, fact.group, record.at)


def _on_dissolved(state: JobState, fact: world.WorldDissolved, record: Record) -> Iterator[Event]:
    if fact.group in state.plans.by_group:
        yield from advance(state, fact.group, record.at)


def _on_node(state: JobState, fact: world.Ended | world.WorkersFinished, record: Record) -> Iterator[Event]:
    group = group_of(fact.node)
    if state.job.live and (group in state.plans.by_group or state.plans.leaving):
        yield from advance(state, group, record.at)


def _on_coming(state: JobState, fact: nodes.NodeJoined | nodes.NodePlanned, record: Record) -> Iterator[Event]:
    yield from advance(state, group_of(fact.node), record.at)


def _on_word(state: JobState, fact: RanksArmed | StepsHeld, record: Record) -> Iterator[Event]:
    if fact.plan:
        yield from _proceed(state, group_of(fact.node), record.at)


def _let_go(state: JobState, fact: progress.FirstStep, record: Record) -> Iterator[Event]:
    """The next world trains: those who left it have nothing left that it could need."""
    for name, leaving in list(state.plans.leaving.items()):
        if leaving.out and group_of(name) == group_of(fact.node):
            yield from slots.release(state, state.nodes.nodes[name], leaving.why)


# ---- what agents are told


def _boundary(state: JobState, group: str, asked: tuple[int, bool]) -> Telling:
    members = state.world.worlds[group].members if asked[0] else ()
    return Telling(working=dict.fromkeys((one.node for one in members), plans.Boundary(*asked)))


def lenders(state: JobState, group: str) -> tuple[tuple[str, int, int], ...]:
    """Nodes that left the world before this one at its boundary and are still here: address, first rank in it, how many."""
    ended = state.checkpoints.of(group).ended if state.plans.leaving else None
    current = state.world.worlds[group]
    if ended is None or ended.generation + 1 != current.generation or not ended.planned or current.resume_step < 0:
        return ()  # or a failure was first: nobody knows what they hold
    known, replicas = state.plans.leaving, state.checkpoints.replicas
    return tuple(
        (replicas[member.node], member.first_rank, member.nproc)
        for member in ranges.from_ranges(group, ended.members)
        if member.node in known and known[member.node].out and member.node in replicas
    )


RULES = Rules(
    decide={ReportArmed: _armed},
    react={
        KeepingStarted: _on_group,
        checks.CheckJudged: _on_group,
        world.WorldDissolved: _on_dissolved,
        world.WorkersFinished: _on_node,
        nodes.NodeJoined: _on_coming,
        nodes.NodePlanned: _on_coming,
        RanksArmed: _on_word,
        StepsHeld: _on_word,
        progress.FirstStep: _let_go,
        **dict.fromkeys(get_args(world.Ended), _on_node),
    },
    due=_due,
    tick=_tick,
    levels=dict.fromkeys((plans.WorldPlanned, plans.WorldPlanDropped, plans.BoundaryAsked, plans.NodeDrained), always),
    tells=Tells(lambda state, group: state.plans.asked(group), _boundary),
)
