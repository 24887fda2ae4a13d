"""The job's own life: created, running, and how it ends."""

from __future__ import annotations

import pytest
from drive import Drive, spec_of

from dlrover_core.job import checkpoints, job, nodes, silence, world
from dlrover_core.kernel.engine import CommandFailed, NotDone
from dlrover_core.rules.desired import desired


def _finish(drive: Drive) -> None:
    for node in list(drive.members):
        drive.do(world.ReportFinished(node, drive.world.generation))


def test_the_first_world_starts_the_job() -> None:
    """A job is created until its first world forms, and running ever after."""
    drive = Drive()
    assert drive.state.job.state == "created"
    drive.up()
    assert drive.state.job.state == "running"
    drive.exit("worker-0-0", 0)
    assert drive.names().count("JobStarted") == 0
    assert len(drive.facts(job.JobStarted)) == 1


def test_success() -> None:
    """The job succeeds when every node's workers have ended well, not before, and everybody is told to go."""
    drive = Drive(nodes_max=2).up()
    drive.do(world.ReportFinished("worker-0-0", 1))
    assert drive.state.job.state == "running"
    drive.do(world.ReportFinished("worker-1-0", 1))
    assert drive.names() == ["WorkersFinished", "JobSucceeded"]
    assert drive.state.job.over
    assert all(order.leave for order in desired(drive.state).orders.values())
    assert desired(drive.state).launch == ()


def test_a_last_state_that_is_not_on_storage_fails_the_job() -> None:
    """A script that ended well on all nodes, one of which could not store its part: nobody may take that for a success."""
    drive = Drive(nodes_max=2).up()
    why = "step 16 is not a checkpoint on storage (/ckpts): No space left; no step is there"
    drive.do(world.ReportFinished("worker-0-0", 1, 16, why))
    assert drive.state.job.state == "running", "the other node's workers are still at it"
    drive.do(world.ReportFinished("worker-1-0", 1, 16))
    assert drive.names() == ["WorkersFinished", "JobFailed"]
    failed = drive.facts(job.JobFailed)[-1]
    assert failed.root == f"worker-0-0: {why}"
    assert all(order.leave and order.outcome == "failed" for order in desired(drive.state).orders.values())


@pytest.mark.parametrize("committed", [True, False])
def test_what_other_nodes_were_still_writing_counts_once_all_have_finished(*, committed: bool) -> None:
    """A node that has written its parts cannot know whether others will: the leader does, when they have finished."""
    drive = Drive(nodes_max=2).up()
    drive.do(checkpoints.ReportKeeping("worker-0-0", 1, "/ckpts", 2, 4, 3, False, 1))
    why = "step 16 is not a checkpoint on storage (/ckpts): not all nodes have written their parts; no step is there"
    drive.do(world.ReportFinished("worker-0-0", 1, 16, why, 16))
    drive.do(checkpoints.CommitCheckpoint("worker", 1, 16 if committed else 12, 2, 1, 1))
    drive.do(world.ReportFinished("worker-1-0", 1, 16))
    assert drive.state.job.state == ("succeeded" if committed else "failed")


def test_a_generation_that_begins_anew_owes_nothing_of_the_one_before() -> None:
    """A node that could not store its part, and runs again because another one failed: what counts is what becomes of that."""
    drive = Drive(nodes_max=2, nproc=1).up()
    drive.do(world.ReportFinished("worker-0-0", 1, 16, "step 16 is not a checkpoint on storage"))
    drive.exit("worker-1-0", 1)
    assert drive.world.generation == 2
    assert drive.world.unstored == {}


def test_success_closes_what_is_open() -> None:
    """A script that signals no steps mends its incidents by ending well."""
    drive = Drive().up()
    drive.exit("worker-0-0", 0)
    _finish(drive)
    assert drive.names()[-2:] == ["JobSucceeded", "IncidentClosed"]


def test_an_early_finisher_ends_nothing() -> None:
    """One node that has finished neither ends the job nor stops the others from being mended."""
    drive = Drive(nodes_max=3, nproc=1).up()
    drive.do(world.ReportFinished("worker-0-0", 1))
    drive.exit("worker-1-0", 1)
    assert drive.world.generation == 2
    assert drive.state.job.state == "running"


def test_stopping() -> None:
    """A stop gives workers their grace, then ends when every agent has left; nothing is launched meanwhile."""
    drive = Drive(nodes_max=2, stop_grace_s=7.0).up()
    drive.do(job.StopJob("Ctrl-C"))
    assert (drive.state.job.state, drive.state.job.reason) == ("stopping", "Ctrl-C")
    orders = desired(drive.state).orders
    assert {(order.leave, order.grace_us) for order in orders.values()} == {(True, 7_000_000)}
    assert desired(drive.state).names == {"j-worker-0-0", "j-worker-1-0"}
    drive.do(nodes.ReportLeft("worker-0-0"))
    assert drive.state.job.state == "stopping"
    drive.do(nodes.ReportLeft("worker-1-0"))
    assert drive.state.job.state == "stopped"
    assert desired(drive.state).names == set()


