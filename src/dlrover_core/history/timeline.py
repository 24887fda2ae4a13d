"""Where the time went: the life of a job as segments of wall-clock time, each of one class.

The segments tile the time from `JobCreated` to the job's end (or to now) without gap or overlap, in integer microseconds; so
whatever is summed over them sums to wall-clock time exactly. They are built in a single pass over the records.

Every group of nodes has a *lane* of its own, because a group's failure stops that group alone. A lane begins with the group's
first step; where lanes disagree the worst class wins, so that two incidents at once are counted once. A group that never
reports a step (parameter servers) has no lane: what its failures cost shows as steps that do not come. A job in which nobody
does is `RUNNING` while its workers are: nobody can say whether that is training. From the moment at which somebody suspends the
job until somebody resumes it, all lanes are `SUSPENDED`, whatever happens meanwhile.

Two things are known only afterwards. A death is older than the report of it: the lane is cut back to the moment of death,
though never beyond its last change. And a generation that resumes from an earlier step first makes old steps again; see
`Stretch.rework_end`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from dlrover_core.diagnosis.ladder import AWAIT_EVIDENCE
from dlrover_core.job import checkpoints, incidents, job, nodes, progress, silence, world
from dlrover_core.job.names import group_of
from dlrover_core.kernel.events import Record

STARTING = "starting"
RUNNING = "running"
TRAINING = "training"
REWORK = "rework"
DETECTING = "detecting"
DECIDING = "deciding"
FORMING = "forming"
RESTARTING = "restarting"
WAITING = "waiting"
FINISHING = "finishing"
SUSPENDED = "suspended"
STOPPING = "stopping"

# In the order in which people read them.
CLASSES = (
    STARTING, RUNNING, TRAINING, REWORK, DETECTING, DECIDING, FORMING, RESTARTING, WAITING, FINISHING, SUSPENDED, STOPPING,
)  # fmt: skip
# Of two lanes the one further right decides.
_SEVERITY = {
    name: place
    for place, name in enumerate((TRAINING, REWORK, FINISHING, WAITING, RESTARTING, FORMING, DECIDING, DETECTING))
}
_MAKES_STEPS = (TRAINING, RESTARTING, FINISHING)
_DOWN = (DECIDING, FORMING, WAITING)


class Segment(NamedTuple):
    """Wall-clock time of one class, from ``begin`` to before ``end``, in microseconds by the leader's clock."""

    kind: str
    begin: int
    end: int

    @property
    def length_us(self) -> int:
        """How long it is."""
        return self.end - self.begin


class Timeline(NamedTuple):
    """A job's segments in order, what ended it ('' while it lives), and the steps known from the log (-1: none).

    Unless ``told``, the script does not number its steps: ``last_step`` counts from the last restart, and rework is not known.
    """

    begin: int
    end: int
    ended_by: str
    segments: tuple[Segment, ...]
    first_step: int
    last_step: int
    step_us: int
    told: bool

    @property
    def wall_us(self) -> int:
        """From creation to the end."""
        return self.end - self.begin


@dataclass(slots=True)
class Stretch:
    """The steps of one generation, as far as the log tells: ``goal`` is the highest step that was reached before it.

    Only where the script tells its own numbers (``told``) do they go on after a restart. Others count from the start of the
    processes: what was made again cannot be known from them, and the goal is none.
    """

    generation: int
    told: bool
    goal: int
    begin: int
    first: int
    at: int
    step: int
    # The last point below the goal, and the first one that is not.
    below: tuple[int, int]
    reached: tuple[int, int] | None = None

    @classmethod
    def starting(cls, generation: int, at: int, step: int, goal: int, *, told: bool = True) -> Stretch:
        """The stretch that a first step opens."""
        goal = goal if told else -1
        return cls(generation, told, goal, at, step, at, step, (at, step), (at, step) if step >= goal else None)

    def note(self, at: int, step: int) -> None:
        """Another step known of this generation."""
        if step <= self.step or at < self.at:
            return
        self.at, self.step = at, step
        if self.reached is None:
            if step >= self.goal:
                self.reached = (at, step)
            else:
                self.below = (at, step)

    def raise_goal(self, step: int) -> None:
        """A late word from an older generation: it had come further than was known."""
        if self.told and step > self.goal:
            self.goal = step
            if step > self.step:
                self.below, self.reached = (self.at, self.step), None

    def rework_end(self, mean_step_us: int) -> int:
        """When the step reached before the failure was reached again.

        Between two reported steps the pace is taken to be even, so the moment is interpolated where a report from beyond
        the goal exists. Otherwise the steps still missing after the last report are charged at ``mean_step_us``, the job's
        mean. The first step made again ends with `FirstStep` and so lies in the restart, not here. A lower bound: steps that
        nobody reported before the failure (a dead node takes its count along) are not known to be lost.
        """
        if self.goal <= self.first:
            return self.begin
        at, step = self.below
        if self.reached is None:
            return at + (self.goal - step) * mean_step_us
        end, top = self.reached
        return at + (end - at) * (self.goal - step) // (top - step) if top > step else end


