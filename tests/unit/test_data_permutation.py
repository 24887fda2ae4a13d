"""The order of an epoch: every sample once, the same numbers for ever, files read in runs, and an inverse."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrover_core.data.permutation import Order, feistel
from dlrover_core.errors import SpecError

VECTORS = json.loads((Path(__file__).parent / "golden" / "data_orders.json").read_text())
_orders = st.builds(
    Order,
    st.integers(1, 400),
    st.integers(0, 2**64 - 1),
    st.integers(0, 1000),
    chunk=st.integers(1, 50),
    window=st.integers(1, 9),
    order=st.sampled_from(["shuffled", "shuffled", "shuffled", "file"]),
)


@given(_orders)
def test_every_sample_once(order: Order) -> None:
    """The order is a permutation, whatever chunk and window are, and `position` is its inverse."""
    found = list(order.indices(0, order.size))
    assert sorted(found) == list(range(order.size))
    assert [order.position(one) for one in found] == list(range(order.size))


@given(_orders)
def test_files_are_read_in_runs(order: Order) -> None:
    """At no time samples of more than ``window`` chunks are mixed, and each window's chunks are done before the next begins."""
    if order.order == "file" or order.chunk == 1:
        return
    seen: list[set[int]] = [set() for _ in range(-(-order.chunks // order.window))]
    for at, index in enumerate(order.indices(0, order.size)):
        number = order.reading.backward(index // order.chunk) // order.window
        assert order.window_of(at) == order.window_at(number)
        seen[number].add(index // order.chunk)
    assert [len(one) for one in seen[:-1]] == [order.window] * (len(seen) - 1)
    assert len(set().union(*seen)) == order.chunks


@given(st.integers(1, 3000), st.integers(0, 2**64 - 1))
def test_a_feistel_network_is_a_permutation(size: int, key: int) -> None:
    """Forward is one to one, and backward undoes it."""
    network = feistel(size, key)
    found = [network.forward(one) for one in range(size)]
    assert sorted(found) == list(range(size))
    assert [network.backward(one) for one in found] == list(range(size))


@pytest.mark.parametrize("vector", VECTORS)
def test_vectors(vector: dict[str, Any]) -> None:
    """These numbers never change: a run that is under way would see samples twice, and others never."""
    words = {name: value for name, value in vector.items() if name not in {"start", "indices"}}
    start, indices = vector["start"], vector["indices"]
    order = Order(**words)
    assert list(order.indices(start, start + len(indices))) == indices
    assert [order.position(one) for one in indices] == list(range(start, start + len(indices)))


def test_ten_thousand_million_samples() -> None:
    """10^10 samples and more cost nothing: no memory by the sample, and any position at once."""
    for size in (10**10, 2**62):
        for chunk in (1, 1000):
            order = Order(size, 3, 1, chunk=chunk)
            for at in (0, 1, size // 3, size - 1):
                assert order.position(order.index(at)) == at


def test_it_is_random_enough() -> None:
    """Each sample is first about as often as any other, over seeds; neighbours are not neighbours; epochs and seeds differ."""
    counts = [0] * 16
    for seed in range(1600):
        counts[Order(16, seed).index(0)] += 1
    # Chi-squared with 15 degrees of freedom: 37.7 is exceeded by chance once in 1,000.
    assert sum((one - 100) ** 2 / 100 for one in counts) < 37.7
    pairs = [0] * 56
    for seed in range(5600):
        first, second = Order(8, 0, seed).indices(3, 5)
        pairs[first * 7 + second - (second > first)] += 1
    assert sum((one - 100) ** 2 / 100 for one in pairs) < 93.2  # 55 degrees of freedom, once in 1,000
    order = list(Order(10_000, 5).indices(0, 10_000))
    near = sum(abs(a - b) <= 10 for a, b in itertools.pairwise(order))
    assert near < 60  # 20 are to be expected
    fixed = sum(one == at for at, one in enumerate(order))
    assert fixed < 10  # 1 is to be expected
    others = [list(Order(10_000, seed, epoch).indices(0, 10_000)) for seed, epoch in ((5, 1), (6, 0))]
    assert all(sum(a == b for a, b in zip(order, other, strict=True)) < 10 for other in others)


def test_bad_input() -> None:
    """Each is refused with field, value and remedy."""
    order = Order(10)
    for made, words in (
        (lambda: Order(0), "size: 0 samples: give a dataset of 1"),
        (lambda: Order(10, -1), "seed: -1: give 0 to"),
        (lambda: Order(10, 2**64), "seed: "),
        (lambda: Order(10, 0, -1), "epoch: -1: give 0 or more"),
        (lambda: Order(10, chunk=0), "chunk: 0: give 1 or more"),
        (lambda: Order(10, window=0), "window: 0: give 1 or more"),
        (lambda: Order(10, order="random"), 'order: \'random\': give "shuffled" or "file"'),
        (lambda: order.index(10), "position: 10: the epoch has 0 to 9"),
        (lambda: order.index(-1), "position: -1"),
        (lambda: order.position(10), "index: 10: the epoch has 0 to 9"),
        (lambda: order.indices(3, 11), r"positions: \[3, 11\): the epoch has \[0, 10\)"),
    ):
        with pytest.raises(SpecError, match=words):
            made()  # type: ignore[no-untyped-call]
