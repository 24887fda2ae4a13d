"""Shards: the datasets that a job trains on, and the ledger of what was consumed of each.

A set's ranks register each dataset once, by its name. The ledger is the list of cuts along the lineage of the model's state:
a cut says of a step which samples the state of that step has consumed. Checkpoints and restores carry it. A restore from an
earlier step begins the ledger anew at that step, and what had been trained after it is trained again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from dlrover_core.data.cut import Place
from dlrover_core.data.quota import KEEP
from dlrover_core.data.terms import ASSIGNMENTS, CURSOR, LEASE, LEASES, MODEL_LEASE, NUMBER_MAX, SEED_MASK, Terms
from dlrover_core.job.checkpoints import CheckpointCommitted, Restored, StepsHeld
from dlrover_core.job.lineage import Lineage, place_of, samples
from dlrover_core.job.sets import Coupled
from dlrover_core.kernel.engine import Facts
from dlrover_core.kernel.events import Record, event
from dlrover_core.kernel.wire import command, part

__all__ = [
    "ASSIGNMENTS",
    "CURSOR",
    "LEASE",
    "LEASES",
    "MODEL_LEASE",
    "NUMBER_MAX",
    "SEED_MASK",
    "Terms",
]  # what others take from here

DATASETS_MAX = 16
"""Datasets of one set. A message's array has 64 places."""
TEXT_MAX = 128
"""Characters of a name, an order or a fingerprint."""
WHY_MAX = 500


@event(50, version=2, upcast={1: lambda fields: (*fields, KEEP)})
class DatasetRegistered(NamedTuple):
    """The ranks of a set train on a dataset. Recorded once per name; once more where the terms of its use change.

    group:        the set
    name:         of the dataset
    size:         number of samples
    seed:         of the order of the samples
    order:        the kind of that order
    fingerprint:  of the samples' source
    epochs:       how often the whole dataset is trained; 0: without end
    global_batch: samples that all ranks together take for a step; 0: not known yet
    assignment:   how ranks get their samples, one of `ASSIGNMENTS`
    last:         what becomes of an epoch's remainder that fills no global batch: "keep" makes a short one, "drop" leaves it out
    """

    group: str
    name: str
    size: int
    seed: int
    order: str
    fingerprint: str
    epochs: int
    global_batch: int
    assignment: str
    last: str = KEEP


@event(51)
class LedgerBroken(NamedTuple):
    """A state's cut does not go together with what is known of the lineage: samples are lost in it, or are in it twice.

    group:      the set
    node:       the node whose ranks said so; empty: several nodes that wrote the state
    generation: of the state
    step:       of the state
    why:        what differs, with both values
    """

    group: str
    node: str
    generation: int
    step: int
    why: str


@command(24, since=5)
class RegisterDataset(NamedTuple):
    """The node of rank 0: its ranks train on a dataset. Fields as in `DatasetRegistered`."""

    node: str
    generation: int
    name: str
    size: int
    seed: int
    order: str
    fingerprint: str
    epochs: int
    global_batch: int
    assignment: str
    last: str = KEEP


@part(12)
class Datasets(NamedTuple):
    """To every agent of a set: the datasets that its ranks have registered.

    An agent that finds its own here has nothing to register; one that finds another of the same name tells its ranks.
    """

    known: tuple[Terms, ...] = ()


@dataclass(slots=True)
class Dataset:
    """One dataset of a set.

    terms: what was registered
    again: samples that were trained again after roll-backs, counted from the newest cut that was known
    """

    terms: Terms
    again: int = 0


# Invariants of shards, after every event; `ShardSlice.check` yields the broken ones.
#
#   D(g)  `datasets`: the datasets of set g, by name
#
#   names   D(g) has at most `DATASETS_MAX` datasets, each under its own name