@dataclass(slots=True)
class Lane:
    """One group since its first step: when it entered which class, and its stretches of training."""

    marks: list[tuple[int, str]] = field(default_factory=list)
    stretches: list[Stretch] = field(default_factory=list)
    high: int = -1
    broken: set[int] = field(default_factory=set)

    @property
    def kind(self) -> str:
        """The present class; '' before the first step."""
        return self.marks[-1][1] if self.marks else ""

    def enter(self, kind: str, at: int) -> None:
        """From ``at`` on it is of this class. Never before the present class began."""
        if kind != self.kind:
            self.marks.append((max(at, self.marks[-1][0]) if self.marks else at, kind))

    def first_step(self, at: int, fact: progress.FirstStep) -> None:
        """A generation makes its first step."""
        self.enter(TRAINING, at)
        self.stretches.append(Stretch.starting(fact.generation, at, fact.step, self.high, told=fact.told))
        self._rise(fact.step)

    def reached(self, at: int, generation: int, step: int) -> None:
        """A generation had reached this step at ``at``."""
        self.heard_of(generation, step)
        if self.stretches and generation == self.stretches[-1].generation:
            self.stretches[-1].note(at, step)

    def heard_of(self, generation: int, step: int) -> None:
        """A generation had reached this step, at a time that is not known."""
        self._rise(step)
        if self.stretches and generation < self.stretches[-1].generation:
            self.stretches[-1].raise_goal(step)

    def _rise(self, step: int) -> None:
        """The highest step so far, unless the steps are counts that begin anew."""
        if self.stretches and self.stretches[-1].told:
            self.high = max(self.high, step)

    @property
    def running(self) -> bool:
        """Is there a world that makes steps, or is about to?"""
        return self.kind in (*_MAKES_STEPS, RESTARTING)

    def broke(self, died: int, at: int) -> None:
        """An incident opens at ``at`` over a death at ``died``."""
        if self.kind in _MAKES_STEPS:
            self.enter(DETECTING, died)
        if self.marks:
            self.enter(DECIDING, at)

    def acted(self, action: str, at: int) -> None:
        """An action was chosen. A world that has formed meanwhile is further than the action."""
        if self.kind in _DOWN:
            self.enter(DECIDING if action == AWAIT_EVIDENCE else FORMING, at)

    def dissolved(self, at: int) -> None:
        """There is no world."""
        if self.kind in _MAKES_STEPS:
            self.enter(FORMING if self.broken else WAITING, at)

    def formed(self, at: int) -> None:
        """There is a world, and no step of it yet."""
        if self.marks:
            self.enter(RESTARTING, at)

    def finishing(self, at: int) -> None:
        """Some of its workers have ended well."""
        if self.kind in (TRAINING, RESTARTING):
            self.enter(FINISHING, at)

    def with_rework(self, end: int, mean_step_us: int) -> Iterator[tuple[int, str]]:
        """The marks, with the beginning of each stretch marked as rework where old steps were made again."""
        stretches = iter(self.stretches)
        for place, (at, kind) in enumerate(self.marks):
            if kind != TRAINING:
                yield at, kind
                continue
            until = min(self.marks[place + 1][0] if place + 1 < len(self.marks) else end, end)
            again = min(next(stretches).rework_end(mean_step_us), until)
            if again > at:
                yield at, REWORK
            yield max(again, at), TRAINING


