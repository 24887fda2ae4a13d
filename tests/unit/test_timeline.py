from __future__ import annotations

from typing import NamedTuple

import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.life import Life, three_deaths

from dlrover_core.history import timeline as classes
from dlrover_core.history.goodput import goodput_of
from dlrover_core.history.timeline import CLASSES, Stretch, Timeline, TimelineBuilder, timeline_of
from dlrover_core.job import incidents, job, nodes, operations, progress, silence, world
from dlrover_core.kernel.engine import Command
from dlrover_core.kernel.events import Event, Record
from dlrover_core.spec import GroupSpec, JobSpec, us

TWO_NODES = JobSpec("digits", (GroupSpec(nodes_min=2, nodes_max=2, nproc=2),))
WORLD = ((0, 1, 0, 1),)
NODE = "worker-0-0"


class At(NamedTuple):
    """An event at a second; ``cause`` counts back from it."""

    second: float
    event: Event
    back: int = 0


def history(*told: At) -> list[Record]:
    """Records by hand: what no engine would write may be told too."""
    return [
        Record(seq, us(one.second), 1, seq - one.back if one.back else 0, one.event) for seq, one in enumerate(told, 1)
    ]


def seconds(line: Timeline) -> list[tuple[str, float, float]]:
    """The segments, in seconds since the job began."""
    return [(one.kind, (one.begin - line.begin) / 1e6, (one.end - line.begin) / 1e6) for one in line.segments]


def created() -> At:
    """The beginning, at second 100."""
    return At(100, job.JobCreated("digits", "run1", TWO_NODES.to_json()))


def formed(second: float, generation: int) -> At:
    """A world forms."""
    return At(second, world.WorldFormed("worker", generation, WORLD, "s", "r"))


def exited(second: float, step: int = -1, age_us: int = 0, generation: int = 1) -> At:
    """A worker dies."""
    return At(second, incidents.WorkerExited(NODE, generation, 0, -9, False, step, age_us, ""))


def opened(second: float, number: int = 1, back: int = 1) -> At:
    """An incident opens, over the record ``back`` before."""
    return At(second, incidents.IncidentOpened(number, NODE, 1, (0,)), back)


def chosen(second: float, action: str = "RESTART_PROCESSES") -> At:
    """An action is chosen."""
    return At(second, incidents.ActionChosen(1, action, NODE, "rule", 1))


def stepped(second: float, generation: int, step: int, *, told: bool = True) -> At:
    """A first step."""
    return At(second, progress.FirstStep(generation, step, NODE, told))


def test_three_deaths() -> None:
    """The demo's story falls into classes that a person would give it, to the microsecond."""
    assert seconds(timeline_of(three_deaths(TWO_NODES).records)) == [
        (classes.STARTING, 0, 3),
        (classes.TRAINING, 3, 63),
        (classes.DETECTING, 63, 63.1),
        (classes.RESTARTING, 63.1, 63.6),
        (classes.REWORK, 63.6, 72.6),
        (classes.TRAINING, 72.6, 130),
        (classes.FORMING, 130, 132),
        (classes.RESTARTING, 132, 132.5),
        (classes.TRAINING, 132.5, 140),
        (classes.FINISHING, 140, 140.5),
    ]


def test_nothing_yet() -> None:
    """A log without a job has no time to tell of."""
    assert timeline_of([]).segments == ()
    assert goodput_of(timeline_of([])).ratio == 0


def test_never_started() -> None:
    """A job that makes no step was starting all its life, whatever it went through."""
    records = history(created(), formed(101, 1), exited(102), opened(102), chosen(102), formed(103, 2))
    assert seconds(timeline_of(records, us(110))) == [(classes.STARTING, 0, 10)]


