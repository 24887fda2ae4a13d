"""Events of evidence in words."""

from __future__ import annotations

from dlrover_core.history.phrases import duration, one_line
from dlrover_core.history.words import Words
from dlrover_core.job import evidence


def _seen(fact: evidence.EvidenceSeen) -> str:
    who = f"rank {fact.rank} on {fact.node}" if fact.rank >= 0 else f"node {fact.node}"
    late = f", {duration(fact.age_us)} earlier" if fact.age_us >= 1000 else ""
    return f"{who} ({fact.source}{late}): {one_line(fact.text)} ({fact.signature}, {fact.verdict})"


WORDS: Words = {
    evidence.EvidenceSeen: _seen,
}
