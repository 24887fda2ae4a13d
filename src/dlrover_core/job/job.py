"""The job's own life (created, running, suspended, ended) and its spec in the present sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import NamedTuple

from dlrover_core.job.sets import Coupled
from dlrover_core.kernel.engine import Facts
from dlrover_core.kernel.events import Record, event
from dlrover_core.kernel.lifecycle import Lifecycle
from dlrover_core.kernel.state import LATER, lasting
from dlrover_core.kernel.wire import command
from dlrover_core.spec import JobSpec, Policy

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
        # A node may die meanwhile and be beyond replacement: the job fails without waiting for the resumption.
        {"trigger": "fail", "source": ["created", "running", "suspended"], "dest": "failed"},
        {"trigger": "stop", "source": ["created", "running", "suspended"], "dest": "stopping"},
        {"trigger": "end", "source": "stopping", "dest": "stopped"},
        {"trigger": "abandon", "source": ["created", "running", "suspended", "stopping"], "dest": "stopped"},
    ],
    # The first world starts the job; at every later one it runs already.
    ignored=[("running", "run"), ("stopping", "stop")],
)

# A run that has ended stays ended; only a new run under the same name leaves these states.
OVER = ("succeeded", "failed", "stopped")


@event(10)
class JobCreated(NamedTuple):
    """The first event of a run: the job, the run's random id, and its spec as JSON. Nodes of earlier runs are strangers to it."""

    job: str
    run: str
    spec: str


@event(11)
class JobStarted(NamedTuple):
    """The first world formed."""


@event(12)
class JobStopping(NamedTuple):
    """The job was asked to stop. Workers get their grace."""

    reason: str


@event(13)
class JobStopped(NamedTuple):
    """Every worker of a stopping job is gone."""


@event(14)
class JobSucceeded(NamedTuple):
    """Every worker of the world finished with exit code 0."""

    generation: int


@event(15)
class JobFailed(NamedTuple):
    """The job cannot go on. ``root`` names the first root cause: node and rank, cause, and the last line."""

    reason: str
    incident: int
    root: str


@event(16)
class LeaderStarted(NamedTuple):
    """A master took over. The time of silent nodes starts anew."""

    holder: str
    version: str


@event(17)
class MasterPaused(NamedTuple):
    """The master's own loop was late. Silence of nodes in that time does not count."""

    late_us: int


@event(18)
class Archived(NamedTuple):
    """Records up to ``last`` lie in the archive. ``chain``: digest of the newest file."""

    first: int
    last: int
    chain: str


@event(19)
class JobAbandoned(NamedTuple):
    """The launcher of this run is gone, and another launcher begins a new run under the same name."""

    reason: str


@event(90, version=2, upcast={1: lambda fields: (*fields, False, False)})
class JobSuspended(NamedTuple):
    """A person suspended the job: workers stop with their grace, and no world forms.

    reason: why, for people
    frees:  what nodes hold is written to storage, then all nodes are released; False: nodes and agents stay
    lose:   nodes are released even while storage fails: the person accepts what is lost
    """

    reason: str
    frees: bool = False
    lose: bool = False


@event(91)
class JobResumed(NamedTuple):
    """A person resumed the job: the next world may form."""

    reason: str


@event(92)
class GroupScaled(NamedTuple):
    """A group has other sizes from now on. ``revived``: places that had been given up and are wanted again, with full budgets."""

    group: str
    nodes_min: int
    nodes_max: int
    reason: str
    revived: tuple[int, ...] = ()


@event(94)
class SuspensionPlanned(NamedTuple):
    """The job will be suspended and free its nodes, once its ranks wait at a step boundary.

    reason:   why, for people
    deadline: when the job is suspended even if its ranks do not wait there, in microseconds
    lose:     as in `JobSuspended`
    """

    reason: str
    deadline: int
    lose: bool = False


