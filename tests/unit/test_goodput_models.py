"""Closed forms, constants, the model of restart-all, and the simulation of ours, held against one another."""

from __future__ import annotations

import json
import math
import random

import pytest

from dlrover_core.checkpoint.cadence import daly_s, young_s
from dlrover_core.errors import PlanError
from dlrover_core.sim import datasets, policies, restart_all
from dlrover_core.sim.constants import ASSUMED, CHOSEN, MEASURED, MEASURED_FILE, Constants
from dlrover_core.sim.faults import ENGINE, Fault
from dlrover_core.sim.scenario import Plan, Scenario
from dlrover_core.sim.simulation import simulate

POINTS = 0.005
HOUR_S = 3600.0


def ettr_exact(mttf: float, tau: float, stall: float, restart: float) -> float:
    """Effective training time ratio of exponential failures; none strikes during a restart. All in seconds.

    ``tau``: useful time between two checkpoints, each of which costs ``stall``. A segment of ``tau + stall`` survives with
    p = exp(-(tau + stall) / mttf); p / (1 - p) of them are kept between two failures, that is per ``mttf + restart`` of time.
    The renewal argument behind Daly's model.
    """
    return tau / ((mttf + restart) * math.expm1((tau + stall) / mttf))


def exponential(mttf: float, count: int, seed: int, workers: int) -> tuple[tuple[Fault, ...], float]:
    """So many deaths of workers, a memoryless time apart; and when the last one is."""
    chance, clock, faults = random.Random(seed), 0.0, []
    for _ in range(count):
        clock += chance.expovariate(1 / mttf)
        faults.append(Fault(f"{clock:.3f} s", "kill_worker", chance.randrange(workers)))
    return tuple(faults), clock


@pytest.mark.parametrize(
    ("mttf_h", "expected"),
    [
        (1.80, (0.643, 0.956, 0.978)),
        (2.46, (0.711, 0.967, 0.982)),
        (10.0, (0.867, 0.989, 0.989)),
        (28.9, (0.903, 0.994, 0.991)),
    ],
)
def test_ettr_exact(mttf_h: float, expected: tuple[float, ...]) -> None:
    """The exact ratio at three ways to save: hourly for 5 min, every 5 min for 1 s, every minute for half a second."""
    ways = ((3600, 300, 300), (300, 1, 120), (60, 0.5, 60))
    got = [ettr_exact(mttf_h * HOUR_S, *way) for way in ways]
    assert got == pytest.approx(expected, abs=0.0006)


def test_young_and_daly() -> None:
    """Young's interval is where the first-order ratio is best, and Daly's next to where the exact one is."""
    mttf, stall = 3 * HOUR_S, 30.0
    young, daly = young_s(stall, mttf), daly_s(stall, mttf)
    exact = {tau: ettr_exact(mttf, tau, stall, 60.0) for tau in range(200, 2000)}
    assert daly == pytest.approx(max(exact, key=lambda tau: exact[tau]), rel=0.01)
    assert young == pytest.approx(math.sqrt(2 * 30 * 3 * 3600))


def test_mean_time_to_failure() -> None:
    """16,384 GPUs at RSC-1's rate fail every 1.80 hours."""
    assert policies.mttf_s(2048, 6.50) / HOUR_S == pytest.approx(1.80, abs=0.005)
    assert policies.mttf_s(10, 0.0) == math.inf


@pytest.mark.parametrize(("tau", "stall", "restart"), [(900, 10, 300), (300, 1, 120), (3600, 300, 300)])
def test_restart_all_agrees_with_the_closed_form(tau: float, stall: float, restart: float) -> None:
    """The model of restart-all is within half a point of the exact ratio when failures are exponential."""
    mttf = 8000.0
    faults, until = exponential(mttf, 2000, 1, 8)
    constants = Constants.default().set(
        {
            "all_checkpoint_s": stall,
            "all_checkpoint_every_s": tau,
            "all_restart_s": restart / math.sqrt(8 / 98_304),
            "all_detect_s": 0.0,
        }
    )
    told = restart_all.run(constants.scenario(1, 8, 1, 0, mttf), faults, until, mttf, constants)
    assert told.goodput == pytest.approx(ettr_exact(until / 2000, tau, stall, restart), abs=POINTS)
    assert sum(told.by_class.values()) == pytest.approx(until)


