"""Checkpoints: which steps are whole on storage, what became of restores, and what is saved when a world ends.

What lies in memory is a level: it changes with every step, so agents tell it with their beats (`runtime.keeping`) and it is not
in the log. Here are the edges: that a generation's script saves with us at all, that a step is whole on storage (one event,
whoever wrote the parts: no barrier on a shared file system), what the ranks hold when a generation ends, from which tier a
generation was restored, and a storage that fails or is back.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, get_args

from dlrover_core.job import job, nodes, world
from dlrover_core.job.holdings import NO_STEP, Holdings, SaveOrder
from dlrover_core.job.incidents import ASIDE, IncidentOpened
from dlrover_core.job.names import group_of
from dlrover_core.job.ranges import Ranges
from dlrover_core.kernel.engine import Facts
from dlrover_core.kernel.events import Record, event
from dlrover_core.kernel.wire import command, part

MEMORY, PEER, DISK, STORAGE, NOTHING = "memory", "peer", "disk", "storage", "nothing"
TIERS = (MEMORY, PEER, DISK, STORAGE, NOTHING)

DUE = "due"
URL_MAX, TEXT_MAX = 1024, 300
STEPS_MAX, COPIES_MAX, FELL_MAX, NUMBER_MAX = 8, 16, 8, 2**53
COMMITTED_KEPT = 64
MTBF_MAX_S = 2**31
CALM_S, CALM_MAX_S = 600, 4800


@event(70)
class KeepingStarted(NamedTuple):
    """The ranks of a generation save with us, to ``url``: every ``every`` steps in memory, every ``store_every`` on storage.

    ``planned``: they can agree on a step boundary, so a planned change of the world loses no step. ``node_bytes`` is what the
    arenas of one node take. ``spread``: over how many nodes the tensors of one state are; 0: over all. Said once by the node of
    rank 0.
    """

    group: str
    generation: int
    url: str
    every: int
    store_every: int
    keep: int
    planned: bool
    node_bytes: int
    spread: int = 0


@event(71)
class CheckpointCommitted(NamedTuple):
    """Every part of ``step`` is on storage, durably: from here on it is a checkpoint. ``size`` in bytes, ``why`` it was saved."""

    group: str
    generation: int
    step: int
    url: str
    parts: int
    size: int
    took_us: int
    why: str


@event(72)
class StorageFailed(NamedTuple):
    """A node cannot write its parts to ``url``; training goes on, tries go on. Once until `StorageBack`."""

    node: str
    url: str
    reason: str


@event(73)
class StorageBack(NamedTuple):
    """It can again."""

    node: str
    url: str


@event(74)
class ReplicaOffered(NamedTuple):
    """The node keeps copies of other nodes' states, sent to ``address``, and serves what it keeps from there."""

    node: str
    address: str


@event(75)
class StepsHeld(NamedTuple):
    """What is whole in the memory of a node when its ``generation`` ends, or at the boundary of ``plan``: steps, ascending.

    ``copies``: of which other places it keeps the parts, each with the step.
    """

    node: str
    generation: int
    steps: tuple[int, ...]
    plan: int = 0
    copies: tuple[tuple[int, int], ...] = ()


@event(76)
class SaveOrdered(NamedTuple):
    """Whoever holds ``step`` of ``generation`` is to write its parts to storage now: all ranks hold it, and they were stopped."""

    group: str
    generation: int
    step: int
    why: str


@event(77)
class Restored(NamedTuple):
    """The ranks of a generation began from ``step`` (0: from nothing), read from ``tier`` in ``took_us``.

    ``fell``: the tiers that were tried before, each with what was wrong with it.
    """

    node: str
    generation: int
    step: int
    tier: str
    took_us: int
    fell: tuple[tuple[str, str], ...] = ()


@event(78)
class RanksArmed(NamedTuple):
    """All ranks of a node know that ``plan`` is coming and look for its boundary between any two steps."""

    node: str
    plan: int


@command(17)
class ReportKeeping(NamedTuple):
    """The node of rank 0: its ranks save with us."""

    node: str
    generation: int
    url: str
    every: int
    store_every: int
    keep: int
    planned: bool
    node_bytes: int
    spread: int = 0


@command(18)
class ReportHeld(NamedTuple):
    """A node: what its memory holds whole, now that its workers have ended, or wait at the boundary of ``plan``.

    To be sent at every end of a generation, empty too where nothing is held: what all hold is saved once nobody is waited for.
    """

    node: str
    generation: int
    steps: tuple[int, ...]
    plan: int = 0
    copies: tuple[tuple[int, int], ...] = ()


