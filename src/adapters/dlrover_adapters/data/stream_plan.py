"""Which messages of several partitions are whose: batch after batch, each takes the next messages of every partition. Pure.

What a batch takes of a partition is its share in all that can be read, so no partition falls behind because others have fewer
messages. After each batch what was consumed is one offset for each partition.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from dlrover_core.data.streams import Extent

Counts = tuple[tuple[str, int], ...]
"""Of each partition, in order, so many messages."""
Holes = Mapping[str, Sequence[Extent]]
"""For each partition, the ranges of offsets whose messages are gone, as `dlrover_core.data.streams.Holed` names them."""


class Run(NamedTuple):
    """``many`` messages of a partition, from ``offset`` on."""

    partition: str
    offset: int
    many: int


class Planned(NamedTuple):
    """One batch.

    start: the position of its first message.
    runs: where its messages are, in the order of positions.
    end: the position after its last message.
    after: the offset of each partition once the batch is consumed.
    """

    start: int
    runs: tuple[Run, ...]
    end: int
    after: Mapping[str, int]

    def pieces(self, start: int, end: int) -> list[Run]:
        """Where the messages at positions [``start``, ``end``) of this batch are."""
        found, at = [], self.start
        for run in self.runs:
            first, last = max(start, at), min(end, at + run.many)
            if first < last:
                found.append(Run(run.partition, run.offset + first - at, last - first))
            at += run.many
        return found


def divided(
    extents: Mapping[str, Extent], offsets: Mapping[str, int], batch: int, most: int, holes: Holes | None = None
) -> list[Counts]:
    """As many batches of ``batch`` messages as can be read now, at most ``most``."""
    left = {
        one: _present(offsets[one], extents[one].end, (holes or {}).get(one, ()))
        for one in sorted(offsets)
        if one in extents
    }
    total, found = sum(left.values()), list[Counts]()
    while total >= batch and len(found) < most:
        share = {one: batch * many // total for one, many in left.items()}
        rest = batch - sum(share.values())
        for one in sorted(left, key=lambda one: (-(batch * left[one] % total), one))[:rest]:
            share[one] += 1
        for one, many in share.items():
            left[one] -= many
        total -= batch
        found.append(tuple((one, many) for one, many in share.items() if many))
    return found


def _present(offset: int, end: int, holes: Sequence[Extent]) -> int:
    """How many messages there are from ``offset`` to ``end``."""
    gone = sum(max(0, min(one.end, end) - max(one.first, offset)) for one in holes)
    return max(0, end - offset) - gone


def _runs(run: Run, holes: Sequence[Extent]) -> Iterator[Run]:
    """So many messages from there on, over what is gone."""
    partition, offset, many = run
    for hole in holes:
        before = min(many, max(0, hole.first - offset))
        if before:
            yield Run(partition, offset, before)
        many -= before
        if not many:
            return
        offset = max(offset, hole.end)
    yield Run(partition, offset, many)


class Book:
    """The batches that are planned and not consumed yet, from a position on.

    position: so many messages are consumed. offsets: of each partition, the first message that is not consumed.
    """

    def __init__(self, position: int, offsets: Mapping[str, int]) -> None:
        self.position, self.offsets = position, dict(offsets)
        self.planned_to = dict(offsets)
        """Of each partition, the first message that is in no planned batch."""
        self._planned: deque[Planned] = deque()

    @property
    def end(self) -> int:
        """The position up to which batches are planned."""
        return self._planned[-1].end if self._planned else self.position

    @property
    def planned(self) -> Sequence[Planned]:
        """The batches that are planned and not consumed, in order."""
        return self._planned

    def add(self, begin: Mapping[str, int], batches: Sequence[Counts], holes: Holes | None = None) -> None:
        """More batches, from the offsets ``begin`` on."""
        now, start, gone = dict(begin), self.end, holes or {}
        if not self._planned:
            self.offsets = dict(begin)
        for counts in batches:
            runs = tuple(run for one, many in counts for run in _runs(Run(one, now[one], many), gone.get(one, ())))
            now = {**now, **{run.partition: run.offset + run.many for run in runs}}
            ends = list(accumulate((many for _, many in counts), initial=start))
            self._planned.append(Planned(start, runs, ends[-1], now))
            start = ends[-1]
        self.planned_to = now

    def batch_at(self, start: int) -> Planned:
        """The planned batch that begins at a position."""
        return next(one for one in self._planned if one.start == start)

    def consume(self, position: int) -> None:
        """All batches before ``position`` are consumed."""
        while self._planned and self._planned[0].end <= position:
            self.offsets = dict(self._planned.popleft().after)
        self.position = position
