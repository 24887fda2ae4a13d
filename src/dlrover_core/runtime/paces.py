"""Computing times and losses of ranks: summed up by agents, sent with heartbeats, compared by the leader.

All of it is repeated with every heartbeat. An agent follows its ranks (`NodePace`, `NodeLoss`) and reports what stands. The
leader (`Paces`) compares ranks with one another and records a finding once. A new leader hears everything again.

A rank that became slower *by itself* is a straggler. A rank that became slower together with the others has more work to
do, or the cause is common. So a change is compared with the others' change up to the same step, and only the excess counts.
A broken loss is held back for a moment, because the ranks that had it first tell whether a machine or the run is at fault.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

from dlrover_core.diagnosis.changepoint import LINE, ChangePoint
from dlrover_core.diagnosis.slots import FINITE, NEVER
from dlrover_core.job.state import JobState
from dlrover_core.job.stragglers import NoteLoss, NoteLossJump, NoteRecovered, NoteSlow
from dlrover_core.job.world import World
from dlrover_core.kernel.wire import find, part
from dlrover_core.runtime.levels import Beat, Levels

PARTS = 10_000  # ratios travel as integers
SLOW_MAX = 10  # of one node; a message's array has 64 places
LOSSES_MAX = 12
LATE_S = 10.0
"""Seconds that a change waits at most for the others' heartbeats of the same step."""
LOSS_WAIT_S = 3.0
SECOND_US = 1_000_000


class SlowRank(NamedTuple):
    """A slow rank, as a heartbeat reports it.

    rank:              global rank
    step:              the step up to which it was measured
    steps:             steps that ``now_us`` was measured over
    before_us, now_us: time to compute a step, before and now
    jump:              the newest change alone, in parts of `PARTS`; 0: it is an old one
    """

    rank: int
    step: int
    steps: int
    before_us: int
    now_us: int
    jump: int


class RankLoss(NamedTuple):
    """One rank's loss, as a heartbeat reports it.

    rank:   global rank
    broken: first step without a finite loss
    how:    what was not finite, as in `slots`
    jumped: step of the newest jump
    times:  size of that jump, in thousandths
    """

    rank: int
    broken: int
    how: int
    jumped: int
    times: int


@part(7)
class PaceBeat(NamedTuple):
    """Computing times of one node's ranks, in parts of `PARTS` of their baseline; 0: unknown.

    step:   the step up to which all of this holds, which may be a second ago
    common: the median rank's
    others: the median of the ranks that are not slow, or of all, if all are slow
    slower: number of slow ranks
    slow:   slow ranks; may be cut short
    """

    step: int = -1
    common: int = 0
    others: int = 0
    slower: int = 0
    slow: tuple[SlowRank, ...] = ()


@part(8)
class LossBeat(NamedTuple):
    """Losses of one node's ranks.

    ``reporting``: number of ranks that report theirs; ``ranks``: those with a broken loss or a jump.
    """

    reporting: int = 0
    ranks: tuple[RankLoss, ...] = ()


# ---- the agent's side


class _Rank:
    def __init__(self) -> None:
        self.measure, self.blocks, self.step = 0, 0, -1
        self.changes = ChangePoint()


class NodePace:
    """Follows the ranks of one node, by local rank. A slow rank stays slow when its process starts anew."""

    def __init__(self) -> None:
        self._ranks: dict[int, _Rank] = {}
        self._step = -1

    def restarted(self) -> None:
        """Another generation: new processes on the same machine."""
        self._step = -1
        for one in self._ranks.values():
            one.blocks = 0
            one.changes.begin_again()

    def read(self, local_rank: int, measure: int, costs: Sequence[float], step: int, at_s: float) -> None:
        """Take in the costs of the newest blocks of a rank that has made ``step``."""
        one = self._ranks.setdefault(local_rank, _Rank())
        if measure != one.measure:
            one.measure, one.changes = measure, ChangePoint()
        self._step = max(self._step, step)
        for cost in costs:
            if one.changes.push(cost, at_s):
                one.step = step

    def beat(self, first_rank: int) -> PaceBeat:
        """The present report."""
        ratios = [one.changes.ratio for one in self._ranks.values()]
        others = [one.changes.ratio for one in self._ranks.values() if one.changes.slow is None]
        if not others and sum(one > 0 for one in ratios) > 1:
            # All ranks are slow, perhaps a little and for a common cause; one may still be far slower by itself.
            others = ratios
        slow = [
            SlowRank(
                first_rank + local,
                one.step,
                one.changes.slow.steps,
                round(one.changes.slow.before_s * 1e6),
                round(one.changes.slow.now_s * 1e6),
                round(one.changes.jump * PARTS) if one.changes.fresh else 0,
            )
            for local, one in sorted(self._ranks.items())
            if one.changes.slow is not None
        ]
        return PaceBeat(self._step, _middle(ratios), _middle(others), len(slow), tuple(slow[:SLOW_MAX]))


def _middle(ratios: Sequence[float]) -> int:
    known = [one for one in ratios if one > 0]
    return min(round(median(known) * PARTS), PARTS * PARTS) if known else 0


# ---- the leader's side

_NO_PACE = PaceBeat()


class _Heard(NamedTuple):
    generation: int
    pace: PaceBeat
    loss: LossBeat


@dataclass(slots=True)
class _Waiting:
    """A change that waits to be compared, or was ``judged``."""

    slow: SlowRank
    since_s: float
    judged: bool = False