@dataclass(slots=True)
class Ledger:
    """The datasets of one set, and the cuts of its model's lineage.

    datasets: by name, in the order of registration
    lineage:  the states that the present one descends from
    broken:   how often a cut did not go together with others
    """

    datasets: dict[str, Dataset] = field(default_factory=dict)
    lineage: Lineage = field(default_factory=Lineage)
    broken: int = 0

    @property
    def known(self) -> tuple[Terms, ...]:
        """What was registered."""
        return tuple(one.terms for one in self.datasets.values())

    def check(self) -> Iterator[str]:
        """Yields what breaks the invariants above."""
        misnamed = [name for name, one in self.datasets.items() if one.terms.name != name]
        if misnamed or len(self.datasets) > DATASETS_MAX:
            yield f"names: {len(self.datasets)} datasets, of another name {misnamed}"
        yield from self.lineage.check()

    def place(self, name: str) -> Place:
        """How far a dataset is consumed, as far as known."""
        return place_of(self.lineage.newest, name) or Place(name, 0, 0)

    def about(self, name: str, step: int) -> int:
        """Samples that are in the model after a step, if each since the newest cut took a global batch."""
        known = self.datasets.get(name)
        if known is None:
            return self.place(name).position
        terms, newest = known.terms, self.lineage.known[-1].step if self.lineage.known else 0
        about = samples(terms.counted, None, self.place(name)) + max(0, step - newest) * terms.global_batch
        return min(about, terms.counted * terms.epochs) if terms.epochs else about


@dataclass(slots=True)
class ShardSlice(Coupled):
    """The ledgers of all sets. ``ledgers``: by set; a set without datasets has none."""

    ledgers: dict[str, Ledger] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.ledgers)

    def of(self, group: str) -> Ledger:
        """A set's ledger; an empty one for a set that has none."""
        return self.ledgers.get(group) or Ledger()

    def check(self) -> Iterator[str]:
        """Yields what breaks the invariants above."""
        for group, ledger in self.ledgers.items():
            yield from (f"{group}: {wrong}" for wrong in ledger.check())


# ---- evolve


def _on_registered(slice_: ShardSlice, fact: DatasetRegistered, record: Record) -> None:
    if fact.assignment in LEASES:
        return  # `job.leases` has it: acknowledgements say what was consumed, and no cut does
    ledger, terms = slice_.ledgers.setdefault(fact.group, Ledger()), Terms(*fact[1:])
    known = ledger.datasets.get(fact.name)
    if known is None:
        ledger.datasets[fact.name] = Dataset(terms)
    else:
        known.terms = terms


def _kept(slice_: ShardSlice, group: str, cut: bytes) -> Ledger | None:
    """The ledger of a set; None: it trains on nothing that we know of."""
    return slice_.ledgers.setdefault(group, Ledger()) if cut else slice_.ledgers.get(group)


def _on_committed(slice_: ShardSlice, fact: CheckpointCommitted, record: Record) -> None:
    ledger = _kept(slice_, fact.group, fact.cut)
    if ledger is not None:
        ledger.lineage.learn(fact.generation, fact.step, fact.cut, record.at)


def _on_held(slice_: ShardSlice, fact: StepsHeld, record: Record) -> None:
    ledger = _kept(slice_, slice_.set_of(fact.node), fact.cut)
    if ledger is not None and fact.steps:
        ledger.lineage.learn(fact.generation, fact.steps[-1], fact.cut, record.at)


def _on_restored(slice_: ShardSlice, fact: Restored, record: Record) -> None:
    ledger = _kept(slice_, slice_.set_of(fact.node), fact.cut)
    if ledger is None:
        return
    before = ledger.lineage.newest
    if ledger.lineage.resume(fact.generation, (fact.of, fact.step), fact.cut, record.at):
        after = ledger.lineage.newest
        for name, one in ledger.datasets.items():
            one.again += samples(one.terms.counted, place_of(after, name), place_of(before, name))


def _on_broken(slice_: ShardSlice, fact: LedgerBroken, record: Record) -> None:
    slice_.ledgers.setdefault(fact.group, Ledger()).broken += 1


FACTS = Facts(
    kinds=(DatasetRegistered, LedgerBroken),
    evolve={
        DatasetRegistered: _on_registered,
        CheckpointCommitted: _on_committed,
        StepsHeld: _on_held,
        Restored: _on_restored,
        LedgerBroken: _on_broken,
    },
)
