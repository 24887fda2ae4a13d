"""How many samples each epoch of a dataset had, where its source has grown: what a sum over epochs goes by.

A source grows between two runs of its ranks. The epoch in flight keeps the size that it began with, and the fingerprint of each
position says that size. A run resumes from a state of the lineage, so each change of size has a state beside it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from dlrover_core.data.cut import Place, size_in
from dlrover_core.job.lineage import Known, cut_of, place_of
from dlrover_core.job.shards import Terms


class Sizes(NamedTuple):
    """Samples by epoch.

    before: pairs (epoch, samples), ascending by epoch: epochs before that one, and after the pair before, had so many samples
    now:    samples of all later epochs; 0: unknown
    """

    before: tuple[tuple[int, int], ...] = ()
    now: int = 0

    def samples(self, earlier: Place | None, later: Place | None) -> int:
        """How many samples lie between two places; None: the beginning. 0: ``later`` is not later."""
        return max(0, self._up_to(later) - self._up_to(earlier))

    def _up_to(self, place: Place | None) -> int:
        if place is None:
            return 0
        found, epoch = place.position, 0
        for bound, size in self.before:
            end = min(bound, place.epoch)
            if end > epoch:
                found, epoch = found + (end - epoch) * size, end
        return found + (place.epoch - epoch) * self.now


def sizes_of(terms: Terms | None, known: Iterable[Known], name: str) -> Sizes:
    """The sizes of a dataset's epochs, as the states of its lineage say; ``known``: ascending. Without ``terms`` all are 0."""
    if terms is None:
        return Sizes()
    before: list[tuple[int, int]] = []
    for one in known:
        place = place_of(cut_of(one.cut), name)
        size = size_in(place.fingerprint) if place is not None else 0
        if place is None or not size or size == terms.size:
            continue
        # A position within an epoch is in the epoch's own size, and 0 is told with the size of the run.
        bound, counted = place.epoch + bool(place.position), terms._replace(size=size).counted
        if before and before[-1][1] == counted:
            before[-1] = bound, counted
        else:
            before.append((bound, counted))
    return Sizes(tuple(before), terms.counted)
