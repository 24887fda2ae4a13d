"""Suspending that frees: ranks come to a boundary, what nodes hold is written, all of them go, and come anew on resumption."""

from __future__ import annotations

from typing import Any

import pytest
from drive import Drive

from dlrover_adapters.cli import operate
from dlrover_core.errors import MalformedMessage
from dlrover_core.history.explain import explanation_of
from dlrover_core.history.words import say
from dlrover_core.job import checkpoints, job, nodes, operations, plans, world
from dlrover_core.job.checkpoints import CheckpointCommitted, ReportArmed, ReportHeld, ReportKeeping, SaveOrdered
from dlrover_core.kernel.engine import NotDone, Reply
from dlrover_core.rules.desired import desired
from dlrover_core.rules.reasons import reasons
from dlrover_core.runtime.operations import command_of
from dlrover_core.spec import GroupSpec

A, B = "worker-0-0", "worker-1-0"
URL = "file:///ckpts"


def saving(url: str = URL, *, planned: bool = True, **settings: Any) -> Drive:
    """Two nodes that train and save."""
    drive = Drive(nodes_max=2, nproc=1, **settings).up()
    return keeps(drive, url, planned=planned)


def keeps(drive: Drive, url: str = URL, *, planned: bool = True) -> Drive:
    """The ranks of the running generation say that they save."""
    drive.do(ReportKeeping(drive.members[0], drive.world.generation, url, 2, 10, 3, planned, 4096, 1))
    return drive


def suspend(drive: Drive, *, lose: bool = False) -> Reply:
    """As `dlrover suspend` asks."""
    return drive.do(job.SuspendJob("lunch", keep_nodes=False, lose=lose))


def refused(reply: Reply) -> str:
    """Why it was."""
    assert isinstance(reply, NotDone)
    return reply.reason


def at_boundary(drive: Drive, step: int) -> None:
    """All ranks look for the boundary, and wait at it."""
    plan = drive.state.plans.by_group["worker"].number
    for member in drive.world.members:
        drive.do(ReportArmed(member.node, plan))
    for member in drive.world.members:
        drive.do(ReportHeld(member.node, drive.world.generation, (step,), plan))


def stopped(drive: Drive, step: int, names: tuple[str, ...] = (A, B)) -> None:
    """Workers have stopped, and their nodes tell what they hold."""
    for name in names:
        drive.do(world.ReportStopped(name, drive.world.generation, step))
        drive.do(ReportHeld(name, drive.world.generation, (step,)))


def stored(drive: Drive, step: int) -> None:
    """Every part is on storage."""
    drive.do(checkpoints.CommitCheckpoint("worker", drive.world.generation, step, 2, 1 << 20, 1))


def released(drive: Drive) -> dict[str, str]:
    """Who was released, and why."""
    return {one.node: one.reason for one in drive.facts(nodes.NodeReleased)}


def gone(drive: Drive, *names: str) -> None:
    """Their agents leave, and their backend has nothing of them any more."""
    for name in names:
        drive.do(nodes.ReportLeft(name))
        drive.observe(name, "gone")


def test_its_course() -> None:
    """Boundary, stop, write, release; nobody is planned until the job goes on, from the very step."""
    drive = saving()
    suspend(drive)
    assert drive.names() == ["SuspensionPlanned", "WorldPlanned", "BoundaryAsked"]
    assert drive.state.job.state == "running"
    at_boundary(drive, 12)
    assert (drive.state.job.state, drive.state.job.reason) == ("suspended", "lunch")
    assert drive.facts(job.JobSuspended)[-1].frees
    assert released(drive) == {}
    assert not desired(drive.state).orders[A].leave
    stopped(drive, 12)
    assert [one.step for one in drive.facts(SaveOrdered)] == [12]
    assert released(drive) == {}
    (wait,) = reasons(drive.state)
    assert wait.words == (
        "the job is suspended, and its nodes are released after this: step 12 is being written to file:///ckpts"
    )
    stored(drive, 12)
    assert released(drive) == {A: "suspended", B: "suspended"}
    assert desired(drive.state).orders[A].leave
    assert desired(drive.state).names == frozenset()
    gone(drive, A, B)
    drive.wait(100_000)
    assert drive.state.nodes.nodes == {}
    assert [one.words for one in reasons(drive.state)] == ["the job is suspended, without nodes"]
    drive.do(job.ResumeJob("back"))
    assert [one.node for one in desired(drive.state).launch] == ["worker-0-1", "worker-1-1"]
    for name in ("worker-0-1", "worker-1-1"):
        drive.observe(name, "running")
        drive.join(name)
    formed = drive.facts(world.WorldFormed)[-1]
    assert (formed.resume_step, formed.resume_tier) == (12, checkpoints.STORAGE)
    assert drive.state.incidents.number == 0
    assert drive.state.incidents.relaunches == {}
    assert drive.state.job.suspension is None


