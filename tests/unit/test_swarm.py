"""Plans by chance: the same from the same seed, valid at their level, and of few kinds each and all kinds together."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter

import pytest

from dlrover_core.errors import PlanError
from dlrover_core.sim.faults import ENGINE, LEVELS, LOCAL, kinds
from dlrover_core.sim.scenario import Scenario, plan_of
from dlrover_core.testing.swarm import FAULTS_MAX, KINDS_MAX, PLATFORM, draw, draw_scenario


@pytest.mark.parametrize("level", LEVELS)
def test_every_plan_can_be_run(level: str) -> None:
    """Whatever a seed draws, it is a plan of this level, of a few kinds, and its token says the same."""
    for seed in range(300):
        plan = draw(seed, Scenario.smoke() if seed % 2 else None, level=level).check()
        assert 1 <= len(plan.faults) <= FAULTS_MAX
        assert len({fault.kind for fault in plan.faults}) <= KINDS_MAX
        assert plan.seed == seed
        assert plan_of(plan.token()) == plan


def test_the_same_seed() -> None:
    """A seed's plan does not depend on the process, nor on the order in which kinds are named."""
    code = "from dlrover_core.testing.swarm import draw; print([draw(seed).token() for seed in range(5)])"
    told = {
        subprocess.run(
            [sys.executable, "-c", code],
            check=True,
            capture_output=True,
            text=True,
            timeout=60,
            env={**os.environ, "PYTHONHASHSEED": salt, "PYTHONPATH": os.pathsep.join(sys.path)},
        ).stdout.strip()
        for salt in ("1", "2")
    }
    assert told == {str([draw(seed).token() for seed in range(5)])}
    assert draw(3, kinds=["kill_node", "drop"]) == draw(3, kinds={"drop", "kill_node"})
    assert draw(3) != draw(4)


def test_the_scenario_does_not_move_the_world() -> None:
    """With other kinds allowed, a seed still draws the same job: two lists of faults can be compared on it."""
    assert draw(5).scenario == draw(5, kinds=["kill_worker"]).scenario == draw_scenario(5)


def test_all_kinds_come() -> None:
    """Over some hundred seeds each kind of the level is drawn, what platforms say if it is named, and all sorts of moments."""
    plans = [draw(seed) for seed in range(500)]
    many = Counter(fault.kind for plan in plans for fault in plan.faults)
    assert set(many) == set(kinds(ENGINE)) - set(PLATFORM)
    said = [draw(seed, kinds=PLATFORM) for seed in range(50)]
    assert {fault.kind for plan in said for fault in plan.faults} == set(PLATFORM)
    moments = {fault.at.partition(" ")[0] for plan in plans for fault in plan.faults}
    assert {"step", "event", "WorldFormed", "LeaderStarted", "incident", "all"} <= moments
    assert any(fault.at.endswith(" s") for plan in plans for fault in plan.faults)


def test_scenarios_vary() -> None:
    """Jobs of all sorts are drawn: with units, ranges, standbys, small budgets, and mostly of the size asked for."""
    drawn = [draw_scenario(seed, 64) for seed in range(300)]
    assert {1, 2, 4, 8} == {one.unit for one in drawn}
    assert {one.on_join for one in drawn} == {"restart", "never"}
    assert {one.standbys for one in drawn} == {0, 1, 2}
    assert any(0 < one.nodes_min < one.nodes for one in drawn)
    assert any(one.max_restarts < 6 for one in drawn)
    assert sum(one.nodes == 64 for one in drawn) > 200
    assert all(1 <= one.nodes <= 3 for one in (draw_scenario(seed, 3) for seed in range(100)))


def test_kinds_that_there_are_not() -> None:
    """A kind that the level lacks is refused by name, and so is none at all."""
    with pytest.raises(PlanError, match="disk_full"):
        draw(1, kinds=["disk_full", "kill_node"])
    assert {fault.kind for fault in draw(1, level=LOCAL, kinds=["disk_full"]).faults} == {"disk_full"}
    with pytest.raises(PlanError, match="no kinds"):
        draw(1, kinds=[])
