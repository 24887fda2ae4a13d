"""Data as simulated ranks consume them, with the truth beside: which samples the model of every state was trained on.

A `Consuming` given to a `Saving` is the data of one job. Every rank has a position of its own, draws its share of each global
batch by it, and puts its cut into its part of every state, as real ranks do. So a rank with a wrong position draws wrong
samples, which `check_consumed` sees: it compares what the models of all states were trained on, and what the log says of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple

from dlrover_core.data.balance import balanced
from dlrover_core.data.cut import Cut, Place, differences, pack, unpack
from dlrover_core.data.permutation import Order
from dlrover_core.data.quota import Batches, batches, quotas, slots
from dlrover_core.history.audit import Audit
from dlrover_core.job import shards
from dlrover_core.job.checkpoints import CheckpointCommitted, Restored, StepsHeld
from dlrover_core.job.job import JobCreated
from dlrover_core.job.state import JobState
from dlrover_core.kernel.events import Record
from dlrover_core.testing.promises import Look, Promise

State = tuple[int, int]
Sample = tuple[int, int]
"""Epoch and index."""
NAME, SOURCE = "train", "f00d"
STEPS_AT_ONCE = 64
EQUAL_STEPS = 4
"""Steps of a generation until its ranks take samples by what these cost them: the more, the higher the rank is within three."""


class Dataset(NamedTuple):
    """The dataset of a simulated job; ``epochs`` 0: without end."""

    size: int = 64
    batch: int = 12
    epochs: int = 0
    seed: int = 7

    @property
    def batches(self) -> Batches:
        """Its global batches."""
        return _batches(self)

    @property
    def terms(self) -> shards.Terms:
        """As it is registered."""
        return shards.Terms(NAME, self.size, self.seed, "shuffled", SOURCE, self.epochs, self.batch, shards.CURSOR)


@lru_cache(maxsize=256)
def _batches(dataset: Dataset) -> Batches:
    return batches(dataset.size, dataset.batch, epochs=dataset.epochs)


# A campaign's seeds share a hundred orders of a few sizes: all of their epochs are remembered.
@lru_cache(maxsize=8192)
def _order(size: int, seed: int, epoch: int) -> tuple[int, ...]:
    return tuple(Order(size, seed, epoch).indices(0, size))


@lru_cache(maxsize=256)
def _measured(equal: tuple[int, ...], world: int) -> tuple[int, ...]:
    return balanced(equal, [1 + rank % 3 for rank in range(world)])


@lru_cache(maxsize=4096)
def _slots(samples: int, division: tuple[int, ...], rank: int) -> tuple[int, int]:
    return slots(samples, division, rank)


@lru_cache(maxsize=64)
def lineage_of(dataset: Dataset, steps: int) -> tuple[Sample, ...]:
    """The samples of the first steps of an undisturbed job, in order."""
    found: list[Sample] = []
    epoch = position = 0
    for _ in range(steps):
        batch = dataset.batches.next(epoch, position)
        if batch is None:
            break
        found += [
            (batch.epoch, one) for one in _order(dataset.size, dataset.seed, batch.epoch)[batch.start : batch.end]
        ]
        epoch, position = dataset.batches.after(batch)
    return tuple(found)


@dataclass(slots=True)
class Rank:
    """One rank of a generation, with its own position."""

    rank: int
    world: int
    epoch: int = 0
    position: int = 0
    made: int = 0

    @property
    def cut(self) -> Cut:
        """What it takes for consumed."""
        return (Place(NAME, self.epoch, self.position, SOURCE),)

    def resume(self, cut: Cut) -> None:
        """Go on from there."""
        (place,) = cut
        self.epoch, self.position = place.epoch, place.position

    def quota(self, dataset: Dataset) -> tuple[int, ...]:
        """How the next global batch is divided, as all ranks have planned it for this step."""
        equal = quotas(dataset.batch, self.world)
        return equal if self.made < EQUAL_STEPS else _measured(equal, self.world)

    def draw(self, dataset: Dataset) -> list[Sample]:
        """Its share of the next global batch."""
        batch = dataset.batches.next(self.epoch, self.position)
        if batch is None:
            return []
        first, end = _slots(batch.samples, self.quota(dataset), self.rank)
        self.made += 1
        self.epoch, self.position = dataset.batches.after(batch)
        return [
            (batch.epoch, one)
            for one in _order(dataset.size, dataset.seed, batch.epoch)[batch.start + first : batch.start + end]
        ]


class Part(NamedTuple):
    """What one node publishes of a state: the packed cuts of its ranks."""

    cuts: tuple[bytes, ...]

    def at(self, local_rank: int) -> bytes:
        """The cut of a rank of it; of the first one where it has not so many."""
        return self.cuts[local_rank] if local_rank < len(self.cuts) else self.cuts[0]


@dataclass(slots=True)
class Running:
    """A generation that trains.

    nodes:   its nodes, in the order of their ranks
    ranks:   the ranks of each node
    model:   the samples that its model has been trained on
    began:   what the first rank of each node told as it began, packed; a node that began anew has none
    """

    nodes: tuple[str, ...]
    ranks: dict[str, list[Rank]]
    model: tuple[Sample, ...] = ()
    began: dict[str, bytes] = field(default_factory=dict)


class Consuming:
    """The data of one job. ``models``: what the model of each saved state was trained on; ``unlike``: what ranks differed in."""

    def __init__(self, dataset: Dataset | None = None) -> None:
        self.dataset = dataset if dataset is not None else Dataset()
        self.models: dict[State, tuple[Sample, ...]] = {}
        self.parts: dict[tuple[str, State], Part] = {}
        self.unlike: list[str] = []
        self.running: dict[int, Running] = {}
        self.places: dict[int, tuple[str, ...]] = {}

    # ---- what saving asks

    def begin(self, generation: int, nodes: Mapping[int, str], state: State, tiers: Mapping[str, str]) -> None:
        """The ranks of a generation, by node, go on from a state that each node has read from its tier; (0, 0): from nothing."""
        order = tuple(dict.fromkeys(nodes[rank] for rank in sorted(nodes)))
        ranks: dict[str, list[Rank]] = {node: [] for node in order}
        for rank in sorted(nodes):
            ranks[nodes[rank]].append(Rank(rank, len(nodes)))
        self.places[generation] = order
        run = self.running[generation] = Running(order, ranks)
        if state == (0, 0):
            return
        run.model = self.models[state]
        for node, its in ranks.items():
            part = self.read(node, state, tiers[node], order.index(node))
            for local_rank, one in enumerate(its):
                self.resume(one, part.at(local_rank), tiers[node])
            run.began[node] = self.told(its[0])
        self.compare(run)

    def read(self, node: str, state: State, tier: str, place: int) -> Part:  # noqa: ARG002  # planted bugs ask for the tier
        """The part of a state that a node goes on from: its own; of a newcomer, that of its place, or else the first one."""
        before = self.places[state[0]]
        owner = node if node in before else before[place] if place < len(before) else before[0]
        return self.parts[owner, state]

    def resume(self, rank: Rank, cut: bytes, tier: str) -> None:  # noqa: ARG002  # as above
        """A rank goes on from a cut."""
        rank.resume(unpack(cut))

    def compare(self, run: Running) -> None:
        """All ranks begin from one cut, or they are named."""
        first = run.ranks[run.nodes[0]][0].cut
        for node, ranks in run.ranks.items():
            for one in ranks:
                self.unlike += [f"rank {one.rank} on {node}: {line}" for line in differences(one.cut, first)]

    def made(self, generation: int, step: int) -> None:  # noqa: ARG002  # planted bugs ask for the step
        """All ranks have made a step with their shares of one global batch."""
        run = self.running[generation]
        drawn = [one.draw(self.dataset) for ranks in run.ranks.values() for one in ranks]
        run.model = (*run.model, *(sample for share in drawn for sample in share))

    def save(self, generation: int, step: int) -> None:
        """All ranks publish a state, each with its cut."""
        run, state = self.running[generation], (generation, step)
        self.models[state] = run.model
        for node, ranks in run.ranks.items():
            self.parts[node, state] = Part(tuple(self.published(one, state) for one in ranks))

    def published(self, rank: Rank, state: State) -> bytes:  # noqa: ARG002  # as above
        """What a rank puts into a state."""
        return pack(rank.cut)

    # ---- what agents ask

    def told(self, rank: Rank) -> bytes:
        """What a rank tells as it has begun."""
        return pack(rank.cut)

    def cut(self, node: str, state: State) -> bytes:
        """What a node says of a state: by its own part, or by that of another whose copy it has; empty: there is none."""
        own = self.parts.get((node, state))
        part = own or next((one for (_, of), one in self.parts.items() if of == state), None)
        return part.cuts[0] if part is not None else b""

    def began(self, generation: int, node: str) -> bytes:
        """What the first rank of a node told as its generation began; empty: it began anew."""
        return self.running[generation].began.get(node, b"")


class Cuts(Promise):
    """Cuts nest: along a lineage no state has consumed less than one before it, and nobody says two things of one state."""

    name = "cuts"

    def __init__(self) -> None:
        self._bases: dict[str, dict[int, State]] = {}
        self._known: dict[str, dict[State, Cut]] = {}

    def _created(self, _state: JobState, _fact: JobCreated, _record: Record) -> None:
        self._bases.clear()
        self._known.clear()

    def _committed(self, _state: JobState, fact: CheckpointCommitted, record: Record) -> None:
        self._told(fact.group, (fact.generation, fact.step), fact.cut, record.seq)

    def _held(self, state: JobState, fact: StepsHeld, record: Record) -> None:
        if fact.steps:
            self._told(state.set_of(fact.node), (fact.generation, fact.steps[-1]), fact.cut, record.seq)

    def _restored(self, state: JobState, fact: Restored, record: Record) -> None:
        group, base = state.set_of(fact.node), (fact.of, fact.step)
        began = self._bases.setdefault(group, {}).setdefault(fact.generation, base)
        assert not fact.of or began == base, f"{record.seq}: {fact.node} began from {base}, others from {began}"
        if fact.of:
            self._told(group, base, fact.cut, record.seq)

    def _told(self, group: str, state: State, packed: bytes, seq: int) -> None:
        if not packed:
            return
        cut, known = unpack(packed), self._known.setdefault(group, {})
        assert known.setdefault(state, cut) == cut, f"{seq}: {state} has consumed {known[state]}, and {cut}"
        for other, its in known.items():
            earlier, later = (other, state) if self._descends(group, state, other) else (state, other)
            if self._descends(group, later, earlier):
                first, then = (its, cut) if earlier == other else (cut, its)
                behind = [one for one in zip(first, then, strict=True) if one[0][1:3] > one[1][1:3]]
                assert not behind, f"{seq}: {later} has consumed less than {earlier}: {behind}"

    def _descends(self, group: str, state: State, other: State) -> bool:
        """Is ``other`` in the lineage of ``state``?"""
        bases = self._bases.get(group, {})
        while state[0] > other[0]:
            if state[0] not in bases:
                return False
            state = bases[state[0]]
        return state[0] == other[0] and state[1] >= other[1]

    def _broken(self, _state: JobState, fact: shards.LedgerBroken, record: Record) -> None:
        raise AssertionError(f"{record.seq}: {fact.why}")

    looks: ClassVar[Mapping[type, Look]] = {
        JobCreated: _created,
        CheckpointCommitted: _committed,
        StepsHeld: _held,
        Restored: _restored,
        shards.LedgerBroken: _broken,
    }


# ---- the truth


def check_consumed(records: Sequence[Record], state: JobState, data: Consuming) -> dict[str, int]:
    """No sample is lost, none is twice in a lineage, and the log says of every state what its model was trained on.

    Returns how many states were saved, how many samples the newest model has, and how many were trained again.
    """
    assert not data.unlike, f"ranks begin from different cuts: {data.unlike[:3]}"
    for saved, model in data.models.items():
        _check_model(data.dataset, saved, model)
    for run in data.running.values():
        _check_model(data.dataset, (0, 0), run.model)
    _check_log(records, data)
    _check_ledger(state, data)
    audit = Audit()
    for record in records:
        audit.feed(record)
    wrong = [finding.why for proof in audit.proofs() for finding in proof.findings]
    assert not wrong, f"the audit finds {wrong}"
    assert not any(proof.uneven for proof in audit.proofs()), "the position moved by more or less than a batch a step"
    newest = max(data.models, default=None)
    ledgers = state.shards.ledgers.values()
    return {
        "states": len(data.models),
        "samples": len(data.models[newest]) if newest is not None else 0,
        "again": sum(one.again for ledger in ledgers for one in ledger.datasets.values()),
    }


def _check_model(dataset: Dataset, state: State, model: tuple[Sample, ...]) -> None:
    """A model was trained on the samples of the first steps, each once, in whatever order within a step."""
    # A step has at least half of a batch on average; so many at a time, because the answer is remembered.
    steps = 2 * len(model) // dataset.batch + 1
    wanted = lineage_of(dataset, -(-steps // STEPS_AT_ONCE) * STEPS_AT_ONCE)
    if model == wanted[: len(model)]:
        return
    twice = sorted({one for one in model if model.count(one) > 1})
    missing = sorted(set(wanted[: len(model)]) - set(model))
    raise AssertionError(f"the model of {state}: twice {twice[:5]}, missing {missing[:5]}, of {len(model)} samples")


def _samples(dataset: Dataset, packed: bytes) -> int:
    (place,) = unpack(packed)
    return place.epoch * dataset.size + place.position


def _told(records: Iterable[Record]) -> Iterable[tuple[int, State, bytes]]:
    """What the log says of states: number of the record, state and cut."""
    for record in records:
        fact: Any = record.event
        if isinstance(fact, CheckpointCommitted):
            yield record.seq, (fact.generation, fact.step), fact.cut
        elif isinstance(fact, StepsHeld) and fact.steps:
            yield record.seq, (fact.generation, fact.steps[-1]), fact.cut
        elif isinstance(fact, Restored) and fact.step:
            yield record.seq, (fact.of, fact.step), fact.cut


def _check_log(records: Iterable[Record], data: Consuming) -> None:
    """Every word of the log about a state is true of its model."""
    for seq, state, cut in _told(records):
        assert cut, f"{seq}: nothing is said of what {state} has consumed"
        said, true = _samples(data.dataset, cut), len(data.models[state])
        assert said == true, f"{seq}: {state} is said to have consumed {said} samples, its model was trained on {true}"


def _check_ledger(state: JobState, data: Consuming) -> None:
    """The leader's ledger is that of states that there were, and its newest one is true."""
    for ledger in state.shards.ledgers.values():
        for one in ledger.lineage.known:
            said, true = _samples(data.dataset, one.cut), len(data.models[one.state])
            assert said == true, f"the ledger says of {one.state} {said} samples, its model was trained on {true}"
