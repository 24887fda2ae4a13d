"""The audit of a job's data: is each sample in the model's lineage once? It is answered from the log alone.

Every state of which the log has a cut says what it had consumed: the states that were written to storage, those that waited
at a boundary, and those that a generation was resumed from. Along the lineage of the newest state

- cuts must grow: a state that has consumed less than one before it has trained samples twice;
- a generation must resume a state with the samples that the state had: at a later position samples are missing, at an
  earlier one they are in the model twice.

The order of an epoch is total, and a step takes the next samples of it: so cuts that go together leave no gap and no repeat.
Branches that were rolled back are in no lineage, and are not judged.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import ClassVar, NamedTuple

from dlrover_core.data.cut import Place, same_source
from dlrover_core.data.poison import left_out, left_out_of_partitions, place_of_sample, sample_of
from dlrover_core.data.streams import ENDLESS
from dlrover_core.history.epochs import Sizes, sizes_of
from dlrover_core.history.plain import plain
from dlrover_core.job import job, shards
from dlrover_core.job.checkpoints import NOTHING, CheckpointCommitted, Restored, StepsHeld
from dlrover_core.job.lineage import Known, Lineage, cut_of, place_of, readable
from dlrover_core.job.poison import RangeQuarantined
from dlrover_core.job.sets import NO_SETS, sets_of
from dlrover_core.kernel.events import Record
from dlrover_core.words import count

MISSING, TWICE, UNLIKE = "missing", "twice", "unlike"


class Finding(NamedTuple):
    """A range of samples that is not in the lineage once.

    group, dataset: whose
    kind:           `MISSING`, `TWICE`, or `UNLIKE`: nodes differ in what they say of one state, or a source has changed
    epoch:          the range begins in this epoch
    first:          and at this position of its order
    to_epoch:       it ends in this epoch
    to:             before this position
    samples:        how many these are
    why:            the two words that do not go together
    """

    group: str
    dataset: str
    kind: str
    epoch: int
    first: int
    to_epoch: int
    to: int
    samples: int
    why: str


class LeftOut(NamedTuple):
    """A sample that is quarantined.

    sample: its index
    times:  how often the lineage has passed it without training on it
    why:    the failure, and how often it struck; empty: an earlier run has quarantined it
    """

    sample: int
    times: int
    why: str


class Proof(NamedTuple):
    """What is known of one dataset's lineage.

    group, dataset: whose
    size:           samples of an epoch, without a remainder that is left out; 0: it was not registered
    epochs:         how many; 0: without end, or unknown
    epoch:          the newest state's
    position:       the newest state's
    samples:        samples in the lineage
    states:         number of its states that the log has a cut of
    generations:    number of its generations
    resumed:        number of those that resumed from a state
    witnessed:      number of those whose state had been told of before, so that the two words could be compared
    uneven:         how often the position did not move by one batch a step; no fault where not every step draws a batch
    findings:       what is wrong
    begun:          samples of ``samples`` that no state of the log has trained: the script said, by begin(), to begin after them
    quarantined:    samples that are left out
    of_partitions:  of a stream, how often messages of its partitions were left out; each partition's proof names them
    """

    group: str
    dataset: str
    size: int
    epochs: int
    epoch: int
    position: int
    samples: int
    states: int
    generations: int
    resumed: int
    witnessed: int
    uneven: int
    findings: tuple[Finding, ...]
    begun: int = 0
    quarantined: tuple[LeftOut, ...] = ()
    of_partitions: int = 0

    @property
    def left_out(self) -> int:
        """How many of ``samples`` are not in the model, as they are quarantined."""
        return self.of_partitions + sum(one.times for one in self.quarantined)


class Whole(Lineage):
    """A lineage of which nothing is forgotten."""

    __slots__ = ()
    MOST: ClassVar[int] = 2**62


@dataclass(slots=True)
class _Resumed:
    """A generation resumed from a state. ``told``: which state each of its nodes says, and what that had consumed, by node."""

    generation: int
    state: tuple[int, int]
    told: dict[str, tuple[tuple[int, int], bytes]] = field(default_factory=dict)


@dataclass(slots=True)
class _Set:
    """What was read of one set.

    before:  states of earlier runs on storage, by step: their cuts
    differs: cuts of one state that differ, by state
    quarantined: why a sample is left out, by dataset and index
    """

    terms: dict[str, shards.Terms] = field(default_factory=dict)
    lineage: Whole = field(default_factory=Whole)
    resumed: dict[int, _Resumed] = field(default_factory=dict)
    stored: dict[tuple[int, int], bytes] = field(default_factory=dict)
    before: dict[int, bytes] = field(default_factory=dict)
    differs: dict[tuple[int, int], dict[bytes, str]] = field(default_factory=dict)
    quarantined: dict[tuple[str, int], str] = field(default_factory=dict)

    def new_run(self) -> None:
        """What is on storage stays; generations are counted anew."""
        self.before |= {step: cut for (_, step), cut in sorted(self.stored.items())}
        self.terms, self.lineage, self.resumed, self.stored, self.differs = {}, Whole(), {}, {}, {}

    def learn(self, state: tuple[int, int], cut: bytes, who: str, at: int) -> None:
        """A state and what it has consumed, as somebody says."""
        if cut and readable(cut):
            self.lineage.learn(*state, cut, at)
            self.differs.setdefault(state, {}).setdefault(cut, who)

    def witness(self, state: tuple[int, int]) -> bytes:
        """What a state had consumed, as those said that saved or held it; empty: nobody did."""
        told = next(iter(self.differs.get(state, ())), b"")
        return told or (self.before.get(state[1], b"") if not state[0] else b"")

    def resume(self, fact: Restored, at: int) -> None:
        """A node's ranks have resumed their generation."""
        one = self.resumed.get(fact.generation)
        if one is None:
            if not self.lineage.resume(fact.generation, (fact.of, fact.step), b"", at):
                return
            state = self.lineage.bases[fact.generation]
            one = self.resumed[fact.generation] = _Resumed(fact.generation, state)
            if fact.step and fact.tier != NOTHING:
                self.lineage.learn(*state, self.witness(state) or fact.cut, at)
        cut = fact.cut if readable(fact.cut) else b""
        one.told[fact.node] = (fact.of or one.state[0], fact.step), cut