@dataclass(slots=True, eq=False)
class Paces(Levels):
    """All nodes' reports; each finding is returned once."""

    _heard: dict[str, _Heard] = field(default_factory=dict)
    _waiting: dict[tuple[str, int], _Waiting] = field(default_factory=dict)
    _broken_since: dict[str, tuple[int, float]] = field(default_factory=dict)
    _told: dict[tuple[str, str], int] = field(default_factory=dict)

    def heard(self, state: JobState, node: str, beat: Beat) -> bool:
        """Take in a node's heartbeat."""
        self.take(node, beat.generation, find(beat.parts, PaceBeat), find(beat.parts, LossBeat))
        return False

    def take(self, node: str, generation: int, pace: PaceBeat, loss: LossBeat) -> None:
        """Take in a node's report."""
        if pace != _NO_PACE or loss.reporting or node in self._heard:
            self._heard[node] = _Heard(generation, pace, loss)

    def forget(self, node: str) -> None:
        """The node is gone."""
        self._heard.pop(node, None)
        for key in [key for key in self._waiting if key[0] == node]:
            del self._waiting[key]

    def findings(self, state: JobState, now_us: int) -> Iterator[NoteSlow | NoteRecovered | NoteLoss | NoteLossJump]:
        """The findings of now."""
        if state.job.live:
            yield from self.compared(state.world.worlds, state.stragglers.standing(), now_us / SECOND_US)

    def compared(
        self, worlds: Mapping[str, World], standing: Collection[tuple[str, int]], now_s: float
    ) -> Iterator[NoteSlow | NoteRecovered | NoteLoss | NoteLossJump]:
        """The findings of now. ``standing``: the ranks that the log calls slow."""
        if not self._heard:
            return
        for group, world in worlds.items():
            current = {
                node: heard
                for node, heard in self._heard.items()
                if world.active and node in world.places and heard.generation == world.generation
            }
            yield from self._slow(current, standing, now_s)
            yield from self._losses(group, world.generation, current, now_s)

    # ---- paces

    def _slow(
        self, current: Mapping[str, _Heard], standing: Collection[tuple[str, int]], now_s: float
    ) -> Iterator[NoteSlow | NoteRecovered]:
        for node, heard in current.items():
            slow = {one.rank: one for one in heard.pace.slow}
            for rank, one in slow.items():
                waiting = self._waiting.get((node, rank))
                if waiting is None or waiting.slow.step != one.step:
                    # For an old change, the others' baselines have moved since: nothing can be compared.
                    waiting = self._waiting[node, rank] = _Waiting(one, now_s, judged=not one.jump)
                if not waiting.judged:
                    yield from self._judged(node, heard, waiting, current, now_s)
            if heard.pace.common or heard.pace.slower:
                for key in [key for key in self._waiting if key[0] == node and key[1] not in slow]:
                    del self._waiting[key]
                for at, rank in standing:
                    if at == node and rank not in slow and heard.pace.slower <= SLOW_MAX:
                        yield NoteRecovered(node, heard.generation, rank)

    def _judged(
        self, node: str, heard: _Heard, waiting: _Waiting, current: Mapping[str, _Heard], now_s: float
    ) -> Iterator[NoteSlow]:
        """Judge the change once half of the other ranks have made that step too, or after a while without them."""
        slow = waiting.slow
        others = [one for name, one in current.items() if name != node and one.pace.common]
        there = [one for one in others if one.pace.step >= slow.step]
        if 2 * len(there) < len(others) and now_s - waiting.since_s < LATE_S:
            return
        waiting.judged = True
        peers = median(one.pace.common for one in there) if there else heard.pace.others
        # Without another rank to compare with, a slow machine looks like more work.
        if peers and beyond(slow.jump, peers):
            yield NoteSlow(
                node, heard.generation, slow.rank, slow.before_us, slow.now_us, slow.steps, round(peers), slow.step
            )

    # ---- losses

    def _losses(
        self, group: str, generation: int, current: Mapping[str, _Heard], now_s: float
    ) -> Iterator[NoteLoss | NoteLossJump]:
        ranks = [(node, one) for node, heard in current.items() for one in heard.loss.ranks]
        reporting = sum(heard.loss.reporting for heard in current.values())
        jumps = [(one.jumped, one.rank, node, one.times) for node, one in ranks if one.jumped != NEVER]
        if jumps:
            step, rank, node, times = max(jumps)
            if self._told.get((group, "jump"), NEVER) < step:
                self._told[group, "jump"] = step
                yield NoteLossJump(node, generation, rank, step, times)
        broken = [(one.broken, one.rank, node, one.how) for node, one in ranks if one.how != FINITE]
        if not broken:
            self._broken_since.pop(group, None)
            return
        begun, since = self._broken_since.get(group, (0, 0.0))
        if begun != generation:
            since = now_s
            self._broken_since[group] = (generation, since)
        waited = len(broken) >= reporting or now_s - since >= LOSS_WAIT_S
        if waited and self._told.get((group, "broken"), 0) != generation:
            self._told[group, "broken"] = generation
            first = min(broken)
            same = sorted(rank for step, rank, _, _ in broken if step == first[0])
            yield NoteLoss(first[2], generation, first[1], first[0], first[3], len(same), reporting)


def beyond(jump: int, peers: float) -> bool:
    """Does a change exceed the change of the others' costs?"""
    return math.log(jump / peers) > LINE if jump > 0 and peers > 0 else False
