"""Faults, triggers, scenarios and replay tokens: the words that all levels of chaos share."""

from __future__ import annotations

import pytest
from tests.unit.life import Life

from dlrover_core.errors import PlanError
from dlrover_core.job.nodes import NodeFailed, NodePlanned
from dlrover_core.kernel.events import Record
from dlrover_core.sim import triggers
from dlrover_core.sim.faults import ENGINE, KINDS, LEVELS, LOCAL, Fault, amount, checked, kinds
from dlrover_core.sim.scenario import Plan, Scenario, plan_of
from dlrover_core.spec import GroupSpec, JobSpec

FAULTS = (
    Fault("step 100", "kill_worker", 2),
    Fault("node worker-1 relaunched", "crash_master", amount=2.5),
    Fault("12.5 s", "kill_host", "host-3", 60, "gpu.ecc"),
)


def record(event: object, seq: int = 7) -> Record:
    """A record of an event."""
    return Record(seq, 0, 1, 0, event, None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "text",
    [
        "", "soon", "step", "step -1", "-3 s", "12.5", "event x", "NodeExploded", "node worker running", "node worker-1 exploded",
        "world x formed",
    ],
)  # fmt: skip
def test_what_is_no_moment_is_refused_with_what_is(text: str) -> None:
    """The error lists what may be written."""
    with pytest.raises(PlanError, match=r"is no moment. Write '12.5 s', 'step 100'"):
        triggers.parse(text)


def test_moments_are_read() -> None:
    """Times in microseconds, steps, numbers, records with words, states."""
    assert triggers.parse(" 12.5  s") == triggers.Trigger("time", 12_500_000)
    assert triggers.parse("step 100") == triggers.Trigger("step", 100)
    assert triggers.parse("event 57").hit(record(NodeFailed("worker-1-0", 1, ""), 57))
    assert not triggers.parse("event 57").hit(record(NodeFailed("worker-1-0", 1, ""), 56))
    assert triggers.parse("NodeFailed").hit(record(NodeFailed("worker-1-0", 1, "")))


def test_a_record_is_met_by_whole_words_of_names() -> None:
    """``worker-1`` is every incarnation of that place, and not ``worker-11``."""
    failed = triggers.parse("node worker-1 failed")
    assert failed.hit(record(NodeFailed("worker-1-3", 1, "")))
    assert not failed.hit(record(NodeFailed("worker-11-0", 1, "")))
    assert not failed.hit(record(NodePlanned("worker-1-0", "worker", 1, 0)))
    relaunched = triggers.parse("node worker-1 relaunched")
    assert not relaunched.hit(record(NodePlanned("worker-1-0", "worker", 1, 0)))
    assert relaunched.hit(record(NodePlanned("worker-1-1", "worker", 1, 1)))


def test_all_running_means_that_everybody_trains() -> None:
    """Not when the world has formed, not when workers have started: when a step was made."""
    life = Life(JobSpec("j", (GroupSpec(nodes_min=2, nodes_max=2),)))
    running, over = triggers.parse("all running"), triggers.parse("job over")
    seen = [running.holds(life.state)]
    for tell in (
        lambda: life.join(1, "worker-0-0", "worker-1-0"),
        lambda: life.start(2, "worker-0-0", "worker-1-0"),
        lambda: life.step(3, 1, "worker-0-0"),
    ):
        tell()
        seen.append(running.holds(life.state))
    assert seen == [False, False, False, True]
    life.finish(4, "worker-0-0", "worker-1-0")
    assert (running.holds(life.state), over.holds(life.state)) == (False, True)


def test_faults_are_checked_by_level() -> None:
    """What cannot be done there is refused, with where it can."""
    for fault in FAULTS:
        assert checked(fault, ENGINE) is fault
    with pytest.raises(PlanError, match="exists at the levels engine, loop, not at 'local'"):
        checked(FAULTS[2], LOCAL)
    with pytest.raises(PlanError, match="no fault is called 'kill_everybody'"):
        checked(Fault("step 1", "kill_everybody"), ENGINE)
    with pytest.raises(PlanError, match="cannot be negative"):
        checked(Fault("step 1", "hang_worker", 0, -1), ENGINE)
    assert checked(Fault("step 1", "clock_jump", 0, -3600), ENGINE)
    assert {level for kind in KINDS.values() for level in kind.levels} == set(LEVELS)
    assert all(kinds(level) for level in LEVELS)


def test_faults_read_as_lines() -> None:
    """When, what, whom, how much, why."""
    assert [str(fault) for fault in FAULTS] == [
        "step 100: kill_worker 2",
        "node worker-1 relaunched: crash_master 0 2.5 s",
        "12.5 s: kill_host host-3 60 s (gpu.ecc)",
    ]
    assert (amount(FAULTS[1]), amount(Fault("1 s", "crash_master"))) == (2.5, 1.0)


def test_a_token_holds_the_whole_plan() -> None:
    """Scenario, settings, faults, seed: the same plan comes out."""
    plan = Plan(ENGINE, Scenario(nodes=64, settings=(("silence_s", 30.0),)), FAULTS, 7)
    assert plan_of(plan.token()) == plan
    assert plan_of(f"  {plan.token()}\n") == plan
    assert len(plan.token()) < 300


@pytest.mark.parametrize(
    "spoil",
    [lambda t: t[:-3], lambda t: "x" + t, lambda t: t[:20] + "A" + t[21:], lambda _: "chaos1-", lambda _: "chaos1-!!"],
)
def test_a_damaged_token_is_refused(spoil: object) -> None:
    """With what to do: copy it whole."""
    token = Plan(ENGINE, Scenario(nodes=64), FAULTS, 7).token()
    with pytest.raises(PlanError, match="copy it whole"):
        plan_of(spoil(token))  # type: ignore[operator]


def test_scenarios_that_could_never_run_are_refused() -> None:
    """With the setting at fault."""
    for bad, words in (
        ({"nodes": 0}, "nnodes"),
        ({"steps": 0}, "must be more than 0"),
        ({"boot_s": -1.0}, "boot_s cannot be negative"),
        ({"settings": (("no_such", 1),)}, "no such job"),
        ({"nodes": 3, "unit": 2}, "multiple"),
    ):
        with pytest.raises(PlanError, match=words):
            Scenario(**bad)  # type: ignore[arg-type]
