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
from typing import TYPE_CHECKING, NamedTuple, get_args

from dlrover_core.errors import Refused
from dlrover_core.job import job, nodes
from dlrover_core.job.layout import Ranges, layout, to_ranges
from dlrover_core.job.tally import Remembering
from dlrover_core.job.tiers import MEMORY
from dlrover_core.kernel.engine import Facts, Rules, always
from dlrover_core.kernel.events import Event, Record, event
from dlrover_core.spec import us

if TYPE_CHECKING:
    from dlrover_core.job.state import JobState

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


class OfferStore(NamedTuple):
    """An agent has a store to offer."""

    node: str
    address: str


class WithdrawStore(NamedTuple):
    """An agent's store is gone."""

    node: str
    address: str


class ReportStarted(NamedTuple):
    """An agent's workers run."""

    node: str
    generation: int


class ReportStopped(NamedTuple):
    """An agent's workers are dead, as ordered; ``step`` is the last they had made (-1 unknown)."""

    node: str
    generation: int
    step: int = -1


class ReportFinished(NamedTuple):
    """An agent's workers all ended well; ``step`` is the last they had made (-1 unknown); the rest as `WorkersFinished`."""

    node: str
    generation: int
    step: int = -1
    unstored: str = ""
    due: int = -1


# A node that ends, however.
Ended = nodes.NodeFailed | nodes.NodeGone | nodes.NodeLost | nodes.NodeReleased | nodes.NodeLeft | nodes.NodeSucceeded


class Member(NamedTuple):
    """A node's place in a world: its workers hold ranks ``first_rank`` to ``first_rank + nproc - 1``."""

    node: str
    nproc: int
    first_rank: int


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


@dataclass(slots=True)
class WorldSlice:
    """One world per coupling set (today every group is its own), and the unused stores by node."""

    worlds: dict[str, World] = field(default_factory=dict)
    offers: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def of(self, node: str) -> World:
        """The world of a node's group; an empty one where none has formed."""
        return self.worlds.get(group_of(node)) or World()


def group_of(node: str) -> str:
    """``worker`` of ``worker-1-0``."""
    return node.rsplit("-", 2)[0]


# ---- who goes where


def from_ranges(group: str, ranges: Ranges) -> tuple[Member, ...]:
    """The members that `to_ranges` wrote down."""
    members: list[Member] = []
    rank = 0
    for index, count, incarnation, nproc in ranges:
        for one in range(index, index + count):
            members.append(Member(f"{group}-{one}-{incarnation}", nproc, rank))
            rank += nproc
    return tuple(members)


# ---- when


def ready_nodes(state: JobState, group: str) -> list[nodes.Node]:
    """Nodes of a group that could be members now."""
    admits, away = state.health.admits, state.planning.away(state, group)
    here = state.nodes.nodes.values()
    return [one for one in here if one.group == group and one.ready and admits(state, one) and one.node not in away]


def _count(state: JobState, group: str, *, last_call_over: bool) -> int:
    """How many nodes a world formed now would have; 0: not now."""
    spec, ready = state.job.spec.group(group), state.health.admitted(state, group)
    expected = nodes.wanted(state, group) // spec.unit * spec.unit
    if ready >= expected >= spec.floor:
        return expected
    count = ready // spec.unit * spec.unit
    return count if last_call_over and count >= spec.floor else 0


def _last_call(state: JobState, group: str) -> int:
    """When a world forms with those who are there, if not everybody expected has come."""
    world = state.world.worlds.get(group) or World()
    return max(world.called_at, state.job.calm_at) + us(state.job.spec.last_call_s)


def form(state: JobState, group: str, now: int, reason: str, *, at_once: bool = False) -> Iterator[Event]:
    """The next generation, if it can form now.

    Waits for the store of rank 0's node and, unless ``at_once``, for the last call. It goes on from the boundary at which the
    last one waits, if it does.
    """
    if not state.job.forms or now < state.failures.of(group).not_before(state.job.spec.restart_pause_s):
        return
    count = _count(state, group, last_call_over=at_once or now >= _last_call(state, group))
    if count == 0:
        return
    world = state.world.worlds.get(group) or World()
    ordered = _seats(state, group, world, count)
    if now >= _last_call(state, group):
        _lead_with_a_store(state, ordered)
    offers = state.world.offers.get(ordered[0].node)
    if offers:
        # Of these slices, not of their modules: those import this one.
        boundary = state.planning.resume(state, group)
        resume = (boundary, MEMORY) if boundary >= 0 else state.checkpoints.of(group).resume()
        yield WorldFormed(group, world.generation + 1, to_ranges(ordered), offers[0], reason, *resume)