@event(99)
class SetGivenUp(NamedTuple):
    """A coupling set that is not critical cannot go on, and the job continues without it. ``root`` as in `JobFailed`."""

    set: str
    reason: str
    incident: int
    root: str


class CreateJob(NamedTuple):
    """Begin a run: write its first event. A live run of another id is abandoned."""

    run: str
    spec: str


@command(11)
class StopJob(NamedTuple):
    """A person, or Ctrl-C in the launcher, ends the job."""

    reason: str


class SuspendJob(NamedTuple):
    """A person suspends the job.

    reason:     why, for people
    keep_nodes: stop the workers, and keep the nodes; False: write what nodes hold to storage, and release all nodes
    lose:       release nodes also where what they hold is on no storage, and is lost
    """

    reason: str
    keep_nodes: bool = True
    lose: bool = False


class ResumeJob(NamedTuple):
    """A person resumes the job."""

    reason: str


class TakeOver(NamedTuple):
    """A master has become the leader."""

    holder: str
    version: str


class NotePause(NamedTuple):
    """The master's own loop was late by ``late_us``."""

    late_us: int


class NoteArchived(NamedTuple):
    """A segment of the log lies in the archive."""

    first: int
    last: int
    chain: str


@dataclass(slots=True)
class Suspension:
    """A suspension that frees the nodes, planned or begun.

    reason:   why, for people
    deadline: when the suspension begins, at a step boundary or not, in microseconds; 0: it has begun
    lose:     nodes are released even while storage fails
    """

    reason: str
    deadline: int
    lose: bool


@dataclass(slots=True)
class JobSlice(Coupled):
    """The job's state and spec. Times are microseconds by the leader's clock; 0: not yet.

    state:        by `LIFECYCLE`
    run:          the run's id
    spec_json:    the spec as it was given
    calm_at:      silence of nodes counts from here at the earliest
    reason, root: why the job ended, and its root cause
    archived:     last record in the archive
    sizes:        nodes_min and nodes_max of groups that were scaled in this run, by group
    given_up:     reason of each coupling set that the job continues without, by set
    suspension:   the suspension that frees the nodes, from when it is planned until the job is resumed; None: there is none
    """

    state: str = lasting(lambda: LIFECYCLE.initial)
    name: str = ""
    run: str = ""
    spec_json: str = ""
    created_at: int = 0
    started_at: int = 0
    ended_at: int = 0
    calm_at: int = 0
    reason: str = ""
    root: str = ""
    archived: int = lasting(int)
    sizes: dict[str, tuple[int, int]] = field(default_factory=dict)
    given_up: dict[str, str] = field(default_factory=dict, metadata=LATER)
    suspension: Suspension | None = field(default=None, metadata=LATER)

    @property
    def spec(self) -> JobSpec:
        """The job's configuration in effect: as it was given, in the present sizes."""
        return resized(self.spec_json, tuple(self.sizes.items())) if self.sizes else parsed(self.spec_json)

    def policy(self, name: str) -> Policy:
        """The policy in effect for a group or a coupling set; the groups of a set agree in it."""
        known = policies(self.spec_json)
        return known.get(name) or known[name.rsplit("-", 1)[0]]

    @property
    def live(self) -> bool:
        """May nodes be launched?"""
        return self.state in ("created", "running", "suspended")

    @property
    def forms(self) -> bool:
        """May worlds form?"""
        return self.state in ("created", "running")

    @property
    def pausing(self) -> bool:
        """Is a suspension that frees the nodes planned, and has not begun?"""
        return self.suspension is not None and self.suspension.deadline > 0

    @property
    def freed(self) -> bool:
        """Is the job suspended without nodes, or are its nodes being released for that?"""
        return self.state == "suspended" and self.suspension is not None

    @property
    def over(self) -> bool:
        """Has the job ended?"""
        return self.state in OVER


