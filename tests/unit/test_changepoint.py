"""Change points in what a rank computes: found in time, not found where there are none, explained by the work."""

from __future__ import annotations

import math
import random
from itertools import count
from statistics import median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlrover_core.diagnosis.changepoint import BLOCK_STEPS, ChangePoint
from dlrover_core.diagnosis.workload import FITTED, SKIPPED, Workload

WARM = 600
STEP_S = 0.04


def found(costs: list[float], point: ChangePoint | None = None) -> list[int]:
    """The steps after which a change is found."""
    point = point or ChangePoint()
    blocks = zip(*[iter(costs)] * BLOCK_STEPS, strict=False)
    return [at * BLOCK_STEPS for at, block in enumerate(blocks, 1) if point.push(median(block), at * 1.0)]


def noisy(steps: int, sigma: float, seed: int, times: float = 1.0) -> list[float]:
    """Steps of a rank, so many times as long as usual."""
    draw = random.Random(seed)
    return [STEP_S * times * math.exp(draw.gauss(0.0, sigma)) for _ in range(steps)]


@pytest.mark.parametrize("offset", range(5))
@pytest.mark.parametrize("sigma", [0.005, 0.02, 0.04])
def test_a_tenth_more_is_found_within_sixty_steps(offset: int, sigma: float) -> None:
    """Wherever in a window it begins, three windows' worth of evidence is there 60 steps after the change."""
    begin = WARM + offset * 4
    point = ChangePoint()
    steps = found(noisy(begin, sigma, offset) + noisy(60, sigma, offset + 50, 1.10), point)
    assert len(steps) == 1
    assert begin < steps[0] <= begin + 60
    assert point.slow is not None
    assert point.slow.times == pytest.approx(1.10, abs=0.05)
    assert point.slow.before_s == pytest.approx(STEP_S, rel=0.03)


def test_noise_that_nobody_explains_takes_longer_windows() -> None:
    """Fifteen parts in a hundred of noise hide a tenth from sixty steps, and not from a thousand."""
    steps = found(noisy(4000, 0.15, 1) + noisy(1000, 0.15, 2, 1.10))
    assert steps
    assert steps[0] > 4000


@pytest.mark.parametrize("sigma", [0.01, 0.05, 0.15])
def test_noise_alone_is_no_change(sigma: float) -> None:
    """Ten thousand steps of noise, and nothing is found."""
    assert found(noisy(10_000, sigma, 3)) == []


def test_what_the_day_brings_is_no_change() -> None:
    """Two parts in a hundred up and down with the hour are followed, not found."""
    wave = [cost * (1 + 0.02 * math.sin(at / 8_640)) for at, cost in enumerate(noisy(20_000, 0.01, 4))]
    assert found(wave) == []


def test_a_few_slow_steps_are_no_change() -> None:
    """A checkpoint every fifty steps, ten times as long, changes no median; nor does half a window of slow steps."""
    costs = noisy(WARM, 0.01, 5) + noisy(25, 0.01, 6, 1.5) + noisy(WARM, 0.01, 7)
    assert found([cost * (10 if at % 50 == 0 else 1) for at, cost in enumerate(costs)]) == []


def test_it_ends_when_the_rank_computes_as_it_did() -> None:
    """What was found stands, through its own noise, until three windows are below the middle again; a return is a new one."""
    point = ChangePoint()
    assert found(noisy(WARM, 0.01, 1) + noisy(200, 0.01, 2, 1.2), point)
    assert point.slow is not None
    assert found(noisy(WARM, 0.01, 3), point) == []
    assert point.slow is None
    assert found(noisy(100, 0.01, 4, 1.2), point)
    assert point.number == 2


def test_slower_still_is_found_and_told_against_what_was_normal() -> None:
    """After one change comes another: ``jump`` is the second alone, ``before`` stays what was normal."""
    point = ChangePoint()
    found(noisy(WARM, 0.01, 1) + noisy(WARM, 0.01, 2, 1.2) + noisy(80, 0.01, 3, 1.5), point)
    assert point.number == 2
    assert point.jump == pytest.approx(1.25, rel=0.03)
    assert point.slow is not None
    assert point.slow.times == pytest.approx(1.5, rel=0.03)


@pytest.mark.parametrize("times", [1.3, 0.7])
@pytest.mark.parametrize("later", [10, 60, 150, 300])
def test_a_change_soon_after_another_is_found(times: float, later: int) -> None:
    """A rank that has just changed, perhaps with all others, and then takes three times as long: found at once and not learnt as
    what is normal; ``jump`` is what both changes made together where peers hold themselves against what was before both.
    """
    point = ChangePoint()
    found(noisy(WARM, 0.02, 1) + noisy(60 + later, 0.02, 2, times), point)
    before = point.number
    assert before == (1 if times > 1 else 0)
    steps = found(noisy(100, 0.02, 3, 3.0), point)
    assert steps
    assert steps[0] <= 60
    assert point.jump == pytest.approx(3.0 / min(times, 1.0), rel=0.05)
    assert point.slow is not None
    assert point.slow.now_s == pytest.approx(3.0 * STEP_S, rel=0.05)
    assert point.slow.before_s == pytest.approx(STEP_S * min(times, 1.0), rel=0.05)


