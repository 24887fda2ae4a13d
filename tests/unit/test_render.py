from __future__ import annotations

import json
import re
from datetime import timezone
from typing import Any, get_args, get_type_hints

import pytest
from tests.unit.life import Life, three_deaths

from dlrover_core.data.ranges import Ranges
from dlrover_core.history import render
from dlrover_core.history.explain import explanation_of, explanation_values
from dlrover_core.history.phrases import duration, exit_of, key_values, one_line, safe
from dlrover_core.history.plain import plain, record_of
from dlrover_core.history.report import report_of, report_values
from dlrover_core.history.status import status_of
from dlrover_core.history.words import say
from dlrover_core.job import incidents, job, operations, progress, world
from dlrover_core.kernel.events import Record
from dlrover_core.rules.model import MODEL
from dlrover_core.spec import GroupSpec, JobSpec, us

TWO_NODES = JobSpec("digits", (GroupSpec(nodes_min=2, nodes_max=2, nproc=2),))
NO_RESTARTS = JobSpec("digits", (GroupSpec(nodes_min=2, nodes_max=2, nproc=2),), max_restarts=0)
UTC = timezone.utc
NASTY = "\x1b[2J\x1b]0;owned\x07ok\r\nnext\x00\x9b31m"


def numberless(text: str) -> str:
    """Text without sequence numbers: they change whenever a concern has more to say."""
    return re.sub(r"#\d+", "#N", text)


def failed() -> Life:
    """A job that fails over a program error."""
    life = Life(NO_RESTARTS).join(1, "worker-0-0", "worker-1-0").step(2, 1, "worker-0-0")
    error = "Traceback (most recent call last):\n  File 'train.py'\nValueError: bad sample"
    return life.die(10, "worker-0-0", 0, 1, step=8, error=error).tick(500)


@pytest.mark.parametrize(
    ("us", "text"),
    [
        (0, "0.000 s"),
        (80_900, "0.081 s"),
        (12_300_000, "12.3 s"),
        (59_960_000, "1 min 00 s"),
        (245_000_000, "4 min 05 s"),
        (7_380_000_000, "2 h 03 min"),
        (457_200_000_000, "5 d 07 h"),
        (-1_000_000, "-1.000 s"),
    ],
)
def test_duration(us: int, text: str) -> None:
    """Durations are said with the precision that a person wants at their size."""
    assert duration(us) == text


def test_safe() -> None:
    """Text from outside cannot steer a terminal: no escapes, no control characters, line breaks kept."""
    assert safe(NASTY) == "ok\nnext??31m"
    assert one_line(NASTY) == "ok next??31m"
    assert one_line("a" * 300, 10) == "aaaaaaa..."


def test_exit_of() -> None:
    """Signals have names, also those that this system does not know."""
    assert (exit_of(-9), exit_of(-99), exit_of(3)) == ("killed by SIGKILL", "killed by signal 99", "exit code 3")


def sample(hint: Any) -> object:
    """Some value of a field's type."""
    inner = get_args(hint)
    if inner:
        return tuple(sample(one) for one in inner if one is not Ellipsis)
    return {str: NASTY, int: 1, bool: True, float: 0.5, bytes: Ranges([(0, 9)]).pack()}[hint]


@pytest.mark.parametrize("cls", MODEL.events, ids=lambda cls: cls.__name__)
def test_every_event_can_be_told(cls: type) -> None:
    """Every kind of event has a line for people and an object for programs, whatever its fields."""
    hints = get_type_hints(cls)
    values = [sample(hint) for hint in hints.values()]
    if cls is job.JobCreated:
        values[-1] = TWO_NODES.to_json()
    record = Record(2, us(1), 1, 1, cls(*values))
    for text in (say(record.event), key_values(record.event), render.event_line(record, 0, UTC)):
        assert text.isprintable()
    assert set(json.loads(json.dumps(record_of(record)))["fields"]) == set(hints)


def test_event_line() -> None:
    """An event is one line: number, time, offset, name, fields, cause."""
    record = Record(118, Life.EPOCH_US + 63_000_000, 1, 117, incidents.IncidentClosed(7, 80_000, 1))
    line = render.event_line(record, Life.EPOCH_US, UTC)
    assert line == (
        "   118  2025-11-20 12:01:03.000     +63.000  IncidentClosed  incident=7 down_us=80000 steps_lost=1  <- #117"
    )