@pytest.mark.parametrize(("tau", "stall", "load"), [(30, 0.5, 6.0), (6, 0.1, 6.0), (90, 1.0, 12.0)])
def test_the_engine_agrees_with_the_closed_form(tau: int, stall: float, load: float) -> None:
    """The real engine, simulated, is within half a point of the exact ratio when failures are exponential."""
    faults, until = exponential(720.0, 600, 2, 4)
    scenario = Scenario(
        nodes=2, workers_per_node=2, spares=0, step_s=0.25, checkpoint_steps=4 * tau, checkpoint_s=stall,
        start_s=0.02, load_s=load, stop_s=0.02, exit_s=0.0,
    )  # fmt: skip
    expected = ettr_exact(until / 600, tau, stall, load + 0.05)
    plan = Plan(ENGINE, scenario_of(scenario, round(0.97 * expected * until / scenario.step_s)), faults, 1)
    run = simulate(plan, keep=False)
    assert run.outcome == "succeeded"
    assert run.goodput == pytest.approx(expected, abs=POINTS)


def scenario_of(scenario: Scenario, steps: int) -> Scenario:
    """The same with so many steps."""
    from dataclasses import replace

    return replace(scenario, steps=steps, settings=(("progress_s", 3600.0),))


def test_restart_all_reproduces_a_published_run() -> None:
    """FT-HSDP's baseline: a failure every 18 min and a restart of 10 give 44 % (+-3) at 98,304 GPUs, saved every 8."""
    mttf = 18 * 60.0
    faults, until = exponential(mttf, 2000, 3, 98_304)
    constants = Constants.default().set({"all_checkpoint_every_s": 480.0})
    told = restart_all.run(constants.scenario(12_288, 8, 1, 0, mttf), faults, until, mttf, constants)
    assert told.goodput == pytest.approx(0.44, abs=0.03)


def test_restart_all_on_llama3() -> None:
    """Llama 3's own run had more than 90 % of effective time: so does restart-all with its failures, in 54 days."""
    question = policies.Question(datasets.LLAMA3, 2048, 54.0, 1, spares=21)
    told, _ = policies.answer(question, policies.policy("restart-all"), Constants.default())
    assert 0.90 < told.goodput < 0.96


def test_checkpoints_beside_training() -> None:
    """An asynchronous peer loses less to saving; a failure while storage has not got the last one costs the one before, too."""
    question = policies.Question(datasets.LLAMA3, 256, 20.0, 1, spares=3, rate=6.0)
    goodput = {
        name: policies.answer(question, policies.policy(name), Constants.default())[0].goodput
        for name in policies.POLICIES
    }
    assert goodput["restart-all"] < goodput["restart-async"] < goodput["default"]
    constants = Constants.default().set(
        {"all_checkpoint_every_s": 1000.0, "async_stall_s": 10.0, "async_write_s": 100.0}
    )
    scenario, began = constants.scenario(1, 8, 1, 0, 1e5), restart_all.restart_s(8, constants)
    for at_s, lost_s in ((1050.0, 1040.0), (1150.0, 140.0), (900.0, 900.0)):
        faults = (Fault(f"{began + at_s:.3f} s", "kill_worker", 0),)
        told = restart_all.run(scenario, faults, 5000.0, 1e5, constants, asynchronous=True)
        assert told.lost_s == pytest.approx(lost_s, abs=0.01)
        assert sum(told.by_class.values()) == pytest.approx(5000.0)


def test_a_model_waits_for_hosts() -> None:
    """Without a spare a job that needs all of its hosts waits for the repair; one that may shrink goes on slower."""
    constants = Constants.default()
    faults = (Fault("1000 s", "kill_host", "host-1", 5000.0),)
    waits = restart_all.run(constants.scenario(4, 8, 1, 0, 1e5), faults, 20_000.0, 1e5, constants)
    shrinks = restart_all.run(constants.scenario(4, 8, 1, 0, 1e5, 3), faults, 20_000.0, 1e5, constants)
    assert waits.by_class["wait"] == pytest.approx(4999.9)
    assert shrinks.by_class["wait"] == 0.0
    assert shrinks.by_class["degraded"] > 1000.0
    assert waits.recoveries[0].wait_s == pytest.approx(4999.9)