def test_live_job_ends_now() -> None:
    """The time of a job that lives ends at `now`, and never before its last record."""
    records = history(created(), formed(101, 1), stepped(102, 1, 1))
    assert timeline_of(records, us(120)).wall_us == us(20)
    assert timeline_of(records, us(50)).wall_us == us(2)
    assert timeline_of(records).wall_us == us(2)


def test_ended_job_ends_there() -> None:
    """What is recorded after the end is no time of the job's, and neither is `now`."""
    end = At(110, job.JobSucceeded(1))
    line = timeline_of(history(created(), stepped(102, 1, 1), end, At(115, nodes.NodeLeft(NODE))), us(200))
    assert (line.wall_us, line.ended_by) == (us(10), "JobSucceeded")


def test_take_over_costs_no_training() -> None:
    """A new master in the middle of training takes nothing from it."""
    records = history(created(), stepped(102, 1, 1), At(105, job.LeaderStarted("m", "0")), At(110, job.JobSucceeded(1)))
    assert seconds(timeline_of(records)) == [(classes.STARTING, 0, 2), (classes.TRAINING, 2, 10)]


def test_detecting_begins_at_death() -> None:
    """The time between a death and the report of it is told as detecting, not as training."""
    records = history(created(), stepped(102, 1, 1), exited(110, age_us=us(3)), opened(110), chosen(110))
    assert seconds(timeline_of(records, us(112)))[1:] == [
        (classes.TRAINING, 2, 7),
        (classes.DETECTING, 7, 10),
        (classes.FORMING, 10, 12),
    ]


def test_detecting_is_bounded() -> None:
    """A death older than the first step of its generation cannot reach back before that step."""
    records = history(created(), stepped(102, 1, 1), exited(103, age_us=us(50)), opened(103), chosen(103))
    assert seconds(timeline_of(records, us(104))) == [
        (classes.STARTING, 0, 2),
        (classes.DETECTING, 2, 3),
        (classes.FORMING, 3, 4),
    ]


def test_silent_node_was_lost_when_it_was_last_heard() -> None:
    """A node that died in silence is charged from its last word, or from the last step reported after it."""
    quiet = At(120, silence.NodeSuspected(NODE, us(15)))
    lost = At(400, nodes.NodeLost(NODE, "silent"))
    told = [created(), stepped(102, 1, 1), quiet, lost, opened(400)]
    assert seconds(timeline_of(history(*told)))[1:] == [(classes.TRAINING, 2, 5), (classes.DETECTING, 5, 300)]
    told.insert(3, At(160, progress.Progressed("worker", 1, 50)))
    assert seconds(timeline_of(history(*told)))[1:] == [(classes.TRAINING, 2, 60), (classes.DETECTING, 60, 300)]


def test_deciding_while_evidence_is_awaited() -> None:
    """A final action that waits for evidence is time spent deciding."""
    records = history(
        created(), stepped(102, 1, 1), exited(110), opened(110), chosen(110, "AWAIT_EVIDENCE"),
        At(110, world.WorldDissolved("worker", 1, "r")), At(130, job.JobFailed("r", 1, "root")),
    )  # fmt: skip
    assert seconds(timeline_of(records))[-1] == (classes.DECIDING, 10, 30)


def test_waiting_without_incident() -> None:
    """A world dissolved though nothing failed is waiting, until the next one forms."""
    planned = At(110, world.WorldDissolved("worker", 1, "drain", planned=True))
    records = history(created(), stepped(102, 1, 1), planned, formed(115, 2), stepped(116, 2, 10))
    assert seconds(timeline_of(records, us(120)))[1:] == [
        (classes.TRAINING, 2, 10),
        (classes.WAITING, 10, 15),
        (classes.RESTARTING, 15, 16),
        (classes.TRAINING, 16, 20),
    ]


def test_growth_is_a_restart() -> None:
    """A larger world in place of a running one costs the time to its first step."""
    records = history(created(), stepped(102, 1, 1), formed(110, 2), stepped(111, 2, 9))
    assert seconds(timeline_of(records, us(112)))[1:] == [
        (classes.TRAINING, 2, 10),
        (classes.RESTARTING, 10, 11),
        (classes.TRAINING, 11, 12),
    ]


