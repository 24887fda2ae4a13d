"""Which batch comes next in an epoch, and which of its positions each rank takes.

A global step takes the next B positions of the epoch's order. Which rank takes which follows from the batch, the world and the
quotas, so ranks ask nobody, and the samples of a batch are the same at every world size.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate
from math import isfinite
from typing import Literal, NamedTuple

from dlrover_core.data.ranges import POSITION_MAX
from dlrover_core.errors import SpecError

DROP: Literal["drop"] = "drop"
KEEP: Literal["keep"] = "keep"
Last = Literal["drop", "keep"]
"""What becomes of an epoch's remainder that fills no batch: left out, or a short batch."""

NO_EPOCH = (-1, 0)


class Batch(NamedTuple):
    """The positions [start, end) of ``epoch``'s order: one global batch."""

    epoch: int
    start: int
    end: int

    @property
    def samples(self) -> int:
        """How many samples it has."""
        return self.end - self.start


class Batches(NamedTuple):
    """The global batches of ``epochs`` epochs. Make it with `batches`, which checks.

    size: samples of an epoch.
    batch: samples of a global batch.
    epochs: how many; 0: without end.
    last: what becomes of the remainder, ``"drop"`` or ``"keep"``.
    in_flight: an epoch that began before the data grew, and its samples; no number of steps or batches below counts it.
    """

    size: int
    batch: int
    epochs: int = 1
    last: Last = KEEP
    in_flight: tuple[int, int] = NO_EPOCH

    def size_of(self, epoch: int) -> int:
        """Samples of an epoch."""
        return self.in_flight[1] if epoch == self.in_flight[0] else self.size

    @property
    def steps_per_epoch(self) -> int:
        """Batches in an epoch."""
        return self.size // self.batch if self.last == DROP else -(-self.size // self.batch)

    @property
    def steps(self) -> int:
        """Batches in all epochs; 0: without end."""
        return self.steps_per_epoch * self.epochs

    def next(self, epoch: int, position: int) -> Batch | None:
        """The batch that a step takes where [0, ``position``) of ``epoch`` is consumed; None: the data has ended."""
        size = self.size_of(epoch)
        end = min(position + self.batch, size)
        short = end - position < self.batch
        if position >= size or (short and self.last == DROP):
            epoch, position, end = epoch + 1, 0, min(self.batch, self.size)
        return None if self.epochs and epoch >= self.epochs else Batch(epoch, position, end)

    def after(self, batch: Batch) -> tuple[int, int]:
        """Epoch and position once ``batch`` is consumed. The end of an epoch is told as position 0 of the next one."""
        left = self.size_of(batch.epoch) - batch.end
        if left <= 0 or (self.last == DROP and left < self.batch):
            return batch.epoch + 1, 0
        return batch.epoch, batch.end

    def at(self, step: int) -> Batch | None:
        """The batch of global step ``step`` (the first is 0), where every step had ``batch`` samples; None: behind the end."""
        epoch, number = divmod(step, self.steps_per_epoch)
        if step < 0 or (self.epochs and epoch >= self.epochs):
            return None
        return Batch(epoch, number * self.batch, min((number + 1) * self.batch, self.size))


def batches(
    size: int, batch: int, *, epochs: int = 1, last: str = KEEP, in_flight: tuple[int, int] = NO_EPOCH
) -> Batches:
    """The global batches of a dataset of ``size`` samples.

    Raises: SpecError where there are no samples or no batch, or ``last`` is neither ``"drop"`` nor ``"keep"``.
    """
    if not 1 <= size <= POSITION_MAX:
        raise SpecError("size", f"{size} samples: give a dataset of 1 to 2^62")
    if batch < 1:
        raise SpecError("global_batch", f"{batch}: give 1 or more samples")
    if epochs < 0:
        raise SpecError("epochs", f"{epochs}: give 1 or more, or 0 for data without end")
    if last not in {DROP, KEEP}:
        raise SpecError("last", f'{last!r}: give "drop" or "keep"')
    if last == DROP and batch > size:
        message = (
            f'{batch} is more than the {size} samples of an epoch, and last="drop" leaves no batch: give last="keep"'
        )
        raise SpecError("global_batch", message)
    return Batches(size, batch, epochs, DROP if last == DROP else KEEP, in_flight)


def quotas(batch: int, ranks: int | Sequence[float]) -> tuple[int, ...]:
    """How many samples of a global batch each rank takes: in sum ``batch``, at least 1 each.

    ``ranks``: the world size, or each rank's weight (its speed, in any unit).
    Raises: SpecError where the batch is smaller than the world, or a weight is not a positive number.
    """
    weights = _weights(ranks)
    if batch < len(weights):
        message = (
            f"{batch} is less than the world size of {len(weights)}: give at least one sample per rank, or fewer ranks"
        )
        raise SpecError("global_batch", message)
    if isinstance(ranks, int):
        each, more = divmod(batch, ranks)
        return (each + 1,) * more + (each,) * (ranks - more)
    found = shares(batch, weights)
    while 0 in found:
        # Who would get nothing gets one from the rank that has the most, the lowest such rank.
        most = found.index(max(found))
        found[found.index(0)] = 1
        found[most] -= 1
    return tuple(found)


def slots(count: int, quota: Sequence[int], rank: int) -> tuple[int, int]:
    """Which positions of a batch are ``rank``'s: [start, end), counted from the batch's first.

    ``count``: samples in the batch. A full one is divided as ``quota`` says; of a short one each rank gets as large a share, or
    nothing.
    Raises: SpecError where there is no such rank.
    """
    if not 0 <= rank < len(quota):
        raise SpecError("rank", f"{rank}: the quotas are of ranks 0 to {len(quota) - 1}")
    mine = quota if count == sum(quota) else shares(count, _weights(quota))
    start = sum(mine[:rank])
    return start, start + mine[rank]


def shares(count: int, weights: Sequence[Fraction]) -> list[int]:
    """``count`` divided by ``weights``, by largest remainder; of equal remainders the lowest rank's comes first."""
    total = sum(weights, Fraction(0))
    exact = [count * one / total for one in weights]
    found = [int(one) for one in exact]
    by_remainder = sorted(range(len(exact)), key=lambda at: (found[at] - exact[at], at))
    for at in by_remainder[: count - sum(found)]:
        found[at] += 1
    return found


def offsets(quota: Sequence[int]) -> tuple[int, ...]:
    """Where each rank's samples begin in the batch, and where the last one's end."""
    return (0, *accumulate(quota))


def _weights(ranks: int | Sequence[float]) -> list[Fraction]:
    if isinstance(ranks, int):
        if ranks < 1:
            raise SpecError("world", f"{ranks}: give 1 or more ranks")
        return [Fraction(1)] * ranks
    if not ranks:
        raise SpecError("weights", "there are none: give one for each rank")
    for rank, one in enumerate(ranks):
        if not (isfinite(one) and one > 0):
            raise SpecError("weights", f"{one} of rank {rank}: give a positive number")
    return [Fraction(one) for one in ranks]
