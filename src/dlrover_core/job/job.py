"""The job's own life: created, running, suspended, and how it ends; and the spec as it is in effect now."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import NamedTuple

from dlrover_core.kernel.engine import Facts
from dlrover_core.kernel.events import Record, event
from dlrover_core.kernel.lifecycle import Lifecycle
from dlrover_core.kernel.wire import command
from dlrover_core.spec import JobSpec

LIFECYCLE = Lifecycle(
    "job",
    states=["new", "created", "running", "suspended", "stopping", "succeeded", "failed", "stopped"],
    initial="new",
    transitions=[
        {"trigger": "create", "source": ["new", "succeeded", "failed", "stopped"], "dest": "created"},
        {"trigger": "run", "source": "created", "dest": "running"},
        {"trigger": "succeed", "source": ["created", "running"], "dest": "succeeded"},
        {"trigger": "suspend", "source": ["created", "running"], "dest": "suspended"},
        {"trigger": "resume", "source": "suspended", "dest": "running"},
        {"trigger": "reopen", "source": "suspended", "dest": "created"},
        # A node that dies meanwhile and cannot be replaced is no better after the resumption.
        {"trigger": "fail", "source": ["created", "running", "suspended"], "dest": "failed"},
        {"trigger": "stop", "source": ["created", "running", "suspended"], "dest": "stopping"},
        {"trigger": "end", "source": "stopping", "dest": "stopped"},
        {"trigger": "abandon", "source": ["created", "running", "suspended", "stopping"], "dest": "stopped"},
    ],
    # The first world of a job starts it; every later one finds it running.
    ignored=[("running", "run"), ("stopping", "stop")],
)

# A run that is over stays over; only a new run under the same name leaves these.
OVER = ("succeeded", "failed", "stopped")


@event(10)
class JobCreated(NamedTuple):
    """The first event of a run: the job, the run's random id, and its spec as JSON. What an earlier run left is strange to it."""

    job: str
    run: str
    spec: str


@event(11)
class JobStarted(NamedTuple):
    """The first world formed."""


@event(12)
class JobStopping(NamedTuple):
    """Somebody asked the job to stop; workers get their grace."""

    reason: str


@event(13)
class JobStopped(NamedTuple):
    """Every worker is gone, as asked."""


@event(14)
class JobSucceeded(NamedTuple):
    """Every worker of the world finished with exit code 0."""

    generation: int


@event(15)
class JobFailed(NamedTuple):
    """The job cannot go on. ``root`` names the first root cause: who, what, and the last line."""

    reason: str
    incident: int
    root: str


@event(16)
class LeaderStarted(NamedTuple):
    """A master took over. Whoever is silent gets its full time again."""

    holder: str
    version: str


@event(17)
class MasterPaused(NamedTuple):
    """The master found its own loop late: nobody's silence in that time counts."""

    late_us: int


@event(18)
class Archived(NamedTuple):
    """Records up to ``last`` lie in the archive; ``chain`` is the digest of the newest file."""

    first: int
    last: int
    chain: str


@event(19)
class JobAbandoned(NamedTuple):
    """Whoever ran this run is gone, and somebody begins a new one under the same name."""

    reason: str


@event(90)
class JobSuspended(NamedTuple):
    """A person lets the job pause: workers are stopped with their grace, nodes and agents stay, and no world forms."""

    reason: str


@event(91)
class JobResumed(NamedTuple):
    """A person lets it go on: the next world may form."""

    reason: str


@event(92)
class GroupScaled(NamedTuple):
    """From here on the group has other sizes. ``revived``: places that had been given up and are wanted again, budgets whole."""

    group: str
    nodes_min: int
    nodes_max: int
    reason: str
    revived: tuple[int, ...] = ()


class CreateJob(NamedTuple):
    """Begin a run: write its first event. A live run of another id is abandoned."""

    run: str
    spec: str


@command(11)
class StopJob(NamedTuple):
    """A person, or the launcher's Ctrl-C, ends the job."""

    reason: str


class SuspendJob(NamedTuple):
    """A person lets the job pause."""

    reason: str


class ResumeJob(NamedTuple):
    """A person lets a suspended job go on."""

    reason: str


class TakeOver(NamedTuple):
    """A master has become the leader."""

    holder: str
    version: str


class NotePause(NamedTuple):
    """The master's loop was late by this much."""

    late_us: int


class NoteArchived(NamedTuple):
    """A segment lies in the archive."""

    first: int
    last: int
    chain: str


