"""An incident as a story, and in one line: told from the log alone, and the same every time."""

from __future__ import annotations

import os
import re
from datetime import timezone
from pathlib import Path

from tests.unit.life import Life, three_deaths

from dlrover_adapters.cli.told import Teller
from dlrover_core.history import Headlines, incident_of, render, render_story, status_of
from dlrover_core.history.headline import Headline
from dlrover_core.history.story import incident_values
from dlrover_core.job import evidence, incidents, job, nodes, world
from dlrover_core.rules.model import MODEL
from dlrover_core.spec import GroupSpec, JobSpec

TWO_NODES = JobSpec("digits", (GroupSpec(nodes_min=2, nodes_max=2, nproc=2),))
GOLDEN = Path(__file__).parent / "golden" / "incident.txt"
UTC = timezone.utc
PEER = "Traceback (most recent call last):\n  File 'train.py'\nRuntimeError: [gloo] Connection closed by peer [10.0.0.2]:4242"
XID = "NVRM: Xid (PCI:0000:3b:00): 48, pid=4711, name=python3, DBE (double bit error)"
NODES = ("worker-0-0", "worker-1-0")


def ecc() -> Life:
    """A survivor speaks first, then the victim aborts, and the kernel's word comes last: two verdicts, two actions."""
    life = Life(TWO_NODES).join(1, *NODES).start(2, *NODES).step(2.5, 1, "worker-0-0").progress(70, 66)
    life.die(103.1, "worker-0-0", 0, 1, step=99, error=PEER)
    tail = "terminate called after throwing an instance of 'c10::Error'\nFatal Python error: Aborted\n"
    life.do(103.2, incidents.ReportExit("worker-1-0", 1, 3, -6, step=99, age_us=300_000, tail=tail))
    life.do(
        103.5,
        evidence.ReportEvidence("worker-1-0", "kernel", "xid.ecc_double", XID, age_us=900_000, subject="0000:3b:00"),
    )
    life.do(104, *(world.ReportStopped(node, 1, 99) for node in NODES))
    life.do(105, nodes.ObserveNodes((nodes.Observed("worker-1-0", "gone"),)))
    return life.join(130, "worker-1-1").start(131, "worker-0-0", "worker-1-1").step(144, 91, "worker-0-0")


def numberless(text: str) -> str:
    """Text without sequence numbers: they change whenever a concern has more to say."""
    return re.sub(r" +#\d+", " #N", re.sub(r"#\d+", "#N", text))


def test_the_whole_story() -> None:
    """Evidence in the order in which it happened, what was set aside and why, both verdicts, both rungs with their budgets and
    what followed, and what it cost: word for word.
    """
    told = incident_of(ecc().records)
    assert told is not None
    text = numberless(render_story.story(told, UTC)) + "\n"
    if os.environ.get("DLROVER_GOLDEN") == "write":
        GOLDEN.write_text(text)
    assert text == GOLDEN.read_text()


def test_the_story_in_values() -> None:
    """For programs: the same, with every field named, and links by sequence number that lead to records of their kind."""
    records = ecc().records
    told = incident_of(records, 1)
    assert told is not None
    assert [one.source for one in told.evidence] == ["kernel", "exit", "error"]
    kernel, aborted, peer = told.evidence
    assert told.story.cause_seq == kernel.seq
    assert (kernel.aside, kernel.host, kernel.rank) == ("", "host-worker-1-0", -1)
    assert peer.aside
    assert aborted.aside
    first, last = told.story.judgements[0], told.story.judgements[-1]
    assert last.revises in {one.seq for one in told.story.judgements}
    assert first.revises == 0
    assert (last.verdict, last.host) == ("HW", "host-worker-1-0")
    assert [one.action for one in told.story.measures] == ["RESTART_PROCESSES", "ISOLATE_HOST"]
    assert {type(record.event).__name__ for record in told.follows} >= {"HostQuarantined", "NodePlanned", "WorldFormed"}
    values = incident_values(told)
    assert values["story"]["signature"] == "xid.ecc_double"
    assert values["evidence"][0]["seq"] == kernel.seq


def test_which_incident() -> None:
    """Without a number it is the newest one; of a number that is not in the log there is no story."""
    records = three_deaths(TWO_NODES).records
    newest = incident_of(records)
    assert newest is not None
    assert newest.story.number == 2
    assert newest.end is not None
    assert isinstance(newest.end.event, job.JobSucceeded)
    assert incident_of(records, 1) is not None
    assert incident_of(records, 3) is None
    assert incident_of([]) is None