def test_a_sick_host_fails_every_restart() -> None:
    """Restart-all fails again and again on a host that stays, until it is taken away; a hang lasts until the watchdog."""
    constants = Constants.default().set({"all_restart_s": 6400.0})
    scenario = constants.scenario(4, 8, 1, 1, 1e5)
    sick = (Fault("1000 s", "sick_host", "host-1", 3600.0), Fault("2500 s", "kill_host", "host-1", 3600.0))
    told = restart_all.run(scenario, sick, 20_000.0, 1e5, constants)
    assert len(told.recoveries) > 5
    hung = restart_all.run(scenario, (Fault("1000 s", "hang_worker", 3),), 20_000.0, 1e5, constants)
    assert hung.by_class["detect"] == pytest.approx(600.0)


def test_measured_constants_are_fresh() -> None:
    """`measured.json` is what the benchmarks' results say (else: python -m tools.measured_constants)."""
    from tools.measured_constants import FILE, text

    assert FILE.samefile(MEASURED_FILE)
    assert MEASURED_FILE.read_text() == text()


def test_every_constant_says_where_it_is_from() -> None:
    """Each has a mark, a unit and a meaning; what is measured names a result file, and nobody measures what is assumed."""
    for one in Constants.default().all:
        assert one.mark in (MEASURED, ASSUMED, CHOSEN)
        assert one.doc
        assert one.unit
        assert (one.mark == MEASURED) == one.source.startswith("benchmarks/results/")
        assert one.source or one.mark == CHOSEN


def test_the_range_scales_what_is_assumed() -> None:
    """Halved and doubled are the assumed constants, all of them, and nothing else; what somebody sets is not assumed any more."""
    constants = Constants.default().set({"boot_s": 20})
    for half, one, double in zip(constants.halved().all, constants.all, constants.doubled().all, strict=True):
        factor = 2.0 if one.mark == ASSUMED else 1.0
        assert (half.value, double.value) == pytest.approx((one.value / factor, one.value * factor))
    assert constants["boot_s"] == constants.halved()["boot_s"] == 20.0


def test_settings_reach_the_scenario() -> None:
    """Constants, fields of the scenario and settings of the job are set by name; typos are answered with near names."""
    constants = Constants.default().set(
        {"notice_s": "7", "hosts_per_rack": "4", "silence_s": "20", "fixed_batch": "no"}
    )
    scenario = constants.scenario(4, 2, 1.0, 1, 1e5)
    assert (scenario.notice_s, scenario.hosts_per_rack, scenario.fixed_batch) == (7.0, 4, False)
    assert scenario.spec().silence_s == 20.0
    with pytest.raises(PlanError, match=r"did you mean .*notice_s"):
        Constants.default().set({"notic_s": 3})
    for wrong in ({"boot_s": "soon"}, {"boot_s": -1}, {"unit": 1.5}, {"fixed_batch": "perhaps"}):
        with pytest.raises(PlanError, match=next(iter(wrong))):
            Constants.default().set(wrong)


def test_two_policies_meet_the_same_failures() -> None:
    """Ours and restart-all are struck by the same causes in the same period, and ours trains more of it."""
    question = policies.Question(datasets.LLAMA3, 16, 4.0, 3, spares=1, rate=300.0)
    ours, run = policies.answer(question, policies.policy("default"), Constants.default())
    theirs, _ = policies.answer(question, policies.policy("restart-all"), Constants.default())
    assert run is not None
    assert ours.outcome == "succeeded"
    assert sum(ours.by_class.values()) == pytest.approx(ours.virtual_s, rel=1e-6)
    assert {one.cause for one in theirs.incidents} <= {one.cause for one in ours.incidents}
    assert abs(ours.failures - theirs.failures) <= 2
    assert ours.goodput > theirs.goodput
    json.dumps([ours.values(), theirs.values()])


def test_the_ladder_completes_what_a_restart_can_cure() -> None:
    """Of Acme's jobs all that hardware or a network fails get through, none whose program is wrong; without us none of either."""
    from tools.completion import completion

    told = completion(datasets.ACME, 60, 1, Constants.default())
    assert told.without < told.ladder < 1.0
    assert told.cured == {"network": (2, 2), "software": (1, 1), "user": (21, 0)}
    assert told.without == pytest.approx(1 - (2 + 1 + 21) / 60)
