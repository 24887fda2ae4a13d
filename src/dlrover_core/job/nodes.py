"""Nodes: which should exist, which do, and what became of each.

A node's identity is ``(group, index, incarnation)``, written ``worker-1-0``. A relaunch keeps group and index and takes the
next incarnation, which never goes back. The lifecycle is DLRover's status flow with its gaps closed: every observation has
a transition from every state; a deletion counts whatever phase it carries; and a silent node is *suspect*, not dead.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

from dlrover_core.job import job
from dlrover_core.job.node_lifecycle import ALIVE, LIFECYCLE
from dlrover_core.job.sets import Coupled
from dlrover_core.kernel.engine import Evolve, Facts
from dlrover_core.kernel.events import Record, event
from dlrover_core.kernel.state import lasting
from dlrover_core.kernel.wire import command


@dataclass(slots=True)
class Tally:
    """Counts over all nodes, kept beside the nodes' slice.

    ready:    nodes that could be members of a world, by group
    waits:    nodes that the platform has no place for yet, by group
    alive:    nodes with a living agent
    suspects: nodes with a silent agent
    shunned:  nodes whose host is avoided
    loose:    nodes that do not simply run: only these can have a deadline
    given_up: indexes of the places that are no longer wanted, by group
    changes:  number of times that a node became ready or ceased to be
    seats:    the layout of the next world, by set, valid until ``changes`` or the world changes
    """

    ready: dict[str, int] = field(default_factory=dict)
    waits: dict[str, int] = field(default_factory=dict)
    alive: int = 0
    suspects: int = 0
    shunned: int = 0
    loose: set[str] = field(default_factory=set)
    given_up: dict[str, set[int]] = field(default_factory=dict)
    changes: int = 0
    seats: dict[str, tuple[tuple[object, int, int], list[Node]]] = field(default_factory=dict)

    def count(self, node: Node, by: int) -> None:
        """Count a node in (1) or out (-1)."""
        if node.ready:
            self.ready[node.group] = self.ready.get(node.group, 0) + by
            self.changes += 1
        if node.joined and node.state in ALIVE:
            self.alive += by
            self.suspects += by * (node.state == "suspect")
        if node.waiting:
            self.waits[node.group] = self.waits.get(node.group, 0) + by
        self.shunned += by * node.shunned
        if by > 0 and not (node.ready and node.state == "running"):
            self.loose.add(node.node)
        else:
            self.loose.discard(node.node)

    def note_place(self, group: str, index: int, *, given_up: bool) -> None:
        """A place is wanted, or no longer wanted."""
        places = self.given_up.setdefault(group, set())
        (places.add if given_up else places.discard)(index)


class Tallied(Coupled):
    """The cache beside a `NodeSlice`: its `Tally`."""

    __slots__ = ("_tally",)
    _tally: Tally | None

    @property
    def tally(self) -> Tally:
        """The present counts."""
        found = getattr(self, "_tally", None)
        if found is None:
            found = self._tally = _counted(cast("NodeSlice", self))
        return found

    def recount(self) -> None:
        """Count all nodes anew when next asked."""
        self._tally = None


def _counted(slice_: NodeSlice) -> Tally:
    tally = Tally()
    for node in slice_.nodes.values():
        tally.count(node, 1)
    for slot in slice_.slots.values():
        tally.note_place(slot.group, slot.index, given_up=slot.given_up)
    return tally


def tallied(evolve: Mapping[type, Evolve]) -> dict[type, Evolve]:
    """The same fold functions, which also keep the tally: of one node where the event names one, else by a new count."""
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


# Reasons of releases that are not the node's fault: its workers have the grace of a planned stop.
DRAINED, SCALED_DOWN, LEAVING = "drained", "scaled down", "leaving"
SET_GIVEN_UP = "its set is given up"
"""The node's coupling set was given up; the node itself has done nothing wrong."""
GIVEN_BACK = "given back"
"""The node's set could not be placed whole, and other jobs may use its room meanwhile. The node is asked for again."""
SPARED = "not needed: the node that it was to replace stays"
"""The node was the successor of a leaving node, and that node stays after all."""
SUSPENDED = "suspended"
"""The node's job is suspended without nodes. What the node held is on storage; the job asks for a new node when it is resumed."""
UNNEEDED = "not needed: its set has finished, and another one of the job waits for room"
"""The node has nothing left to do, and what it holds is on storage."""
_PARTICIPLES = (DRAINED, SCALED_DOWN, LEAVING, GIVEN_BACK, SUSPENDED, "given up", "replaced", "lost")
BY_PLAN = (DRAINED, SCALED_DOWN, LEAVING, SET_GIVEN_UP, SUSPENDED, GIVEN_BACK, SPARED, UNNEEDED)
TEXT_MAX = 500
NAME_MAX, NPROC_MAX = 255, 65_536
# Exit reasons that speak against the host rather than against the program.
HOST_REASONS = ("check_failed", "hardware")


