"""Incidents: one failure from first evidence to recovery, its verdict, its actions, its cost."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from drive import SECOND, Drive

from dlrover_core.diagnosis import ladder
from dlrover_core.diagnosis.classify import describe
from dlrover_core.job import incidents, job, nodes, progress, world
from dlrover_core.kernel.engine import NotDone
from dlrover_core.rules import slots
from dlrover_core.rules.desired import desired
from dlrover_core.rules.model import MODEL

ERROR = "Traceback (most recent call last):\nValueError: bad batch"


def _in_force(drive: Drive) -> list[tuple[str, str]]:
    return [(one.action, one.node) for one in drive.incident.actions if one.state in {"in_force", "waiting"}]


# ---- one incident


def test_the_walk_through_of_the_design() -> None:
    """A killed worker: exit, incident, verdict, action and new world in one batch, each with its cause; then the cost."""
    drive = Drive(nodes_max=2, nproc=2).up()
    drive.exit("worker-1-0", 3, -9, step=60, age_us=900)
    first = drive.new[0].seq
    assert drive.names() == ["WorkerExited", "IncidentOpened", "Diagnosed", "ActionChosen", "WorldFormed"]
    assert [record.cause - first for record in drive.new[1:]] == [0, 1, 2, 3]
    _, opened, diagnosed, chosen, formed = (record.event for record in drive.new)
    assert opened == incidents.IncidentOpened(1, "worker-1-0", 1, (3,))
    assert diagnosed[:7] == (1, "PLAT", "exit.sigkill", (first,), 0.6, 0, "")
    assert (diagnosed.rank, diagnosed.node, diagnosed.budget) == (3, "worker-1-0", "restarts")
    assert (chosen.action, chosen.budget_left) == ("RESTART_PROCESSES", 2)
    assert formed.generation == 2
    drive.now += 80_000
    drive.do(progress.ReportFirstStep("worker-0-0", 2, 61, told=True))
    assert drive.names() == ["FirstStep", "IncidentClosed"]
    assert drive.new[1].event == incidents.IncidentClosed(1, 80_900, 1)
    assert drive.incident.state == "closed"


def test_the_age_of_a_death_is_bounded_by_time_itself() -> None:
    """An agent whose clock is mad cannot put a number into the state that does not fit there."""
    drive = Drive().up()
    drive.exit("worker-1-0", 3, age_us=2**62)
    assert drive.facts(incidents.WorkerExited)[0].age_us == drive.now
    drive.engine.rebase()


def test_last_lines_are_bounded() -> None:
    """The last 4 KiB of a worker's words and 2,048 characters of its error are in the event, whole characters only."""
    drive = Drive().up()
    drive.exit("worker-1-0", 3, 1, "e" * 5000, tail="ä" * 5000 + "end")
    fact = drive.facts(incidents.WorkerExited)[0]
    assert len(fact.tail.encode()) <= 4096
    assert fact.tail.endswith("äend")
    assert len(fact.error) == 2048


# ---- exits that open none


def test_an_asked_exit_opens_none() -> None:
    """What we asked for is no failure."""
    drive = Drive().up()
    drive.exit("worker-1-0", 3, -9, asked=True)
    assert drive.names() == ["WorkerExited"]


def test_a_stale_exit_opens_none() -> None:
    """An exit of an older generation than desired, unasked or not, is history."""
    drive = Drive(nodes_max=3, nodes_min=2, nproc=1)
    for one in (0, 1):
        drive.join(f"worker-{one}-0")
    drive.wait(30)
    drive.run(1)
    drive.join("worker-2-0")
    assert drive.world.generation == 2
    drive.exit("worker-1-0", 1, generation=1)
    assert drive.names() == ["WorkerExited"]
    assert drive.state.incidents.number == 0


