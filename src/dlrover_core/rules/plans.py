"""Planned changes of a world, as decisions: growth, shrinking, drain and migration that lose no step.

If the ranks of the running generation can agree on a step boundary (`KeepingStarted`), a leaving node works on until its
successor is ready, and a joining node waits until the ranks have reached a boundary. Then one batch changes the world: all
that its workers had computed is complete in memory, and the workers only wait to be stopped. Nodes that have left stay,
without work, until the next world has made a step, so that it can fetch states that only they hold.

A group has one open plan. A change that is asked for before the plan's boundary was asked for joins it, as a new plan. A
later drain follows it; shrinking replaces it. Nothing waits for ever:

* A leaving node has a deadline. Shortly before it, the node no longer waits for its successor; at the deadline it is
  stopped as in
  a world that saves nothing.
* A growth is dropped at its deadline, and planned again a few times, after longer and longer pauses.
* Ranks wait at a boundary for `boundary_s` at most.
* A failure forms a world at once: with the joining nodes that are ready, and without the leaving nodes whose successors
  are.

If ranks cannot agree on a boundary, or have not said so yet, the world is changed at once, without a plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import get_args

from dlrover_core.errors import Refused
from dlrover_core.job import checks, nodes, plans, progress, ranges, waiting, world
from dlrover_core.job.checkpoints import KeepingStarted, RanksArmed, ReportArmed, StepsHeld
from dlrover_core.job.state import JobState
from dlrover_core.job.waiting import Wait
from dlrover_core.kernel.engine import Rules, Telling, Tells, always
from dlrover_core.kernel.events import Event, Record
from dlrover_core.rules import membership, slots, worlds
from dlrover_core.spec import us
from dlrover_core.words import first_few

TRIES_MAX = 3
"""Plans of one generation that may be dropped after ranks were asked; then no more are made."""


# ---- which nodes leave


def works(state: JobState, node: nodes.Node) -> bool:
    """Is the node a member of the running world that has not finished?"""
    current = state.world.of(node.node)
    return current.active and current.member(node.node) is not None and not current.done(node.node)


def drained(state: JobState, node: nodes.Node, host: str, reason: str, now: int, within_us: int) -> plans.NodeDrained:
    """The event of a node's leave: at a step boundary within this time where possible, else at once.

    A node that has left its world at a boundary stays for the next world's first step, if that comes in time.
    """
    known = state.plans.leaving.get(node.node)
    lends = known is not None and known.out
    planned = within_us > 0 and (lends or (works(state, node) and membership.able(state, state.set_of(node.node))))
    return plans.NodeDrained(node.node, host, reason, now + within_us if planned else 0)


def _going(state: JobState, group: str) -> tuple[str, ...]:
    """Members that must leave."""
    leaving, here = state.plans.leaving, state.nodes.nodes
    return tuple(name for name in leaving if state.set_of(name) == group and works(state, here[name]))


def _hurry_at(state: JobState, leaving: plans.Leaving) -> int:
    """When a leaving node stops waiting for its successor."""
    left = leaving.deadline - leaving.since
    return leaving.deadline - min(us(state.job.spec.stop_grace_s), left // 2)


def _ripe(state: JobState, going: Sequence[str], now: int) -> tuple[str, ...]:
    """Leaving members that a plan may contain now: all, once every successor is planned; else only those near their deadline."""
    known = state.plans.leaving
    waiting = [name for name in going if name in known and not _followed(state, name, known[name])]
    if not waiting:
        return tuple(going)
    return tuple(name for name in going if name not in known or now >= _hurry_at(state, known[name]))


def _followed(state: JobState, name: str, leaving: plans.Leaving) -> bool:
    """Is a successor planned for the leaving node, or is none needed?"""
    node = state.nodes.nodes[name]
    slot = state.nodes.slots[f"{node.group}-{node.index}"]
    return leaving.why == nodes.SCALED_DOWN or slot.given_up or membership.successor(state, node) is not None


# ---- the course of a plan


def advance(state: JobState, group: str, now: int, scaled: Sequence[str] = ()) -> Iterator[Event]:
    """Take a group's planned change as far as it can go now, or begin one. ``scaled``: members beyond the new size."""
    plan = state.plans.by_group.get(group)
    if not membership.able(state, group):
        if plan is not None and membership.resume(state, group) < 0:
            yield plans.WorldPlanDropped(group, plan.number, "its world has ended")
        return
    going = (*_going(state, group), *scaled)
    if plan is not None:
        why = _off(state, plan) if plan.pauses or state.job.pausing else _void(state, plan, group, going, scaled, now)
        if why:
            yield plans.WorldPlanDropped(group, plan.number, why)
            plan = None
    if plan is None:
        proposed = _pause(state, group) if state.job.pausing else _proposed(state, group, going, now)
        if not isinstance(proposed, plans.WorldPlanned):
            return
        yield proposed
    plan = state.plans.by_group[group]
    if not plan.asked_at and _warm(state, plan, now):
        yield plans.BoundaryAsked(group, plan.number, go=False)
    yield from _proceed(state, group, now)