@event(20, version=2, upcast={1: lambda fields: (*fields, 0)})
class NodePlanned(NamedTuple):
    """A node should exist.

    avoid:      hosts that it must not run on
    memory_mib: memory that it needs; 0: what there is
    """

    node: str
    group: str
    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody calls on an event
    incarnation: int
    avoid: tuple[str, ...] = ()
    memory_mib: int = 0


@event(21, version=2, upcast={1: lambda fields: (*fields, "", True)})
class NodePending(NamedTuple):
    """A node does not run yet: its backend starts it, or has no place for it now.

    waits:    why the platform has not placed it, in the platform's words; empty: nothing is in its way
    accepted: the backend has taken it; else it refuses the node for now, and is asked again
    """

    node: str
    waits: str = ""
    accepted: bool = True


@event(22, version=2, upcast={1: lambda fields: (*fields, "")})
class NodeRunning(NamedTuple):
    """The backend says that a node runs. ``rack``: failure domain of its host; empty: unknown."""

    node: str
    host: str
    rack: str = ""


@event(23, version=2, upcast={1: lambda fields: (*fields, "")})
class NodeJoined(NamedTuple):
    """A node's agent has reported: from here on the node can be a member of a world.

    ``seat``: the place on its host that at most one living agent holds.
    """

    node: str
    host: str
    address: str
    nproc: int
    seat: str = ""


@event(26)
class NodeSucceeded(NamedTuple):
    """A node ended by itself, without an error."""

    node: str


@event(27)
class NodeFailed(NamedTuple):
    """A node ended with an error, or its agent says that it is unusable.

    reason: the platform's or the agent's word
    seen:   the backend saw it end; else it may still run, and its place stays taken until it is seen gone
    """

    node: str
    exit_code: int
    reason: str
    seen: bool = True


@event(28)
class NodeGone(NamedTuple):
    """The backend no longer has a node. ``expected``: it had ended before, or was no longer wanted."""

    node: str
    reason: str
    expected: bool


@event(29)
class NodeLost(NamedTuple):
    """A node is given up though nobody saw it end: silent for ``unreachable_s``, or never joined. Its place avoids the host."""

    node: str
    reason: str


@event(30)
class NodeReleased(NamedTuple):
    """A node should no longer exist."""

    node: str
    reason: str


@event(31)
class NodeLeft(NamedTuple):
    """A node's agent has stopped its workers, as ordered, and is leaving."""

    node: str


@event(36)
class PlaceReopened(NamedTuple):
    """A place that was given up is wanted again, with a full budget: there is room, or another host may have come."""

    group: str
    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody calls on an event