@pytest.mark.parametrize("sigma", [0.01, 0.05, 0.15])
def test_noise_alone_is_no_second_change(sigma: float) -> None:
    """What is held against the level of three windows has room for all that their noise makes of it."""
    for seed in range(20):
        point = ChangePoint()
        found(noisy(WARM, sigma, seed) + noisy(WARM, sigma, seed + 50, 1.6), point)
        assert point.number == 1


def test_another_process_of_a_slow_rank_is_slow_still() -> None:
    """A restart teaches a new baseline, and does not make a slow machine a normal one; its recovery is seen after it."""
    point = ChangePoint()
    found(noisy(WARM, 0.01, 1) + noisy(100, 0.01, 2, 1.3), point)
    point.begin_again()
    found(noisy(WARM, 0.01, 3, 1.3), point)
    assert point.slow is not None
    found(noisy(100, 0.01, 4), point)
    assert point.slow is None


@settings(max_examples=60, deadline=None)
@given(st.lists(st.one_of(st.floats(), st.floats(1e-6, 1e3)), max_size=300))
def test_any_costs_are_survived_within_bounds(costs: list[float]) -> None:
    """Whatever a broken worker writes: no error, no growth, the same answers again, and a finite ratio."""
    one, other = ChangePoint(), ChangePoint()
    answers = [[point.push(cost, float(at)) for at, cost in enumerate(costs)] for point in (one, other)]
    assert answers[0] == answers[1]
    assert math.isfinite(one.ratio)
    for scale in one._scales:
        assert len(scale.newest) <= 4
        assert len(scale.middles) <= 9
        assert len(scale._history) <= 64


def sequences(seed: int) -> tuple[float, float]:
    """Tokens and squared lengths of a batch whose cost varies by about 15 parts in a hundred."""
    draw = random.Random(seed)
    lengths = [max(1.0, draw.gauss(2048, 870)) for _ in range(8)]
    return sum(lengths), sum(length * length for length in lengths)


def cost_of(tokens: float, squares: float, draw: random.Random, times: float = 1.0) -> float:
    """Overhead, a part per token, attention's part, and noise of its own."""
    return times * (0.004 + 1.8e-6 * tokens + 1.5e-10 * squares) * math.exp(draw.gauss(0.0, 0.01))


def test_long_sequences_are_explained_and_slowness_is_not() -> None:
    """What tokens and squared lengths explain is taken out to a part in a hundred; what a slow machine adds stays whole."""
    work, draw, seeds = Workload(), random.Random(1), count()
    raw, before, after = [], [], []
    for step in range(SKIPPED + FITTED + 400):
        tokens, squares = sequences(next(seeds))
        slow = step >= SKIPPED + FITTED + 200
        seconds = cost_of(tokens, squares, draw, 1.10 if slow else 1.0)
        cost = work.explained(seconds, tokens, squares)
        assert (cost is None) == (step < SKIPPED + FITTED)
        if cost is not None:
            (after if slow else before).append(cost)
            raw.append(seconds / (1.10 if slow else 1.0))
    spread = [max(values[20:-20]) / min(values[20:-20]) for values in (sorted(raw), sorted(before))]
    assert spread[0] > 1.3
    assert spread[1] < 1.04
    assert median(after) / median(before) == pytest.approx(1.10, abs=0.01)


def test_a_fixed_number_of_tokens_changes_nothing() -> None:
    """A trainer that reports the same count each step gets its seconds back; so does one whose reports explain nothing."""
    work = Workload()
    costs = [work.explained(0.05 + 0.001 * (step % 3), 4096.0) for step in range(SKIPPED + FITTED + 3)]
    assert costs[-3:] == pytest.approx([0.05, 0.051, 0.052], rel=0.05)


def test_a_few_wild_steps_do_not_spoil_the_proportions() -> None:
    """Steps that took ten times as long while the proportions were learnt are left out of them."""
    work, draw, seeds = Workload(), random.Random(2), count(1000)
    for step in range(SKIPPED + FITTED):
        tokens, squares = sequences(next(seeds))
        work.explained(cost_of(tokens, squares, draw, 10.0 if step % 40 == 0 else 1.0), tokens, squares)
    costs = []
    for _ in range(100):
        tokens, squares = sequences(next(seeds))
        costs.append(work.explained(cost_of(tokens, squares, draw), tokens, squares) or 0.0)
    assert max(costs) / min(costs) < 1.12
