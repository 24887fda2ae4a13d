"""Which optimizer calls are training steps."""

from __future__ import annotations

import gc

import pytest

from dlrover_adapters.torch.pace import SILENT_CALLS, Pace


class Optimizer:
    """As far as pace is concerned."""


A, B, C = Optimizer(), Optimizer(), Optimizer()


def steps(calls: list[Optimizer]) -> int:
    """Steps that these calls complete."""
    pace = Pace()
    return sum(pace.called(one) for one in calls)


@pytest.mark.parametrize(
    ("calls", "expected"),
    [
        ([A], 1),
        ([A] * 7, 7),
        ([A, B] * 7, 7),
        ([A, B, C] * 50, 50),
        ([A, *[B] * 7], 7),
    ],
    ids=["first", "one", "gan", "optimizer-in-backward", "warm-up"],
)
def test_one_step_per_round(calls: list[Optimizer], expected: int) -> None:
    """However many optimizers a round has, it is one step, and the very first call is one already."""
    assert steps(calls) == expected


def test_a_slower_optimizer_takes_the_pace() -> None:
    """A critic that is stepped five times per generator step does not count fivefold for long."""
    pace = Pace()
    rounds = [[A] * 5 + [B]] * 20
    counts = [sum(pace.called(one) for one in calls) for calls in rounds]
    assert counts[:3] == [5, 5, 5]
    assert counts[3:] == [1] * 17


def test_a_skipped_step_changes_nothing() -> None:
    """An optimizer that a gradient scaler skips once (AMP) does not become the pace."""
    calls = [A, B] * 10 + [A] + [A, B] * 10
    assert steps(calls) == 21


def test_a_new_phase_is_followed() -> None:
    """When the pace falls silent for good, another optimizer's calls count."""
    pace = Pace()
    for one in [A, B] * 10:
        pace.called(one)
    later = [pace.called(B) for _ in range(SILENT_CALLS + 50)]
    assert sum(later) >= 50
    assert all(later[-40:])


def test_a_dropped_optimizer_is_followed_by_the_next() -> None:
    """An optimizer that is garbage keeps no pace."""
    pace, first = Pace(), Optimizer()
    for _ in range(5):
        pace.called(first)
    del first
    gc.collect()
    assert [pace.called(A) for _ in range(5)].count(True) >= 4
