"""Which steps on storage go. Pure, and asked again from what lies there every time: no list that could be wrong."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

YOUNG_S = 600.0
"""A step that somebody wrote to in the last so many seconds may still become complete."""


class Stored(NamedTuple):
    """A step as it lies on storage. ``ours``: of this run, not of one before it. ``generation`` -1: nothing in it says so.

    ``age_s``: seconds since anything in it changed.
    """

    step: int
    complete: bool
    generation: int = -1
    ours: bool = True
    age_s: float = float("inf")

    @property
    def order(self) -> tuple[bool, int, int]:
        """Newer is greater: a job that went back to an earlier step has its newest states at smaller numbers."""
        return self.ours, self.generation, self.step


def to_go(steps: Iterable[Stored], keep: int) -> tuple[int, ...]:
    """The steps to remove so that the newest ``keep`` complete ones stay, oldest first; ``keep`` 0: all stay.

    Never the newest complete one. Of the incomplete ones those that are older than it go; of the younger ones the newest stays,
    and whatever somebody may still be writing.
    """
    if keep <= 0:
        return ()
    found = sorted(steps, key=lambda one: one.order)
    complete = [one for one in found if one.complete]
    if not complete:
        # Nothing is sure yet: what is there may be all there is.
        return ()
    going = complete[:-keep]
    younger = [one for one in found if not one.complete and one.order > complete[-1].order]
    for one in found:
        if not one.complete and one not in younger[-1:]:
            unsure = one in younger or one.generation < 0
            if not (unsure and one.age_s < YOUNG_S):
                going.append(one)
    return tuple(one.step for one in sorted(going, key=lambda one: one.order))
