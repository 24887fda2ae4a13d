"""Leases: who may use which samples of a dataset whose workers keep their own pace (``assign="lease"``).

The samples of all epochs stand on one axis: position p is place p % size of epoch p // size. Each position is *free*, *held* by
one node, or *acknowledged*: used for good. A node holds ranges for some seconds of its own pace, and its agent hands them out to
workers in shards. What a node that ends had not acknowledged is free again; as the lowest free positions are granted first,
it goes to others before anything new. The dataset has ended when every position is acknowledged, and not before: a
position that is held may still come back.

With ``lineage="server"`` acknowledgements are the authority: what was learnt lives with servers, and outlives workers. A worker
that dies between using a sample and acknowledging it makes the sample be used again. Such positions are *repeated*, perhaps, and
the log names them.

With ``lineage="model"`` the restored model is the authority. A position is acknowledged once a rank of this generation has taken
it, for whatever becomes of the rank, its death ends the generation. The next generation resumes from a state, and rank 0's node
says which positions that state was trained on (`LeasesRestored`): these are acknowledged, and all others are free again. Of
states on storage the log knows already how many these are (`LeasesSaved`): a word that differs is refused. From
the moment that a world forms until then nothing is granted, and words of earlier generations are not heard.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from dlrover_core.data.ranges import POSITION_MAX, Ranges
from dlrover_core.job.names import group_of
from dlrover_core.job.shards import LEASE, LEASES, MODEL_LEASE, DatasetRegistered, Terms
from dlrover_core.job.world import WorldFormed
from dlrover_core.kernel.engine import Facts
from dlrover_core.kernel.events import Record, event
from dlrover_core.kernel.state import LATER
from dlrover_core.kernel.wire import command, part

SPANS_MAX = 1_024
"""Ranges of one node's lease, and of one message, at most."""
GRANT_SPANS_MAX = 256
"""Ranges of one grant at most."""
BYTES_MAX = 16_384
"""Bytes of packed ranges in one field of a message: `SPANS_MAX` ranges fit, wherever they are."""
REPEATED_SPANS_MAX = 2_000
"""Of the ranges that were used again so many are kept in the state; all are counted, and the log has all."""
SAVED_MAX = 64
"""Of so many states on storage it is known what they were trained on."""
RATE_MAX = 2**53
WHY_MAX = 300
KILO = 1_000
"""Rates are integers: samples in so many seconds."""

Spans = tuple[tuple[int, int], ...]


@event(52)
class LeaseGranted(NamedTuple):
    """A node may use these positions of a dataset.

    group:   of nodes that share the dataset
    dataset: its name
    node:    who may
    spans:   the positions, packed (`data.ranges`)
    rate:    samples in 1,000 s that the node had used lately; 0: not known yet
    """

    group: str
    dataset: str
    node: str
    spans: bytes
    rate: int = 0


@event(53)
class LeaseAcked(NamedTuple):
    """A node's workers have used these positions, for good. Fields as in `LeaseGranted`."""

    group: str
    dataset: str
    node: str
    spans: bytes


@event(54)
class LeaseReturned(NamedTuple):
    """Positions of a node's lease are free again, or are used again by the node itself.

    spans:    free again; empty: none
    repeated: positions, of these or of those that the node keeps, that a worker may have used already: they will be used again
    why:      in words
    """

    group: str
    dataset: str
    node: str
    spans: bytes
    repeated: bytes
    why: str


@event(55)
class LeaseRecalled(NamedTuple):
    """A slow node is to give positions back that it has not handed out. All stay its own until it says which it gives.

    spans: so many positions are asked for; which ones, the node decides
    to:    the node that waits for work
    """

    group: str
    dataset: str
    node: str
    spans: bytes
    to: str


@event(58)
class LeasesRestored(NamedTuple):
    """The ledger of a dataset begins anew with the state that a generation resumed from.

    group:      of nodes that share the dataset
    dataset:    its name
    node:       of rank 0, which says so
    generation: the one that resumed
    of:         the generation that had made the state; 0: training began anew
    step:       of the state
    spans:      the positions that the state was trained on, packed; all others are free
    """

    group: str
    dataset: str
    node: str
    generation: int
    of: int
    step: int
    spans: bytes