class TimelineBuilder:
    """Feed it every record of a run in order, then ask for the `timeline`: as often as you like."""

    def __init__(self) -> None:
        self.begin: int | None = None
        self.stopping_at: int | None = None
        self.ended_by = ""
        self.last = 0
        self._lanes: dict[str, Lane] = {}
        self._death: tuple[int, int] = (0, 0)
        self._heard: dict[str, int] = {}
        self._groups: dict[int, str] = {}
        self._stepless: list[tuple[int, str]] = []
        # When it was suspended, and when resumed; 0: it still is.
        self._pauses: list[tuple[int, int]] = []

    def feed(self, record: Record) -> None:
        """Take in the next record. What follows the job's end is no time of the job's."""
        fact = record.event
        if self.ended_by:
            return
        if isinstance(fact, job.JobAbandoned):
            # Nobody saw the run end; all that is known is when its log fell silent.
            self.ended_by = type(fact).__name__
            return
        self.last = record.at
        if isinstance(fact, job.JobCreated):
            self.begin = record.at
        elif isinstance(fact, job.JobStopping):
            self.stopping_at = record.at
        elif isinstance(fact, job.JobSuspended):
            self._pauses.append((record.at, 0))
        elif isinstance(fact, job.JobResumed) and self._pauses:
            self._pauses[-1] = (self._pauses[-1][0], record.at)
        elif isinstance(fact, (job.JobSucceeded, job.JobFailed, job.JobStopped)):
            self.ended_by = type(fact).__name__
        elif self.stopping_at is None:
            self._death_of(record)
            self._failure(record)
            self._world(record)

    def _lane(self, group: str) -> Lane:
        return self._lanes.setdefault(group, Lane())

    def _death_of(self, record: Record) -> None:
        fact = record.event
        if isinstance(fact, incidents.WorkerExited):
            died = record.at - fact.age_us
            self._death = (record.seq, died)
            if fact.step >= 0:
                self._lane(group_of(fact.node)).reached(died, fact.generation, fact.step)
        elif isinstance(fact, (nodes.NodeFailed, nodes.NodeGone, nodes.NodeLost)):
            # A node that fell silent first was of no use since, unless its group reported a step later.
            lane = self._lane(group_of(fact.node))
            seen = lane.stretches[-1].at if lane.stretches else record.at
            self._death = (record.seq, min(max(self._heard.pop(fact.node, record.at), seen), record.at))
        elif isinstance(fact, silence.NodeSuspected):
            self._heard[fact.node] = record.at - fact.silent_us
        elif isinstance(fact, silence.NodeHeard):
            self._heard.pop(fact.node, None)

    def _failure(self, record: Record) -> None:
        fact = record.event
        if isinstance(fact, incidents.IncidentOpened):
            if fact.generation == incidents.ASIDE and self._lane(group_of(fact.node)).running:
                return  # it broke no world: training goes on
            group = self._groups[fact.incident] = group_of(fact.node)
            self._lane(group).broken.add(fact.incident)
            self._lane(group).broke(self._death[1] if self._death[0] == record.cause else record.at, record.at)
        elif isinstance(fact, incidents.ActionChosen) and fact.incident in self._groups:
            self._lane(self._groups[fact.incident]).acted(fact.action, record.at)
        elif isinstance(fact, incidents.IncidentClosed) and fact.incident in self._groups:
            self._lane(self._groups.pop(fact.incident)).broken.discard(fact.incident)

    def _world(self, record: Record) -> None:
        fact = record.event
        if isinstance(fact, world.WorkersStopped) and fact.step >= 0:
            self._lane(group_of(fact.node)).heard_of(fact.generation, fact.step)
        elif isinstance(fact, world.WorldFormed):
            self._lane(fact.group).formed(record.at)
            self._stepless.append((record.at, STARTING))
        elif isinstance(fact, world.WorldDissolved):
            self._lane(fact.group).dissolved(record.at)
            self._stepless.append((record.at, STARTING))
        elif isinstance(fact, world.WorkersStarted):
            self._stepless.append((record.at, RUNNING))
        elif isinstance(fact, world.WorkersFinished):
            lane = self._lane(group_of(fact.node))
            if fact.step >= 0:
                lane.reached(record.at, fact.generation, fact.step)
            lane.finishing(record.at)
        elif isinstance(fact, progress.FirstStep):
            self._lane(group_of(fact.node)).first_step(record.at, fact)
        elif isinstance(fact, progress.Progressed):
            self._lane(fact.group).reached(record.at, fact.generation, fact.step)
        elif isinstance(fact, checkpoints.CheckpointCommitted):
            self._lane(fact.group).heard_of(fact.generation, fact.step)
        elif isinstance(fact, checkpoints.StepsHeld) and fact.steps:
            self._lane(group_of(fact.node)).heard_of(fact.generation, fact.steps[-1])

    def timeline(self, now: int | None = None) -> Timeline:
        """The timeline so far. ``now`` is where the time of a job that still lives ends; by default at its last record."""
        if self.begin is None:
            return Timeline(self.last, self.last, "", (), -1, -1, 0, told=False)
        end = self.last if self.ended_by or now is None else max(now, self.last)
        stretches = [one for lane in self._lanes.values() for one in lane.stretches]
        mean = _mean_step_us(stretches)
        return Timeline(
            begin=self.begin,
            end=end,
            ended_by=self.ended_by,
            segments=tuple(_paused(_tiles(self._marks(end, mean), end), self._until_stop(end))),
            first_step=stretches[0].first if stretches else -1,
            last_step=_last_step(stretches),
            step_us=mean,
            told=all(one.told for one in stretches),
        )

    def _until_stop(self, end: int) -> list[tuple[int, int]]:
        """The pauses, each with its end: nobody waits for the resumption of a job that is being stopped."""
        last = end if self.stopping_at is None else self.stopping_at
        return [(begin, resumed or last) for begin, resumed in self._pauses]

    def _marks(self, end: int, mean: int) -> Iterator[tuple[int, str]]:
        assert self.begin is not None
        until = end if self.stopping_at is None else self.stopping_at
        yield self.begin, STARTING
        if not any(lane.marks for lane in self._lanes.values()):
            yield from (mark for mark in self._stepless if mark[0] < until)
        yield from _worst([list(lane.with_rework(until, mean)) for lane in self._lanes.values()])
        if self.stopping_at is not None:
            yield self.stopping_at, STOPPING