def test_a_master_that_follows_keeps_it_suspended() -> None:
    """At every moment of it the master dies, and the next one goes on with it."""
    drive = saving()
    suspend(drive)
    drive.take_over()
    at_boundary(drive, 12)
    drive.take_over()
    stopped(drive, 12)
    drive.take_over()
    assert released(drive) == {}
    stored(drive, 12)
    assert set(released(drive)) == {A, B}
    drive.take_over()
    gone(drive, A, B)
    drive.take_over()
    drive.wait(10_000)
    assert drive.state.job.state == "suspended"
    assert desired(drive.state).launch == ()


def test_keep_nodes_is_todays_way() -> None:
    """Workers stop at once, whatever is on storage; nodes stay."""
    drive = Drive(nodes_max=2, nproc=1).up()
    drive.do(job.SuspendJob("lunch", keep_nodes=True))
    assert drive.names() == ["JobSuspended", "WorldDissolved"]
    drive.wait(10_000)
    assert released(drive) == {}
    assert drive.state.job.suspension is None


@pytest.mark.parametrize("how", ["nothing", "memory", "failing"])
def test_what_would_be_lost_is_said_before(how: str) -> None:
    """Where something is on no storage the command is refused, in words; who accepts that is obeyed."""
    drive = Drive(nodes_max=2, nproc=1).up(first_step=7)
    if how != "nothing":
        keeps(drive, "" if how == "memory" else URL)
    if how == "failing":
        stored(drive, 6)
        drive.do(checkpoints.ReportStorage(A, URL, "no space"))
    words = {
        "nothing": "worker saves nothing with FlashCheckpoint, and the 7 steps it has made are lost unless its program",
        "memory": "worker saves into memory alone, and the 7 steps it has made are lost",
        "failing": "worker cannot write to file:///ckpts now, where step 6 is the newest there",
    }
    said = refused(suspend(drive))
    assert words[how] in said
    assert said.endswith("--yes accepts that, --keep-nodes stops the workers and keeps the nodes")
    assert drive.state.job.state == "running"
    suspend(drive, lose=True)
    if how != "nothing":
        at_boundary(drive, 8)
    assert drive.state.job.state == "suspended"
    stopped(drive, 8, (A, B)) if how != "nothing" else [drive.do(world.ReportStopped(one, 1, 8)) for one in (A, B)]
    assert set(released(drive)) == {A, B}


def test_a_job_that_has_made_nothing_loses_nothing() -> None:
    """Before its first world nothing is asked, and all nodes go at once."""
    drive = Drive(nodes_max=2, nproc=1)
    drive.observe(A, "running")
    suspend(drive)
    assert set(released(drive)) == {A, B}
    drive.do(job.ResumeJob("back"))
    assert drive.state.job.state == "created"
    assert {one.node for one in drive.facts(nodes.NodePlanned)} >= {"worker-0-1", "worker-1-1"}


def test_nodes_that_come_by_themselves_are_kept() -> None:
    """Nobody could start them again."""
    drive = Drive(nodes_max=2, nproc=1, joining=True).up()
    assert "say --keep-nodes" in refused(suspend(drive, lose=True))


