"""A run on disk, for whoever wants to know what happened: its plan, its records as JSON lines, its time as a Mermaid chart."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dlrover_core.history.plain import name_of, record_of
from dlrover_core.history.timeline import timeline_of
from dlrover_core.job import incidents, job, nodes, silence, world

if TYPE_CHECKING:
    from dlrover_core.kernel.events import Record

MARKS_MAX = 200
"""Events in a chart: more cannot be told apart."""

_TOLD = (
    job.LeaderStarted, incidents.IncidentOpened, incidents.ActionChosen, incidents.IncidentClosed,
    nodes.NodeFailed, nodes.NodeLost, nodes.NodeGone, silence.NodeSuspected, world.WorldFormed, world.WorldDissolved,
)  # fmt: skip


def keep(folder: Path, told: Sequence[str], records: Sequence[Record]) -> Path:
    """Write ``plan.txt``, ``log.jsonl`` and ``timeline.mmd`` into a folder, made if need be. Returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "plan.txt").write_text("".join(f"{line}\n" for line in told))
    with (folder / "log.jsonl").open("w") as log:
        log.writelines(f"{json.dumps(record_of(record), ensure_ascii=False)}\n" for record in records)
    (folder / "timeline.mmd").write_text("".join(f"{line}\n" for line in mermaid(records)))
    return folder


def mermaid(records: Sequence[Record]) -> Iterator[str]:
    """A Gantt chart: where the time went, and the events that changed it, in seconds since the first record."""
    yield "gantt"
    yield "  dateFormat x"
    yield "  axisFormat %H:%M:%S"
    if not records:
        return
    began = records[0].at
    yield "  section time"
    for segment in timeline_of(records, records[-1].at).segments:
        yield f"  {segment.kind} :{(segment.begin - began) // 1000}, {(segment.end - began) // 1000}"
    yield "  section events"
    told = [record for record in records if isinstance(record.event, _TOLD)]
    for record in told[:MARKS_MAX]:
        # Everything but words may mean something to Mermaid.
        about = re.sub(r"[^\w.-]+", " ", " ".join(str(value) for value in record.event[:2]))
        yield f"  {record.seq} {name_of(record.event)} {about[:40]} :milestone, {(record.at - began) // 1000}, 0"
    if len(told) > MARKS_MAX:
        yield f"  %% and {len(told) - MARKS_MAX} more: see log.jsonl"