@command(19)
class ReportStorage(NamedTuple):
    """A node: parts cannot be written (``reason``), or can again (empty)."""

    node: str
    url: str
    reason: str = ""


@command(20)
class OfferReplica(NamedTuple):
    """A node takes copies at ``address`` (``host:port``)."""

    node: str
    address: str


@command(21)
class ReportRestored(NamedTuple):
    """A node: from where its ranks began. The slowest tier of its ranks, and the longest time."""

    node: str
    generation: int
    step: int
    tier: str
    took_us: int
    fell: tuple[tuple[str, str], ...] = ()


@command(22)
class ReportArmed(NamedTuple):
    """A node: all its ranks look for the boundary of ``plan``."""

    node: str
    plan: int


@part(3)
class Keep(NamedTuple):
    """To all: what is known of the group's states.

    committed:  the newest step that is whole on storage, by the log (-1: none), of generation ``committed_of``: a step of that
                number of another generation is another state
    replica_to: where copies of this node's states go; empty: nowhere
    mtbf_s:     seconds between failures to be expected; 0: unknown
    lenders:    nodes that have left this world at the boundary ``resume_step``, from where what they held there can be had: the
                address, the first rank of theirs in the world before, and how many
    decided:    of generations up to this one the leader will order nothing to be written beside `Persist`
    """

    committed: int = NO_STEP
    committed_of: int = 0
    replica_to: str = ""
    mtbf_s: int = 0
    lenders: tuple[tuple[str, int, int], ...] = ()
    decided: int = 0


@part(4)
class Persist(NamedTuple):
    """To a node that holds it: write this ``step`` (-1: none) of generation ``of``, which has ended, to storage now.

    ``places``: whose parts: its own place in that world, or those of others that it keeps copies of.
    """

    step: int = NO_STEP
    of: int = 0
    places: tuple[int, ...] = ()


class CommitCheckpoint(NamedTuple):
    """The leader: all parts of a step are there, as the agents' beats say."""

    group: str
    generation: int
    step: int
    parts: int
    size: int
    took_us: int


# What holds of checkpoints after every event, beside what `holdings` says; `CheckpointSlice.check` says what does not.
#
#   K        `committed`: the steps that are whole on storage, as (generation, step)
#   n, e     `now`, `ended`: what the nodes of the generation that saves hold, and those of one before
#   o        `order`: the step of an ended generation that is to be written
#
#   commits  K ascends, and has at most `COMMITTED_KEPT` steps
#   life     n has not ended, e has; both are of generations up to `formed`, e of an earlier one than n
#   order    o is newer than K


@dataclass(slots=True)
class Kept:
    """One group's checkpoints. ``generation``: the newest that saves with us; ``committed``: (generation, step), newest last.

    ``formed`` and ``members``: the newest world. ``now``: what is told of the generation that saves, ``ended``: of the one
    before. ``order``: what is to be written of one that has ended; ``restored``: the nodes that told from where they began.
    """

    generation: int = 0
    url: str = ""
    every: int = 0
    store_every: int = 0
    committed: list[tuple[int, int]] = field(default_factory=list)
    formed: int = 0
    members: Ranges = ()
    now: Holdings | None = None
    ended: Holdings | None = None
    order: SaveOrder | None = None
    restored: list[str] = field(default_factory=list)

    @property
    def newest(self) -> tuple[int, int]:
        """The newest committed generation and step; (0, -1): none is."""
        return self.committed[-1] if self.committed else (0, NO_STEP)

    def holdings(self, generation: int) -> Holdings | None:
        """What is told of a generation, if it is remembered."""
        return next((one for one in (self.now, self.ended) if one is not None and one.generation == generation), None)

    def resume(self) -> tuple[int, str]:
        """The newest step that is whole as far as the leader knows, and where; (-1, ""): none is.

        A floor: memory tells what it holds only after its workers have ended, often when the next world has formed already.
        Ranks find out what there is by themselves, and decide among themselves.
        """
        held = self.ended.whole if self.ended is not None else NO_STEP
        if self.ended is not None and held >= 0 and (self.ended.generation, held) > self.newest:
            return held, MEMORY
        return (self.newest[1], STORAGE) if self.committed else (NO_STEP, "")

    def check(self) -> Iterator[str]:
        """What of the formula above does not hold."""
        if self.committed != sorted(set(self.committed)) or len(self.committed) > COMMITTED_KEPT:
            yield f"commits: K = {self.committed}"
        told = [(one.generation, bool(one.ended_at)) for one in (self.ended, self.now) if one is not None]
        generations = [generation for generation, _ in told]
        over = [True] * (self.ended is not None) + [False] * (self.now is not None)
        if [ended for _, ended in told] != over or generations != sorted(set(generations)):
            yield f"life: (generation, has ended) of e and n = {told}"
        if max(generations, default=0) > self.formed:
            yield f"life: (generation, has ended) of e and n = {told}, formed = {self.formed}"
        if self.order is not None and (self.order.generation, self.order.step) <= self.newest:
            yield f"order: o = {(self.order.generation, self.order.step)}, the newest of K is {self.newest}"
        for one in (self.now, self.ended, self.order):
            yield from one.check() if one is not None else ()


