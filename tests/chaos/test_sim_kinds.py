"""Every kind of fault, simulated: it really strikes, every promise is kept, and the job gets where it should."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dlrover_core.errors import PlanError
from dlrover_core.job.hangs import HangNamed
from dlrover_core.job.incidents import WorkerExited
from dlrover_core.job.stragglers import SlowRank
from dlrover_core.job.world import WorkersStopped
from dlrover_core.sim.faults import ENGINE, Fault, kinds
from dlrover_core.sim.run import Run
from dlrover_core.sim.scenario import Plan, Scenario
from dlrover_core.sim.simulation import simulate
from dlrover_core.testing.invariants import check_history

SCENARIO = Scenario(
    nodes=4,
    workers_per_node=2,
    spares=2,
    steps=300,
    hosts_per_rack=3,
    nodes_min=2,
    checkpoint_steps=10,
    checkpoint_s=0.3,
)


def run(*faults: Fault, scenario: Scenario = SCENARIO, seed: int = 5) -> Run:
    """Run it, and hold it to every promise."""
    done = simulate(Plan(ENGINE, scenario, faults, seed))
    check_history(done.records)
    assert sum(done.by_class.values()) == pytest.approx(done.virtual_s)
    assert min(done.by_class.values()) > -1e-6
    return done


def names(done: Run) -> list[str]:
    """The kinds of all records."""
    return [type(record.event).__name__ for record in done.records]


@pytest.mark.parametrize("at", ["step 100", "world 1 formed", "3.1 s"])
@pytest.mark.parametrize("kind", kinds(ENGINE))
def test_each_kind_is_survived(kind: str, at: str) -> None:
    """Whatever it is, and whether training runs, begins or has not begun: the job makes all of its steps in the end."""
    amount = 60.0 if kind == "sick_host" else 0.0
    done = run(Fault(at, kind, 1, amount))
    assert done.outcome == "succeeded"
    assert done.steps == SCENARIO.steps
    assert len(done.struck) + len(done.missed) == 1
    if at == "step 100":
        assert done.hits == {(kind, "training"): 1}


def test_whoever_says_that_it_has_stopped_has_told_every_exit() -> None:
    """As a real agent does, however long its exits take to be noticed: the last word of a generation is that it is over."""
    scenario = replace(SCENARIO, workers_per_node=1, exit_s=0.1, notice_s=0.1)
    done = run(Fault("step 100", "kill_node", 0), scenario=scenario)
    facts = [record.event for record in done.records]
    for node in ("worker-1-0", "worker-2-0", "worker-3-0"):
        told = [type(one) for one in facts if isinstance(one, (WorkerExited, WorkersStopped)) and one.node == node]
        assert told == [WorkerExited, WorkersStopped]


@pytest.mark.parametrize("seed", range(6))
def test_a_state_after_a_fault_is_one_that_came_after_it(seed: int) -> None:
    """Faults strike in the order of the plan, and a state is looked for once the fault before has struck, whatever the seed."""
    kinds_ = ("kill_worker", "crash_master", "kill_node", "kill_worker")
    faults = tuple(Fault("all running", kind, nth) for nth, kind in enumerate(kinds_))
    done = run(*faults, seed=seed)
    assert [fault for fault, _ in done.struck] == list(faults)
    assert len({seq for _, seq in done.struck}) == len(faults)


@pytest.mark.parametrize(
    "kind", ["kill_worker", "fail_worker", "kill_node", "kill_host", "lose_host", "interrupt", "preempt_now"]
)
def test_a_death_costs_what_was_made_since_the_checkpoint(kind: str) -> None:
    """Steps since the last checkpoint are made again, and an incident says so."""
    done = run(Fault("step 104", kind, 1))
    assert done.lost_steps >= 4
    assert done.by_class["replay"] >= 4.0
    assert "IncidentClosed" in names(done)
    assert done.recoveries[0].cause == kind


@pytest.mark.parametrize(
    "kind",
    [
        "partition", "drop", "drop_to_master", "drop_to_node", "delay", "lose_messages", "double_messages",
        "reorder_messages", "ack_lost", "log_slow", "log_down", "log_full", "log_fenced", "clock_jump", "clock_skew",
        "crash_master", "crash_before_append", "crash_after_append", "pause_master", "second_master", "hand_over",
        "create_error", "create_stuck", "relist", "quota", "silence_node",
    ],
)  # fmt: skip
def test_what_touches_no_worker_stops_no_worker(kind: str) -> None:
    """Networks, logs, clocks and masters may fail: training goes on, and no step is made twice."""
    done = run(Fault("step 100", kind, 1))
    assert done.lost_steps == 0
    assert names(done).count("WorldFormed") == 1


@pytest.mark.parametrize(
    "kind", ["crash_master", "crash_before_append", "crash_after_append", "log_fenced", "hand_over"]
)
@pytest.mark.parametrize("standbys", [0, 1])
def test_another_master_takes_over(kind: str, standbys: int) -> None:
    """The next leader has the next token, and the state that the log folds to; a standby has folded it along."""
    scenario = Scenario(nodes=4, steps=300, standbys=standbys, hosted_masters=bool(standbys), snapshot_events=20)
    done = run(Fault("step 50", "kill_worker", 0), Fault("incident opened", kind), scenario=scenario)
    assert done.outcome == "succeeded"
    assert names(done).count("LeaderStarted") == 1
    assert done.state.token == 2


def test_a_standby_takes_over_from_a_master_that_is_stopped() -> None:
    """A master that is stopped for longer than its lease is deposed; without a standby it goes on and notes its pause."""
    alone = run(Fault("step 100", "pause_master", 0, 20.0))
    assert names(alone).count("MasterPaused") == 1
    assert alone.state.token == 1
    watched = run(Fault("step 100", "pause_master", 0, 20.0), scenario=Scenario(nodes=4, steps=300, standbys=1))
    assert watched.state.token == 2
    assert watched.lost_steps == 0


def test_an_outage_of_the_log_is_noted() -> None:
    """Decisions wait for a log that cannot be reached, and nobody's silence counts meanwhile."""
    done = run(Fault("step 100", "log_down", 0, 40.0), Fault("110 s", "kill_worker", 1))
    assert names(done).count("MasterPaused") == 1
    assert "NodeSuspected" not in names(done)


