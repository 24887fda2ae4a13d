from __future__ import annotations

import pytest
from tests.unit.life import Life, three_deaths

from dlrover_core.history import timeline as classes
from dlrover_core.history.goodput import goodput_of
from dlrover_core.history.report import ReportBuilder, report_of
from dlrover_core.history.timeline import CLASSES, Segment, Timeline
from dlrover_core.job import job
from dlrover_core.job.incidents import ReportExit
from dlrover_core.job.progress import ReportFirstStep
from dlrover_core.spec import GroupSpec, JobSpec, us

TWO_NODES = JobSpec("digits", (GroupSpec(nodes_min=2, nodes_max=2, nproc=2),))


def _line(*lengths: tuple[str, int]) -> Timeline:
    at, segments = 0, []
    for kind, length in lengths:
        segments.append(Segment(kind, at, at + length))
        at += length
    return Timeline(0, at, "", tuple(segments), 1, 1, 0, told=True)


def test_sums() -> None:
    """Every class is named, what occurs twice is added, and the sum is wall-clock time."""
    sums = goodput_of(_line((classes.STARTING, 1), (classes.TRAINING, 6), (classes.WAITING, 1), (classes.TRAINING, 2)))
    assert tuple(sums.by_class) == CLASSES
    assert (sums.by_class[classes.TRAINING], sums.by_class[classes.WAITING], sums.by_class[classes.REWORK]) == (8, 1, 0)
    assert sum(sums.by_class.values()) == sums.wall_us == 10


def test_ratio() -> None:
    """Goodput is training over wall-clock time; steps made again are no training."""
    sums = goodput_of(_line((classes.TRAINING, 6), (classes.REWORK, 2)))
    assert sums.ratio == pytest.approx(0.75)
    assert sums.share(classes.REWORK) == pytest.approx(0.25)


def test_no_time() -> None:
    """A job without any time has a goodput of 0, not a division by it."""
    assert goodput_of(_line()).ratio == 0.0
    assert goodput_of(_line()).share(classes.TRAINING) == 0.0


# ---- the report around it


def test_report_of_three_deaths() -> None:
    """The report names what died, what it was taken for, what was done, and what each cost."""
    told = report_of(three_deaths(TWO_NODES).records)
    assert (told.state, told.restarts, told.relaunches, told.generations, told.steps_lost) == ("succeeded", 1, 1, 3, 11)
    worker, node = told.incidents
    assert (worker.signature, worker.action, worker.down_us, worker.steps_lost) == (
        "exit.sigkill",
        "RESTART_PROCESSES",
        us(0.6),
        11,
    )
    assert (worker.ranks, worker.formed_generation) == ([3, 0], 2)
    moments = (worker.died_at, worker.opened_at, worker.formed_at, worker.started_at, worker.stepped_at)
    assert [at - Life.EPOCH_US for at in moments] == [us(63), us(63.1), us(63.1), us(63.3), us(63.6)]
    assert (node.signature, node.action, node.down_us, node.verdict) == (
        "node.sigkill",
        "RELAUNCH_NODE",
        us(2.5),
        "PLAT",
    )
    assert told.mean_down_us == us(1.55)
    assert [(one.holder, one.silent_us) for one in told.take_overs] == [("master-2", us(80 - 63.6))]


def test_report_names_the_first_cause_of_an_incident() -> None:
    """Where a survivor's complaint is heard first, the cause is still the death that it complains about."""
    life = Life(TWO_NODES).join(1, "worker-0-0", "worker-1-0").step(2, 1, "worker-0-0")
    life.die(10, "worker-0-0", 0, 1, error="RuntimeError: Connection closed by peer")
    life.do(10.1, *_exit_of("worker-1-0", 1, 2, -9)).step(11, 5, "worker-0-0")
    (story,) = report_of(life.records).incidents
    assert story.cause == "rank 2 on worker-1-0: killed by SIGKILL (exit.sigkill)"
    assert [(one.signature, one.revises > 0) for one in story.judgements] == [
        ("gloo.peer", False),
        ("exit.sigkill", True),
    ]
    assert [measure.action for measure in story.measures] == ["RESTART_PROCESSES"]


