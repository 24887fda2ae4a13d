"""Which positions a rank takes in each global step, in which micro-batches, and how many micro-batches all ranks run. Pure.

The process that trains and each of its loader processes make the same plan from the same numbers, so they tell each other
nothing: the k-th item that a loader yields is the k-th micro-batch of the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import NamedTuple

from dlrover_core.data.quota import Batch, Batches, offsets, quotas, shares
from dlrover_core.errors import SpecError


class Division(NamedTuple):
    """How a global batch is divided. Make it with `division`, which checks.

    global_batch: samples of a global step.
    micro_batch: samples of a micro-batch, at most.
    quota: samples of a full global batch that each rank takes.
    rank: whose plan it is.
    """

    global_batch: int
    micro_batch: int
    quota: tuple[int, ...]
    rank: int

    @property
    def world(self) -> int:
        """How many ranks."""
        return len(self.quota)


class Micro(NamedTuple):
    """One micro-batch: the positions [start, end) of the epoch's order. ``counts`` False: a stand-in of weight zero."""

    start: int
    end: int
    counts: bool = True

    @property
    def samples(self) -> int:
        """Samples that count."""
        return self.end - self.start if self.counts else 0


class GlobalStep(NamedTuple):
    """What a rank does in one global step.

    batch: the positions that all ranks take together.
    micros: what this rank loads, never nothing: a rank without samples loads one stand-in.
    rounds: how many micro-batches the rank with the most has.
    """

    batch: Batch
    micros: tuple[Micro, ...]
    rounds: int


def division(global_batch: int, micro_batch: int, world: int, rank: int) -> Division:
    """Equal quotas for all ranks; the first ones take one sample more where the batch does not divide.

    Raises: SpecError for a global batch smaller than the world, or numbers that are no counts.
    """
    given: tuple[tuple[str, object], ...] = (("global_batch", global_batch), ("micro_batch", micro_batch))
    for field, value in given:
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise SpecError(field, f"{value!r}: give 1 or more samples")
    return Division(global_batch, micro_batch, quotas(global_batch, world), rank)


def steps(
    batches: Batches,
    of: Division,
    epoch: int,
    position: int,
    quota_at: Callable[[int], tuple[int, ...]] | None = None,
) -> Iterator[GlobalStep]:
    """The global steps from here to the end of the data, as ``of.rank`` takes them.

    ``quota_at``: the quota of a step, the first from here being 0, asked when the step is planned; None: all have the division's.
    """
    full, number = _shared(of, of.global_batch), -1
    while (batch := batches.next(epoch, position)) is not None:
        number += 1
        if quota_at is not None and (quota := quota_at(number)) != of.quota:
            of = of._replace(quota=quota)
            full = _shared(of, of.global_batch)
        start, end, rounds = full if batch.samples == of.global_batch else _shared(of, batch.samples)
        yield GlobalStep(batch, _micros(batch, start, end, of.micro_batch), rounds)
        epoch, position = batches.after(batch)


def _shared(of: Division, count: int) -> tuple[int, int, int]:
    """This rank's part of a batch of ``count`` samples, and the rounds of all ranks."""
    mine = of.quota if count == of.global_batch else tuple(shares(count, [Fraction(one) for one in of.quota]))
    ends = offsets(mine)
    return ends[of.rank], ends[of.rank + 1], -(-max(mine) // of.micro_batch)


def _micros(batch: Batch, start: int, end: int, size: int) -> tuple[Micro, ...]:
    if start == end:
        return (Micro(batch.start, batch.start + 1, counts=False),)
    first, last = batch.start + start, batch.start + end
    return tuple(Micro(at, min(at + size, last)) for at in range(first, last, size))
