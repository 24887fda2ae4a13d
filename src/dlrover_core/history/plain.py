"""Histories as values that JSON can hold, with every field named: the output of `--json`, for other programs."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from dlrover_core.job.job import JobCreated
from dlrover_core.job.lineage import cut_of, readable
from dlrover_core.kernel.events import Event, Record, kind_of


def plain(value: Any) -> Any:
    """NamedTuples and dataclasses as objects, records as by `record_of`, other sequences as arrays, cuts unpacked, else as is."""
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
    if isinstance(value, bytes):
        # Events hold no bytes but cuts.
        return [plain(place) for place in cut_of(value)] if readable(value) else value.hex()
    return value


def name_of(event: Event) -> str:
    """The event's name."""
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
