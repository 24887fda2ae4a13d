"""Leases: how many positions a node is granted, what becomes of those of a node that ends, and what is asked of a slow one.

A grant is what the node asks for, but no more than its part of half of what is free: so grants become smaller towards the
end, and all nodes end nearly together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, get_args

from dlrover_core.data.quota import KEEP
from dlrover_core.data.ranges import FRAGMENTS_MAX, POSITION_MAX, Ranges
from dlrover_core.data.trained import checksum
from dlrover_core.errors import Refused, SpecError
from dlrover_core.job import leases, nodes, world
from dlrover_core.job.leases import (
    GRANT_SPANS_MAX,
    KILO,
    SPANS_MAX,
    HearLease,
    LeaseAcked,
    Leased,
    LeaseGranted,
    LeaseRecalled,
    LeaseReturned,
    Leases,
    LeasesRestored,
    LeaseTold,
    RecallLease,
    ReportAcked,
    ReportRepeated,
    RestoreLeases,
    ReturnLease,
    spans_of,
)
from dlrover_core.job.names import group_of
from dlrover_core.job.shards import DATASETS_MAX, LEASES, MODEL_LEASE, DatasetRegistered, Terms
from dlrover_core.job.state import JobState
from dlrover_core.kernel.engine import Rules, Telling, Tells, always
from dlrover_core.kernel.events import Event, Record
from dlrover_core.kernel.wire import Part
from dlrover_core.rules import slots

LEAST_S = 2
"""A grant lasts for so long at least at the node's own pace, if there is so much: towards the end, too."""
NOTHING = b""

_ENDS: Mapping[type, str] = {
    nodes.NodeFailed: "the node failed",
    nodes.NodeGone: "the node is gone",
    nodes.NodeLost: "the node was lost",
    nodes.NodeReleased: "the node was released",
    nodes.NodeLeft: "the node's agent left",
    nodes.NodeSucceeded: "the node's program ended",
}


# ---- decide


def register(state: JobState, node: str, terms: Terms) -> Iterator[Event]:
    """Register a dataset whose samples are leased, for the node's group. A repetition leaves no record. Raises `Refused`."""
    slots.present(state, node)
    group = group_of(node)
    datasets, terms = state.leases.of(group), terms._replace(global_batch=0, last=KEEP)
    known = datasets.get(terms.name)
    if known is not None:
        if known.terms != terms:
            had, has = (f"{one}, {one.assignment}, epochs {one.epochs}" for one in (known.terms, terms))
            raise Refused(f"dataset {terms.name!r} is registered with {had}; this one has {has}: give it another name")
        return
    if len(datasets) >= DATASETS_MAX:
        raise Refused(f"{group} has {DATASETS_MAX} leased datasets already: mix several into one")
    if terms.assignment == MODEL_LEASE and (state.set_of(node) != group or len(state.sets.groups(group)) > 1):
        raise Refused(
            f'lineage: "model" of dataset {terms.name!r}: the nodes of {group} do not restore one model together, as their '
            f'coupling set is {state.set_of(node)}; give lineage="server", or couple the nodes of this one group'
        )
    if terms.size * terms.epochs > POSITION_MAX:
        raise Refused(f"epochs: {terms.epochs} of {terms.size} samples are more than 2**62 positions: give fewer")
    yield DatasetRegistered(group, *terms)


def _hear(state: JobState, command: HearLease, now: int) -> Iterator[Event]:
    """What a node's workers have used, what it gives back, and what it is granted."""
    leased = state.leases.find(command.node, command.dataset)
    if leased is None or not leased.hears(command.generation):
        return
    group, held = group_of(command.node), Ranges(leased.lease(command.node).spans)
    acked = Ranges.unpack(command.acked) & held
    if acked:
        yield LeaseAcked(group, command.dataset, command.node, acked.pack())
    asked = leased.recalled.get(command.node)
    if asked is not None and asked.number == command.recall:
        held = Ranges(leased.lease(command.node).spans)
        given = Ranges.unpack(command.yielded) & held
        yield LeaseReturned(group, command.dataset, command.node, given.pack(), NOTHING, "others wait for work")
        return  # it would get again what it has just given back
    yield from _grant(state, leased, command)


