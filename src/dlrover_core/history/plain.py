"""Histories as values that JSON can hold, with every field named: what `--json` prints and other programs read."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from dlrover_core.history.explain import Explanation
from dlrover_core.history.incidents import Story
from dlrover_core.history.report import Report
from dlrover_core.job.job import JobCreated
from dlrover_core.kernel.events import Event, Record, kind_of


def plain(value: Any) -> Any:
    """NamedTuples and dataclasses as objects, records as by `record_of`, other sequences as arrays, the rest as it is."""
    if isinstance(value, Record):
        return record_of(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return {name: plain(one) for name, one in zip(value._fields, value, strict=True)}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {spot.name: plain(getattr(value, spot.name)) for spot in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()}
    if isinstance(value, (tuple, list)):
        return [plain(one) for one in value]
    return value


def name_of(event: Event) -> str:
    """The event's name, as people read it."""
    return kind_of(type(event)).name


def fields_of(event: Event) -> dict[str, Any]:
    """The event's fields by name."""
    named: dict[str, Any] = plain(event)
    if isinstance(event, JobCreated):
        named["spec"] = json.loads(event.spec)
    return named


def record_of(record: Record) -> dict[str, Any]:
    """A record as one object: ``seq``, ``at_us``, ``token``, ``cause`` (0: none), ``origin`` (or null), ``event``, ``fields``."""
    return {
        "seq": record.seq,
        "at_us": record.at,
        "token": record.token,
        "cause": record.cause,
        "origin": plain(record.origin),
        "event": name_of(record.event),
        "fields": fields_of(record.event),
    }


def explanation_values(told: Explanation) -> dict[str, Any]:
    """An explanation: the target, what it follows from, what followed; ``follows`` holds each record's links."""
    return {
        "job": told.job,
        "target": told.target.seq,
        "before": [{**record_of(fact.record), "follows": list(fact.follows)} for fact in told.before],
        "after": [{**record_of(fact.record), "follows": list(fact.follows)} for fact in told.after],
        "left_out": told.left_out,
        "end": plain(told.end),
    }


def report_values(told: Report) -> dict[str, Any]:
    """A report, with what follows from its parts: the goodput ratio, each incident's verdict, action and time down."""
    values: dict[str, Any] = plain(told)
    values["goodput"]["ratio"] = told.goodput.ratio
    values["mean_down_us"] = told.mean_down_us
    values["incidents"] = [story_values(story) for story in told.incidents]
    return values


def story_values(story: Story) -> dict[str, Any]:
    """A story, with what follows from its parts."""
    derived = {
        "verdict": story.verdict,
        "signature": story.signature,
        "action": story.action,
        "down_us": story.down_us,
        "restored": plain(story.restored),
    }
    return {**plain(story), **derived}
