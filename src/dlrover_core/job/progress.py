"""Progress: the first step of every generation at once, then the step reached now and again. Edges, not levels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from dlrover_core.errors import Refused
from dlrover_core.job import job
from dlrover_core.kernel.engine import Concern
from dlrover_core.kernel.events import Event, Record, event
from dlrover_core.spec import us

if TYPE_CHECKING:
    from dlrover_core.job.state import JobState


@event(80)
class FirstStep(NamedTuple):
    """A generation has made its first step: whatever broke before is mended."""

    generation: int
    step: int
    node: str


@event(81)
class Progressed(NamedTuple):
    """The step reached, at most once in ``progress_s``."""

    generation: int
    step: int


class ReportFirstStep(NamedTuple):
    """An agent saw the first step of its workers' generation, ``age_us`` ago."""

    node: str
    generation: int
    step: int
    age_us: int = 0


class NoteProgress(NamedTuple):
    """The step reached, as the heartbeats tell."""

    generation: int
    step: int


@dataclass(slots=True)
class ProgressSlice:
    """Where training is, as far as the log needs to know."""

    generation: int = 0
    first_step: int = -1
    first_at: int = 0
    step: int = -1
    at: int = 0


def _first(state: JobState, command: ReportFirstStep, now: int) -> Iterator[Event]:
    newest = state.world.of(command.node)
    if command.generation != newest.generation or not newest.active:
        raise Refused(f"generation {command.generation} is over: generation {newest.generation} is the newest")
    if state.progress.generation >= command.generation:
        raise Refused(f"generation {command.generation} has made its first step already")
    yield FirstStep(command.generation, command.step, command.node)


def _note(state: JobState, command: NoteProgress, now: int) -> Iterator[Event]:
    seen = state.progress
    if command.generation == seen.generation and command.step > seen.step and now - seen.at >= us(state.job.spec.progress_s):
        yield Progressed(command.generation, command.step)


def _on_created(slice_: ProgressSlice, fact: job.JobCreated, record: Record) -> None:
    """A new run has made no step."""
    slice_.step = slice_.first_step = -1


def _on_first(slice_: ProgressSlice, fact: FirstStep, record: Record) -> None:
    slice_.generation, slice_.first_step, slice_.first_at = fact.generation, fact.step, record.at
    slice_.step, slice_.at = fact.step, record.at


def _on_progressed(slice_: ProgressSlice, fact: Progressed, record: Record) -> None:
    slice_.step, slice_.at = fact.step, record.at


CONCERN = Concern(
    name="progress",
    events=(FirstStep, Progressed),
    evolve={job.JobCreated: _on_created, FirstStep: _on_first, Progressed: _on_progressed},
    decide={ReportFirstStep: _first, NoteProgress: _note},
)

