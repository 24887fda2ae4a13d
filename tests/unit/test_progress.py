"""Progress: the first step of every generation, then the step reached now and again."""

from __future__ import annotations

import pytest
from drive import SECOND, Drive

from dlrover_core.job import job, progress
from dlrover_core.kernel.engine import NotDone


def test_the_first_step_is_an_event_at_once() -> None:
    """A generation's first step is recorded when it is reported, and once."""
    drive = Drive().up(first_step=7)
    assert drive.facts(progress.FirstStep) == [progress.FirstStep(1, 7, "worker-0-0")]
    again = drive.do(progress.ReportFirstStep("worker-1-0", 1, 7))
    assert isinstance(again, NotDone)
    assert len(drive.facts(progress.FirstStep)) == 1


@pytest.mark.parametrize("generation", [0, 1, 3])
def test_the_first_step_of_another_generation_is_refused(generation: int) -> None:
    """Only the newest generation can make progress."""
    drive = Drive().up()
    drive.exit("worker-1-0", 3)
    assert isinstance(drive.do(progress.ReportFirstStep("worker-0-0", generation, 5)), NotDone)


def test_a_dissolved_world_makes_no_step() -> None:
    """A step of a world that was dissolved mends nothing."""
    drive = Drive().up()
    drive.observe("worker-1-0", "failed", -9)
    assert isinstance(drive.do(progress.ReportFirstStep("worker-0-0", 1, 9)), NotDone)


def test_progress_is_recorded_at_most_once_in_progress_s() -> None:
    """The log holds edges, not levels: whatever is heard between is not recorded."""
    drive = Drive(progress_s=60.0).up()
    for step in range(2, 200):
        drive.wait(1)
        drive.do(progress.NoteProgress("worker", 1, step))
    assert [fact.step for fact in drive.facts(progress.Progressed)] == [61, 121, 181]


def test_progress_over_a_day_keeps_its_budget() -> None:
    """At most 1,440 progress events a day."""
    drive = Drive().up()
    for minute in range(1, 24 * 60 * 2 + 1):
        drive.wait(30)
        drive.do(progress.NoteProgress("worker", 1, minute))
    assert len(drive.facts(progress.Progressed)) <= 1440


def test_progress_never_goes_back() -> None:
    """A lower step, or one of another generation, is not progress."""
    drive = Drive().up(first_step=50)
    drive.wait(100)
    for generation, step in ((1, 50), (1, 49), (2, 60), (0, 60)):
        drive.do(progress.NoteProgress("worker", generation, step))
        assert drive.new == []
    drive.do(progress.NoteProgress("worker", 1, 51))
    assert drive.state.progress.of("worker").step == 51


def test_a_new_run_has_made_no_step() -> None:
    """Steps of an earlier run are not this run's."""
    drive = Drive().up(first_step=50)
    drive.do(job.CreateJob("run-2", drive.spec.to_json()))
    assert drive.state.progress.newest == progress.Progress()
    drive.up(first_step=3)
    assert drive.state.progress.newest.step == 3


def test_ages_not_timestamps() -> None:
    """When the step was made is told by its age, which is never believed to be older than its world."""
    drive = Drive().up()
    drive.wait(100)
    drive.exit("worker-1-0", 3)
    drive.wait(10)
    drive.do(progress.ReportFirstStep("worker-0-0", 2, 61, age_us=4 * SECOND))
    assert drive.state.progress.newest.at == drive.now - 4 * SECOND
    drive.exit("worker-1-0", 3)
    drive.do(progress.ReportFirstStep("worker-0-0", 3, 62, age_us=2**62))
    assert drive.state.progress.newest.at == drive.world.formed_at
