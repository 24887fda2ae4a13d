"""Worlds: who trains together, with which ranks, in which generation.

A world is a number. Desired carries the generation; an agent whose workers run another one stops them and starts the new
one. A world forms at once when everybody expected is there; else, once the fewest are, after a last call. Never above the
maximum, never empty, never two worlds in one generation. Survivors keep their rank blocks, a newcomer takes the vacated one,
and ranks move only when the size changes, as few as possible.

Members are written as index ranges in rank order, ``(first index, count, incarnation, nproc)``, never as thousands of names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, get_args

from dlrover_core.job import job, nodes
from dlrover_core.job.memo import Remembering
from dlrover_core.job.names import group_of
from dlrover_core.job.ranges import Member, Ranges, from_ranges
from dlrover_core.kernel.engine import Facts
from dlrover_core.kernel.events import Record, event
from dlrover_core.kernel.wire import command

STORES_MAX = 4


@event(40)
class WorldFormed(NamedTuple):
    """The world of a group: members in rank order as ranges, the store of this generation alone, and where to resume."""

    group: str
    generation: int
    members: Ranges
    store: str
    reason: str
    resume_step: int = -1
    resume_tier: str = ""


@event(41)
class WorldDissolved(NamedTuple):
    """This generation cannot go on and no successor can form yet: its workers are stopped. ``planned``: with grace."""

    group: str
    generation: int
    reason: str
    planned: bool = False


@event(44)
class WorkersStarted(NamedTuple):
    """All workers of a node run in this generation."""

    node: str
    generation: int


@event(45)
class WorkersStopped(NamedTuple):
    """All workers of a node are dead, as ordered; ``step`` is the last they had made (-1 unknown)."""

    node: str
    generation: int
    step: int = -1


@event(46, version=2, upcast={1: lambda fields: (*fields, "", -1)})
class WorkersFinished(NamedTuple):
    """All workers of a node ended with exit code 0; ``step`` is the last they had made (-1 unknown).

    ``unstored``: why a state that was due on storage is not there, in words; empty: storage has all that it was to have. ``due``:
    the step of that state, unless it is committed by the time that all nodes have finished; -1: in any case.
    """

    node: str
    generation: int
    step: int = -1
    unstored: str = ""
    due: int = -1


@event(47)
class StoreOffered(NamedTuple):
    """The node holds an unused TCPStore at ``address``, good for one generation."""

    node: str
    address: str


@event(48)
class StoreWithdrawn(NamedTuple):
    """The store is gone (its keeper died): it must not be named."""

    node: str
    address: str


@command(4)
class OfferStore(NamedTuple):
    """An agent has a store to offer."""

    node: str
    address: str


@command(5)
class WithdrawStore(NamedTuple):
    """An agent's store is gone."""

    node: str
    address: str


@command(6)
class ReportStarted(NamedTuple):
    """An agent's workers run."""

    node: str
    generation: int


@command(7)
class ReportStopped(NamedTuple):
    """An agent's workers are dead, as ordered; ``step`` is the last they had made (-1 unknown)."""

    node: str
    generation: int
    step: int = -1


@command(8)
class ReportFinished(NamedTuple):
    """An agent's workers all ended well; ``step`` is the last they had made (-1 unknown); the rest as `WorkersFinished`."""

    node: str
    generation: int
    step: int = -1
    unstored: str = ""
    due: int = -1


# A node that ends, however.
Ended = nodes.NodeFailed | nodes.NodeGone | nodes.NodeLost | nodes.NodeReleased | nodes.NodeLeft | nodes.NodeSucceeded


