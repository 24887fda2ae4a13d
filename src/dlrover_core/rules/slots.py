"""Slots: which are wanted, vacant or followed; nodes planned, replaced and released in them."""

from __future__ import annotations

from collections.abc import Iterator

from dlrover_core.errors import Refused
from dlrover_core.job import nodes
from dlrover_core.job.job import JobStopped
from dlrover_core.job.node_lifecycle import COMING
from dlrover_core.job.nodes import Node, NodeGone, NodePlanned, NodeReleased
from dlrover_core.job.state import JobState
from dlrover_core.kernel.events import Event, Record


def ended_by(state: JobState, fact: object, record: Record) -> Iterator[Event]:
    """`JobStopped`, when a stopping job has nothing left that runs: what its rules and those of its nodes react with."""
    if state.job.state == "stopping" and not any(
        node.state in ("running", "suspect") and node.joined for node in state.nodes.nodes.values()
    ):
        yield JobStopped()


def wanted(state: JobState, group: str) -> int:
    """How many places of a group are still wanted: its nodes_max less those given up."""
    nodes_max = state.job.spec.group(group).nodes_max
    return nodes_max - sum(index < nodes_max for index in state.nodes.tally.given_up.get(group, ()))


def present(state: JobState, name: str) -> Node:
    """The node of that name. Raises `Refused` for one that is gone or never was."""
    node = state.nodes.nodes.get(name)
    if node is None:
        raise Refused(f"node {name!r} is not a node of run {state.job.run or '-'}")
    return node


def plan(state: JobState, group: str, index: int) -> Iterator[Event]:
    """Plan the next incarnation in a place, clear of the hosts in quarantine, of those to be cleared, and of lost nodes."""
    slot = state.nodes.slots.get(f"{group}-{index}")
    incarnation = slot.incarnation + 1 if slot else 0
    avoid = [*state.hosts.quarantined(state.at), *shunned(state)]
    memory_mib = state.incidents.memory.get(group, state.job.spec.group(group).memory_mib)
    name = f"{group}-{index}-{incarnation}"
    yield NodePlanned(name, group, index, incarnation, tuple(dict.fromkeys(avoid)), memory_mib)


def shunned(state: JobState) -> list[str]:
    """Hosts that are avoided until their node is seen gone."""
    cleared = hosts_to_clear(state)
    if not state.nodes.tally.shunned:
        return cleared
    # By the name that its backend gave it, where that is known still.
    return cleared + [
        state.hosts.host_of(node.node) or node.host for node in state.nodes.nodes.values() if node.shunned
    ]


def release(state: JobState, node: Node, reason: str) -> Iterator[Event]:
    """Let a node go, by plan. Of one that no backend has accepted yet nothing will be seen: it is gone at once."""
    yield NodeReleased(node.node, reason)
    if node.state == "planned":
        yield NodeGone(node.node, "it was never started", expected=True)


def replace(state: JobState, name: str) -> Iterator[Event]:
    """Plan the next incarnation of this node's place, and release the node where it still stands.

    Of one that was to leave all the same nobody new is planned: its successor is on the way, or its place is wanted no more.
    """
    node, leaves = state.nodes.nodes.get(name), followed(state, name)
    if node is not None and not node.released:
        yield NodeReleased(name, "replaced")
    group, index, _ = name.rsplit("-", 2)
    if not leaves:
        yield from plan(state, group, int(index))


def give_up(state: JobState, name: str) -> Iterator[Event]:
    """Its place is not wanted any more: the world goes on smaller."""
    yield NodeReleased(name, "replaced" if followed(state, name) else "given up")


def followed(state: JobState, name: str) -> bool:
    """Was its place to be another's, or nobody's, without its failure?"""
    group, index, incarnation = name.rsplit("-", 2)
    slot = state.nodes.slots.get(f"{group}-{index}")
    taken = slot is not None and slot.incarnation > int(incarnation) and not vacant(state, group, int(index))
    return taken or int(index) >= state.job.spec.group(group).nodes_max


def complete(state: JobState, group: str) -> Iterator[Event]:
    """Plan a node for every wanted place that has none: whoever finished and left is needed again when the world re-forms."""
    for index in range(state.job.spec.group(group).nodes_max):
        if vacant(state, group, index):
            yield from plan(state, group, index)


def vacant(state: JobState, group: str, index: int) -> bool:
    """Is this place wanted, and nobody in it or on the way to it?"""
    slot, latest = state.nodes.slots.get(f"{group}-{index}"), state.nodes.latest(group, index)
    given_up = slot is not None and slot.given_up
    return not given_up and (latest is None or bool(latest.released) or latest.state not in COMING)


def hosts_to_clear(state: JobState) -> list[str]:
    """Hosts that are to be free once their node has left at a boundary."""
    here = state.nodes.nodes
    return [
        state.hosts.host_of(name) or here[name].host
        for name, one in state.plans.leaving.items()
        if one.why == nodes.DRAINED and name in here and here[name].host
    ]
