"""Jobs that are suspended and resumed; orders of people amid failures and new masters."""

from __future__ import annotations

import pytest
from drive import Drive
from sized import GRACE_US, drain, goes, launches, orders, refused, scale, up

from dlrover_core.job import incidents, job, nodes, operations, world
from dlrover_core.kernel.engine import Accepted, Reply
from dlrover_core.rules.desired import CLOSING_S, deletion_grace_s, desired
from dlrover_core.rules.model import MODEL


def suspend(drive: Drive) -> Reply:
    """Ask for a pause."""
    return drive.do(job.SuspendJob("lunch"))


def resume(drive: Drive) -> Reply:
    """Ask to go on."""
    return drive.do(job.ResumeJob("back"))


# ---- suspending


def test_suspend_and_resume() -> None:
    """Workers stop with their grace, nodes and agents stay, no world forms; then the next one forms at once."""
    drive = up(nodes_max=2)
    suspend(drive)
    assert drive.names() == ["JobSuspended", "WorldDissolved"]
    assert (drive.state.job.state, drive.state.job.reason) == ("suspended", "lunch")
    for order in orders(drive).values():
        assert (order.leave, order.generation, order.grace_us) == (False, 0, GRACE_US)
        assert order.reason == "the job is suspended"
    for node in ("worker-0-0", "worker-1-0"):
        drive.do(world.ReportStopped(node, 1, 5))
    assert MODEL.due(drive.state) is None
    drive.wait(10_000)
    assert drive.members == []
    assert len(desired(drive.state).names) == 2
    resume(drive)
    assert drive.names() == ["JobResumed", "WorldFormed"]
    assert drive.members == ["worker-0-0", "worker-1-0"]
    assert (drive.state.job.state, drive.state.job.reason) == ("running", "")
    assert drive.state.incidents.number == 0


def test_suspending_and_resuming_twice_is_refused() -> None:
    """Each refusal says how the job stands."""
    drive = up()
    assert refused(resume(drive)) == "the job is running; only a suspended one can be resumed"
    suspend(drive)
    assert refused(suspend(drive)) == "the job is suspended already"
    resume(drive)
    assert "only a suspended one" in refused(resume(drive))
    assert drive.world.generation == 2


def test_suspended_while_forming() -> None:
    """A job whose nodes are still coming may be suspended: they come, and the first world waits for the resumption."""
    drive = Drive(nodes_max=2, nproc=1)
    drive.join("worker-0-0")
    suspend(drive)
    drive.join("worker-1-0")
    drive.wait(100)
    assert drive.members == []
    resume(drive)
    assert drive.names() == ["JobResumed", "WorldFormed", "JobStarted"]
    assert drive.state.job.state == "running"


def test_a_node_that_dies_while_suspended_is_replaced() -> None:
    """Its incident broke no world, and is over when the place is filled; the pause is not charged to it."""
    drive = up(nodes_max=2)
    suspend(drive)
    drive.observe("worker-1-0", "gone")
    assert drive.incident.generation == incidents.ASIDE
    assert list(launches(drive)) == ["worker-1-1"]
    drive.join("worker-1-1")
    assert drive.incident.closed
    assert drive.members == []
    resume(drive)
    assert drive.members == ["worker-0-0", "worker-1-1"]


def test_resumed_while_a_node_is_missing() -> None:
    """It is waited for from the resumption on, as after any change; without it the others go on where they may."""
    drive = up(nodes_max=2, nodes_min=1)
    suspend(drive)
    drive.wait(5000)
    drive.observe("worker-1-0", "gone")
    resume(drive)
    assert drive.members == []
    drive.wait(31)
    assert drive.members == ["worker-0-0"]


def test_stopped_while_suspended() -> None:
    """A suspended job can be stopped, and then not be resumed."""
    drive = up(nodes_max=2)
    suspend(drive)
    drive.do(job.StopJob("enough"))
    assert drive.state.job.state == "stopping"
    assert refused(resume(drive)) == "the job is stopping; only a suspended one can be resumed"
    assert refused(drain(drive, "worker-0-0")) == "the job is stopping"
    assert refused(scale(drive, 3)) == "the job is stopping"
    for node in ("worker-0-0", "worker-1-0"):
        drive.do(nodes.ReportLeft(node))
    assert drive.state.job.state == "stopped"
    # It has gone by itself: it lets go of gigabytes, and nobody is to kill it over that.
    assert deletion_grace_s(drive.state, f"j-{node}") >= CLOSING_S


def test_who_had_finished_is_needed_again_after_a_pause() -> None:
    """A member that ended well and is gone gets a successor: the next world begins from the checkpoint with everybody."""
    drive = up(nodes_max=2)
    drive.do(world.ReportFinished("worker-0-0", 1))
    drive.observe("worker-0-0", "succeeded")
    drive.observe("worker-0-0", "gone")
    suspend(drive)
    assert list(launches(drive)) == ["worker-0-1"]
    drive.join("worker-0-1")
    resume(drive)
    assert len(drive.members) == 2


