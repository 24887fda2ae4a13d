"""How often to save: the formulas, their bounds, and that all ranks keep the same time."""

from __future__ import annotations

import itertools
import math

import pytest

from dlrover_core.checkpoint.cadence import (
    AUTO,
    MTBF_UNKNOWN_S,
    Bounds,
    Cadence,
    Costs,
    Due,
    Measured,
    Plan,
    daly_s,
    planned,
    young_s,
)

FREE = Bounds(least=1, share_max=1e9, memory_s_max=1e9, store_s_max=1e9, change=1.0)
"""No bounds at all."""
CASES = [(0.005, 3600.0), (0.5, 600.0), (5.0, 3600.0), (60.0, 10_800.0), (60.0, 600.0), (120.0, 86_400.0)]


def overhead(interval_s: float, cost_s: float, mtbf_s: float) -> float:
    """What share of time is lost, by saving and by training again, at ``interval_s`` between saves.

    Exponential failures that may also strike a save, restarts not counted (Daly's complete model with R = 0).
    """
    try:
        return mtbf_s * math.expm1((interval_s + cost_s) / mtbf_s) / interval_s - 1
    except OverflowError:
        return math.inf


def best_s(cost_s: float, mtbf_s: float) -> tuple[float, float]:
    """By looking everywhere: the interval that loses the least, and how much that is."""
    tried = (mtbf_s * 3 * 1.002**-n for n in range(12_000))
    return min(((one, overhead(one, cost_s, mtbf_s)) for one in tried), key=lambda found: found[1])


@pytest.mark.parametrize(("cost_s", "mtbf_s"), CASES)
def test_daly_is_the_best_interval(cost_s: float, mtbf_s: float) -> None:
    """Daly's interval is within 1 % of the best one there is, and loses at most a thousandth more than that one."""
    interval_s, lost = best_s(cost_s, mtbf_s)
    assert daly_s(cost_s, mtbf_s) == pytest.approx(interval_s, rel=0.01)
    assert overhead(daly_s(cost_s, mtbf_s), cost_s, mtbf_s) <= lost * 1.001


def test_young_where_saves_are_cheap_and_daly_where_they_are_not() -> None:
    """Young's interval is Daly's where a save is cheap; where it costs a tenth of the time between failures Daly's loses less."""
    assert young_s(0.005, 3600) == pytest.approx(6.0)
    assert young_s(0.005, 3600) == pytest.approx(daly_s(0.005, 3600), rel=0.002)
    assert overhead(daly_s(60, 600), 60, 600) < overhead(young_s(60, 600), 60, 600) * 0.995
    assert daly_s(20, 10) == daly_s(50, 10) == 10
    assert overhead(1e9, 1, 1) == float("inf")


