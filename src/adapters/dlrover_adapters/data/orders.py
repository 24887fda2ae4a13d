"""The order of an epoch, many indices at a time, with numpy: the same numbers as the core's `Order`, some hundred times as fast.

A rank takes neighbouring positions, step after step. So the indices of the block of positions that was asked for last are kept:
a window's, or `BLOCK` of an order without windows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from dlrover_core.data.permutation import FILE, FIRST, GOLDEN, SECOND, SHUFFLED, WINDOW, Feistel, Order
from dlrover_core.errors import SpecError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Indices = NDArray[np.int64]
    Values = NDArray[np.uint64]

BLOCK = 16_384
"""Positions whose indices are computed at once where nothing else says how many."""
KEPT_MAX = 1 << 20
"""Of a larger window than this only the part that was asked for is computed."""


def order_of(
    size: int, seed: int = 0, epoch: int = 0, *, chunk: int = 1, window: int = WINDOW, order: str = SHUFFLED
) -> Order:
    """The order of an epoch: with numpy where numpy can be imported, the core's own where it cannot.

    Raises: SpecError as `Order` does.
    """
    try:
        import numpy as np  # noqa: F401
    except ImportError:
        return Order(size, seed, epoch, chunk=chunk, window=window, order=order)
    return VectorOrder(size, seed, epoch, chunk=chunk, window=window, order=order)


class VectorOrder(Order):
    """An `Order` that computes many indices at a time."""

    def __init__(
        self, size: int, seed: int = 0, epoch: int = 0, *, chunk: int = 1, window: int = WINDOW, order: str = SHUFFLED
    ) -> None:
        """As `Order`."""
        super().__init__(size, seed, epoch, chunk=chunk, window=window, order=order)
        self._block: tuple[int, Any] = (0, ())

    def index(self, position: int) -> int:
        """The sample at ``position``: of the block that is kept, if it is there.

        Raises: SpecError where the epoch has no such position.
        """
        start, kept = self._block
        if start <= position < start + len(kept):
            return int(kept[position - start])
        return super().index(position)

    def indices(self, start: int, stop: int) -> Iterator[int]:
        """The samples at the positions [``start``, ``stop``), one after the other.

        Raises: SpecError where the epoch has no such positions.
        """
        self._check_positions(start, stop)
        return self._in_blocks(start, stop)

    def _in_blocks(self, start: int, stop: int) -> Iterator[int]:
        while start < stop:
            end = min(stop, start + BLOCK)
            yield from self.array(start, end).tolist()
            start = end

    def array(self, start: int, stop: int) -> Indices:
        """The same as an array of int64.

        Raises: SpecError where the epoch has no such positions.
        """
        import numpy as np

        self._check_positions(start, stop)
        parts: list[Indices] = []
        while start < stop:
            part = self._part(start, stop)
            parts.append(part)
            start += len(part)
        # A copy, also of a single part: what is kept stays ours.
        found: Indices = np.concatenate(parts) if parts else np.empty(0, np.int64)
        return found

    def _part(self, start: int, stop: int) -> Indices:
        """The indices of ``start`` and some, or all, of the positions up to ``stop``."""
        at, kept = self._block
        if at <= start < at + len(kept):
            part: Indices = kept[start - at : stop - at]
            return part
        first, end = self._block_of(start, stop)
        self._block = (first, self._computed(first, end))
        return self._part(start, stop)

    def _block_of(self, start: int, stop: int) -> tuple[int, int]:
        """The positions to compute: those of a block that holds ``start``."""
        if self.order == FILE or self.chunk == 1:
            first = start - start % BLOCK
            return first, min(self.size, max(first + BLOCK, min(stop, first + KEPT_MAX)))
        window = self.window_of(start)
        end = window.start + window.mixing.size
        if window.mixing.size <= KEPT_MAX:
            # Where windows are small there are several in a block.
            number = window.slots[0] // self.window
            several = range(number, min(number + max(1, BLOCK // (self.window * self.chunk)), self._windows))
            last = self.window_at(several[-1])
            return window.start, last.start + last.mixing.size
        first = window.start + (start - window.start) // BLOCK * BLOCK
        return first, min(end, max(first + BLOCK, min(stop, first + KEPT_MAX)))

    @property
    def _windows(self) -> int:
        return -(-self.chunks // self.window)

    def _computed(self, start: int, stop: int) -> Indices:
        """The indices of a block: of some positions of one window, of some whole windows, or of an order without windows."""
        import numpy as np

        if self.order == FILE:
            return np.arange(start, stop, dtype=np.int64)
        if self.chunk == 1:
            return _signed(forward(self.reading, np.arange(start, stop, dtype=np.uint64)))
        parts = []
        while start < stop:
            number = self.window_of(start).slots[0] // self.window
            whole = self._whole(number, stop - start)
            parts.append(self._of_windows(number, whole) if whole > 1 else self._of_window(start, stop))
            start += len(parts[-1])
        found: Indices = parts[0] if len(parts) == 1 else np.concatenate(parts)
        return found

    def _whole(self, number: int, positions: int) -> int:
        """How many windows from ``number`` on, within so many positions, have all chunks whole."""
        ends = self.short // self.window if self.moved and number <= self.short // self.window else self._windows
        if ends == self._windows and self.chunks % self.window:
            ends -= 1
        return max(0, min(ends - number, positions // (self.window * self.chunk)))

    def _of_window(self, start: int, stop: int) -> Indices:
        """The indices of the positions up to ``stop`` that are in the window of ``start``."""
        import numpy as np

        window = self.window_of(start)
        stop = min(stop, window.start + window.mixing.size)
        positions = np.arange(start - window.start, stop - window.start, dtype=np.uint64)
        within = _signed(forward(window.mixing, positions))
        if window.moved:
            within += (within >= window.hole) * np.int64(window.moved)
        slot, offset = np.divmod(within, np.int64(self.chunk))
        first, count = window.slots
        chunks = _signed(forward(self.reading, np.arange(first, first + count, dtype=np.uint64)))
        found: Indices = chunks[slot] * np.int64(self.chunk) + offset
        return found

    def _of_windows(self, number: int, count: int) -> Indices:
        """The indices of ``count`` windows whose chunks are all whole, from window ``number`` on."""
        import numpy as np

        mixing = self.window_at(number).mixing
        keys = _keys_of(self._key, 1, np.arange(number, number + count, dtype=np.uint64))
        rounds = np.stack([_keys_of(keys, at) for at in range(len(mixing.keys))])
        positions = np.tile(np.arange(mixing.size, dtype=np.uint64), (count, 1))
        slot, offset = np.divmod(_signed(_walked(mixing, rounds, positions)), np.int64(self.chunk))
        first = np.arange(number * self.window, (number + count) * self.window, dtype=np.uint64)
        chunks = _signed(forward(self.reading, first)).reshape(count, self.window)
        found: Indices = (np.take_along_axis(chunks, slot, axis=1) * np.int64(self.chunk) + offset).ravel()
        return found

    def _check_positions(self, start: int, stop: int) -> None:
        if not 0 <= start <= stop <= self.size:
            raise SpecError("positions", f"[{start}, {stop}): the epoch has [0, {self.size})")


def forward(network: Feistel, values: Values) -> Values:
    """`Feistel.forward` of each of ``values``."""
    import numpy as np

    if network.size <= 1:
        return values
    keys = np.array(network.keys, np.uint64).reshape(-1, 1)
    return _walked(network, keys, values.reshape(1, -1)).ravel()


def _walked(network: Feistel, keys: Values, values: Values) -> Values:
    """``values`` through networks of one size until they are inside; each row has keys of its own, a column of ``keys``."""
    import numpy as np

    if network.size <= 1:
        return values
    found = _once(network, keys[:, :, None], values)
    flat, size = found.reshape(-1), np.uint64(network.size)
    outside = np.flatnonzero(flat >= size)
    while len(outside):
        theirs = keys[:, outside // values.shape[1]] if len(values) > 1 else keys
        again = _once(network, theirs, flat[outside])
        flat[outside] = again
        outside = outside[again >= size]
    return found


def _once(network: Feistel, keys: Values, values: Values) -> Values:
    """Once through the network; ``keys``: one for each round, or as many as fit the shape of ``values``."""
    import numpy as np

    bits = np.uint64(network.right)
    left_mask, right_mask = np.uint64((1 << network.left) - 1), np.uint64((1 << network.right) - 1)
    first, second, shift, half = np.uint64(FIRST), np.uint64(SECOND), np.uint64(29), np.uint64(32)
    left, right = values >> bits, values & right_mask
    mixed, shifted = np.empty_like(left), np.empty_like(left)
    for at, key in enumerate(keys):
        changed, other, mask = (right, left, right_mask) if at & 1 else (left, right, left_mask)
        # As the core's `_round`, in place: multiplication of unsigned arrays wraps.
        np.bitwise_xor(other, key, out=mixed)
        np.multiply(mixed, first, out=mixed)
        np.right_shift(mixed, shift, out=shifted)
        np.bitwise_xor(mixed, shifted, out=mixed)
        np.multiply(mixed, second, out=mixed)
        np.right_shift(mixed, half, out=mixed)
        np.bitwise_and(mixed, mask, out=mixed)
        np.bitwise_xor(changed, mixed, out=changed)
    np.left_shift(left, bits, out=left)
    np.bitwise_or(left, right, out=left)
    found: Values = left
    return found


def _keys_of(*numbers: int | Values) -> Values:
    """The core's `key_of`, where some of the numbers are arrays."""
    import numpy as np

    key = np.zeros(1, np.uint64)
    for one in numbers:
        # Arrays wrap in silence, single numbers do not.
        key = _mix((key + np.uint64(GOLDEN)) ^ _mix(np.atleast_1d(np.asarray(one, np.uint64))))
    return key


def _mix(value: Values) -> Values:
    """The core's `mix` of each."""
    import numpy as np

    value = (value ^ value >> np.uint64(30)) * np.uint64(FIRST)
    value = (value ^ value >> np.uint64(27)) * np.uint64(SECOND)
    found: Values = value ^ value >> np.uint64(31)
    return found


def _signed(values: Values) -> Indices:
    import numpy as np

    return values.astype(np.int64)