class Audit:
    """Feed it every record of a log in order; ask for the `proofs` at any time."""

    def __init__(self) -> None:
        self._sets, self._of = NO_SETS, dict[str, _Set]()

    def feed(self, record: Record) -> None:
        """Take in the next record."""
        fact = record.event
        if isinstance(fact, job.JobCreated):
            self._sets = sets_of(fact.spec)
            for one in self._of.values():
                one.new_run()
        elif isinstance(fact, shards.DatasetRegistered) and fact.assignment not in shards.LEASES:
            self._set(fact.group).terms[fact.name] = shards.Terms(*fact[1:])
        elif isinstance(fact, RangeQuarantined):
            why = f"{fact.signature}, {count(fact.strikes, 'time')}, incident {fact.incident}"
            self._set(fact.group).quarantined[fact.dataset, fact.sample] = why
        elif isinstance(fact, CheckpointCommitted):
            state, one = (fact.generation, fact.step), self._set(fact.group)
            one.learn(state, fact.cut, "storage", record.at)
            one.stored[state] = fact.cut if readable(fact.cut) else b""
        elif isinstance(fact, StepsHeld) and fact.steps:
            one = self._set(self._sets.of(fact.node))
            one.learn((fact.generation, fact.steps[-1]), fact.cut, fact.node, record.at)
        elif isinstance(fact, Restored):
            self._set(self._sets.of(fact.node)).resume(fact, record.at)

    def _set(self, group: str) -> _Set:
        return self._of.setdefault(group, _Set())

    def proofs(self) -> tuple[Proof, ...]:
        """One for each dataset; empty: the log has no word of data."""
        return tuple(
            _proof(group, one, name)
            for group, one in self._of.items()
            for name in dict.fromkeys([*one.terms, *(place.dataset for place in one.lineage.newest)])
            if sample_of(name) is None
        )


def proof_values(proofs: tuple[Proof, ...]) -> dict[str, object]:
    """For programs: the proofs, and whether each sample is in its lineage once."""
    return {"proved": not any(one.findings for one in proofs), "datasets": plain(proofs)}


def _proof(group: str, one: _Set, name: str) -> Proof:
    terms = one.terms.get(name)
    sizes = sizes_of(terms, one.lineage.known, name)
    place = place_of(one.lineage.newest, name) or Place(name, 0, 0)
    path = _path(one.lineage)
    resumed = [one.resumed[generation] for generation in path if generation in one.resumed]
    from_states = [each for each in resumed if each.state[1]]
    judge = _Judge(group, name, sizes, terms.fingerprint if terms is not None else "")
    _judged(judge, one, from_states)
    times = left_out(one.lineage.newest, name)
    samples = sorted({*times, *(sample for dataset, sample in one.quarantined if dataset == name)})
    left = [LeftOut(sample, times.get(sample, 0), one.quarantined.get((name, sample), "")) for sample in samples]
    for sample in sorted({each for known in one.lineage.known for each in left_out(cut_of(known.cut), name)}):
        # How often it was left out may not shrink along a lineage either.
        counts = _Judge(group, place_of_sample(name, sample, 0).dataset, Sizes(), "")
        _judged(counts, one, from_states)
        judge.found += counts.found
    return Proof(
        group=group,
        dataset=name,
        size=sizes.now,
        epochs=terms.epochs if terms is not None else 0,
        epoch=place.epoch,
        position=place.position,
        samples=sizes.samples(None, place),
        states=len(one.lineage.known),
        generations=len(path),
        resumed=len(from_states),
        witnessed=sum(1 for each in from_states if one.witness(each.state)),
        uneven=_uneven(one, terms) if terms is not None else 0,
        findings=tuple(judge.found),
        begun=sizes.samples(None, judge.begun),
        quarantined=tuple(left),
        of_partitions=left_out_of_partitions(one.lineage.newest, name) if sizes.now >= ENDLESS else 0,
    )