def test_overlapping_incidents_count_once() -> None:
    """A second incident during the repair of the first adds no time of its own."""
    records = history(
        created(), stepped(102, 1, 1), exited(110), opened(110), chosen(110), formed(110, 2),
        exited(111, generation=2), opened(111, number=2), At(111, incidents.ActionChosen(2, "RELAUNCH_NODE", NODE, "r", 1)),
        formed(113, 3), stepped(114, 3, 1),
    )  # fmt: skip
    assert seconds(timeline_of(records))[1:] == [
        (classes.TRAINING, 2, 10),
        (classes.RESTARTING, 10, 11),
        (classes.FORMING, 11, 13),
        (classes.RESTARTING, 13, 14),
    ]


def test_stopping() -> None:
    """From the wish to stop to the last worker gone, nothing else is told."""
    stop = At(110, job.JobStopping("Ctrl-C"))
    records = history(created(), stepped(102, 1, 1), stop, formed(111, 2), At(113, job.JobStopped()))
    assert seconds(timeline_of(records))[1:] == [(classes.TRAINING, 2, 10), (classes.STOPPING, 10, 13)]


def test_suspended() -> None:
    """From the wish to pause to the wish to go on, nothing else is told, whatever happens; then it restarts."""
    pause, planned = At(110, job.JobSuspended("lunch")), At(110, world.WorldDissolved("worker", 1, "r", planned=True))
    gone = At(113, nodes.NodeGone(NODE, "", expected=False))
    told = [created(), stepped(102, 1, 1), pause, planned, gone, opened(113)]
    assert seconds(timeline_of(history(*told), us(114)))[1:] == [(classes.TRAINING, 2, 10), (classes.SUSPENDED, 10, 14)]
    told += [At(120, job.JobResumed("back")), formed(120, 2), stepped(121, 2, 9)]
    assert seconds(timeline_of(history(*told), us(123)))[1:] == [
        (classes.TRAINING, 2, 10),
        (classes.SUSPENDED, 10, 20),
        (classes.RESTARTING, 20, 21),
        (classes.TRAINING, 21, 23),
    ]


def test_suspended_before_the_first_step() -> None:
    """A pause is no start-up time, however often."""
    pauses = [
        At(at, job.JobSuspended("x") if number % 2 == 0 else job.JobResumed("y"))
        for number, at in enumerate((101, 102, 104, 108))
    ]
    assert seconds(timeline_of(history(created(), *pauses), us(110))) == [
        (classes.STARTING, 0, 1),
        (classes.SUSPENDED, 1, 2),
        (classes.STARTING, 2, 4),
        (classes.SUSPENDED, 4, 8),
        (classes.STARTING, 8, 10),
    ]


def test_stopped_while_suspended() -> None:
    """Stopping ends the pause."""
    records = history(
        created(),
        stepped(102, 1, 1),
        At(110, job.JobSuspended("x")),
        At(130, job.JobStopping("y")),
        At(131, job.JobStopped()),
    )
    assert seconds(timeline_of(records))[1:] == [
        (classes.TRAINING, 2, 10),
        (classes.SUSPENDED, 10, 30),
        (classes.STOPPING, 30, 31),
    ]


def test_last_run_only() -> None:
    """A log that holds several runs is told from the beginning of the last; an abandoned run ended at its last record."""
    first = [created(), stepped(102, 1, 1), At(110, job.JobAbandoned("run2 begins"))]
    again = At(110, job.JobCreated("digits", "run2", TWO_NODES.to_json()))
    assert seconds(timeline_of(history(*first, again), us(112))) == [(classes.STARTING, 0, 2)]
    assert timeline_of(history(*first), us(200)).wall_us == us(2)


