"""Nodes: observations of backends and reports of agents become events."""

from __future__ import annotations

from collections.abc import Iterator

from dlrover_core.diagnosis import classify, signatures
from dlrover_core.errors import Refused
from dlrover_core.job import job, nodes, notices, observing
from dlrover_core.job.node_lifecycle import ALIVE, COMING, LIFECYCLE
from dlrover_core.job.state import JobState
from dlrover_core.kernel.engine import Rules, always
from dlrover_core.kernel.events import Event, Record
from dlrover_core.rules import slots
from dlrover_core.spec import us
from dlrover_core.words import plain

WORDS_EVERY_S = 60.0

# ---- decide


def _observe(state: JobState, command: nodes.ObserveNodes, now: int) -> Iterator[Event]:
    for seen in command.nodes:
        yield from _seen(state, seen, now)
    if command.complete:
        listed = {seen.node for seen in command.nodes}
        for node in list(state.nodes.nodes.values()):
            # A node that the backend never accepted may not exist yet; any other node that is not listed is gone.
            if node.node not in listed and node.state != "planned":
                yield gone(node, "not listed")


def _seen(state: JobState, seen: nodes.Observed, now: int) -> Iterator[Event]:
    node = state.nodes.nodes.get(seen.node)
    if node is None:
        return
    if seen.phase == nodes.REFUSED:
        if node.state == "planned" and seen.waits and _news(node, seen.waits, now):
            yield nodes.NodePending(node.node, plain(seen.waits, nodes.TEXT_MAX), accepted=False)
        return
    if seen.phase == nodes.UNREACHED:
        yield from _unreached(state, node, seen)
        return
    if node.node in state.notices.unreached and seen.phase in ("pending", "running"):
        yield notices.HostReached(node.node)
    trigger = {"pending": "pend", "running": "run", "succeeded": "succeed", "failed": "fail", "gone": "vanish"}.get(
        seen.phase
    )
    if trigger is None:
        raise Refused(f"node {seen.node!r}: a backend has no phase {seen.phase!r}")
    if trigger == "run" and node.state in ALIVE and _elsewhere(state, node, seen):
        # The agent came first, with its own name of the host; only the platform's name can be avoided.
        yield _running(node, seen)
    elif trigger == "pend" and node.state in ("planned", "pending") and _elsewhere(state, node, seen):
        yield observing.NodePlaced(node.node, plain(seen.host, nodes.NAME_MAX), plain(seen.rack, nodes.NAME_MAX))
    elif trigger in ("succeed", "fail") and node.state == "failed" and not node.ended:
        yield _end_seen(state, node, seen)
    if not LIFECYCLE.may(node.state, trigger):
        return
    reason = plain(seen.reason, nodes.TEXT_MAX)
    if trigger == "pend":
        if node.state == "planned" or _news(node, seen.waits, now):
            yield nodes.NodePending(node.node, plain(seen.waits, nodes.TEXT_MAX))
    elif trigger == "run":
        yield _running(node, seen)
    elif trigger == "succeed" and not _unfinished(state, node):
        yield nodes.NodeSucceeded(node.node)
    elif trigger == "succeed":
        yield nodes.NodeFailed(node.node, 0, "it ended before its work was done")
    elif trigger == "fail":
        yield nodes.NodeFailed(node.node, seen.exit_code, reason)
    else:
        yield gone(node, reason)


def _unreached(state: JobState, node: nodes.Node, seen: nodes.Observed) -> Iterator[Event]:
    """The platform cannot reach the node's host. While the agent is heard, that is news and no more: it knows better.

    Of a node that never joined no agent is heard, and none of its workers runs: it is lost now, not after ``launch_s``.
    """
    reason = plain(seen.reason, nodes.TEXT_MAX) or "its platform cannot reach its host"
    comes = node.state in COMING and not node.released
    if node.state == "suspect" or (node.state == "failed" and not node.ended) or (comes and not node.joined):
        yield nodes.NodeLost(node.node, reason)
    elif comes and node.node not in state.notices.unreached:
        yield notices.HostUnreached(node.node, reason)


def _end_seen(state: JobState, node: nodes.Node, seen: nodes.Observed) -> observing.NodeEnded:
    """The backend sees the end of a node that had failed unseen.

    Its word counts if it names a cause. Bare exit codes do not: by now we have ordered the node's deletion ourselves.
    """
    reason = plain(seen.reason, nodes.TEXT_MAX)
    found = classify.of_platform(signatures.table(state.job.spec.signatures), "failed", seen.exit_code, reason)
    return observing.NodeEnded(node.node, seen.exit_code, reason, not found.signature.startswith(("node.", "exit.")))


def _running(node: nodes.Node, seen: nodes.Observed) -> nodes.NodeRunning:
    return nodes.NodeRunning(node.node, plain(seen.host, nodes.NAME_MAX), plain(seen.rack, nodes.NAME_MAX))


def _elsewhere(state: JobState, node: nodes.Node, seen: nodes.Observed) -> bool:
    """Does the platform name another host than is known, or an unknown failure domain?"""
    host, rack = plain(seen.host, nodes.NAME_MAX), plain(seen.rack, nodes.NAME_MAX)
    return bool(host) and (host != node.host or bool(rack and state.hosts.rack_of(host) != rack))


def _news(node: nodes.Node, waits: str, now: int) -> bool:
    """Has the node begun or ceased to wait, or to wait because of avoided hosts? Other wording is recorded only now and then."""
    if bool(waits) != bool(node.waits) or nodes.off_avoided(waits) != nodes.off_avoided(node.waits):
        return True
    return plain(waits, nodes.TEXT_MAX) != node.waits and now - node.said_at >= us(WORDS_EVERY_S)


def _unfinished(state: JobState, node: nodes.Node) -> bool:
    """Is the node still needed? If it leaves now, that counts as a failure, because only a failure plans its successor."""
    return state.job.live and not node.released and not state.world.of(node.node).done(node.node)


def gone(node: nodes.Node, reason: str) -> nodes.NodeGone:
    """The event of a node's disappearance."""
    return nodes.NodeGone(node.node, reason, bool(node.released) or node.state in ("succeeded", "failed", "lost"))


def _joined(state: JobState, command: nodes.ReportJoined, now: int) -> Iterator[Event]:
    node = slots.present(state, command.node)
    if node.released or node.state not in COMING:
        raise Refused(f"node {node.node!r} {node.stands()}; its agent should leave")
    if node.joined:
        raise Refused(f"node {node.node!r} has an agent already")
    if (
        not 1 <= command.nproc <= nodes.NPROC_MAX
        or max(map(len, (command.host, command.address, command.seat))) > nodes.NAME_MAX
    ):
        raise Refused(
            f"node {node.node!r}: 1 to {nodes.NPROC_MAX} workers, and names of at most {nodes.NAME_MAX} characters"
        )
    # The platform's name of a host stays, whatever the agent calls it.
    host = (state.hosts.host_of(node.node) if node.placed_at else "") or command.host
    yield nodes.NodeJoined(node.node, host, command.address, command.nproc, command.seat)


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
    # `PlaceReopened` fills a place that is open again.
    levels=dict.fromkeys({*nodes.EVENTS, *observing.EVENTS} - {nodes.PlaceReopened}, always),
)
