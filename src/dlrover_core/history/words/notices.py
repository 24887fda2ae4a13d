"""Events of notices in words."""

from __future__ import annotations

from dlrover_core.history.phrases import stamp
from dlrover_core.history.words import Ends, Follows, Keys, Words
from dlrover_core.job import notices


def announced(known: notices.NoticeSlice, node: str) -> str:
    """What the platform has announced about a node, for its line in a status; empty: nothing."""
    notice, unreached = known.by_node.get(node), known.unreached.get(node)
    said = []
    if notice is not None:
        when = f" at {stamp(notice.deadline)}" if notice.deadline else ""
        said.append(f"the platform will take it away{when}: {notice.words}")
    if unreached is not None:
        said.append(f"the platform cannot reach its host: {unreached}")
    return "; ".join(said)


def _given(fact: notices.NoticeGiven) -> str:
    when = f"at {stamp(fact.deadline)}" if fact.deadline else "and does not say when"
    moves = "; it leaves by then" if fact.moves else ""
    return f"the platform will take {fact.node} away, {when}: {fact.notice}{moves}"


def _withdrawn(fact: notices.NoticeWithdrawn) -> str:
    where = f", and stays{' on ' + fact.host if fact.host else ''}" if fact.stays else ""
    return f"the platform will not take {fact.node} away after all{where}"


WORDS: Words = {
    notices.NoticeGiven: _given,
    notices.NoticeWithdrawn: _withdrawn,
    notices.HostUnreached: lambda fact: (
        f"the platform cannot reach the host of {fact.node}, whose agent is heard: {fact.reason}"
    ),
    notices.HostReached: lambda fact: f"the platform can reach the host of {fact.node} again",
}

KEYS: Keys = {
    **dict.fromkeys((notices.NoticeGiven, notices.HostUnreached), lambda fact: fact.node),
}
ENDS: Ends = {
    notices.NoticeWithdrawn: (notices.NoticeGiven, lambda fact: fact.node),
    notices.HostReached: (notices.HostUnreached, lambda fact: fact.node),
}
FOLLOWS: Follows = {
    notices.NoticeWithdrawn: lambda fact, known: (known.newest(notices.NoticeGiven, fact.node),),
    notices.HostReached: lambda fact, known: (known.newest(notices.HostUnreached, fact.node),),
}