# What holds of every world after every event; `World.check` and `WorldSlice.check` say what does not.
#
#   g        `generation`: the number of the newest world of the group
#   b        `before`: the number of the last world of earlier runs
#   M        `members`: the nodes in rank order; node m runs m.nproc ranks, from m.first_rank on
#   s        `size`: the number of ranks
#   S, T, F  `started`, `stopped`, `finished`: the nodes whose workers did so in g
#   U        `unstored`: the nodes that finished and whose last state is not on storage
#   O(n)     `offers`: the stores that node n offers and nobody has used
#
#   count    0 <= b <= g, and M is empty exactly if b = g, which is: no world of this run has formed
#   life     an active world has members and a store; a last call is not counted from after the last change
#   ranks    M[0].first_rank = 0, M[i + 1].first_rank = M[i].first_rank + M[i].nproc, and s is where the last one ends
#   reports  S, T and F are subsets of M, each without repetition, and U is a subset of F
#   offers   O(n) has at most `STORES_MAX` stores, none twice


@dataclass(slots=True)
class World(Remembering):
    """The newest generation of one group. ``active``: it should be running. ``before``: generations of earlier runs.

    ``planned_stop``: its end was planned; ``planned_change``: that of the one before, whose workers may still be stopping.
    ``called_at``: the last call counts from here, when it ended or a place in ``came`` was filled for the first time since.
    ``unstored``: of nodes that have finished, `WorkersFinished.due` and why.
    """

    generation: int = 0
    active: bool = False
    planned_stop: bool = False
    planned_change: bool = False
    members: tuple[Member, ...] = ()
    size: int = 0
    store: str = ""
    formed_at: int = 0
    resume_step: int = -1
    changed_at: int = 0
    called_at: int = 0
    joined_at: int = 0
    started: list[str] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)
    stopped: list[str] = field(default_factory=list)
    came: dict[str, int] = field(default_factory=dict)
    before: int = 0
    unstored: dict[str, tuple[int, str]] = field(default_factory=dict)

    def done(self, node: str) -> bool:
        """Has this member's work ended well? Once the world is dissolved everybody is needed again."""
        return self.active and self.listed("finished", node)

    def member(self, node: str) -> Member | None:
        """The place of a node, or None."""
        place = self.places.get(node)
        return None if place is None else self.members[place]

    @property
    def places(self) -> Mapping[str, int]:
        """Each member's place in rank order."""
        return self.recall("places", lambda: {member.node: place for place, member in enumerate(self.members)})

    def check(self) -> Iterator[str]:
        """What of the formula above does not hold."""
        if not 0 <= self.before <= self.generation or bool(self.members) != (self.before < self.generation):
            yield f"count: g = {self.generation}, b = {self.before}, {len(self.members)} members"
        if self.active and not (self.members and self.store):
            yield f"life: active with {len(self.members)} members and the store {self.store!r}"
        if self.called_at > self.changed_at:
            yield f"life: the last call counts from {self.called_at}, the last change was at {self.changed_at}"
        if self.members:
            yield from self.recall("ranks", self._check_ranks)
        for name, told in (("started", self.started), ("stopped", self.stopped), ("finished", self.finished)):
            if told and (len(set(told)) < len(told) or not self.places.keys() >= set(told)):
                yield f"reports: {name} = {told}, M = {list(self.places)}"
        if self.unstored and not self.unstored.keys() <= set(self.finished):
            yield f"reports: U = {list(self.unstored)}, F = {self.finished}"

    def _check_ranks(self) -> list[str]:
        rank, wrong = 0, []
        for _, nproc, first_rank in self.members:
            if first_rank != rank:
                wrong.append(f"ranks: a node begins at {first_rank}, the one before it ends at {rank}")
            rank += nproc
        return wrong if self.size == rank else [*wrong, f"ranks: s = {self.size}, the members run {rank}"]


@dataclass(slots=True)
class WorldSlice:
    """One world per coupling set (today every group is its own), and the unused stores by node."""

    worlds: dict[str, World] = field(default_factory=dict)
    offers: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def of(self, node: str) -> World:
        """The world of a node's group; an empty one where none has formed."""
        return self.worlds.get(group_of(node)) or World()

    def check(self) -> Iterator[str]:
        """What of the formula above `World` does not hold."""
        for group, world in self.worlds.items():
            for wrong in world.check():
                yield f"{group}: {wrong}"
        for node, offered in self.offers.items():
            if len(offered) > 1 and (len(offered) > STORES_MAX or len(set(offered)) < len(offered)):
                yield f"offers: O({node}) = {offered}"


