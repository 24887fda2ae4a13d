"""Checkpoints: which steps are on storage, where a generation resumed from, and what is saved when a world ends.

What lies in memory changes with every step. Agents report it with their heartbeats (`runtime.keeping`), and the log does
not hold it. The log holds the rare changes: a generation's script saves with FlashCheckpoint; a step is complete on storage
(one event, whichever nodes wrote its parts, so a shared file system needs no barrier); what the nodes hold in memory when a
generation ends; from which tier a generation was restored; and a storage that fails or works again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, get_args

from dlrover_core.job import job, nodes, world
from dlrover_core.job.holdings import NO_STEP, Holdings, SaveOrder
from dlrover_core.job.incidents import ASIDE, IncidentOpened
from dlrover_core.job.ranges import Brief, brief
from dlrover_core.job.sets import Coupled
from dlrover_core.kernel.engine import Facts
from dlrover_core.kernel.events import Record, event
from dlrover_core.kernel.state import LATER, lasting
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
    """The ranks of a generation save with FlashCheckpoint. The node of rank 0 says so, once.

    url:         the storage
    every:       steps between two saves in memory
    store_every: steps between two saves on storage
    keep:        how many checkpoints stay on storage
    planned:     the ranks can agree on a step boundary, so a planned change of the world loses no step
    node_bytes:  size of one node's staging memory
    spread:      number of nodes that one state's tensors are spread over; 0: all
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


def _without_cut(fields: tuple[Any, ...]) -> tuple[Any, ...]:
    """Version 1 of an event says nothing of data."""
    return (*fields, b"")


@event(71, version=2, upcast={1: _without_cut})
class CheckpointCommitted(NamedTuple):
    """Every part of a step is on storage, durably: the step is a checkpoint from now on.

    parts:   how many parts it has
    size:    bytes of all parts
    took_us: time to write it
    why:     why it was saved; `DUE`: its interval was over
    cut:     what it has consumed of each dataset (`data.cut`), packed; empty: it says nothing
    """

    group: str
    generation: int
    step: int
    url: str
    parts: int
    size: int
    took_us: int
    why: str
    cut: bytes = b""


@event(72)
class StorageFailed(NamedTuple):
    """A node cannot write its parts to ``url``. Training goes on, and so do tries. Recorded once until `StorageBack`."""

    node: str
    url: str
    reason: str


@event(73)
class StorageBack(NamedTuple):
    """The node can write to ``url`` again."""

    node: str
    url: str


@event(74)
class ReplicaOffered(NamedTuple):
    """A node accepts replicas of other nodes' states at ``address``, and serves them from there."""

    node: str
    address: str


@event(75, version=2, upcast={1: _without_cut})
class StepsHeld(NamedTuple):
    """The steps that are complete in a node's memory when its ``generation`` ends, or at the boundary of ``plan``; ascending.

    copies: the replicas that the node holds, as (place of the owner in the world, step)
    cut:    what the newest of the steps has consumed of each dataset, packed; empty: it says nothing
    """

    node: str
    generation: int
    steps: tuple[int, ...]
    plan: int = 0
    copies: tuple[tuple[int, int], ...] = ()
    cut: bytes = b""


@event(76)
class SaveOrdered(NamedTuple):
    """The nodes that hold ``step`` of an ended ``generation`` must write its parts to storage now."""

    group: str
    generation: int
    step: int
    why: str


def _without_origin(fields: tuple[Any, ...]) -> tuple[Any, ...]:
    """Version 1 of a restore names the step alone."""
    return (*fields, 0, b"")


@event(77, version=2, upcast={1: _without_origin})
class Restored(NamedTuple):
    """The ranks of a node resumed a generation.

    step:    the step that they resumed from; 0: they began anew
    tier:    where the state was read from
    took_us: time to read it
    fell:    tiers that were tried before and failed, each with the reason
    of:      the generation that had made the step; 0: it is not told, or they began anew
    cut:     what they have consumed of each dataset, as they say, packed; empty: they say nothing
    """

    node: str
    generation: int
    step: int
    tier: str
    took_us: int
    fell: tuple[tuple[str, str], ...] = ()
    of: int = 0
    cut: bytes = b""


