"""Events of slow ranks in words."""

from __future__ import annotations

from dlrover_core.history.phrases import duration
from dlrover_core.history.words import Words
from dlrover_core.job import stragglers
from dlrover_core.words import count

WORDS: Words = {
    stragglers.SlowRank: lambda fact: (
        f"rank {fact.rank} on {fact.node} computes {fact.now_us / max(1, fact.before_us):.2f}x slower than it did: "
        f"{fact.now_us / 1000:.3g} ms a step, {fact.before_us / 1000:.3g} ms before"
    ),
    stragglers.SlowEnded: lambda fact: (
        f"rank {fact.rank} on {fact.node} computes as it did again, after {duration(fact.slow_us)}"
    ),
    stragglers.SlowReplaced: lambda fact: (
        f"{fact.node} is replaced: its slow rank {fact.rank} has cost {duration(fact.lost_us)}, as much as replacing it: "
        f"{duration(fact.cost_us)}, {'measured' if fact.measured else 'by the spec'}"
    ),
    stragglers.LossBroken: lambda fact: (
        f"no finite loss from step {fact.step} on: {count(fact.ranks, 'rank')} of {fact.reporting} had it first, "
        f"rank {fact.rank} on {fact.node} among them"
    ),
}
