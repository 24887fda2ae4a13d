"""The order by numpy gives the very numbers of the core's, whatever is asked and in which pieces."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrover_core.data.permutation import Order
from dlrover_core.errors import SpecError

pytest.importorskip("numpy")

from dlrover_adapters.data import orders
from dlrover_adapters.data.orders import VectorOrder, order_of

VECTORS = json.loads((Path(__file__).parent / "golden" / "data_orders.json").read_text())


@pytest.mark.parametrize("vector", VECTORS)
def test_vectors(vector: dict[str, Any]) -> None:
    """The pinned numbers."""
    words = {name: value for name, value in vector.items() if name not in {"start", "indices"}}
    start, indices = vector["start"], vector["indices"]
    order = VectorOrder(**words)
    assert order.array(start, start + len(indices)).tolist() == indices
    assert list(order.indices(start, start + len(indices))) == indices
    assert [order.index(start + at) for at in range(len(indices))] == indices


@given(
    st.integers(1, 3000) | st.integers(1, 2**62),
    st.integers(0, 2**64 - 1),
    st.integers(1, 60) | st.integers(1, 100_000),
    st.integers(1, 9) | st.integers(1, 1000),
    st.sampled_from(["shuffled", "shuffled", "shuffled", "file"]),
    st.data(),
)
def test_the_numbers_are_the_cores(
    size: int, seed: int, chunk: int, window: int, name: str, data: st.DataObject
) -> None:
    """Any piece of any order, and the piece after it, and one position."""
    fast, slow = (kind(size, seed, 4, chunk=chunk, window=window, order=name) for kind in (VectorOrder, Order))
    for _ in range(2):
        start = data.draw(st.integers(0, size - 1))
        for at in (start, min(start + 150, size)):
            stop = min(at + 150, size)
            assert fast.array(at, stop).tolist() == list(slow.indices(at, stop))
        assert fast.index(start) == slow.index(start)
        assert fast.position(slow.index(start)) == start


def test_a_whole_epoch_in_batches() -> None:
    """Small windows, a hole, and blocks of several windows: batch by batch the epoch is the core's."""
    for words in ({"chunk": 7, "window": 3}, {"chunk": 1000, "window": 2}, {"chunk": 4999, "window": 2}, {"chunk": 1}):
        fast, slow = VectorOrder(20_011, 3, **words), Order(20_011, 3, **words)
        found = [one for at in range(0, 20_011, 512) for one in fast.indices(at, min(at + 512, 20_011))]
        assert found == list(slow.indices(0, 20_011))


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a window that is larger than what is kept, only a part is computed; and an array handed out is the caller's."""
    monkeypatch.setattr(orders, "KEPT_MAX", 20_000)
    fast, slow = VectorOrder(10**9, 3, chunk=10_000), Order(10**9, 3, chunk=10_000)
    for at in (0, 4000, 639_999, 123_456_789):
        found = fast.array(at, at + 300)
        assert found.tolist() == list(slow.indices(at, at + 300))
        assert len(fast._block[1]) <= 20_000
        found[:] = 0
        assert fast.index(at) == slow.index(at)
    assert len(VectorOrder(10).array(3, 3)) == 0


def test_without_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where numpy cannot be imported the core's own order serves, with the same numbers."""
    assert type(order_of(100, 3)) is VectorOrder
    monkeypatch.setitem(sys.modules, "numpy", None)
    order = order_of(100, 3, 1, chunk=7, window=2)
    assert type(order) is Order
    monkeypatch.undo()
    assert list(order.indices(0, 100)) == list(order_of(100, 3, 1, chunk=7, window=2).indices(0, 100))


def test_bad_positions() -> None:
    """Positions that the epoch has not are refused."""
    order = VectorOrder(10)
    for call in (order.array, order.indices):
        with pytest.raises(SpecError, match=r"positions: \[3, 11\): the epoch has \[0, 10\)"):
            call(3, 11)
    with pytest.raises(SpecError, match="position: 10"):
        order.index(10)