def _grant(state: JobState, leased: Leased, command: HearLease) -> Iterator[Event]:
    node = state.nodes.nodes.get(command.node)
    if node is None or not node.joined or node.released or node.ended or command.node in state.plans.leaving:
        return
    held, free = Ranges(leased.lease(command.node).spans), Ranges(leased.free)
    wanted = command.aim - held.count
    if wanted <= 0 or not free or len(held) >= SPANS_MAX - GRANT_SPANS_MAX or command.node in leased.recalled:
        return
    part = -(-free.count // max(1, command.share))
    taken, _ = free.take(min(wanted, max(part, command.least, LEAST_S * command.rate // KILO, 1)))
    granted = Ranges(tuple(taken)[:GRANT_SPANS_MAX])
    yield LeaseGranted(group_of(command.node), command.dataset, command.node, granted.pack(), command.rate)


def _recall(state: JobState, command: RecallLease, now: int) -> Iterator[Event]:
    """Ask a node for the end of its lease. Nothing moves before its agent has said what it has not handed out."""
    leased = state.leases.find(command.node, command.dataset)
    if leased is None or leased.free or command.node in leased.recalled or not leased.hears(leased.generation):
        return
    held = Ranges(leased.lease(command.node).spans)
    _, last = held.take(held.count - command.many)
    last = Ranges(tuple(last)[-GRANT_SPANS_MAX:])
    if last:
        yield LeaseRecalled(group_of(command.node), command.dataset, command.node, last.pack(), command.to)


def _repeated(state: JobState, command: ReportRepeated, now: int) -> Iterator[Event]:
    """A worker died with shards in hand; its node hands them out again."""
    slots.present(state, command.node)
    leased = state.leases.find(command.node, command.dataset)
    if leased is None:
        raise Refused(f"{group_of(command.node)} has no leased dataset {command.dataset!r}")
    told = _unpacked(command.spans)
    if told and told.last < leased.total and not leased.of_model:
        why = command.why[: leases.WHY_MAX]
        yield LeaseReturned(group_of(command.node), command.dataset, command.node, NOTHING, told.pack(), why)


def _acked(state: JobState, command: ReportAcked, now: int) -> Iterator[Event]:
    """The last word of a node that leaves."""
    leased = state.leases.find(command.node, command.dataset)
    if leased is None:
        raise Refused(f"{group_of(command.node)} has no leased dataset {command.dataset!r}")
    acked = _unpacked(command.spans) & Ranges(leased.lease(command.node).spans)
    if acked:
        yield LeaseAcked(group_of(command.node), command.dataset, command.node, acked.pack())


def _return(state: JobState, command: ReturnLease, now: int) -> Iterator[Event]:
    """A node leaves in good order: nothing of its lease was used but what it has said."""
    leased = state.leases.find(command.node, command.dataset)
    if leased is None:
        raise Refused(f"{group_of(command.node)} has no leased dataset {command.dataset!r}")
    held = Ranges(leased.lease(command.node).spans)
    if held:
        why = "the node's agent leaves"
        yield LeaseReturned(group_of(command.node), command.dataset, command.node, held.pack(), NOTHING, why)


def _restore(state: JobState, command: RestoreLeases, now: int) -> Iterator[Event]:
    """The ledger begins anew, once in a generation, by the word of rank 0's node."""
    slots.present(state, command.node)
    current, group = state.world.of(command.node), group_of(command.node)
    leased = state.leases.find(command.node, command.dataset)
    if leased is None or not leased.of_model:
        raise Refused(f"{group} has no leased dataset {command.dataset!r} that is restored with a model")
    if not current.active or current.generation != command.generation or current.places.get(command.node) != 0:
        raise Refused(f"{command.node} does not run rank 0 of a running generation {command.generation}")
    if not 0 <= command.of < command.generation or command.step < 0:
        raise Refused(f"no state is like this: step {command.step} of generation {command.of}")
    trained = _unpacked(command.spans, FRAGMENTS_MAX)
    if trained and trained.last >= leased.total:
        raise Refused(f"spans: position {trained.last}; dataset {command.dataset!r} has {leased.total}")
    if leased.generation == command.generation:
        if trained - Ranges(leased.acked):
            raise Refused(f"generation {command.generation} has said already where {command.dataset!r} goes on")
        return  # said again: the answer was lost
    saved = next((one for one in leased.saved if (one.generation, one.step) == (command.of, command.step)), None)
    if saved is not None and (saved.samples, saved.checksum) != (trained.count, checksum(trained)):
        raise Refused(
            f"dataset {command.dataset!r}: step {command.step} of generation {command.of} was trained on {saved.samples} samples "
            f"by the words of all its ranks when it was saved, and now {command.node} says other ones, {trained.count}: to go on "
            "would train samples twice or never; restore an earlier step"
        )
    spans = trained.pack()
    yield LeasesRestored(group, command.dataset, command.node, command.generation, command.of, command.step, spans)


def _unpacked(spans: bytes, most: int = SPANS_MAX) -> Ranges:
    """Raises `Refused`."""
    try:
        told = Ranges.unpack(spans)
    except SpecError as wrong:
        raise Refused(f"spans: {wrong}") from wrong
    if len(told) > most:
        raise Refused(f"spans: {len(told)} ranges: {most} at most are told at once")
    return told


# ---- react


def _on_end(state: JobState, fact: world.Ended, record: Record) -> Iterator[Event]:
    """Nobody works on the node's positions any more: others do. A node that leaves by plan is waited for.

    Where a model is restored, the end of a node is that of its generation, and the next one begins with what it restores.
    """
    if isinstance(fact, nodes.NodeReleased) and fact.reason in nodes.BY_PLAN:
        return
    group = group_of(fact.node)
    for name, leased in state.leases.of(group).items():
        spans = leased.lease(fact.node).spans
        if spans and not leased.of_model:
            packed = Ranges(spans).pack()
            yield LeaseReturned(group, name, fact.node, packed, packed, _ENDS[type(fact)])


# ---- what agents are told


def _key(state: JobState, group: str) -> tuple[tuple[int, ...], ...]:
    if not state.leases:
        return ()
    of = state.leases.of
    return tuple(tuple(one.changed for one in of(name).values()) for name in state.sets.groups(group))


def _telling(state: JobState, group: str, key: tuple[tuple[int, ...], ...]) -> Telling:
    if not any(key):
        return Telling()
    named: dict[str, Part] = {}
    groups = state.sets.groups(group)
    for name in groups:
        datasets = state.leases.of(name)
        holders = {node for one in datasets.values() for node in one.held}
        if len(groups) > 1:
            holders |= {node.node for node in state.nodes.in_set(group) if node.group == name}
        for node in holders if datasets else ():
            named[node] = Leases(tuple(_told(one, node) for one in datasets.values()))
    to_all = Leases(tuple(_told(one, "") for one in state.leases.of(groups[0]).values())) if len(groups) == 1 else None
    return Telling(to_all, named=named)


def _told(leased: Leased, node: str) -> LeaseTold:
    lease, asked = leased.lease(node), leased.recalled.get(node)
    told = LeaseTold(
        *leased.terms[:6],
        spans=_packed(lease.told),
        finished=leased.finished,
        assignment=leased.terms.assignment,
        generation=leased.generation,
    )
    return told._replace(recall=asked.number, recalled=_packed(asked.spans)) if asked is not None else told


def _packed(spans: leases.Spans) -> bytes:
    return Ranges(spans).pack() if spans else NOTHING


def _ends_something(state: JobState, fact: LeaseAcked) -> bool:
    """Acknowledgements alone tell agents nothing, but for the last ones of a lease."""
    leased = state.leases.of(fact.group)[fact.dataset]
    return fact.node not in leased.held


def _leased(_state: JobState, fact: DatasetRegistered) -> bool:
    return fact.assignment in LEASES


def _alarm(fact: LeaseReturned) -> str:
    if not fact.repeated:
        return ""
    again = sum(end - start for start, end in spans_of(fact.repeated))
    return f"{again} samples of {fact.dataset!r} may be used again: {fact.node}: {fact.why}"


_ON_END: Mapping[type, Any] = dict.fromkeys(get_args(world.Ended), _on_end)

RULES = Rules(
    decide={
        HearLease: _hear,
        RecallLease: _recall,
        ReportRepeated: _repeated,
        ReportAcked: _acked,
        ReturnLease: _return,
        RestoreLeases: _restore,
    },
    react=_ON_END,
    levels={
        DatasetRegistered: _leased,
        LeaseGranted: always,
        LeaseReturned: always,
        LeaseRecalled: always,
        LeasesRestored: always,
        LeaseAcked: _ends_something,
    },
    tells=Tells(_key, _telling),
    alarms={LeaseReturned: _alarm},
)
