"""Slots: wanted and vacant places, and nodes planned, replaced and released in them."""

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
    """`JobStopped`, once nothing of a stopping job runs; the rules of the job and of its nodes use it."""
    if state.job.state == "stopping" and not any(
        node.state in ("running", "suspect") and node.joined for node in state.nodes.nodes.values()
    ):
        yield JobStopped()


def wanted(state: JobState, group: str) -> int:
    """How many places of a group are still wanted: nodes_max less those given up."""
    nodes_max = state.job.spec.group(group).nodes_max
    return nodes_max - sum(index < nodes_max for index in state.nodes.tally.given_up.get(group, ()))


def present(state: JobState, name: str) -> Node:
    """The node of that name. Raises `Refused` if it is gone or never existed."""
    node = state.nodes.nodes.get(name)
    if node is None:
        raise Refused(f"node {name!r} is not a node of run {state.job.run or '-'}")
    return node


def plan(state: JobState, group: str, index: int) -> Iterator[Event]:
    """Plan the next incarnation of a place, off the avoided hosts. Yields nothing while the group asks for no nodes."""
    if not asks(state, group, index):
        return
    slot = state.nodes.slots.get(f"{group}-{index}")
    incarnation = slot.incarnation + 1 if slot else 0
    avoid = avoided(state, group, index)
    memory_mib = state.incidents.memory.get(group, state.job.spec.group(group).memory_mib)
    name = f"{group}-{index}-{incarnation}"
    yield NodePlanned(name, group, index, incarnation, tuple(dict.fromkeys(avoid)), memory_mib)


def asks(state: JobState, group: str, index: int) -> bool:
    """Is a node asked for in a place now? Not while the job is suspended without nodes, or its set has given its nodes back."""
    return state.job.suspension is None and state.sets.at(group, index) not in state.queueing.back


def avoided(state: JobState, group: str, index: int) -> list[str]:
    """Hosts that a place's next node should avoid: quarantined hosts, hosts to be cleared, hosts of lost nodes."""
    if f"{group}-{index}" in state.queueing.anywhere:
        return []
    return [*state.hosts.quarantined(state.at), *shunned(state)]


def shunned(state: JobState) -> list[str]:
    """Hosts that are avoided until their node is seen gone."""
    cleared = hosts_to_clear(state)
    if not state.nodes.tally.shunned:
        return cleared
    # By the backend's name of the host, where that is still known.
    return cleared + [
        state.hosts.host_of(node.node) or node.host for node in state.nodes.nodes.values() if node.shunned
    ]


def release(state: JobState, node: Node, reason: str) -> Iterator[Event]:
    """Release a node by plan. A node that no backend has accepted yet is gone at once, because no observation would follow."""
    yield NodeReleased(node.node, reason)
    if node.state == "planned":
        yield NodeGone(node.node, "it was never started", expected=True)


def replace(state: JobState, name: str) -> Iterator[Event]:
    """Plan the next incarnation of this node's place, and release the node if it still exists.

    A node that had to leave anyway gets no further successor: one is planned already, or the place is no longer wanted.
    """
    node, leaves = state.nodes.nodes.get(name), followed(state, name)
    if node is not None and not node.released:
        yield NodeReleased(name, "replaced")
    group, index, _ = name.rsplit("-", 2)
    if not leaves:
        yield from plan(state, group, int(index))


def give_up(state: JobState, name: str) -> Iterator[Event]:
    """Give up the node's place: the world goes on smaller."""
    yield NodeReleased(name, "replaced" if followed(state, name) else "given up")


def followed(state: JobState, name: str) -> bool:
    """Would the node's place pass to another node, or to none, even without the failure?"""
    group, index, incarnation = name.rsplit("-", 2)
    slot = state.nodes.slots.get(f"{group}-{index}")
    later = slot is not None and slot.incarnation > int(incarnation)
    taken = later and not vacant(state, group, int(index), besides=name)
    return taken or int(index) >= state.job.spec.group(group).nodes_max


def complete(state: JobState, name: str) -> Iterator[Event]:
    """Plan a node for every wanted place of a set without one: a world that forms again needs finished members too."""
    place = state.sets.place(name)
    for group in state.sets.groups(name):
        nodes_max = state.job.spec.group(group).nodes_max
        for index in range(nodes_max) if place < 0 else range(place, min(place + 1, nodes_max)):
            if vacant(state, group, index):
                yield from plan(state, group, index)


def vacant(state: JobState, group: str, index: int, *, besides: str = "") -> bool:
    """Is the place wanted, with no node in it or on the way, other than ``besides``?"""
    slot = state.nodes.slots.get(f"{group}-{index}")
    if state.job.given_up and state.sets.at(group, index) in state.job.given_up:
        return False
    given_up = slot is not None and slot.given_up
    return not given_up and holder(state, group, index, besides=besides) is None


def holder(state: JobState, group: str, index: int, *, besides: str = "") -> Node | None:
    """The node that is in a place, or on the way to it: the newest, or an older one that stayed though a newer was planned."""
    slot = state.nodes.slots.get(f"{group}-{index}")
    for incarnation in range(slot.incarnation, -1, -1) if slot is not None else ():
        name = f"{group}-{index}-{incarnation}"
        node = state.nodes.nodes.get(name)
        here = node is not None and not node.released and node.state in COMING and name != besides
        if here and (slot is None or incarnation == slot.incarnation or name not in state.plans.leaving):
            return node
    return None


def hosts_to_clear(state: JobState) -> list[str]:
    """Hosts that should be free once their node has left at a boundary."""
    here = state.nodes.nodes
    return [
        state.hosts.host_of(name) or here[name].host
        for name, one in state.plans.leaving.items()
        if one.why == nodes.DRAINED and name in here and here[name].host
    ]