class Observed(NamedTuple):
    """A backend's observation of one node.

    phase:  one of a backend's, `REFUSED` or `UNREACHED`
    reason: the platform's word for the phase
    age_us: time from the observation to this command
    rack:   failure domain of its host
    waits:  why the platform has not placed it yet; empty: nothing is in its way
    notice: why the platform will take the node away; empty: it will not
    notice_us: time from this command to that moment; 0: the platform does not say
    """

    node: str
    phase: str
    exit_code: int = 0
    reason: str = ""
    host: str = ""
    age_us: int = 0
    rack: str = ""
    waits: str = ""
    notice: str = ""
    notice_us: int = 0


STANDBY_SEAT = "standby:"
"""How the seat of an agent begins that a scheduler has started as a standby."""
AVOIDED = "avoided hosts"
"""The reason of a node begins with these words if there is room only on hosts that it must avoid."""
DELETED = "Deleted"
"""The notice or the reason of a node is this word if a person deleted the node: that says nothing about its host."""
REFUSED = "refused"
"""The phase of a node that its backend refuses for now."""
UNREACHED = "lost"
"""The phase of a node whose host the platform cannot reach."""


def off_avoided(waits: str) -> bool:
    """Does a node wait, by these words, because there is room on hosts alone that it is to avoid?"""
    return waits.startswith(AVOIDED)


class ObserveNodes(NamedTuple):
    """A backend's observations. ``complete``: they are all nodes of the job, and a node that is missing is gone."""

    nodes: tuple[Observed, ...]
    complete: bool = False


@command(1)
class ReportJoined(NamedTuple):
    """An agent's first report: it runs, and can start ``nproc`` workers. Peers reach it at ``address``."""

    node: str
    host: str
    address: str
    nproc: int
    seat: str = ""


@command(2)
class ReportLeft(NamedTuple):
    """An agent's last report: its workers are stopped."""

    node: str


@command(3)
class ReportFault(NamedTuple):
    """An agent says that its node is unusable: workers cannot be started, or cannot be killed."""

    node: str
    reason: str


@dataclass(slots=True)
class Node:
    """One incarnation of a place. Times are microseconds by the leader's clock; 0: not yet.

    state:      by `LIFECYCLE`
    address:    where peers reach its workers
    joined:     its agent has reported
    ended:      the backend saw it end
    released:   why it should no longer exist; empty: it should
    suspect_at: when its agent fell silent; 0: it is not silent
    avoid:      hosts that it must not run on
    seat:       the place on its host that at most one living agent holds
    memory_mib: memory that it needs; 0: what there is
    waits:      why the platform has not placed it, in force since ``waits_at``, in these words since ``said_at``; empty: it
                does not wait
    waited_us:  how long it waited before
    placed_at:  when it was seen to run
    """

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
    waits: str = ""
    waits_at: int = 0
    said_at: int = 0
    waited_us: int = 0
    placed_at: int = 0

    @property
    def waiting(self) -> bool:
        """Is the node wanted, and has the platform no place for it? No world counts on it, and its time-outs stand still."""
        return bool(self.waits) and not self.released

    def stands(self, adverb: str = "") -> str:
        """How it stands, in words that follow its name: "is running", "is drained already", "is released: SENTENCE"."""
        adverb = adverb and f" {adverb}"
        if self.released and self.released not in _PARTICIPLES:
            return f"is released{adverb}: {self.released}"
        return f"is {self.released or self.state}{adverb}"

    @property
    def ready(self) -> bool:
        """Can the node be a member of a world?"""
        return self.joined and not self.released and self.state in ALIVE

    @property
    def shunned(self) -> bool:
        """Is the node's host avoided? A lost node may still run there, and a drained node is about to leave."""
        return bool(self.host) and (self.state == "lost" or self.released == DRAINED)


@dataclass(slots=True)
class Slot:
    """A place of a group, its last incarnation (-1: none yet), and whether and since when it is given up."""

    group: str
    index: int
    incarnation: int = -1
    given_up: bool = False
    given_up_at: int = 0