def _last_step(stretches: Sequence[Stretch]) -> int:
    """The highest step, or the count of the newest generation where numbers do not go on; -1: none."""
    if not stretches:
        return -1
    newest = max(stretches, key=lambda one: one.begin)
    return max(one.step for one in stretches) if newest.told else newest.step


def _mean_step_us(stretches: Iterable[Stretch]) -> int:
    """Microseconds per step, over all steps whose time is known; 0 where none is."""
    spans = [(one.at - one.begin, one.step - one.first) for one in stretches]
    steps = sum(steps for _, steps in spans)
    return sum(us for us, _ in spans) // steps if steps else 0


def _worst(lanes: list[list[tuple[int, str]]]) -> Iterator[tuple[int, str]]:
    """The lanes' marks as one: at every moment the worst class of all lanes that have begun."""
    merged = sorted(
        (at, place, order, kind) for place, lane in enumerate(lanes) for order, (at, kind) in enumerate(lane)
    )
    present: dict[int, str] = {}
    for at, place, _, kind in merged:
        present[place] = kind
        yield at, max(present.values(), key=_SEVERITY.__getitem__)


def _paused(tiles: Iterable[Segment], pauses: Sequence[tuple[int, int]]) -> list[Segment]:
    """The same time, with the pauses cut out of whatever it would have been."""
    marks: list[tuple[int, str]] = []
    end = 0
    for tile in tiles:
        at, end = tile.begin, tile.end
        for begin, until in pauses:
            if begin < tile.end and until > at:
                marks += [(at, tile.kind)] if begin > at else []
                marks.append((max(begin, at), SUSPENDED))
                at = min(until, tile.end)
        marks += [(at, tile.kind)] if at < tile.end else []
    return _tiles(marks, end)


def _tiles(marks: Iterable[tuple[int, str]], end: int) -> list[Segment]:
    """The segments between the marks: none empty, no two neighbours of one class."""
    tiles: list[Segment] = []
    begin, kind = 0, ""
    for at, next_kind in (*marks, (end, "")):
        if kind and at > begin:
            if tiles and tiles[-1].kind == kind:
                tiles[-1] = tiles[-1]._replace(end=at)
            else:
                tiles.append(Segment(kind, begin, at))
        begin, kind = at, next_kind
    return tiles


def timeline_of(records: Iterable[Record], now: int | None = None) -> Timeline:
    """The timeline of a history's last run. ``now`` as in `TimelineBuilder.timeline`."""
    builder = TimelineBuilder()
    for record in records:
        if isinstance(record.event, job.JobCreated):
            builder = TimelineBuilder()
        builder.feed(record)
    return builder.timeline(now)