@event(78)
class RanksArmed(NamedTuple):
    """All ranks of a node know of ``plan`` and look for its boundary between any two steps."""

    node: str
    plan: int


@command(17)
class ReportKeeping(NamedTuple):
    """The node of rank 0: its ranks save with FlashCheckpoint. Fields as in `KeepingStarted`."""

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
    """A node: the steps that are complete in its memory, now that its workers have ended or wait at the boundary of ``plan``.

    Every node sends it at every end of a generation, with no steps where it holds none. Once the leader waits for no
    further node, it has the newest step saved that is complete over all nodes. Fields as in `StepsHeld`.
    """

    node: str
    generation: int
    steps: tuple[int, ...]
    plan: int = 0
    copies: tuple[tuple[int, int], ...] = ()
    cut: bytes = b""


@command(19)
class ReportStorage(NamedTuple):
    """A node cannot write its parts, for this ``reason``; empty: it can again."""

    node: str
    url: str
    reason: str = ""


@command(20)
class OfferReplica(NamedTuple):
    """A node accepts replicas at ``address`` (``host:port``)."""

    node: str
    address: str


@command(21)
class ReportRestored(NamedTuple):
    """A node: where its ranks resumed from, with the slowest tier and longest time of its ranks. Fields as in `Restored`."""

    node: str
    generation: int
    step: int
    tier: str
    took_us: int
    fell: tuple[tuple[str, str], ...] = ()
    of: int = 0
    cut: bytes = b""


@command(22)
class ReportArmed(NamedTuple):
    """A node: all its ranks look for the boundary of ``plan``."""

    node: str
    plan: int


@part(3)
class Keep(NamedTuple):
    """To every agent: what the leader knows of its group's checkpoints.

    committed:    the newest step that is complete on storage; -1: none
    committed_of: the generation of that step; the same number in another generation is another state
    replica_to:   the address that this node sends its replica to; empty: none
    mtbf_s:       expected seconds between failures; 0: unknown
    lenders:      nodes that left this world at the boundary ``resume_step`` and still serve their memory: address, first
                  rank in the world before, number of ranks
    decided:      the leader orders no save of this generation or earlier ones, except by `Persist`
    """

    committed: int = NO_STEP
    committed_of: int = 0
    replica_to: str = ""
    mtbf_s: int = 0
    lenders: tuple[tuple[str, int, int], ...] = ()
    decided: int = 0


@part(4)
class Persist(NamedTuple):
    """To a node that holds the state: write one step of an ended generation to storage now.

    step:   the step; -1: none
    of:     the generation
    places: owners of the parts to write, by place in that world: the node itself, or owners of its replicas
    """

    step: int = NO_STEP
    of: int = 0
    places: tuple[int, ...] = ()


class CommitCheckpoint(NamedTuple):
    """The leader: all parts of a step are on storage, by the agents' heartbeats.

    ``cuts``: what its writers say that it has consumed, packed, each once. ``trained``: of writers that say it, as in `Written`.
    """

    group: str
    generation: int
    step: int
    parts: int
    size: int
    took_us: int
    cuts: tuple[bytes, ...] = ()
    trained: tuple[bytes, ...] = ()


# Invariants of checkpoints, after every event, beside those of `holdings`; `CheckpointSlice.check` yields the broken ones.
#
#   K        `committed`: the steps that are complete on storage, as (generation, step)
#   n, e     `now`, `ended`: holdings of the running generation and of an ended one
#   o        `order`: the step of an ended generation that is to be written to storage
#
#   commits  K ascends, and has at most `COMMITTED_KEPT` steps
#   life     n has not ended, e has; both are of generations up to `formed`, e of an earlier one than n
#   order    o is newer than K


