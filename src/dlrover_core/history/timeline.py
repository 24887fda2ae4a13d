"""Where the time went: the life of a job as segments of wall-clock time, each of one class.

The segments cover the time from `JobCreated` to the job's end (or to now) without gap or overlap, in integer microseconds.
So every sum over them equals wall-clock time exactly. One pass over the records builds them.

Every coupling set has a *lane* of its own, because a set's failure stops that set alone. A lane begins with the set's first
step. Where lanes disagree, the worst class wins, so two incidents at once count once. A set that reports no step (parameter
servers) has no lane: its failures show as missing steps of others. Sets that the job's end does not wait for do not count,
unless no other set makes steps. A job without any steps is `RUNNING` while its workers run, because nothing tells whether
that is training. While a person has suspended the job, all lanes are `SUSPENDED`. While a set that the job's end waits for
has no world, and its platform has no place for one of its nodes, or it has given its nodes back, the time is `QUEUED`.

Two things are known only later. A death is older than its report: the lane is cut back to the moment of death, but never
beyond its last change. And a generation that resumes from an earlier step first repeats old steps; see
`Stretch.rework_end`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from dlrover_core.diagnosis.ladder import AWAIT_EVIDENCE
from dlrover_core.job import checkpoints, incidents, job, nodes, progress, queueing, silence, world
from dlrover_core.job.sets import NO_SETS, sets_of
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
QUEUED = "queued"
FINISHING = "finishing"
SUSPENDED = "suspended"
STOPPING = "stopping"

# In reading order.
CLASSES = (
    STARTING, RUNNING, TRAINING, REWORK, DETECTING, DECIDING, FORMING, RESTARTING, WAITING, QUEUED, FINISHING,
    SUSPENDED, STOPPING,
)  # fmt: skip
# Of two lanes, the class further right wins.
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
    """A job's segments in order, and its steps.

    ended_by:              name of the event that ended the job; empty: it still runs
    first_step, last_step: known from the log; -1: none
    step_us:               mean time of a step; 0: unknown
    told:                  the script tells its own step numbers; else ``last_step`` counts from the last restart, and
                           rework is unknown
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
    """The steps of one generation, as far as the log tells. Times are microseconds by the leader's clock.

    told:         the script tells its own step numbers, which continue after a restart; else steps count from the start of
                  the processes, and rework is unknown
    goal:         the highest step reached before this generation; -1: unknown
    begin, first: time and number of its first step
    at, step:     time and number of its newest known step
    below:        time and number of the last known step before the goal
    reached:      time and number of the first known step from the goal on; None: not yet
    """

    generation: int
    told: bool
    goal: int
    begin: int
    first: int
    at: int
    step: int
    # (time, step) of the last known step below the goal, and of the first one that is not below.
    below: tuple[int, int]
    reached: tuple[int, int] | None = None

    @classmethod
    def starting(cls, generation: int, at: int, step: int, goal: int, *, told: bool = True) -> Stretch:
        """The stretch that begins with this first step."""
        goal = goal if told else -1
        return cls(generation, told, goal, at, step, at, step, (at, step), (at, step) if step >= goal else None)

    def note(self, at: int, step: int) -> None:
        """Take in another step of this generation."""
        if step <= self.step or at < self.at:
            return
        self.at, self.step = at, step
        if self.reached is None:
            if step >= self.goal:
                self.reached = (at, step)
            else:
                self.below = (at, step)

    def raise_goal(self, step: int) -> None:
        """A late report: an older generation had come further than was known."""
        if self.told and step > self.goal:
            self.goal = step
            if step > self.step:
                self.below, self.reached = (self.at, self.step), None

    def rework_end(self, mean_step_us: int) -> int:
        """When the step reached before the failure was reached again. This is a lower bound.

        Steps between two reports are taken as evenly spaced, so the moment is interpolated if a report from beyond the goal
        exists. Otherwise the missing steps after the last report are charged at ``mean_step_us``, the job's mean. The first
        repeated step ends with `FirstStep` and so belongs to the restart. Steps that were never reported before the failure
        (a dead node takes its count along) are not known to be lost.
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
    """One set since its first step: its class from which time on, and its stretches of training."""

    marks: list[tuple[int, str]] = field(default_factory=list)
    stretches: list[Stretch] = field(default_factory=list)
    high: int = -1
    broken: set[int] = field(default_factory=set)

    @property
    def kind(self) -> str:
        """The present class; '' before the first step."""
        return self.marks[-1][1] if self.marks else ""

    def enter(self, kind: str, at: int) -> None:
        """It is of this class from ``at`` on, but never from before the present class began."""
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
        """An incident opened at ``at`` over a death at ``died``."""
        if self.kind in _MAKES_STEPS:
            self.enter(DETECTING, died)
        if self.marks:
            self.enter(DECIDING, at)

    def acted(self, action: str, at: int) -> None:
        """An action was chosen. It changes nothing if the next world has already formed."""
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
        """The marks, with the beginning of each stretch marked as rework where it repeats steps."""
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


class _Queue:
    """When sets without a world waited for their platform: ``spans``; the end of the last one is 0 while it lasts."""

    def __init__(self) -> None:
        self.spans: list[tuple[int, int]] = []
        self._sets = NO_SETS
        self._waits: dict[str, set[str]] = {}
        self._back: set[str] = set()
        self._active: set[str] = set()

    def feed(self, record: Record) -> None:
        """Take in the next record."""
        fact = record.event
        if isinstance(fact, job.JobCreated):
            self._sets = sets_of(fact.spec)
        elif isinstance(fact, nodes.NodePending):
            here = self._waits.setdefault(self._sets.of(fact.node), set())
            (here.add if fact.waits else here.discard)(fact.node)
        elif isinstance(fact, _PLACED):
            self._waits.get(self._sets.of(fact.node), set()).discard(fact.node)
        elif isinstance(fact, queueing.GivenBack):
            self._back.add(fact.group)
        elif isinstance(fact, queueing.AskedAgain):
            self._back.discard(fact.group)
        elif isinstance(fact, world.WorldFormed):
            self._active.add(fact.group)
        elif isinstance(fact, world.WorldDissolved):
            self._active.discard(fact.group)
        else:
            return
        named = {*(group for group, here in self._waits.items() if here), *self._back} - self._active
        waiting = any(map(self._sets.ends, named))
        if waiting and not (self.spans and not self.spans[-1][1]):
            self.spans.append((record.at, 0))
        elif not waiting and self.spans and not self.spans[-1][1]:
            self.spans[-1] = (self.spans[-1][0], record.at)


_PLACED = (
    nodes.NodeRunning, nodes.NodeJoined, nodes.NodeFailed, nodes.NodeSucceeded, nodes.NodeGone, nodes.NodeLost,
    nodes.NodeReleased,
)  # fmt: skip


class TimelineBuilder:
    """Feed it every record of a run in order, then ask for the `timeline` as often as you like."""

    def __init__(self) -> None:
        self.begin: int | None = None
        self.stopping_at: int | None = None
        self.ended_by = ""
        self.last = 0
        self._sets = NO_SETS
        self._lanes: dict[str, Lane] = {}
        self._death: tuple[int, int] = (0, 0)
        self._heard: dict[str, int] = {}
        self._groups: dict[int, str] = {}
        self._stepless: list[tuple[int, str]] = []
        # When the job was suspended, and when resumed; 0: it still is.
        self._pauses: list[tuple[int, int]] = []
        self._queue = _Queue()

    def feed(self, record: Record) -> None:
        """Take in the next record. What follows the job's end is no time of the job's."""
        fact = record.event
        if self.ended_by:
            return
        if isinstance(fact, job.JobAbandoned):
            # No master saw the run end: only the time of its last record is known.
            self.ended_by = type(fact).__name__
            return
        self.last = record.at
        if isinstance(fact, job.JobCreated):
            self.begin, self._sets = record.at, sets_of(fact.spec)
        elif isinstance(fact, job.JobStopping):
            self.stopping_at = record.at
        elif isinstance(fact, job.JobSuspended):
            self._pauses.append((record.at, 0))
        elif isinstance(fact, job.JobResumed) and self._pauses:
            self._pauses[-1] = (self._pauses[-1][0], record.at)
        elif isinstance(fact, (job.JobSucceeded, job.JobFailed, job.JobStopped)):
            self.ended_by = type(fact).__name__
        elif self.stopping_at is None:
            self._queue.feed(record)
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
                self._lane(self._sets.of(fact.node)).reached(died, fact.generation, fact.step)
        elif isinstance(fact, (nodes.NodeFailed, nodes.NodeGone, nodes.NodeLost)):
            # A node that was silent before it was lost did no work since, unless its group reported a later step.
            lane = self._lane(self._sets.of(fact.node))
            seen = lane.stretches[-1].at if lane.stretches else record.at
            self._death = (record.seq, min(max(self._heard.pop(fact.node, record.at), seen), record.at))
        elif isinstance(fact, silence.NodeSuspected):
            self._heard[fact.node] = record.at - fact.silent_us
        elif isinstance(fact, silence.NodeHeard):
            self._heard.pop(fact.node, None)

    def _failure(self, record: Record) -> None:
        fact = record.event
        if isinstance(fact, incidents.IncidentOpened):
            if fact.generation == incidents.ASIDE and self._lane(self._sets.of(fact.node)).running:
                return  # no world was broken, and training goes on
            group = self._groups[fact.incident] = self._sets.of(fact.node)
            self._lane(group).broken.add(fact.incident)
            self._lane(group).broke(self._death[1] if self._death[0] == record.cause else record.at, record.at)
        elif isinstance(fact, incidents.ActionChosen) and fact.incident in self._groups:
            self._lane(self._groups[fact.incident]).acted(fact.action, record.at)
        elif isinstance(fact, incidents.IncidentClosed) and fact.incident in self._groups:
            self._lane(self._groups.pop(fact.incident)).broken.discard(fact.incident)

    def _world(self, record: Record) -> None:
        fact = record.event
        if isinstance(fact, world.WorkersStopped) and fact.step >= 0:
            self._lane(self._sets.of(fact.node)).heard_of(fact.generation, fact.step)
        elif isinstance(fact, world.WorldFormed):
            self._lane(fact.group).formed(record.at)
            self._stepless.append((record.at, STARTING))
        elif isinstance(fact, world.WorldDissolved):
            self._lane(fact.group).dissolved(record.at)
            self._stepless.append((record.at, STARTING))
        elif isinstance(fact, world.WorkersStarted):
            self._stepless.append((record.at, RUNNING))
        elif isinstance(fact, world.WorkersFinished):
            lane = self._lane(self._sets.of(fact.node))
            if fact.step >= 0:
                lane.reached(record.at, fact.generation, fact.step)
            lane.finishing(record.at)
        elif isinstance(fact, progress.FirstStep):
            self._lane(self._sets.of(fact.node)).first_step(record.at, fact)
        elif isinstance(fact, progress.Progressed):
            self._lane(fact.group).reached(record.at, fact.generation, fact.step)
        elif isinstance(fact, checkpoints.CheckpointCommitted):
            self._lane(fact.group).heard_of(fact.generation, fact.step)
        elif isinstance(fact, checkpoints.StepsHeld) and fact.steps:
            self._lane(self._sets.of(fact.node)).heard_of(fact.generation, fact.steps[-1])

    def _counted(self) -> list[Lane]:
        """The lanes of sets that the job's end waits for; of all sets, if none of those makes steps."""
        ending = [lane for name, lane in self._lanes.items() if lane.marks and self._sets.ends(name)]
        return ending or list(self._lanes.values())

    def timeline(self, now: int | None = None) -> Timeline:
        """The timeline so far. ``now``: where the time of a running job ends; by default at its last record."""
        if self.begin is None:
            return Timeline(self.last, self.last, "", (), -1, -1, 0, told=False)
        end = self.last if self.ended_by or now is None else max(now, self.last)
        stretches = [one for lane in self._counted() for one in lane.stretches]
        mean = _mean_step_us(stretches)
        return Timeline(
            begin=self.begin,
            end=end,
            ended_by=self.ended_by,
            segments=tuple(self._cut(end, mean)),
            first_step=stretches[0].first if stretches else -1,
            last_step=_last_step(stretches),
            step_us=mean,
            told=all(one.told for one in stretches),
        )

    def _cut(self, end: int, mean: int) -> list[Segment]:
        """The segments, without the times in a queue and the suspensions."""
        tiles = _tiles(self._marks(end, mean), end)
        tiles = _without(tiles, self._until_stop(end, self._queue.spans), QUEUED)
        return _without(tiles, self._until_stop(end, self._pauses), SUSPENDED)

    def _until_stop(self, end: int, spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
        """The suspensions, each with its end: a stopping job is no longer suspended."""
        last = end if self.stopping_at is None else self.stopping_at
        return [(begin, over or last) for begin, over in spans]

    def _marks(self, end: int, mean: int) -> Iterator[tuple[int, str]]:
        assert self.begin is not None
        until = end if self.stopping_at is None else self.stopping_at
        yield self.begin, STARTING
        if not any(lane.marks for lane in self._counted()):
            yield from (mark for mark in self._stepless if mark[0] < until)
        yield from _worst([list(lane.with_rework(until, mean)) for lane in self._counted()])
        if self.stopping_at is not None:
            yield self.stopping_at, STOPPING


def _last_step(stretches: Sequence[Stretch]) -> int:
    """The highest step, or the newest generation's count where the script tells no numbers; -1: none."""
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
    """All lanes as one: at every moment, the worst class of the lanes that have begun."""
    merged = sorted(
        (at, place, order, kind) for place, lane in enumerate(lanes) for order, (at, kind) in enumerate(lane)
    )
    present: dict[int, str] = {}
    for at, place, _, kind in merged:
        present[place] = kind
        yield at, max(present.values(), key=_SEVERITY.__getitem__)


def _without(tiles: Iterable[Segment], pauses: Sequence[tuple[int, int]], kind: str) -> list[Segment]:
    """The same time, with segments of that class cut out of whatever they were."""
    marks: list[tuple[int, str]] = []
    end = 0
    for tile in tiles:
        at, end = tile.begin, tile.end
        for begin, until in pauses:
            if begin < tile.end and until > at:
                marks += [(at, tile.kind)] if begin > at else []
                marks.append((max(begin, at), kind))
                at = min(until, tile.end)
        marks += [(at, tile.kind)] if at < tile.end else []
    return _tiles(marks, end)


def _tiles(marks: Iterable[tuple[int, str]], end: int) -> list[Segment]:
    """The segments between the marks: none empty, and no two neighbours of one class."""
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