def test_worst_group_decides() -> None:
    """While one of two groups that make steps is down, the job is not training."""
    other = "eval-0-0"
    records = history(
        created(), stepped(102, 1, 1), At(103, progress.FirstStep(1, 1, other)),
        At(110, incidents.WorkerExited(other, 1, 0, -9, False, -1, 0, "")),
        At(110, incidents.IncidentOpened(1, other, 1, (0,)), 1),
        chosen(110), At(112, world.WorldFormed("eval", 2, WORLD, "s", "r")), At(115, progress.FirstStep(2, 2, other)),
    )  # fmt: skip
    assert seconds(timeline_of(records, us(120)))[1:] == [
        (classes.TRAINING, 2, 10),
        (classes.FORMING, 10, 12),
        (classes.RESTARTING, 12, 15),
        (classes.TRAINING, 15, 20),
    ]


# ---- rework


def test_rework_is_interpolated() -> None:
    """Where a report from beyond the lost steps exists, the moment they were made good is interpolated from it."""
    stretch = Stretch.starting(generation=2, at=us(10), step=52, goal=61)
    stretch.note(us(20), 57)
    stretch.note(us(40), 67)
    assert stretch.rework_end(mean_step_us=1) == us(28)


def test_rework_is_estimated() -> None:
    """Where none exists, what is missing after the last report is charged at the mean step time."""
    stretch = Stretch.starting(generation=2, at=us(10), step=52, goal=61)
    stretch.note(us(20), 57)
    assert stretch.rework_end(mean_step_us=us(3)) == us(32)


@pytest.mark.parametrize("step", [61, 62])
def test_no_rework_where_nothing_was_lost(step: int) -> None:
    """A generation that goes on where the last one stopped makes nothing again."""
    assert Stretch.starting(generation=2, at=us(10), step=step, goal=61).rework_end(us(1)) == us(10)


def test_rework_after_two_deaths() -> None:
    """A generation that dies while it makes good lost steps leaves the rest to the next one: the highest step counts."""
    records = history(
        created(), stepped(102, 1, 1), exited(201, step=100), opened(201), chosen(201), formed(201, 2),
        stepped(202, 2, 51), exited(212, step=61, generation=2), opened(212, number=2), formed(212, 3), stepped(213, 3, 51),
    )  # fmt: skip
    line = timeline_of(records, us(300))
    assert seconds(line)[-2:] == [(classes.REWORK, 113, 162), (classes.TRAINING, 162, 200)]
    assert goodput_of(line).by_class[classes.REWORK] == us(10 + 49)


def test_late_word_raises_the_goal() -> None:
    """A dead worker's report that comes after the next first step still tells how far it had come."""
    told = [
        created(),
        stepped(102, 1, 1),
        At(112, progress.Progressed("worker", 1, 11)),
        exited(112),
        opened(112),
        formed(112, 2),
    ]
    late = [stepped(113, 2, 12), exited(114, step=17)]
    assert seconds(timeline_of(history(*told, *late), us(130)))[-2][0] == classes.REWORK
    stopped = [stepped(113, 2, 12), At(114, world.WorkersStopped(NODE, 1, 17))]
    assert seconds(timeline_of(history(*told, *stopped), us(130)))[-2][0] == classes.REWORK


def test_counts_that_begin_anew_tell_of_no_rework() -> None:
    """Where the script does not number its steps, a lower number after a restart is no lost step."""
    records = history(
        created(), stepped(102, 1, 1, told=False), exited(110, step=50), opened(110), formed(110, 2),
        stepped(111, 2, 1, told=False), At(120, progress.Progressed("worker", 2, 20)),
    )  # fmt: skip
    line = timeline_of(records, us(130))
    assert goodput_of(line).by_class[classes.REWORK] == 0
    assert (line.told, line.last_step) == (False, 20)


# ---- any history at all