# ---- evolve


def _on_created(slice_: WorldSlice, fact: job.JobCreated, record: Record) -> None:
    """A new run: generations go on counting, everything else begins anew."""
    slice_.offers.clear()
    slice_.worlds = {
        group: World(generation=old.generation, before=old.generation) for group, old in slice_.worlds.items()
    }


def _on_formed(slice_: WorldSlice, fact: WorldFormed, record: Record) -> None:
    before = slice_.worlds.get(fact.group) or World()
    if fact.generation != before.generation + 1 or not fact.members:
        raise ValueError(f"world {fact.group} goes from generation {before.generation} to {fact.generation}")
    members = from_ranges(fact.group, fact.members)
    slice_.worlds[fact.group] = World(
        generation=fact.generation,
        active=True,
        planned_change=before.planned_stop,
        members=members,
        size=members[-1].first_rank + members[-1].nproc,
        store=fact.store,
        formed_at=record.at,
        resume_step=fact.resume_step,
        changed_at=record.at,
        before=before.before,
    )
    _take_offer(slice_, fact, record)


def _take_offer(slice_: WorldSlice, fact: WorldFormed, record: Record) -> None:
    node = slice_.worlds[fact.group].members[0].node
    slice_.offers[node] = tuple(address for address in slice_.offers.get(node, ()) if address != fact.store)


def _on_offered(slice_: WorldSlice, fact: StoreOffered, record: Record) -> None:
    slice_.offers[fact.node] = (*slice_.offers.get(fact.node, ()), fact.address)


def _on_withdrawn(slice_: WorldSlice, fact: StoreWithdrawn, record: Record) -> None:
    slice_.offers[fact.node] = tuple(address for address in slice_.offers[fact.node] if address != fact.address)


def _forget_offers(slice_: WorldSlice, fact: Ended, record: Record) -> None:
    slice_.offers.pop(fact.node, None)


def _on_dissolved(slice_: WorldSlice, fact: WorldDissolved, record: Record) -> None:
    world = slice_.worlds[fact.group]
    world.active, world.planned_stop = False, fact.planned
    world.changed_at = world.called_at = record.at
    world.came = {}


def _note_change(slice_: WorldSlice, fact: nodes.NodeJoined, record: Record) -> None:
    world = slice_.worlds.setdefault(group_of(fact.node), World())
    world.changed_at = record.at
    place = fact.node.rsplit("-", 1)[0]
    if not world.active and place not in world.came:
        # Whoever comes and dies, again and again, does not keep the others waiting for ever.
        world.called_at = world.came[place] = record.at
    if world.active and not world.joined_at:
        world.joined_at = record.at


def _on_started(slice_: WorldSlice, fact: WorkersStarted, record: Record) -> None:
    slice_.worlds[group_of(fact.node)].started.append(fact.node)


def _on_stopped(slice_: WorldSlice, fact: WorkersStopped, record: Record) -> None:
    slice_.worlds[group_of(fact.node)].stopped.append(fact.node)


def _on_finished(slice_: WorldSlice, fact: WorkersFinished, record: Record) -> None:
    world = slice_.worlds[group_of(fact.node)]
    world.finished.append(fact.node)
    if fact.unstored:
        world.unstored[fact.node] = fact.due, fact.unstored


EVENTS = (
    WorldFormed, WorldDissolved, WorkersStarted, WorkersStopped, WorkersFinished, StoreOffered, StoreWithdrawn,
)  # fmt: skip

FACTS = Facts(
    kinds=EVENTS,
    evolve={
        job.JobCreated: _on_created,
        WorldFormed: _on_formed,
        WorldDissolved: _on_dissolved,
        nodes.NodeJoined: _note_change,
        WorkersStarted: _on_started,
        WorkersStopped: _on_stopped,
        WorkersFinished: _on_finished,
        StoreOffered: _on_offered,
        StoreWithdrawn: _on_withdrawn,
        **dict.fromkeys(get_args(Ended), _forget_offers),
    },
)
