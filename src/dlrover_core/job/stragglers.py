"""Ranks that compute slower than they did, and losses that are no numbers. What is done about them: `rules.stragglers`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from dlrover_core.diagnosis import ladder
from dlrover_core.job import evidence, incidents, job, nodes, world
from dlrover_core.job.crash_loops import AT_STEP
from dlrover_core.job.names import group_of
from dlrover_core.kernel.engine import Facts
from dlrover_core.kernel.events import Record, event

SPIKE = "loss.spike"
PARTS = 10_000
RECOVERIES_KEPT = 16
STEP_DIGITS_MAX = 18
RANKS_SHOWN = 8


@event(140)
class SlowRank(NamedTuple):
    """A rank takes ``now_us`` to compute a step, where it took ``before_us``, over the ``steps`` up to ``step``.

    ``peers``: what the others' costs did meanwhile, in parts of 10,000 of what they were.
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
    """A rank computes as it did, after ``slow_us``."""

    node: str
    rank: int
    slow_us: int


@event(142)
class SlowReplaced(NamedTuple):
    """A node is replaced: its slow rank has cost ``lost_us``, replacing it costs ``cost_us``; ``measured``, or by the spec."""

    node: str
    rank: int
    lost_us: int
    cost_us: int
    measured: bool


@event(143)
class LossBroken(NamedTuple):
    """No finite loss from ``step`` on: ``ranks`` had it first, of ``reporting`` that tell theirs. ``how``: as in `slots`."""

    node: str
    generation: int
    rank: int
    step: int
    how: int
    ranks: int
    reporting: int


class NoteSlow(NamedTuple):
    """Beats tell that a rank became slower, by itself; the fields are those of `SlowRank`."""

    node: str
    generation: int
    rank: int
    before_us: int
    now_us: int
    steps: int
    peers: int
    step: int


class NoteRecovered(NamedTuple):
    """Beats tell that a slow rank computes as it did."""

    node: str
    generation: int
    rank: int


class NoteLoss(NamedTuple):
    """Beats tell that there is no finite loss any more; the fields are those of `LossBroken`."""

    node: str
    generation: int
    rank: int
    step: int
    how: int
    ranks: int
    reporting: int


class NoteLossJump(NamedTuple):
    """Beats tell that a rank's loss is ``times`` thousandths of what it was."""

    node: str
    generation: int
    rank: int
    step: int
    times: int


@dataclass(slots=True)
class Slow:
    """One slow rank, since when, and how slow."""

    node: str
    rank: int
    since: int
    before_us: int
    now_us: int

    def lost_us(self, now: int) -> int:
        """What it has cost: of every step the part that it takes longer."""
        return (now - self.since) * (self.now_us - self.before_us) // max(1, self.now_us)

    def costs_at(self, cost_us: int) -> int:
        """When it will have cost that much."""
        return self.since + cost_us * self.now_us // max(1, self.now_us - self.before_us)


@dataclass(slots=True)
class StragglerSlice:
    """Slow ranks by node and rank; what replacements took; the generation whose loss was told to be broken, by group.

    ``jumps``: generation and step of the newest jump of a loss that was told, by group.
    """

    slow: dict[str, Slow] = field(default_factory=dict)
    replacing: list[int] = field(default_factory=list)
    recoveries: list[int] = field(default_factory=list)
    broken: dict[str, int] = field(default_factory=dict)
    jumps: dict[str, tuple[int, int]] = field(default_factory=dict)

    def standing(self) -> set[tuple[str, int]]:
        """Node and rank of every slow one."""
        return {(one.node, one.rank) for one in self.slow.values()}


def rank_key(node: str, rank: int) -> str:
    """How a slow rank is found: by its node and its number."""
    return f"{node}:{rank}"


# ---- evolve


def _on_created(slice_: StragglerSlice, fact: job.JobCreated, record: Record) -> None:
    """Of an earlier run's recoveries the costs stay true."""
    slice_.slow.clear()
    slice_.replacing.clear()
    slice_.broken.clear()
    slice_.jumps.clear()


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
    slice_.broken[group_of(fact.node)] = fact.generation


def _on_evidence(slice_: StragglerSlice, fact: evidence.EvidenceSeen, record: Record) -> None:
    told = fact.place.removeprefix(AT_STEP)
    if fact.signature == SPIKE and told.isdecimal() and len(told) <= STEP_DIGITS_MAX:
        slice_.jumps[group_of(fact.node)] = (fact.generation, int(told))


def _on_chosen(slice_: StragglerSlice, fact: incidents.ActionChosen, record: Record) -> None:
    if fact.action == ladder.RELAUNCH_NODE and fact.incident not in slice_.replacing:
        slice_.replacing = [*slice_.replacing[-RECOVERIES_KEPT:], fact.incident]


def _on_closed(slice_: StragglerSlice, fact: incidents.IncidentClosed, record: Record) -> None:
    """What a replacement took, and the steps it lost are not even in it."""
    if fact.incident in slice_.replacing:
        slice_.replacing.remove(fact.incident)
        slice_.recoveries = [*slice_.recoveries[-RECOVERIES_KEPT + 1 :], fact.down_us]


FACTS = Facts(
    kinds=(SlowRank, SlowEnded, SlowReplaced, LossBroken),
    evolve={
        job.JobCreated: _on_created,
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
