"""Nodes: who should exist, who does, and what became of each.

A node's identity is ``(group, index, incarnation)``, written ``worker-1-0``. A relaunch keeps group and index and takes the
next incarnation, which never goes back. The lifecycle is DLRover's status flow with its holes closed: every observation
has a row, a deletion counts whatever phase it carries, and a node that is only silent is *suspect*, not dead.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from dlrover_core.errors import Refused
from dlrover_core.job import job
from dlrover_core.job.node_lifecycle import ALIVE, COMING, LIFECYCLE
from dlrover_core.job.tally import Tallied, tallied
from dlrover_core.kernel.engine import Facts, Rules, always
from dlrover_core.kernel.events import Event, Record, event
from dlrover_core.words import plain

if TYPE_CHECKING:
    from dlrover_core.job.state import JobState

# Why a node is released that has done nothing wrong: its workers have the grace of a planned stop.
DRAINED, SCALED_DOWN, LEAVING = "drained", "scaled down", "leaving"
BY_PLAN = (DRAINED, SCALED_DOWN, LEAVING)
TEXT_MAX = 500
NAME_MAX, NPROC_MAX = 255, 65_536
# Exit reasons that speak against the host rather than against the program.
HOST_REASONS = ("check_failed", "hardware")


@event(20, version=2, upcast={1: lambda fields: (*fields, 0)})
class NodePlanned(NamedTuple):
    """This node should exist. ``avoid`` names hosts it must not run on; ``memory_mib`` is what it needs, 0: what there is."""

    node: str
    group: str
    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody calls on an event
    incarnation: int
    avoid: tuple[str, ...] = ()
    memory_mib: int = 0


@event(21)
class NodePending(NamedTuple):
    """Its backend has accepted it; it does not run yet."""

    node: str


@event(22, version=2, upcast={1: lambda fields: (*fields, "")})
class NodeRunning(NamedTuple):
    """Its backend says it runs. ``rack``: its host's failure domain, where the backend knows it."""

    node: str
    host: str
    rack: str = ""


@event(23, version=2, upcast={1: lambda fields: (*fields, "")})
class NodeJoined(NamedTuple):
    """Its agent has reported: from here on it can be a member of a world.

    ``seat``: the place on its host that at most one living agent holds.
    """

    node: str
    host: str
    address: str
    nproc: int
    seat: str = ""


@event(26)
class NodeSucceeded(NamedTuple):
    """It ended by itself, well."""

    node: str


@event(27)
class NodeFailed(NamedTuple):
    """It ended, or says of itself that it is no good. ``reason`` is the platform's or the agent's word.

    ``seen``: its backend saw it end. Where not, it may still run, and its place is not free before it is seen gone.
    """

    node: str
    exit_code: int
    reason: str
    seen: bool = True


@event(28)
class NodeGone(NamedTuple):
    """Its backend no longer has it. ``expected``: it had ended before, or we wanted it gone."""

    node: str
    reason: str
    expected: bool


@event(29)
class NodeLost(NamedTuple):
    """Given up without having been seen dead: silent for ``unreachable_s``, or never joined. It is replaced on another host."""

    node: str
    reason: str


@event(30)
class NodeReleased(NamedTuple):
    """It should no longer exist."""

    node: str
    reason: str


@event(31)
class NodeLeft(NamedTuple):
    """Its agent has stopped its workers, as told, and is leaving."""

    node: str


@event(36)
class PlaceReopened(NamedTuple):
    """A place of a joining job that was given up is wanted again, its budget whole: another host may have come since."""

    group: str
    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody calls on an event


class Observed(NamedTuple):
    """What a backend sees of one node. ``phase``: pending, running, succeeded, failed or gone; ``rack``: its failure domain."""

    node: str
    phase: str
    exit_code: int = 0
    reason: str = ""
    host: str = ""
    age_us: int = 0
    rack: str = ""


class ObserveNodes(NamedTuple):
    """What a backend sees; with ``complete`` it is everything there is, and what it lacks is gone."""

    nodes: tuple[Observed, ...]
    complete: bool = False


class ReportJoined(NamedTuple):
    """An agent's first word: it lives and can run workers. ``nproc`` workers, reachable at ``address``."""

    node: str
    host: str
    address: str
    nproc: int
    seat: str = ""


class ReportLeft(NamedTuple):
    """An agent's last word: its workers are stopped."""

    node: str


class ReportFault(NamedTuple):
    """An agent says that its node is no good: workers cannot be started, or cannot be killed."""

    node: str
    reason: str


@dataclass(slots=True)
class Node:
    """One incarnation. ``released`` says why desired no longer names it; empty: it should exist."""

    node: str
    group: str
    index: int
    incarnation: int
    planned_at: int
    state: str = LIFECYCLE.initial
    host: str = ""
    address: str = ""
    nproc: int = 0
    joined: bool = False
    ended: bool = False
    released: str = ""
    suspect_at: int = 0
    avoid: tuple[str, ...] = ()
    seat: str = ""
    memory_mib: int = 0

    @property
    def ready(self) -> bool:
        """Can it be a member of a world?"""
        return self.joined and not self.released and self.state in ALIVE

    @property
    def shunned(self) -> bool:
        """Is its host avoided? A lost one may run on unreached, a drained one is leaving."""
        return bool(self.host) and (self.state == "lost" or self.released == DRAINED)


