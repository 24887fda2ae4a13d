"""Events of silence in words."""

from __future__ import annotations

from dlrover_core.history.phrases import duration
from dlrover_core.history.words import Words
from dlrover_core.job import silence

WORDS: Words = {
    silence.NodeSuspected: lambda fact: f"node {fact.node} has been silent for {duration(fact.silent_us)}",
    silence.NodeHeard: lambda fact: f"node {fact.node} speaks again",
    silence.MassSilence: lambda fact: (
        f"{fact.suspects} of {fact.nodes} nodes silent at once: the master suspects itself"
    ),
}
