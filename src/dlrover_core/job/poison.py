"""Poison: samples that make their workers fail again and again, and the ranges in which they are looked for.

A death says which samples its worker had in work (`incidents.WorkerExited.work`). Where the cause of an incident is such a
death, its samples are suspected. The same failure once more within a suspected range narrows the range; once more at one sample
quarantines the sample: all ranks leave it out from their next generation on. A failure whose sample is another one each time
quarantines nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from dlrover_core.data.poison import QUARANTINED_MAX, SUSPECTS_MAX, Spot
from dlrover_core.job.incidents import WorkerExited
from dlrover_core.job.sets import Coupled
from dlrover_core.kernel.engine import Facts
from dlrover_core.kernel.events import Record, event
from dlrover_core.kernel.wire import part

EXITS_MAX = 64
"""So many deaths with samples in work are remembered."""
HITS_MAX = 16
"""The findings of so many incidents are remembered."""

# What follows from a failure with samples in work.
FIRST, NARROWED, AGAIN, STUCK, ENDS, QUARANTINED = "first", "narrowed", "again", "stuck", "ends", "quarantined"


@event(56)
class RangeQuarantined(NamedTuple):
    """A sample is left out by all ranks from now on, because the same failure struck it again and again.

    group:     the set
    incident:  number of the last failure
    exit:      record of the worker's death that was its cause
    dataset:   the dataset's name
    sample:     of the sample
    epoch:     where it was struck last
    position:  in that epoch's order
    signature: of the failure
    strikes:   how often the failure has struck it
    since:     the first generation that leaves it out
    row:       it is so manyeth sample in a row that was quarantined without a new step between
    text:      what the failure said
    """

    group: str
    incident: int
    exit: int
    dataset: str
    sample: int
    epoch: int
    position: int
    signature: str
    strikes: int
    since: int
    row: int
    text: str


@event(57)
class RangeSuspected(NamedTuple):
    """A failure had these samples in work.

    group:     the set
    incident:  number of the failure
    exit:      record of the worker's death that was its cause
    dataset:   the dataset's name
    epoch:     of the positions
    first:     of the epoch's order, the positions from here
    to:        up to here, exclusive
    sample:     of the sample, where it is only one; -1: several
    signature: of the failure
    strikes:   how often the same failure has struck within
    since:     the first generation that divides its micro-batches there
    finding:   `FIRST`: it had not struck there before; `NARROWED`, `AGAIN`: it had, and is looked for further; `STUCK`: the
               range cannot be narrowed; `ENDS`: it may not be quarantined, so the job ends
    why:       why it may not
    """

    group: str
    incident: int
    exit: int
    dataset: str
    epoch: int
    first: int
    to: int
    sample: int
    signature: str
    strikes: int
    since: int
    finding: str
    why: str = ""


@part(17)
class Quarantine(NamedTuple):
    """To every agent of a set: the samples that its ranks leave out, and the ranges that are suspected."""

    spots: tuple[Spot, ...] = ()


class Exit(NamedTuple):
    """A death with samples in work. Fields as in `WorkerExited`."""

    generation: int
    signature: str
    work: str


class Suspect(NamedTuple):
    """A suspected range, with the fields of `RangeSuspected`."""

    dataset: str
    epoch: int
    first: int
    to: int
    sample: int
    signature: str
    strikes: int
    since: int


class Hit(NamedTuple):
    """What followed from an incident. ``exit``: the record of the death that was its cause; ``finding``, ``why``: as above."""

    exit: int
    finding: str
    why: str = ""


@dataclass(slots=True)
class Poison:
    """What is known of one set's samples.

    quarantined: samples that are left out, the oldest first
    suspects:    ranges that are suspected, the oldest first
    exits:       deaths with samples in work, by record, the newest last
    hits:        what followed from incidents, by number, the newest last
    """

    quarantined: list[RangeQuarantined] = field(default_factory=list)
    suspects: list[Suspect] = field(default_factory=list)
    exits: dict[int, Exit] = field(default_factory=dict)
    hits: dict[int, Hit] = field(default_factory=dict)

    @property
    def spots(self) -> tuple[Spot, ...]:
        """What agents are told."""
        out = [Spot(one.dataset, one.since, one.sample) for one in self.quarantined]
        return (*out, *(Spot(one.dataset, one.since, -1, one.epoch, one.first, one.to) for one in self.suspects))

    def check(self) -> Iterator[str]:
        """Yields what breaks the invariants below."""
        samples = {(one.dataset, one.sample) for one in self.quarantined}
        if len(samples) < len(self.quarantined) or len(samples) > QUARANTINED_MAX or len(self.suspects) > SUSPECTS_MAX:
            yield f"poison: {sorted(samples)} of {len(self.quarantined)}, {len(self.suspects)} suspects"


# Invariants, after every event: each sample is quarantined once, there are at most `QUARANTINED_MAX` of them, and at most
# `SUSPECTS_MAX` suspects; `PoisonSlice.check` yields what breaks them.


@dataclass(slots=True)
class PoisonSlice(Coupled):
    """What is known of all sets' samples. ``by_set``: a set no worker of which has died with samples in work has none."""

    by_set: dict[str, Poison] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.by_set)

    def of(self, group: str) -> Poison:
        """A set's; an empty one for a set that has none."""
        return self.by_set.get(group) or Poison()

    def hit(self, group: str, incident: int) -> Hit | None:
        """What followed from an incident; None: its cause had no samples in work."""
        return self.of(group).hits.get(incident)

    def check(self) -> Iterator[str]:
        """Yields what breaks the invariants above."""
        for group, one in self.by_set.items():
            yield from (f"{group}: {wrong}" for wrong in one.check())


