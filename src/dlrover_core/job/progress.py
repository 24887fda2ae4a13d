"""Progress: the first step of every generation, recorded at once, and the step reached, recorded now and then."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from dlrover_core.job import world
from dlrover_core.job.sets import Coupled
from dlrover_core.kernel.engine import Facts
from dlrover_core.kernel.events import Record, event
from dlrover_core.kernel.wire import command


@event(80, version=2, upcast={1: lambda fields: (*fields, 0)})
class FirstStep(NamedTuple):
    """A generation has made its first step, which mends the failure before it.

    told:       ``step`` is the script's own number, which continues after a restart; else it counts optimizer calls since
                the start of the processes
    age_us:     time from the step to this record
    imports_us: time that the worker spent on imports between its start and this step; 0: not measured
    """

    generation: int
    step: int
    node: str
    told: bool = False
    age_us: int = 0
    imports_us: int = 0


@event(81)
class Progressed(NamedTuple):
    """The step that a group has reached, recorded at most once in ``progress_s``."""

    group: str
    generation: int
    step: int


@command(10)
class ReportFirstStep(NamedTuple):
    """An agent's workers have made the first step of their generation. Fields as in `FirstStep`."""

    node: str
    generation: int
    step: int
    age_us: int = 0
    told: bool = False
    imports_us: int = 0


class NoteProgress(NamedTuple):
    """The leader: the step that a group has reached, by heartbeats."""

    group: str
    generation: int
    step: int


@dataclass(slots=True)
class Progress:
    """The newest recorded step of one group."""

    generation: int = 0
    step: int = -1
    at: int = 0


@dataclass(slots=True)
class ProgressSlice(Coupled):
    """The progress of every group that makes steps."""

    groups: dict[str, Progress] = field(default_factory=dict)

    def of(self, group: str) -> Progress:
        """The progress of a group; an empty one, if it has made no step."""
        return self.groups.get(group) or Progress()

    @property
    def newest(self) -> Progress:
        """The newest progress among the sets that the job's end waits for; among all sets, if none of those makes steps."""
        ending = [one for name, one in self.groups.items() if self.sets.ends(name)]
        return max(ending or self.groups.values(), key=lambda one: one.at, default=Progress())


def _on_first(slice_: ProgressSlice, fact: FirstStep, record: Record) -> None:
    slice_.groups[slice_.set_of(fact.node)] = Progress(fact.generation, fact.step, record.at - fact.age_us)


def _on_progressed(slice_: ProgressSlice, fact: Progressed, record: Record) -> None:
    seen = slice_.groups[fact.group]
    seen.step, seen.at = fact.step, record.at


def _on_finished(slice_: ProgressSlice, fact: world.WorkersFinished, record: Record) -> None:
    seen = slice_.groups.get(slice_.set_of(fact.node))
    if seen is not None and fact.step > seen.step:
        seen.step, seen.at = fact.step, record.at


FACTS = Facts(
    kinds=(FirstStep, Progressed),
    evolve={
        FirstStep: _on_first,
        Progressed: _on_progressed,
        world.WorkersFinished: _on_finished,
    },
)