def stay(state: JobState, group: str, name: str, why: str) -> Iterator[Event]:
    """Drop the planned change that a node was to leave by: it stays."""
    plan = state.plans.by_group.get(group)
    if plan is not None and name in plan.leaving:
        yield plans.WorldPlanDropped(group, plan.number, f"{name} stays: {why}")


def _proceed(state: JobState, group: str, now: int) -> Iterator[Event]:
    """Once all ranks look for the boundary, let rank 0 choose it; once all nodes wait there, change the world."""
    plan = state.plans.by_group.get(group)
    if plan is None or not plan.asked_at or not membership.able(state, group):
        return
    if plan.awaited(len(state.world.worlds[group].members)) > 0:
        return
    if not plan.go_at:
        yield plans.BoundaryAsked(group, plan.number, go=True)
        return
    if plan.pauses:  # the ranks of all sets are waited for (`rules.suspension`)
        return
    if membership.resume(state, group) < 0:
        yield plans.WorldPlanDropped(group, plan.number, "the nodes hold no step in common at its boundary")
        return
    why = f"planned change {plan.number}: {plans.in_words(plan.joining, plan.leaving)}"
    formed = list(worlds.form(state, group, now, why, at_once=True))
    yield from worlds.dissolve(state, group, why, planned=True)
    yield from formed


def _warm(state: JobState, plan: plans.Plan, now: int) -> bool:
    """Are the joining nodes ready? Near a deadline they are not waited for."""
    if any(now >= _hurry_at(state, state.plans.leaving[name]) for name in plan.leaving):
        return True
    return not membership.unready(state, plan)


def _off(state: JobState, plan: plans.Plan) -> str:
    """Why a plan is dropped because a suspension was planned or taken back; empty: it goes on."""
    if plan.pauses == state.job.pausing:
        return ""
    return "the suspension is taken back" if plan.pauses else "the job is about to be suspended"


def _pause(state: JobState, group: str) -> plans.WorldPlanned:
    """The plan that brings ranks to the boundary of a suspension: no node joins, and none leaves."""
    suspension = state.job.suspension
    assert suspension is not None
    return plans.WorldPlanned(group, state.plans.number + 1, (), (), suspension.deadline)


def _void(state: JobState, plan: plans.Plan, group: str, going: Sequence[str], scaled: Sequence[str], now: int) -> str:
    """Why a plan has to be dropped; empty: it need not."""
    spec, leaving = state.job.spec, state.plans.leaving
    ripe = set(_ripe(state, going, now)) - set(plan.leaving)
    hurried = [name for name in ripe if name not in leaving or now >= _hurry_at(state, leaving[name])]
    if set(plan.leaving) - set(going):
        return "a node that was to leave stays, or is gone"
    if ripe and not plan.asked_at:
        return "merged with another change"
    if hurried:
        return "another change cannot wait for it"
    if _bereft(state, plan, now):
        return "the successor of a leaving node is gone"
    if not plan.leaving and not worlds.size_of(worlds.larger(state, group)):
        return "the nodes that were to join are gone"
    if not plan.leaving and now >= plan.deadline:
        return f"the ranks reached no boundary within {spec.plan_s:g} s"
    if plan.at_boundary and now >= held_until(state, plan):
        return f"{len(plan.at_boundary)} nodes waited {spec.boundary_s:g} s at its boundary for the others"
    return ""


