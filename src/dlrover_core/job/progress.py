"""Progress: the first step of every generation at once, then the step reached now and again. Edges, not levels."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from dlrover_core.job import job, world
from dlrover_core.job.names import group_of
from dlrover_core.kernel.engine import Facts
from dlrover_core.kernel.events import Record, event
from dlrover_core.kernel.wire import command


@event(80, version=2, upcast={1: lambda fields: (*fields, 0)})
class FirstStep(NamedTuple):
    """A generation has made its first step: whatever broke before is mended.

    ``told``: ``step`` is the script's own number, which goes on after a restart; else a count that began anew with the processes.
    ``imports_us``: what that worker spent on imports from its start to this step; 0: not measured.
    """

    generation: int
    step: int
    node: str
    told: bool = False
    age_us: int = 0
    imports_us: int = 0


@event(81)
class Progressed(NamedTuple):
    """The step that a group has reached, at most once in ``progress_s``."""

    group: str
    generation: int
    step: int


@command(10)
class ReportFirstStep(NamedTuple):
    """An agent saw the first step of its workers' generation, ``age_us`` ago."""

    node: str
    generation: int
    step: int
    age_us: int = 0
    told: bool = False
    imports_us: int = 0


class NoteProgress(NamedTuple):
    """The step that a group has reached, as the heartbeats tell."""

    group: str
    generation: int
    step: int


@dataclass(slots=True)
class Progress:
    """Where one group is, as far as the log needs to know."""

    generation: int = 0
    step: int = -1
    at: int = 0


@dataclass(slots=True)
class ProgressSlice:
    """The progress of every group that makes steps."""

    groups: dict[str, Progress] = field(default_factory=dict)

    def of(self, group: str) -> Progress:
        """Where a group is; nowhere, if it has made no step."""
        return self.groups.get(group) or Progress()

    @property
    def newest(self) -> Progress:
        """Where the group is that was heard of last."""
        return max(self.groups.values(), key=lambda one: one.at, default=Progress())


def _on_created(slice_: ProgressSlice, fact: job.JobCreated, record: Record) -> None:
    """A new run has made no step."""
    slice_.groups.clear()


def _on_first(slice_: ProgressSlice, fact: FirstStep, record: Record) -> None:
    slice_.groups[group_of(fact.node)] = Progress(fact.generation, fact.step, record.at - fact.age_us)


def _on_progressed(slice_: ProgressSlice, fact: Progressed, record: Record) -> None:
    seen = slice_.groups[fact.group]
    seen.step, seen.at = fact.step, record.at


def _on_finished(slice_: ProgressSlice, fact: world.WorkersFinished, record: Record) -> None:
    seen = slice_.groups.get(group_of(fact.node))
    if seen is not None and fact.step > seen.step:
        seen.step, seen.at = fact.step, record.at


FACTS = Facts(
    kinds=(FirstStep, Progressed),
    evolve={
        job.JobCreated: _on_created,
        FirstStep: _on_first,
        Progressed: _on_progressed,
        world.WorkersFinished: _on_finished,
    },
)
