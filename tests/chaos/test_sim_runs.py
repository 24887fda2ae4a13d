"""Whole simulated runs: the same twice, the same as the real runtime where that is cheap to ask, every second accounted for."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterable

import pytest

from dlrover_core.errors import PlanError
from dlrover_core.history import goodput_of, timeline_of
from dlrover_core.job.incidents import ActionChosen
from dlrover_core.job.state import CODEC, JobState
from dlrover_core.job.world import WorldFormed
from dlrover_core.kernel.engine import Engine
from dlrover_core.kernel.events import Record
from dlrover_core.kernel.state import digest
from dlrover_core.rules import silence as silence_rules
from dlrover_core.rules.model import MODEL
from dlrover_core.sim.faults import ENGINE, Fault, kinds
from dlrover_core.sim.run import Broken, Run, Stalled
from dlrover_core.sim.scenario import Plan, Scenario, plan_of
from dlrover_core.sim.scheduler import Scheduler
from dlrover_core.sim.simulation import EPOCH_US, simulate
from dlrover_core.testing import virtual_loop
from dlrover_core.testing.cluster import Cluster
from dlrover_core.testing.invariants import check_history
from dlrover_core.testing.training import Training

QUIET = Scenario(nodes=4, workers_per_node=2, steps=100)
ROUGH = (
    Fault("step 10", "kill_worker", 3),
    Fault("incident opened", "crash_after_append"),
    Fault("step 20", "kill_node", 1),
    Fault("WorldFormed", "drop", 2, 20.0),
    Fault("step 40", "log_down", 0, 5.0),
    Fault("70 s", "preempt_now", 9),
    Fault("80 s", "silence_node", 4, 40.0),
    Fault("step 90", "hand_over"),
)


def plan(*faults: Fault, scenario: Scenario = QUIET, seed: int = 0) -> Plan:
    """A plan for the simulated engine."""
    return Plan(ENGINE, scenario, faults, seed)


def test_a_job_that_nothing_befalls() -> None:
    """It starts up, makes its steps and ends: one world, no incident, nothing lost, and every second told."""
    done = simulate(plan())
    check_history(done.records)
    assert (done.outcome, done.steps, done.lost_steps, done.missed) == ("succeeded", 100, 0, [])
    assert done.by_class["training"] == pytest.approx(100.0)
    # Boot, join and form, start, load.
    assert done.by_class["startup"] == pytest.approx(2.0 + 0.2 + 0.5, abs=0.05)
    assert sum(done.by_class.values()) == pytest.approx(done.virtual_s)
    assert done.goodput == pytest.approx(100.0 / done.virtual_s)
    assert sum(isinstance(record.event, WorldFormed) for record in done.records) == 1
    assert done.recoveries == []
    assert done.events == len(done.records) == done.state.seq
    assert done.records[0].at >= EPOCH_US


def test_a_recovery_by_its_phases() -> None:
    """A worker's death: found, stopped, formed, loaded, made again, each for as long as the scenario says."""
    done = simulate(plan(Fault("step 54", "kill_worker", 3), scenario=Scenario(steps=100, checkpoint_steps=10)))
    [recovery] = done.recoveries
    assert recovery.cause == "kill_worker"
    assert recovery.detect_s == pytest.approx(0.0055, abs=1e-4)
    assert recovery.decide_s == pytest.approx(0.002, abs=1e-4)
    assert recovery.stop_s == pytest.approx(0.05, abs=1e-3)
    assert recovery.form_s == pytest.approx(0.2, abs=1e-3)
    assert recovery.load_s == pytest.approx(0.5, abs=1e-3)
    assert recovery.replay_s == pytest.approx(4.0)
    assert done.lost_steps == 4