def test_an_echo_joins_its_incident() -> None:
    """Further exits of the generation that broke are evidence of its one incident, and cost nothing more."""
    drive = Drive().up()
    drive.exit("worker-1-0", 3)
    for rank in (0, 1):
        drive.cascade("worker-0-0", rank, generation=1)
        assert drive.names() == ["WorkerExited"]
    drive.exit("worker-1-0", 2, generation=1)
    assert drive.names() == ["WorkerExited"]
    assert (drive.state.incidents.number, drive.state.incidents.restarts, len(drive.incident.evidence)) == (1, 1, 4)


def test_an_echo_after_recovery_joins_the_closed_incident() -> None:
    """However late a survivor's word comes, its generation's incident is the one it belongs to."""
    drive = Drive().up()
    drive.exit("worker-1-0", 3)
    drive.run(2)
    drive.cascade("worker-0-0", 0, generation=1)
    assert (drive.state.incidents.number, drive.world.generation) == (1, 2)


@pytest.mark.parametrize("generation", [-1, 2, 9])
def test_exits_of_generations_that_never_were_are_refused(generation: int) -> None:
    """A generation that does not exist has no workers."""
    drive = Drive().up()
    assert isinstance(drive.do(incidents.ReportExit("worker-1-0", generation, 3, -9)), NotDone)
    assert isinstance(drive.do(incidents.ReportExit("worker-9-0", 1, 3, -9)), NotDone)


def test_a_dissolved_world_yields_no_incident_of_its_own() -> None:
    """Workers that die because their world was dissolved belong to the incident that dissolved it."""
    drive = Drive(nodes_max=3, nproc=1).up()
    drive.observe("worker-2-0", "failed", -9)
    drive.cascade("worker-0-0", 0, generation=1)
    drive.cascade("worker-1-0", 1, generation=1)
    assert drive.state.incidents.number == 1
    assert drive.state.incidents.restarts == 0


# ---- all orders of arrival


Step = Callable[[Drive], Any]

NODE_DEATH: dict[str, Step] = {
    "killed rank 2": lambda drive: drive.exit("worker-1-0", 2, -9, generation=1),
    "killed rank 3": lambda drive: drive.exit("worker-1-0", 3, -9, generation=1),
    "cascade rank 0": lambda drive: drive.cascade("worker-0-0", 0, generation=1),
    "cascade rank 1": lambda drive: drive.cascade("worker-0-0", 1, generation=1),
    "NodeFailed": lambda drive: drive.observe("worker-1-0", "failed", -9),
    "NodeGone": lambda drive: drive.observe("worker-1-0", "gone"),
}


def _essence(drive: Drive) -> dict[str, Any]:
    """The state but for sequence numbers, evidence and the words of the first cause."""
    return {
        "incidents": drive.state.incidents.number,
        "verdict": drive.incident.verdict,
        "incident": drive.incident.state,
        "in force": _in_force(drive),
        "restarts": drive.state.incidents.restarts,
        "relaunches": drive.state.incidents.relaunches,
        "nodes": sorted(
            (node.node, node.state, node.released, node.joined) for node in drive.state.nodes.nodes.values()
        ),
        "active": drive.world.active,
        "due": MODEL.due(drive.state),
    }


def test_all_orders_of_a_node_death() -> None:
    """In whatever order exits, cascades and the node's own end arrive: one incident, one relaunch, no restart charged."""
    begin = Drive(nodes_max=2, nproc=2).up()
    for order in itertools.permutations(NODE_DEATH):
        drive = begin.fork()
        for name in order:
            NODE_DEATH[name](drive)
        assert _essence(drive) == {
            "incidents": 1,
            "verdict": "PLAT",
            "incident": "acting",
            "in force": [("RELAUNCH_NODE", "worker-1-0")],
            "restarts": 0,
            "relaunches": {"worker-1": 1},
            "nodes": [("worker-0-0", "running", "", True), ("worker-1-1", "planned", "", False)],
            "active": False,
            "due": drive.now + 900 * SECOND,
        }, order
        drive.join("worker-1-1")
        assert drive.members == ["worker-0-0", "worker-1-1"], order
        drive.run(2)
        assert drive.incident.state == "closed", order
        assert drive.state.incidents.number == 1, order


