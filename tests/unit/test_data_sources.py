"""Mixtures, packed rows, items and readers: each sample at its position, whatever was read before."""

from __future__ import annotations

import itertools
import pickle
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrover_adapters.data import Items, Reader, as_source, fingerprint_of, mixed, mixed_of, packed, resumed_size
from dlrover_adapters.data.mixing import BLOCK_MAX
from dlrover_core.data.cut import Place
from dlrover_core.data.permutation import Order
from dlrover_core.errors import SpecError


class Words(list[str]):
    """A list that can be a key."""

    __hash__ = object.__hash__  # type: ignore[assignment]


def words(name: str, count: int) -> Words:
    """So many samples that say where they are from."""
    return Words(f"{name}{one}" for one in range(count))


# Mixtures.


def test_every_batch_holds_each_share() -> None:
    """0.7 and 0.3 are 7 and 3 of any 10 neighbours, and each source's samples come once before any comes again."""
    found = mixed({words("a", 70): 0.7, words("b", 20): 0.3}, size=200, seed=3)
    drawn = [found.drawn(at) for at in range(200)]
    for at in range(190):
        assert abs(sum(number == 0 for number, _, _ in drawn[at : at + 10]) - 7) <= 1
    for number, size in ((0, 70), (1, 20)):
        mine = [(epoch, index) for source, epoch, index in drawn if source == number]
        for epoch in range(len(mine) // size):
            assert sorted(mine[epoch * size : (epoch + 1) * size]) == [(epoch, one) for one in range(size)]
    assert [found[at] for at in range(3)] == [f"{'ab'[number]}{index}" for number, _, index in drawn[:3]]
    firsts = [[index for source, epoch, index in drawn if source == 1 and epoch == one] for one in range(3)]
    assert len({tuple(one) for one in firsts}) == 3, "each epoch of a source has an order of its own"


@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=4),
    st.lists(st.integers(1, 40), min_size=4, max_size=4),
    st.data(),
)
def test_a_mixture_is_a_function_of_the_position(parts: list[int], sizes: list[int], data: st.DataObject) -> None:
    """Whatever was read before, and in whichever process: a position is a sample, and epochs go on where one ended."""
    weights = [one / sum(parts) for one in parts]
    sources: list[Any] = [words(str(at), sizes[at]) for at in range(len(parts))]
    one = mixed_of(sources, weights, size=50, seed=5)
    straight = [one.of_epoch(at // 50)[at % 50] for at in range(150)]
    other = pickle.loads(pickle.dumps(mixed_of(sources, weights, size=50, seed=5)))  # noqa: S301
    for at in data.draw(st.lists(st.integers(0, 149), max_size=20)):
        assert other.of_epoch(at // 50)[at % 50] == straight[at]
    counts = Counter(one.of_epoch(at // 50).drawn(at % 50)[0] for at in range(150))
    for number, weight in enumerate(weights):
        assert abs(counts[number] - 150 * weight) <= len(parts)


def test_a_mixtures_size() -> None:
    """Without a size an epoch lasts until each source has come once."""
    found = mixed({words("a", 70): 0.5, words("b", 20): 0.5})
    assert len(found) == 140
    assert {found[at] for at in range(140)} == {f"a{one}" for one in range(70)} | {f"b{one}" for one in range(20)}
    assert found.shares == (1, 1)
    with pytest.raises(IndexError, match="position 140: there are 0 to 139"):
        found[140]
    thirds = mixed_of([[1], [2], [3]], [1 / 3, 1 / 3, 1 / 3])
    assert thirds.shares == (1, 1, 1)
    odd = mixed_of([[1], [2], [3]], [0.314159265, 0.271828182, 0.414012553])
    assert sum(odd.shares) == BLOCK_MAX
    assert odd.shares == (3142, 2718, 4140)


def test_a_mixture_of_mixtures() -> None:
    """A mixture is a source, with its own order."""
    inner = mixed_of([words("a", 4), words("b", 4)], [0.5, 0.5], seed=1)
    outer = mixed_of([inner, words("c", 8)], [0.5, 0.5], seed=2)
    assert len(outer) == 16
    assert {outer[at] for at in range(16)} == {f"a{one}" for one in range(4)} | {f"b{one}" for one in range(4)} | set(
        words("c", 8)
    )
    assert [outer.drawn(at)[2] for at in range(16) if outer.drawn(at)[0] == 0] == list(range(8))


def test_mixtures_are_told_apart() -> None:
    """Another weight, seed, size or source is another mixture."""
    a, b = words("a", 5), words("b", 5)
    made = [
        mixed_of([a, b], [0.5, 0.5]),
        mixed_of([a, b], [0.6, 0.4], size=10),
        mixed_of([a, b], [0.5, 0.5], seed=1),
        mixed_of([a, b], [0.5, 0.5], size=11),
        mixed_of([a, words("c", 6)], [0.5, 0.5], size=10),
        mixed_of([a, b], [0.5, 0.5], order="file"),
    ]
    assert len({fingerprint_of(one) for one in made}) == len(made)


def test_bad_mixtures() -> None:
    """Each is refused with field, value and remedy."""
    a, b = [1], [2]
    for made, told in (
        (
            lambda: mixed_of([a, b], [0.7, 0.2]),
            r"weights: 0.7 \+ 0.2 is 0.9: give weights that sum to 1, such as 0.7778, 0.2222",
        ),
        (lambda: mixed_of([a, b], [1.5, -0.5]), "weights: -0.5 of source 1: give a positive number, or leave"),
        (lambda: mixed_of([a, b], [1.0]), "weights: 1 for 2 sources"),
        (lambda: mixed({}), "weights: 0 for 0 sources"),
        (lambda: mixed_of([a, b], [1 - 1e-7, 1e-7]), "weights: 1e-07 of source 1 is less than one of 10000"),
        (lambda: mixed_of([a, []], [0.5, 0.5]), "size: 0 samples in list"),
        (lambda: mixed_of([a, b], [0.5, 0.5], size=-1), "size: -1"),
        (lambda: mixed_of([a, b], [0.5, 0.5], order="random"), "order: 'random'"),
        (lambda: mixed_of([a, b], [0.5, 0.5], seed=-1), "seed: -1: give 0 to"),
        (lambda: mixed_of([a, iter([])], [0.5, 0.5]), "source: list_iterator has no length"),
    ):
        with pytest.raises(SpecError, match=told):
            made()


def test_the_numbers_of_a_mixture_are_pinned() -> None:
    """These never change: a run that is under way would get other samples."""
    found = mixed_of([list(range(100, 107)), list(range(5)), [9]], [0.5, 0.3, 0.2], size=40, seed=11)
    first = [101, 2, 9, 103, 104, 4, 102, 9, 3, 105, 100, 0, 9, 106, 104, 1, 100, 9, 4, 102]
    assert [found[at] for at in range(20)] == first
    assert found.of_epoch(3).drawn(7) == (2, 25, 0)
    assert fingerprint_of(found) == "mixed:40:b684821a4eb2f03f"


# Packing.


def test_the_plans_of_packing_are_pinned() -> None:
    """These never change, for the same reason."""
    source = ["x" * one for one in (3, 7, 2, 5, 5, 1, 8, 4, 6)]
    found = packed(source, 10)
    assert [found.members(row) for row in range(len(found))] == [[0, 1], [2, 6], [3, 4], [5], [7, 8]]
    assert fingerprint_of(found) == "packed:5:4d093e2503a1352f"
    split = packed(source, 10, long="split")
    assert split.pieces(2) == [(4, 3, 5), (5, 0, 1), (6, 0, 7)]
    assert fingerprint_of(split) == "packed-split:4:6801607c2857c51a"


@given(st.lists(st.integers(1, 20), min_size=1, max_size=60))
def test_each_sample_is_in_one_row(lengths: list[int]) -> None:
    """Every sample is in one row, whole, and no row is too long; the plan is the same every time."""
    source = [[at] * one for at, one in enumerate(lengths)]
    found = packed(source, 20, lengths=lengths)
    rows = [found[row] for row in range(len(found))]
    assert sorted(sample[0] for row in rows for sample in row) == list(range(len(lengths)))
    assert all(sum(map(len, row)) <= 20 for row in rows)
    assert all(len(sample) == lengths[sample[0]] for row in rows for sample in row)
    assert found.filled == pytest.approx(sum(lengths) / (20 * len(rows)))
    assert len(rows) <= 1 + 2 * sum(lengths) // 20
    again = packed(source, 20)
    assert [again[row] for row in range(len(again))] == rows
    assert fingerprint_of(again) == fingerprint_of(found)


@given(st.lists(st.integers(1, 20), min_size=1, max_size=40), st.integers(1, 25))
def test_split_rows_are_the_text(lengths: list[int], length: int) -> None:
    """Rows one after the other are the samples one after the other, without the last tokens that fill no row."""
    tokens = itertools.count()
    source = [[next(tokens) for _ in range(one)] for one in lengths]
    if sum(lengths) < length:
        return
    found = packed(source, length, long="split", join=lambda parts: [token for part in parts for token in part])
    rows = [found[row] for row in range(len(found))]
    assert [token for row in rows for token in row] == list(range(sum(lengths) // length * length))
    assert {len(row) for row in rows} == {length}


def test_packing_is_good() -> None:
    """Rows of many samples are nearly full, made of samples that lie near one another."""
    lengths = [1 + (at * 7919) % 700 for at in range(5000)]
    found = packed([""] * 5000, 2048, lengths=lengths)
    assert found.filled > 0.98
    assert max(found.members(row)[-1] - found.members(row)[0] for row in range(len(found))) < 1000


def test_packed_rows_are_told_apart() -> None:
    """Other lengths, rows or samples are other data."""
    made = [
        packed(["ab", "c", "def"], 4),
        packed(["ab", "c", "def"], 5),
        packed(["ab", "c", "def"], 4, long="cut"),
        packed(["ab", "c", "def"], 3, long="split"),
        packed(["ab", "cd", "ef"], 4),
        packed(Items(["ab", "c", "def"], name="other"), 4),
    ]
    assert len({fingerprint_of(one) for one in made}) == len(made)
    one = packed(["abcdef", "c"], 4, long="cut")
    assert sorted(one[at] for at in range(2)) == [["abcd"], ["c"]]


def test_bad_packing() -> None:
    """Each is refused with field, value and remedy."""
    for made, told in (
        (lambda: packed(["a"], 0), "length: 0: give 1 or more"),
        (lambda: packed(["abc"], 2), 'length: 3 tokens of sample 0 are more than 2: give long="cut" or "split"'),
        (lambda: packed(["abc"], 2, long="drop"), "long: 'drop': give"),
        (lambda: packed(["a", ""], 2), "lengths: 0 of sample 1: give 1 or more tokens"),
        (lambda: packed(["a", "b"], 2, lengths=[1]), "lengths: 1 for 2 samples: give one for each"),
        (lambda: packed(["a", "b"], 2, lengths=iter([1])), "lengths: 1 for 2 samples"),
        (lambda: packed([1, 2], 2), "lengths: sample 0 is int, which has no length: give lengths="),
        (lambda: packed(["ab"], 3, long="split"), "length: 3 is more than the 2 tokens of all samples"),
        (
            lambda: packed(["ab", "c"], 1, lengths=[1, 1], long="split")[0],
            "lengths: sample 0 has 2 tokens, 1 when planned",
        ),
    ):
        with pytest.raises(SpecError, match=told):
            made()


# Items and readers.


def test_items() -> None:
    """Anything with a length and items by index is a source; its name and size tell it apart."""
    assert fingerprint_of(as_source([1, 2, 3])) == "items:3"
    assert fingerprint_of(Items([1], name="x")) != fingerprint_of(Items([1], name="y"))
    source = Items([1])
    assert as_source(source) is source
    assert resumed_size(Place("a", 0, 2, "items:3"), Items(range(5)), grown="append") == 3
    for made, told in (
        (lambda: Items(iter([1])), "source: list_iterator has no length or no items by index: give a list"),
        (lambda: Items([]), "size: 0 samples in list: give a dataset of 1 or more"),
    ):
        with pytest.raises(SpecError, match=told):
            made()


def test_a_reader_reads_in_order() -> None:
    """Samples come in the epoch's order, in any pieces; a source's own chunk and window serve where none are given."""
    source = Items(list(range(1000, 1100)))
    source.chunk = 8
    reader = Reader(source, seed=4)
    for epoch in (0, 2, 1):
        order = Order(100, 4, epoch, chunk=8)
        expected = [1000 + one for one in order.indices(0, 100)]
        assert [one for at in range(0, 100, 7) for one in reader.samples(epoch, at, min(at + 7, 100))] == expected
    assert list(Reader(source, order="file").samples(0, 3, 5)) == [1003, 1004]
    assert list(Reader(source, seed=4, chunk=1).samples(0, 0, 50)) == [
        1000 + one for one in Order(100, 4).indices(0, 50)
    ]
    assert reader.window == 64
    with pytest.raises(SpecError, match="chunk: -1"):
        Reader(source, chunk=-1)
    with pytest.raises(SpecError, match="window: -1"):
        Reader(source, window=-1)


def test_a_source_that_grows_while_it_is_read() -> None:
    """The epoch in flight ends with the samples that it began with, through any number of restarts; later ones have all."""
    whole, found, sizes = list(range(26)), [], []
    epoch = position = 0
    place = None
    # Each life takes three batches of 4; samples come to it while it is down.
    for size in (10, 10, 20, 20, 20, 26, 26, 26, 26):
        reader = Reader(Items(whole[:size]), "train", seed=4)
        if place is not None:
            if place.fingerprint != fingerprint_of(reader.source):
                with pytest.raises(SpecError, match='added at the end: give grown="append"'):
                    reader.resume(place)
            reader.resume(place, grown="append")
        plan = reader.batches(4, epochs=0)
        for _ in range(2):
            batch = plan.next(epoch, position)
            assert batch is not None
            found += [(batch.epoch, one) for one in reader.samples(*batch)]
            epoch, position = plan.after(batch)
            sizes.append((batch.epoch, reader.size_of(batch.epoch)))
        place = reader.place(epoch, position)
    of_epoch = dict(sizes)
    assert of_epoch == {0: 10, 1: 10, 2: 20, 3: 26}
    for number in range(3):
        assert sorted(one for epoch, one in found if epoch == number) == list(range(of_epoch[number]))


def test_a_reader_of_a_mixture() -> None:
    """A mixture comes in its own order, and every epoch has its own samples."""
    source = mixed_of([words("a", 10), words("b", 4)], [0.5, 0.5], seed=4)
    reader = Reader(source, seed=9)
    for epoch in (1, 0):
        assert list(reader.samples(epoch, 0, 20)) == [source.of_epoch(epoch)[at] for at in range(20)]
    assert list(reader.samples(0, 0, 20)) != list(reader.samples(1, 0, 20))


def test_no_sample_is_none() -> None:
    """A fetch that returns nothing is told with its index, and no batch goes on with less."""
    with pytest.raises(SpecError, match="fetch: None for sample 1: return a sample, or raise an error"):
        list(Reader(Items([1, None, 3]), order="file").samples(0, 0, 3))


def test_lengths_that_are_too_small_are_found() -> None:
    """A row never has more tokens than it may. What is no sequence of tokens yet is not counted."""
    rows = packed([[1] * 10, [2] * 10], 10, lengths=[5, 5])
    with pytest.raises(SpecError, match="lengths: row 0 has 20 tokens, of at most 10"):
        rows[0]
    texts = packed(["a text", "another one"], 10, lengths=[5, 5], join=list)
    assert sorted(texts[0]) == ["a text", "another one"]
