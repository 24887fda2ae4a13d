"""First steps, and the step that a group has reached."""

from __future__ import annotations

from collections.abc import Iterator

from dlrover_core.errors import Refused
from dlrover_core.job.progress import FirstStep, NoteProgress, Progressed, ReportFirstStep
from dlrover_core.job.state import JobState
from dlrover_core.kernel.engine import Rules
from dlrover_core.kernel.events import Event
from dlrover_core.spec import us


def _first(state: JobState, command: ReportFirstStep, now: int) -> Iterator[Event]:
    newest = state.world.of(command.node)
    if command.generation != newest.generation or not newest.active:
        raise Refused(f"generation {command.generation} is over: generation {newest.generation} is the newest")
    if state.progress.of(state.set_of(command.node)).generation >= command.generation:
        raise Refused(f"generation {command.generation} has made its first step already")
    # The agent's clock may be wrong, but no step is older than its world.
    age_us = min(max(command.age_us, 0), now - newest.formed_at)
    yield FirstStep(command.generation, command.step, command.node, command.told, age_us, max(0, command.imports_us))


def _note(state: JobState, command: NoteProgress, now: int) -> Iterator[Event]:
    seen = state.progress.of(command.group)
    if (
        command.generation == seen.generation > 0
        and command.step > seen.step
        and now - seen.at >= us(state.job.spec.progress_s)
    ):
        yield Progressed(command.group, command.generation, command.step)


RULES = Rules(
    decide={ReportFirstStep: _first, NoteProgress: _note},
)