# ---- evolve


def _on_exit(slice_: PoisonSlice, fact: WorkerExited, record: Record) -> None:
    if fact.work:
        exits = slice_.by_set.setdefault(slice_.set_of(fact.node), Poison()).exits
        exits[record.seq] = Exit(fact.generation, fact.signature, fact.work)
        while len(exits) > EXITS_MAX:
            del exits[next(iter(exits))]


def _on_suspected(slice_: PoisonSlice, fact: RangeSuspected, record: Record) -> None:
    known = slice_.by_set.setdefault(fact.group, Poison())
    suspect = Suspect(*fact[3:11])
    # A narrower range, or one that was struck once more, takes the place of the wider one.
    kept = [one for one in known.suspects if one.signature != fact.signature or not covers(one, suspect)]
    known.suspects = [*kept, suspect][-SUSPECTS_MAX:]
    _hit(known, fact.incident, Hit(fact.exit, fact.finding, fact.why))


def _on_quarantined(slice_: PoisonSlice, fact: RangeQuarantined, record: Record) -> None:
    known = slice_.by_set.setdefault(fact.group, Poison())
    known.quarantined.append(fact)
    sample = Suspect(fact.dataset, fact.epoch, fact.position, fact.position + 1, fact.sample, "", 0, 0)
    known.suspects = [one for one in known.suspects if not covers(one, sample)]
    _hit(known, fact.incident, Hit(fact.exit, QUARANTINED))


def _hit(known: Poison, incident: int, hit: Hit) -> None:
    known.hits.pop(incident, None)
    known.hits[incident] = hit
    while len(known.hits) > HITS_MAX:
        del known.hits[next(iter(known.hits))]


def covers(wide: Suspect, narrow: Suspect) -> bool:
    """Are these the same sample, in whatever epoch, or is the second range within the first?"""
    if wide.dataset != narrow.dataset:
        return False
    if wide.sample >= 0 and wide.sample == narrow.sample:
        return True
    return wide.epoch == narrow.epoch and wide.first <= narrow.first and narrow.to <= wide.to


FACTS = Facts(
    kinds=(RangeQuarantined, RangeSuspected),
    evolve={WorkerExited: _on_exit, RangeSuspected: _on_suspected, RangeQuarantined: _on_quarantined},
)
