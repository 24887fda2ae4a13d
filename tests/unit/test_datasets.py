"""Failure data, and the streams drawn from them."""

from __future__ import annotations

import itertools
import statistics
from collections import Counter

import pytest

from dlrover_core.errors import PlanError
from dlrover_core.sim import datasets, faults, generator
from dlrover_core.sim.constants import Constants
from dlrover_core.sim.datasets import CLASSES, DATASETS, LLAMA3, SHAPES, USER, Dataset

SETS = pytest.mark.parametrize("data", DATASETS.values(), ids=list(DATASETS))
PUBLISHED = {"llama3": 419 + 47, "rsc": 38, "acme": 2575, "byterobust": 55_365, "unicron": 401, "b200": 21}


@SETS
def test_counts_are_the_published_ones(data: Dataset) -> None:
    """Every data set holds as many cases as its table does, and names its source."""
    assert sum(one.cases for one in data.causes) == PUBLISHED[data.name]
    assert "arXiv" in data.source


@SETS
def test_causes_are_told_apart(data: Dataset) -> None:
    """A fault's label leads back to its cause; each has a class, a way to strike, and what it needs to be gone."""
    for cause in data.causes:
        assert data.cause_of(cause.label) == cause
        assert cause.kind in CLASSES
        assert cause.shape in SHAPES
        assert bool(cause.repair) == SHAPES[cause.shape].hosts
        if cause.shape in ("fail", "sick", "code", "link", "hang"):
            assert cause.words


@SETS
def test_hazards_add_up(data: Dataset) -> None:
    """The causes' hazards are the data set's rate, and what a job's own program adds."""
    per_node = sum(data.hazard(one) for one in data.causes if not data.per_job(one))
    per_job = sum(data.hazard(one) for one in data.causes if data.per_job(one))
    assert per_node == pytest.approx(data.rate / 1000)
    assert per_job == pytest.approx(data.user_per_day or 0.0)


def test_published_rates() -> None:
    """Rates follow from counts, nodes and days where all three are published."""
    assert LLAMA3.rate * 419 / 466 == pytest.approx(3.79, abs=0.005)
    assert datasets.B200.rate == pytest.approx(6.06, abs=0.005)
    assert datasets.RSC.rate == 6.50
    assert [one.name for one in DATASETS.values() if "hazard" in " ".join(one.assumed)] == [
        "acme",
        "byterobust",
        "unicron",
    ]


def test_an_unknown_name_is_answered_with_near_ones() -> None:
    """Whoever mistypes a name is told which they may have meant."""
    with pytest.raises(PlanError, match=r"did you mean llama3\?"):
        datasets.dataset("llama")


def test_llama3_comes_out_as_it_was() -> None:
    """2,048 nodes for 54 days meet about 419 unexpected and 47 planned interruptions, over seeds."""
    unexpected, planned = [], []
    for seed in range(20):
        begun = [one for one in generator.stream(LLAMA3, nodes=2048, days=54, seed=seed) if generator.begins(one)]
        planned.append(sum(one.kind == "interrupt" for one in begun))
        unexpected.append(len(begun) - planned[-1])
    assert statistics.fmean(unexpected) == pytest.approx(419, rel=0.04)
    assert statistics.fmean(planned) == pytest.approx(47, rel=0.1)


@SETS
def test_a_stream_can_be_simulated(data: Dataset) -> None:
    """Every fault is one that the simulated engine knows, in order of time, and belongs to a cause."""
    drawn = generator.stream(data, nodes=200, spares=2, days=20, seed=3)
    times = [float(one.at.removesuffix(" s")) for one in drawn]
    assert drawn
    assert times == sorted(times)
    for fault in drawn:
        assert faults.checked(fault, faults.ENGINE) == fault
        assert generator.cause_of(data, fault) is not None


def test_a_seed_is_a_stream() -> None:
    """The same seed draws the same faults, another one others, and more days only add to them."""
    week = generator.stream(LLAMA3, nodes=500, days=7, seed=1)
    assert generator.stream(LLAMA3, nodes=500, days=7, seed=1) == week
    assert generator.stream(LLAMA3, nodes=500, days=7, seed=2) != week
    begun = [one for one in week if generator.begins(one)]
    assert [one for one in generator.stream(LLAMA3, nodes=500, days=9, seed=1) if generator.begins(one)][
        : len(begun)
    ] == begun


def test_constants_do_not_shift_chance() -> None:
    """With repairs that take twice as long as many failures begin, at the same times but for hosts that come back later."""
    short, long = (
        [one for one in generator.stream(LLAMA3, nodes=500, days=30, seed=1, constants=of) if generator.begins(one)]
        for of in (Constants.default().halved(), Constants.default().doubled())
    )
    same = {one.at for one in short} & {one.at for one in long}
    assert len(same) >= 0.75 * max(len(short), len(long))


def test_lemons() -> None:
    """1.5 % of hosts carry about 30 % of the inclination to fail."""
    shares = []
    for seed in range(10):
        stream = generator._Stream(LLAMA3, 4000, 0, 8, 16, seed, Constants.default())
        sums = [0.0, *stream._fleet.weights]
        each = sorted((after - before for before, after in itertools.pairwise(sums)), reverse=True)
        shares.append(sum(each[:60]) / sum(each))
    assert statistics.fmean(shares) == pytest.approx(0.30, abs=0.05)


def test_hosts_in_repair_do_not_fail() -> None:
    """Nothing befalls a host that is away."""
    away: dict[str, float] = {}
    for fault in generator.stream(LLAMA3, nodes=100, days=200, seed=5):
        at = float(fault.at.removesuffix(" s"))
        if isinstance(fault.target, str) and fault.target.startswith("host-"):
            assert at >= away.get(fault.target, 0.0) - 1.0
            if fault.kind == "kill_host":
                away[fault.target] = at + fault.amount


def test_user_errors_are_young() -> None:
    """Most errors of a program strike soon after a start."""
    drawn = generator.stream(datasets.ACME, nodes=4, days=400, seed=2)
    started, young = 0.0, Counter[bool]()
    for fault in drawn:
        cause, at = generator.cause_of(datasets.ACME, fault), float(fault.at.removesuffix(" s"))
        assert cause is not None
        if cause.kind == USER:
            young[at - started <= generator.INFANT_S] += 1
        started = at + fault.amount
    assert young[True] / young.total() > 0.6


def test_what_cannot_be_drawn_is_refused() -> None:
    """No nodes, or more failures than anybody could simulate, is an error in words."""
    with pytest.raises(PlanError, match="nothing that could fail"):
        generator.stream(LLAMA3, nodes=0, days=1, seed=0)
    with pytest.raises(PlanError, match="lower rate"):
        generator.stream(LLAMA3, nodes=10_000, days=1000, seed=0, rate=1000.0)
