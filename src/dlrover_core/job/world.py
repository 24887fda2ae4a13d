"""Worlds: which nodes train together, with which ranks, in which generation.

A world has a number, its generation. An order names the generation, and an agent whose workers run another generation stops
them and starts the new one. A world forms at once when all expected nodes are there; else after a last call, once the
smallest allowed number is there. It never exceeds the maximum, is never empty, and shares its generation with no other
world. Survivors keep their rank blocks, a newcomer takes a vacated block, and when the size changes, as few ranks as
possible move.

Every coupling set (`job.sets`) has its own worlds, kept under the name of the set. In a set of several groups, ranks go
group by group, in the order of the spec. Members are written as index ranges in rank order, ``(group, first index, count,
incarnation, nproc)``, instead of thousands of names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, get_args

from dlrover_core.job import job, nodes
from dlrover_core.job.memo import Remembering
from dlrover_core.job.ranges import Member, Ranges, from_ranges, with_groups
from dlrover_core.job.sets import Coupled
from dlrover_core.kernel.engine import Facts
from dlrover_core.kernel.events import Record, event
from dlrover_core.kernel.state import lasting
from dlrover_core.kernel.wire import command

STORES_MAX = 4


def _with_groups(fields: tuple[Any, ...]) -> tuple[Any, ...]:
    """Of version 1, which knew of no set but a group."""
    group, generation, members, *others = fields
    return (group, generation, with_groups(group, members), *others)


@event(40, version=2, upcast={1: _with_groups})
class WorldFormed(NamedTuple):
    """The world of a set has formed.

    group:       the coupling set; a group's name, where the group is a set of its own
    members:     nodes in rank order, as ranges
    store:       the address of this generation's store; empty: the set has none
    resume_step: the step to resume from, as far as the leader knows; -1: none
    resume_tier: where that step is; empty: unknown
    """

    group: str
    generation: int
    members: Ranges
    store: str
    reason: str
    resume_step: int = -1
    resume_tier: str = ""


@event(41)
class WorldDissolved(NamedTuple):
    """A generation cannot go on and no successor can form yet: its workers are stopped.

    ``group``: the coupling set; ``planned``: workers have their grace.
    """

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
    """All workers of a node are dead, as ordered. ``step``: the last step they had made; -1: unknown."""

    node: str
    generation: int
    step: int = -1


@event(46, version=2, upcast={1: lambda fields: (*fields, "", -1)})
class WorkersFinished(NamedTuple):
    """All workers of a node ended with exit code 0.

    step:     the last step they had made; -1: unknown
    unstored: why a state that was due on storage is not there; empty: storage has all that it should have
    due:      the step of that state; ``unstored`` no longer counts if it is committed by the time that all nodes have
              finished; -1: it counts in any case
    """

    node: str
    generation: int
    step: int = -1
    unstored: str = ""
    due: int = -1


@event(47)
class StoreOffered(NamedTuple):
    """A node has an unused TCPStore at ``address``, for one generation."""

    node: str
    address: str


@event(48)
class StoreWithdrawn(NamedTuple):
    """A store has ended, because its process died: no world may use it."""

    node: str
    address: str


@command(4)
class OfferStore(NamedTuple):
    """An agent has a store to offer."""

    node: str
    address: str


@command(5)
class WithdrawStore(NamedTuple):
    """An agent's store has ended."""

    node: str
    address: str


@command(6)
class ReportStarted(NamedTuple):
    """An agent's workers run."""

    node: str
    generation: int


@command(7)
class ReportStopped(NamedTuple):
    """An agent's workers are dead, as ordered. ``step``: the last step they had made; -1: unknown."""

    node: str
    generation: int
    step: int = -1


@command(8)
class ReportFinished(NamedTuple):
    """An agent's workers all ended with exit code 0. Fields as in `WorkersFinished`."""

    node: str
    generation: int
    step: int = -1
    unstored: str = ""
    due: int = -1


# The ways in which a node ends.
Ended = nodes.NodeFailed | nodes.NodeGone | nodes.NodeLost | nodes.NodeReleased | nodes.NodeLeft | nodes.NodeSucceeded


# Invariants of worlds, after every event; `World.check` and `WorldSlice.check` yield the broken ones.
#
#   g        `generation`: the number of the newest world of the set
#   b        `before`: the number of the last world of earlier runs
#   M        `members`: the nodes in rank order; node m runs m.nproc ranks, from m.first_rank on
#   s        `size`: the number of ranks
#   S, T, F  `started`, `stopped`, `finished`: the nodes whose workers started, stopped, finished in g
#   U        `unstored`: the finished nodes whose last state is not on storage
#   O(n)     `offers`: the unused stores that node n offers
#
#   count    0 <= b <= g, and M is empty exactly if b = g (no world of this run has formed)
#   life     an active world has members, and a store if its set has stores; a last call starts no later than the last change
#   ranks    M[0].first_rank = 0, M[i + 1].first_rank = M[i].first_rank + M[i].nproc, and s is where the last one ends
#   reports  S, T and F are subsets of M, each without repetition, and U is a subset of F
#   sets     every member is a node of the world's set
#   offers   O(n) has at most `STORES_MAX` stores, none twice