@pytest.mark.parametrize("step_s", [0.05, 0.4, 6.0])
@pytest.mark.parametrize(("cost_s", "mtbf_s"), CASES)
def test_a_plan_in_whole_steps_is_the_best_of_all(cost_s: float, mtbf_s: float, step_s: float) -> None:
    """Rounded to whole steps a plan loses at most 1 % more than the best number of steps does."""
    told = planned(Measured(step_s, cost_s, mtbf_s=mtbf_s), FREE, 0, Plan(1, 0))
    around = range(max(1, told.every // 3), told.every * 3 + 2)
    best = min(overhead(steps * step_s, cost_s, mtbf_s) for steps in around)
    assert overhead(told.every * step_s, cost_s, mtbf_s) <= best * 1.01


def test_bounds_hold() -> None:
    """Saving takes at most its share of the time; but for that it happens often enough, and never too often for two slots."""
    bounds, now = Bounds(), Plan(10, 100)
    dear = planned(Measured(0.2, 3.0, store_s=3.0, mtbf_s=60.0), bounds, 0, now)
    assert 3.0 / (dear.every * 0.2) == pytest.approx(0.01, rel=0.01)
    rare = planned(Measured(0.2, 0.01, store_s=0.01, mtbf_s=1e9), bounds, 0, now)
    assert rare.every * 0.2 == pytest.approx(bounds.memory_s_max)
    assert rare.store_every * 0.2 == pytest.approx(bounds.store_s_max)
    assert planned(Measured(30.0, 0.001, mtbf_s=3600.0), bounds, 0, now).every == bounds.least == 2


def test_storage_waits_for_the_slot_that_it_writes_and_is_a_save_in_memory_too() -> None:
    """No state is due for storage while one is still being written, and storage is due at steps that are saved in memory."""
    told = planned(Measured(0.1, 0.005, store_s=0.005, write_s=90.0, mtbf_s=600.0), Bounds(), 0, Plan(10, 100))
    assert told.store_every * 0.1 >= 90.0 * 0.95
    assert told.store_every % told.every == 0


def test_what_copies_do_not_survive_is_what_storage_is_for() -> None:
    """With copies on other nodes fewer failures need storage, and it is written more rarely; memory is not."""
    measured, now = Measured(0.1, 0.005, store_s=0.05, mtbf_s=600.0), Plan(24, 72)
    alone, copied = (planned(measured, Bounds(lost_share=share), 0, now) for share in (1.0, 0.1))
    assert alone.every == copied.every
    assert copied.store_every == pytest.approx(alone.store_every * 10**0.5, rel=0.2)


def test_an_unknown_failure_rate_has_a_stated_default() -> None:
    """Nothing known about failures: as if one came every three hours."""
    unknown, told = (planned(Measured(1.0, 2.0, mtbf_s=m), FREE, 0, Plan(1, 0)) for m in (0.0, MTBF_UNKNOWN_S))
    assert unknown == told


def test_only_a_real_change_changes_the_interval() -> None:
    """Noise of a tenth in any measurement leaves the intervals as they are; twice the cost does not."""
    first = planned(Measured(0.2, 0.02, 0.2, mtbf_s=3600.0), Bounds(), 0, Plan(10, 100))
    for step_s, save_s, store_s in itertools.product((0.19, 0.21), (0.018, 0.022), (0.18, 0.22)):
        again = planned(Measured(step_s, save_s, store_s, mtbf_s=3600.0), Bounds(), 100, first)
        assert again[:2] == first[:2]
    dearer = planned(Measured(0.2, 0.04, 0.4, mtbf_s=3600.0), Bounds(), 100, first)
    assert dearer.every > first.every
    assert dearer.store_every > first.store_every


def dues(cadence: Cadence, steps: range) -> tuple[list[int], list[int]]:
    """The steps saved in memory, and to storage."""
    told = [(step, cadence.due(step)) for step in steps]
    return [step for step, due in told if due.memory], [step for step, due in told if due.storage]


def test_fixed_intervals_count_from_zero() -> None:
    """Fixed intervals save at round steps, whatever step was restored; storage is ten times as rare unless said otherwise."""
    assert dues(Cadence(10), range(1, 205)) == ([*range(10, 201, 10)], [100, 200])
    assert dues(Cadence(10, 25, start=14), range(15, 101)) == ([*range(20, 101, 10)], [30, 50, 80, 100])
    assert dues(Cadence(1, 0), range(1, 5)) == ([1, 2, 3, 4], [])


def test_two_saves_are_never_nearer_than_two_slots_allow() -> None:
    """Where steps are told with gaps, a save is late rather than in the next call after another one."""
    cadence = Cadence(2)
    calls = [1, 3, 4, 5, 9, 10, 11, 12, 20, 21]
    saved = [number for number, step in enumerate(calls) if cadence.due(step).memory]
    assert all(
        later - earlier >= 2 for earlier, later in itertools.pairwise(saved) if calls[later] - calls[earlier] < 4
    )
    assert [calls[number] for number in saved] == [3, 5, 9, 11, 20]


def test_the_same_step_asked_twice_has_one_answer() -> None:
    """A loop that reports a step twice saves it once and hears the same; one that goes back is followed."""
    cadence = Cadence(2)
    assert [cadence.due(step) for step in (1, 2, 2)] == [Due(memory=False, storage=False)] + [
        Due(memory=True, storage=False)
    ] * 2
    assert dues(cadence, range(1, 5)) == ([2, 4], [])


def shared(ranks: list[Cadence], step: int, measured: Measured | None) -> list[Plan | None]:
    """All ranks take rank 0's plan."""
    said: list[bytes] = []

    def share(mine: bytes | None) -> bytes:
        if mine is not None:
            said.append(mine)
        return said[-1]

    return [
        one.replan(step, share, decides=rank == 0, measured=measured if rank == 0 else None)
        for rank, one in enumerate(ranks)
    ]


def test_all_ranks_change_at_the_same_step() -> None:
    """While costs and failure rates change, four ranks save at the same steps, each time with at least the plan's distance."""
    ranks = [Cadence(AUTO, bounds=Bounds(plan_steps_min=20, plan_s=1.0)) for _ in range(4)]
    saved, plans, told = [0], {ranks[0].plan[:2]}, 0
    for step in range(1, 4001):
        due = {one.due(step) for one in ranks}
        assert len(due) == 1
        before = ranks[0].plan
        if due.pop().memory:
            assert step - saved[-1] >= before.every
            saved.append(step)
        measured = Measured(0.1, 0.001 * (1 + step // 1000) ** 3, 0.1, 2.0, 7200.0 / (1 + step // 2000))
        taken = shared(ranks, step, measured)
        assert len(set(taken)) == 1
        if taken[0] is not None:
            told += 1
            assert taken[0].next > step
            plans.add(taken[0][:2])
    assert told > 10
    assert len(plans) > 3


def test_nobody_is_asked_between_two_plans() -> None:
    """A plan is shared where the one before said, and nowhere else; too little measured leaves the intervals."""
    cadence = Cadence(AUTO)
    asked = []
    for step in range(1, 61):
        cadence.due(step)
        before = cadence.plan
        if cadence.replan(step, lambda mine: mine or b"", decides=True) is not None:
            asked.append(step)
            assert cadence.plan[:2] == before[:2]
    assert asked == [20, 40, 60]
    fixed = Cadence(10)
    assert not any(fixed.due(step) and fixed.replans(step) for step in range(1, 100))


def test_after_a_restore_all_count_from_the_restored_step() -> None:
    """A rank that restored counts as one that was made with that step."""
    restored, made = Cadence(AUTO), Cadence(AUTO, start=77)
    restored.restored(77)
    assert restored.plan == made.plan
    assert dues(restored, range(78, 300)) == dues(made, range(78, 300))


@pytest.mark.parametrize(
    "told", [b"", b"nonsense", Plan(0, 10, 99), Plan(1, 10, 99), Plan(10, -1, 99), Plan(10, 100, 20)], ids=str
)
def test_a_plan_that_makes_no_sense_is_refused(told: bytes | Plan) -> None:
    """What no rank of this version says is not gone by."""
    from dlrover_core.checkpoint.cadence import _PLAN

    cadence = Cadence(AUTO)
    for step in range(1, 21):
        cadence.due(step)
    with pytest.raises(ValueError, match="do all ranks run the same version"):
        cadence.replan(20, lambda _mine: told if isinstance(told, bytes) else _PLAN.pack(*told), decides=False)


@pytest.mark.parametrize(
    ("every", "store_every"), [(0, None), (-3, 10), ("often", None), (True, None), (10, "auto"), (10, -1), (2.5, None)]
)
def test_intervals_that_are_none_are_refused(every: int | str, store_every: int | str | None) -> None:
    """A wrong interval is told when it is given, with what to give instead."""
    with pytest.raises(ValueError, match="steps"):
        Cadence(every, store_every)


def test_costs_are_told_from_steps() -> None:
    """A save costs what steps beside it take longer, at least its stall; writing costs what it slows all its steps by."""
    costs = Costs()
    assert costs.measured() is None
    for number in range(200):
        copying, writing = number % 10 == 0, 50 <= number % 100 < 80
        took = 0.1 + 0.03 * copying + 0.01 * (writing and not copying) + (20.0 if number == 70 else 0.0)
        costs.step(took, copying=copying, writing=writing)
        if copying:
            costs.saved(0.002)
    costs.written(3.3)
    told = costs.measured(mtbf_s=60.0)
    assert told is not None
    assert told == pytest.approx((0.1, 0.03, 0.03 + 0.01 * 30, 3.3, 60.0))


def test_where_every_step_saves_the_stall_is_the_cost() -> None:
    """No step without a save to compare with: the stall is what is known."""
    costs = Costs()
    for _ in range(5):
        costs.step(0.5, copying=True, writing=False)
        costs.saved(0.02)
    told = costs.measured()
    assert told is not None
    assert told[:2] == (0.5, 0.02)