def test_the_incident_that_a_job_failed_over() -> None:
    """Of a failed job it is the one that ended it, with its last words and how the job ended."""
    spec = JobSpec("digits", (GroupSpec(nodes_min=2, nodes_max=2, nproc=2),), max_restarts=0)
    life = Life(spec).join(1, *NODES).start(2, *NODES).step(2.5, 1, "worker-0-0")
    life.die(
        10,
        "worker-0-0",
        0,
        1,
        error="Traceback (most recent call last):\n  File 'train.py'\nValueError: bad \x1b[2Jsample",
    )
    told = incident_of(life.tick(500).records)
    assert told is not None
    text = render_story.story(told, UTC)
    assert "| ValueError: bad sample" in text
    assert "\x1b" not in text
    assert "the job ended with #" in text
    assert "JobFailed" in text


def test_what_a_later_evidence_joined_is_told() -> None:
    """Deaths that came after the verdict and changed nothing are in the story too, though no verdict names them."""
    told = incident_of(three_deaths(TWO_NODES).records, 1)
    assert told is not None
    assert [(one.rank, one.source) for one in told.evidence] == [(3, "exit"), (0, "error")]


# ---- in one line


def lines(life: Life) -> list[Headline]:
    """All news of a history."""
    state, headlines, news = MODEL.new(), Headlines(), []
    for record in life.records:
        MODEL.apply(state, record)
        one = headlines.feed(state, record)
        if one is not None:
            news.append(one)
    return news


def test_one_line_per_incident() -> None:
    """There is a line at the decision, one when it changes, and one at the end, which alone says how long it took."""
    told = lines(ecc())
    assert [one.down_us >= 0 for one in told] == [False, False, True]
    assert told[1].text == (
        "worker-1: GPU memory: double-bit ECC error (signature xid.ecc_double) -> "
        "isolate host host-worker-1-0, relaunch as worker-1-1"
    )
    assert told[2].text == f"{told[1].text}; back in 41.1 s"


def test_signatures_without_a_title() -> None:
    """What nobody has given a title is told by its id."""
    life = three_deaths(TWO_NODES)
    state, headlines = life.state, Headlines()
    record = life.records[-1]
    headlines.feed(state, record._replace(event=incidents.Diagnosed(2, "USER", "my.own", (1,), 0.8)))
    news = headlines.feed(
        state, record._replace(event=incidents.ActionChosen(2, "RESTART_PROCESSES", "worker-0-0", "r", 1))
    )
    assert news is not None
    assert news.text == "worker-0: signature my.own -> restart the processes"


def test_status_has_the_lines() -> None:
    """The newest incidents stand in the status, those that are over with the time that they took."""
    life, headlines = ecc(), Headlines()
    state = MODEL.new()
    for record in life.records:
        MODEL.apply(state, record)
        headlines.feed(state, record)
    text = render.status(status_of(state, life.records[-1], headlines), zone=UTC)
    assert "\nincidents\n  1  worker-1: GPU memory" in text
    assert "back in 41.1 s" in text


def test_told_on_standard_error_without_ever_waiting() -> None:
    """A master writes each line at once; where nobody reads, it drops lines rather than stand still."""
    reader, writer = os.pipe()
    teller = Teller("digits", writer)
    life = ecc()
    for record in life.records:
        teller.committed(life.state, [record])
    told = os.read(reader, 65_536).decode().splitlines()
    assert len(told) == 3
    assert told[-1].startswith("[digits] incident 1: worker-1: GPU memory")
    Teller("digits", writer).committed(life.state, life.records)
    assert os.read(reader, 65_536).decode().splitlines() == told[-1:], "of one batch the last word"
    for _ in range(3000):
        Teller("digits", writer).committed(life.state, life.records)
    teller.committed(life.state, life.records)
    state = MODEL.new()
    for record in life.records:
        MODEL.apply(state, record)
    full = Teller("digits", writer)
    full.committed(state, life.records)
    assert full.lost == 1
    os.close(reader)
    gone = Teller("digits", writer)
    gone.committed(state, life.records)
    assert gone.lost == 1
    os.close(writer)