@dataclass(slots=True)
class JobSlice:
    """``state`` by `LIFECYCLE`; ``calm_at``: silence counts from here at the earliest.

    ``sizes``: nodes_min and nodes_max of the groups that were scaled since the run began.
    """

    state: str = LIFECYCLE.initial
    name: str = ""
    run: str = ""
    spec_json: str = ""
    created_at: int = 0
    started_at: int = 0
    ended_at: int = 0
    calm_at: int = 0
    reason: str = ""
    root: str = ""
    archived: int = 0
    sizes: dict[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def spec(self) -> JobSpec:
        """The job's configuration as it is in effect: as it was given, in the sizes that were asked for since."""
        return resized(self.spec_json, tuple(self.sizes.items())) if self.sizes else parsed(self.spec_json)

    @property
    def live(self) -> bool:
        """May nodes still be made?"""
        return self.state in ("created", "running", "suspended")

    @property
    def forms(self) -> bool:
        """May worlds be formed?"""
        return self.state in ("created", "running")

    @property
    def over(self) -> bool:
        """Has the job ended, one way or another?"""
        return self.state in OVER


@lru_cache(maxsize=64)
def parsed(spec_json: str) -> JobSpec:
    """A spec, parsed once: it never changes within a run."""
    return JobSpec.from_json(spec_json)


@lru_cache(maxsize=64)
def resized(spec_json: str, sizes: tuple[tuple[str, tuple[int, int]], ...]) -> JobSpec:
    """A spec in other sizes. Raises `SpecError` for sizes that could never be."""
    spec, wanted = parsed(spec_json), dict(sizes)
    groups = (
        replace(group, nodes_min=wanted[group.name][0], nodes_max=wanted[group.name][1])
        if group.name in wanted
        else group
        for group in spec.groups
    )
    return replace(spec, groups=tuple(groups))


def _move(slice_: JobSlice, trigger: str, record: Record) -> None:
    slice_.state = LIFECYCLE.fire("job", slice_.state, trigger)
    if slice_.over:
        slice_.ended_at = record.at


def _on_created(slice_: JobSlice, fact: JobCreated, record: Record) -> None:
    _move(slice_, "create", record)
    slice_.name, slice_.run, slice_.spec_json = fact.job, fact.run, fact.spec
    slice_.created_at = slice_.calm_at = record.at
    slice_.started_at = slice_.ended_at = 0
    slice_.reason = slice_.root = ""
    slice_.sizes = {}


def _on_started(slice_: JobSlice, fact: JobStarted, record: Record) -> None:
    _move(slice_, "run", record)
    slice_.started_at = record.at


def _on_stopping(slice_: JobSlice, fact: JobStopping, record: Record) -> None:
    _move(slice_, "stop", record)
    slice_.reason = fact.reason


def _on_suspended(slice_: JobSlice, fact: JobSuspended, record: Record) -> None:
    _move(slice_, "suspend", record)
    slice_.reason = fact.reason


def _on_resumed(slice_: JobSlice, fact: JobResumed, record: Record) -> None:
    # Before its first world it goes on as it began.
    _move(slice_, "resume" if slice_.started_at else "reopen", record)
    slice_.reason = ""
    # Whoever is missing is waited for as after a take-over.
    slice_.calm_at = record.at


def _on_scaled(slice_: JobSlice, fact: GroupScaled, record: Record) -> None:
    slice_.sizes = {**slice_.sizes, fact.group: (fact.nodes_min, fact.nodes_max)}


def _on_failed(slice_: JobSlice, fact: JobFailed, record: Record) -> None:
    _move(slice_, "fail", record)
    slice_.reason, slice_.root = fact.reason, fact.root


def _on_calm(slice_: JobSlice, fact: object, record: Record) -> None:
    slice_.calm_at = record.at


def _on_archived(slice_: JobSlice, fact: Archived, record: Record) -> None:
    slice_.archived = fact.last


EVENTS = (
    JobCreated, JobStarted, JobStopping, JobStopped, JobSucceeded, JobFailed, LeaderStarted, MasterPaused, Archived, JobAbandoned,
    JobSuspended, JobResumed, GroupScaled,
)  # fmt: skip

FACTS = Facts(
    kinds=EVENTS,
    evolve={
        JobCreated: _on_created,
        JobStarted: _on_started,
        JobStopping: _on_stopping,
        JobStopped: lambda slice_, fact, record: _move(slice_, "end", record),
        JobSucceeded: lambda slice_, fact, record: _move(slice_, "succeed", record),
        JobFailed: _on_failed,
        JobAbandoned: lambda slice_, fact, record: _move(slice_, "abandon", record),
        JobSuspended: _on_suspended,
        JobResumed: _on_resumed,
        GroupScaled: _on_scaled,
        LeaderStarted: _on_calm,
        MasterPaused: _on_calm,
        Archived: _on_archived,
    },
    # A run's senders are forgotten with it.
    forgets={JobCreated: lambda _: None},
)
