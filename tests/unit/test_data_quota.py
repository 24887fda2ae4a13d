"""Batches and quotas: each position of an epoch is in one batch and at one rank, and the world changes neither."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrover_core.data.quota import Batch, batches, offsets, quotas, slots
from dlrover_core.errors import SpecError


@given(st.integers(1, 40), st.integers(1, 9), st.integers(1, 3), st.sampled_from(["drop", "keep"]))
def test_every_position_is_in_one_batch(size: int, batch: int, epochs: int, last: str) -> None:
    """The batches of an epoch, one after the other, are its positions; with ``drop`` without the remainder."""
    if last == "drop" and batch > size:
        return
    plan = batches(size, batch, epochs=epochs, last=last)
    place, found = (0, 0), []
    while (one := plan.next(*place)) is not None:
        found.append(one)
        assert plan.at(len(found) - 1) == one
        place = plan.after(one)
        assert plan.next(one.epoch, one.end) == plan.next(*place), "the end of an epoch has one meaning"
    assert place == (epochs, 0)
    assert len(found) == plan.steps
    assert plan.at(len(found)) is None
    whole = size - size % batch if last == "drop" else size
    for epoch in range(epochs):
        mine = [at for one in found if one.epoch == epoch for at in range(one.start, one.end)]
        assert mine == list(range(whole))
    assert all(one.samples == batch for one in found if one.end < whole)


@given(
    st.integers(1, 300),
    st.lists(st.floats(0.01, 100) | st.integers(1, 50), min_size=1, max_size=9),
    st.integers(0, 300),
)
def test_every_slot_is_one_ranks(batch: int, weights: list[float], short: int) -> None:
    """The ranks' slots follow one another and are the whole batch, a short one, too; quotas are within one of the exact share."""
    if batch < len(weights):
        return
    quota = quotas(batch, weights)
    assert sum(quota) == batch
    assert min(quota) >= 1
    exact = [batch * one / sum(weights) for one in weights]
    if min(exact) >= 1:
        assert all(abs(got - one) < 1 + 1e-9 for got, one in zip(quota, exact, strict=True))
    for count in (batch, min(short, batch)):
        at = 0
        for rank in range(len(quota)):
            start, end = slots(count, quota, rank)
            assert start == at <= end
            at = end
        assert at == count
    assert [slots(batch, quota, rank)[0] for rank in range(len(quota))] == list(offsets(quota)[:-1])


def test_known_quotas() -> None:
    """By hand: an equal share, its remainder to the lowest ranks; weights; a slow rank that would get nothing gets one."""
    assert quotas(512, 4) == (128, 128, 128, 128)
    assert quotas(10, 4) == (3, 3, 2, 2)
    assert quotas(10, [1, 1, 1, 1 / 3]) == (3, 3, 3, 1)
    assert quotas(7, [1.5, 0.5]) == (5, 2)
    assert quotas(4, [100, 1, 1, 1]) == (1, 1, 1, 1)
    assert quotas(2**40, 3) == (366503875926, 366503875925, 366503875925)
    assert [slots(3, (128, 128, 128, 128), rank) for rank in range(4)] == [(0, 1), (1, 2), (2, 3), (3, 3)]
    assert slots(0, (2, 2), 1) == (0, 0)


def test_batches_without_end() -> None:
    """With ``epochs=0`` there is always a next batch."""
    plan = batches(10, 4, epochs=0)
    assert plan.next(999, 8) == Batch(999, 8, 10)
    assert plan.next(999, 10) == Batch(1000, 0, 4)
    assert plan.at(3 * 10**9) == Batch(10**9, 0, 4)
    assert plan.steps == 0
    assert plan.at(-1) is None


def test_an_epoch_that_began_before_the_data_grew() -> None:
    """It ends with its own samples; the next one has all."""
    plan = batches(20, 4, epochs=3, in_flight=(1, 10))
    assert [plan.size_of(epoch) for epoch in range(3)] == [20, 10, 20]
    assert plan.next(1, 8) == Batch(1, 8, 10)
    assert plan.after(Batch(1, 8, 10)) == (2, 0)
    assert plan.next(1, 10) == Batch(2, 0, 4)
    assert plan.next(0, 12) == Batch(0, 12, 16)
    drop = batches(20, 4, epochs=3, last="drop", in_flight=(1, 10))
    assert drop.after(Batch(1, 4, 8)) == (2, 0)
    assert drop.next(1, 8) == Batch(2, 0, 4)


def test_another_batch_in_mid_epoch() -> None:
    """A batch of another size goes on where the one before ended."""
    small, large = batches(100, 8), batches(100, 30)
    assert large.next(0, small.at(2).end) == Batch(0, 24, 54)  # type: ignore[union-attr]


def test_bad_input() -> None:
    """Each is refused with field, value and remedy."""
    for made, words in (
        (lambda: batches(0, 4), "size: 0 samples: give a dataset of 1"),
        (lambda: batches(10, 0), "global_batch: 0: give 1 or more"),
        (lambda: batches(10, 2, epochs=-1), "epochs: -1: give 1 or more, or 0"),
        (lambda: batches(10, 2, last="pad"), 'last: \'pad\': give "drop" or "keep"'),
        (lambda: batches(10, 20, last="drop"), 'global_batch: 20 is more than the 10 samples .* give last="keep"'),
        (lambda: quotas(3, 4), "global_batch: 3 is less than the world size of 4"),
        (lambda: quotas(3, 0), "world: 0: give 1 or more"),
        (lambda: quotas(3, []), "weights: there are none"),
        (lambda: quotas(3, [1, 0]), "weights: 0 of rank 1: give a positive number"),
        (lambda: quotas(3, [math.nan]), "weights: nan of rank 0"),
        (lambda: quotas(3, [math.inf]), "weights: inf of rank 0"),
        (lambda: slots(3, (1, 2), 2), "rank: 2: the quotas are of ranks 0 to 1"),
    ):
        with pytest.raises(SpecError, match=words):
            made()  # type: ignore[no-untyped-call]


def test_a_world_size_divides_as_equal_weights_do() -> None:
    """Equal shares are computed by a division, weighted ones by largest remainder: both are the same numbers."""
    for ranks in range(1, 13):
        for batch in range(ranks, 60):
            assert quotas(batch, ranks) == quotas(batch, [1.0] * ranks)