def test_silence_is_suspected_and_heard_again() -> None:
    """An agent that is stopped falls silent, is suspected, and goes on; its workers never stopped."""
    done = run(Fault("step 100", "silence_node", 1, 40.0))
    assert names(done).count("NodeSuspected") == names(done).count("NodeHeard") == 1
    assert done.lost_steps == 0


def test_a_power_cut_is_found_by_silence_and_by_the_scheduler() -> None:
    """Nobody is told: peers only wait, the master suspects, and the scheduler says so a minute later."""
    done = run(Fault("step 100", "lose_host", 1))
    assert "NodeSuspected" in names(done)
    assert done.by_class["detect"] == pytest.approx(60.0, abs=0.1)


def test_a_hang_is_found_named_and_ended() -> None:
    """A worker that hangs for ever is found after `hang_s`, and its rank is named. One that goes on costs its time only."""
    done = run(Fault("step 100", "hang_worker", 5))
    assert done.by_class["detect"] == pytest.approx(60.5, abs=0.2)
    assert [one.event.ranks for one in done.records if isinstance(one.event, HangNamed)] == [(5,)]
    for_a_while = run(Fault("step 100", "hang_worker", 1, 30.0))
    assert names(for_a_while).count("WorldFormed") == 1
    assert for_a_while.by_class["detect"] == pytest.approx(30.0)


def test_a_slow_worker_slows_the_world_for_a_while() -> None:
    """Twice the time per step for 60 s."""
    assert run(Fault("step 100", "slow_worker", 1)).by_class["degraded"] == pytest.approx(30.0, abs=1.0)


