"""Events of steps in words."""

from __future__ import annotations

from dlrover_core.history.words import Follows, Words
from dlrover_core.history.words.world import formation
from dlrover_core.job import progress

WORDS: Words = {
    progress.FirstStep: lambda fact: (
        f"generation {fact.generation} made its first step, step {fact.step}, on {fact.node}"
    ),
    progress.Progressed: lambda fact: f"generation {fact.generation} reached step {fact.step}",
}

FOLLOWS: Follows = {progress.FirstStep: formation}