@dataclass(slots=True)
class CheckpointSlice:
    """Every group's checkpoints, where nodes take copies, and which cannot write, with the url.

    ``outages``: how often a node's storage has failed, and when last. ``offered``: how often what nodes offer has changed.
    ``failures``: how many broke a world since ``began_at``; ``mtbf_s``: seconds between them.
    """

    groups: dict[str, Kept] = field(default_factory=dict)
    replicas: dict[str, str] = field(default_factory=dict)
    failing: dict[str, str] = field(default_factory=dict)
    outages: dict[str, tuple[int, int]] = field(default_factory=dict)
    offered: int = 0
    began_at: int = 0
    failures: int = 0
    mtbf_s: int = 0

    def of(self, group: str) -> Kept:
        """A group's checkpoints; of one that has none, an empty one."""
        return self.groups.get(group) or Kept()

    def check(self) -> Iterator[str]:
        """What of the formulas above `Kept` and `Holdings` does not hold."""
        for group, kept in self.groups.items():
            yield from (f"{group}: {wrong}" for wrong in kept.check())


def worth_telling(tier: str, fell: tuple[tuple[str, str], ...], *, rank_0: bool) -> bool:
    """Does a `ReportRestored` say something? One node speaks for those that found their own memory, or nothing anywhere."""
    return rank_0 or tier not in (MEMORY, NOTHING) or bool(fell)


def storage_calm_s(failures: int) -> int:
    """How long after it has told of a failure, its ``failures``-th, a node tells at the earliest that its storage is back.

    The first end of a failure is told at once. A storage that comes and goes is one that fails: 42 words per node and day.
    """
    return min(CALM_MAX_S, CALM_S << min(failures - 2, 8)) if failures > 1 else 0


# ---- evolve


def _on_created(slice_: CheckpointSlice, fact: job.JobCreated, record: Record) -> None:
    """A new run finds on storage what an earlier one left, by looking there."""
    slice_.groups.clear()
    slice_.replicas.clear()
    slice_.failing.clear()
    slice_.outages.clear()
    slice_.began_at, slice_.failures, slice_.mtbf_s = record.at, 0, 0


def _on_formed(slice_: CheckpointSlice, fact: world.WorldFormed, record: Record) -> None:
    kept = slice_.groups.setdefault(fact.group, Kept())
    _end(kept, record.at, planned=False, why=fact.reason)
    kept.formed, kept.members, kept.restored = fact.generation, fact.members, []


def _on_dissolved(slice_: CheckpointSlice, fact: world.WorldDissolved, record: Record) -> None:
    _end(slice_.groups[fact.group], record.at, planned=fact.planned, why=fact.reason)


def _on_farewell(slice_: CheckpointSlice, fact: job.JobStopping | job.JobFailed, record: Record) -> None:
    """Agents go, each with what it has in memory."""
    for kept in slice_.groups.values():
        _end(kept, record.at, planned=isinstance(fact, job.JobStopping), why=fact.reason)


def _end(kept: Kept, at: int, *, planned: bool, why: str) -> None:
    if kept.now is not None:
        kept.now.ended_at, kept.now.planned, kept.now.why = at, planned, why
        kept.ended, kept.now = kept.now, None


def _on_keeping(slice_: CheckpointSlice, fact: KeepingStarted, record: Record) -> None:
    kept = slice_.groups[fact.group]
    kept.generation, kept.url, kept.every, kept.store_every = fact.generation, fact.url, fact.every, fact.store_every
    kept.now = Holdings(fact.group, fact.generation, kept.members)