def test_scaled_and_drained_while_suspended() -> None:
    """Both take place; the world that forms afterwards has the new sizes."""
    drive = up(nodes_max=3, nodes_min=1)
    suspend(drive)
    scale(drive, 2)
    drain(drive, "worker-0-0")
    assert drive.members == []
    goes(drive, "worker-2-0")
    goes(drive, "worker-0-0")
    drive.join("worker-0-1")
    assert drive.members == []
    resume(drive)
    assert drive.members == ["worker-0-1", "worker-1-0"]


# ---- with failures, and with masters that die


@pytest.mark.parametrize("what", ["scale", "drain", "suspend"])
def test_a_job_that_is_about_to_fail_takes_no_orders_but_stop(what: str) -> None:
    """Its end is decided and waits for evidence alone; only stopping is left."""
    drive = up(nodes_max=2, max_restarts=0)
    drive.exit("worker-0-0", 0, 1, error="ValueError: bad batch")
    ask = {
        "scale": lambda: scale(drive, 3),
        "drain": lambda: drain(drive, "worker-1-0"),
        "suspend": lambda: suspend(drive),
    }
    assert "incident 1 (exception.ValueError) is about to fail the job" in refused(ask[what]())
    assert isinstance(drive.do(job.StopJob("enough")), Accepted)


@pytest.mark.parametrize("what", ["scale", "drain", "suspend"])
def test_an_open_incident_does_not_stand_in_the_way(what: str) -> None:
    """A restart that has made no step yet is overtaken by what a person asks, and mended by the step that comes then."""
    drive = up(nodes_max=3, nodes_min=1)
    drive.exit("worker-0-0", 0)
    assert drive.world.generation == 2
    if what == "scale":
        scale(drive, 2)
    elif what == "drain":
        drain(drive, "worker-2-0")
        goes(drive, "worker-2-0")
        drive.join("worker-2-1")
    else:
        suspend(drive)
        resume(drive)
    assert drive.world.generation == 3
    drive.run(9)
    assert drive.incident.closed


@pytest.mark.parametrize("end", ["failed", "lost"])
def test_a_suspended_job_fails_where_a_dead_node_cannot_be_replaced(end: str) -> None:
    """It would be no better after the resumption."""
    drive = up(nodes_max=2, relaunch_max=0, evidence_s=10.0)
    suspend(drive)
    for node in ("worker-0-0", "worker-1-0"):
        drive.do(world.ReportStopped(node, 1, 5))
    drive.observe("worker-1-0", "failed", -9)
    drive.wait(11)
    assert drive.state.job.state == "failed"
    assert "worker-1-0" in drive.state.job.root


@pytest.mark.parametrize("what", ["scale", "drain", "suspend", "resume"])
def test_a_take_over_in_the_middle_changes_nothing(what: str) -> None:
    """The next master folds the same state and orders the same; a repeated command is refused as before."""
    drive = up(nodes_max=3, nodes_min=1)
    if what in ("suspend", "resume"):
        suspend(drive)
    if what == "resume":
        resume(drive)
    elif what == "scale":
        scale(drive, 2)
    elif what == "drain":
        drain(drive, "worker-1-0")
    before = desired(drive.state)
    drive.take_over()
    assert desired(drive.state) == before
    again = {
        "scale": lambda: scale(drive, 2),
        "drain": lambda: drain(drive, "worker-1-0"),
        "suspend": lambda: suspend(drive),
    }
    if what in again:
        assert "already" in refused(again[what]())


def test_a_new_run_has_its_own_sizes() -> None:
    """What an earlier run was scaled to, and that it was suspended, is over with it."""
    drive = up(nodes_max=2)
    scale(drive, 4)
    suspend(drive)
    drive.do(job.CreateJob("run-2", drive.spec.to_json()))
    assert drive.state.job.sizes == {}
    assert (drive.state.job.state, drive.state.job.spec.group("worker").nodes_max) == ("created", 2)
    drive.up()
    assert len(drive.members) == 2


@pytest.mark.parametrize("how", ["left", "not joined", "pending"])
def test_a_released_node_that_is_never_seen_to_end_frees_its_place(how: str) -> None:
    """A node let go by plan, whose backend can no longer see it end: its successor is launched in time all the same."""
    drive = up(nodes_min=1, nodes_max=3)
    scale(drive, 4)
    if how == "left":
        name = "worker-1-0"
        drive.do(operations.DrainNode("worker-1", "the host is switched off next"))
        drive.do(nodes.ReportLeft(name))
    else:
        name = "worker-3-0"
        drive.observe(name, "pending" if how == "pending" else "running", host="h3")
        drive.do(operations.ScaleGroup("worker", 1, 3, "fewer"))
        drive.do(operations.ScaleGroup("worker", 1, 4, "more"))
    successor = name.removesuffix("0") + "1"
    patience_s = drive.spec.stop_grace_s + drive.spec.kill_wait_s + drive.spec.unreachable_s
    drive.wait(patience_s - 1)
    assert successor not in launches(drive)
    drive.take_over()
    drive.wait(patience_s - 1)
    assert successor not in launches(drive), "a new master gives the full time again"
    drive.wait(2)
    assert drive.facts(nodes.NodeLost) == [nodes.NodeLost(name, "its backend never saw it end")]
    assert successor in launches(drive)
    assert drive.state.incidents.number == 0
