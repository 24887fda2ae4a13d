"""A set that may fail does: nobody says that the job fails, or that something is back."""

from __future__ import annotations

from dataclasses import replace

import pytest
from test_sets import EVALUATOR, TRAINER, Several, several

from dlrover_core.diagnosis import ladder
from dlrover_core.history.headline import Headlines
from dlrover_core.history.render import report as rendered
from dlrover_core.history.render import status
from dlrover_core.history.render_story import story
from dlrover_core.history.report import report_of
from dlrover_core.history.status import status_of
from dlrover_core.history.story import incident_of
from dlrover_core.history.whatif import changed, whatif
from dlrover_core.history.words import say
from dlrover_core.job import incidents, nodes, operations, world
from dlrover_core.job.state import FOLD
from dlrover_core.kernel.engine import NotDone
from dlrover_core.kernel.events import Event, Record
from dlrover_core.rules.desired import desired


def spared() -> Several:
    """A job whose evaluator has no restarts and has been given up."""
    drive = several(replace(TRAINER, uses=()), replace(EVALUATOR, max_restarts=0))
    drive.dies("evaluator-0-0")
    drive.wait(0.065)
    drive.do(world.ReportStopped("evaluator-0-0", 1, 7))
    return drive


def headline_of(records: list[Record]) -> list[str]:
    """What the terminal shows of incidents, line by line."""
    state, headlines = FOLD.new(), Headlines()
    lines = []
    for record in records:
        FOLD.apply(state, record)
        lines.append(headlines.feed(state, record))
    return [line.text for line in lines if line is not None]


def test_nobody_says_that_the_job_fails_where_a_set_is_given_up() -> None:
    """The set fails and nothing is back: the log, the terminal, the report and the explanation say so, and no more."""
    drive = spared()
    assert [one.action for one in drive.facts(incidents.ActionChosen)] == [ladder.AWAIT_EVIDENCE, ladder.GIVE_UP_SET]
    assert drive.facts(incidents.IncidentClosed)[-1].down_us == incidents.UNKNOWN
    first, last = headline_of(drive.records)
    assert first.endswith("-> wait for all evidence, then go on without evaluator")
    assert last.endswith("-> give evaluator up, the job goes on without it")
    told = incident_of(drive.records)
    assert told is not None
    texts = [rendered(report_of(drive.records)), story(told), *(say(record.event) for record in drive.records)]
    assert not [text for text in texts if "fail the job" in text or "back in" in text]
    assert "incident 1 is over: its set is given up, the job goes on without it" in texts
    assert "cost: its set was given up" in texts[1]
    assert "is awaited" not in status(status_of(drive.state)), "nobody waits for another world of that set"
    drive.ends("trainer")
    assert "given up" in rendered(report_of(drive.records)).split("action  ")[1].splitlines()[1]


def test_who_drains_a_node_of_such_a_set_reads_a_sentence() -> None:
    """Reasons of releases are words of different kinds; each makes a sentence."""
    drive = spared()
    again = drive.do(operations.DrainNode("evaluator-0-0", "by hand"))
    assert isinstance(again, NotDone)
    assert again.reason == "node evaluator-0-0 is released already: its set is given up"
    assert desired(drive.state).orders["evaluator-0-0"].reason == "the node is released: its set is given up"


@pytest.mark.parametrize(
    ("released", "words"),
    [
        ("", "is running"),
        (nodes.DRAINED, "is drained"),
        ("lost", "is lost"),
        ("replaced", "is replaced"),
        (nodes.SPARED, "is released: not needed: the node that it was to replace stays"),
        ("avoided hosts are allowed", "is released: avoided hosts are allowed"),
    ],
)
def test_how_a_node_stands_is_a_predicate(released: str, words: str) -> None:
    """It follows the node's name wherever a command is refused."""
    assert nodes.Node("worker-0-0", "worker", 0, 0, 0, state="running", released=released).stands() == words


def test_a_log_from_before_says_the_same() -> None:
    """In logs of older releases the job was to fail, and the set was back at once."""
    older = [record._replace(event=older_event(record.event)) for record in spared().records]
    assert headline_of(older) == headline_of(spared().records)


def older_event(event: Event) -> Event:
    """An event as older releases wrote it."""
    if isinstance(event, incidents.ActionChosen) and event.action == ladder.GIVE_UP_SET:
        return event._replace(action=ladder.FAIL_JOB)
    return event._replace(down_us=65_000) if isinstance(event, incidents.IncidentClosed) else event


def test_what_another_policy_had_done_does_not_end_with_a_set_that_may_fail() -> None:
    """The evaluator's end is no end of the job: a comparison of policies reads on behind it."""
    told = whatif(spared().records, change=changed())
    assert (told.ended, told.outlived) == (None, 0)
