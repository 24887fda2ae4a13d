"""Notices: a node that its platform will take away leaves beforehand; a node whose notice is withdrawn stays.

A node with a notice leaves at a step boundary, with its successor ready, as a drained node does (`rules.plans`), by the
platform's deadline. If its world cannot change at a boundary yet, the leave waits until it can; if it never can, the node
trains until it is taken away. A withdrawn notice calls the leave off, unless the world is without the node already, or a
person wants it to leave; the successor is released.

A node whose host its platform cannot reach, and whose agent falls silent or dies, is lost at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from dlrover_core.job import nodes, notices, silence
from dlrover_core.job.checkpoints import KeepingStarted
from dlrover_core.job.node_lifecycle import COMING
from dlrover_core.job.state import JobState
from dlrover_core.kernel.engine import Rules, always, to_named
from dlrover_core.kernel.events import Event, Record
from dlrover_core.rules import membership, plans, slots
from dlrover_core.spec import us
from dlrover_core.words import plain

# ---- decide


def _notice(state: JobState, command: notices.NoticeNode, now: int) -> Iterator[Event]:
    node, known = state.nodes.nodes.get(command.node), state.notices.by_node.get(command.node)
    if node is None or not state.job.live:
        return
    if not command.notice:
        if known is not None:
            stays = known.leaves and _may_stay(state, node)
            yield notices.NoticeWithdrawn(node.node, stays, _host(state, node) if stays else "")
        return
    if node.released or node.state not in COMING:
        return
    words = plain(command.notice, nodes.TEXT_MAX)
    deadline = now + command.within_us if command.within_us > 0 else 0
    if known is not None and notices.same(known.deadline, deadline):
        return
    yield notices.NoticeGiven(node.node, words, deadline, _moves(state, node, known, deadline))


def _moves(state: JobState, node: nodes.Node, known: notices.Notice | None, deadline: int) -> bool:
    """Is the node's planned leave at this deadline from now on? A leave that a person asked for only moves to an earlier time."""
    leaving = state.plans.leaving.get(node.node)
    if leaving is None or not deadline or leaving.why == nodes.SCALED_DOWN:
        return False
    return (known is not None and known.leaves) or deadline < leaving.deadline


def _may_stay(state: JobState, node: nodes.Node) -> bool:
    """Is the node still a member of its world? Once the world has changed, it only lends what it holds."""
    leaving = state.plans.leaving.get(node.node)
    return leaving is not None and not leaving.out and node.ready


def _host(state: JobState, node: nodes.Node) -> str:
    return state.hosts.host_of(node.node) or node.host


# ---- react


def _given(state: JobState, fact: notices.NoticeGiven, record: Record) -> Iterator[Event]:
    if fact.moves:
        yield from plans.advance(state, state.set_of(fact.node), record.at)
    else:
        yield from _heed(state, fact.node, record.at)


def _heed(state: JobState, name: str, now: int) -> Iterator[Event]:
    """Plan the leave of a node that has a notice, if its world can change at a step boundary."""
    node, notice = state.nodes.nodes[name], state.notices.by_node[name]
    if not node.ready or name in state.plans.leaving or membership.end_pending(state, state.set_of(name)):
        return
    within_us = notice.deadline - now if notice.deadline else us(state.job.spec.plan_s)
    reason = f"{notices.SAYS}{notice.words}"[: nodes.TEXT_MAX]
    found = plans.drained(state, node, notice.clears(node.host), reason, now, within_us)
    if found.deadline:
        yield found


def _able(state: JobState, fact: KeepingStarted, record: Record) -> Iterator[Event]:
    """Ranks can agree on a boundary from now on: plan the leaves of earlier notices."""
    if not fact.planned or not state.job.live:
        return
    for name in list(state.notices.by_node):
        if state.set_of(name) == fact.group:
            yield from _heed(state, name, record.at)


def _withdrawn(state: JobState, fact: notices.NoticeWithdrawn, record: Record) -> Iterator[Event]:
    """The node stays: drop its planned change and release its successor."""
    if not fact.stays:
        return
    group, node = state.set_of(fact.node), state.nodes.nodes[fact.node]
    yield from plans.stay(state, group, fact.node, "its platform withdrew the notice")
    for one in state.nodes.of(node.group):
        if one.index == node.index and one.incarnation > node.incarnation and not one.released and one.state in COMING:
            yield from slots.release(state, one, nodes.SPARED)
    yield from plans.advance(state, group, record.at)


def _silent(state: JobState, fact: silence.NodeSuspected, record: Record) -> Iterator[Event]:
    reason = state.notices.unreached.get(fact.node)
    if reason is not None and state.job.live and not state.nodes.nodes[fact.node].released:
        yield nodes.NodeLost(fact.node, reason)


def _released(state: JobState, fact: nodes.NodeReleased, record: Record) -> Iterator[Event]:
    """The agent has died on a host that its platform cannot reach, and that will not see the node end: its place is free."""
    node, reason = state.nodes.nodes.get(fact.node), state.notices.unreached.get(fact.node)
    if reason is not None and node is not None and node.state == "failed" and not node.ended:
        yield nodes.NodeLost(fact.node, reason)


def _departures(state: JobState, group: str) -> Mapping[str, notices.Departure]:
    """How long their platform leaves nodes that leave: an agent that was told to go waits that long for its planned change."""
    if not state.notices.by_node:
        return {}
    leaving = ((name, state.plans.leaving.get(name)) for name in state.notices.by_node if state.set_of(name) == group)
    return {name: notices.Departure(one.deadline - one.since) for name, one in leaving if one is not None}


RULES = Rules(
    decide={notices.NoticeNode: _notice},
    react={
        notices.NoticeGiven: _given,
        notices.NoticeWithdrawn: _withdrawn,
        KeepingStarted: _able,
        nodes.NodeReleased: _released,
        silence.NodeSuspected: _silent,
    },
    levels=dict.fromkeys((notices.NoticeGiven, notices.NoticeWithdrawn), always),
    tells=to_named(_departures),
)