@event(59)
class LeasesSaved(NamedTuple):
    """A checkpoint on storage was trained on so many positions of a dataset, by the words of all its ranks.

    group:      of nodes that share the dataset
    dataset:    its name
    generation: of the state
    step:       of the state
    samples:    positions that the model was trained on
    checksum:   their sum, modulo 2^62
    """

    group: str
    dataset: str
    generation: int
    step: int
    samples: int
    checksum: int


@command(30, since=5)
class RestoreLeases(NamedTuple):
    """The node of rank 0: its ranks have resumed from a state. Fields as in `LeasesRestored`."""

    node: str
    generation: int
    dataset: str
    of: int
    step: int
    spans: bytes


@command(25, since=5)
class ReportRepeated(NamedTuple):
    """A node: a worker ended with these positions in hand, and did not acknowledge them; the node hands them out again.

    spans: packed
    why:   in words
    """

    node: str
    dataset: str
    spans: bytes
    why: str


@command(26, since=5)
class ReportAcked(NamedTuple):
    """A node that leaves: its workers have used these positions, packed. Heartbeats say it meanwhile."""

    node: str
    dataset: str
    spans: bytes


@command(27, since=5)
class ReturnLease(NamedTuple):
    """A node that leaves gives its whole lease of a dataset back: it hands out nothing any more.

    What its workers had in hand, and what they have used, it has said before.
    """

    node: str
    dataset: str


class LeaseTold(NamedTuple):
    """One dataset, as a node is told of it. The first six fields are those of `DatasetRegistered`.

    spans:    all positions that the node holds; those that it has acknowledged since it was told anything else are among them
    recall:   number of the question that ``recalled`` is; 0: none
    recalled: so many positions the node is to give back, of those that it has not handed out
    finished: all positions of all epochs are acknowledged
    assignment: as of `DatasetRegistered`
    generation: with ``lineage="model"``, the one that ``spans`` are of; 0: it has not said yet where it resumed, so that
                nothing is held
    """

    name: str
    size: int
    seed: int
    order: str
    fingerprint: str
    epochs: int
    spans: bytes = b""
    recall: int = 0
    recalled: bytes = b""
    finished: bool = False
    assignment: str = LEASE
    generation: int = 0

    @property
    def terms(self) -> Terms:
        """As it was registered."""
        return Terms(*self[:6], 0, self.assignment)


@part(15)
class Leases(NamedTuple):
    """To every agent of a group: the datasets whose samples are leased, with all leases of this node."""

    known: tuple[LeaseTold, ...] = ()


class HearLease(NamedTuple):
    """The leader: what a node's heartbeats say of a dataset.

    aim:     positions that the node wants to hold, with those that it holds already; 0: it wants none
    least:   positions of one shard for each of its workers
    rate:    samples in 1,000 s that it has used lately; 0: not known
    acked:   positions that its workers have used, packed
    recall:  the question that ``yielded`` answers; 0: none
    yielded: positions that it gives back, packed
    share:   it may have a part of what is free, one in so many
    generation: the one that the node speaks of, as of `LeaseTold`
    """

    node: str
    dataset: str
    aim: int
    least: int
    rate: int
    acked: bytes
    recall: int
    yielded: bytes
    share: int
    generation: int = 0


class RecallLease(NamedTuple):
    """The leader: ask a node for the last ``many`` positions of its lease, for the node ``to``."""

    node: str
    dataset: str
    many: int
    to: str


class Recall(NamedTuple):
    """A question to a slow node: its number, and the positions that are asked for."""

    number: int
    spans: Spans


class Saved(NamedTuple):
    """What a state on storage was trained on. Fields as of `LeasesSaved`."""

    generation: int
    step: int
    samples: int
    checksum: int


@dataclass(slots=True)
class Lease:
    """What one node holds.

    spans: positions that it has not acknowledged
    told:  what its order says: ``spans`` as they were at the newest event that the node was told of
    rate:  as in its newest grant
    """

    spans: Spans = ()
    told: Spans = ()
    rate: int = 0


# Invariants of leases, after every event; `Leased.check` yields the broken ones.
#
#   T     `total`: the number of positions of all epochs
#   F, A  `free`, `acked`: positions
#   L(n)  `held`: the positions that node n holds and has not acknowledged
#   R(n)  `recalled`: what node n was asked for
#
#   disjoint  F, A and all L(n) are disjoint
#   whole     together they are [0, T): no position is lost
#   recalls   R(n) is asked of a node that holds a lease