@dataclass(slots=True)
class Slot:
    """One place of a group: what was its last incarnation, and is the place still wanted; if not, since when?"""

    group: str
    index: int
    incarnation: int = -1
    given_up: bool = False
    given_up_at: int = 0


@dataclass(slots=True)
class NodeSlice(Tallied):
    """Nodes that are not gone, by name; places by ``group-index``."""

    nodes: dict[str, Node] = field(default_factory=dict)
    slots: dict[str, Slot] = field(default_factory=dict)
    mass_at: int = 0

    def of(self, group: str) -> list[Node]:
        """The present nodes of a group, by index and incarnation."""
        return [node for node in self.nodes.values() if node.group == group]

    def latest(self, group: str, index: int) -> Node | None:
        """The newest incarnation in a place, unless it is gone."""
        slot = self.slots.get(f"{group}-{index}")
        return self.nodes.get(f"{group}-{index}-{slot.incarnation}") if slot else None


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
    memory_mib = state.failures.memory.get(group, state.job.spec.group(group).memory_mib)
    name = f"{group}-{index}-{incarnation}"
    yield NodePlanned(name, group, index, incarnation, tuple(dict.fromkeys(avoid)), memory_mib)


def shunned(state: JobState) -> list[str]:
    """Hosts that are avoided until their node is seen gone."""
    cleared = state.planning.cleared(state)
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


# ---- decide


def _observe(state: JobState, command: ObserveNodes, now: int) -> Iterator[Event]:
    for seen in command.nodes:
        yield from _seen(state, seen)
    if command.complete:
        listed = {seen.node for seen in command.nodes}
        for node in list(state.nodes.nodes.values()):
            # What was never accepted may simply not exist yet; everything else that is not listed is gone.
            if node.node not in listed and node.state != "planned":
                yield gone(node, "not listed")


def _seen(state: JobState, seen: Observed) -> Iterator[Event]:
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
    reason = plain(seen.reason, TEXT_MAX)
    if trigger == "pend":
        yield NodePending(node.node)
    elif trigger == "run":
        yield NodeRunning(node.node, plain(seen.host, NAME_MAX), plain(seen.rack, NAME_MAX))
    elif trigger == "succeed" and not _unfinished(state, node):
        yield NodeSucceeded(node.node)
    elif trigger == "succeed":
        yield NodeFailed(node.node, 0, "it ended before its work was done")
    elif trigger == "fail":
        yield NodeFailed(node.node, seen.exit_code, reason)
    else:
        yield gone(node, reason)


def _unfinished(state: JobState, node: Node) -> bool:
    """Is it still needed? Whoever goes then has failed us, however politely: no other event would bring a successor."""
    return state.job.live and not node.released and not state.world.of(node.node).done(node.node)


def gone(node: Node, reason: str) -> NodeGone:
    """The event of a node's disappearance."""
    return NodeGone(node.node, reason, bool(node.released) or node.state in ("succeeded", "failed", "lost"))


def _joined(state: JobState, command: ReportJoined, now: int) -> Iterator[Event]:
    node = present(state, command.node)
    if node.released or node.state not in COMING:
        raise Refused(f"node {node.node!r} is {node.released or node.state}; its agent should leave")
    if node.joined:
        raise Refused(f"node {node.node!r} has an agent already")
    if not 1 <= command.nproc <= NPROC_MAX or max(map(len, (command.host, command.address, command.seat))) > NAME_MAX:
        raise Refused(f"node {node.node!r}: 1 to {NPROC_MAX} workers, and names of at most {NAME_MAX} characters")
    yield NodeJoined(node.node, command.host, command.address, command.nproc, command.seat)


def _left(state: JobState, command: ReportLeft, now: int) -> Iterator[Event]:
    node = present(state, command.node)
    if _unfinished(state, node) and LIFECYCLE.may(node.state, "fail"):
        yield NodeFailed(node.node, 0, "its agent left, unasked", seen=False)
    else:
        yield NodeLeft(node.node)


def _fault(state: JobState, command: ReportFault, now: int) -> Iterator[Event]:
    node = present(state, command.node)
    if not LIFECYCLE.may(node.state, "fail"):
        raise Refused(f"node {node.node!r} is {node.state}")
    yield NodeFailed(node.node, -1, command.reason[:TEXT_MAX], seen=False)


# ---- react


def _populate(state: JobState, fact: job.JobCreated, record: Record) -> Iterator[Event]:
    for group in state.job.spec.groups:
        for index in range(group.nodes_max):
            yield from plan(state, group.name, index)


def _maybe_ended(state: JobState, fact: object, record: Record) -> Iterator[Event]:
    yield from job.ended_by(state)


# ---- evolve


