"""Proves from a log alone that samples which were leased are in the lineage of a model once, or names ranges.

A generation begins with the positions that its restored state was trained on, and trains on what is leased to it. So each sample
is there once if nothing is leased that the state had, or that another node has; and if a restored state has no position but
those of the state before it, and of the leases since. What ranks say that they were trained on is taken for true. Where the
state lay on storage the log has two such words, of the ranks that saved it and of those that resumed it; they must be the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from dlrover_core.data.ranges import Ranges
from dlrover_core.data.trained import checksum
from dlrover_core.history.phrases import one_line
from dlrover_core.job import job, leases, shards
from dlrover_core.job.world import WorldFormed
from dlrover_core.kernel.events import Record
from dlrover_core.words import count

TWICE, MISSING, STRANGE = "in the model twice", "missing", "not leased"
FINDINGS_MAX = 64


class LeaseFinding(NamedTuple):
    """Positions for which the proof fails.

    kind:    `TWICE`, `MISSING` or `STRANGE`
    samples: how many
    start:   the first position over all epochs
    end:     behind the last one
    why:     in words
    """

    kind: str
    samples: int
    start: int
    end: int
    why: str


class LeaseProof(NamedTuple):
    """What is known of one leased dataset of a model.

    group, dataset: whose
    size:           samples of an epoch
    epochs:         how many; 0: without end
    samples:        in the model: of the state that the newest generation resumed from, and taken since
    generations:    number of generations that said where they go on
    resumed:        number of those that resumed from a state
    findings:       what is wrong
    compared:       number of those whose state had said on storage what it was trained on
    """

    group: str
    dataset: str
    size: int
    epochs: int
    samples: int
    generations: int
    resumed: int
    findings: tuple[LeaseFinding, ...]
    compared: int = 0


@dataclass(slots=True)
class _Dataset:
    """One dataset. ``bases``, ``granted``: by generation; ``out``: leased and not given back, of the present generation."""

    terms: shards.Terms
    bases: dict[int, Ranges] = field(default_factory=dict)
    granted: dict[int, Ranges] = field(default_factory=dict)
    out: Ranges = field(default_factory=Ranges)
    acked: Ranges = field(default_factory=Ranges)
    generation: int = 0
    generations: int = 0
    resumed: int = 0
    saved: dict[tuple[int, int], leases.LeasesSaved] = field(default_factory=dict)
    compared: int = 0
    found: list[LeaseFinding] = field(default_factory=list)

    def restored(self, fact: leases.LeasesRestored) -> None:
        """A generation goes on from a state."""
        spans = Ranges(leases.spans_of(fact.spans))
        state = f"step {fact.step} of generation {fact.of}, from which generation {fact.generation} goes on"
        if fact.of in self.bases:
            before = self.bases[fact.of]
            known = before | self.granted[fact.of]
            self.add(STRANGE, spans - known, f"{state}, was trained on them, and generation {fact.of} never had them")
            self.add(
                MISSING, before - spans, f"{state}, was not trained on them, and generation {fact.of} began with them"
            )
        self._compare(fact, spans, state)
        self.generations += 1
        self.resumed += fact.step > 0
        self.generation = fact.generation
        self.bases[fact.generation], self.granted[fact.generation] = spans, Ranges()
        self.out, self.acked = Ranges(), Ranges()

    def _compare(self, fact: leases.LeasesRestored, spans: Ranges, state: str) -> None:
        """With what its ranks said when it was saved."""
        saved = self.saved.get((fact.of, fact.step))
        if saved is None:
            return
        self.compared += 1
        if (saved.samples, saved.checksum) != (spans.count, checksum(spans)) and len(self.found) < FINDINGS_MAX:
            kind = MISSING if spans.count < saved.samples else STRANGE
            why = f"{state}, was trained on {saved.samples} samples when it was saved, and on {spans.count} when it was resumed"
            many = max(1, abs(saved.samples - spans.count))
            self.found.append(LeaseFinding(kind, many, max(0, spans.first), spans.last + 1, why))

    def leased(self, fact: leases.LeaseGranted) -> None:
        """A node may use more."""
        spans = Ranges(leases.spans_of(fact.spans))
        base = self.bases.get(self.generation, Ranges())
        if not self.generation:
            self.add(STRANGE, spans, f"leased to {fact.node} before its generation said where it goes on")
        self.add(TWICE, spans & base, f"leased to {fact.node}, and generation {self.generation} began with them")
        self.add(TWICE, spans & self.out, f"leased to {fact.node}, and leased already in generation {self.generation}")
        self.out |= spans
        self.granted[self.generation] = self.granted.get(self.generation, Ranges()) | spans

    def add(self, kind: str, spans: Ranges, why: str) -> None:
        """Something is wrong with these."""
        if spans and len(self.found) < FINDINGS_MAX:
            self.found.append(LeaseFinding(kind, spans.count, spans.first, spans.last + 1, why))


class LeaseAudit:
    """Feed it every record of a log in order; ask for the `proofs` at any time."""

    def __init__(self) -> None:
        self._of: dict[tuple[str, str], _Dataset] = {}

    def feed(self, record: Record) -> None:
        """Take in the next record."""
        fact = record.event
        if isinstance(fact, job.JobCreated):
            self._of.clear()  # generations are counted anew
        elif isinstance(fact, shards.DatasetRegistered) and fact.assignment == shards.MODEL_LEASE:
            self._of.setdefault((fact.group, fact.name), _Dataset(shards.Terms(*fact[1:])))
        elif isinstance(fact, WorldFormed):
            for (group, _), one in self._of.items():
                if group == fact.group:
                    one.generation = 0
        elif isinstance(
            fact,
            (leases.LeasesSaved, leases.LeasesRestored, leases.LeaseGranted, leases.LeaseAcked, leases.LeaseReturned),
        ):
            found = self._of.get((fact.group, fact.dataset))
            if found is not None:
                _take(found, fact)

    def proofs(self) -> tuple[LeaseProof, ...]:
        """One for each dataset; empty: no model of the log is trained by leases."""
        return tuple(
            LeaseProof(
                group,
                name,
                one.terms.size,
                one.terms.epochs,
                (max(one.bases.items(), default=(0, Ranges()))[1] | one.acked).count,
                one.generations,
                one.resumed,
                tuple(one.found),
                one.compared,
            )
            for (group, name), one in self._of.items()
        )


def _take(one: _Dataset, fact: object) -> None:
    if isinstance(fact, leases.LeasesRestored):
        one.restored(fact)
    elif isinstance(fact, leases.LeasesSaved):
        one.saved[fact.generation, fact.step] = fact
    elif isinstance(fact, leases.LeaseGranted):
        one.leased(fact)
    elif isinstance(fact, leases.LeaseAcked):
        one.acked |= Ranges(leases.spans_of(fact.spans))
    elif isinstance(fact, leases.LeaseReturned):
        one.out -= Ranges(leases.spans_of(fact.spans))


def lines(proofs: tuple[LeaseProof, ...]) -> Iterator[str]:
    """Each proof for a terminal."""
    for one in proofs:
        yield f"{one_line(one.dataset, 80)}: " + (
            "NOT proved" if one.findings else "proved: each sample is in the lineage once (leases)"
        )
        of = f" of {one.size * one.epochs:,}" if one.epochs else ""
        told = f"{count(one.generations, 'generation')}, {one.resumed} resumed from a state"
        told += f", {one.compared} of them with the word of its savers in the log" if one.compared else ""
        yield f"  {one.samples:,}{of} samples in the model; {told}"
        for each in one.findings:
            where = f"positions {each.start:,} to {each.end:,}, end exclusive"
            yield f"  {count(each.samples, 'sample')}, {where}: {each.kind}: {each.why}"