@dataclass(slots=True)
class Leased:
    """One dataset of one group.

    terms:    what was registered
    free:     positions that nobody holds and nobody has used
    acked:    positions that were used for good
    held:     leases, by node
    recalled: questions to slow nodes, by node
    repeated: positions that may have been used more than once, the first `REPEATED_SPANS_MAX` ranges
    again:    how many they are, counted each time; with ``lineage="model"``, samples that were taken again after roll-backs
    returns:  how often a lease was given back, or a worker's shards were handed out again
    changed:  the newest record that agents are told something by
    began_at: when it was registered, microseconds
    acked_at: when the newest positions were acknowledged
    generation: with ``lineage="model"``, the one that has said where it resumed and trains; 0: none
    saved:    the newest `SAVED_MAX` states on storage, with what they were trained on
    """

    terms: Terms
    free: Spans
    acked: Spans = ()
    held: dict[str, Lease] = field(default_factory=dict)
    recalled: dict[str, Recall] = field(default_factory=dict)
    repeated: Spans = ()
    again: int = 0
    returns: int = 0
    changed: int = 0
    began_at: int = 0
    acked_at: int = 0
    generation: int = field(default=0, metadata=LATER)
    saved: list[Saved] = field(default_factory=list, metadata=LATER)

    @property
    def of_model(self) -> bool:
        """Does the restored model say what was used?"""
        return self.terms.assignment == MODEL_LEASE

    def hears(self, generation: int) -> bool:
        """Do words of this generation count, and may its nodes be granted positions?"""
        return generation == self.generation and (generation > 0 or not self.of_model)

    @property
    def total(self) -> int:
        """Positions of all epochs; of one without end, as many as there can be."""
        return total_of(self.terms)

    @property
    def finished(self) -> bool:
        """Is every position acknowledged, and of a running generation?"""
        return self.acked == ((0, self.total),) and (self.generation > 0 or not self.of_model)

    def lease(self, node: str) -> Lease:
        """A node's lease; an empty one where it has none."""
        return self.held.get(node) or Lease()

    def check(self) -> Iterator[str]:
        """Yields what breaks the invariants above."""
        parts = [self.free, self.acked, *(lease.spans for lease in self.held.values())]
        every = Ranges(span for spans in parts for span in spans)
        counted = sum(end - start for spans in parts for start, end in spans)
        if counted != every.count:
            yield f"disjoint: {counted} positions are free, held or acknowledged, and {every.count} of them are different"
        if tuple(every) != ((0, self.total),):
            yield f"whole: of {self.total} positions these are neither free, held nor acknowledged: {every.missing(self.total)}"
        strangers = sorted(self.recalled.keys() - self.held.keys())
        if strangers:
            yield f"recalls: {strangers} are asked for positions, and hold none"


@dataclass(slots=True)
class LeaseSlice:
    """The leased datasets of all groups. ``groups``: by group and name."""

    groups: dict[str, dict[str, Leased]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.groups)

    def of(self, group: str) -> dict[str, Leased]:
        """The leased datasets of a group, by name."""
        return self.groups.get(group, {})

    def find(self, node: str, dataset: str) -> Leased | None:
        """The dataset of that name that a node's group shares; None: it has none."""
        return self.of(group_of(node)).get(dataset)

    def check(self) -> Iterator[str]:
        """Yields what breaks the invariants above."""
        for group, datasets in self.groups.items():
            for name, one in datasets.items():
                yield from (f"{group}, {name!r}: {wrong}" for wrong in one.check())