def _judged(judge: _Judge, one: _Set, from_states: list[_Resumed]) -> None:
    judge.states(one.lineage.known)
    judge.differences(one)
    for each in from_states:
        judge.resumed(each, one.witness(each.state))


def _path(lineage: Lineage) -> list[int]:
    """The generations of a lineage, the oldest first."""
    path, now = [], lineage.generation
    while now > 0:
        path.append(now)
        now = lineage.bases.get(now, (0, 0))[0]
    return path[::-1]


class _Judge:
    """Compares what is told of one dataset, and names ranges."""

    def __init__(self, group: str, name: str, sizes: Sizes, source: str) -> None:
        self._group, self._name, self._sizes, self._source = group, name, sizes, source
        self.found: list[Finding] = []
        self.begun: Place | None = None
        """Where the dataset joined a lineage that had states without it; None: it did not join so."""

    def states(self, known: list[Known]) -> None:
        """States of a lineage: each has consumed at least what the one before it had, and of the same source."""
        for one in known:
            self._same_source(_named(one.state), place_of(cut_of(one.cut), self._name))
        for before, after in pairwise(known):
            first, then = (place_of(cut_of(one.cut), self._name) for one in (before, after))
            if first is not None and (then is None or then[1:3] < first[1:3]):
                why = f"{_named(before.state)} had consumed {_at(first)}, {_named(after.state)} only {_at(then)}"
                self._add(TWICE, then, first, why)

    def differences(self, one: _Set) -> None:
        """States of the lineage of which nodes say different things."""
        for state, cuts in one.differs.items():
            if len(cuts) > 1 and one.lineage.includes(*state):
                (cut, who), *others = cuts.items()
                for other, whom in others:
                    self._compare(
                        place_of(cut_of(cut), self._name),
                        place_of(cut_of(other), self._name),
                        UNLIKE,
                        f"of {_named(state)}: {who or 'its writers'} say {{}}, {whom or 'its writers'} {{}}",
                    )

    def resumed(self, one: _Resumed, witness: bytes) -> None:
        """A generation: all of its nodes have resumed one state, with the samples that the state had."""
        told = list(one.told.items())
        had = place_of(cut_of(witness), self._name)
        if had is None:
            places = (place_of(cut_of(cut), self._name) for _, (_, cut) in told)
            had = next((place for place in places if place is not None), None)
            if witness and self.begun is None:
                self.begun = had
        for node, (state, cut) in told:
            if state != one.state:
                why = f"{node} resumed {_named(state)} in generation {one.generation}, others {_named(one.state)}"
                self._add(UNLIKE, had, had, why)
            elif cut:
                place = place_of(cut_of(cut), self._name)
                why = f"{_named(state)} had consumed {{}}, {node} resumed it in generation {one.generation} at {{}}"
                self._compare(had, place, "", why)

    def _compare(self, had: Place | None, told: Place | None, kind: str, why: str) -> None:
        """``why`` has room for both places."""
        first, then = (one[1:3] if one is not None else (0, 0) for one in (had, told))
        if first == then:
            return
        why = why.format(_at(had), _at(told))
        if first < then:
            self._add(kind or MISSING, had, told, why)
        else:
            self._add(kind or TWICE, told, had, why)

    def _same_source(self, state: str, place: Place | None) -> None:
        if place is not None and self._source and not same_source(place.fingerprint, self._source):
            why = f"{state} has consumed source {place.fingerprint!r}, registered is {self._source!r}"
            self._add(UNLIKE, place, place, why)

    def _add(self, kind: str, begin: Place | None, end: Place | None, why: str) -> None:
        since, to = (one if one is not None else Place(self._name, 0, 0) for one in (begin, end))
        many = self._sizes.samples(since, to)
        this = Finding(self._group, self._name, kind, *since[1:3], *to[1:3], many, why)
        if this not in self.found:
            self.found.append(this)


def _named(state: tuple[int, int]) -> str:
    generation, step = state
    return f"step {step} of generation {generation}" if generation else f"step {step} of an earlier run"


def _at(place: Place | None) -> str:
    if place is None:
        return "nothing"
    return f"{place.position:,} of epoch {place.epoch + 1}"


def _uneven(one: _Set, terms: shards.Terms) -> int:
    """How often the position did not move by one batch a step, between states of one generation."""
    if not terms.global_batch or not terms.size:
        return 0
    found = 0
    for before, after in pairwise(one.lineage.known):
        if before.generation != after.generation:
            continue
        first, then = (_batches(place_of(cut_of(each.cut), terms.name), terms) for each in (before, after))
        found += then - first != after.step - before.step
    return found


def _batches(place: Place | None, terms: shards.Terms) -> int:
    """Batches up to a place; the last one of an epoch may be short."""
    if place is None:
        return 0
    return place.epoch * -(-terms.counted // terms.global_batch) + -(-place.position // terms.global_batch)
