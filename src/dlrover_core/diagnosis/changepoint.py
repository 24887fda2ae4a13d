"""Change points in what one rank computes: from when on does it take longer than it did?

What comes in are *blocks*: the median cost of `BLOCK_STEPS` steps, in seconds (of more where a step takes less than 10 ms, and
then everything counted in steps below is more by as much). A *window* is four blocks, twenty steps, and its
value the mean of the middle two. A rank is slower when each of the three newest windows, side by side, lies above the baseline
by more than `LINE`, and by more than `MADS` deviations. All of it in logarithms: slower by a tenth is the same everywhere.

The arithmetic behind it. A change of `SOUGHT` must be found, so the line is drawn half-way to it, at 1.049 (on the line itself
half of the windows would fall short): noise has as much room below as above. Windows are looked at after every block, and one
counts as slow once most of its steps are: 60 steps of evidence are complete 50 to 55 steps after the change. Three
windows that each exceed five deviations (3.4 sigma) by chance: 5e-11 a look. Where steps are noisy, five deviations are more
than the change: then longer windows, of 2 to 16 times as many steps, find it later (`SCALES`).

The baseline is the median of 64 windows: the first ones, then one in `SPACING_S` at most, so that it spans half an hour and
follows the day. Deviations are those of windows from one to the next, which a drift does not inflate. A window enters the
baseline 60 steps late, and never while it looks slow: what is to be found must not teach what is normal. A rank that gets
*faster* begins anew, and so does one that was found slower, on its new level: so a second change is found as well. Until there is
a baseline of the new level, of sixteen windows, they are held against the level itself, with more room (`UNSURE`). Otherwise what
changes within those 320 steps would be learnt as normal, and a rank three times as slow never be found where a smaller change,
of all ranks perhaps, came just before.

Bounded memory (about 800 numbers a rank), constant work per block, no clock, no randomness.
"""

from __future__ import annotations

import math
from collections import deque
from itertools import pairwise
from statistics import median
from typing import NamedTuple

BLOCK_STEPS = 5
BLOCKS = 4  # of a window
WINDOWS = 3  # that must agree
SOUGHT = 1.10
LINE = math.log(SOUGHT) / 2
MADS = 5.0
MAD_LEAST = 0.003
MIDDLE = 0.55  # the deviation of the mean of the middle two of four, of that of one
SCALES = 5
HISTORY = 64
HISTORY_LEAST = 16
UNSURE = 2.0  # so many times the deviation while three windows are all that is known of a level
WARM_UP = 4  # blocks: the first steps compile, allocate, fill caches
SPACING_S = 30.0


class Change(NamedTuple):
    """A rank takes ``now_s`` a step, where it took ``before_s``; seen over the ``steps`` newest."""

    before_s: float
    now_s: float
    steps: int

    @property
    def times(self) -> float:
        """How many times as long."""
        return self.now_s / self.before_s


class _Scale:
    """Windows of one length: the newest three, and the baseline that they are held against."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks  # that one value of this scale is made of
        self.newest: deque[float] = deque(maxlen=BLOCKS)
        self.middles: deque[float] = deque(maxlen=BLOCKS * (WINDOWS - 1) + 1)  # a window's value, after every block
        self.half: float | None = None
        self._history: deque[float] = deque(maxlen=HISTORY)
        self._apart: deque[float] = deque(maxlen=HISTORY)
        self._pushed = 0
        self._next_at = -math.inf
        # Not known, or until `ready` those of the level that this one began on.
        self.base = self.reach = math.nan

    def push(self, value: float) -> float | None:
        """Take one value; with every second one, their mean is the next scale's."""
        if self.newest:
            self._apart.append(abs(value - self.newest[-1]))
        self.newest.append(value)
        self._pushed += 1
        if len(self.newest) == BLOCKS:
            self.middles.append(_middle(sorted(self.newest)))
        if self.half is None:
            self.half = value
            return None
        pair, self.half = (self.half + value) / 2, None
        return pair

    @property
    def full(self) -> bool:
        return len(self.middles) == BLOCKS * (WINDOWS - 1) + 1

    @property
    def ready(self) -> bool:
        """Is there a baseline?"""
        return len(self._history) >= HISTORY_LEAST

    @property
    def room(self) -> float:
        """How far a window must be from ``base`` to count; nothing is while there is none."""
        return self.reach if self.ready else UNSURE * self.reach

    def windows(self) -> tuple[float, ...]:
        """The values of the newest windows, side by side, oldest first."""
        return tuple(self.middles)[::BLOCKS]

    def admit(self, window: float, at_s: float) -> None:
        """Let the oldest of the windows teach what is normal, one of each stretch of steps."""
        if self._pushed % BLOCKS or (at_s < self._next_at and len(self._history) == HISTORY):
            return
        self._next_at = at_s + SPACING_S
        history = self._history
        history.append(window)
        if self.ready:
            values = list(history)
            self.base = median(values)
            apart = median(abs(one - before) for before, one in pairwise(values))
            # The fewer windows are known, the less their deviation is.
            mads = MADS * (1 + 4 / len(history))
            # What single blocks say of it is less exact, but there are four times as many.
            alone = MIDDLE * median(self._apart)
            self.reach = max(LINE, mads * max(MAD_LEAST, max(apart, alone) / math.sqrt(2)))


