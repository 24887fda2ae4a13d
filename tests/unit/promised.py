"""Histories that keep every promise, and how a record of one is changed."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from drive import Drive

from dlrover_core.job import (
    nodes,
    world,
)
from dlrover_core.job.state import JobState
from dlrover_core.kernel.engine import CommandRefused
from dlrover_core.kernel.events import Event, Origin, Record
from dlrover_core.rules.model import MODEL
from dlrover_core.testing import invariants
from dlrover_core.testing.promises import Promise

Shown = Callable[[Record], Record]
BLANK = "nobody"


def blank(drive: Drive) -> Drive:
    """A command is refused: a record in whose place anything else can be shown."""
    drive.do(nodes.ReportLeft(BLANK))
    assert drive.names() == ["CommandRefused"]
    return drive


def shown(records: list[Record], show: Shown) -> set[str]:
    """Which promises break first, when they are shown this instead. The state is that of the true history.

    But for the reference: that one notices that the state is of another history, whatever the difference.
    """
    promises = [cls() for cls in invariants.OF_LOGS if cls is not invariants.Reference]
    state = MODEL.new()
    for record in records:
        MODEL.apply(state, record)
        broken = {promise.name for promise in promises if breaks(promise, state, show(record))}
        if broken:
            return broken
    return {promise.name for promise in promises if ends_badly(promise, state)}


def breaks(promise: Promise, state: JobState, record: Record) -> bool:
    """Does a record break a promise?"""
    try:
        promise(state, record)
    except AssertionError:
        return True
    return False


def ends_badly(promise: Promise, state: JobState) -> bool:
    """Does a promise find at the end that it was broken?"""
    try:
        promise.end(SimpleNamespace(state=state, outcome=state.job.state, events=state.seq))
    except AssertionError:
        return True
    return False


def instead(records: list[Record], fact: Event, origin: Origin | None = None, **more: Any) -> set[str]:
    """What breaks when the last blank is this event."""
    place = max(record.seq for record in records if isinstance(record.event, CommandRefused))
    changes = {"event": fact, "origin": origin, **more}
    return shown(records, lambda record: record._replace(**changes) if record.seq == place else record)


def running() -> Drive:
    """Two nodes train; their agents number what they say."""
    return blank(Drive(numbered=True).up())


def restarted() -> Drive:
    """A worker died, everybody was restarted, and training goes on."""
    drive = Drive(numbered=True).up()
    drive.wait(60)
    drive.exit("worker-1-0", 3, step=60)
    return blank(drive.run(61))


def relaunched() -> Drive:
    """A node died twice and has its third incarnation."""
    drive = Drive(numbered=True).up()
    for number in range(2):
        drive.wait(60)
        drive.observe(f"worker-1-{number}", "failed", -9)
        drive.observe(f"worker-1-{number}", "gone")
        drive.join(f"worker-1-{number + 1}")
        drive.run(61 + number)
    return blank(drive)


def waiting() -> Drive:
    """A node died, and its successor is not there yet: there is no world."""
    drive = Drive(numbered=True).up()
    drive.observe("worker-1-0", "failed", -9)
    return blank(drive)


def over() -> Drive:
    """The job has succeeded."""
    drive = restarted()
    for node in ("worker-0-0", "worker-1-0"):
        drive.say(world.ReportFinished(node, 2))
    return blank(drive)


def show(fact: Event, origin: Origin | None = None) -> Callable[[list[Record]], set[str]]:
    """What breaks when this is in the blank's place."""
    return lambda records: instead(records, fact, origin)
