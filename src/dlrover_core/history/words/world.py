"""Events of worlds in words."""

from __future__ import annotations

from typing import Any

from dlrover_core.history.words import Ends, Follows, Keys, Known, Words
from dlrover_core.job import checkpoints, plans, world
from dlrover_core.job.ranges import from_ranges
from dlrover_core.words import count


def _formed(fact: world.WorldFormed) -> str:
    members = from_ranges(fact.group, fact.members)
    where = {checkpoints.MEMORY: " in memory", checkpoints.STORAGE: " on storage"}.get(fact.resume_tier, "")
    resume = f", resuming from step {fact.resume_step}{where} or a later one" if fact.resume_step >= 0 else ""
    why, size = fact.reason, members[-1].first_rank + members[-1].nproc
    return f"{fact.group} generation {fact.generation}: {count(len(members), 'node')}, {count(size, 'rank')}{resume} ({why})"


def _dissolved(fact: world.WorldDissolved) -> str:
    how = "stops as planned" if fact.planned else "cannot go on"
    return f"{fact.group} generation {fact.generation} {how}: {fact.reason}"


def formation(fact: Any, known: Known) -> tuple[int, ...]:
    """The record of the world that a node's event belongs to, by its generation."""
    return (known.newest(world.WorldFormed, (known.sets.of(fact.node), fact.generation)),)


WORDS: Words = {
    world.WorldFormed: _formed,
    world.WorldDissolved: _dissolved,
    world.WorkersStarted: lambda fact: f"the workers of {fact.node} run in generation {fact.generation}",
    world.WorkersStopped: lambda fact: (
        f"the workers of {fact.node} in generation {fact.generation} were stopped, as ordered"
    ),
    world.WorkersFinished: lambda fact: (
        f"the workers of {fact.node} in generation {fact.generation} ended with exit code 0"
        f"{fact.unstored and f', but {fact.unstored}'}"
    ),
    world.StoreOffered: lambda fact: f"{fact.node} offers a store at {fact.address}",
    world.StoreWithdrawn: lambda fact: f"{fact.node} has lost its store at {fact.address}",
}

KEYS: Keys = {
    world.WorldFormed: lambda fact: (fact.group, fact.generation),
    world.WorldDissolved: lambda fact: fact.group,
}
ENDS: Ends = {
    world.WorldFormed: (world.WorldDissolved, lambda fact: fact.group),
    world.WorldDissolved: (plans.WorldPlanned, lambda fact: fact.group),
}
FOLLOWS: Follows = {
    world.WorldFormed: lambda fact, known: (known.newest(world.WorldDissolved, fact.group),),
    world.WorldDissolved: lambda fact, known: (known.newest(plans.WorldPlanned, fact.group),) if fact.planned else (),
    world.WorkersStarted: formation,
    world.WorkersStopped: lambda fact, known: (known.newest(world.WorldDissolved, known.sets.of(fact.node)),),
}