def _middle(values: list[float]) -> float:
    """The mean of the two in the middle, of four in order."""
    return (values[1] + values[2]) / 2


class ChangePoint:
    """Follows one rank. ``number`` counts the changes found; ``slow`` is what stands, None while it computes as it did.

    ``jump``: how many times as long as just before it took with the newest change; peers may have made the same one.
    """

    def __init__(self) -> None:
        self.number = 0
        self.jump = 1.0
        self.slow: Change | None = None
        self._blocks = 0
        self._scales = [_Scale(2**power) for power in range(SCALES)]
        self._base: float | None = None  # what it was held against last, until there is a new baseline
        self._over = (0, 0.0)
        self._found_at = -math.inf

    def push(self, cost_s: float, at_s: float) -> bool:
        """Take the cost of the next block, seen at ``at_s`` on any clock; True when a change is found with it."""
        self._blocks += 1
        if self._blocks <= WARM_UP or not cost_s > 0 or not math.isfinite(cost_s):
            return False
        value: float | None = math.log(cost_s)
        found = False
        for number, scale in enumerate(self._scales):
            if value is None:
                break
            value = scale.push(value)
            if scale.full and self._look(number, scale, at_s):
                found = True
                break
        if self.slow is not None and not found:
            self._mind_end()
        return found

    def begin_again(self) -> None:
        """Another process on the same machine: what is normal is learnt anew, what was found to be slow stays so."""
        self._blocks, self._base, self._found_at = 0, None, -math.inf
        self._scales = [_Scale(2**power) for power in range(SCALES)]

    def _look(self, number: int, scale: _Scale, at_s: float) -> bool:
        windows, level = scale.windows(), sorted(scale.windows())[1]
        # Without a base it is not a number, and neither more nor less than anything.
        above, below = scale.base + scale.room, scale.base - scale.room
        if min(windows) > above:
            self._found(number, scale, level)
            return True
        if max(windows) < below:
            self._begin_anew(number, level, level)
            return False
        if not max(windows[1:]) > above:
            scale.admit(windows[0], at_s)
        return False

    def _found(self, number: int, scale: _Scale, level: float) -> None:
        # A second change before the first has a baseline: peers still hold themselves against what was before both.
        base = self._usual if self._usual is not None and not scale.ready else scale.base
        before = self.slow.before_s if self.slow is not None else math.exp(base)
        steps = BLOCK_STEPS * BLOCKS * WINDOWS * scale.blocks
        self.number += 1
        self._found_at = self._blocks
        self.jump = math.exp(level - base)
        self.slow = Change(before, math.exp(level), steps)
        # It is over below the middle of what was and what is, seen at the scale that saw it.
        self._over = (number, (math.log(before) + level) / 2)
        self._begin_anew(number, level, base)

    def _begin_anew(self, number: int, level: float, base: float) -> None:
        """On the level that is now; `ratio` compares with ``base`` until that has a baseline of its own."""
        self._base = base
        fresh = [_Scale(2**power) for power in range(SCALES)]
        for scale, before in zip(fresh[: number + 1], self._scales, strict=False):
            # All of the new level, for longer windows have seen it too.
            scale.newest, scale.middles = before.newest, before.middles
            scale.base, scale.reach = level, before.reach
        self._scales = fresh

    def _mind_end(self) -> None:
        number, line = self._over
        scale = self._scales[number]
        if scale.full and max(scale.windows()) < line:
            self.slow = None

    @property
    def _usual(self) -> float | None:
        """What `ratio` compares with."""
        return self._scales[0].base if self._scales[0].ready else self._base

    @property
    def fresh(self) -> bool:
        """Is the newest change so new that peers who made it too are still held against what they were before?"""
        return self._blocks - self._found_at < HISTORY_LEAST * BLOCKS

    @property
    def ratio(self) -> float:
        """What it takes now over what it took, by the 60 newest steps; 0.0 while that is not known."""
        scale, base = self._scales[0], self._usual
        if base is None or not scale.full:
            return 0.0
        return math.exp(sorted(scale.windows())[1] - base)
