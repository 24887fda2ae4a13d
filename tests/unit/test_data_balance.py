"""Quotas by measured cost: all ranks need equally long, and plan the same; every sample is one rank's whatever is planned."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrover_core.data.balance import (
    CHANGE,
    PLAN_STEPS_MIN,
    SAMPLES,
    SAMPLES_MIN,
    Costs,
    balanced,
    steps_until_next,
)

COSTS = st.lists(st.floats(1e-6, 10), min_size=2, max_size=9)


def test_a_rank_that_is_slower_gets_less() -> None:
    """Three times slower: a third of the samples, so that all ranks need equally long."""
    assert balanced((32, 32, 32, 32), (0.002, 0.002, 0.002, 0.006)) == (39, 38, 38, 13)


@given(COSTS, st.integers(9, 500))
def test_no_plan_makes_a_step_longer(costs: list[float], batch: int) -> None:
    """The batch stays whole, every rank has samples, and the slowest rank's part is not longer; a second plan changes nothing."""
    equal = tuple(batch // len(costs) + (rank < batch % len(costs)) for rank in range(len(costs)))
    better = balanced(equal, costs)
    assert sum(better) == batch
    assert min(better) >= 1
    took = [max(one * cost for one, cost in zip(quota, costs, strict=True)) for quota in (equal, better)]
    assert better == equal or took[1] * CHANGE <= took[0]
    assert balanced(better, costs) == better


@pytest.mark.parametrize("cost", [0.0, math.nan, math.inf, -1.0])
def test_nothing_is_planned_before_all_costs_are_known(cost: float) -> None:
    """A rank that has measured nothing yet is not taken for a fast one."""
    assert balanced((8, 8), (0.1, cost)) == (8, 8)
    assert balanced((8, 8), (0.1,)) == (8, 8)


def test_little_is_not_worth_a_change() -> None:
    """Ranks that differ by some hundredths keep their quotas: measurements waver so much."""
    assert balanced((100, 100), (1.0, 1.04)) == (100, 100)
    assert balanced((100, 100), (1.0, 1.2)) != (100, 100)


def test_what_is_taken_from_a_rank_is_bounded() -> None:
    """A rank that stood still for a while keeps an eighth of an equal share, and shows by it when it is back."""
    assert balanced((80, 80), (1.0, 1000.0))[1] == pytest.approx(160 * (1 / 8) / 2, abs=2)


def test_costs_are_medians_of_the_newest_steps() -> None:
    """One hiccup does not count, few steps tell nothing, and old quotas' costs are forgotten."""
    costs = Costs()
    for _ in range(SAMPLES_MIN - 1):
        costs.step(4, 0.4, 1.0)
    assert costs.told(5) == (0.0, 1.0, 5)
    costs.step(4, 40.0, 100.0)
    costs.step(0, 0.0, 1.0)  # a rank without samples in a short batch
    assert costs.told(5) == (pytest.approx(0.1), 1.0, 5)
    for _ in range(SAMPLES):
        costs.step(4, 0.8, 2.0)
    assert costs.told(5) == (pytest.approx(0.2), 2.0, 5)
    costs.forget()
    assert costs.told(5) == (0.0, 0.0, 5)


def test_plans_stand_for_half_a_minute() -> None:
    """And for some steps where these are long."""
    assert steps_until_next(0.1) == 300
    assert steps_until_next(60.0) == steps_until_next(0.0) == PLAN_STEPS_MIN


# ---- the torch side

torch = pytest.importorskip("torch")

from torch.utils.data import DataLoader  # noqa: E402

from dlrover_adapters.torch import ElasticDataset  # noqa: E402
from dlrover_adapters.torch.data import quotas as measured  # noqa: E402
from dlrover_adapters.torch.data.plan import division  # noqa: E402
from dlrover_adapters.torch.data.quotas import Balance, QuotaTable, Stopwatch, lead_of  # noqa: E402


def test_a_quota_begins_with_the_step_that_was_named() -> None:
    """The table has the present quota and the next one; a third takes the first one's place."""
    table = QuotaTable((4, 4))
    table.follow(11, (5, 3))
    assert [table.at(step) for step in (0, 10, 11, 500)] == [(4, 4), (4, 4), (5, 3), (5, 3)]
    table.follow(40, (6, 2))
    assert [table.at(step) for step in (11, 39, 40)] == [(5, 3), (5, 3), (6, 2)]


@pytest.mark.parametrize(
    "context",
    [
        "fork",
        pytest.param("spawn", marks=pytest.mark.nightly(reason="each process imports torch; forked ones stand for it")),
    ],
)
def test_loader_processes_go_by_the_new_quotas(context: str) -> None:
    """They hear of them through shared memory, from the named step on, as the process that trains does."""
    data = ElasticDataset("train", size=64, fetch=int, seed=3, collate=list)
    table = QuotaTable((4, 4))
    data.divide(division(8, 4, 2, 0), table)
    loader = DataLoader(data, batch_size=None, num_workers=2, prefetch_factor=1, multiprocessing_context=context)
    drawn, found = iter(loader), []
    for number, step in enumerate(data.steps()):
        if number == 1:
            table.follow(1 + lead_of(loader, data.ahead), (7, 1))
        assert sum(micro.samples for micro in step.micros) == (4 if number < 4 else 7), number
        found.append([next(drawn) for _ in step.micros])
        assert found[-1] == [data.indices(step.batch, micro) for micro in step.micros], number
    assert len(found) == 8
    assert next(drawn, None) is None


def test_all_ranks_plan_the_same_in_the_same_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """They tell each other what a sample costs after step 5; the plan begins once the longest lead is over."""
    asked: list[Any] = []

    def gathered(mine: Any, size: int, _group: Any) -> list[Any]:
        asked.append(mine)
        return [(0.01 if rank else 0.03, 0.1, 3 + rank) for rank in range(size)]

    monkeypatch.setattr(measured, "world", SimpleNamespace(gathered=gathered))
    for rank in range(3):
        balance = Balance(division(12, 2, 3, rank), QuotaTable((4, 4, 4)), None, lead=3 + rank)
        monkeypatch.setattr(balance._watch, "step_s", lambda: 0.04)
        seen = []
        for _ in range(400):
            seen.append(balance.quota)
            balance.drawn()
            balance.forwarded(torch.zeros(()), 2)
            balance.drawn()
            balance.forwarded(torch.zeros(()), 2)
            balance.stepped()
        assert seen == [(4, 4, 4)] * 10 + [(2, 5, 5)] * 390
        assert len(asked) == 2, "after step 5, and after 300 more: steps of 0.1 s"
        assert asked[0] == (pytest.approx(0.01), pytest.approx(asked[0][1]), 3 + rank)
        asked.clear()


def test_no_quota_is_planned_before_the_slowest_loader_process_goes_by_the_last_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One process may be as far behind the loop as another is ahead of it, and the table has two quotas."""
    asked: list[int] = []

    def gathered(_mine: Any, size: int, _group: Any) -> list[Any]:
        asked.append(balance._made)
        return [((0.01, 0.03)[(rank + len(asked)) % 2], 1000.0, 50) for rank in range(size)]

    monkeypatch.setattr(measured, "world", SimpleNamespace(gathered=gathered))
    balance = Balance(division(12, 2, 2, 0), QuotaTable((6, 6)), None, lead=50)
    monkeypatch.setattr(balance._watch, "step_s", lambda: 0.04)
    for _ in range(300):
        balance.drawn()
        balance.forwarded(torch.zeros(()), 2)
        balance.stepped()
    assert asked[0] == 5
    assert asked[1] >= 5 + 50 + 50
    assert len(asked) >= 3


def test_padding_is_not_measured() -> None:
    """A stand-in of weight zero says nothing of what a sample costs."""
    watch = Stopwatch()
    watch.begin(accelerator=False)
    watch.end(counts=False)
    assert watch.step_s() == 0
    watch.begin(accelerator=False)
    watch.end(counts=True)
    assert watch.step_s() > 0
    assert watch.step_s() == 0


def test_an_accelerators_own_time_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward returns before the accelerator has computed it: events on its stream say when that was, in milliseconds."""
    made: list[Any] = []

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing
            self.at, self.over = len(made) * 250.0, False
            made.append(self)

        def record(self) -> None: ...

        def synchronize(self) -> None:
            self.over = True

        def elapsed_time(self, end: Event) -> float:
            assert end.over
            return end.at - self.at

    monkeypatch.setattr(torch.cuda, "Event", Event)
    watch = Stopwatch()
    for _ in range(2):
        watch.begin(accelerator=True)
        watch.end(counts=True)
    assert watch.step_s() == pytest.approx(0.5)