def _bereft(state: JobState, plan: plans.Plan, now: int) -> bool:
    """Has the successor of a leaving node ended while there is time for another one?"""
    for name in plan.leaving:
        leaving, node = state.plans.leaving[name], state.nodes.nodes[name]
        place = f"{node.group}-{node.index}-"
        awaited = leaving.why != nodes.SCALED_DOWN and any(one.startswith(place) for one in plan.joining)
        coming = membership.successor(state, node)
        if awaited and now < _hurry_at(state, leaving) and (coming is None or coming.node not in plan.joining):
            return True
    return False


def held_until(state: JobState, plan: plans.Plan) -> int:
    """Until when ranks wait at a boundary for ranks of other nodes."""
    # While there was no leader, no node could report that it waits.
    return max(plan.held_at, state.job.calm_at) + us(state.job.spec.boundary_s)


# ---- when one begins


def _grows(state: JobState, group: str) -> int | Wait:
    """The size to which a world can grow at a boundary; or what it lacks; 0: it cannot, or must not."""
    return worlds.larger(state, group) if state.job.policy(group).on_join != "never" else 0


def _not_before(state: JobState, group: str) -> int | None:
    """When the next plan of this generation may begin; None: no more plans."""
    drops = state.plans.drops.get(group)
    if drops is None:
        return 0
    return None if drops.count >= TRIES_MAX else drops.at + us(state.job.spec.boundary_s * 2 ** (drops.count - 1))


def why_none(state: JobState, group: str, now: int) -> Wait | None:
    """Why a wanted change is not planned yet; None: one is planned, or no change is wanted or possible."""
    if group in state.plans.by_group or not membership.able(state, group):
        return None
    found = _proposed(state, group, _going(state, group), now)
    return found if isinstance(found, Wait) else None


def _proposed(state: JobState, group: str, going: Sequence[str], now: int) -> plans.WorldPlanned | Wait | None:
    """The change to plan now, or what it waits for; None: no node should leave, and none is there to join."""
    known, not_before = state.plans.leaving, _not_before(state, group)
    leaving = _ripe(state, going, now)
    hurried = any(name not in known or now >= _hurry_at(state, known[name]) for name in leaving)
    larger = _grows(state, group)
    size = worlds.size_of(larger)
    if not_before is None or (now < not_before and not hurried):
        return _after_drops(state, group, not_before or 0) if going or size else None
    grows = size and worlds.grow_at(state, group) <= now
    if not leaving and not grows:
        return _unripe(state, group, going, larger, now)
    current, here = state.world.worlds[group], state.nodes.nodes
    coming = [membership.successor(state, here[name]) for name in leaving if name in known]
    joining = [one.node for one in coming if one is not None and current.member(one.node) is None]
    if grows:
        late = [one.node for one in membership.ready_nodes(state, group) if current.member(one.node) is None]
        joining += [name for name in late if name not in joining][: size - len(current.members)]
    latest = now + us(state.job.spec.plan_s)
    deadline = min([known[name].deadline for name in leaving if name in known], default=latest)
    return plans.WorldPlanned(group, state.plans.number + 1, tuple(joining), leaving, deadline)


def _after_drops(state: JobState, group: str, not_before: int) -> Wait:
    """Plans of this generation were dropped. ``not_before``: when the next one may begin; 0: none may."""
    count = state.plans.drops[group].count
    words = f"{count} planned change{'s' if count > 1 else ''} of this generation came to nothing"
    return Wait(group, waiting.PLAN, words if not_before else f"{words}: no other is tried", not_before)


