"""Events of hosts in words."""

from __future__ import annotations

from dlrover_core.history.phrases import stamp
from dlrover_core.history.words import Words
from dlrover_core.job import hosts


def _quarantined(fact: hosts.HostQuarantined) -> str:
    return f"host {fact.host} is kept off until {stamp(fact.until)}{', as asked' if fact.asked else ''}: {fact.reason}"


WORDS: Words = {
    hosts.HostQuarantined: _quarantined,
    hosts.HostReleased: lambda fact: f"host {fact.host} may be used again ({fact.how}): {fact.reason}",
}
