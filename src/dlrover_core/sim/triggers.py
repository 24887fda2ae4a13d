"""When a fault strikes: written as one reads it, so that a list of faults is a story.

| text | when |
|---|---|
| ``12.5 s`` | that many virtual seconds after the run began |
| ``step 100`` | as soon as training has made step 100 |
| ``event 57`` | as soon as record 57 is durable |
| ``WorldFormed``, ``NodeJoined worker-1-1`` | as soon as a record of this kind is durable, one that names all further words |
| ``node worker-1 planned`` ... ``joined, running, failed, gone, lost, drained, suspected`` | of a node of this place |
| ``node worker-1 relaunched`` | its successor is planned |
| ``world N formed`` | generation N |
| ``incident opened``, ``incident closed``, ``relaunch requested``, ``restart requested`` | likewise |
| ``all running`` | every group has an active world, all of whose members have started their workers, and makes steps |
| ``job over`` | it has ended, in whatever way |

A fault waits for its trigger from the moment at which the fault before it struck (or the run began): two faults at the same
text are two occasions, except for time, steps and numbers, which only pass once.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from dlrover_core.errors import PlanError
from dlrover_core.job.state import REGISTRY

if TYPE_CHECKING:
    from dlrover_core.job.state import JobState
    from dlrover_core.kernel.events import Record

_TIME = re.compile(r"(\d+(?:\.\d+)?) ?s")
_STEP = re.compile(r"step (\d+)")
_SEQ = re.compile(r"event (\d+)")
_NODE = re.compile(r"node ([a-z][a-z0-9]*-\d+(?:-\d+)?) ([a-z]+)")
_WORLD = re.compile(r"world (\d+) formed")

ABOUT_NODES = {
    "planned": "NodePlanned",
    "relaunched": "NodePlanned",
    "joined": "NodeJoined",
    "running": "NodeRunning",
    "failed": "NodeFailed",
    "gone": "NodeGone",
    "lost": "NodeLost",
    "drained": "NodeDrained",
    "suspected": "NodeSuspected",
}
PHRASES = {
    "incident opened": ("IncidentOpened", ()),
    "incident closed": ("IncidentClosed", ()),
    "relaunch requested": ("ActionChosen", ("RELAUNCH_NODE",)),
    "restart requested": ("ActionChosen", ("RESTART_PROCESSES",)),
}
STATES = ("all running", "job over")
EVENT_NAMES = frozenset(REGISTRY.by_name)


class Trigger(NamedTuple):
    """One of five kinds: ``time`` (microseconds), ``step``, ``seq`` (a number each), ``record`` (kind and words), ``state``.

    ``words`` must each equal, or begin with a dash after, some field of the record as text.
    """

    kind: str
    number: int = 0
    name: str = ""
    words: tuple[str, ...] = ()
    successor: bool = False

    def hit(self, record: Record) -> bool:
        """Is this the record that a ``record`` or ``seq`` trigger waits for?"""
        if self.kind == "seq":
            return record.seq >= self.number
        if self.kind != "record" or type(record.event).__name__ != self.name:
            return False
        if self.successor and getattr(record.event, "incarnation", 0) == 0:
            return False
        fields = [str(field) for field in record.event]
        return all(any(field == word or field.startswith(f"{word}-") for field in fields) for word in self.words)

    def holds(self, state: JobState) -> bool:
        """Does what a ``state`` trigger waits for hold?"""
        if self.kind != "state":
            return False
        if self.name == "job over":
            return state.job.over
        live = state.job.live
        sets = [name for name in state.sets.all(state.job.spec) if name not in state.job.given_up] if live else []
        return bool(sets) and all(_runs(state, name) for name in sets)


def _runs(state: JobState, name: str) -> bool:
    """Do all workers of a set run, and has one of them made a step? Whom the job's end does not wait for may make none."""
    current = state.world.at(name)
    if not current.active or len(current.started) < len(current.members):
        return False
    silent = name not in state.progress.groups and not state.sets.ends(name)
    return silent or state.progress.of(name).generation == current.generation


def parse(text: str) -> Trigger:
    """The trigger that a text describes. Raises `PlanError`, which lists what may be written."""
    text = " ".join(text.split())
    for pattern, kind, scale in ((_TIME, "time", 1_000_000), (_STEP, "step", 1), (_SEQ, "seq", 1)):
        found = pattern.fullmatch(text)
        if found is not None:
            return Trigger(kind, round(float(found[1]) * scale))
    if text in STATES:
        return Trigger("state", name=text)
    if text in PHRASES:
        name, words = PHRASES[text]
        return Trigger("record", name=name, words=words)
    found = _NODE.fullmatch(text)
    if found is not None and found[2] in ABOUT_NODES:
        return Trigger("record", name=ABOUT_NODES[found[2]], words=(found[1],), successor=found[2] == "relaunched")
    found = _WORLD.fullmatch(text)
    if found is not None:
        return Trigger("record", name="WorldFormed", words=(found[1],))
    name, *rest = text.split() or [""]
    if name in EVENT_NAMES:
        return Trigger("record", name=name, words=tuple(rest))
    raise PlanError(
        f"{text!r} is no moment. Write '12.5 s', 'step 100', 'event 57', an event's name with or without a node's "
        f"('NodeJoined worker-1'), 'node worker-1 {{{', '.join(ABOUT_NODES)}}}', 'world N formed', "
        f"{', '.join(repr(one) for one in (*PHRASES, *STATES))}"
    )