@pytest.mark.parametrize("seed", [0, 7])
def test_the_same_plan_is_the_same_run(seed: int) -> None:
    """Twice in one process, from its token, and in a process that hashes otherwise: the same log, byte for byte."""
    here = simulate(plan(*ROUGH, seed=seed))
    assert simulate(plan(*ROUGH, seed=seed)).log_hash == here.log_hash
    token = plan(*ROUGH, seed=seed).token()
    code = (
        "import sys; from dlrover_core.sim.scenario import plan_of; from dlrover_core.sim.simulation import simulate; "
        "print(simulate(plan_of(sys.argv[1]), keep=False).log_hash)"
    )
    for hashing in ("1", "4242"):
        environment = {**os.environ, "PYTHONHASHSEED": hashing, "PYTHONPATH": os.pathsep.join(sys.path)}
        told = subprocess.run(
            [sys.executable, "-c", code, token], env=environment, capture_output=True, text=True, timeout=60, check=True
        )
        assert told.stdout.strip() == here.log_hash
    assert simulate(plan_of(token), watch=[lambda state, record: None]).log_hash == here.log_hash


def test_the_seed_orders_what_is_simultaneous_and_nothing_else() -> None:
    """Agents that speak at one instant are heard in another order; what comes of it is the same."""
    runs = [simulate(plan(Fault("step 50", "kill_node", 1), seed=seed)) for seed in range(4)]
    assert len({run.log_hash for run in runs}) > 1
    assert len({(run.outcome, run.steps, run.lost_steps) for run in runs}) == 1


def test_every_record_is_watched_with_its_own_state() -> None:
    """A watcher sees each record once, in order, with the state right after it, at any leader."""
    folded, seen = MODEL.new(), list[int]()

    def watch(state: JobState, record: Record) -> None:
        MODEL.apply(folded, record)
        seen.append(record.seq)
        assert state.seq == record.seq
        if record.seq % 25 == 0:
            assert digest(state) == digest(folded)

    done = simulate(plan(*ROUGH), watch=[watch], keep=False)
    assert seen == list(range(1, done.events + 1))
    assert done.records == []
    assert digest(done.state) == digest(folded)


def test_nothing_due_is_overlooked_for_looking_at_few_nodes() -> None:
    """The next deadline of silence is that of all nodes, though only those are asked that do not simply run."""

    def deadline(state: JobState, names: Iterable[str]) -> int | None:
        times = [silence_rules._patience(state, node) for node in silence_rules._waited_for(state, names)]
        return min((one for one in times if one is not None), default=None)

    def watch(state: JobState, _: Record) -> None:
        assert deadline(state, state.nodes.tally.loose) == deadline(state, list(state.nodes.nodes))

    rough = simulate(
        plan(*ROUGH, Fault("WorldFormed", "lose_host", 1), Fault("WorldFormed", "scale", 0, 2.0)), watch=[watch]
    )
    assert rough.outcome == "succeeded"


def test_a_broken_promise_says_which_record_broke_it() -> None:
    """A watcher's AssertionError becomes `Broken`, with the record; later checks of a kept run say the same."""

    def promise(_: JobState, record: Record) -> None:
        assert not isinstance(record.event, ActionChosen), "nothing is ever done"

    with pytest.raises(Broken, match="nothing is ever done") as caught:
        simulate(plan(Fault("step 50", "kill_worker", 1)), watch=[promise])
    with pytest.raises(Broken, match="nothing is ever done") as again:
        simulate(plan(Fault("step 50", "kill_worker", 1))).check(promise)
    assert caught.value.seq == again.value.seq > 0
    assert "ActionChosen" in caught.value.event


