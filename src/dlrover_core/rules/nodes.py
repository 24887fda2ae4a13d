"""Nodes: what backends observe and agents report becomes events."""

from __future__ import annotations

from collections.abc import Iterator

from dlrover_core.errors import Refused
from dlrover_core.job import job, nodes
from dlrover_core.job.node_lifecycle import COMING, LIFECYCLE
from dlrover_core.job.state import JobState
from dlrover_core.kernel.engine import Rules, always
from dlrover_core.kernel.events import Event, Record
from dlrover_core.rules import slots
from dlrover_core.words import plain

# ---- decide


def _observe(state: JobState, command: nodes.ObserveNodes, now: int) -> Iterator[Event]:
    for seen in command.nodes:
        yield from _seen(state, seen)
    if command.complete:
        listed = {seen.node for seen in command.nodes}
        for node in list(state.nodes.nodes.values()):
            # What was never accepted may simply not exist yet; everything else that is not listed is gone.
            if node.node not in listed and node.state != "planned":
                yield gone(node, "not listed")


def _seen(state: JobState, seen: nodes.Observed) -> Iterator[Event]:
    node = state.nodes.nodes.get(seen.node)
    if node is None:
        return
    trigger = {"pending": "pend", "running": "run", "succeeded": "succeed", "failed": "fail", "gone": "vanish"}.get(
        seen.phase
    )
    if trigger is None:
        raise Refused(f"node {seen.node!r}: a backend has no phase {seen.phase!r}")
    if not LIFECYCLE.may(node.state, trigger):
        return
    reason = plain(seen.reason, nodes.TEXT_MAX)
    if trigger == "pend":
        yield nodes.NodePending(node.node)
    elif trigger == "run":
        yield nodes.NodeRunning(node.node, plain(seen.host, nodes.NAME_MAX), plain(seen.rack, nodes.NAME_MAX))
    elif trigger == "succeed" and not _unfinished(state, node):
        yield nodes.NodeSucceeded(node.node)
    elif trigger == "succeed":
        yield nodes.NodeFailed(node.node, 0, "it ended before its work was done")
    elif trigger == "fail":
        yield nodes.NodeFailed(node.node, seen.exit_code, reason)
    else:
        yield gone(node, reason)


def _unfinished(state: JobState, node: nodes.Node) -> bool:
    """Is it still needed? Whoever goes then has failed us, however politely: no other event would bring a successor."""
    return state.job.live and not node.released and not state.world.of(node.node).done(node.node)


def gone(node: nodes.Node, reason: str) -> nodes.NodeGone:
    """The event of a node's disappearance."""
    return nodes.NodeGone(node.node, reason, bool(node.released) or node.state in ("succeeded", "failed", "lost"))


def _joined(state: JobState, command: nodes.ReportJoined, now: int) -> Iterator[Event]:
    node = slots.present(state, command.node)
    if node.released or node.state not in COMING:
        raise Refused(f"node {node.node!r} is {node.released or node.state}; its agent should leave")
    if node.joined:
        raise Refused(f"node {node.node!r} has an agent already")
    if (
        not 1 <= command.nproc <= nodes.NPROC_MAX
        or max(map(len, (command.host, command.address, command.seat))) > nodes.NAME_MAX
    ):
        raise Refused(
            f"node {node.node!r}: 1 to {nodes.NPROC_MAX} workers, and names of at most {nodes.NAME_MAX} characters"
        )
    yield nodes.NodeJoined(node.node, command.host, command.address, command.nproc, command.seat)


def _left(state: JobState, command: nodes.ReportLeft, now: int) -> Iterator[Event]:
    node = slots.present(state, command.node)
    if _unfinished(state, node) and LIFECYCLE.may(node.state, "fail"):
        yield nodes.NodeFailed(node.node, 0, "its agent left, unasked", seen=False)
    else:
        yield nodes.NodeLeft(node.node)


def _fault(state: JobState, command: nodes.ReportFault, now: int) -> Iterator[Event]:
    node = slots.present(state, command.node)
    if not LIFECYCLE.may(node.state, "fail"):
        raise Refused(f"node {node.node!r} is {node.state}")
    yield nodes.NodeFailed(node.node, -1, command.reason[: nodes.TEXT_MAX], seen=False)


# ---- react


def _populate(state: JobState, fact: job.JobCreated, record: Record) -> Iterator[Event]:
    for group in state.job.spec.groups:
        for index in range(group.nodes_max):
            yield from slots.plan(state, group.name, index)


RULES = Rules(
    decide={
        nodes.ObserveNodes: _observe,
        nodes.ReportJoined: _joined,
        nodes.ReportLeft: _left,
        nodes.ReportFault: _fault,
    },
    react={
        job.JobCreated: _populate,
        **dict.fromkeys(
            (nodes.NodeLeft, nodes.NodeGone, nodes.NodeFailed, nodes.NodeLost, nodes.NodeSucceeded), slots.ended_by
        ),
    },
    # A place that is open again is filled by an event of its own.
    levels=dict.fromkeys(set(nodes.EVENTS) - {nodes.PlaceReopened}, always),
)
