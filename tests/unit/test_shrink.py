"""What it takes, out of what was done: few replays, always something that was seen to fail, and the same failure."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest

from dlrover_core.sim.faults import ENGINE, Fault
from dlrover_core.sim.run import Broken
from dlrover_core.sim.scenario import Plan, Scenario
from dlrover_core.testing.shrink import REPLAYS_MAX, promise_of, shrink

FORTY = tuple(Fault(f"step {step}", "kill_worker", step) for step in range(1, 41))


def plan(faults: tuple[Fault, ...] = FORTY, **scenario: object) -> Plan:
    """A plan of forty faults, unless said."""
    return Plan(ENGINE, Scenario(**scenario), faults, 7)


def needs(*causes: Fault) -> Callable[[Plan], None]:
    """Breaks a promise where all of the causes are there, in words that differ from plan to plan."""

    def run(one: Plan) -> None:
        if set(causes) <= set(one.faults):
            raise Broken(f"{len(one.faults)} nodes are worker-{len(one.faults)}", len(one.faults), "NodeJoined")

    return run


def test_one_cause_of_forty() -> None:
    """Whichever of 40 faults is the cause, it is found alone, in at most 10 replays."""
    for cause in FORTY:
        least = shrink(plan(), needs(cause))
        assert least.plan.faults == (cause,)
        assert least.whole
        assert least.replays <= 10


def test_two_causes_of_forty() -> None:
    """Whichever two of 40 faults are the causes, they are found alone, in at most 20 replays, far below the 50 promised."""
    for causes in itertools.combinations(FORTY, 2):
        least = shrink(plan(), needs(*causes))
        assert least.plan.faults == causes
        assert least.replays <= 20 <= REPLAYS_MAX


def test_more_causes() -> None:
    """Five causes are found within the 50 replays; ten are not, and what is returned fails and says so."""
    dice = random.Random(1)
    for _ in range(50):
        causes = tuple(sorted(dice.sample(FORTY, 5), key=FORTY.index))
        assert shrink(plan(), needs(*causes)).plan.faults == causes
    causes = tuple(FORTY[:20:2])
    least = shrink(plan(), needs(*causes), replays_max=15)
    assert not least.whole
    assert least.replays == 15
    assert set(causes) <= set(least.plan.faults)


def test_not_monotone() -> None:
    """Where a fault hides a failure, what is returned was still seen to fail, and without any one of its faults it does not."""
    dice = random.Random(2)
    for _ in range(200):
        drawn = dice.sample(range(40), 7)
        bad, hides = set(drawn[:3]), set(drawn[3:])

        def run(one: Plan, bad: set[int] = bad, hides: set[int] = hides) -> None:
            there = {FORTY.index(fault) for fault in one.faults}
            if bad <= there and len(there & hides) % 2 == 0:
                raise Broken("p")

        least = shrink(plan(), run)
        with pytest.raises(Broken):
            run(least.plan)
        for one in range(len(least.plan.faults)):
            run(least.plan._replace(faults=least.plan.faults[:one] + least.plan.faults[one + 1 :]))


def test_a_job_that_fails_of_itself() -> None:
    """Where it takes no fault at all, none is left."""
    least = shrink(plan(), needs())
    assert least.plan == plan((), nodes=1)
    assert least.replays == 3


def test_the_same_failure() -> None:
    """A smaller plan that fails in another way is not taken for the failure that was found."""

    def run(one: Plan) -> None:
        if len(one.faults) < 30:
            raise Broken("another promise")
        if FORTY[3] in one.faults:
            raise Broken("this promise")

    least = shrink(plan(), run)
    assert "this" in str(least.error)
    assert len(least.plan.faults) == 30


def test_which_promise_without_particulars() -> None:
    """The same words about other numbers and other nodes are the same promise; anything else is told by where it was raised."""
    assert promise_of(Broken("12: worker-1-2 says 3 after 1.5")) == promise_of(Broken("7: worker-33 says 4 after 2"))
    assert promise_of(Broken("this")) != promise_of(Broken("that"))
    errors = []
    for one in range(3):
        try:
            assert one < 0, f"{one}"
        except AssertionError as error:
            errors.append(promise_of(error))
    assert len(set(errors)) == 1


def test_simpler_jobs() -> None:
    """Beyond the faults, the job becomes smaller and plainer where it fails all the same, and not where it does not."""
    faults = (Fault("step 3", "kill_worker", 5, cause="x"), Fault("step 9", "partition", 1, 30.0), *FORTY[10:20])

    def run(one: Plan) -> None:
        kinds = {fault.kind: fault for fault in one.faults}
        if "partition" in kinds and kinds["partition"].amount and one.scenario.unit == 2 and one.scenario.nodes >= 8:
            raise Broken("p")

    least = shrink(plan(faults, nodes=64, unit=2, workers_per_node=8, standbys=2, nodes_min=6), run)
    assert least.plan.faults == (faults[1],)
    assert least.plan.scenario == Scenario(nodes=16, unit=2, nodes_min=6)
    assert least.replays <= REPLAYS_MAX


def test_the_known_error_costs_no_replay() -> None:
    """A failure that was just seen is not run again; and a plan that keeps every promise is refused."""
    run, seen = needs(FORTY[0]), list[Plan]()

    def counted(one: Plan) -> None:
        seen.append(one)
        run(one)

    with pytest.raises(Broken) as raised:
        run(plan())
    least = shrink(plan(), counted, error=raised.value)
    assert len(seen) == least.replays
    assert plan() not in seen
    assert len(set(seen)) == len(seen)
    with pytest.raises(ValueError, match="nothing to shrink"):
        shrink(plan(FORTY[1:]), run)


def test_enough() -> None:
    """Asked to stop, it stops before the next replay with the best it has."""
    asked = iter([False] * 3 + [True] * 100)
    least = shrink(plan(), needs(FORTY[2]), enough=lambda: next(asked))
    assert least.replays == 4
    assert not least.whole
    assert FORTY[2] in least.plan.faults


def test_other_errors_come_through() -> None:
    """Only what counts as a failure is caught."""

    def run(one: Plan) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        shrink(plan(), run)