WORKER_DEATH: dict[str, Step] = {
    "the bug": lambda drive: drive.exit("worker-1-0", 2, 1, ERROR, generation=1, age_us=2000),
    "cascade rank 0": lambda drive: drive.cascade("worker-0-0", 0, generation=1),
    "cascade rank 1": lambda drive: drive.cascade("worker-0-0", 1, generation=1),
    "cascade rank 3": lambda drive: drive.cascade("worker-1-0", 3, generation=1),
    "asked": lambda drive: drive.exit("worker-1-0", 3, -9, asked=True, generation=1),
}


def test_all_orders_of_a_worker_death() -> None:
    """In whatever order a bug and its cascades arrive: one incident, one restart, and the bug is its root."""
    begin = Drive(nodes_max=2, nproc=2).up()
    for order in itertools.permutations(WORKER_DEATH):
        drive = begin.fork()
        for name in order:
            WORKER_DEATH[name](drive)
        incident = drive.incident
        assert (drive.state.incidents.number, incident.verdict, incident.signature) == (
            1,
            "USER",
            "exception.ValueError",
        ), order
        assert _in_force(drive) == [("RESTART_PROCESSES", incident.node)]
        assert (drive.state.incidents.restarts, drive.state.incidents.relaunches) == (1, {})
        assert (drive.world.generation, drive.members) == (2, ["worker-0-0", "worker-1-0"])
        assert describe(incident.cause) == "rank 2 on worker-1-0: ValueError: bad batch (exception.ValueError)"


TWO_NODES: dict[str, Step] = {
    "first": lambda drive: drive.observe("worker-1-0", "failed", -9),
    "second": lambda drive: drive.observe("worker-2-0", "gone"),
    "cascade": lambda drive: drive.cascade("worker-0-0", 0, generation=1),
    "killed": lambda drive: drive.exit("worker-2-0", 2, -9, generation=1),
}


def test_all_orders_of_two_nodes_deaths() -> None:
    """Two nodes of one world die together: one incident, each relaunched and charged once, no restart charged."""
    begin = Drive(nodes_max=3, nproc=1).up()
    for order in itertools.permutations(TWO_NODES):
        drive = begin.fork()
        for name in order:
            TWO_NODES[name](drive)
        assert drive.state.incidents.number == 1, order
        assert sorted(_in_force(drive)) == [("RELAUNCH_NODE", "worker-1-0"), ("RELAUNCH_NODE", "worker-2-0")], order
        assert (drive.state.incidents.restarts, drive.state.incidents.relaunches) == (
            0,
            dict.fromkeys(drive.state.incidents.relaunches, 1),
        )
        assert set(drive.state.nodes.nodes) >= {"worker-0-0", "worker-1-1", "worker-2-1"}


# ---- verdicts and budgets


def test_later_evidence_revises_the_verdict() -> None:
    """Another root cause is another Diagnosed that names the one it revises; the action stands."""
    drive = Drive().up()
    drive.cascade("worker-0-0", 0)
    first = next(record.seq for record in drive.new if type(record.event) is incidents.Diagnosed)
    drive.exit("worker-1-0", 2, 1, ERROR, generation=1)
    assert drive.names() == ["WorkerExited", "Diagnosed"]
    revised = drive.new[1].event
    assert (revised.verdict, revised.revises, revised.signature) == ("USER", first, "exception.ValueError")
    assert len(revised.evidence) == 2


def test_budgets_follow_the_revised_verdict() -> None:
    """When a node turns out to be dead, the restart is given back and the relaunch charged."""
    drive = Drive(max_restarts=1).up()
    drive.cascade("worker-0-0", 0)
    assert (drive.state.incidents.restarts, drive.state.incidents.relaunches) == (1, {})
    drive.observe("worker-1-0", "failed", -9)
    assert (drive.state.incidents.restarts, drive.state.incidents.relaunches) == (0, {"worker-1": 1})
    assert [(one.action, one.state) for one in drive.incident.actions] == [
        ("RESTART_PROCESSES", "superseded"),
        ("RELAUNCH_NODE", "in_force"),
    ]


