"""Events of observing in words."""

from __future__ import annotations

from dlrover_core.history.phrases import exit_of
from dlrover_core.history.words import Follows, Words
from dlrover_core.job import nodes, observing

WORDS: Words = {
    observing.NodePlaced: lambda fact: f"node {fact.node} is placed on {fact.host}, and does not run yet",
    observing.NodeEnded: lambda fact: (
        f"the end of {fact.node}, which had failed, is seen: {exit_of(fact.exit_code)}{', ' + fact.reason if fact.reason else ''}"
    ),
}
FOLLOWS: Follows = {observing.NodePlaced: lambda fact, known: (known.newest(nodes.NodePlanned, fact.node),)}