def test_report() -> None:
    """The report of a job that went through three deaths reads like this."""
    text = numberless(render.report(report_of(three_deaths(TWO_NODES).records), UTC))
    assert (
        text
        == """\
job digits (run run1): succeeded, step 113, after 2 min 21 s
  began 2025-11-20 12:00:00.000, ended 2025-11-20 12:02:20.500
  2 incidents, 1 restart of the processes, 1 relaunch of nodes, 3 generations, 11 steps lost

incidents (down: from the death to the next step)
  no.          at     down  lost  verdict            action             cause
    1   +63.000 s  0.600 s    11  PLAT exit.sigkill  RESTART_PROCESSES  rank 3 on worker-1-0: killed by SIGKILL (exit.sigkill)
    2  +130.000 s  2.500 s     0  PLAT node.sigkill  RELAUNCH_NODE      node worker-1-0: failed (node.sigkill)
  mean time from a death to the next step: 1.550 s

goodput 88.90 % of wall-clock time
  starting      3.000 s    2.14 %  from creation to the first step
  training    124.900 s   88.90 %  new steps: goodput
  rework        9.000 s    6.41 %  steps lost, made again (estimated)
  detecting     0.100 s    0.07 %  from a death until the master knew
  forming       2.000 s    1.42 %  from the decision to a new world; waiting for nodes
  restarting    1.000 s    0.71 %  from a new world to its first step
  finishing     0.500 s    0.36 %  some workers done, others not yet
  sum         140.500 s  100.00 %  wall-clock time since the job was created

master taken over 1 time; training does not wait for that
  #N  +80.000 s  after 16.4 s without a record  by master-2"""
    )


def test_report_of_a_failed_job() -> None:
    """What made a job fail stands above everything else."""
    text = render.report(report_of(failed().records), UTC)
    assert text.startswith("FAILED: rank 0 on worker-0-0: ValueError: bad sample (exception.ValueError)\n  because ")
    assert "incident 1 in turns:" in text
    assert "fail the job" in text


def test_report_without_step_numbers() -> None:
    """Where lost steps cannot be known, the report says so, and what would tell them."""
    life = Life(TWO_NODES).join(1, "worker-0-0", "worker-1-0")
    life.do(2, progress.ReportFirstStep("worker-0-0", 1, 1)).die(10, "worker-1-0", 3, step=50)
    text = render.report(report_of(life.do(11, progress.ReportFirstStep("worker-0-0", 2, 1)).records), UTC)
    assert "1 step since the last start" in text
    assert "  ?  PLAT exit.sigkill" in text
    assert "dlrover_adapters.torch.step(n)" in text


def test_report_without_steps() -> None:
    """Where no step was ever reported, goodput is unknown, not zero."""
    text = render.report(report_of(Life(TWO_NODES).join(1, "worker-0-0", "worker-1-0").records), UTC)
    assert "goodput unknown: no step was reported" in text
    assert "no incidents" in text
    assert "still alive" in text


def test_explanation() -> None:
    """An explanation shows the chain with its links, marks its target, and quotes the last words of the dead."""
    text = render.explanation(explanation_of(failed().records) or pytest.fail("no explanation"))
    assert "| ValueError: bad sample" in text
    assert "<- #" in text
    assert next(line for line in text.splitlines() if line.startswith(">")).split()[4] == "JobFailed"
    assert text.splitlines()[-1].startswith("the job ended with #")


def test_long_last_words_are_cut() -> None:
    """Of long last words the end is shown, and how much is not."""
    life = Life(TWO_NODES).join(1, "worker-0-0", "worker-1-0").step(2, 1, "worker-0-0")
    life.die(10, "worker-0-0", 0, 1, tail="\n".join(f"line {number}" for number in range(100)))
    text = render.explanation(explanation_of(life.records) or pytest.fail("no explanation"))
    assert "| ... 80 lines before" in text
    assert "| line 99" in text
    assert "| line 79" not in text