def _unripe(state: JobState, group: str, going: Sequence[str], larger: int | Wait, now: int) -> Wait | None:
    """What a change waits for: successors of the leaving nodes, or more nodes that could join with those that are there."""
    known = state.plans.leaving
    if going:
        alone = tuple(name for name in going if not _followed(state, name, known[name]))
        words = f"{first_few(alone, plans.NODES_NAMED_MAX)} to leave once a successor is on the way"
        return Wait(group, waiting.PLAN, words, min(_hurry_at(state, known[name]) for name in going), alone)
    if isinstance(larger, Wait) or not larger:
        return larger or None
    found = worlds.in_time(state, group, larger, now)
    return found if isinstance(found, Wait) else None


# ---- when it is late


def _force(state: JobState, group: str, names: Sequence[str], now: int) -> Iterator[Event]:
    """Leaving nodes leave now, as in a world that saves nothing."""
    here, plan = state.nodes.nodes, state.plans.by_group.get(group)
    why = f"{first_few(names, plans.NODES_NAMED_MAX)}: time to leave is over"
    if any(works(state, here[name]) for name in names):
        if plan is not None:
            yield plans.WorldPlanDropped(group, plan.number, why)
        yield from worlds.dissolve(state, group, why, planned=True)
    for name in names:
        node, leaving = here[name], state.plans.leaving[name]
        yield from slots.release(state, node, leaving.why)
        if leaving.why != nodes.SCALED_DOWN and slots.vacant(state, node.group, node.index):
            yield from slots.plan(state, node.group, node.index)
    if membership.waits(state, group):
        yield from slots.complete(state, group)
    yield from worlds.form_where_awaited(state, group, now, why)


def _overdue(state: JobState, now: int) -> dict[str, list[str]]:
    """Nodes past their deadline, by group."""
    found: dict[str, list[str]] = {}
    for name, leaving in state.plans.leaving.items():
        if leaving.deadline <= now:
            found.setdefault(state.set_of(name), []).append(name)
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
    """The times at which a group's change goes on without an event."""
    plan, known, going = state.plans.by_group.get(group), state.plans.leaving, _going(state, group)
    if state.job.pausing:
        return
    if plan is not None:
        if not plan.leaving:
            yield plan.deadline
        if plan.at_boundary:
            yield held_until(state, plan)
        yield from (_hurry_at(state, known[name]) for name in going if name not in plan.leaving or not plan.asked_at)
        return
    not_before = _not_before(state, group)
    if not_before is None:
        return
    if worlds.size_of(_grows(state, group)):
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
    plan = state.plans.by_group.get(state.set_of(node.node))
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
    group = state.set_of(fact.node)
    if state.job.live and (group in state.plans.by_group or state.plans.leaving):
        yield from advance(state, group, record.at)


def _on_coming(state: JobState, fact: nodes.NodeJoined | nodes.NodePlanned, record: Record) -> Iterator[Event]:
    yield from advance(state, state.set_of(fact.node), record.at)


def _on_word(state: JobState, fact: RanksArmed | StepsHeld, record: Record) -> Iterator[Event]:
    if fact.plan:
        yield from _proceed(state, state.set_of(fact.node), record.at)


def _let_go(state: JobState, fact: progress.FirstStep, record: Record) -> Iterator[Event]:
    """Release the nodes that left the world before: the next world trains, and needs nothing from their memory."""
    for name, leaving in list(state.plans.leaving.items()):
        if leaving.out and state.set_of(name) == state.set_of(fact.node):
            yield from slots.release(state, state.nodes.nodes[name], leaving.why)


# ---- what agents are told


def _boundary(state: JobState, group: str, asked: tuple[int, bool]) -> Telling:
    members = state.world.worlds[group].members if asked[0] else ()
    return Telling(working=dict.fromkeys((one.node for one in members), plans.Boundary(*asked)))


def lenders(state: JobState, group: str) -> tuple[tuple[str, int, int], ...]:
    """Nodes that left at the last world's boundary and still exist: address, first rank in that world, number of ranks."""
    ended = state.checkpoints.of(group).ended if state.plans.leaving else None
    current = state.world.worlds[group]
    if ended is None or ended.generation + 1 != current.generation or not ended.planned or current.resume_step < 0:
        return ()  # a failure came first: what they hold is unknown
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