def _seats(state: JobState, group: str, world: World, count: int) -> list[nodes.Node]:
    """The layout of now. Worked out once for as long as only stores come and go: everybody's may come before rank 0's."""
    tally = state.nodes.tally
    key = (count, world.generation, tally.changes + state.health.changes)
    known, ordered = tally.seats.get(group, (None, []))
    if known != key or state.planning.leaving:
        ordered = layout([member.node for member in world.members], ready_nodes(state, group), count)
        tally.seats[group] = (key, ordered)
    return list(ordered)


def _lead_with_a_store(state: JobState, ordered: list[nodes.Node]) -> None:
    """Where the node of rank 0 offers no store for so long, one that does changes places with it: better than no world."""
    place = next((place for place, node in enumerate(ordered) if state.world.offers.get(node.node)), 0)
    ordered[0], ordered[place] = ordered[place], ordered[0]


def reform(state: JobState, group: str, now: int, reason: str) -> Iterator[Event]:
    """Replace the active generation at once; where that cannot be, stop it and wait for what is missing."""
    formed = list(form(state, group, now, reason, at_once=complete(state, group)))
    if formed:
        yield from formed
    else:
        yield from dissolve(state, group, reason)


def complete(state: JobState, group: str) -> bool:
    """Are all members of the last world here whose places are still wanted? They wait for nobody, last call or not."""
    nodes_max, last = state.job.spec.group(group).nodes_max, state.world.worlds.get(group) or World()
    here, away = {node.node for node in ready_nodes(state, group)}, state.planning.away(state, group)
    wanted = [member.node for member in last.members if int(member.node.rsplit("-", 2)[1]) < nodes_max]
    staying = [node for node in wanted if node not in away]
    return bool(staying) and here.issuperset(staying)


def dissolve(state: JobState, group: str, reason: str, *, planned: bool = False) -> Iterator[Event]:
    """Stop the active generation, if there is one."""
    world = state.world.worlds.get(group)
    if world is not None and world.active:
        yield WorldDissolved(group, world.generation, reason, planned)


def _waiting(state: JobState) -> Iterator[tuple[str, World]]:
    """Groups that have no active world though they should."""
    if state.job.forms:
        for group in state.job.spec.groups:
            world = state.world.worlds.get(group.name) or World()
            if not world.active and not held(state, group.name):
                yield group.name, world


def waits(state: JobState, group: str) -> bool:
    """Has this group no active world though it should?"""
    return any(group == waiting for waiting, _ in _waiting(state))


def held(state: JobState, group: str) -> bool:
    """Is a final decision pending over the group's failure? Then no world forms."""
    return any(incident.held and group_of(incident.node) == group for incident in state.failures.incidents.values())


def _growable(state: JobState, group: str) -> int:
    """The size a running smaller world could grow to by a plain restart; 0: it could not, or must not.

    Where ranks can agree on a step boundary it grows there (`changing`).
    """
    return larger(state, group) if state.job.spec.on_join == "restart" and not state.planning.able(state, group) else 0


def larger(state: JobState, group: str) -> int:
    """The size a running smaller world could have now; 0: no other."""
    world = state.world.worlds.get(group)
    if world is None or not world.active or world.finished or not state.job.forms:
        return 0
    count = _count(state, group, last_call_over=True)
    # Rank 0 stays where it is.
    return count if count > len(world.members) and state.world.offers.get(world.members[0].node) else 0


def grow_at(state: JobState, group: str) -> int:
    """When a world that could be larger is made so: at once where everybody wanted is there, else once others had their time."""
    world = state.world.worlds[group]
    everybody = larger(state, group) == nodes.wanted(state, group)
    return state.at if everybody else world.joined_at + us(state.job.spec.grow_window_s)


def _grow(state: JobState, group: str, now: int) -> Iterator[Event]:
    """Take late nodes into a running world. Nothing has failed: its workers have their grace."""
    formed = list(form(state, group, now, "nodes joined", at_once=True))
    yield from dissolve(state, group, "nodes joined", planned=True) if formed else ()
    yield from formed


def _due(state: JobState) -> int | None:
    # Only what a tick could do then: without a store nothing forms, and the next offer says so by itself.
    times = [_formable_at(state, group) for group, _ in _waiting(state) if _formable(state, group)]
    times += [grow_at(state, group) for group in state.world.worlds if _growable(state, group)]
    return min(times, default=None)


def _formable_at(state: JobState, group: str) -> int:
    return max(_last_call(state, group), state.failures.of(group).not_before(state.job.spec.restart_pause_s))


def _formable(state: JobState, group: str) -> bool:
    if not _count(state, group, last_call_over=True):
        return False
    return any(state.world.offers.get(node.node) for node in ready_nodes(state, group))