def total_of(terms: Terms) -> int:
    """Positions of all epochs; without an end, as many whole epochs as there is room for."""
    return terms.size * (terms.epochs or POSITION_MAX // terms.size)


@lru_cache(maxsize=256)
def spans_of(packed: bytes) -> Spans:
    """The ranges that an event carries."""
    return tuple(Ranges.unpack(packed)) if packed else ()


def _joined(spans: Spans, more: Spans) -> Spans:
    return tuple(Ranges((*spans, *more))) if more else spans


def _without(spans: Spans, less: Spans) -> Spans:
    return tuple(Ranges(spans) - Ranges(less)) if less else spans


# ---- evolve


def _on_registered(slice_: LeaseSlice, fact: DatasetRegistered, record: Record) -> None:
    if fact.assignment not in LEASES:
        return
    datasets, terms = slice_.groups.setdefault(fact.group, {}), Terms(*fact[1:])
    if fact.name not in datasets:
        datasets[fact.name] = Leased(terms, ((0, total_of(terms)),), changed=record.seq, began_at=record.at)


def _on_granted(slice_: LeaseSlice, fact: LeaseGranted, record: Record) -> None:
    leased, spans = slice_.groups[fact.group][fact.dataset], spans_of(fact.spans)
    lease = leased.held.setdefault(fact.node, Lease())
    leased.free, lease.spans, lease.rate = _without(leased.free, spans), _joined(lease.spans, spans), fact.rate
    lease.told, leased.changed = lease.spans, record.seq


def _on_acked(slice_: LeaseSlice, fact: LeaseAcked, record: Record) -> None:
    leased, spans = slice_.groups[fact.group][fact.dataset], spans_of(fact.spans)
    lease = leased.held[fact.node]
    lease.spans, leased.acked, leased.acked_at = _without(lease.spans, spans), _joined(leased.acked, spans), record.at
    if not lease.spans:
        _forget(leased, fact.node, record)


def _on_returned(slice_: LeaseSlice, fact: LeaseReturned, record: Record) -> None:
    leased, spans, repeated = slice_.groups[fact.group][fact.dataset], spans_of(fact.spans), spans_of(fact.repeated)
    lease = leased.held.get(fact.node)
    if lease is not None:
        lease.spans, leased.free = _without(lease.spans, spans), _joined(leased.free, spans)
        lease.told = lease.spans
        if fact.spans or not fact.repeated:  # else a worker died, and the question is still open
            leased.recalled.pop(fact.node, None)
        if not lease.spans:
            _forget(leased, fact.node, record)
    leased.repeated = _joined(leased.repeated, repeated)[:REPEATED_SPANS_MAX]
    leased.again += sum(end - start for start, end in repeated)
    leased.returns += 1
    leased.changed = record.seq


def _on_recalled(slice_: LeaseSlice, fact: LeaseRecalled, record: Record) -> None:
    leased = slice_.groups[fact.group][fact.dataset]
    leased.recalled[fact.node] = Recall(record.seq, spans_of(fact.spans))
    leased.held[fact.node].told = leased.held[fact.node].spans
    leased.changed = record.seq


def _on_formed(slice_: LeaseSlice, fact: WorldFormed, record: Record) -> None:
    """Of a set whose model is restored: what its nodes held is free, and nothing is granted before its ranks have resumed."""
    for leased in slice_.of(fact.group).values():
        if leased.of_model:
            _begin_anew(leased, leased.acked, record)
            leased.generation = 0


def _on_restored(slice_: LeaseSlice, fact: LeasesRestored, record: Record) -> None:
    leased, spans = slice_.groups[fact.group][fact.dataset], spans_of(fact.spans)
    leased.again += sum(end - start for start, end in _without(leased.acked, spans))
    _begin_anew(leased, spans, record)
    leased.generation = fact.generation


def _on_saved(slice_: LeaseSlice, fact: LeasesSaved, record: Record) -> None:
    leased = slice_.groups[fact.group][fact.dataset]
    leased.saved = [*leased.saved, Saved(*fact[2:])][-SAVED_MAX:]


def _begin_anew(leased: Leased, acked: Spans, record: Record) -> None:
    leased.acked, leased.free = acked, _without(((0, leased.total),), acked)
    leased.held.clear()
    leased.recalled.clear()
    leased.changed = record.seq


def _forget(leased: Leased, node: str, record: Record) -> None:
    """The node holds nothing any more."""
    leased.held.pop(node, None)
    leased.recalled.pop(node, None)
    leased.changed = record.seq


FACTS = Facts(
    kinds=(LeaseGranted, LeaseAcked, LeaseReturned, LeaseRecalled, LeasesRestored, LeasesSaved),
    evolve={
        WorldFormed: _on_formed,
        LeasesRestored: _on_restored,
        LeasesSaved: _on_saved,
        DatasetRegistered: _on_registered,
        LeaseGranted: _on_granted,
        LeaseAcked: _on_acked,
        LeaseReturned: _on_returned,
        LeaseRecalled: _on_recalled,
    },
)
