"""Events of checkpoints in words."""

from __future__ import annotations

from dlrover_core.history.phrases import duration, size
from dlrover_core.history.words import Follows, Keys, Known, Words
from dlrover_core.history.words.world import formation
from dlrover_core.job import checkpoints, plans, world
from dlrover_core.job.lineage import cut_of, readable
from dlrover_core.words import count

TIERS = {
    checkpoints.MEMORY: "its own memory",
    checkpoints.PEER: "the memory of peers",
    checkpoints.DISK: "the local disk",
    checkpoints.STORAGE: "storage",
}


def tier(name: str) -> str:
    """Where a state came from, in words."""
    return TIERS.get(name, name)


def _consumed(cut: bytes) -> str:
    """How far the data are, in words; empty: the event says nothing, or a newer release has packed it."""
    places = cut_of(cut) if readable(cut) else ()
    told = ", ".join(f"{one.dataset} at {one.position:,} of epoch {one.epoch + 1}" for one in places)
    return f"; data: {told}" if told else ""


def _keeping(fact: checkpoints.KeepingStarted) -> str:
    often = f"every {count(fact.every, 'step')} in memory ({size(fact.node_bytes)} on each node)"
    stored = (
        f"every {count(fact.store_every, 'step')} to {fact.url}" if fact.store_every else f"to {fact.url} when told"
    )
    agreed = "" if fact.planned else "; its ranks cannot agree on a step boundary"
    return f"{fact.group} generation {fact.generation} saves {often}, {stored}{agreed}"


def _committed(fact: checkpoints.CheckpointCommitted) -> str:
    why = "" if fact.why == checkpoints.DUE else f"; {fact.why}"
    parts = f"{count(fact.parts, 'part')}, {size(fact.size)} in {duration(fact.took_us)}"
    return f"step {fact.step} of generation {fact.generation} is a checkpoint: {parts}, at {fact.url}{why}{_consumed(fact.cut)}"


def _held(fact: checkpoints.StepsHeld) -> str:
    what = f"step{'s' if len(fact.steps) > 1 else ''} {', '.join(map(str, fact.steps))}" if fact.steps else "no step"
    copies = f" and copies of {count(len(fact.copies), 'peer')}" if fact.copies else ""
    when = f"waits at the boundary of plan {fact.plan} with" if fact.plan else "holds"
    return f"{fact.node} {when} {what} of generation {fact.generation} in memory{copies}{_consumed(fact.cut)}"


def _restored(fact: checkpoints.Restored) -> str:
    fell = "".join(f"; {tier(name)} was not good: {why}" for name, why in fact.fell)
    if fact.tier == checkpoints.NOTHING:
        anew = "; what was saved before is of no use" if fell else ""
        return f"{fact.node} began generation {fact.generation} from nothing{anew}{fell}"
    where = f"step {fact.step} out of {tier(fact.tier)}, in {duration(fact.took_us)}"
    return f"{fact.node} went on from {where}{fell}{_consumed(fact.cut)}"


def _end_of_world(fact: checkpoints.StepsHeld, known: Known) -> tuple[int, ...]:
    group = known.sets.of(fact.node)
    next_world = known.newest(world.WorldFormed, (group, fact.generation + 1))
    return (known.newest(world.WorldDissolved, group) or next_world,)


WORDS: Words = {
    checkpoints.KeepingStarted: _keeping,
    checkpoints.CheckpointCommitted: _committed,
    checkpoints.StorageFailed: lambda fact: (
        f"{fact.node} cannot write checkpoints to {fact.url}: {fact.reason}; training goes on"
    ),
    checkpoints.StorageBack: lambda fact: f"{fact.node} writes checkpoints to {fact.url} again",
    checkpoints.ReplicaOffered: lambda fact: f"{fact.node} keeps copies of a peer's state, at {fact.address}",
    checkpoints.StepsHeld: _held,
    checkpoints.SaveOrdered: lambda fact: (
        f"step {fact.step} of generation {fact.generation}, whole in memory, is to be written to storage: {fact.why}"
    ),
    checkpoints.Restored: _restored,
    checkpoints.RanksArmed: lambda fact: f"all ranks of {fact.node} look for the boundary of plan {fact.plan}",
}

KEYS: Keys = {
    checkpoints.SaveOrdered: lambda fact: (fact.group, fact.generation, fact.step),
    checkpoints.StorageFailed: lambda fact: fact.node,
}
FOLLOWS: Follows = {
    checkpoints.Restored: formation,
    checkpoints.KeepingStarted: lambda fact, known: (known.newest(world.WorldFormed, (fact.group, fact.generation)),),
    checkpoints.StepsHeld: _end_of_world,
    checkpoints.CheckpointCommitted: lambda fact, known: (
        known.newest(checkpoints.SaveOrdered, (fact.group, fact.generation, fact.step)),
    ),
    checkpoints.StorageBack: lambda fact, known: (known.newest(checkpoints.StorageFailed, fact.node),),
    checkpoints.RanksArmed: lambda fact, known: (
        (known.newest(plans.WorldPlanned, known.sets.of(fact.node)),) if fact.plan else ()
    ),
}