def test_each_place_has_a_budget_of_its_own() -> None:
    """Relaunches are counted by place; one bad place does not use up another's."""
    drive = Drive(relaunch_max=1, nodes_max=3, nodes_min=2).up()
    drive.observe("worker-1-0", "gone")
    drive.observe("worker-2-0", "gone")
    assert drive.state.incidents.relaunches == {"worker-1": 1, "worker-2": 1}
    drive.observe("worker-1-1", "gone")
    assert drive.incident.action == ladder.GO_ON_SMALLER
    assert slots.wanted(drive.state, "worker") == 2


def test_relaunches_do_not_use_up_restarts() -> None:
    """A pre-empted node is not charged to the program."""
    drive = Drive(max_restarts=1, relaunch_max=9).up()
    for incarnation in range(5):
        drive.observe(f"worker-1-{incarnation}", "gone")
        drive.join(f"worker-1-{incarnation + 1}")
        drive.run(incarnation + 2)
    drive.exit("worker-0-0", 0)
    assert drive.incident.action == ladder.RESTART_PROCESSES


# ---- the final action waits


def _exhausted(**settings: Any) -> Drive:
    drive = Drive(max_restarts=0, **settings).up()
    drive.cascade("worker-0-0", 0)
    assert drive.incident.end_pending
    assert drive.members == []
    return drive


def test_the_final_action_waits_for_every_rank() -> None:
    """Without restarts left the world stops, and the job fails once every member has said its last word."""
    drive = _exhausted()
    drive.exit("worker-1-0", 2, 1, ERROR, generation=1)
    drive.do(world.ReportStopped("worker-0-0", 1, 60))
    assert drive.state.job.state == "running"
    drive.do(world.ReportStopped("worker-1-0", 1, 60))
    assert drive.names() == ["WorkersStopped", "ActionChosen", "JobFailed"]
    assert drive.state.job.root == "rank 2 on worker-1-0: ValueError: bad batch (exception.ValueError)"
    assert "--max-restarts" in drive.state.job.reason
    assert [(one.action, one.state) for one in drive.incident.actions] == [
        ("AWAIT_EVIDENCE", "superseded"),
        ("FAIL_JOB", "in_force"),
    ]
    assert drive.incident.state == "fatal"


def test_the_final_action_waits_no_longer_than_evidence_s() -> None:
    """A member that says nothing holds the decision up for evidence_s, by the tick."""
    drive = _exhausted(evidence_s=40.0)
    drive.do(world.ReportStopped("worker-0-0", 1, 60))
    assert MODEL.due(drive.state) == drive.now + 40 * SECOND
    drive.wait(39)
    assert drive.state.job.state == "running"
    drive.wait(1)
    assert drive.state.job.state == "failed"


def test_no_world_forms_while_a_final_action_is_held() -> None:
    """Arrivals, stores and the last call do not start what is about to fail."""
    drive = _exhausted()
    drive.offer("worker-0-0")
    drive.wait(100)
    assert drive.members == []
    assert drive.world.generation == 1


def test_a_held_final_action_is_dropped_when_the_node_turns_out_dead() -> None:
    """The node's death explains the exits: it is relaunched, and the job lives."""
    drive = _exhausted()
    drive.observe("worker-1-0", "failed", -9)
    assert (drive.incident.action, drive.incident.end_pending) == (ladder.RELAUNCH_NODE, False)
    drive.join("worker-1-1")
    assert drive.members == ["worker-0-0", "worker-1-1"]
    drive.wait(1000)
    assert drive.state.job.state == "running"


def test_too_few_nodes_end_the_job() -> None:
    """No relaunches left and too few nodes without it: the world stops, the rest speaks, the job fails with the node as root."""
    drive = Drive(relaunch_max=0).up()
    drive.observe("worker-1-0", "failed", 137, "OOMKilled")
    assert drive.incident.end_pending
    drive.do(world.ReportStopped("worker-0-0", 1, 7))
    assert drive.state.job.state == "failed"
    assert drive.state.job.root == "node worker-1-0: failed: OOMKilled (k8s.oom)"