@dataclass(slots=True)
class NodeSlice(Tallied):
    """Nodes that are not gone, by name; places, by ``group-index``.

    ``mass_at``: when most nodes fell silent at once; 0: they have not.
    """

    nodes: dict[str, Node] = field(default_factory=dict)
    slots: dict[str, Slot] = lasting(dict)
    mass_at: int = 0

    def of(self, group: str) -> list[Node]:
        """The nodes of a group, by index and incarnation."""
        return [node for node in self.nodes.values() if node.group == group]

    def in_set(self, name: str) -> list[Node]:
        """The nodes of a coupling set, by index and incarnation."""
        slot = self.slots.get(name) if self.sets.place(name) >= 0 else None
        if slot is not None:
            names = (f"{name}-{incarnation}" for incarnation in range(slot.incarnation + 1))
            return [self.nodes[one] for one in names if one in self.nodes]
        groups = self.sets.groups(name)
        if len(groups) == 1:
            return self.of(groups[0])
        return [node for node in self.nodes.values() if node.group in groups]

    def latest(self, group: str, index: int) -> Node | None:
        """The newest incarnation of a place; None: it is gone."""
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
    for slot in slice_.slots.values():
        slot.given_up = False


def _on_planned(slice_: NodeSlice, fact: NodePlanned, record: Record) -> None:
    slot = slice_.slots.setdefault(f"{fact.group}-{fact.index}", Slot(fact.group, fact.index))
    slot.incarnation = fact.incarnation
    node = Node(fact.node, fact.group, fact.index, fact.incarnation, record.at, avoid=fact.avoid)
    node.memory_mib = fact.memory_mib
    slice_.nodes[fact.node] = node


def _on_pending(slice_: NodeSlice, fact: NodePending, record: Record) -> None:
    node = move(slice_, fact.node, "pend") if fact.accepted else slice_.nodes[fact.node]
    _note_wait(node, fact.waits, record.at)


def _note_wait(node: Node, waits: str, at: int) -> None:
    """The node waits for this from now on; empty: it no longer waits. Its own time-outs leave out the time it waited.

    A wait for hosts that need not be avoided counts from its own beginning: it lasts `last_call_s` at most.
    """
    if node.waits and (not waits or off_avoided(waits) != off_avoided(node.waits)):
        node.waited_us, node.waits_at = node.waited_us + at - node.waits_at, at if waits else 0
    elif waits and not node.waits:
        node.waits_at = at
    node.waits, node.said_at = waits, at if waits else 0


def _note_placed(node: Node, at: int) -> None:
    _note_wait(node, "", at)
    node.placed_at = node.placed_at or at


def _on_running(slice_: NodeSlice, fact: NodeRunning, record: Record) -> None:
    node = move(slice_, fact.node, "run")
    node.host = fact.host
    _note_placed(node, record.at)


def _on_joined(slice_: NodeSlice, fact: NodeJoined, record: Record) -> None:
    node = move(slice_, fact.node, "run")
    _note_placed(node, record.at)
    node.joined, node.host, node.address, node.nproc = True, fact.host, fact.address, fact.nproc
    node.seat = fact.seat


def _on_failed(slice_: NodeSlice, fact: NodeFailed, record: Record) -> None:
    node = move(slice_, fact.node, "fail")
    _note_wait(node, "", record.at)
    node.joined, node.ended = False, fact.seen
    node.suspect_at = record.at


def _on_succeeded(slice_: NodeSlice, fact: NodeSucceeded, record: Record) -> None:
    node = move(slice_, fact.node, "succeed")
    _note_wait(node, "", record.at)
    node.joined, node.ended = False, True


def _on_gone(slice_: NodeSlice, fact: NodeGone, record: Record) -> None:
    move(slice_, fact.node, "vanish")
    del slice_.nodes[fact.node]


def _on_lost(slice_: NodeSlice, fact: NodeLost, record: Record) -> None:
    node = move(slice_, fact.node, "lose")
    _note_wait(node, "", record.at)
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
    """The backend should see this node end from now on. For a silent node, that time counts from when it fell silent."""
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
