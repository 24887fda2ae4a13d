"""Events of torchrun's restart budget in words."""

from __future__ import annotations

from dlrover_core.history.words import Words
from dlrover_core.job import budgets

WORDS: Words = {
    budgets.RestartsSpent: lambda fact: (
        f"{fact.node}: the launcher of its workers has no restarts left (generation {fact.generation})"
    ),
}
