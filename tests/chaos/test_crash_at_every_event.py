"""The simulated master dies before and after every event of a history, and a successor takes over at every command of it.

That this finds bugs is shown with bugs: each is put into the real model for a moment, and must be found.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from dlrover_core.job import job, nodes, world
from dlrover_core.job.state import JobState
from dlrover_core.kernel import engine
from dlrover_core.kernel.events import Record
from dlrover_core.kernel.log import Appended
from dlrover_core.logs.memory import MemoryLog
from dlrover_core.rules import worlds
from dlrover_core.rules.model import MODEL
from dlrover_core.sim.faults import Fault
from dlrover_core.sim.run import Broken, Input, Run
from dlrover_core.sim.scenario import Plan, Scenario, plan_of
from dlrover_core.sim.simulation import simulate
from dlrover_core.testing.crashes import Crashes, crash_at_every_index, kept, walk

SMOKE = Scenario.smoke()
FOUR = Scenario(nodes=4, workers_per_node=2, steps=60, step_s=0.5, spares=2)
DEATHS = (Fault("step 3", "kill_worker", 3), Fault("step 6", "kill_node", 1))
TALES: dict[str, tuple[Fault, ...]] = {
    "nothing": (),
    "deaths": DEATHS,
    "an error": (Fault("step 4", "fail_worker", 1, cause="ValueError: no such batch"),),
    "a notice": (Fault("step 5", "preempt", 0, 5.0),),
    "a drain": (Fault("step 4", "drain", 1),),
    "two deaths of one node": (Fault("step 4", "kill_node", 0), Fault("step 8", "kill_node", 0)),
}


def run_of(*faults: Fault, scenario: Scenario = SMOKE) -> Run:
    """A run and what its masters were told."""
    return simulate(Plan("engine", scenario, faults), inputs=True)


def walked(*faults: Fault, scenario: Scenario = SMOKE) -> Crashes:
    """A successor at every command of a run."""
    run = run_of(*faults, scenario=scenario)
    return walk(run.inputs, run.records)


@pytest.mark.parametrize("tale", TALES)
def test_crash_at_every_event(tale: str) -> None:
    """Wherever the master of a small job dies, the job ends as if it had not; every place is tried, in both ways."""
    done = crash_at_every_index(SMOKE, TALES[tale])
    assert Counter(done.indices) == dict.fromkeys(range(1, done.events + 1), 2)
    assert done.runs == 2 * done.events
    assert done.successors > 15
    assert done.said_again > done.successors
    assert done.decided_again >= done.successors
    assert done.rivals > 10
    assert str(done).startswith(f"{done.events} events: {done.successors} successors")


def test_long_histories_are_crashed_here_and_there() -> None:
    """Of a long history every command has its successor, and as many whole runs are crashed as are asked for, evenly spread."""
    faults = tuple(Fault(f"step {10 * nth}", kind, nth) for nth, kind in enumerate(("kill_worker", "kill_node") * 2, 1))
    done = crash_at_every_index(FOUR, faults, runs=20)
    assert done.events > 100
    assert (done.runs, done.indices[0], done.indices[-1]) == (20, 1, 19 * done.events // 20 + 1)
    assert done.successors > done.events // 2


@pytest.mark.parametrize("kind", ["crash_master", "crash_before_append", "crash_after_append", "hand_over", "ack_lost"])
def test_masters_that_die_anyhow(kind: str) -> None:
    """A history in which masters died already, with decisions that never reached the log, has its successors all the same."""
    faults = (DEATHS[0], Fault("incident opened", kind), DEATHS[1], Fault("incident opened", kind))
    assert walked(*faults).successors > 30


def test_inputs_must_explain_the_history() -> None:
    """Records that follow from nothing are no history to walk through; what died with its master is left out."""
    run = run_of(*DEATHS)
    with pytest.raises(AssertionError, match="follow from no input"):
        kept(run.inputs[5:], len(run.records))
    died = Input(run.inputs[5].at, engine.Tick(), None, run.inputs[5].seq)
    with_dead = [*run.inputs[:5], died, *run.inputs[5:]]
    assert [step for step in kept(with_dead, len(run.records)) if step.given is died] == []
    assert walk(with_dead, run.records).successors == walk(run.inputs, run.records).successors


# ---- bugs


def _decides(command: type, decide: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODEL._decide, command, decide)


def _also(event: type, slice_: str, evolve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    more = (lambda state: getattr(state, slice_), evolve)
    monkeypatch.setitem(MODEL._evolve, event, (*MODEL._evolve.get(event, ()), more))


def test_finds_what_is_kept_beside_the_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decision that reads what a fold left beside the state, where no snapshot holds it, is found."""

    def remember(slice_: world.WorldSlice, fact: world.WorkersStarted, record: Any) -> None:
        slice_.worlds["worker"].recall("starts", list).append(fact.node)

    def decide(state: Any, command: world.ReportFinished, now: int) -> Iterator[Any]:
        starts = state.world.worlds["worker"].recall("starts", list)
        yield world.WorkersFinished(command.node, command.generation, len(starts))

    _also(world.WorkersStarted, "world", remember, monkeypatch)
    _decides(world.ReportFinished, decide, monkeypatch)
    with pytest.raises(Broken, match=r"before ReportFinished: decided by a successor, .* step=0.* step=2"):
        walked(*DEATHS)