def move(slice_: NodeSlice, name: str, trigger: str) -> Node:
    """Let a node take a trigger of its lifecycle. Raises `IllegalTransition`."""
    node = slice_.nodes[name]
    node.state = LIFECYCLE.fire(name, node.state, trigger)
    return node


def _on_created(slice_: NodeSlice, fact: job.JobCreated, record: Record) -> None:
    """A new run: earlier nodes are strangers, but incarnations never go back."""
    slice_.nodes.clear()
    slice_.mass_at = 0
    for slot in slice_.slots.values():
        slot.given_up = False


def _on_planned(slice_: NodeSlice, fact: NodePlanned, record: Record) -> None:
    slot = slice_.slots.setdefault(f"{fact.group}-{fact.index}", Slot(fact.group, fact.index))
    slot.incarnation = fact.incarnation
    node = Node(fact.node, fact.group, fact.index, fact.incarnation, record.at, avoid=fact.avoid)
    node.memory_mib = fact.memory_mib
    slice_.nodes[fact.node] = node


def _on_pending(slice_: NodeSlice, fact: NodePending, record: Record) -> None:
    move(slice_, fact.node, "pend")


def _on_running(slice_: NodeSlice, fact: NodeRunning, record: Record) -> None:
    move(slice_, fact.node, "run").host = fact.host


def _on_joined(slice_: NodeSlice, fact: NodeJoined, record: Record) -> None:
    node = move(slice_, fact.node, "run")
    node.joined, node.host, node.address, node.nproc = True, fact.host, fact.address, fact.nproc
    node.seat = fact.seat


def _on_failed(slice_: NodeSlice, fact: NodeFailed, record: Record) -> None:
    node = move(slice_, fact.node, "fail")
    node.joined, node.ended = False, fact.seen
    node.suspect_at = record.at


def _on_succeeded(slice_: NodeSlice, fact: NodeSucceeded, record: Record) -> None:
    node = move(slice_, fact.node, "succeed")
    node.joined, node.ended = False, True


def _on_gone(slice_: NodeSlice, fact: NodeGone, record: Record) -> None:
    move(slice_, fact.node, "vanish")
    del slice_.nodes[fact.node]


def _on_lost(slice_: NodeSlice, fact: NodeLost, record: Record) -> None:
    node = move(slice_, fact.node, "lose")
    node.joined = False
    node.released = node.released or "lost"


def _on_released(slice_: NodeSlice, fact: NodeReleased, record: Record) -> None:
    node = slice_.nodes.get(fact.node)
    if node is not None:
        node.released = fact.reason
        _await_end(node, record)
    if fact.reason == "given up":
        slot = slice_.slots[fact.node.rsplit("-", 1)[0]]
        slot.given_up, slot.given_up_at = True, record.at


def _on_scaled(slice_: NodeSlice, fact: job.GroupScaled, record: Record) -> None:
    for index in fact.revived:
        slice_.slots[f"{fact.group}-{index}"].given_up = False


def _on_reopened(slice_: NodeSlice, fact: PlaceReopened, record: Record) -> None:
    slice_.slots[f"{fact.group}-{fact.index}"].given_up = False


def _on_left(slice_: NodeSlice, fact: NodeLeft, record: Record) -> None:
    node = slice_.nodes[fact.node]
    node.joined = False
    node.released = node.released or "left"
    _await_end(node, record)


def _await_end(node: Node, record: Record) -> None:
    """From now on its backend should see it end. One that is silent has been waited for since it fell silent."""
    if node.state != "suspect":
        node.suspect_at = record.at


EVENTS = (
    NodePlanned, NodePending, NodeRunning, NodeJoined, NodeSucceeded, NodeFailed, NodeGone, NodeLost,
    NodeReleased, NodeLeft, PlaceReopened,
)  # fmt: skip

FACTS = Facts(
    kinds=EVENTS,
    evolve=tallied(
        {
            job.JobCreated: _on_created,
            job.GroupScaled: _on_scaled,
            NodePlanned: _on_planned,
            NodePending: _on_pending,
            NodeRunning: _on_running,
            NodeJoined: _on_joined,
            NodeSucceeded: _on_succeeded,
            NodeFailed: _on_failed,
            NodeGone: _on_gone,
            NodeLost: _on_lost,
            NodeReleased: _on_released,
            NodeLeft: _on_left,
            PlaceReopened: _on_reopened,
        }
    ),
    forgets={NodeGone: lambda fact: fact.node},
)

RULES = Rules(
    decide={
        ObserveNodes: _observe,
        ReportJoined: _joined,
        ReportLeft: _left,
        ReportFault: _fault,
    },
    react={
        job.JobCreated: _populate,
        NodeLeft: _maybe_ended,
        NodeGone: _maybe_ended,
        NodeFailed: _maybe_ended,
        NodeLost: _maybe_ended,
        NodeSucceeded: _maybe_ended,
    },
    # A place that is open again is filled by an event of its own.
    levels=dict.fromkeys(set(EVENTS) - {PlaceReopened}, always),
)
