"""The rule `hang.global`: which standstill is legal, by which budget."""

from __future__ import annotations

import pytest

from dlrover_core.diagnosis import stall
from dlrover_core.diagnosis.stall import Limits, Pulse

S = 1_000_000
LIMITS = Limits(60 * S, 1800 * S, 900 * S)


@pytest.mark.parametrize(
    ("pulse", "learnt_s", "expected_s", "budget"),
    [
        (Pulse(5, 0, 1 * S), 0, 60, "floor"),
        (Pulse(5, 0, 30 * S), 0, 90, "3 steps"),
        (Pulse(5, 0, 1 * S, 100 * S), 0, 150, "1.5 times the longest pause"),
        (Pulse(5, 0, 1 * S), 100, 150, "1.5 times the longest pause"),
        (Pulse(5, 0, 60 * S, 100 * S), 0, 180, "3 steps"),
        (Pulse(-1, 0), 0, 1800, "first steps"),
        (Pulse(1, 0), 0, 1800, "first steps"),
        (Pulse(9, 0, 1 * S, 0, 1), 0, 900, "evaluation"),
        (Pulse(9, 0, 1 * S, 2 * S, 1), 2, 900, "evaluation"),
        (Pulse(9, 0, 1 * S, 800 * S, 1), 0, 1200, "evaluation: 1.5 times the longest"),
        (Pulse(9, 0, 1 * S, 0, 2), 1000, 1500, "checkpoint: 1.5 times the longest"),
        (Pulse(9, 0, 1 * S, 2 * S, 3), 400, 900, "phase"),
    ],
)
def test_the_threshold_is_that_of_its_own_budget(pulse: Pulse, learnt_s: int, expected_s: int, budget: str) -> None:
    """Steps, pauses, the first steps and announced phases each have a budget, which what was learnt only makes longer."""
    assert stall.threshold(LIMITS, pulse, learnt_s * S) == (expected_s * S, budget)


def test_a_floor_above_all_holds_for_the_first_steps_too() -> None:
    """Whoever asks for more patience has it everywhere."""
    assert stall.threshold(Limits(5000 * S, 1800 * S, 900 * S), Pulse(), 0).us == 5000 * S


def test_several_workers_are_as_alive_as_the_liveliest() -> None:
    """The newest step of any counts, and one that evaluates has announced it for all who wait for it."""
    pulses = [Pulse(7, 9 * S, 2 * S, 50 * S, 0), Pulse(6, 4 * S, 3 * S, 8 * S, 1)]
    assert stall.together(pulses) == Pulse(7, 4 * S, 3 * S, 8 * S, 1)


def test_who_waits_for_an_announced_pause_does_not_learn_it_as_any_pause() -> None:
    """Rank 0 announced its evaluation of 90 s, rank 1 only waited: for a pause that nobody announces that says nothing."""
    assert stall.together([Pulse(7, 0, S, 2 * S, 0), Pulse(7, 0, S, 90 * S, 0)]).pause_us == 2 * S


@pytest.mark.parametrize(
    ("pulse", "learnt_s", "kept"),
    [
        (Pulse(5, 0, S, 30 * S), 0, False),
        (Pulse(5, 0, S, 50 * S), 0, True),
        (Pulse(5, 0, S, 50 * S), 45, False),
        (Pulse(5, 0, S, 50 * S), 30, True),
        (Pulse(5, 0, S, 500 * S, 1), 0, False),
        (Pulse(5, 0, S, 700 * S, 1), 0, True),
    ],
)
def test_only_pauses_that_change_something_are_written_down(pulse: Pulse, learnt_s: int, kept: bool) -> None:
    """The log holds what a next generation must know, not every new maximum."""
    assert stall.worth_keeping(LIMITS, pulse, learnt_s * S) is kept


@pytest.mark.parametrize(
    ("threshold", "expected"), [(60, [120, 240, 480, 900]), (400, [800, 1600, 2000]), (1800, [3600, 7200, 9000])]
)
def test_patience_doubles_and_ends(threshold: int, expected: list[int]) -> None:
    """Whoever is busy is looked at again after twice the time, for as long as a phase may take, or five thresholds."""
    looks, idle = [], threshold
    while patience := stall.patience_us(LIMITS, idle * S, threshold * S) // S:
        looks.append(idle := patience)
    assert looks == expected
