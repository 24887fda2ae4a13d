"""Nodes: who should exist, who does, and what became of each.

A node's identity is ``(group, index, incarnation)``, written ``worker-1-0``. A relaunch keeps group and index and takes the
next incarnation, which never goes back. The lifecycle is DLRover's status flow with its holes closed: every observation
has a row, a deletion counts whatever phase it carries, and a node that is only silent is *suspect*, not dead.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

from dlrover_core.job import job
from dlrover_core.job.node_lifecycle import ALIVE, LIFECYCLE
from dlrover_core.kernel.engine import Evolve, Facts
from dlrover_core.kernel.events import Record, event
from dlrover_core.kernel.wire import command


@dataclass(slots=True)
class Tally:
    """Of the nodes: how many of each group are ``ready``, how many have a living agent, how many of those are silent.

    ``loose`` are those that do not simply run: only of them something may be due. ``given_up`` holds the indexes of each
    group's places that are not wanted any more. ``changes`` grows with every node that becomes ready or ceases to be;
    ``seats`` is who would sit where, as long as neither that nor the world changes.
    """

    ready: dict[str, int] = field(default_factory=dict)
    alive: int = 0
    suspects: int = 0
    shunned: int = 0
    loose: set[str] = field(default_factory=set)
    given_up: dict[str, set[int]] = field(default_factory=dict)
    changes: int = 0
    seats: dict[str, tuple[tuple[int, int, int], list[Node]]] = field(default_factory=dict)

    def count(self, node: Node, by: int) -> None:
        """Count a node in (1) or out (-1)."""
        if node.ready:
            self.ready[node.group] = self.ready.get(node.group, 0) + by
            self.changes += 1
        if node.joined and node.state in ALIVE:
            self.alive += by
            self.suspects += by * (node.state == "suspect")
        self.shunned += by * node.shunned
        if by > 0 and not (node.ready and node.state == "running"):
            self.loose.add(node.node)
        else:
            self.loose.discard(node.node)

    def note_place(self, group: str, index: int, *, given_up: bool) -> None:
        """A place is wanted, or is not."""
        places = self.given_up.setdefault(group, set())
        (places.add if given_up else places.discard)(index)


class Tallied:
    """What a `NodeSlice` is besides its fields."""

    __slots__ = ("_tally",)
    _tally: Tally | None

    @property
    def tally(self) -> Tally:
        """The counts of now."""
        found = getattr(self, "_tally", None)
        if found is None:
            found = self._tally = _counted(cast("NodeSlice", self))
        return found

    def recount(self) -> None:
        """Count anew when next asked."""
        self._tally = None


def _counted(slice_: NodeSlice) -> Tally:
    tally = Tally()
    for node in slice_.nodes.values():
        tally.count(node, 1)
    for slot in slice_.slots.values():
        tally.note_place(slot.group, slot.index, given_up=slot.given_up)
    return tally


def tallied(evolve: Mapping[type, Evolve]) -> dict[type, Evolve]:
    """The same functions, each of which keeps the tally right: event by event where it is about one node, else anew."""
    return {cls: (_one if "node" in cast(Any, cls)._fields else _all)(function) for cls, function in evolve.items()}


def _one(function: Evolve) -> Evolve:
    def evolve(slice_: NodeSlice, fact: Any, record: Any) -> None:
        tally = getattr(slice_, "_tally", None)
        if tally is None:
            function(slice_, fact, record)
            return
        name = fact.node
        before = slice_.nodes.get(name)
        if before is not None:
            tally.count(before, -1)
        function(slice_, fact, record)
        after = slice_.nodes.get(name)
        if after is not None:
            tally.count(after, 1)
        slot = slice_.slots.get(name.rsplit("-", 1)[0])
        if slot is not None:
            tally.note_place(slot.group, slot.index, given_up=slot.given_up)

    return evolve


def _all(function: Evolve) -> Evolve:
    def evolve(slice_: NodeSlice, fact: Any, record: Any) -> None:
        slice_.recount()
        function(slice_, fact, record)

    return evolve


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


@command(1)
class ReportJoined(NamedTuple):
    """An agent's first word: it lives and can run workers. ``nproc`` workers, reachable at ``address``."""

    node: str
    host: str
    address: str
    nproc: int
    seat: str = ""


@command(2)
class ReportLeft(NamedTuple):
    """An agent's last word: its workers are stopped."""

    node: str


@command(3)
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
