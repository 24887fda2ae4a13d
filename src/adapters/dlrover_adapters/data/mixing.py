"""Mixtures: which source, and which of its samples, comes at a position is a function of the position alone.

Weights are turned into whole numbers of samples in a block of positions, as few as the weights allow: 0.7 and 0.3 are 7 and 3 of
10. Within a block each source's samples are spread evenly, so any batch holds each source's share, to one sample. A source has
epochs of its own: once its samples have all come, they come again in another order. Which ones those are follows from the
position as well, so a mixture resumes as any other dataset does, and the position is all that is saved.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from dlrover_adapters.data.orders import order_of
from dlrover_adapters.data.source import Source, as_source, fingerprint
from dlrover_core.data.permutation import FILE, SEED_MAX, SHUFFLED, WINDOW, Order, key_of
from dlrover_core.data.quota import quotas
from dlrover_core.errors import SpecError

BLOCK_MAX = 10_000
"""Weights that need a larger block are rounded to it."""
SUM_OFF_MAX = 1e-6
"""Weights are given as decimal fractions: 1/3 three times is 0.9999..."""


class Mixture:
    """Samples of several sources, by weight. Made by `mixed`. Its order is its own: give it to a dataset as it is."""

    fixed_order = True
    chunk = 1

    def __init__(self, sources: list[Source], shares: tuple[int, ...], size: int, *, seed: int, order: str) -> None:
        self.sources, self.shares, self.size, self.seed, self.order = sources, shares, size, seed, order
        self.epoch = 0
        self.block = sum(shares)
        self._pattern = _spread(shares)
        self._orders: dict[int, tuple[int, Order]] = {}
        self._other: Mixture | None = None
        """The samples of the epoch that was asked for last."""

    def __len__(self) -> int:
        return self.size

    @property
    def waits(self) -> bool:
        """May a sample be waited for?"""
        return any(getattr(one, "waits", False) for one in self.sources)

    def of_epoch(self, epoch: int) -> Mixture:
        """The samples of another epoch: it goes on where the one before ended."""
        if epoch == self.epoch:
            return self
        if self._other is None or self._other.epoch != epoch:
            self._other = copy.copy(self)
            self._other.epoch, self._other._other, self._other._orders = epoch, None, {}
        return self._other

    def drawn(self, position: int) -> tuple[int, int, int]:
        """What comes at ``position``: the source's number, the source's epoch, and the index of the sample in the source."""
        if not 0 <= position < self.size:
            raise IndexError(f"position {position}: there are 0 to {self.size - 1}")
        block, slot = divmod(self.epoch * self.size + position, self.block)
        number, before = self._pattern[slot]
        source = self.sources[number]
        epoch, place = divmod(block * self.shares[number] + before, len(source))
        at, order = self._orders.get(number, (-1, None))
        if at != epoch or order is None:
            chunk, window = getattr(source, "chunk", 1), getattr(source, "window", WINDOW)
            name = FILE if getattr(source, "fixed_order", False) else self.order
            order = order_of(len(source), key_of(self.seed, number), epoch, chunk=chunk, window=window, order=name)
            self._orders[number] = epoch, order
        return number, epoch, next(order.indices(place, place + 1))

    def __getitem__(self, position: int) -> Any:
        number, epoch, index = self.drawn(position)
        source = self.sources[number]
        return (source.of_epoch(epoch) if hasattr(source, "of_epoch") else source)[index]

    def fingerprint_at(self, size: int) -> str:
        """The sources' fingerprints, their shares and the seed. A mixture of grown sources is another one."""
        parts = [
            f"{share} of {one.fingerprint_at(len(one))}" for share, one in zip(self.shares, self.sources, strict=True)
        ]
        return fingerprint("mixed", size, [*parts, f"{self.size} {self.seed} {self.order}"])


def mixed(weights: Mapping[Any, float], *, size: int = 0, seed: int = 0, order: str = SHUFFLED) -> Mixture:
    """A mixture of sources by weight: ``mixed({books: 0.7, code: 0.3})``. Sources that cannot be keys: `mixed_of`.

    size: samples of an epoch; 0: until each source has come once at least. order: of each source, ``"shuffled"`` or ``"file"``.
    Raises: SpecError where the weights are not positive or do not sum to 1.
    """
    return mixed_of(list(weights), list(weights.values()), size=size, seed=seed, order=order)


def mixed_of(
    sources: list[Any], weights: list[float], *, size: int = 0, seed: int = 0, order: str = SHUFFLED
) -> Mixture:
    """The same with sources and weights side by side."""
    if len(sources) != len(weights) or not sources:
        message = f"{len(weights)} for {len(sources)} sources: give one source at least, and a weight for each"
        raise SpecError("weights", message)
    for at, one in enumerate(weights):
        if not (math.isfinite(one) and one > 0):
            raise SpecError("weights", f"{one} of source {at}: give a positive number, or leave the source out")
    if abs(sum(weights) - 1) > SUM_OFF_MAX:
        told = " + ".join(f"{one:g}" for one in weights[:8]) + (" + ..." if len(weights) > 8 else "")
        fair = ", ".join(f"{one / sum(weights):.4g}" for one in weights[:8])
        raise SpecError("weights", f"{told} is {sum(weights):g}: give weights that sum to 1, such as {fair}")
    if size < 0:
        raise SpecError("size", f"{size}: give 1 or more samples, or 0 for all of each source")
    if not 0 <= seed <= SEED_MAX:
        raise SpecError("seed", f"{seed}: give 0 to 2^64 - 1")
    if order not in {SHUFFLED, FILE}:
        raise SpecError("order", f'{order!r}: give "{SHUFFLED}" or "{FILE}"')
    found = [as_source(one) for one in sources]
    shares = _shares(weights)
    if not size:
        block = sum(shares)
        size = max(-(-len(one) * block // share) for one, share in zip(found, shares, strict=True))
    return Mixture(found, shares, size, seed=seed, order=order)


def _shares(weights: list[float]) -> tuple[int, ...]:
    """Whole numbers in the proportion of ``weights``: exact where their sum is `BLOCK_MAX` at most, rounded to it where not."""
    exact = [Fraction(one).limit_denominator(BLOCK_MAX) for one in weights]
    block = math.lcm(*(one.denominator for one in exact))
    if block <= BLOCK_MAX and sum(exact) == 1 and all(exact):
        return tuple(int(one * block) for one in exact)
    for at, one in enumerate(weights):
        if one < 1 / BLOCK_MAX:
            message = (
                f"{one:g} of source {at} is less than one of {BLOCK_MAX} samples: give more, or leave the source out"
            )
            raise SpecError("weights", message)
    return quotas(BLOCK_MAX, weights)


def _spread(shares: tuple[int, ...]) -> list[tuple[int, int]]:
    """For each slot of a block its source, and how many of that source come before it in the block."""
    slots = [((2 * at + 1) / (2 * share), number, at) for number, share in enumerate(shares) for at in range(share)]
    return [(number, at) for _, number, at in sorted(slots)]
