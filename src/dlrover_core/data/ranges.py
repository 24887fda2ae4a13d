"""Sets of positions as sorted, disjoint, half-open ranges: what of an epoch was consumed, leased or returned.

A `Ranges` is never changed: every operation makes a new one. Ranges that touch are one range, so equal sets are equal values, and
pack to equal bytes. All operations cost time and memory by the number of ranges, never by the number of positions.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from dlrover_core.errors import SpecError

POSITION_MAX = 2**62
"""No range ends behind it. Positions are 0 and more."""
FRAGMENTS_MAX = 10_000
"""So many ranges at most are packed into one value."""
BYTES_MAX = 65_536
"""A packed value has so many bytes at most: 10,000 ranges of any 10^10 positions fit."""
_FORMAT = 1


class Span(NamedTuple):
    """The positions ``start`` up to, and without, ``end``."""

    start: int
    end: int


class Ranges:
    """A set of positions. ``Ranges([(0, 10), (20, 30)])``; the ranges may come in any order, overlap, and be empty."""

    __slots__ = ("_spans",)

    def __init__(self, spans: Iterable[tuple[int, int]] = ()) -> None:
        """The union of ``spans``.

        Raises: SpecError where a range ends before it starts, or is not within 0 and 2^62.
        """
        found: list[Span] = []
        first = last = -1  # the newest of ``found``
        for one in sorted(spans):
            start, end = one
            if not 0 <= start <= end <= POSITION_MAX:
                message = f"[{start}, {end}) is no range: give 0 <= start <= end <= 2^62"
                raise SpecError("ranges", message)
            if start == end:
                continue
            if start > last:
                first, last = start, end
                found.append(one if type(one) is Span else Span(start, end))
            elif end > last:
                last = end
                found[-1] = Span(first, end)
        self._spans = tuple(found)

    @classmethod
    def _made(cls, spans: Iterable[Span]) -> Ranges:
        """Of ``spans`` that are in order, not empty and do not touch."""
        made = cls.__new__(cls)
        made._spans = tuple(spans)
        return made

    # What it holds.

    def __iter__(self) -> Iterator[Span]:
        return iter(self._spans)

    def __len__(self) -> int:
        """How many ranges, not how many positions: those are `count`."""
        return len(self._spans)

    def __bool__(self) -> bool:
        return bool(self._spans)

    def __contains__(self, position: int) -> bool:
        at = bisect_right(self._spans, (position, POSITION_MAX)) - 1
        return at >= 0 and position < self._spans[at].end

    @property
    def count(self) -> int:
        """How many positions."""
        return sum(end - start for start, end in self._spans)

    @property
    def first(self) -> int:
        """The lowest position; -1 of an empty set."""
        return self._spans[0].start if self._spans else -1

    @property
    def last(self) -> int:
        """The highest position; -1 of an empty set."""
        return self._spans[-1].end - 1 if self._spans else -1

    def positions(self) -> Iterator[int]:
        """Each position, in order."""
        for start, end in self._spans:
            yield from range(start, end)

    # Operations.

    def __or__(self, other: Ranges) -> Ranges:
        """The positions of either."""
        if not self._spans or not other._spans:
            return self if self._spans else other
        return Ranges((*self._spans, *other._spans))

    def __and__(self, other: Ranges) -> Ranges:
        """The positions of both."""
        found: list[Span] = []
        mine, others = self._spans, other._spans
        here = there = 0
        while here < len(mine) and there < len(others):
            one, its = mine[here], others[there]
            (first, end), (start, last) = one, its
            if first < last and start < end:
                if start <= first and end <= last:
                    found.append(one)
                else:
                    found.append(Span(max(first, start), min(end, last)))
            if end < last:
                here += 1
            else:
                there += 1
        return Ranges._made(found)

    def __sub__(self, other: Ranges) -> Ranges:
        """My positions without the other's."""
        if not self._spans or not other._spans:
            return self
        return self & other.missing(self._spans[-1].end)

    def missing(self, end: int) -> Ranges:
        """The positions of [0, ``end``) that are not mine."""
        found: list[Span] = []
        at = 0
        for one in self._spans:
            if one.start >= end:
                break
            if at < one.start:
                found.append(Span(at, one.start))
            at = one.end
        if at < end:
            found.append(Span(at, end))
        return Ranges._made(found)

    def take(self, count: int) -> tuple[Ranges, Ranges]:
        """My lowest ``count`` positions, and the others."""
        taken: list[Span] = []
        left = list(self._spans)
        while left and count > 0:
            start, end = left[0]
            cut = min(end, start + count)
            taken.append(Span(start, cut))
            count -= cut - start
            left[:1] = [Span(cut, end)] if cut < end else []
        return Ranges._made(taken), Ranges._made(left)

    def __le__(self, other: Ranges) -> bool:
        """Each of my positions is the other's, too."""
        return (self & other)._spans == self._spans

    def __ge__(self, other: Ranges) -> bool:
        return other <= self

    def __lt__(self, other: Ranges) -> bool:
        return self <= other and self != other

    def __gt__(self, other: Ranges) -> bool:
        return other < self

    def isdisjoint(self, other: Ranges) -> bool:
        """No position is of both."""
        return not self & other

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ranges) and self._spans == other._spans

    def __hash__(self) -> int:
        return self._spans.__hash__()

    def __repr__(self) -> str:
        return f"Ranges({', '.join(f'{start}..{end - 1}' for start, end in self._spans)})"

    # Bytes.

    def pack(self) -> bytes:
        """The set in few bytes: each range as two differences, of one to nine bytes.

        Raises: SpecError where there are more than 10,000 ranges, or more than 64 KiB.
        """
        if len(self._spans) > FRAGMENTS_MAX:
            message = f"{len(self._spans)} ranges: {FRAGMENTS_MAX} at most are packed; hand out larger shards"
            raise SpecError("ranges", message)
        packed = bytearray([_FORMAT])
        at = 0
        for start, end in self._spans:
            _put(packed, start - at)
            _put(packed, end - start)
            at = end
        if len(packed) > BYTES_MAX:
            message = f"{len(packed)} bytes: {BYTES_MAX} at most are packed; hand out larger shards"
            raise SpecError("ranges", message)
        return bytes(packed)

    @staticmethod
    def unpack(packed: bytes) -> Ranges:
        """The set that ``packed`` holds.

        Raises: SpecError where the bytes are damaged, cut off, too many, or of a newer version.
        """
        if not 1 <= len(packed) <= BYTES_MAX:
            raise SpecError("ranges", f"{len(packed)} bytes are no packed ranges: 1 to {BYTES_MAX} are")
        if packed[0] != _FORMAT:
            message = f"format {packed[0]} is unknown here, {_FORMAT} is known: upgrade, or the bytes are damaged"
            raise SpecError("ranges", message)
        found: list[Span] = []
        at, end = 1, 0
        while at < len(packed):
            gap, at = _get(packed, at)
            length, at = _get(packed, at)
            start, before = end + gap, end
            end = start + length
            if not length or end > POSITION_MAX or (found and start == before):
                raise _damaged(at)
            found.append(Span(start, end))
            if len(found) > FRAGMENTS_MAX:
                raise SpecError("ranges", f"the bytes hold more than {FRAGMENTS_MAX} ranges: they are damaged")
        return Ranges._made(found)


def _put(packed: bytearray, number: int) -> None:
    """Seven bits a byte, the lowest first; the high bit: more follow."""
    while number > 0x7F:
        packed.append(number & 0x7F | 0x80)
        number >>= 7
    packed.append(number)


def _get(packed: bytes, at: int) -> tuple[int, int]:
    """A number, and where the next one begins."""
    number = shift = 0
    while at < len(packed) and shift <= 56:
        byte = packed[at]
        at += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            if shift and not byte:
                break  # no number is packed with a byte more than it needs
            return number, at
        shift += 7
    raise _damaged(at)


def _damaged(at: int) -> SpecError:
    return SpecError("ranges", f"the bytes are damaged before byte {at}: take them from another copy")