def test_finds_what_is_kept_in_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decision that depends on what its process has seen, and not on the log, is found."""
    seen: list[str] = []

    def decide(state: Any, command: world.ReportStarted, now: int) -> Iterator[Any]:
        seen.append(command.node)
        if len(seen) > 4:
            raise engine.Refused("enough")
        yield world.WorkersStarted(command.node, command.generation)

    _decides(world.ReportStarted, decide, monkeypatch)
    with pytest.raises(Broken, match=r"before ReportStarted: decided .*CommandRefused"):
        walked()


def test_finds_a_state_that_is_not_what_was_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fold that leaves something in the state which comes back from its bytes as something else is found."""

    def untidy(slice_: nodes.NodeSlice, fact: nodes.NodeRunning, record: Any) -> None:
        slice_.nodes[fact.node].avoid = [fact.host]  # type: ignore[assignment]  # the bug

    _also(nodes.NodeRunning, "nodes", untidy, monkeypatch)
    with pytest.raises(Broken, match="does not survive being packed"):
        walked()


def test_finds_a_miscounted_tally(monkeypatch: pytest.MonkeyPatch) -> None:
    """A count that is kept beside the state and is wrong makes a successor, who counts anew, decide something else."""

    def miscount(slice_: nodes.NodeSlice, fact: nodes.NodeJoined, record: Any) -> None:
        slice_.tally.ready["worker"] = 2

    _also(nodes.NodeJoined, "nodes", miscount, monkeypatch)
    with pytest.raises((Broken, IndexError)):
        walked(*DEATHS)


@pytest.mark.parametrize("quietly", [False, True], ids=["in events", "in the fold"])
def test_finds_a_take_over_that_restarts_workers(*, quietly: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new leader that stops the workers, or forgets what it knows, is found."""

    def restart(state: Any, fact: job.LeaderStarted, record: Any) -> Iterator[Any]:
        yield from worlds.dissolve(state, "worker", "a new leader")

    def forget(slice_: world.WorldSlice, fact: job.LeaderStarted, record: Any) -> None:
        slice_.offers.clear()

    if quietly:
        _also(job.LeaderStarted, "world", forget, monkeypatch)
    else:
        monkeypatch.setitem(MODEL._react, job.LeaderStarted, (restart,))
        monkeypatch.setattr(MODEL, "reacts", frozenset(MODEL._react))
    with pytest.raises(Broken, match=r"a new leader (decides .* by taking over|changes what is known)"):
        walked(*DEATHS)


def test_finds_a_take_over_that_loses_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new leader whose deadlines come sooner than the last one's is found."""
    monkeypatch.setattr(MODEL, "_evolve", {**MODEL._evolve})

    def hurry(slice_: job.JobSlice, fact: job.LeaderStarted, record: Any) -> None:
        slice_.calm_at = 0

    _also(job.LeaderStarted, "job", hurry, monkeypatch)
    with pytest.raises(Broken, match=r"a new leader is (less patient|no leader)"):
        walked(*DEATHS)


@pytest.mark.parametrize("forgets", ["answers", "everything"])
def test_finds_a_dedup_that_forgets(forgets: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers that are not kept, and commands that are decided again, are found when agents say everything again."""
    known = engine.Engine._known

    def forgetful(self: Any, origin: Any) -> Any:
        answer = known(self, origin)
        return None if isinstance(answer, engine.Accepted) else answer

    if forgets == "answers":
        monkeypatch.setattr(engine, "UNANSWERED_MAX", 1)
    else:
        monkeypatch.setattr(engine.Engine, "_known", forgetful)
    with pytest.raises(Broken, match="again, is answered"):
        walked(*DEATHS)


def test_finds_a_log_that_fences_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """A log that takes a batch of a leader whose successor has spoken is found."""

    def lenient(self: Any, lead: Any, batch: Any) -> Appended:
        lead.kept.batches.append(batch)
        lead.kept.lasts.append(batch.last_seq)
        return Appended(batch.last_seq)

    monkeypatch.setattr(MemoryLog, "_land", lenient)
    with pytest.raises(Broken, match="the log takes a dead master's word"):
        walked()


def test_finds_a_run_that_ends_otherwise() -> None:
    """Where a whole crashed run makes a step, plans a node or restarts once more than it should, it is told what differs."""

    def clumsy(plan: Plan, **options: Any) -> Run:
        run = simulate(plan, **options)
        if plan.faults:
            run.state.incidents.restarts += 1
        return run

    with pytest.raises(Broken, match="crash_before_append at event 1 changes how the run ends: restarts: 1, not 0"):
        crash_at_every_index(SMOKE, play=clumsy)


def test_the_same_fault_several_times() -> None:
    """Faults that read alike are each before or behind the crash as they struck; one whose moment never comes is no more."""
    done = crash_at_every_index(SMOKE, (Fault("all running", "kill_worker", 0),) * 3, runs=50)
    assert done.runs == 50


def test_a_broken_promise_says_where_the_master_was_crashed() -> None:
    """And names the very run, so that it can be had again."""

    def one_leader(state: JobState, record: Record) -> None:
        assert record.token == 1, "one master leads from beginning to end"

    with pytest.raises(
        Broken, match=r"(?s)one_leader.*, with crash_before_append at event 1, which is chaos1-"
    ) as found:
        crash_at_every_index(Scenario.smoke(), watch=(one_leader,))
    token = str(found.value).partition("which is ")[2].split()[0]
    assert plan_of(token).faults == (Fault("event 1", "crash_before_append"),)
