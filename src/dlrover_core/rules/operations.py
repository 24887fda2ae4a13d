"""Requests of people and platforms: other sizes, drains, notices, suspension."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from dlrover_core.errors import Refused, SpecError
from dlrover_core.job import incidents, job, nodes, notices, operations
from dlrover_core.job.names import group_of
from dlrover_core.job.node_lifecycle import ALIVE
from dlrover_core.job.plans import NodeDrained
from dlrover_core.job.state import JobState
from dlrover_core.kernel.engine import Rules
from dlrover_core.kernel.events import Event, Record
from dlrover_core.rules import membership, plans, worlds
from dlrover_core.rules.slots import complete, holder, plan, release, vacant
from dlrover_core.spec import us
from dlrover_core.words import first_few

NODES_NAMED_MAX = 20


# ---- decide


def _scale(state: JobState, command: operations.ScaleGroup, now: int) -> Iterator[Event]:
    _refuse_unless_live(state)
    if state.job.pausing:
        raise Refused("the job is about to be suspended")
    spec = state.job.spec
    known = ", ".join(one.name for one in spec.groups)
    if not command.group and len(spec.groups) > 1:
        raise Refused(f"which group is to be scaled? There are: {known}")
    group = next((one for one in spec.groups if one.name == (command.group or known)), None)
    if group is None:
        raise Refused(f"there is no group {command.group!r}; there are: {known}")
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
    if group.coupled in state.job.given_up:
        raise Refused(f"group {group.name} is given up: {state.job.given_up[group.coupled]}")
    membership.refuse_while_failing(state)
    yield job.GroupScaled(group.name, new.nodes_min, new.nodes_max, command.reason, revived)


def _drain(state: JobState, command: operations.DrainNode | operations.LeaveNode, now: int) -> Iterator[Event]:
    _refuse_unless_live(state)
    node = _named(state, command.node)
    if node.released:
        raise Refused(f"node {node.node} {node.stands('already')}")
    if node.state in ("planned", "pending"):
        raise Refused(f"node {node.node} is {node.state} and on no host yet: there is nothing to drain")
    if node.state not in ALIVE:
        raise Refused(f"node {node.node} is {node.state}: there is nothing left to drain")
    membership.refuse_while_failing(state)
    if isinstance(command, operations.LeaveNode):
        yield _leave(state, node, command, now)
    elif node.node in state.plans.leaving:
        raise Refused(f"node {node.node} leaves already: {state.plans.leaving[node.node].why}")
    else:
        yield plans.drained(state, node, node.host, command.reason, now, us(state.job.spec.plan_s))


def _leave(state: JobState, node: nodes.Node, command: operations.LeaveNode, now: int) -> NodeDrained:
    """The agent was told to go. If the platform has announced that, its deadline counts, and the host that it wants free."""
    within_us, notice = us(state.job.spec.stop_grace_s), state.notices.by_node.get(node.node)
    if notice is None:
        return plans.drained(state, node, "", command.reason, now, within_us)
    if notice.deadline > now:
        within_us = notice.deadline - now
    reason = f"{command.reason}; {notices.SAYS}{notice.words}"[: nodes.TEXT_MAX]
    return plans.drained(state, node, notice.clears(node.host), reason, now, within_us)


def _named(state: JobState, name: str) -> nodes.Node:
    """The node of this name, or the newest node in the place of this name. Raises `Refused`, which names the existing nodes."""
    slot = state.nodes.slots.get(name)
    node = state.nodes.nodes.get(name)
    if node is None and slot is not None:
        node = holder(state, slot.group, slot.index) or state.nodes.latest(slot.group, slot.index)
    if node is None:
        here = [node.node for node in state.nodes.nodes.values() if not node.released]
        raise Refused(f"there is no node {name!r}; there are: {first_few(here, NODES_NAMED_MAX) or 'none'}")
    return node


def _refuse_unless_live(state: JobState) -> None:
    if not state.job.live:
        raise Refused(f"the job is {state.job.state}")


# ---- react


def _resize(state: JobState, fact: job.GroupScaled, record: Record) -> Iterator[Event]:
    group, why = fact.group, f"scaled to {operations.sizes(fact.nodes_min, fact.nodes_max)}"
    leaving = [node for node in state.nodes.of(group) if node.index >= fact.nodes_max and not node.released]
    spec = state.job.spec.group(group)
    names = [spec.coupled] if spec.coupled else [state.set_of(node.node) for node in leaving]
    for name in names if spec.coupled else ():
        working = [node.node for node in leaving if plans.works(state, node)]
        yield from plans.advance(state, name, record.at, working)
    # Nodes whose leave is planned work on until the boundary.
    leaving = [node for node in leaving if node.node not in state.plans.leaving]
    for name in names:
        yield from _without(state, name, [one for one in leaving if state.set_of(one.node) == name], why)
    for node in leaving:
        yield from release(state, node, nodes.SCALED_DOWN)
    # A world may form now in the new sizes: from the nodes that stay, or because fewer are awaited.
    for name in names if spec.coupled else ():
        yield from worlds.form_where_awaited(state, name, record.at, why)
    yield from _fill(state, group)
    yield from _outgrown(state, fact, record)


def _without(state: JobState, group: str, leaving: list[nodes.Node], why: str) -> Iterator[Event]:
    """Stop the world, with grace, if a leaving node still works in it."""
    current = state.world.at(group)
    if any(current.member(node.node) is not None and not current.done(node.node) for node in leaving):
        yield from worlds.dissolve(state, group, why, planned=True)


def _fill(state: JobState, group: str) -> Iterator[Event]:
    """Plan a node for every wanted place without one. A member that has finished and left needs no successor."""
    for index in range(state.job.spec.group(group).nodes_max):
        slot = state.nodes.slots.get(f"{group}-{index}")
        newest = f"{group}-{index}-{slot.incarnation}" if slot is not None else ""
        done = bool(newest) and state.world.of(newest).done(newest)
        if vacant(state, group, index) and not done:
            yield from plan(state, group, index)


def _outgrown(state: JobState, fact: job.GroupScaled, record: Record) -> Iterator[Event]:
    """Close incidents of unwanted places that broke no world: no node will fill those places."""
    for incident in list(state.incidents.by_number.values()):
        aside = incident.generation == incidents.ASIDE and not incident.closed and group_of(incident.node) == fact.group
        if aside and int(incident.node.rsplit("-", 2)[1]) >= fact.nodes_max:
            yield incidents.IncidentClosed(incident.number, max(0, record.at - incident.cause.at), 0)


def _clear(state: JobState, fact: NodeDrained, record: Record) -> Iterator[Event]:
    node = state.nodes.nodes[fact.node]
    if fact.deadline:
        yield from _clear_planned(state, node, record)
        return
    done = state.world.of(node.node).done(node.node)
    reason = nodes.DRAINED if fact.host else nodes.LEAVING
    name = state.set_of(node.node)
    yield from _without(state, name, [node], f"node {node.node} is {reason}")
    yield from release(state, node, reason)
    if not done:
        if vacant(state, node.group, node.index):
            yield from plan(state, node.group, node.index)
        yield from recall(state, name)


def _clear_planned(state: JobState, node: nodes.Node, record: Record) -> Iterator[Event]:
    """Plan the successor first, so that it is ready when the world is changed."""
    slot = state.nodes.slots[f"{node.group}-{node.index}"]
    leaving = state.plans.leaving[node.node]
    wanted = leaving.why != nodes.SCALED_DOWN and not leaving.out and not slot.given_up
    if wanted and membership.successor(state, node) is None:
        yield from plan(state, node.group, node.index)
    yield from plans.advance(state, state.set_of(node.node), record.at)


def recall(state: JobState, group: str) -> Iterator[Event]:
    """Plan nodes for a set without a world: members that had finished and left are needed again."""
    if not state.world.at(group).active:
        yield from complete(state, group)


RULES = Rules(
    decide={
        operations.ScaleGroup: _scale,
        operations.DrainNode: _drain,
        operations.LeaveNode: _drain,
    },
    react={
        job.GroupScaled: _resize,
        NodeDrained: _clear,
    },
)