ANYTHING = [
    "old",
    "step",
    "progress",
    "silence",
    "heard",
    "stop",
    "tick",
    "over",
    "create",
    "suspend",
    "resume",
    "scale",
    "drain",
]
CHOICES = st.sampled_from(
    [f"{what}{node}" for what in ("join", "die", "gone", "left", "finish") for node in "01"] + ANYTHING
)


class Draw(NamedTuple):
    """One random happening, ``wait`` microseconds after the one before."""

    what: str
    wait: int
    amount: int


DRAWS = st.lists(st.builds(Draw, CHOICES, st.integers(0, 400_000_000), st.integers(0, 50)), min_size=1, max_size=60)


def _commands(life: Life, draw: Draw) -> list[Command]:
    """What happens: mostly what a cluster would do, now and then what no cluster should."""
    state = life.state
    present = [node.node for node in state.nodes.nodes.values() if node.index == draw.what.endswith("1")]
    name = present[-1] if present else "worker-0-0"
    generation, step = life.generation(), max(0, state.progress.newest.step + draw.amount - 20)
    happenings: dict[str, list[Command]] = {
        "die": [incidents.ReportExit(name, generation, 0, -9, step=step, age_us=draw.amount * 1_000_000)],
        "old": [incidents.ReportExit(name, generation - 1, 0, 1, step=step, error="Connection reset by peer")],
        "step": [world.ReportStarted(name, generation), progress.ReportFirstStep(name, generation, step)],
        "progress": [progress.NoteProgress("worker", generation, step + 20)],
        "silence": [silence.NoteSilence(name, draw.amount * 1_000_000)],
        "heard": [silence.NoteHeard(name)],
        "gone": [nodes.ObserveNodes((nodes.Observed(name, "gone" if draw.amount % 2 else "failed", -9),))],
        "left": [world.ReportStopped(name, generation), nodes.ReportLeft(name)],
        "finish": [world.ReportFinished(name, generation)],
        "stop": [job.StopJob("Ctrl-C")],
        "suspend": [job.SuspendJob("lunch")],
        "resume": [job.ResumeJob("back")],
        "scale": [operations.ScaleGroup("worker", 1, 1 + draw.amount % 3, "asked")],
        "drain": [operations.DrainNode(name, "asked")],
        "create": [job.CreateJob(f"run{draw.wait}", TWO_NODES.to_json())],
    }
    return happenings.get(draw.what.rstrip("01"), [])


def _live(draws: list[Draw]) -> Life:
    life, at = Life(TWO_NODES).join(1, "worker-0-0", "worker-1-0").step(2, 1, "worker-0-0"), 2.0
    for draw in draws:
        at += draw.wait / 1e6
        if draw.what.startswith("join"):
            present = [node.node for node in life.state.nodes.nodes.values() if node.index == draw.what.endswith("1")]
            life.join(at, *present[-1:])
        elif draw.what == "tick":
            life.tick(at)
        elif draw.what == "over":
            life.take_over(at, "another")
        else:
            life.do(at, *_commands(life, draw))
    return life


@settings(max_examples=examples(60, 150), deadline=None)
@given(DRAWS, st.integers(0, 10**10))
def test_classes_partition_time(draws: list[Draw], later: int) -> None:
    """Whatever happens to a job, at any moment: its segments tile its wall-clock time, none empty, none negative."""
    builder = TimelineBuilder()
    for record in _live(draws).records:
        if isinstance(record.event, job.JobCreated):
            builder = TimelineBuilder()
        builder.feed(record)
        for now in (None, record.at + later):
            line = builder.timeline(now)
            edges = [one.begin for one in line.segments] + [line.end]
            assert edges[0] == line.begin
            assert [one.end for one in line.segments] == edges[1:]
            assert all(one.length_us > 0 for one in line.segments)
            sums = goodput_of(line)
            assert sum(sums.by_class.values()) == sums.wall_us == line.wall_us
            assert tuple(sums.by_class) == CLASSES