@lru_cache(maxsize=64)
def parsed(spec_json: str) -> JobSpec:
    """The spec, parsed once: it never changes within a run."""
    return JobSpec.from_json(spec_json)


@lru_cache(maxsize=64)
def policies(spec_json: str) -> Mapping[str, Policy]:
    """The policy in effect for every group and every set, by name."""
    spec = parsed(spec_json)
    found = {name: spec.in_force(groups[0].name) for name, groups in spec.sets.items()}
    return found | {group.name: spec.in_force(group.name) for group in spec.groups}


@lru_cache(maxsize=64)
def resized(spec_json: str, sizes: tuple[tuple[str, tuple[int, int]], ...]) -> JobSpec:
    """A spec in other sizes. Raises `SpecError` for sizes that cannot be."""
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
    if not slice_.live:
        slice_.suspension = None
    if slice_.over:
        slice_.ended_at = record.at


def _on_created(slice_: JobSlice, fact: JobCreated, record: Record) -> None:
    _move(slice_, "create", record)
    slice_.name, slice_.run, slice_.spec_json = fact.job, fact.run, fact.spec
    # All slices share it, and this one folds first.
    slice_.sets.read(parsed(fact.spec).groups)
    slice_.created_at = slice_.calm_at = record.at


def _on_started(slice_: JobSlice, fact: JobStarted, record: Record) -> None:
    _move(slice_, "run", record)
    slice_.started_at = record.at


def _on_stopping(slice_: JobSlice, fact: JobStopping, record: Record) -> None:
    _move(slice_, "stop", record)
    slice_.reason = fact.reason


def _on_suspended(slice_: JobSlice, fact: JobSuspended, record: Record) -> None:
    _move(slice_, "suspend", record)
    slice_.reason = fact.reason
    slice_.suspension = Suspension(fact.reason, 0, fact.lose) if fact.frees else None


def _on_pausing(slice_: JobSlice, fact: SuspensionPlanned, record: Record) -> None:
    slice_.suspension = Suspension(fact.reason, fact.deadline, fact.lose)


def _on_resumed(slice_: JobSlice, fact: JobResumed, record: Record) -> None:
    slice_.suspension = None
    if slice_.state != "suspended":  # the suspension was only planned
        return
    # A job without a world yet goes back to the state before.
    _move(slice_, "resume" if slice_.started_at else "reopen", record)
    slice_.reason = ""
    # The time of silent nodes starts anew, as after a take-over.
    slice_.calm_at = record.at


def _on_scaled(slice_: JobSlice, fact: GroupScaled, record: Record) -> None:
    slice_.sizes = {**slice_.sizes, fact.group: (fact.nodes_min, fact.nodes_max)}


def _on_failed(slice_: JobSlice, fact: JobFailed, record: Record) -> None:
    _move(slice_, "fail", record)
    slice_.reason, slice_.root = fact.reason, fact.root


def _on_given_up(slice_: JobSlice, fact: SetGivenUp, record: Record) -> None:
    slice_.given_up[fact.set] = fact.reason


def _on_calm(slice_: JobSlice, fact: object, record: Record) -> None:
    slice_.calm_at = record.at


def _on_archived(slice_: JobSlice, fact: Archived, record: Record) -> None:
    slice_.archived = fact.last


EVENTS = (
    JobCreated, JobStarted, JobStopping, JobStopped, JobSucceeded, JobFailed, LeaderStarted, MasterPaused, Archived, JobAbandoned,
    JobSuspended, JobResumed, GroupScaled, SuspensionPlanned, SetGivenUp,
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
        SuspensionPlanned: _on_pausing,
        JobSuspended: _on_suspended,
        JobResumed: _on_resumed,
        GroupScaled: _on_scaled,
        SetGivenUp: _on_given_up,
        LeaderStarted: _on_calm,
        MasterPaused: _on_calm,
        Archived: _on_archived,
    },
    # A run's senders are forgotten with it.
    forgets={JobCreated: lambda _: None},
)