@dataclass(slots=True)
class GroupCheckpoints:
    """Checkpoints of one coupling set.

    generation:              the newest generation that saves with FlashCheckpoint
    url, every, store_every: as in `KeepingStarted`
    committed:               steps on storage as (generation, step), newest last
    formed:                  generation of the newest world
    members:                 nodes of the newest world
    now:                     what the nodes of the running generation have reported; None: it does not save
    ended:                   what the nodes of the generation before have reported
    order:                   a step of an ended generation that is to be written; None: none
    restored:                nodes that have reported where they resumed from
    """

    generation: int = 0
    url: str = ""
    every: int = 0
    store_every: int = 0
    committed: list[tuple[int, int]] = field(default_factory=list)
    formed: int = 0
    members: Brief = ()
    now: Holdings | None = None
    ended: Holdings | None = None
    order: SaveOrder | None = None
    restored: list[str] = field(default_factory=list)

    @property
    def newest(self) -> tuple[int, int]:
        """Generation and step of the newest checkpoint; (0, -1): there is none."""
        return self.committed[-1] if self.committed else (0, NO_STEP)

    def holdings(self, generation: int) -> Holdings | None:
        """What the nodes of a generation have reported; None: it is not remembered."""
        return next((one for one in (self.now, self.ended) if one is not None and one.generation == generation), None)

    def resume(self) -> tuple[int, str]:
        """The newest complete step that the leader knows of, and its tier; (-1, ""): it knows none.

        This is a lower bound. Nodes report their memory after their workers have ended, and by then the next world has
        often formed. The ranks compare what they hold among themselves and choose the step to resume from.
        """
        held = self.ended.whole if self.ended is not None else NO_STEP
        if self.ended is not None and held >= 0 and (self.ended.generation, held) > self.newest:
            return held, MEMORY
        return (self.newest[1], STORAGE) if self.committed else (NO_STEP, "")

    def check(self) -> Iterator[str]:
        """Yields what breaks the invariants above."""
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
class CheckpointSlice(Coupled):
    """Checkpoints of all sets, and the nodes' storage and replicas.

    groups:   checkpoints by set
    replicas: the address where a node accepts replicas, by node
    failing:  the url that a node cannot write to, by node
    outages:  how often a node's storage has failed and when last, by node
    offered:  number of changes of ``replicas``
    began_at: when the run began
    failures: failures since then that broke a world
    mtbf_s:   seconds between two of them; 0: unknown
    broken:   ``failures`` and ``mtbf_s`` by set; empty in a job of one set
    """

    groups: dict[str, GroupCheckpoints] = field(default_factory=dict)
    replicas: dict[str, str] = field(default_factory=dict)
    failing: dict[str, str] = field(default_factory=dict)
    outages: dict[str, tuple[int, int]] = field(default_factory=dict)
    offered: int = lasting(int)
    began_at: int = 0
    failures: int = 0
    mtbf_s: int = 0
    broken: dict[str, tuple[int, int]] = field(default_factory=dict, metadata=LATER)

    def mtbf(self, name: str) -> int:
        """Expected seconds between failures of a set; 0: unknown."""
        return self.broken.get(name, (0, 0))[1] if self.sets.several else self.mtbf_s

    def of(self, group: str) -> GroupCheckpoints:
        """A set's checkpoints; empty ones for a set that has none."""
        return self.groups.get(group) or GroupCheckpoints()

    def check(self) -> Iterator[str]:
        """Yields what breaks the invariants above `GroupCheckpoints` and `Holdings`."""
        for group, kept in self.groups.items():
            yield from (f"{group}: {wrong}" for wrong in kept.check())


def worth_telling(tier: str, fell: tuple[tuple[str, str], ...], *, rank_0: bool) -> bool:
    """Should a node send `ReportRestored`? Only rank 0's node does when the ranks found their own memory, or nothing anywhere."""
    return rank_0 or tier not in (MEMORY, NOTHING) or bool(fell)


