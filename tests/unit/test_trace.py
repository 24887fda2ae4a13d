"""What is kept of a failure: the plan as printed, every record as JSON, and a chart of the time."""

from __future__ import annotations

import json
from pathlib import Path

from tests.unit.life import three_deaths

from dlrover_core.spec import GroupSpec, JobSpec
from dlrover_core.testing.trace import MARKS_MAX, keep, mermaid

RECORDS = three_deaths(JobSpec("kept", (GroupSpec(nodes_min=2, nodes_max=2, nproc=2),))).records


def test_keep(tmp_path: Path) -> None:
    """Three files, of which the log holds each record once, in order."""
    folder = keep(tmp_path / "new" / "folder", ["seed 3", "replay: x"], RECORDS)
    assert sorted(one.name for one in folder.iterdir()) == ["log.jsonl", "plan.txt", "timeline.mmd"]
    assert (folder / "plan.txt").read_text() == "seed 3\nreplay: x\n"
    log = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    assert [one["seq"] for one in log] == [record.seq for record in RECORDS]
    assert {"event", "fields", "at_us", "cause"} <= set(log[0])


def test_mermaid() -> None:
    """The chart's segments tile the time, its milestones are events, and nothing in it steers Mermaid."""
    lines = list(mermaid(RECORDS))
    assert lines[0] == "gantt"
    events = lines.index("  section events")
    spans = [line.rpartition(" :")[2].split(", ") for line in lines[lines.index("  section time") + 1 : events]]
    assert spans[0][0] == "0"
    assert [one[1] for one in spans[:-1]] == [one[0] for one in spans[1:]]
    marks = lines[events + 1 :]
    assert any("IncidentOpened" in line for line in marks)
    assert all(line.count(":") == 1 and line.count(",") == 2 for line in marks)
    assert len(marks) <= MARKS_MAX + 1


def test_nothing() -> None:
    """A run that failed before its first record has an empty chart."""
    assert list(mermaid([])) == ["gantt", "  dateFormat x", "  axisFormat %H:%M:%S"]