def test_ranks_that_come_to_no_boundary_do_not_hold_it_up() -> None:
    """At its deadline the job pauses, and loses what is not saved, as a restart would."""
    drive = saving(plan_s=100.0)
    suspend(drive)
    drive.wait(99)
    assert drive.state.job.state == "running"
    drive.wait(1)
    assert drive.state.job.state == "suspended"
    assert drive.state.plans.by_group == {}


def test_ranks_that_wait_do_not_wait_for_ever() -> None:
    """One node is at the boundary and the other never comes: after `boundary_s` the job pauses."""
    drive = saving(boundary_s=20.0)
    suspend(drive)
    for name in (A, B):
        drive.do(ReportArmed(name, 1))
    drive.do(ReportHeld(A, 1, (12,), 1))
    drive.wait(19)
    assert drive.state.job.state == "running"
    drive.wait(1)
    assert drive.state.job.state == "suspended"


def test_a_node_that_tells_nothing_does_not_hold_it_up() -> None:
    """What it holds is waited for as after any end, no longer."""
    drive = saving()
    suspend(drive)
    at_boundary(drive, 12)
    for name in (A, B):
        drive.do(world.ReportStopped(name, 1, 12))
    assert released(drive) == {}
    drive.wait(60)
    assert set(released(drive)) == {A, B}


def test_a_storage_that_fails_keeps_the_nodes_unless_that_was_accepted() -> None:
    """What only the nodes hold is not given away; whoever accepted a loss is not kept waiting."""
    for lose in (False, True):
        drive = saving()
        suspend(drive, lose=lose)
        at_boundary(drive, 12)
        stopped(drive, 12)
        drive.do(checkpoints.ReportStorage(A, URL, "no space"))
        assert bool(released(drive)) is lose
        if not lose:
            assert "and 1 node cannot write there now" in reasons(drive.state)[0].words
            drive.do(job.ResumeJob("no use"))
            assert drive.members == [A, B]


def test_taken_back_before_it_began() -> None:
    """A resumption before the boundary drops the plan: the ranks go on, nothing is stopped."""
    drive = saving()
    suspend(drive)
    assert refused(suspend(drive)) == "the job is about to be suspended already"
    assert "about to be suspended" in refused(drive.do(operations.ScaleGroup("worker", 3, 3, "more")))
    drive.do(job.ResumeJob("no"))
    assert [one.reason for one in drive.facts(plans.WorldPlanDropped)] == ["the suspension is taken back"]
    assert drive.members == [A, B]
    assert drive.facts(world.WorldDissolved) == []


def test_a_change_that_was_prepared_gives_way() -> None:
    """A drain in the middle is dropped, and forgotten with its node."""
    drive = saving()
    drive.do(operations.DrainNode(B, "maintenance"))
    suspend(drive)
    assert [one.reason for one in drive.facts(plans.WorldPlanDropped)] == ["the job is about to be suspended"]
    at_boundary(drive, 12)
    stopped(drive, 12)
    stored(drive, 12)
    assert set(released(drive)) == {A, B, "worker-1-1"}
    drive.wait(10_000)
    assert drive.state.plans.leaving == {}


def test_a_failure_on_the_way_pauses_at_once() -> None:
    """Ranks that have died come to no boundary, and nobody is started for a job that is to pause."""
    drive = saving()
    suspend(drive)
    drive.exit(B, 1)
    drive.cascade(A, 0)
    assert drive.state.job.state == "suspended"
    assert len(drive.facts(world.WorldFormed)) == 1
    stopped(drive, 10)
    stored(drive, 10)
    assert set(released(drive)) == {A, B}


def test_a_node_that_dies_meanwhile_is_not_replaced() -> None:
    """Its part is lost with it; the others go, and whoever comes on resumption goes on from what is on storage."""
    drive = saving()
    stored(drive, 10)
    suspend(drive)
    at_boundary(drive, 12)
    drive.observe(B, "failed", -9, "hardware")
    drive.observe(B, "gone")
    stopped(drive, 12, (A,))
    drive.wait(60)
    assert A in released(drive)
    gone(drive, A)
    assert desired(drive.state).launch == ()
    drive.do(job.ResumeJob("back"))
    assert len(desired(drive.state).launch) == 2