def test_status() -> None:
    """The status shows state, step, world, nodes, unmended incidents, budgets and the last event."""
    life = Life(TWO_NODES).join(1, "worker-0-0", "worker-1-0").step(2, 1, "worker-0-0").node_dies(10, "worker-1-0")
    told = status_of(life.state, life.records[-1])
    text = numberless(render.status(told, Life.EPOCH_US + us(20), UTC))
    assert (
        text
        == """\
job digits  running  run run1
  step 1 at 2025-11-20 12:00:02.000; for 20.0 s
  worker: generation 1, 2 nodes, 4 ranks, dissolved, the next one is awaited

  node        state    incarnation  host             place
  worker-0-0  running            0  host-worker-0-0      -
  worker-1-1  planned            1  -                    -

unmended incidents
  1  node.sigkill  RELAUNCH_NODE  node worker-1-0: failed (node.sigkill)

budgets left: 3 restarts of the processes, 2 relaunches of worker-1
last event #N at 2025-11-20 12:00:10.000: NodeGone: node worker-1-0 is gone, as expected: no reason given"""
    )


def test_status_of_nothing() -> None:
    """An empty log has a status too."""
    assert "no nodes" in render.status(status_of(MODEL.new()))


def test_status_of_a_failed_job() -> None:
    """What made a job fail stands above everything else in its status, too."""
    life = failed()
    assert render.status(status_of(life.state, life.records[-1])).startswith("FAILED: rank 0 on worker-0-0: ValueError")


def test_nodes_beyond_the_screen() -> None:
    """Of thousands of nodes the first are shown, and how many are not."""
    life = Life(JobSpec("big", (GroupSpec(nodes_min=100, nodes_max=100),)))
    assert "... and 36 nodes more" in render.status(status_of(life.state, life.records[-1]))


def test_json() -> None:
    """Status, report and explanation are JSON with every field named."""
    life = three_deaths(TWO_NODES)
    status = json.loads(json.dumps(plain(status_of(life.state, life.records[-1]))))
    assert status["nodes"][0]["node"] == "worker-0-0"
    assert status["last"]["event"] == "JobSucceeded"
    report = json.loads(json.dumps(report_values(report_of(life.records))))
    assert sum(report["goodput"]["by_class"].values()) == report["goodput"]["wall_us"]
    assert [one["down_us"] for one in report["incidents"]] == [600_000, 2_500_000]
    assert report["incidents"][0]["measures"][0]["action"] == "RESTART_PROCESSES"
    told = explanation_of(life.records)
    assert told is not None
    explained = json.loads(json.dumps(explanation_values(told)))
    assert explained["before"][-1]["seq"] == explained["target"]
    assert explained["end"]["event"] == "JobSucceeded"


def test_what_people_asked_for() -> None:
    """The report lists it, the status says how it stands, `explain` links it, and a pause is no time down."""
    life = Life(TWO_NODES).join(1, "worker-0-0", "worker-1-0").step(2, 1, "worker-0-0")
    life.die(10, "worker-1-0", 3).do(12, job.SuspendJob("lunch"))
    assert "suspended (lunch)" in render.status(status_of(life.state, life.records[-1]))
    assert "4 ranks, suspended" in render.status(status_of(life.state, life.records[-1]))
    life.do(112, job.ResumeJob("back")).step(113, 2, "worker-0-0")
    life.do(120, operations.ScaleGroup("worker", 1, 3, "a new machine"), operations.DrainNode("worker-1", "a bad one"))
    told = report_of(life.records)
    text = numberless(render.report(told))
    assert told.incidents[0].down_us == us(3)
    assert told.goodput.by_class["suspended"] == us(100)
    for line in (
        "asked for while it ran",
        "#N   +12.000 s  the job was suspended: lunch",
        "#N  +112.000 s  the job was resumed: back",
        "#N  +120.000 s  worker is to have 1 to 3 nodes (a new machine)",
        "#N  +120.000 s  host-worker-1-0 is wanted free of worker-1-0: a bad one",
    ):
        assert line in text, text
    assert "2 nodes (wanted: 1 to 3 nodes), 4 ranks" in render.status(status_of(life.state, life.records[-1]))
    resumed = next(record.seq for record in life.records if isinstance(record.event, job.JobResumed))
    explained = explanation_of(life.records, resumed)
    assert explained is not None
    assert [type(fact.record.event) for fact in explained.before] == [job.JobSuspended, job.JobResumed]
    assert {type(fact.record.event) for fact in explained.after} >= {world.WorldFormed, progress.FirstStep}
    assert plain(told)["asked"][0]["event"] == "JobSuspended"