def test_an_incident_is_decided_by_the_next_master_too() -> None:
    """A held decision is in the log: whoever leads at its deadline makes it."""
    drive = _exhausted(evidence_s=40.0)
    drive.take_over()
    drive.wait(40)
    assert drive.state.job.state == "failed"


def test_a_held_end_is_not_forgotten_over_another_nodes_death() -> None:
    """A job that misses a node it cannot replace fails, whatever happens to its other nodes meanwhile."""
    drive = Drive(nodes_max=3, nproc=1, relaunch_max=1, evidence_s=40.0).up()
    drive.observe("worker-1-0", "gone")
    drive.observe("worker-1-1", "gone")
    assert drive.incident.end_pending
    drive.observe("worker-2-0", "failed", -9)
    drive.wait(40)
    assert drive.state.job.state == "failed"


def test_a_held_end_does_not_disturb_a_stop() -> None:
    """Time that passes over a held decision while the job is being stopped decides nothing."""
    drive = _exhausted(evidence_s=40.0)
    drive.do(job.StopJob("Ctrl-C"))
    drive.wait(100)
    assert drive.new == []
    assert drive.state.job.state == "stopping"


def test_whoever_finished_and_left_is_needed_again_when_a_node_dies() -> None:
    """A world that must re-form without a node plans the places whose nodes had finished and gone."""
    for relaunch_max, planned in ((1, ["worker-1-1", "worker-0-1"]), (0, ["worker-0-1"])):
        drive = Drive(nodes_max=3, nodes_min=2, nproc=1, relaunch_max=relaunch_max).up()
        drive.do(world.ReportFinished("worker-0-0", 1))
        drive.observe("worker-0-0", "succeeded")
        drive.observe("worker-0-0", "gone")
        drive.observe("worker-1-0", "gone")
        assert [fact.node for fact in drive.facts(nodes.NodePlanned)][3:] == planned


# ---- mended


def test_a_first_step_of_the_broken_generation_mends_nothing() -> None:
    """Only a newer generation's first step closes an incident."""
    drive = Drive(nodes_max=2).up()
    drive.exit("worker-1-0", 3)
    assert drive.incident.state == "acting"
    drive.run(2)
    assert drive.incident.state == "closed"


def test_a_second_failure_before_recovery_is_its_own_incident() -> None:
    """The next generation's exit opens another; the first step after closes both."""
    drive = Drive().up()
    drive.exit("worker-1-0", 3)
    drive.exit("worker-1-0", 3)
    assert drive.state.incidents.number == 2
    drive.run(2)
    assert [one.state for one in drive.state.incidents.by_number.values()] == ["closed", "closed"]


def test_what_is_remembered_is_bounded() -> None:
    """Sixteen closed incidents and 64 pieces of evidence each are kept in state; the log has all."""
    drive = Drive(max_restarts=50, nproc=1).up()
    for step in range(30):
        # On both nodes alike: none of them stands out.
        drive.exit(f"worker-{step % 2}-0", step % 2)
        drive.run(step + 2)
    assert len(drive.state.incidents.by_number) == 16
    generation = drive.world.generation
    for _ in range(100):
        drive.exit("worker-1-0", 1, generation=generation)
    assert len(drive.incident.evidence) == 64


def test_survivors_tell_how_far_a_dead_node_had_come() -> None:
    """Steps lost to a node's death are known from the survivors' last words."""
    drive = Drive().up()
    drive.observe("worker-1-0", "failed", -9)
    drive.do(world.ReportStopped("worker-0-0", 1, 60))
    drive.join("worker-1-1")
    drive.do(progress.ReportFirstStep("worker-0-0", 2, 51, told=True))
    assert drive.facts(incidents.IncidentClosed)[0].steps_lost == 11


