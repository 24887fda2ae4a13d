"""The job: created, stopped, archived."""

from __future__ import annotations

from collections.abc import Iterator

from dlrover_core.errors import Refused
from dlrover_core.job import job
from dlrover_core.job.state import JobState
from dlrover_core.kernel.engine import Rules, always
from dlrover_core.kernel.events import Event
from dlrover_core.rules import slots
from dlrover_core.spec import JobSpec


def _create(state: JobState, command: job.CreateJob, now: int) -> Iterator[Event]:
    if state.job.run == command.run:
        raise Refused(f"run {command.run} of job {state.job.name!r} has begun already")
    spec = JobSpec.from_json(command.spec)
    if state.job.state not in ("new", *job.OVER):
        yield job.JobAbandoned(f"run {command.run} begins")
    yield job.JobCreated(spec.job, command.run, command.spec)


def _stop(state: JobState, command: job.StopJob, now: int) -> Iterator[Event]:
    if not state.job.live:
        raise Refused(f"the job is {state.job.state}")
    yield job.JobStopping(command.reason)


def _take_over(state: JobState, command: job.TakeOver, now: int) -> Iterator[Event]:
    yield job.LeaderStarted(command.holder, command.version)


def _pause(state: JobState, command: job.NotePause, now: int) -> Iterator[Event]:
    yield job.MasterPaused(command.late_us)


def _archived(state: JobState, command: job.NoteArchived, now: int) -> Iterator[Event]:
    if command.first != state.job.archived + 1:
        raise Refused(f"the archive ends at {state.job.archived}, not before {command.first}")
    yield job.Archived(command.first, command.last, command.chain)


RULES = Rules(
    decide={
        job.CreateJob: _create,
        job.StopJob: _stop,
        job.TakeOver: _take_over,
        job.NotePause: _pause,
        job.NoteArchived: _archived,
    },
    react={job.JobStopping: slots.ended_by},
    levels=dict.fromkeys(set(job.EVENTS) - {job.JobStarted, job.MasterPaused, job.Archived}, always),
)