def test_report_of_an_incident_that_nobody_mended() -> None:
    """An incident without a next step has no time down; the report does not invent one."""
    life = Life(TWO_NODES).join(1, "worker-0-0", "worker-1-0").step(2, 1, "worker-0-0").node_dies(10, "worker-1-0")
    told = report_of(life.records, Life.EPOCH_US + us(60))
    assert [story.down_us for story in told.incidents] == [None]
    assert told.mean_down_us is None
    assert told.goodput.by_class[classes.FORMING] == us(50)


def test_steps_lost_with_a_node() -> None:
    """A node takes its step count along; what was lost with it is counted from the progress that was reported, and once."""
    life = Life(TWO_NODES).join(1, "worker-0-0", "worker-1-0").step(2, 1, "worker-0-0").progress(70, 60)
    life.node_dies(75, "worker-1-0").join(80, "worker-1-1").die(80.5, "worker-0-0", 0).step(81, 31, "worker-0-0")
    told = report_of(life.records)
    assert [story.steps_lost for story in told.incidents] == [30, 0]
    assert told.goodput.by_class[classes.REWORK] == 0  # the log ends with the first step
    rework = report_of(life.progress(200, 90).records).goodput.by_class[classes.REWORK]
    assert rework == pytest.approx(us(119 * 29 / 59), abs=1)


def test_steps_lost_unknown() -> None:
    """Where the script does not number its steps, nobody can say how many were lost, and the report does not."""
    life = Life(TWO_NODES).join(1, "worker-0-0", "worker-1-0")
    life.do(2, ReportFirstStep("worker-0-0", 1, 1)).die(10, "worker-1-0", 3, step=50)
    life.do(11, ReportFirstStep("worker-0-0", 2, 1))
    told = report_of(life.records)
    assert ([story.steps_lost for story in told.incidents], told.steps_lost) == ([-1], 0)


def test_report_of_the_last_run() -> None:
    """A second run in the same log begins a report of its own, and says that there was an earlier one."""
    life = three_deaths(TWO_NODES).do(200, job.CreateJob("run2", TWO_NODES.to_json()))
    told = report_of(life.records)
    assert (told.run, told.earlier_runs, told.incidents, told.take_overs) == ("run2", 1, (), ())
    assert told.goodput.wall_us == 0


def test_the_first_master_takes_nothing_over() -> None:
    """Where a launcher begins the run, its first master is no successor; the next one is."""
    life = Life(TWO_NODES)
    life.do(1, job.TakeOver("master-1", "v"))
    assert report_of(life.records).take_overs == ()
    life.do(2, job.TakeOver("master-2", "v"))
    assert [one.holder for one in report_of(life.records).take_overs] == ["master-2"]


def test_report_grows_with_the_log() -> None:
    """A report may be asked for after every record: that is how a live view is made."""
    builder = ReportBuilder()
    assert builder.report().state == "new"
    for record in three_deaths(TWO_NODES).records:
        builder.feed(record)
        told = builder.report()
        assert sum(told.goodput.by_class.values()) == told.goodput.wall_us == told.timeline.wall_us
    assert builder.report().over


def _exit_of(node: str, generation: int, rank: int, code: int) -> list[tuple[object, ...]]:
    return [ReportExit(node, generation, rank, code)]


def test_a_late_nodes_death_costs_no_training_time() -> None:
    """An incident that broke no world is in the report, and training time goes on through it."""
    life = Life(JobSpec("j", (GroupSpec(nodes_min=1, nodes_max=2, nproc=1),), last_call_s=1.0)).join(1, "worker-0-0")
    life.tick(2.5)
    life.start(2.6, "worker-0-0").step(3, 1, "worker-0-0")
    life.node_dies(10, "worker-1-0")
    life.finish(20, "worker-0-0")
    told = report_of(life.records)
    assert [story.generation for story in told.incidents] == [0]
    assert told.goodput.training_us == 17_000_000


def test_a_job_that_tells_no_steps_is_running() -> None:
    """Where nobody reports a step, the time of running workers is a class of its own, neither start-up nor goodput."""
    life = Life(TWO_NODES).join(1, "worker-0-0", "worker-1-0").start(2, "worker-0-0", "worker-1-0")
    life.finish(10, "worker-0-0", "worker-1-0")
    spent = report_of(life.records).goodput
    assert (spent.by_class["starting"], spent.by_class["running"], spent.training_us) == (us(2), us(8), 0)
