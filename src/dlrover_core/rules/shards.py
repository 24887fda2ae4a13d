"""Shards: which datasets may be registered, what agents are told of them, and whether the cuts of a lineage go together."""

from __future__ import annotations

from collections.abc import Iterator

from dlrover_core.data.cut import differences, same_source
from dlrover_core.data.quota import DROP, KEEP
from dlrover_core.errors import Refused
from dlrover_core.job import shards
from dlrover_core.job.checkpoints import CheckpointCommitted, Restored, StepsHeld
from dlrover_core.job.lineage import cut_of
from dlrover_core.job.shards import DatasetRegistered, Datasets, LedgerBroken, RegisterDataset, Terms
from dlrover_core.job.state import JobState
from dlrover_core.kernel.engine import Rules, Telling, Tells
from dlrover_core.kernel.events import Event, Record
from dlrover_core.rules import leases, slots


def _known(state: JobState, group: str) -> tuple[Terms, ...]:
    return state.shards.of(group).known


def _telling(state: JobState, group: str, known: tuple[Terms, ...]) -> Telling:
    return Telling(Datasets(known) if known else None)


# ---- decide


def _register(state: JobState, command: RegisterDataset, now: int) -> Iterator[Event]:
    """Register a dataset. A repetition, whether it knows the global batch or not, leaves no record; another one is refused."""
    terms = Terms(*command[2:])
    if terms.assignment in shards.LEASES:
        _bounded(terms)
        slots.present(state, command.node)
        if state.leases.find(command.node, terms.name) is None:
            _own_name(state, state.set_of(command.node), terms)
        yield from leases.register(state, command.node, terms)
    else:
        yield from _register_cursor(state, command, terms)


def _register_cursor(state: JobState, command: RegisterDataset, terms: Terms) -> Iterator[Event]:
    """Only rank 0 speaks for ranks that meet in every step."""
    slots.present(state, command.node)
    current, group = state.world.of(command.node), state.set_of(command.node)
    if not current.active or current.generation != command.generation or current.places.get(command.node) != 0:
        raise Refused(f"{command.node} does not run rank 0 of a running generation {command.generation}")
    _bounded(terms)
    ledger = state.shards.of(group)
    known = ledger.datasets.get(terms.name)
    if known is None and len(ledger.datasets) >= shards.DATASETS_MAX:
        raise Refused(f"{group} has {shards.DATASETS_MAX} datasets already: mix several into one")
    if known is None:
        _own_name(state, group, terms)
    if known is not None and not (known.terms.same(terms) or known.terms.grew_to(terms)):
        raise Refused(
            f"dataset {terms.name!r} is registered with {known.terms}; this one has {terms}: give all ranks the "
            "same data, and other data another name"
        )
    terms = terms.completed(known.terms if known is not None else None)
    if known is None or known.terms != terms:
        yield DatasetRegistered(group, *terms)


def _own_name(state: JobState, group: str, terms: Terms) -> None:
    """Raises `Refused` where a new dataset is called as a partition of a stream of the set is, or the other way round."""
    leased = (one.terms for each in state.sets.groups(group) for one in state.leases.of(each).values())
    if why := terms.clash((*state.shards.of(group).known, *leased)):
        raise Refused(f"name: {why}")


def _bounded(terms: Terms) -> None:
    """Raises `Refused`, which names field, value and remedy."""
    for name in ("name", "order", "fingerprint"):
        text = getattr(terms, name)
        if len(text) > shards.TEXT_MAX or (name == "name" and not text):
            raise Refused(f"{name}: {text[: shards.TEXT_MAX]!r} has not 1 to {shards.TEXT_MAX} characters: shorten it")
    if not 1 <= terms.size <= shards.NUMBER_MAX:
        raise Refused(f"size: {terms.size} samples; a dataset has 1 to 2**62")
    for name in ("epochs", "global_batch"):
        if not 0 <= getattr(terms, name) <= shards.NUMBER_MAX:
            raise Refused(f"{name}: {getattr(terms, name)} is not from 0 to 2**62")
    if terms.last not in (DROP, KEEP):
        raise Refused(f"last: {terms.last!r} is neither {DROP} nor {KEEP}")
    if terms.assignment not in shards.ASSIGNMENTS:
        raise Refused(f"assignment: {terms.assignment!r} is none of {', '.join(shards.ASSIGNMENTS)}")


# ---- react


def unlike(group: str, state: tuple[int, int], cut: bytes, other: bytes) -> Iterator[Event]:
    """Two nodes have written parts of one state, and say of it that it has consumed different samples."""
    why = "; ".join(differences(cut_of(cut), cut_of(other)))
    yield LedgerBroken(group, "", *state, f"its writers differ: {why}"[: shards.WHY_MAX])


def _audit(
    state: JobState, group: str, node: str, of: tuple[int, int], cut: bytes, record: Record, *, resumed: bool = False
) -> Iterator[LedgerBroken]:
    """Compare a cut with those of the lineage, which knows it already, and its sources with those that were registered."""
    ledger = state.shards.of(group)
    wrong = [clash.why for clash in ledger.lineage.clashes(*of, cut, record.at, resumed=resumed)]
    for place in cut_of(cut):
        known = ledger.datasets.get(place.dataset)
        if known is not None and not same_source(place.fingerprint, known.terms.fingerprint):
            wrong.append(
                f"dataset {place.dataset!r}: its positions are of source {place.fingerprint!r}, "
                f"registered is {known.terms.fingerprint!r}"
            )
    for why in wrong:
        yield LedgerBroken(group, node, *of, why[: shards.WHY_MAX])


def _on_committed(state: JobState, fact: CheckpointCommitted, record: Record) -> Iterator[Event]:
    if fact.cut:
        yield from _audit(state, fact.group, "", (fact.generation, fact.step), fact.cut, record)


def _on_held(state: JobState, fact: StepsHeld, record: Record) -> Iterator[Event]:
    if fact.cut and fact.steps:
        of = fact.generation, fact.steps[-1]
        yield from _audit(state, state.set_of(fact.node), fact.node, of, fact.cut, record)


def _on_restored(state: JobState, fact: Restored, record: Record) -> Iterator[Event]:
    """Ranks that began from another state than those of the first node, or from the same one at other samples, are named."""
    group = state.set_of(fact.node)
    began = state.shards.of(group).lineage.bases.get(fact.generation)
    if began is None:
        return
    if fact.step != began[1] or (fact.of and fact.of != began[0]):
        told, known = (f"step {step} of generation {of}" for of, step in ((fact.of, fact.step), began))
        yield LedgerBroken(group, fact.node, fact.of, fact.step, f"its ranks resumed from {told}, others from {known}")
    elif fact.cut:
        yield from _audit(state, group, fact.node, began, fact.cut, record, resumed=True)


def _by_cursor(_state: JobState, fact: DatasetRegistered) -> bool:
    return fact.assignment not in shards.LEASES


def _alarm(fact: LedgerBroken) -> str:
    return f"samples are lost or trained twice: step {fact.step} of generation {fact.generation}: {fact.why}"


RULES = Rules(
    decide={RegisterDataset: _register},
    react={CheckpointCommitted: _on_committed, StepsHeld: _on_held, Restored: _on_restored},
    levels={DatasetRegistered: _by_cursor},
    tells=Tells(_known, _telling),
    alarms={LedgerBroken: _alarm},
)
