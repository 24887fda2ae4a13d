"""Sets of positions: they are what sets of numbers are, and what is packed is unpacked as it was or refused."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrover_core.data.ranges import BYTES_MAX, FRAGMENTS_MAX, Ranges, Span
from dlrover_core.errors import SpecError

_spans = st.lists(
    st.tuples(st.integers(0, 60), st.integers(0, 9)).map(lambda one: (one[0], one[0] + one[1])), max_size=12
)


@given(_spans, _spans)
def test_they_are_sets(one: list[tuple[int, int]], other: list[tuple[int, int]]) -> None:
    """Union, intersection, difference, nesting and membership are those of Python's sets of numbers."""
    a, b = Ranges(one), Ranges(other)
    mine, others = ({at for start, end in spans for at in range(start, end)} for spans in (one, other))
    assert set(a.positions()) == mine
    assert list(a.positions()) == sorted(mine)
    assert set((a | b).positions()) == mine | others
    assert set((a & b).positions()) == mine & others
    assert set((a - b).positions()) == mine - others
    assert set(a.missing(40).positions()) == set(range(40)) - mine
    assert (a <= b) == (mine <= others)
    assert (a < b) == (mine < others)
    assert a.isdisjoint(b) == mine.isdisjoint(others)
    assert a.count == len(mine)
    assert (a.first, a.last) == ((min(mine), max(mine)) if mine else (-1, -1))
    assert [at in a for at in range(75)] == [at in mine for at in range(75)]


@given(_spans, st.integers(0, 80))
def test_equal_sets_are_equal_bytes(spans: list[tuple[int, int]], cut: int) -> None:
    """A set that came about in another way is the same value, with the same bytes, and its parts make it whole again."""
    a = Ranges(spans)
    again = Ranges((at, at + 1) for at in a.positions())
    assert (a, hash(a), a.pack()) == (again, hash(again), again.pack())
    assert all(before.end < after.start for before, after in zip(list(a), list(a)[1:], strict=False))
    assert Ranges.unpack(a.pack()) == a
    taken, left = a.take(cut)
    assert taken.count == min(cut, a.count)
    assert taken | left == a
    assert taken.isdisjoint(left)
    assert not taken or not left or taken.last < left.first


def test_ten_thousand_fragments_fit() -> None:
    """10,000 fragments of 10^10 positions are 64 KiB at most; one more fragment is refused, with the remedy."""
    chance = random.Random(7)
    ends = sorted(chance.sample(range(10**10), 2 * FRAGMENTS_MAX))
    found = Ranges(zip(ends[::2], ends[1::2], strict=True))
    assert len(found) == FRAGMENTS_MAX
    assert len(found.pack()) <= BYTES_MAX
    assert Ranges.unpack(found.pack()) == found
    # The worst there is: as many differences as possible that just need a byte more.
    rest = iter([2**21] * 4600)
    worst, at = [], 0
    for _ in range(FRAGMENTS_MAX):
        start = at + next(rest, 2**14)
        at = start + 2**14
        worst.append((start, at))
    assert at < 10**10 < at + 4 * 2**21 * 100
    assert len(Ranges(worst).pack()) <= BYTES_MAX
    with pytest.raises(SpecError, match="ranges: 10001 ranges: 10000 at most are packed; hand out larger shards"):
        Ranges((2 * one, 2 * one + 1) for one in range(FRAGMENTS_MAX + 1)).pack()
    with pytest.raises(SpecError, match="hand out larger shards"):
        Ranges((2**48 * one, 2**48 * one + 2**47) for one in range(FRAGMENTS_MAX)).pack()


def test_bad_ranges() -> None:
    """What is no range is refused."""
    for start, end in ((3, 2), (-1, 2), (0, 2**62 + 1)):
        with pytest.raises(SpecError, match="give 0 <= start <= end"):
            Ranges([(start, end)])
    assert list(Ranges([(5, 5), (0, 2**62)])) == [Span(0, 2**62)]


@given(st.binary(max_size=40))
def test_any_bytes_are_a_set_or_refused(packed: bytes) -> None:
    """Bytes are either those of one set, and no other bytes are that set's, or they are refused."""
    for one in (packed, b"\x01" + packed):
        try:
            found = Ranges.unpack(one)
        except SpecError:
            continue
        assert found.pack() == one


def test_damage_is_refused() -> None:
    """Cut off, too large, of another version, without end: each is refused in words."""
    packed = Ranges([(10, 500), (100_000, 200_000)]).pack()
    for damaged, words in (
        (packed[:-1], "damaged before byte"),
        (b"", "0 bytes are no packed ranges"),
        (b"\x02" + packed[1:], "format 2 is unknown here"),
        (b"\x01" + b"\xff" * 20, "damaged before byte"),
        (b"\x01" + b"\x00" * 2, "damaged before byte"),
        (bytes(BYTES_MAX + 1), "are no packed ranges"),
        (b"\x01" + b"\x01\x01" * (FRAGMENTS_MAX + 1), "more than 10000 ranges"),
    ):
        with pytest.raises(SpecError, match=words):
            Ranges.unpack(damaged)
