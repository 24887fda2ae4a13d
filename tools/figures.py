"""Figures: trials of ours and of a peer, their median, the interval in which it lies, and whether a target is met.

A figure is a median. Its interval is that of order statistics: no assumption about the trials but that they are alike. With six
trials or more it holds the true median in at least 95 of 100 cases; with fewer it is all that was seen (five: 94, four: 88,
three: 75, two: 50 of 100). A ratio is the median of the ratios of pairs, of which each was measured in turn.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

Interval = tuple[float, float]

YES, NO, NOT_DECIDED = "yes", "no", "not decided"
MISSES = 0.05
COUNTS = frozenset({"faults", "jobs", "packages", "processes", "workers"})
"""Units of what is counted over all trials together: such a figure has no noise."""


def interval(values: Sequence[float], share: float = 0.5) -> Interval | None:
    """Where the median of such values lies, or another quantile. None: so few values say nothing about that."""
    count, ordered = len(values), sorted(values)

    def place(share: float) -> int:
        """The place, from 1, below which the quantile lies in at most 2.5 of 100 cases; 0: there is none."""
        below, found = 0.0, 0
        while found < count:
            below += math.comb(count, found) * share**found * (1 - share) ** (count - found)
            if below > MISSES / 2:
                break
            found += 1
        return found

    low, high = place(share), place(1 - share)
    if share == 0.5 and count > 1:
        low = high = max(low, 1)
    return (ordered[low - 1], ordered[count - high]) if low and high else None


def rate_interval(count: int, of: int) -> Interval:
    """Where the mean of a rare event's counts lies in 95 of 100 cases, seen ``count`` times in ``of`` trials; after Poisson."""

    def mean(target: float, most: int) -> float:
        """The mean with which at most so many are seen with this chance."""
        low, high = 0.0, 4.0 * most + 20.0
        for _ in range(60):
            middle = (low + high) / 2
            chance = sum(math.exp(-middle) * middle**one / math.factorial(one) for one in range(most + 1))
            low, high = (middle, high) if chance > target else (low, middle)
        return low

    return (mean(1 - MISSES / 2, count - 1) / of if count else 0.0), mean(MISSES / 2, count) / of


def share_interval(found: int, of: int) -> Interval:
    """Where a share lies in 95 of 100 cases, after Wilson."""
    z, share = 1.96, found / of
    middle = (share + z * z / (2 * of)) / (1 + z * z / of)
    half = z * math.sqrt(share * (1 - share) / of + z * z / (4 * of * of)) / (1 + z * z / of)
    return middle - half, middle + half


@dataclass(frozen=True, slots=True)
class Row:
    """One figure: trials of ours, of the peer if there is one, and the target that ours or the ratio must meet.

    ``of`` says what the target is about: ``ours`` or ``ratio`` (ours / peer); ``most``: it is an upper bound.
    ``settings``: which peer this is, and with what settings, where the result as a whole does not say so. ``constant``: nobody
    measured the peer's figure here, so there is no ratio. ``exact``: counted, or computed without chance, so there is no noise.
    ``n``: the trials behind the figure, where ``ours`` does not list them; ``within``: its interval, where a script knows better.
    """

    what: str
    unit: str
    ours: Sequence[float]
    peer: Sequence[float] = ()
    target: float | None = None
    of: str = "ours"
    most: bool = True
    settings: str = ""
    constant: bool = False
    exact: bool = False
    n: int = 0
    within: Interval | None = None

    @classmethod
    def stored(cls, told: Mapping[str, Any], *, constant: bool = False) -> Row:
        """From a result file, of whatever age; ``constant``: the result says so of its peer."""
        known = {one.name: told[one.name] for one in fields(cls) if told.get(one.name) is not None}
        return cls(**{**known, "constant": constant or bool(told.get("constant"))})

    @property
    def trials(self) -> int:
        """How many of ours."""
        return self.n or len(self.ours)

    @property
    def figure(self) -> float:
        """Ours, the median."""
        return statistics.median(self.ours)

    @property
    def peer_figure(self) -> float | None:
        """The peer's."""
        return statistics.median(self.peer) if self.peer else None

    @property
    def noiseless(self) -> bool:
        """Is it a count, or computed without chance?"""
        return self.exact or self.unit in COUNTS

    @property
    def ratios(self) -> list[float]:
        """Ours over the peer's, of each pair. Empty: there are none, the peer was not measured, or things were counted."""
        counted = self.unit in COUNTS
        if self.constant or counted or len(self.ours) != len(self.peer) or not all(self.peer):
            return []
        return [mine / theirs for mine, theirs in zip(self.ours, self.peer, strict=True)]

    @property
    def ratio(self) -> float | None:
        """The median of the pairs' ratios."""
        return statistics.median(self.ratios) if len(self.ratios) > 1 or (self.ratios and self.exact) else None

    @property
    def ratio_interval(self) -> Interval | None:
        """Where that lies."""
        return interval(self.ratios)

    @property
    def figure_interval(self) -> Interval | None:
        """Where ours lies."""
        return self.within or (None if self.noiseless else interval(self.ours))

    @property
    def verdict(self) -> str:
        """Is the target met? Empty: there is none. A target inside the noise is not decided."""
        if self.target is None:
            return ""
        value = self.ratio if self.of == "ratio" else self.figure
        if value is None:
            return NOT_DECIDED
        between = self.ratio_interval if self.of == "ratio" else self.figure_interval
        if between is None:
            if not self.noiseless:
                return NOT_DECIDED
            between = (value, value)
        best, worst = between if self.most else (-between[1], -between[0])
        target = self.target if self.most else -self.target
        return YES if worst <= target else NO if best > target else NOT_DECIDED

    def target_text(self) -> str:
        """The target in words."""
        if self.target is None:
            return ""
        unit = "x" if self.of == "ratio" else f" {self.unit}" * bool(self.unit)
        return f"{'<=' if self.most else '>='} {number(self.target)}{unit}"

    def ours_text(self) -> str:
        """Ours with its interval."""
        return f"{number(self.figure)} {self.unit}".rstrip() + between_text(self.figure_interval)

    def peer_text(self) -> str:
        """The peer's, and what it is."""
        if self.peer_figure is None:
            return self.settings
        said = self.settings or ("a constant, not run here" if self.constant else "")
        return f"{number(self.peer_figure)} {self.unit}".rstrip() + (f"; {said}" if said else "")

    def ratio_text(self) -> str:
        """The ratio with its interval."""
        return f"{number(self.ratio)}x{between_text(self.ratio_interval)}" if self.ratio is not None else ""


def between_text(between: Interval | None) -> str:
    """An interval, after a figure."""
    return f" ({number(between[0])} to {number(between[1])})" if between is not None else ""


def number(value: float | None) -> str:
    """Three figures, without an exponent."""
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