def storage_calm_s(failures: int) -> int:
    """Seconds that a storage must work before a node reports it as back; ``failures``: how often it has failed.

    A node reports the end of the first failure at once. For a storage that comes and goes, this bounds the log to 42 events
    per node and day.
    """
    return min(CALM_MAX_S, CALM_S << min(failures - 2, 8)) if failures > 1 else 0


# ---- evolve


def _on_created(slice_: CheckpointSlice, fact: job.JobCreated, record: Record) -> None:
    """A new run reads from storage which checkpoints earlier runs left."""
    slice_.began_at = record.at


def _on_formed(slice_: CheckpointSlice, fact: world.WorldFormed, record: Record) -> None:
    kept = slice_.groups.setdefault(fact.group, GroupCheckpoints())
    _end(kept, record.at, planned=False, why=fact.reason)
    kept.formed, kept.members, kept.restored = fact.generation, brief(fact.group, fact.members), []


def _on_dissolved(slice_: CheckpointSlice, fact: world.WorldDissolved, record: Record) -> None:
    _end(slice_.groups[fact.group], record.at, planned=fact.planned, why=fact.reason)


def _on_farewell(slice_: CheckpointSlice, fact: job.JobStopping | job.JobFailed, record: Record) -> None:
    """Agents leave, and what their nodes hold in memory ends with them."""
    for kept in slice_.groups.values():
        _end(kept, record.at, planned=isinstance(fact, job.JobStopping), why=fact.reason)


def _end(kept: GroupCheckpoints, at: int, *, planned: bool, why: str) -> None:
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
    """The mean time between failures: the maximum-likelihood estimate for a constant failure rate, to two digits.

    NIST/SEMATECH e-Handbook of Statistical Methods, 8.4.5.1. It is computed on events, so that every node gets the same
    number, and rounded to two digits, so that the number seldom changes.
    """
    if slice_.failures:
        slice_.mtbf_s = _between(at - slice_.began_at, slice_.failures)
    for name, (failures, _) in slice_.broken.items():
        slice_.broken[name] = failures, _between(at - slice_.began_at, failures)


def _between(us: int, failures: int) -> int:
    exact = max(1, min(us // (failures * 1_000_000), MTBF_MAX_S))
    unit: int = 10 ** max(0, len(str(exact)) - 2)
    return exact // unit * unit


def _on_incident(slice_: CheckpointSlice, fact: IncidentOpened, record: Record) -> None:
    if fact.generation != ASIDE:
        slice_.failures += 1
        if slice_.sets.several:
            name = slice_.set_of(fact.node)
            slice_.broken[name] = slice_.broken.get(name, (0, 0))[0] + 1, 0
        _expect(slice_, record.at)


def _on_held(slice_: CheckpointSlice, fact: StepsHeld, record: Record) -> None:
    held = slice_.groups[slice_.set_of(fact.node)].holdings(fact.generation)
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
    slice_.groups[slice_.set_of(fact.node)].restored.append(fact.node)


def _on_failed(slice_: CheckpointSlice, fact: StorageFailed, record: Record) -> None:
    slice_.failing[fact.node] = fact.url
    slice_.outages[fact.node] = slice_.outages.get(fact.node, (0, 0))[0] + 1, record.at


def _on_back(slice_: CheckpointSlice, fact: StorageBack, record: Record) -> None:
    slice_.failing.pop(fact.node, None)


def _on_offered(slice_: CheckpointSlice, fact: ReplicaOffered, record: Record) -> None:
    slice_.replicas[fact.node] = fact.address
    slice_.offered += 1


def _forget(slice_: CheckpointSlice, fact: world.Ended, record: Record) -> None:
    """A node's memory is lost with the node. A released node still exists, reports its steps, and may write them."""
    if slice_.replicas.pop(fact.node, None) is not None:
        slice_.offered += 1
    slice_.failing.pop(fact.node, None)
    kept = slice_.groups.get(slice_.set_of(fact.node))
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