def test_a_slow_worker_is_named_where_it_lasts_long_enough() -> None:
    """Sixty steps of evidence after four hundred of normal ones: its rank is named, and then that it has recovered."""
    scenario = replace(SCENARIO, steps=900, step_s=0.4)
    done = run(Fault("step 450", "slow_worker", 5), scenario=scenario)
    slow = [one.event for one in done.records if isinstance(one.event, SlowRank)]
    assert [(one.rank, one.now_us / one.before_us) for one in slow] == [(5, 2.0)]
    assert names(done).count("SlowEnded") == 1
    early = run(Fault("step 100", "slow_worker", 5), scenario=scenario)
    assert "SlowRank" not in names(early)


def test_a_sick_host_kills_its_workers_until_it_is_cured() -> None:
    """In the words given, again and again."""
    done = run(Fault("step 100", "sick_host", 1, 60.0, "RuntimeError: CUDA error: uncorrectable ECC error"))
    told = [record.event for record in done.records if type(record.event).__name__ == "WorkerExited"]
    assert sum("uncorrectable ECC" in str(one) for one in told) >= 4
    assert done.steps == SCENARIO.steps


def test_a_rack_takes_its_nodes_along() -> None:
    """Three hosts of a switch are gone; the rest goes on as a smaller world as soon as the last call is over."""
    done = run(Fault("step 100", "kill_rack", 0, 600.0))
    sizes = [
        sum(count for _, _, count, _, _ in record.event.members)  # type: ignore[attr-defined]
        for record in done.records
        if type(record.event).__name__ == "WorldFormed"
    ]
    assert min(sizes) < SCENARIO.nodes
    assert done.by_class["degraded"] > 0


def test_a_preemption_with_notice_comes_when_it_was_announced() -> None:
    """The scheduler takes the node away when the notice is over, not before."""
    done = run(Fault("step 100", "preempt", 1, 50.0))
    failed = next(record for record in done.records if type(record.event).__name__ == "NodeFailed")
    assert failed.event.reason == "preempted"  # type: ignore[attr-defined]
    begun = done.records[0].at
    # Step 100 is made after the start-up, 100 steps and nine checkpoints.
    assert (failed.at - begun) / 1e6 == pytest.approx(done.by_class["startup"] + 100 + 9 * 0.3 + 50, abs=0.1)


@pytest.mark.parametrize("kind", ["scale", "drain", "suspend"])
def test_what_people_ask_for_is_done(kind: str) -> None:
    """Another size, a free host, a pause: no incident opens, and no budget is charged."""
    done = run(Fault("step 100", kind, 1, 2.0 if kind == "scale" else 0.0))
    expected = {"scale": "GroupScaled", "drain": "NodeDrained", "suspend": "JobResumed"}[kind]
    assert expected in names(done)
    assert "IncidentOpened" not in names(done)
    assert done.state.incidents.restarts == 0


def test_two_faults_at_one_text_are_two_occasions() -> None:
    """A fault waits for its moment from when the one before it struck."""
    done = run(*[Fault("all running", "kill_worker", 0)] * 3)
    assert [fault.kind for fault, _ in done.struck] == ["kill_worker"] * 3
    assert names(done).count("WorldFormed") == 4


def test_a_fault_whose_moment_never_comes_is_told() -> None:
    """It is missed, and so are those that wait for it; those at a time are not."""
    never = Fault("node worker-3 lost", "kill_worker")
    behind, timed = Fault("step 200", "kill_worker"), Fault("50 s", "kill_worker")
    done = run(never, behind, timed)
    assert done.missed == [never, behind]
    assert [fault for fault, _ in done.struck] == [timed]


@pytest.mark.parametrize(("kind", "target"), [("kill_host", "host-99"), ("kill_rack", "switch-1")])
def test_a_target_that_never_was_is_refused(kind: str, target: str) -> None:
    """A name that no host and no rack bears is a mistake in the plan, and not a fault that found nobody."""
    with pytest.raises(PlanError, match=r"there (is no|are)"):
        run(Fault("step 10", kind, target))
