"""Events of waiting for room in words."""

from __future__ import annotations

from dlrover_core.history.words import Words
from dlrover_core.job import queueing
from dlrover_core.words import count


def _given_back(fact: queueing.GivenBack) -> str:
    if fact.held:
        return f"{fact.group} gives back {count(len(fact.held), 'node')}, that others may have them"
    return f"{fact.group} leaves its place in the queue, as other sets of the job give their nodes back"


WORDS: Words = {
    queueing.RoomChanged: lambda fact: (
        f"{count(fact.room, 'more node')} of {fact.group} would start now"
        if fact.room >= 0
        else f"it is no longer known how many nodes of {fact.group} would start"
    ),
    queueing.GivenBack: lambda fact: f"{_given_back(fact)}, and asks again: {fact.reason}",
    queueing.AskedAgain: lambda fact: f"{fact.group} asks for its nodes again",
    queueing.HostsAllowed: lambda fact: (
        f"place {fact.group}-{fact.index} may be filled on {', '.join(fact.hosts) or 'any host'} too: no other has room"
    ),
}