def _tick(state: JobState, now: int) -> Iterator[Event]:
    for group, _ in list(_waiting(state)):
        if now >= _last_call(state, group):
            yield from form(state, group, now, "last call is over")
    for group in list(state.world.worlds):
        if _growable(state, group) and now >= grow_at(state, group):
            yield from _grow(state, group, now)


# ---- decide


def _current(state: JobState, node: str, generation: int) -> World:
    nodes.present(state, node)
    world = state.world.of(node)
    if generation != world.generation or world.member(node) is None:
        raise Refused(f"generation {generation} is over: generation {world.generation} is the newest")
    return world


def _started(state: JobState, command: ReportStarted, now: int) -> Iterator[Event]:
    if _current(state, command.node, command.generation).listed("started", command.node):
        raise Refused(f"node {command.node!r} has started generation {command.generation} already")
    yield WorkersStarted(command.node, command.generation)


def _stopped(state: JobState, command: ReportStopped, now: int) -> Iterator[Event]:
    if _current(state, command.node, command.generation).listed("stopped", command.node):
        raise Refused(f"node {command.node!r} has stopped generation {command.generation} already")
    yield WorkersStopped(command.node, command.generation, command.step)


def _finished(state: JobState, command: ReportFinished, now: int) -> Iterator[Event]:
    world = _current(state, command.node, command.generation)
    if not world.active or world.listed("finished", command.node):
        raise Refused(f"generation {command.generation} is not running on {command.node!r}")
    yield WorkersFinished(*command[:3], command.unstored[: nodes.TEXT_MAX], max(-1, command.due))


def _offer(state: JobState, command: OfferStore, now: int) -> Iterator[Event]:
    node = nodes.present(state, command.node)
    offers = state.world.offers.get(node.node, ())
    if len(command.address) > nodes.NAME_MAX:
        raise Refused(f"the address of a store has at most {nodes.NAME_MAX} characters")
    if not node.joined or command.address in offers or len(offers) >= STORES_MAX:
        raise Refused(f"node {node.node!r} is {node.state} and has offered {len(offers)} stores already")
    yield StoreOffered(node.node, command.address)


def _withdraw(state: JobState, command: WithdrawStore, now: int) -> Iterator[Event]:
    if command.address not in state.world.offers.get(command.node, ()):
        raise Refused(f"store {command.address} is not on offer")
    yield StoreWithdrawn(command.node, command.address)


# ---- react


def _start_job(state: JobState, fact: WorldFormed, record: Record) -> Iterator[Event]:
    if state.job.state == "created":
        yield job.JobStarted()


def _on_arrival(state: JobState, fact: nodes.NodeJoined | StoreOffered, record: Record) -> Iterator[Event]:
    group = group_of(fact.node)
    if waits(state, group):
        yield from form(state, group, record.at, "everybody expected is there")
    elif isinstance(fact, nodes.NodeJoined) and _growable(state, group) and grow_at(state, group) <= record.at:
        yield from _grow(state, group, record.at)


def _on_loss(state: JobState, fact: Ended, record: Record) -> Iterator[Event]:
    if not state.job.live:
        return
    group = group_of(fact.node)
    world = state.world.of(fact.node)
    if world.active and world.member(fact.node) is not None and not world.done(fact.node):
        yield from dissolve(state, group, f"{fact.node} is no longer a member: {type(fact).__name__}")
    if waits(state, group):
        yield from form(state, group, record.at, "going on without it")


def _all_finished(state: JobState, fact: WorkersFinished, record: Record) -> Iterator[Event]:
    if not state.job.live:
        return
    worlds = [state.world.worlds.get(group.name) or World() for group in state.job.spec.groups]
    if all(world.active and len(world.finished) == len(world.members) for world in worlds):
        owed = [
            f"{node}: {why}"
            for group, world in state.world.worlds.items()
            for node, (due, why) in world.unstored.items()
            if due < 0 or (world.generation, due) > state.checkpoints.of(group).newest
        ]
        why = "unstored: the script ended well, and its last state is not on storage"
        yield job.JobFailed(why, 0, owed[0]) if owed else job.JobSucceeded(fact.generation)


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

RULES = Rules(
    decide={
        OfferStore: _offer,
        WithdrawStore: _withdraw,
        ReportStarted: _started,
        ReportStopped: _stopped,
        ReportFinished: _finished,
    },
    react={
        WorldFormed: _start_job,
        nodes.NodeJoined: _on_arrival,
        StoreOffered: _on_arrival,
        **dict.fromkeys(set(get_args(Ended)) - {nodes.NodeSucceeded}, _on_loss),
        WorkersFinished: _all_finished,
    },
    due=_due,
    tick=_tick,
    levels=dict.fromkeys((WorldFormed, WorldDissolved), always),
)
