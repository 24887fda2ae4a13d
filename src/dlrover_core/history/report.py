"""The whole story of a run in one value: its end, its incidents, where the time went, its masters.

A log may hold several runs of a job, one after the other; the story is the last one's.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from dlrover_core.diagnosis import ladder
from dlrover_core.history.goodput import Goodput, goodput_of
from dlrover_core.history.incidents import IncidentsBuilder, Story, story_values
from dlrover_core.history.leased import LeasedRow, leased_of
from dlrover_core.history.ledger import DataRow, ledger_of
from dlrover_core.history.plain import plain
from dlrover_core.history.saves import Saves, SavesBuilder
from dlrover_core.history.timeline import Timeline, TimelineBuilder
from dlrover_core.job import job, nodes, plans
from dlrover_core.job.state import FOLD
from dlrover_core.kernel.engine import CommandFailed
from dlrover_core.kernel.events import Record

ASKED = (job.GroupScaled, plans.NodeDrained, job.JobSuspended, job.JobResumed, job.JobStopping)


class TakeOver(NamedTuple):
    """Another master took over. ``silent_us``: time since the record before; decisions waited no longer than that."""

    seq: int
    at: int
    holder: str
    silent_us: int


@dataclass(frozen=True, slots=True)
class Report:
    """The history of a run. Times are microseconds by the leader's clock.

    state, reason, root:  how it ended or stands, why, and the root cause of a failure
    ended_at:             0: it still runs
    last_at:              time of the last record
    records:              number of records of all runs
    earlier_runs:         number of runs before it
    restarts, relaunches: actions of either kind
    generations:          number of worlds
    steps_lost:           steps made again; -1: unknown
    alarms:               number of alarms
    asked:                what people asked of the job
    given_up:             coupling sets that it continued without (`SetGivenUp`)
    data:                 how far each dataset is
    leased:               how far each leased dataset is
    """

    job: str
    run: str
    state: str
    reason: str
    root: str
    created_at: int
    ended_at: int
    last_at: int
    records: int
    earlier_runs: int
    goodput: Goodput
    timeline: Timeline
    incidents: tuple[Story, ...]
    take_overs: tuple[TakeOver, ...]
    restarts: int
    relaunches: int
    generations: int
    steps_lost: int
    alarms: int
    asked: tuple[Record, ...] = ()
    given_up: tuple[Record, ...] = ()
    saves: Saves = Saves()  # noqa: RUF009  # immutable
    data: tuple[DataRow, ...] = ()
    leased: tuple[LeasedRow, ...] = ()

    @property
    def failed(self) -> bool:
        """Did the job fail?"""
        return self.state == "failed"

    @property
    def over(self) -> bool:
        """Has it ended, one way or another?"""
        return self.ended_at > 0

    @property
    def mean_down_us(self) -> int | None:
        """The mean time from a death to the next step, over incidents that were mended; None: there were none."""
        known = [story.down_us for story in self.incidents if story.down_us is not None]
        return sum(known) // len(known) if known else None


def report_values(told: Report) -> dict[str, Any]:
    """A report, with what follows from its parts: the goodput ratio, each incident's verdict, action and time down."""
    values: dict[str, Any] = plain(told)
    values["goodput"]["ratio"] = told.goodput.ratio
    values["mean_down_us"] = told.mean_down_us
    values["incidents"] = [story_values(story) for story in told.incidents]
    return values


class ReportBuilder:
    """Feed it every record in order; ask for the `report` at any time."""

    def __init__(self) -> None:
        self.state = FOLD.new()
        self._timeline = TimelineBuilder()
        self._incidents, self._saves = IncidentsBuilder(), SavesBuilder()
        self._take_overs: list[TakeOver] = []
        self._asked: list[Record] = []
        self._given_up: list[Record] = []
        self._alarms = 0
        self._runs = 0
        self._led = False

    def feed(self, record: Record) -> None:
        """Take in the next record."""
        fact, before = record.event, self.state.at
        FOLD.apply(self.state, record)
        if isinstance(fact, job.JobCreated):
            self._new_run()
        self._timeline.feed(record)
        self._incidents.feed(self.state, record)
        self._saves.feed(record)
        self._led = self._led or not isinstance(fact, (job.JobCreated, nodes.NodePlanned, job.LeaderStarted))
        if isinstance(fact, job.LeaderStarted):
            # The first leader of a run is no take-over; it created the run, or a launcher did before it.
            if self._led and not self.state.job.over:
                self._take_overs.append(TakeOver(record.seq, record.at, fact.holder, record.at - before))
            self._led = True
        elif isinstance(fact, ASKED):
            self._asked.append(record)
        elif isinstance(fact, job.SetGivenUp):
            self._given_up.append(record)
        elif isinstance(fact, CommandFailed):
            self._alarms += 1

    def _new_run(self) -> None:
        """Forget the earlier run."""
        self._timeline, self._incidents, self._saves = TimelineBuilder(), IncidentsBuilder(), SavesBuilder()
        self._take_overs.clear()
        self._asked.clear()
        self._given_up.clear()
        self._alarms = 0
        self._runs += 1
        self._led = False

    def report(self, now: int | None = None) -> Report:
        """What is known so far. ``now`` as in `TimelineBuilder.timeline`."""
        state, line = self.state, self._timeline.timeline(now)
        stories = tuple(self._incidents.stories.values())
        actions = [measure.action for story in stories for measure in story.measures]
        return Report(
            job=state.job.name,
            run=state.job.run,
            state=state.job.state,
            reason=state.job.reason,
            root=state.job.root,
            created_at=state.job.created_at,
            ended_at=state.job.ended_at,
            last_at=state.at,
            records=state.seq,
            earlier_runs=max(0, self._runs - 1),
            goodput=goodput_of(line),
            timeline=line,
            incidents=stories,
            take_overs=tuple(self._take_overs),
            restarts=actions.count(ladder.RESTART_PROCESSES),
            relaunches=actions.count(ladder.RELAUNCH_NODE),
            generations=sum(world.generation for world in state.world.worlds.values()),
            steps_lost=sum(max(0, story.steps_lost) for story in stories),
            alarms=self._alarms,
            asked=tuple(self._asked),
            given_up=tuple(self._given_up),
            saves=self._saves.saves(now if not state.job.over else None),
            data=ledger_of(state),
            leased=leased_of(state),
        )


def report_of(records: Iterable[Record], now: int | None = None) -> Report:
    """The report of a history. ``now``: where the time of a running job ends; by default at its last record."""
    builder = ReportBuilder()
    for record in records:
        builder.feed(record)
    return builder.report(now)
