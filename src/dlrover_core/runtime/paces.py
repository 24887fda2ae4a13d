"""What ranks compute and what their losses do: summed up by agents, sent with their beats, compared by whoever leads.

All of it is levels. An agent follows its ranks (`NodePace`, `NodeLoss`) and repeats with every beat what stands; the leader
(`Paces`) makes facts of it once, by comparing ranks with one another, and a new leader hears it all again.

A rank that became slower *by itself* is a straggler; one that became slower with the others has more work to do, or it is the
time of day. So a change is held against what the others' costs did up to the same step, and only what goes beyond it counts.
A loss is waited for, for a moment: which ranks had no finite one first says whether a machine or the run is ill.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

from dlrover_core.diagnosis.changepoint import LINE, ChangePoint
from dlrover_core.diagnosis.slots import FINITE, NEVER
from dlrover_core.job.names import group_of
from dlrover_core.job.state import JobState
from dlrover_core.job.stragglers import NoteLoss, NoteLossJump, NoteRecovered, NoteSlow
from dlrover_core.job.world import World
from dlrover_core.kernel.wire import find, part
from dlrover_core.runtime.levels import Beat, Levels

PARTS = 10_000  # ratios travel as integers
SLOW_MAX = 10  # of one node; a message's array has 64 places
LOSSES_MAX = 12
LATE_S = 10.0
"""How long a change waits for the others' beats of the same step, at most."""
LOSS_WAIT_S = 3.0
SECOND_US = 1_000_000


class SlowRank(NamedTuple):
    """A standing change, as a beat tells it; ``jump``: the newest change alone, in parts of `PARTS`, 0 once it is an old one."""

    rank: int
    step: int
    steps: int
    before_us: int
    now_us: int
    jump: int


class RankLoss(NamedTuple):
    """What one rank's loss does, as a beat tells it: the first step without a finite one, how, and the newest jump."""

    rank: int
    broken: int
    how: int
    jumped: int
    times: int


@part(7)
class PaceBeat(NamedTuple):
    """``common``: the median rank's cost over its baseline, ``others``: that of the ranks not slow, or where all are, of all;
    0: not known yet.

    All of it up to ``step``, which may be a second ago. ``slower``: how many are slow, ``slow`` may be cut short.
    """

    step: int = -1
    common: int = 0
    others: int = 0
    slower: int = 0
    slow: tuple[SlowRank, ...] = ()


@part(8)
class LossBeat(NamedTuple):
    """``reporting``: how many ranks of the node report their loss; ``ranks``: those of which there is something to say."""

    reporting: int = 0
    ranks: tuple[RankLoss, ...] = ()


# ---- the agent's side


class _Rank:
    def __init__(self) -> None:
        self.measure, self.blocks, self.step = 0, 0, -1
        self.changes = ChangePoint()


class NodePace:
    """Follows the ranks of one node, by local rank: what was slow stays so when its process begins anew."""

    def __init__(self) -> None:
        self._ranks: dict[int, _Rank] = {}
        self._step = -1

    def restarted(self) -> None:
        """Another generation: other processes, the same machine."""
        self._step = -1
        for one in self._ranks.values():
            one.blocks = 0
            one.changes.begin_again()

    def read(self, local_rank: int, measure: int, costs: Sequence[float], step: int, at_s: float) -> None:
        """The costs of the newest blocks of a rank that has made ``step``."""
        one = self._ranks.setdefault(local_rank, _Rank())
        if measure != one.measure:
            one.measure, one.changes = measure, ChangePoint()
        self._step = max(self._step, step)
        for cost in costs:
            if one.changes.push(cost, at_s):
                one.step = step

    def beat(self, first_rank: int) -> PaceBeat:
        """What stands now."""
        ratios = [one.changes.ratio for one in self._ranks.values()]
        others = [one.changes.ratio for one in self._ranks.values() if one.changes.slow is None]
        if not others and sum(one > 0 for one in ratios) > 1:
            # All are slow, a little perhaps and for what all suffer: one may be far slower still, by itself.
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
    """A change that waits to be compared, or has been ``judged``."""

    slow: SlowRank
    since_s: float
    judged: bool = False


@dataclass(slots=True, eq=False)
class Paces(Levels):
    """What the beats say of paces and losses, by node; each finding is told once."""

    _heard: dict[str, _Heard] = field(default_factory=dict)
    _waiting: dict[tuple[str, int], _Waiting] = field(default_factory=dict)
    _broken_since: dict[str, tuple[int, float]] = field(default_factory=dict)
    _told: dict[tuple[str, str], int] = field(default_factory=dict)

    def heard(self, state: JobState, node: str, beat: Beat) -> bool:
        """A node's beat."""
        self.take(node, beat.generation, find(beat.parts, PaceBeat), find(beat.parts, LossBeat))
        return False

    def take(self, node: str, generation: int, pace: PaceBeat, loss: LossBeat) -> None:
        """What a node's beat tells."""
        if pace != _NO_PACE or loss.reporting or node in self._heard:
            self._heard[node] = _Heard(generation, pace, loss)

    def forget(self, node: str) -> None:
        """It is gone."""
        self._heard.pop(node, None)
        for key in [key for key in self._waiting if key[0] == node]:
            del self._waiting[key]

    def findings(self, state: JobState, now_us: int) -> Iterator[NoteSlow | NoteRecovered | NoteLoss | NoteLossJump]:
        """What is to be told now."""
        if state.job.live:
            yield from self.compared(state.world.worlds, state.stragglers.standing(), now_us / SECOND_US)

    def compared(
        self, worlds: Mapping[str, World], standing: Collection[tuple[str, int]], now_s: float
    ) -> Iterator[NoteSlow | NoteRecovered | NoteLoss | NoteLossJump]:
        """What is to be told now; ``standing``: the ranks that the log calls slow."""
        if not self._heard:
            return
        for group, world in worlds.items():
            current = {
                node: heard
                for node, heard in self._heard.items()
                if group_of(node) == group and world.active and heard.generation == world.generation
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
                    # Of an old one, the others hold themselves against what they are by now: nothing can be compared.
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
        """Once half of the others have made that step too, or for want of them after a while."""
        slow = waiting.slow
        others = [one for name, one in current.items() if name != node and one.pace.common]
        there = [one for one in others if one.pace.step >= slow.step]
        if 2 * len(there) < len(others) and now_s - waiting.since_s < LATE_S:
            return
        waiting.judged = True
        peers = median(one.pace.common for one in there) if there else heard.pace.others
        # Without anybody to compare with, nothing tells a slow machine from more work.
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
    """Does a change go beyond what the others' costs did?"""
    return math.log(jump / peers) > LINE if jump > 0 and peers > 0 else False
