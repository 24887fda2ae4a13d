"""Stragglers (ranks that compute slower than they did) and broken losses. What follows is decided in `rules.stragglers`.

Both are in one module because one order of reading finds them: agents sample them from the same step slots, send them in
the same heartbeats, and the leader compares ranks for both (`runtime.paces`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from dlrover_core.diagnosis import ladder
from dlrover_core.job import evidence, incidents, nodes, world
from dlrover_core.job.crash_loops import AT_STEP
from dlrover_core.job.sets import Coupled
from dlrover_core.kernel.engine import Facts
from dlrover_core.kernel.events import Record, event
from dlrover_core.kernel.state import lasting

SPIKE = "loss.spike"
PARTS = 10_000
RECOVERIES_KEPT = 16
STEP_DIGITS_MAX = 18


@event(140)
class SlowRank(NamedTuple):
    """A rank became slower than it was.

    before_us, now_us: median time to compute a step, before and now
    steps:             steps that ``now_us`` was measured over, up to ``step``
    peers:             change of the other ranks' time meanwhile, in parts of 10,000
    """

    node: str
    generation: int
    rank: int
    before_us: int
    now_us: int
    steps: int
    step: int
    peers: int


@event(141)
class SlowEnded(NamedTuple):
    """A slow rank computes as fast as before again, after ``slow_us``."""

    node: str
    rank: int
    slow_us: int


@event(142)
class SlowReplaced(NamedTuple):
    """A node is replaced because of its slow rank.

    lost_us:  time that the slow rank has cost
    cost_us:  time that a replacement costs
    measured: ``cost_us`` was measured in this job; else it is the spec's
    """

    node: str
    rank: int
    lost_us: int
    cost_us: int
    measured: bool


@event(143)
class LossBroken(NamedTuple):
    """The loss is not finite from ``step`` on.

    how:       as in `slots`
    ranks:     number of ranks that had it first
    reporting: number of ranks that report their loss
    """

    node: str
    generation: int
    rank: int
    step: int
    how: int
    ranks: int
    reporting: int


class NoteSlow(NamedTuple):
    """The leader: a rank became slower than the others, by heartbeats. Fields as in `SlowRank`."""

    node: str
    generation: int
    rank: int
    before_us: int
    now_us: int
    steps: int
    peers: int
    step: int


class NoteRecovered(NamedTuple):
    """The leader: a slow rank computes as fast as before again, by heartbeats."""

    node: str
    generation: int
    rank: int


class NoteLoss(NamedTuple):
    """The leader: the loss is not finite any more, by heartbeats. Fields as in `LossBroken`."""

    node: str
    generation: int
    rank: int
    step: int
    how: int
    ranks: int
    reporting: int


class NoteLossJump(NamedTuple):
    """The leader: the loss of a rank is ``times`` thousandths of what it was, by heartbeats."""

    node: str
    generation: int
    rank: int
    step: int
    times: int


@dataclass(slots=True)
class Slow:
    """One slow rank.

    since:             when it became slow, microseconds
    before_us, now_us: time to compute a step, before and now
    """

    node: str
    rank: int
    since: int
    before_us: int
    now_us: int

    def lost_us(self, now: int) -> int:
        """The time that it has cost: the extra part of every step."""
        return (now - self.since) * (self.now_us - self.before_us) // max(1, self.now_us)

    def costs_at(self, cost_us: int) -> int:
        """When it will have cost that much."""
        return self.since + cost_us * self.now_us // max(1, self.now_us - self.before_us)


@dataclass(slots=True)
class StragglerSlice(Coupled):
    """Slow ranks and broken losses.

    slow:       slow ranks, by node and rank (`rank_key`)
    replacing:  incidents of replacements under way
    recoveries: microseconds that replacements took
    broken:     generation whose loss was last recorded as broken, by set
    jumps:      generation and step of the newest recorded jump of a loss, by set
    """

    slow: dict[str, Slow] = field(default_factory=dict)
    replacing: list[int] = field(default_factory=list)
    # What a recovery costs is true of the next run, too.
    recoveries: list[int] = lasting(list)
    broken: dict[str, int] = field(default_factory=dict)
    jumps: dict[str, tuple[int, int]] = field(default_factory=dict)

    def standing(self) -> set[tuple[str, int]]:
        """Node and rank of every slow rank."""
        return {(one.node, one.rank) for one in self.slow.values()}


def rank_key(node: str, rank: int) -> str:
    """The key of a slow rank: node and rank."""
    return f"{node}:{rank}"


# ---- evolve


def _on_slow(slice_: StragglerSlice, fact: SlowRank, record: Record) -> None:
    key = rank_key(fact.node, fact.rank)
    since = slice_.slow[key].since if key in slice_.slow else record.at
    slice_.slow[key] = Slow(fact.node, fact.rank, since, fact.before_us, fact.now_us)


def _on_ended(slice_: StragglerSlice, fact: SlowEnded, record: Record) -> None:
    slice_.slow.pop(rank_key(fact.node, fact.rank), None)


def _forget(slice_: StragglerSlice, fact: world.Ended, record: Record) -> None:
    for key in [key for key, one in slice_.slow.items() if one.node == fact.node]:
        del slice_.slow[key]


def _on_broken(slice_: StragglerSlice, fact: LossBroken, record: Record) -> None:
    slice_.broken[slice_.set_of(fact.node)] = fact.generation


def _on_evidence(slice_: StragglerSlice, fact: evidence.EvidenceSeen, record: Record) -> None:
    told = fact.place.removeprefix(AT_STEP)
    if fact.signature == SPIKE and told.isdecimal() and len(told) <= STEP_DIGITS_MAX:
        slice_.jumps[slice_.set_of(fact.node)] = (fact.generation, int(told))


def _on_chosen(slice_: StragglerSlice, fact: incidents.ActionChosen, record: Record) -> None:
    if fact.action == ladder.RELAUNCH_NODE and fact.incident not in slice_.replacing:
        slice_.replacing = [*slice_.replacing[-RECOVERIES_KEPT:], fact.incident]


def _on_closed(slice_: StragglerSlice, fact: incidents.IncidentClosed, record: Record) -> None:
    """Measure what a replacement took. The steps that it lost are not included."""
    if fact.incident in slice_.replacing:
        slice_.replacing.remove(fact.incident)
        if fact.down_us >= 0:
            slice_.recoveries = [*slice_.recoveries[-RECOVERIES_KEPT + 1 :], fact.down_us]


FACTS = Facts(
    kinds=(SlowRank, SlowEnded, SlowReplaced, LossBroken),
    evolve={
        SlowRank: _on_slow,
        SlowEnded: _on_ended,
        LossBroken: _on_broken,
        evidence.EvidenceSeen: _on_evidence,
        incidents.ActionChosen: _on_chosen,
        incidents.IncidentClosed: _on_closed,
        nodes.NodeFailed: _forget,
        nodes.NodeGone: _forget,
        nodes.NodeLost: _forget,
        nodes.NodeReleased: _forget,
        nodes.NodeLeft: _forget,
        nodes.NodeSucceeded: _forget,
    },
)