def test_sets_wait_for_each_other() -> None:
    """Of two sets that save the first one waits at its boundary; a set that makes no steps keeps nobody."""
    groups = (
        GroupSpec("trainer", uses=("rollout",)),
        GroupSpec("other"),
        GroupSpec("rollout", ends=False, store=False),
    )
    drive = Drive(groups=groups)
    for node in list(drive.state.nodes.nodes):
        drive.observe(node, "running")
        drive.do(nodes.ReportJoined(node, f"host-of-{node}", node, 1))
        drive.offer(node)
    for name in ("trainer", "other"):
        drive.do(world.ReportStarted(f"{name}-0-0", 1))
        drive.do(ReportKeeping(f"{name}-0-0", 1, f"{URL}/{name}", 2, 10, 3, True, 4096, 1))
    suspend(drive)
    for name in ("trainer", "other"):
        plan = drive.state.plans.by_group[name].number
        drive.do(ReportArmed(f"{name}-0-0", plan))
        assert drive.state.job.state == "running"
        drive.do(ReportHeld(f"{name}-0-0", 1, (4,), plan))
    assert drive.state.job.state == "suspended"
    drive.do(world.ReportStopped("rollout-0-0", 1, -1))
    assert released(drive) == {"rollout-0-0": "suspended"}
    for name in ("trainer", "other"):
        drive.do(world.ReportStopped(f"{name}-0-0", 1, 4))
        drive.do(ReportHeld(f"{name}-0-0", 1, (4,)))
        drive.do(checkpoints.CommitCheckpoint(name, 1, 4, 1, 1 << 20, 1))
    assert len(drive.facts(CheckpointCommitted)) == 2
    assert len(released(drive)) == 3


def test_stopped_while_suspended_without_nodes() -> None:
    """Nothing is left that runs: it is over at once."""
    drive = saving()
    suspend(drive)
    at_boundary(drive, 12)
    stopped(drive, 12)
    stored(drive, 12)
    gone(drive, A, B)
    drive.do(job.StopJob("enough"))
    assert drive.state.job.state == "stopped"


def test_who_says_no_more_over_http_keeps_the_nodes() -> None:
    """A command of before means what it meant."""
    assert command_of({"command": "suspend"}) == job.SuspendJob("asked over HTTP", keep_nodes=True, lose=False)
    freeing = {"command": "suspend", "keep_nodes": False, "lose": True, "reason": "x"}
    assert command_of(freeing) == job.SuspendJob("x", keep_nodes=False, lose=True)
    with pytest.raises(MalformedMessage):
        command_of({"command": "suspend", "keep_nodes": "yes"})


def test_the_command_says_what_is_lacking() -> None:
    """`dlrover suspend --wait` waits for the boundary, the stop, the writing, and for the last node."""
    drive = saving()
    lacks = operate.lacks_rest
    suspend(drive)
    assert lacks(drive.state, ()) == "its ranks are on the way to a step boundary"
    at_boundary(drive, 12)
    assert "workers of 2 nodes have not stopped yet" in lacks(drive.state, ())
    stopped(drive, 12)
    assert "step 12 is being written to file:///ckpts" in lacks(drive.state, ())
    stored(drive, 12)
    assert lacks(drive.state, ()) == "2 nodes have not gone yet"
    gone(drive, A, B)
    assert lacks(drive.state, ()) == ""


def test_what_people_read() -> None:
    """`events` and `explain` say who gave the nodes back, and why the job is suspended."""
    drive = saving()
    suspend(drive)
    at_boundary(drive, 12)
    planned, paused = (drive.facts(kind)[0] for kind in (job.SuspensionPlanned, job.JobSuspended))
    assert say(planned) == "the job will be suspended at its next step boundary, and its nodes released: lunch"
    assert say(paused) == "the job was suspended, and its nodes are released: lunch"
    seqs = {type(one.event).__name__: one.seq for one in drive.records}
    found = explanation_of(drive.records, seqs["JobSuspended"])
    assert found is not None
    assert seqs["SuspensionPlanned"] in {one.record.seq for one in found.before}
    assert say(drive.facts(plans.WorldPlanned)[0]).endswith("the job is to be suspended")
