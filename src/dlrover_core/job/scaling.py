"""What people ask of a running job: other sizes, a node's leave, a pause. Each is one command with one answer.

Growing plans nodes for the new places; a running world takes them in as it takes any late node (``on_join``). Shrinking
releases the places beyond the new maximum and forms the next world with those who stay. A drained node goes, and its
successor in the same place keeps off its host. Suspending stops the workers and leaves the nodes. All of it is planned: workers
have ``stop_grace_s`` to save what they have, no incident opens, and no budget is charged. Where ranks can agree on a step
boundary, the world is changed there and no step is lost (`changing`); else at once.

The sizes lie in the job's slice, so that everybody reads them from the effective spec.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from dlrover_core.errors import Refused, SpecError
from dlrover_core.job import changing, failures, job, nodes, planning, world
from dlrover_core.job.node_lifecycle import ALIVE
from dlrover_core.job.planning import NodeDrained
from dlrover_core.kernel.engine import Rules
from dlrover_core.kernel.events import Event, Record
from dlrover_core.spec import us

if TYPE_CHECKING:
    from dlrover_core.job.state import JobState

__all__ = ["RULES", "DrainNode", "LeaveNode", "NodeDrained", "NoticeNode", "ScaleGroup", "sizes"]

NAMED_MAX = 20


class ScaleGroup(NamedTuple):
    """Give a group other sizes. ``nodes_min`` 0: what it was, or ``nodes_max`` where that is less."""

    group: str
    nodes_min: int
    nodes_max: int
    reason: str


class DrainNode(NamedTuple):
    """Free a node's host. ``node`` may be a place, as ``worker-1``: then whoever is in it now."""

    node: str
    reason: str


class LeaveNode(NamedTuple):
    """A node's own agent was told to go, and asks to be let go in order."""

    node: str
    reason: str


class NoticeNode(NamedTuple):
    """A node's platform announces that it will take it away: ``within_us`` from now; 0: it does not say when."""

    node: str
    notice: str
    within_us: int


# ---- decide


def _scale(state: JobState, command: ScaleGroup, now: int) -> Iterator[Event]:
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
        raise Refused(f"group {group.name} has {sizes(new.nodes_min, new.nodes_max)} already")
    job.refuse_while_failing(state)
    yield job.GroupScaled(group.name, new.nodes_min, new.nodes_max, command.reason, revived)


def sizes(nodes_min: int, nodes_max: int) -> str:
    """'4 nodes', '2 to 4 nodes'."""
    several = f"{nodes_min} to {nodes_max}" if nodes_min < nodes_max else str(nodes_max)
    return f"{several} node{'' if nodes_max == 1 else 's'}"


def _drain(state: JobState, command: DrainNode | LeaveNode, now: int) -> Iterator[Event]:
    _refuse_unless_live(state)
    node = _named(state, command.node)
    if node.released:
        raise Refused(f"node {node.node} is {node.released} already")
    if node.state in ("planned", "pending"):
        raise Refused(f"node {node.node} is {node.state} and on no host yet: there is nothing to drain")
    if node.state not in ALIVE:
        raise Refused(f"node {node.node} is {node.state}: there is nothing left to drain")
    job.refuse_while_failing(state)
    if isinstance(command, LeaveNode):
        yield changing.drained(state, node, "", command.reason, now, us(state.job.spec.stop_grace_s))
    elif node.node in state.planning.leaving:
        raise Refused(f"node {node.node} leaves already: {state.planning.leaving[node.node].why}")
    else:
        yield changing.drained(state, node, node.host, command.reason, now, us(state.job.spec.plan_s))


def _notice(state: JobState, command: NoticeNode, now: int) -> Iterator[Event]:
    """A node that is to be taken away leaves before, where that can be without loss. Said again and again, it is heard once."""
    node = state.nodes.nodes.get(command.node)
    if node is None or not node.ready or not state.job.live or node.node in state.planning.leaving:
        return
    within_us = command.within_us or us(state.job.spec.plan_s)
    found = changing.drained(
        state, node, node.host, f"its platform says: {command.notice}"[: nodes.TEXT_MAX], now, within_us
    )
    if found.deadline and not world.held(state, node.group):
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
    group, why = fact.group, f"scaled to {sizes(fact.nodes_min, fact.nodes_max)}"
    leaving = [node for node in state.nodes.of(group) if node.index >= fact.nodes_max and not node.released]
    working = [node.node for node in leaving if changing.works(state, node)]
    yield from changing.advance(state, group, record.at, working)
    # Those whose leave is planned work on until the boundary.
    leaving = [node for node in leaving if node.node not in state.planning.leaving]
    yield from _without(state, group, leaving, why)
    for node in leaving:
        yield from nodes.release(state, node, nodes.SCALED_DOWN)
    if world.waits(state, group):
        # It could be formed now, in the new sizes: by those who stay, or because fewer are waited for.
        yield from world.form(state, group, record.at, why, at_once=world.complete(state, group))
    yield from _fill(state, group)
    yield from _outgrown(state, fact, record)


