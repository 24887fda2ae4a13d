"""Quotas by measured cost: a rank that computes more slowly takes fewer samples of each global batch, so that all end together.

The samples of a global batch are the same whatever the quotas are, and each weighs the same in the gradient. So quotas change how
long a step takes, and nothing else.

All ranks change their quotas in the same step. They tell each other what a sample costs them after a step that all know, and plan
the same from the same numbers; the plan begins some steps ahead, with a step that no loader process has planned yet.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from dlrover_core.data.quota import quotas

FIRST_STEPS = 5
"""Quotas are planned after so many steps for the first time."""
PLAN_S, PLAN_STEPS_MIN = 30.0, 20
"""A plan stands for so long, and for so many steps at least."""
SAMPLES, SAMPLES_MIN = 32, 3
"""Steps that a median is of."""
CHANGE = 1.05
"""Quotas change where the slowest rank's part of a step becomes shorter by this factor."""
LEAST_SHARE = 1 / 8
"""No rank takes less than this part of an equal share: what a hiccup is taken for ends with it."""


class Told(NamedTuple):
    """What one rank tells the others.

    cost_s: seconds of computing for one sample; 0: not known yet
    step_s: seconds of a whole step
    lead:   steps that its loader may have planned ahead
    """

    cost_s: float
    step_s: float
    lead: int


class Costs:
    """What samples cost this rank: medians over the newest steps, so that a hiccup is not taken for a slow rank."""

    def __init__(self) -> None:
        self._costs: deque[float] = deque(maxlen=SAMPLES)
        self._steps: deque[float] = deque(maxlen=SAMPLES)

    def step(self, samples: int, computing_s: float, took_s: float) -> None:
        """A step of ``took_s`` seconds in which this rank computed ``samples`` samples in ``computing_s`` seconds."""
        if samples > 0 and computing_s > 0:
            self._costs.append(computing_s / samples)
        self._steps.append(took_s)

    def forget(self) -> None:
        """Quotas have changed, and with them what a sample costs."""
        self._costs.clear()
        self._steps.clear()

    def told(self, lead: int) -> Told:
        """In numbers."""
        cost_s = median(self._costs) if len(self._costs) >= SAMPLES_MIN else 0.0
        return Told(cost_s, median(self._steps) if self._steps else 0.0, lead)


def balanced(now: Sequence[int], costs_s: Sequence[float]) -> tuple[int, ...]:
    """Quotas by which all ranks need equally long; the present ones where a cost is not known, or little would be won."""
    present = tuple(now)
    if len(costs_s) != len(present) or not all(math.isfinite(one) and one > 0 for one in costs_s):
        return present
    fair = len(present) / sum(1 / one for one in costs_s)
    better = quotas(sum(present), [max(fair / one, LEAST_SHARE) for one in costs_s])
    won = _slowest(present, costs_s) >= CHANGE * _slowest(better, costs_s)
    return better if won else present


def steps_until_next(step_s: float) -> int:
    """Steps between two plans; ``step_s``: seconds of one; 0: not known."""
    return max(PLAN_STEPS_MIN, round(PLAN_S / step_s)) if step_s > 0 else PLAN_STEPS_MIN


def _slowest(quota: Sequence[int], costs_s: Sequence[float]) -> float:
    return max(one * cost for one, cost in zip(quota, costs_s, strict=True))