def _on_committed(slice_: CheckpointSlice, fact: CheckpointCommitted, record: Record) -> None:
    kept = slice_.groups[fact.group]
    kept.committed = [*kept.committed[-COMMITTED_KEPT + 1 :], (fact.generation, fact.step)]
    if kept.order is not None and (kept.order.generation, kept.order.step) <= kept.newest:
        kept.order = None
    _expect(slice_, record.at)


def _expect(slice_: CheckpointSlice, at: int) -> None:
    """Time over failures, their maximum-likelihood estimate where they come at a constant rate, to two digits.

    NIST/SEMATECH e-Handbook of Statistical Methods, 8.4.5.1. It is worked out when something happens, so that it is the same
    number for everybody; two digits, so that it is so for a while.
    """
    if slice_.failures:
        exact = max(1, min((at - slice_.began_at) // (slice_.failures * 1_000_000), MTBF_MAX_S))
        unit = 10 ** max(0, len(str(exact)) - 2)
        slice_.mtbf_s = exact // unit * unit


def _on_incident(slice_: CheckpointSlice, fact: IncidentOpened, record: Record) -> None:
    if fact.generation != ASIDE:
        slice_.failures += 1
        _expect(slice_, record.at)


def _on_held(slice_: CheckpointSlice, fact: StepsHeld, record: Record) -> None:
    held = slice_.groups[group_of(fact.node)].holdings(fact.generation)
    if held is not None and not fact.plan:
        held.heard_at = held.heard_at or record.at
        held.held[fact.node] = fact.steps
        if fact.copies:
            held.copies[fact.node] = fact.copies


def _on_ordered(slice_: CheckpointSlice, fact: SaveOrdered, record: Record) -> None:
    kept = slice_.groups[fact.group]
    ended = kept.holdings(fact.generation)
    if ended is not None:
        ended.saved = True
        kept.order = SaveOrder.of(ended, fact.step, fact.why)


def _on_restored(slice_: CheckpointSlice, fact: Restored, record: Record) -> None:
    slice_.groups[group_of(fact.node)].restored.append(fact.node)


def _on_failed(slice_: CheckpointSlice, fact: StorageFailed, record: Record) -> None:
    slice_.failing[fact.node] = fact.url
    slice_.outages[fact.node] = slice_.outages.get(fact.node, (0, 0))[0] + 1, record.at


def _on_back(slice_: CheckpointSlice, fact: StorageBack, record: Record) -> None:
    slice_.failing.pop(fact.node, None)


def _on_offered(slice_: CheckpointSlice, fact: ReplicaOffered, record: Record) -> None:
    slice_.replicas[fact.node] = fact.address
    slice_.offered += 1


def _forget(slice_: CheckpointSlice, fact: world.Ended, record: Record) -> None:
    """Its memory goes with it. Who is released is still there: it stops its workers, tells what they leave, and may write it."""
    if slice_.replicas.pop(fact.node, None) is not None:
        slice_.offered += 1
    slice_.failing.pop(fact.node, None)
    kept = slice_.groups.get(group_of(fact.node))
    if kept is None or isinstance(fact, nodes.NodeReleased):
        return
    slice_.outages.pop(fact.node, None)
    for held in (kept.now, kept.ended):
        if held is not None:
            held.lose(fact.node)
    if kept.order is not None and not kept.order.lose(fact.node):
        kept.order = None


EVENTS = (
    KeepingStarted, CheckpointCommitted, StorageFailed, StorageBack, ReplicaOffered, StepsHeld, SaveOrdered, Restored,
    RanksArmed,
)  # fmt: skip

FACTS = Facts(
    kinds=EVENTS,
    evolve={
        job.JobCreated: _on_created,
        **dict.fromkeys((job.JobStopping, job.JobFailed), _on_farewell),
        world.WorldFormed: _on_formed,
        world.WorldDissolved: _on_dissolved,
        IncidentOpened: _on_incident,
        KeepingStarted: _on_keeping,
        CheckpointCommitted: _on_committed,
        StorageFailed: _on_failed,
        StorageBack: _on_back,
        ReplicaOffered: _on_offered,
        StepsHeld: _on_held,
        SaveOrdered: _on_ordered,
        Restored: _on_restored,
        **dict.fromkeys(get_args(world.Ended), _forget),
    },
)
