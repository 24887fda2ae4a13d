"""The order of an epoch: a seeded permutation that is computed and never stored.

Samples lie in **chunks** of ``chunk`` neighbours. A permutation of the chunks says in which order they are read. ``window``
chunks that follow one another in that order are open at a time, and a second permutation mixes their samples. So files are read
in runs, and neighbours in a batch come from many places. With ``chunk=1``, the default, all samples are permuted as one.

Each permutation is a Feistel network over the smallest power of two that holds its domain. Values outside of the domain go
through the network again until they are inside ("cycle walking", Black and Rogaway 2002; in the mean a value goes through fewer
than two times). An index costs O(1) time and memory, whatever the size is, and the network runs backwards as well:
`Order.position` is the inverse.

Where the size is no multiple of the chunk the last chunk is short. It has a place in the permuted order as the others have, and
positions behind it move up: the order has no holes.

The numbers are pinned by tests: a changed constant would give another order to runs that are under way.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, SupportsIndex

from dlrover_core.data.ranges import POSITION_MAX
from dlrover_core.errors import SpecError

SHUFFLED = "shuffled"
FILE = "file"
"""The order in which the samples lie."""
WINDOW = 64
"""Chunks that are mixed at a time."""
ROUNDS, ROUNDS_SMALL, SMALL = 8, 24, 256
"""Rounds of a network; of one over at most 256 values, whose halves are too short to be mixed by 8: pairs come out unevenly."""
SEED_MAX = 2**64 - 1

MASK = 2**64 - 1
# Of splitmix64 (Steele, Lea, Flood 2014): the golden ratio, and the multipliers of its finalizer.
GOLDEN = 0x9E3779B97F4A7C15
FIRST = 0xBF58476D1CE4E5B9
SECOND = 0x94D049BB133111EB


def mix(value: int) -> int:
    """64 bits, each of which depends on each of ``value``'s (splitmix64's finalizer)."""
    value = (value ^ value >> 30) * FIRST & MASK
    value = (value ^ value >> 27) * SECOND & MASK
    return value ^ value >> 31


def key_of(*numbers: int) -> int:
    """64 bits that depend on each of ``numbers`` and on their order."""
    key = 0
    for one in numbers:
        key = mix((key + GOLDEN & MASK) ^ mix(one & MASK))
    return key


class Feistel(NamedTuple):
    """A permutation of 0 .. ``size`` - 1. Make it with `feistel`.

    left, right: bits of the two halves, the right one has as many or one more.
    keys: one for each round.
    """

    size: int
    left: int
    right: int
    keys: tuple[int, ...]

    def forward(self, value: int) -> int:
        """Where ``value`` goes."""
        if self.size <= 1:
            return value
        left_mask, right_mask, bits = (1 << self.left) - 1, (1 << self.right) - 1, self.right
        while True:
            left, right = value >> bits, value & right_mask
            for at, key in enumerate(self.keys):
                if at & 1:
                    right ^= _round(left, key) & right_mask
                else:
                    left ^= _round(right, key) & left_mask
            value = left << bits | right
            if value < self.size:
                return value

    def backward(self, value: int) -> int:
        """What goes to ``value``."""
        if self.size <= 1:
            return value
        left_mask, right_mask, bits = (1 << self.left) - 1, (1 << self.right) - 1, self.right
        while True:
            left, right = value >> bits, value & right_mask
            for at in reversed(range(len(self.keys))):
                if at & 1:
                    right ^= _round(left, self.keys[at]) & right_mask
                else:
                    left ^= _round(right, self.keys[at]) & left_mask
            value = left << bits | right
            if value < self.size:
                return value


def feistel(size: int, key: int) -> Feistel:
    """The permutation of 0 .. ``size`` - 1 that ``key`` chooses."""
    bits = max(2, (size - 1).bit_length())
    rounds = ROUNDS if size > SMALL else ROUNDS_SMALL
    return Feistel(size, bits // 2, bits - bits // 2, tuple(key_of(key, at) for at in range(rounds)))


def _round(half: int, key: int) -> int:
    """The round function: 32 well mixed bits of ``half`` and ``key``. The rounds mix the rest."""
    value = (half ^ key) * FIRST & MASK
    value = (value ^ value >> 29) * SECOND & MASK
    return value >> 32


class Window(NamedTuple):
    """Positions that are mixed with one another.

    start: the first position.
    slots: the first of its chunks, in the permuted order of chunks, and how many there are.
    mixing: the permutation of its samples.
    hole: where in the window, counted in samples, the short chunk ends; from here on samples are ``moved`` further on.
    moved: samples that the short chunk lacks; 0: it is in another window.
    """

    start: int
    slots: tuple[int, int]
    mixing: Feistel
    hole: int
    moved: int


class Order:
    """The order of one epoch: `index` says which sample is at a position, `position` where a sample is.

    size: samples of the epoch. seed: 0 .. 2^64 - 1. epoch: another one has another order. chunk: samples that are read in a run.
    window: chunks that are mixed at a time. order: ``"shuffled"``, or ``"file"``: as the samples lie.
    """

    def __init__(
        self, size: int, seed: int = 0, epoch: int = 0, *, chunk: int = 1, window: int = WINDOW, order: str = SHUFFLED
    ) -> None:
        """Raises: SpecError where a number is out of bounds, or ``order`` is unknown."""
        if not 1 <= size <= POSITION_MAX:
            raise SpecError("size", f"{size} samples: give a dataset of 1 to 2^62")
        given: object = seed
        if not isinstance(given, SupportsIndex) or not 0 <= seed <= SEED_MAX:
            raise SpecError("seed", f"{seed!r}: give 0 to 2^64 - 1")
        if epoch < 0:
            raise SpecError("epoch", f"{epoch}: give 0 or more")
        if chunk < 1:
            raise SpecError("chunk", f"{chunk}: give 1 or more samples")
        if window < 1:
            raise SpecError("window", f"{window}: give 1 or more chunks")
        if order not in {SHUFFLED, FILE}:
            raise SpecError("order", f'{order!r}: give "shuffled" or "file"')
        self.size, self.seed, self.epoch, self.order = size, seed, epoch, order
        self.chunk = min(chunk, size)
        self.window = window
        self.chunks = -(-size // self.chunk)
        self.moved = self.chunks * self.chunk - size
        self._key = key_of(seed, epoch)
        self.reading = feistel(self.chunks, key_of(self._key, 0))
        self.short = self.reading.backward(self.chunks - 1) if self.moved else self.chunks
        """Where in the permuted order of chunks the short one is."""
        self._window: tuple[int, Window | None] = (-1, None)

    def index(self, position: int) -> int:
        """The sample at ``position``.

        Raises: SpecError where the epoch has no such position.
        """
        self._check("position", position)
        if self.order == FILE:
            return position
        if self.chunk == 1:
            return self.reading.forward(position)
        window = self.window_of(position)
        within = window.mixing.forward(position - window.start)
        if window.moved and within >= window.hole:
            within += window.moved
        slot, offset = divmod(within, self.chunk)
        return self.reading.forward(window.slots[0] + slot) * self.chunk + offset

    def position(self, index: int) -> int:
        """The position of sample ``index``.

        Raises: SpecError where the epoch has no such sample.
        """
        self._check("index", index)
        if self.order == FILE:
            return index
        if self.chunk == 1:
            return self.reading.backward(index)
        chunk, offset = divmod(index, self.chunk)
        slot = self.reading.backward(chunk)
        window = self.window_at(slot // self.window)
        within = (slot - window.slots[0]) * self.chunk + offset
        if window.moved and within >= window.hole:
            within -= window.moved
        return window.start + window.mixing.backward(within)

    def indices(self, start: int, stop: int) -> Iterator[int]:
        """The samples at the positions [``start``, ``stop``), one after the other.

        Raises: SpecError where the epoch has no such positions.
        """
        if not 0 <= start <= stop <= self.size:
            raise SpecError("positions", f"[{start}, {stop}): the epoch has [0, {self.size})")
        return map(self.index, range(start, stop))

    def window_of(self, position: int) -> Window:
        """The window that ``position`` is in."""
        padded = position
        if self.moved and position >= self.short * self.chunk + self.chunk - self.moved:
            padded += self.moved
        return self.window_at(padded // (self.window * self.chunk))

    def window_at(self, number: int) -> Window:
        """The window with this number, the first is 0. The last one asked for is remembered."""
        at, remembered = self._window
        if at == number and remembered is not None:
            return remembered
        first = number * self.window
        count = min(self.window, self.chunks - first)
        start = first * self.chunk - (self.moved if first > self.short else 0)
        here = bool(self.moved) and first <= self.short < first + count
        moved = self.moved if here else 0
        hole = (self.short - first + 1) * self.chunk - moved if here else 0
        mixing = feistel(count * self.chunk - moved, key_of(self._key, 1, number))
        found = Window(start, (first, count), mixing, hole, moved)
        self._window = (number, found)
        return found

    def _check(self, field: str, value: int) -> None:
        if not 0 <= value < self.size:
            raise SpecError(field, f"{value}: the epoch has 0 to {self.size - 1}")
