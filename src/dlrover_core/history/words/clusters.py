"""Events of addresses in words."""

from __future__ import annotations

from dlrover_core.history.words import Words
from dlrover_core.job import clusters
from dlrover_core.words import count


def _ports(fact: clusters.PortsOffered) -> str:
    called = clusters.Offer(*fact[1:]).addresses
    others = f" and the {count(len(called) - 1, 'port')} after it" if len(called) > 1 else ""
    return f"the workers of {fact.node} are to be called at {called[0]}{others}"


WORDS: Words = {
    clusters.PortsOffered: _ports,
}
