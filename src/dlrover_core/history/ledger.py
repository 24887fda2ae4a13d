"""How far a job's data are: a view of its ledgers for people and for `--json`."""

from __future__ import annotations

from typing import NamedTuple

from dlrover_core.data.poison import left_out, left_out_of_partitions, sample_of
from dlrover_core.data.streams import ENDLESS
from dlrover_core.history.epochs import sizes_of
from dlrover_core.job.lineage import Known, cut_of, place_of, samples
from dlrover_core.job.shards import Ledger, Terms
from dlrover_core.job.state import JobState

RATE_STATES = 8
"""The rate is measured over so many of the newest states with a cut."""
SECOND_US = 1_000_000


class DataRow(NamedTuple):
    """One dataset. What is ``known`` is exact and as old as the newest state that the log has a cut of.

    group:       the set that trains on it
    dataset:     its name
    size:        samples of an epoch, without a remainder that is left out; 0: it was not registered; `ENDLESS`: a stream
    epochs:      how many; 0: without end, or unknown
    epoch:       the epoch that is trained now; the first is 0
    position:    positions of its order that are consumed
    samples:     samples in the lineage, over all epochs
    step:        the step of the state that says so; -1: none has yet
    generation:  of that state
    known_at:    when the leader heard of it, microseconds; 0: never
    about:       samples by the newest step that was told of, where every step takes a global batch; else as ``samples``
    per_s:       samples a second, over the newest states of this generation; 0: unknown
    left_us:     time that the rest takes at that rate; -1: unknown, or without end
    again:       samples that were trained again after roll-backs
    broken:      how often a cut of the set did not go together with others
    assignment:  how ranks get their samples
    quarantined: indices of the samples that all ranks leave out, ascending
    left_out:    how often these were left out: as many of ``samples`` are not in the model
    """

    group: str
    dataset: str
    size: int
    epochs: int
    epoch: int
    position: int
    samples: int
    step: int
    generation: int
    known_at: int
    about: int
    per_s: float
    left_us: int
    again: int
    broken: int
    assignment: str
    quarantined: tuple[int, ...] = ()
    left_out: int = 0

    @property
    def whole(self) -> int:
        """Samples of all epochs; 0: unknown, or without end."""
        return 0 if self.size >= ENDLESS else self.size * self.epochs


def ledger_of(state: JobState) -> tuple[DataRow, ...]:
    """The datasets of all sets, in the order in which they were registered."""
    return tuple(
        _row(state, group, ledger, name)
        for group, ledger in state.shards.ledgers.items()
        for name in dict.fromkeys([*ledger.datasets, *(place.dataset for place in ledger.lineage.newest)])
        if sample_of(name) is None
    )


def _row(state: JobState, group: str, ledger: Ledger, name: str) -> DataRow:
    known = ledger.datasets.get(name)
    terms = known.terms if known is not None else Terms(name, 0, 0, "", "", 0, 0, "")
    place, newest = ledger.place(name), ledger.lineage.known[-1] if ledger.lineage.known else None
    consumed = sizes_of(terms, ledger.lineage.known, name).samples(None, place)
    # The ledger counts epochs before a source grew as if they had all samples, and so does the whole: what is left is right.
    counted = ledger.about(name, state.progress.of(group).step)
    about = consumed + counted - samples(terms.counted, None, place)
    whole = 0 if terms.size >= ENDLESS else terms.counted * terms.epochs
    per_s = _rate(ledger, name, terms.counted)
    left = whole - counted if whole else -1
    times = left_out(ledger.lineage.newest, name)
    of_partitions = left_out_of_partitions(ledger.lineage.newest, name) if terms.size >= ENDLESS else 0
    told = (one.sample for one in state.poison.of(group).quarantined if one.dataset == name)
    return DataRow(
        group=group,
        dataset=name,
        size=terms.counted,
        epochs=terms.epochs,
        epoch=place.epoch,
        position=place.position,
        samples=consumed,
        step=newest.step if newest is not None else -1,
        generation=newest.generation if newest is not None else 0,
        known_at=newest.at if newest is not None else 0,
        about=about,
        per_s=per_s,
        left_us=round(left / per_s * SECOND_US) if left >= 0 and per_s else 0 if left == 0 else -1,
        again=known.again if known is not None else 0,
        broken=ledger.broken,
        assignment=terms.assignment,
        quarantined=tuple(sorted({*times, *told})),
        left_out=sum(times.values()) + of_partitions,
    )


def _rate(ledger: Ledger, name: str, size: int) -> float:
    """Samples a second, over the newest states that the running generation has made, or began from."""
    lineage = ledger.lineage
    base = lineage.bases.get(lineage.generation)
    ours = [one for one in lineage.known[-RATE_STATES:] if one.generation == lineage.generation or one.state == base]
    return _between(ours[0], ours[-1], name, size) if len(ours) > 1 else 0.0


def _between(first: Known, last: Known, name: str, size: int) -> float:
    many = samples(size, place_of(cut_of(first.cut), name), place_of(cut_of(last.cut), name))
    return many * SECOND_US / (last.at - first.at) if last.at > first.at else 0.0
