"""What people and platforms ask for: other sizes, drains, notices, a pause."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from dlrover_core.errors import Refused, SpecError
from dlrover_core.job import incidents, job, nodes, operations, world
from dlrover_core.job.node_lifecycle import ALIVE
from dlrover_core.job.plans import NodeDrained
from dlrover_core.job.state import JobState
from dlrover_core.kernel.engine import Rules
from dlrover_core.kernel.events import Event, Record
from dlrover_core.rules import membership, plans, worlds
from dlrover_core.rules.slots import complete, plan, release, vacant
from dlrover_core.spec import us

NAMED_MAX = 20


# ---- decide


def _scale(state: JobState, command: operations.ScaleGroup, now: int) -> Iterator[Event]:
    _refuse_unless_live(state)
    spec = state.job.spec
    group = next((one for one in spec.groups if one.name == command.group), None)
    if group is None:
        raise Refused(f"there is no group {command.group!r}; there are: {', '.join(one.name for one in spec.groups)}")
    try:
        new = replace(
            group, nodes_min=command.nodes_min or min(group.nodes_min, command.nodes_max), nodes_max=command.nodes_max
        )
    except SpecError as error:
        raise Refused(str(error)) from error
    slots = state.nodes.slots.values()
    revived = tuple(
        slot.index for slot in slots if slot.group == group.name and slot.given_up and slot.index < new.nodes_max
    )
    if new == group and not revived:
        raise Refused(f"group {group.name} has {operations.sizes(new.nodes_min, new.nodes_max)} already")
    membership.refuse_while_failing(state)
    yield job.GroupScaled(group.name, new.nodes_min, new.nodes_max, command.reason, revived)


def _drain(state: JobState, command: operations.DrainNode | operations.LeaveNode, now: int) -> Iterator[Event]:
    _refuse_unless_live(state)
    node = _named(state, command.node)
    if node.released:
        raise Refused(f"node {node.node} is {node.released} already")
    if node.state in ("planned", "pending"):
        raise Refused(f"node {node.node} is {node.state} and on no host yet: there is nothing to drain")
    if node.state not in ALIVE:
        raise Refused(f"node {node.node} is {node.state}: there is nothing left to drain")
    membership.refuse_while_failing(state)
    if isinstance(command, operations.LeaveNode):
        yield plans.drained(state, node, "", command.reason, now, us(state.job.spec.stop_grace_s))
    elif node.node in state.plans.leaving:
        raise Refused(f"node {node.node} leaves already: {state.plans.leaving[node.node].why}")
    else:
        yield plans.drained(state, node, node.host, command.reason, now, us(state.job.spec.plan_s))


def _notice(state: JobState, command: operations.NoticeNode, now: int) -> Iterator[Event]:
    """A node that is to be taken away leaves before, where that can be without loss. Said again and again, it is heard once."""
    node = state.nodes.nodes.get(command.node)
    if node is None or not node.ready or not state.job.live or node.node in state.plans.leaving:
        return
    within_us = command.within_us or us(state.job.spec.plan_s)
    found = plans.drained(
        state, node, node.host, f"its platform says: {command.notice}"[: nodes.TEXT_MAX], now, within_us
    )
    if found.deadline and not membership.end_pending(state, node.group):
        yield found


def _named(state: JobState, name: str) -> nodes.Node:
    """The node of this name, or the newest one in the place of this name. Raises `Refused`, which tells those there are."""
    slot = state.nodes.slots.get(name)
    node = state.nodes.nodes.get(name) or (state.nodes.latest(slot.group, slot.index) if slot is not None else None)
    if node is None:
        here = [node.node for node in state.nodes.nodes.values() if not node.released]
        more = f" and {len(here) - NAMED_MAX} more" if len(here) > NAMED_MAX else ""
        raise Refused(f"there is no node {name!r}; there are: {', '.join(here[:NAMED_MAX]) or 'none'}{more}")
    return node


def _refuse_unless_live(state: JobState) -> None:
    if not state.job.live:
        raise Refused(f"the job is {state.job.state}")


# ---- react


def _resize(state: JobState, fact: job.GroupScaled, record: Record) -> Iterator[Event]:
    group, why = fact.group, f"scaled to {operations.sizes(fact.nodes_min, fact.nodes_max)}"
    leaving = [node for node in state.nodes.of(group) if node.index >= fact.nodes_max and not node.released]
    working = [node.node for node in leaving if plans.works(state, node)]
    yield from plans.advance(state, group, record.at, working)
    # Those whose leave is planned work on until the boundary.
    leaving = [node for node in leaving if node.node not in state.plans.leaving]
    yield from _without(state, group, leaving, why)
    for node in leaving:
        yield from release(state, node, nodes.SCALED_DOWN)
    # It could be formed now, in the new sizes: by those who stay, or because fewer are waited for.
    yield from worlds.form_where_awaited(state, group, record.at, why)
    yield from _fill(state, group)
    yield from _outgrown(state, fact, record)


def _without(state: JobState, group: str, leaving: list[nodes.Node], why: str) -> Iterator[Event]:
    """Stop the world, with grace, if somebody who leaves still works in it."""
    current = state.world.worlds.get(group) or world.World()
    if any(current.member(node.node) is not None and not current.done(node.node) for node in leaving):
        yield from worlds.dissolve(state, group, why, planned=True)


def _fill(state: JobState, group: str) -> Iterator[Event]:
    """Plan a node for every wanted place that nobody is in. A member that has done its work and gone left no gap."""
    for index in range(state.job.spec.group(group).nodes_max):
        slot = state.nodes.slots.get(f"{group}-{index}")
        newest = f"{group}-{index}-{slot.incarnation}" if slot is not None else ""
        done = bool(newest) and state.world.of(newest).done(newest)
        if vacant(state, group, index) and not done:
            yield from plan(state, group, index)


def _outgrown(state: JobState, fact: job.GroupScaled, record: Record) -> Iterator[Event]:
    """Incidents of places that are wanted no more, and that broke no world, are over: nobody will fill those places."""
    for incident in list(state.incidents.by_number.values()):
        aside = incident.generation == incidents.ASIDE and not incident.closed and incident.group == fact.group
        if aside and int(incident.node.rsplit("-", 2)[1]) >= fact.nodes_max:
            yield incidents.IncidentClosed(incident.number, max(0, record.at - incident.cause.at), 0)


def _clear(state: JobState, fact: NodeDrained, record: Record) -> Iterator[Event]:
    node = state.nodes.nodes[fact.node]
    if fact.deadline:
        yield from _clear_planned(state, node, record)
        return
    done = state.world.of(node.node).done(node.node)
    reason = nodes.DRAINED if fact.host else nodes.LEAVING
    yield from _without(state, node.group, [node], f"node {node.node} is {reason}")
    yield from release(state, node, reason)
    if not done:
        if vacant(state, node.group, node.index):
            yield from plan(state, node.group, node.index)
        yield from _recall(state, node.group)


def _clear_planned(state: JobState, node: nodes.Node, record: Record) -> Iterator[Event]:
    """Its successor first: it is to be there when the world is changed."""
    slot = state.nodes.slots[f"{node.group}-{node.index}"]
    leaving = state.plans.leaving[node.node]
    wanted = leaving.why != nodes.SCALED_DOWN and not leaving.out and not slot.given_up
    if wanted and membership.successor(state, node) is None:
        yield from plan(state, node.group, node.index)
    yield from plans.advance(state, node.group, record.at)


def _recall(state: JobState, group: str) -> Iterator[Event]:
    """Where there is no world any more, members that had finished and gone are needed again."""
    if not (state.world.worlds.get(group) or world.World()).active:
        yield from complete(state, group)


def _pause(state: JobState, fact: job.JobSuspended, record: Record) -> Iterator[Event]:
    for group in state.job.spec.groups:
        yield from worlds.dissolve(state, group.name, "the job is suspended", planned=True)
        yield from _recall(state, group.name)


def _go_on(state: JobState, fact: job.JobResumed, record: Record) -> Iterator[Event]:
    for group in state.job.spec.groups:
        yield from worlds.form_where_awaited(state, group.name, record.at, "the job is resumed")


RULES = Rules(
    decide={
        operations.ScaleGroup: _scale,
        operations.DrainNode: _drain,
        operations.LeaveNode: _drain,
        operations.NoticeNode: _notice,
    },
    react={
        job.GroupScaled: _resize,
        NodeDrained: _clear,
        job.JobSuspended: _pause,
        job.JobResumed: _go_on,
    },
)