@pytest.mark.parametrize("end", ["failed", "succeeded", "gone"])
def test_stopping_ends_however_the_nodes_end(end: str) -> None:
    """A node that dies while it is being stopped has stopped too, and opens no incident."""
    drive = Drive(nodes_max=2).up()
    drive.do(job.StopJob("Ctrl-C"))
    drive.do(nodes.ReportLeft("worker-0-0"))
    drive.observe("worker-1-0", end, -9)
    assert drive.state.job.state == "stopped"
    assert drive.state.incidents.number == 0


def test_stopping_does_not_wait_for_ever_for_the_unreachable() -> None:
    """A node that cannot be reached is waited for as long as one that can be would take to stop, no longer."""
    drive = Drive(nodes_max=2, stop_grace_s=70.0, kill_wait_s=30.0).up()
    drive.do(silence.NoteSilence("worker-1-0", 1))
    drive.do(job.StopJob("Ctrl-C"))
    drive.do(nodes.ReportLeft("worker-0-0"))
    drive.wait(99)
    assert drive.state.job.state == "stopping"
    drive.wait(1)
    assert drive.state.job.state == "stopped"


def test_stopping_a_job_that_has_nothing_running_is_immediate() -> None:
    """A job whose nodes have not come yet stops at once."""
    drive = Drive()
    drive.do(job.StopJob("changed my mind"))
    assert drive.names() == ["JobStopping", "JobStopped"]


def test_an_ended_job_is_not_stopped_again() -> None:
    """Stopping is refused once the job is stopping or over."""
    drive = Drive().up()
    drive.do(job.StopJob("one"))
    reply = drive.do(job.StopJob("two"))
    assert isinstance(reply, NotDone)
    assert reply.reason == "the job is stopping"


@pytest.mark.parametrize("end", ["stopping", "stopped", "succeeded", "failed"])
def test_nothing_is_decided_for_a_job_that_is_over(end: str) -> None:
    """Deaths, arrivals and time lead to no incident, no world and no node once the job ends."""
    drive = Drive(nodes_max=2, max_restarts=0, evidence_s=0.0).up()
    if end == "succeeded":
        _finish(drive)
    elif end == "failed":
        drive.exit("worker-0-0", 0, 1, "ValueError: x")
        drive.wait(1)
    else:
        drive.do(job.StopJob("x"))
        if end == "stopped":
            for one in (0, 1):
                drive.do(nodes.ReportLeft(f"worker-{one}-0"))
    assert drive.state.job.state == end
    incidents = drive.state.incidents.number
    drive.exit("worker-1-0", 2)
    drive.observe("worker-1-0", "failed", -9)
    drive.wait(10_000)
    assert drive.state.incidents.number == incidents
    assert not {"WorldFormed", "NodePlanned", "IncidentOpened"} & set(drive.names())


# ---- runs


def test_a_run_begins_once() -> None:
    """The same run is not begun twice: masters of one run may all try."""
    drive = Drive()
    reply = drive.do(job.CreateJob("run-1", drive.spec.to_json()))
    assert isinstance(reply, NotDone)


def test_a_new_run_abandons_a_live_one() -> None:
    """A run whose master is gone is abandoned by the next run under its name; generations and incidents go on counting."""
    drive = Drive().up()
    drive.exit("worker-0-0", 0)
    drive.do(job.CreateJob("run-2", drive.spec.to_json()))
    assert drive.names()[:2] == ["JobAbandoned", "JobCreated"]
    assert (drive.state.job.run, drive.state.job.state) == ("run-2", "created")
    drive.up()
    assert drive.world.generation == 3
    drive.exit("worker-0-1", 0)
    assert drive.incident.number == 2


def test_a_new_run_has_its_budgets_whole() -> None:
    """Restarts and relaunches used by an earlier run are not charged to the next."""
    drive = Drive(max_restarts=1).up()
    drive.exit("worker-0-0", 0)
    drive.observe("worker-1-0", "gone")
    drive.do(job.CreateJob("run-2", drive.spec.to_json()))
    assert (drive.state.incidents.restarts, drive.state.incidents.relaunches, drive.state.incidents.by_number) == (
        0,
        {},
        {},
    )


def test_a_spec_that_cannot_be_is_not_begun() -> None:
    """A first event with nonsense for a spec is never written."""
    drive = Drive()
    drive.do(job.CreateJob("run-2", "nonsense"))
    assert [type(record.event) for record in drive.new] == [CommandFailed]
    assert drive.state.job.run == "run-1"


def test_the_archive_grows_without_gap() -> None:
    """An archived segment must begin where the last ended."""
    drive = Drive()
    drive.do(job.NoteArchived(1, 10, "abc"))
    assert drive.state.job.archived == 10
    assert isinstance(drive.do(job.NoteArchived(12, 20, "def")), NotDone)
    assert not isinstance(drive.do(job.NoteArchived(11, 20, "def")), NotDone)


def test_names_carry_the_job() -> None:
    """A backend's name of a node is job, group, index and incarnation."""
    drive = Drive()
    assert spec_of().job == "j"
    assert desired(drive.state).launch[0].name == "j-worker-0-0"
