"""Notices: a platform will take a running node away, or will not after all, or cannot reach the node's host.

The newest notice of a node counts, whether its deadline is later or earlier than before. A notice may be withdrawn. Where a
world can change at a step boundary, a node with a notice leaves beforehand; `rules.notices` decides that. A host that its
platform cannot reach is no failure of a node whose agent is heard.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, get_args

from dlrover_core.job import nodes, plans, world
from dlrover_core.kernel.engine import Facts
from dlrover_core.kernel.events import Record, event
from dlrover_core.kernel.wire import part
from dlrover_core.spec import us

SAME_S = 2.0
"""Deadlines that are less than this apart are one: a notice is repeated with every list, and takes its time to come."""
SAYS = "its platform says: "
"""The reason of a leave that follows from a notice alone begins with these words."""


@event(135)
class NoticeGiven(NamedTuple):
    """The platform will take a node away.

    node:     which
    notice:   why, in the platform's words
    deadline: when, in microseconds by the leader's clock; 0: the platform does not say
    moves:    the node leaves already; from now on it leaves at this deadline
    """

    node: str
    notice: str
    deadline: int
    moves: bool = False


@event(136)
class NoticeWithdrawn(NamedTuple):
    """The platform will not take a node away after all.

    node:  which
    stays: it was to leave because of the notice alone, and stays
    host:  the host that it stays on; empty: not known, or it leaves all the same
    """

    node: str
    stays: bool = False
    host: str = ""


@event(137)
class HostUnreached(NamedTuple):
    """The platform cannot reach the host of a node whose agent is heard. ``reason``: the platform's word."""

    node: str
    reason: str


@event(138)
class HostReached(NamedTuple):
    """The platform can reach the host of a node again."""

    node: str


@part(13)
class Departure(NamedTuple):
    """To a node that leaves by plan, and whose platform has said when it will be taken away.

    within_us: time from the newest word of that to that moment; 0: it does not leave, or the platform has said nothing
    """

    within_us: int = 0


class NoticeNode(NamedTuple):
    """A platform says whether it will take a node away.

    node:      which
    notice:    why; empty: it will not, or no longer
    within_us: time from now to that moment; 0: it does not say
    """

    node: str
    notice: str
    within_us: int


@dataclass(slots=True)
class Notice:
    """The newest notice of a node.

    words:    the platform's
    deadline: when the node will be taken away; 0: not said
    said_at:  when the notice was recorded
    leaves:   the node leaves because of this notice alone
    """

    words: str
    deadline: int
    said_at: int
    leaves: bool = False

    def clears(self, host: str) -> str:
        """The host that the platform wants free, given the node's; empty: none, because a person deleted the node alone."""
        return "" if self.words == nodes.DELETED else host


@dataclass(slots=True)
class NoticeSlice:
    """What platforms announce.

    by_node:   the notice of each node that has one
    unreached: nodes whose host the platform cannot reach, and its word for that
    """

    by_node: dict[str, Notice] = field(default_factory=dict)
    unreached: dict[str, str] = field(default_factory=dict)


def told(known: NoticeSlice, seen: Iterable[nodes.Observed]) -> Iterator[NoticeNode]:
    """The commands that follow from a backend's observations."""
    for one in seen:
        if one.notice or (one.node in known.by_node and one.phase in ("pending", "running")):
            yield NoticeNode(one.node, one.notice, one.notice_us)


def same(deadline: int, other: int) -> bool:
    """Do these deadlines count as one?"""
    return abs(deadline - other) < us(SAME_S) and bool(deadline) == bool(other)


# ---- evolve


def _on_given(slice_: NoticeSlice, fact: NoticeGiven, record: Record) -> None:
    known = slice_.by_node.get(fact.node)
    slice_.by_node[fact.node] = Notice(fact.notice, fact.deadline, record.at, known is not None and known.leaves)


def _on_withdrawn(slice_: NoticeSlice, fact: NoticeWithdrawn, record: Record) -> None:
    slice_.by_node.pop(fact.node, None)


def _on_drained(slice_: NoticeSlice, fact: plans.NodeDrained, record: Record) -> None:
    known = slice_.by_node.get(fact.node)
    if known is not None:
        known.leaves = fact.reason.startswith(SAYS)


def _on_unreached(slice_: NoticeSlice, fact: HostUnreached, record: Record) -> None:
    slice_.unreached[fact.node] = fact.reason


def _on_reached(slice_: NoticeSlice, fact: HostReached, record: Record) -> None:
    slice_.unreached.pop(fact.node, None)


def _on_ended(slice_: NoticeSlice, fact: world.Ended, record: Record) -> None:
    if slice_.by_node:
        slice_.by_node.pop(fact.node, None)
    # Neither a release nor an end that only the agent tells brings the host back.
    told = isinstance(fact, nodes.NodeReleased) or (isinstance(fact, nodes.NodeFailed) and not fact.seen)
    if slice_.unreached and not told:
        slice_.unreached.pop(fact.node, None)


FACTS = Facts(
    kinds=(NoticeGiven, NoticeWithdrawn, HostUnreached, HostReached),
    evolve={
        plans.NodeDrained: _on_drained,
        NoticeGiven: _on_given,
        NoticeWithdrawn: _on_withdrawn,
        HostUnreached: _on_unreached,
        HostReached: _on_reached,
        **dict.fromkeys(get_args(world.Ended), _on_ended),
    },
)


# ---- evolve: planned leaves


def _move(slice_: plans.PlanSlice, fact: NoticeGiven, record: Record) -> None:
    leaving = slice_.leaving.get(fact.node)
    if fact.moves and leaving is not None:
        leaving.since, leaving.deadline = record.at, max(record.at, fact.deadline)


def _stay(slice_: plans.PlanSlice, fact: NoticeWithdrawn, record: Record) -> None:
    if fact.stays:
        slice_.leaving.pop(fact.node, None)


LEAVING = Facts(kinds=(), evolve={NoticeGiven: _move, NoticeWithdrawn: _stay})
"""What notices change in the slice of planned changes."""