def test_nothing_is_opened_after_the_end() -> None:
    """A job that failed has no further incidents."""
    drive = Drive(max_restarts=0, evidence_s=0.0).up()
    drive.exit("worker-0-0", 0, 1, ERROR)
    drive.wait(1)
    drive.observe("worker-1-0", "failed", -9)
    assert drive.state.incidents.number == 1
    assert len(drive.facts(job.JobFailed)) == 1


def test_a_late_nodes_death_breaks_no_world() -> None:
    """A node that was not in the running world opens an incident of its own, which the next worker's death does not join."""
    drive = Drive(nodes_min=1, nodes_max=2, last_call_s=1.0)
    drive.join("worker-0-0")
    drive.wait(1)
    drive.observe("worker-1-0", "failed", exit_code=-9)
    assert drive.state.world.worlds["worker"].active
    drive.do(incidents.ReportExit("worker-0-0", 1, 0, -9))
    assert [one.generation for one in drive.state.incidents.by_number.values()] == [incidents.ASIDE, 1]
    assert drive.state.incidents.restarts == 1
    drive.join("worker-1-1")
    assert drive.state.incidents.by_number[1].closed


def test_an_asked_death_with_an_error_of_its_own_is_evidence() -> None:
    """A rank that was killed by us while it told its error is the root cause; its exit opens nothing by itself."""
    drive = Drive(max_restarts=0).up()
    drive.do(incidents.ReportExit("worker-0-0", 1, 0, 1, error="RuntimeError: Connection reset by peer"))
    assert desired(drive.state).orders["worker-1-0"].linger_us > 0, "the rank that caused the failure may report late"
    drive.do(incidents.ReportExit("worker-1-0", 1, 2, -9, asked=True, error="ValueError: bad batch"))
    assert desired(drive.state).orders["worker-0-0"].linger_us == 0
    drive.do(world.ReportStopped("worker-0-0", 1))
    drive.do(world.ReportStopped("worker-1-0", 1))
    assert drive.state.job.root == "rank 2 on worker-1-0: ValueError: bad batch (exception.ValueError)"
    assert drive.state.incidents.number == 1


def test_a_script_without_steps_is_mended_in_time() -> None:
    """Where no steps are told, an incident closes once its successor has run for evidence_s."""
    drive = Drive(evidence_s=50.0).up()
    drive.do(incidents.ReportExit("worker-1-0", 1, 2, -9))
    for node in ("worker-0-0", "worker-1-0"):
        drive.do(world.ReportStarted(node, 2))
    drive.wait(49)
    assert drive.state.incidents.unmended("worker") is not None
    drive.wait(1)
    assert drive.state.incidents.unmended("worker") is None


def test_relaunches_are_forgiven_to_a_node_that_serves() -> None:
    """Deaths weeks apart spend no budget; those in quick succession do, also after a long quiet time."""
    drive = Drive(nodes_max=2, nodes_min=1, relaunch_max=2).up()

    def die(incarnation: int) -> None:
        drive.observe(f"worker-1-{incarnation}", "gone")
        drive.join(f"worker-1-{incarnation + 1}")
        drive.run(1)

    for incarnation in range(5):
        drive.wait(incidents.SERVED_S)
        die(incarnation)
        assert drive.facts(incidents.ActionChosen)[-1].budget_left == 1
    die(5)
    assert drive.facts(incidents.ActionChosen)[-1].budget_left == 0
    drive.wait(incidents.SERVED_S - 60)
    drive.observe("worker-1-6", "gone")
    assert drive.facts(incidents.ActionChosen)[-1].action == ladder.GO_ON_SMALLER


def test_who_never_comes_has_not_served() -> None:
    """Time in which a successor was only awaited forgives nothing."""
    drive = Drive(nodes_max=2, nodes_min=1, relaunch_max=2, launch_s=2 * incidents.SERVED_S, last_call_s=1.0).up()
    drive.observe("worker-1-0", "gone")
    drive.wait(7 * incidents.SERVED_S)
    assert [one.budget_left for one in drive.facts(incidents.ActionChosen)] == [1, 0, 0]
    assert drive.state.nodes.slots["worker-1"].given_up