@dataclass(slots=True)
class World(Remembering):
    """The newest generation of one set. Times are microseconds by the leader's clock; 0: not yet.

    generation:                 its number; 0: none has formed
    active:                     it should be running
    planned_stop:               its end was planned
    planned_change:             the end of the one before was planned, and its workers may still be stopping
    members:                    nodes in rank order
    size:                       number of ranks
    store:                      the address of its store; empty: it has none
    formed_at:                  when it formed
    resume_step:                the step it resumed from, as far as the leader knows; -1: none
    changed_at:                 when it formed, was dissolved, or a node joined
    called_at:                  start of the last-call timer: the dissolution, or a place's first return after it
    joined_at:                  when the first late node joined, while it runs
    started, finished, stopped: nodes whose workers did so in this generation
    came:                       places that returned since the dissolution, and when
    before:                     number of the last generation of earlier runs
    unstored:                   `WorkersFinished.due` and reason, by node that has finished
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
        """Has this member finished? Once the world is dissolved, every member is needed again."""
        return self.active and self.listed("finished", node)

    def member(self, node: str) -> Member | None:
        """A node's place in the world; None: it is no member."""
        place = self.places.get(node)
        return None if place is None else self.members[place]

    @property
    def places(self) -> Mapping[str, int]:
        """The place of each member in rank order."""
        return self.recall("places", lambda: {member.node: place for place, member in enumerate(self.members)})

    def check(self, *, store: bool = True) -> Iterator[str]:
        """Yields what breaks the invariants above. ``store``: worlds of the set have stores."""
        if not 0 <= self.before <= self.generation or bool(self.members) != (self.before < self.generation):
            yield f"count: g = {self.generation}, b = {self.before}, {len(self.members)} members"
        if self.active and not (self.members and bool(self.store) == store):
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
class WorldSlice(Coupled):
    """One world per coupling set, by the set's name, and the unused stores, by node."""

    worlds: dict[str, World] = lasting(dict)
    offers: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def at(self, name: str) -> World:
        """The world of a set; an empty one where none has formed."""
        return self.worlds.get(name) or World()

    def of(self, node: str) -> World:
        """The world of a node's set; an empty one, if none has formed."""
        return self.at(self.set_of(node))

    def _strangers(self, name: str, world: World) -> list[str]:
        return [one.node for one in world.members if self.set_of(one.node) != name]

    def check(self) -> Iterator[str]:
        """Yields what breaks the invariants above `World`."""
        for name, world in self.worlds.items():
            for wrong in world.check(store=self.sets.stored(name)):
                yield f"{name}: {wrong}"
            strangers = world.recall("strangers", partial(self._strangers, name, world))
            if strangers:
                yield f"sets: {strangers} in the world of {name}"
        for node, offered in self.offers.items():
            if len(offered) > 1 and (len(offered) > STORES_MAX or len(set(offered)) < len(offered)):
                yield f"offers: O({node}) = {offered}"


# ---- evolve


def _on_created(slice_: WorldSlice, fact: job.JobCreated, record: Record) -> None:
    """A new run: generations continue to count, everything else begins anew."""
    slice_.worlds = {
        name: World(generation=old.generation, before=old.generation) for name, old in slice_.worlds.items()
    }


def _on_formed(slice_: WorldSlice, fact: WorldFormed, record: Record) -> None:
    before = slice_.at(fact.group)
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
    if not fact.store:
        return
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
    world = slice_.worlds.setdefault(slice_.set_of(fact.node), World())
    world.changed_at = record.at
    place = fact.node.rsplit("-", 1)[0]
    if not world.active and place not in world.came:
        # A node that joins and dies again and again restarts the timer only once.
        world.called_at = world.came[place] = record.at
    if world.active and not world.joined_at:
        world.joined_at = record.at


def _on_started(slice_: WorldSlice, fact: WorkersStarted, record: Record) -> None:
    slice_.worlds[slice_.set_of(fact.node)].started.append(fact.node)


def _on_stopped(slice_: WorldSlice, fact: WorkersStopped, record: Record) -> None:
    slice_.worlds[slice_.set_of(fact.node)].stopped.append(fact.node)


def _on_finished(slice_: WorldSlice, fact: WorkersFinished, record: Record) -> None:
    world = slice_.worlds[slice_.set_of(fact.node)]
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