def _without(state: JobState, group: str, leaving: list[nodes.Node], why: str) -> Iterator[Event]:
    """Stop the world, with grace, if somebody who leaves still works in it."""
    current = state.world.worlds.get(group) or world.World()
    if any(current.member(node.node) is not None and not current.done(node.node) for node in leaving):
        yield from world.dissolve(state, group, why, planned=True)


def _fill(state: JobState, group: str) -> Iterator[Event]:
    """Plan a node for every wanted place that nobody is in. A member that has done its work and gone left no gap."""
    for index in range(state.job.spec.group(group).nodes_max):
        slot = state.nodes.slots.get(f"{group}-{index}")
        newest = f"{group}-{index}-{slot.incarnation}" if slot is not None else ""
        done = bool(newest) and state.world.of(newest).done(newest)
        if nodes.vacant(state, group, index) and not done:
            yield from nodes.plan(state, group, index)


def _outgrown(state: JobState, fact: job.GroupScaled, record: Record) -> Iterator[Event]:
    """Incidents of places that are wanted no more, and that broke no world, are over: nobody will fill those places."""
    for incident in list(state.failures.incidents.values()):
        aside = incident.generation == failures.ASIDE and not incident.closed and incident.group == fact.group
        if aside and int(incident.node.rsplit("-", 2)[1]) >= fact.nodes_max:
            yield failures.IncidentClosed(incident.number, max(0, record.at - incident.cause.at), 0)


def _clear(state: JobState, fact: NodeDrained, record: Record) -> Iterator[Event]:
    node = state.nodes.nodes[fact.node]
    if fact.deadline:
        yield from _clear_planned(state, node, record)
        return
    done = state.world.of(node.node).done(node.node)
    reason = nodes.DRAINED if fact.host else nodes.LEAVING
    yield from _without(state, node.group, [node], f"node {node.node} is {reason}")
    yield from nodes.release(state, node, reason)
    if not done:
        if nodes.vacant(state, node.group, node.index):
            yield from nodes.plan(state, node.group, node.index)
        yield from _recall(state, node.group)


def _clear_planned(state: JobState, node: nodes.Node, record: Record) -> Iterator[Event]:
    """Its successor first: it is to be there when the world is changed."""
    slot = state.nodes.slots[f"{node.group}-{node.index}"]
    leaving = state.planning.leaving[node.node]
    wanted = leaving.why != nodes.SCALED_DOWN and not leaving.out and not slot.given_up
    if wanted and planning.successor(state, node) is None:
        yield from nodes.plan(state, node.group, node.index)
    yield from changing.advance(state, node.group, record.at)


def _recall(state: JobState, group: str) -> Iterator[Event]:
    """Where there is no world any more, members that had finished and gone are needed again."""
    if not (state.world.worlds.get(group) or world.World()).active:
        yield from nodes.complete(state, group)


def _pause(state: JobState, fact: job.JobSuspended, record: Record) -> Iterator[Event]:
    for group in state.job.spec.groups:
        yield from world.dissolve(state, group.name, "the job is suspended", planned=True)
        yield from _recall(state, group.name)


def _go_on(state: JobState, fact: job.JobResumed, record: Record) -> Iterator[Event]:
    for group in state.job.spec.groups:
        if world.waits(state, group.name):
            yield from world.form(
                state, group.name, record.at, "the job is resumed", at_once=world.complete(state, group.name)
            )


RULES = Rules(
    decide={ScaleGroup: _scale, DrainNode: _drain, LeaveNode: _drain, NoticeNode: _notice},
    react={
        job.GroupScaled: _resize,
        NodeDrained: _clear,
        job.JobSuspended: _pause,
        job.JobResumed: _go_on,
    },
)