def test_a_job_that_cannot_go_on_is_stalled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hosts are there and nothing is wrong, but what is launched never comes: that is told, with who is where."""
    with pytest.raises(Stalled, match="not ended in time"):
        simulate(plan(), limit_s=20.0)
    monkeypatch.setattr(Scheduler, "launch", lambda *_: None)
    with pytest.raises(Stalled, match=r"no step for .*nodes: .*4 planned.*5 hosts up, 0 nodes in the scheduler"):
        simulate(plan())


def test_inputs_lead_to_the_same_log() -> None:
    """What each engine was given is told with its instant and place: another engine makes the same records of it."""
    done = simulate(plan(Fault("step 30", "kill_worker", 1), Fault("step 60", "kill_node", 2)), inputs=True)
    engine: Engine[JobState] = Engine(MODEL, CODEC, MODEL.new(), token=1)
    records: list[Record] = []
    for at, command, origin, seq in done.inputs:
        assert engine.state.seq == seq
        engine.handle(command, at, origin)
        batch = engine.take()
        records.extend(batch.records if batch is not None else ())
    assert records == done.records


@pytest.mark.parametrize("level", ["loop", "local"])
def test_other_levels_are_not_simulated(level: str) -> None:
    """A plan for real masters or processes is refused here."""
    with pytest.raises(PlanError, match="engine"):
        simulate(Plan(level, QUIET))


@pytest.mark.parametrize("seed", range(12))
def test_every_second_is_accounted_for(seed: int) -> None:
    """Whatever befalls the job, the classes sum to its life, and training is worth its steps."""
    dice = random.Random(seed)
    scenario = Scenario(
        nodes=8,
        spares=dice.randrange(3),
        nodes_min=dice.choice([0, 4]),
        steps=200,
        checkpoint_steps=7,
        checkpoint_s=0.5,
    )
    chosen = [kind for kind in kinds(ENGINE) if kind not in ("scale", "sick_host")]
    faults = [Fault(f"step {dice.randrange(1, 200)}", dice.choice(chosen), dice.randrange(50)) for _ in range(6)]
    done = simulate(plan(*sorted(faults, key=lambda one: int(one.at.split()[1])), scenario=scenario, seed=seed))
    check_history(done.records)
    assert sum(done.by_class.values()) == pytest.approx(done.virtual_s)
    assert min(done.by_class.values()) > -1e-6
    assert done.by_class["training"] == pytest.approx(200.0, abs=1e-3)
    assert (done.outcome, done.steps) == ("succeeded", 200)


def test_the_log_alone_tells_nearly_the_same_goodput() -> None:
    """What the read side makes of the log agrees with what really happened to within half a point."""
    scenario = Scenario(nodes=8, workers_per_node=4, steps=3000, checkpoint_steps=50, checkpoint_s=0.0)
    faults = [
        Fault(f"step {step}", kind, step)
        for step, kind in ((310, "kill_worker"), (999, "kill_node"), (2020, "fail_worker"))
    ]
    done = simulate(plan(*faults, scenario=scenario))
    told = goodput_of(timeline_of(done.records))
    assert told.ratio == pytest.approx(done.goodput, abs=0.005)
    assert told.wall_us / 1e6 == pytest.approx(done.virtual_s, abs=0.1)


async def of_a_cluster(*, node: bool) -> list[Record]:
    """The history of the same death in the real runtime, on a virtual-time loop."""
    scenario = Scenario(nodes=4, workers_per_node=2, steps=60)
    async with Cluster(scenario.spec(), training=Training(steps=60, step_s=1.0)) as cluster:
        await cluster.until(lambda: cluster.training.done >= 30)
        if node:
            cluster.kill_node("worker-1-0")
        else:
            cluster.kill_worker(3)
        await cluster.outcome()
        return await cluster.records()


def facts(records: list[Record]) -> list[object]:
    """Worlds by their members, and what was done about which death."""
    told: list[object] = []
    for record in records:
        if isinstance(record.event, WorldFormed):
            told.append((record.event.generation, record.event.members))
        elif isinstance(record.event, ActionChosen):
            told.append((record.event.action, record.event.node))
    return told


@pytest.mark.parametrize("node", [False, True])
def test_the_real_runtime_comes_to_the_same(node: bool) -> None:
    """The same death in the real master and agents: the same worlds, the same actions."""
    real = virtual_loop.run(of_a_cluster(node=node))
    scenario = Scenario(nodes=4, workers_per_node=2, steps=60, notice_s=0.0)
    fault = Fault("step 30", "kill_node", "worker-1") if node else Fault("step 30", "kill_worker", 3)
    assert facts(simulate(plan(fault, scenario=scenario)).records) == facts(real)


def check_run(done: Run) -> None:
    """As `Run.check` takes a function of state and record, a class of promises, or a tuple of such."""
    counted: list[int] = []

    class Counts:
        def __call__(self, state: JobState, record: Record) -> None:
            counted.append(record.seq)

        def end(self, run: Run) -> None:
            assert counted[-1] == run.events

    done.check(Counts, (lambda state, record: None,))


def test_a_run_can_be_checked_afterwards() -> None:
    """Promises are asked after every record, and once more at the end; a run without records says that it has none."""
    check_run(simulate(plan()))
    with pytest.raises(ValueError, match="keep"):
        check_run(simulate(plan(), keep=False))
