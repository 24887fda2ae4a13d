"""An incident in one line: which node or rank failed, the cause, the action, and the time it took.

``worker-3: CUDA uncorrectable ECC error (signature cuda.ecc) -> isolate host gpu-17, relaunch as worker-3-1; back in 41.0
s``

`Headlines` is fed the records in order, each with the state that they fold to. It returns a line when a decision is made,
another one when the decision changes, and one at the end.
"""

from __future__ import annotations

from typing import NamedTuple, TypeVar

from dlrover_core.diagnosis import ladder, signatures
from dlrover_core.history.phrases import duration, one_line
from dlrover_core.history.words.incidents import action
from dlrover_core.job import incidents, job
from dlrover_core.job.state import JobState
from dlrover_core.kernel.events import Record

T = TypeVar("T")

KEPT = 16
# Actions on a whole node: which of its ranks failed first does not matter.
_NODES = (ladder.RELAUNCH_NODE, ladder.ISOLATE_HOST, ladder.GO_ON_SMALLER)


class Headline(NamedTuple):
    """One incident's line. ``down_us`` -1: the incident is not over, or ended with its coupling set."""

    incident: int
    text: str
    down_us: int = -1


class Headlines:
    """The newest incidents' lines by number, the oldest first; at most `KEPT`."""

    def __init__(self) -> None:
        self.lines: dict[int, Headline] = {}
        self._judged: dict[int, incidents.Diagnosed] = {}
        self._chosen: dict[int, incidents.ActionChosen] = {}

    def feed(self, state: JobState, record: Record) -> Headline | None:
        """Take in the next record; ``state`` is the fold up to and including it. Returns a new line, mostly None."""
        fact = record.event
        if isinstance(fact, job.JobCreated):
            self.lines.clear()
        elif isinstance(fact, incidents.Diagnosed):
            _keep(self._judged, fact.incident, fact)
        elif isinstance(fact, incidents.ActionChosen) and fact.action != ladder.SUSPECTS:
            _keep(self._chosen, fact.incident, fact)
            return self._news(state, fact.incident)
        elif isinstance(fact, incidents.IncidentClosed):
            return self._news(state, fact.incident, fact.down_us, over=True)
        return None

    def _news(self, state: JobState, number: int, down_us: int = -1, *, over: bool = False) -> Headline | None:
        """The line of an incident; None: there is nothing new, or the incident is forgotten."""
        judged, chosen = self._judged.get(number), self._chosen.get(number)
        known = state.incidents.by_number.get(number)
        if chosen is None and (known is None or not known.actions):
            return None
        node = chosen.node if chosen is not None else known.actions[-1].node if known is not None else ""
        done = chosen.action if chosen is not None else known.action if known is not None else ""
        signature = judged.signature if judged is not None else known.signature if known is not None else ""
        rank = judged.rank if judged is not None and done not in _NODES else -1
        text = (
            f"{_who(judged.blamed if judged is not None and judged.blamed else node, rank)}: "
            f"{named(state, signature)} -> {_done(state, done, node, chosen.host if chosen is not None else '')}"
        )
        if over and state.set_of(node) in state.job.given_up:
            # Logs from before `GIVE_UP_SET` have the time until the set was given up; nothing was back then.
            text, down_us = text if done in ladder.ENDINGS else f"{text}; its set is given up", -1
        if down_us >= 0:
            # If no world was broken, the incident ends when the place is filled.
            aside = known is not None and known.generation == incidents.ASIDE
            text += f"; {'filled again after' if aside else 'back in'} {duration(down_us)}"
        told = Headline(number, one_line(text, 400), down_us)
        before = self.lines.get(number)
        _keep(self.lines, number, told)
        return told if before != told else None


def named(state: JobState, signature: str) -> str:
    """A signature's title and id, or the id alone if it has no title."""
    extra = state.job.spec.signatures if state.job.state != "new" else ""
    known = signatures.table(extra).get(signature)
    return f"{known.title} (signature {signature})" if known is not None else f"signature {signature or 'unknown'}"


def _who(node: str, rank: int) -> str:
    place = node.rpartition("-")[0] or node
    return f"{place}, rank {rank}" if rank >= 0 else place


def _done(state: JobState, name: str, node: str, host: str) -> str:
    place, _, incarnation = node.rpartition("-")
    slot = state.nodes.slots.get(place)
    # The same batch may plan the successor, and then the state does not have it yet.
    number = max(slot.incarnation if slot is not None else 0, int(incarnation) + 1) if incarnation.isdigit() else 0
    if name == ladder.ISOLATE_HOST:
        where = host or state.hosts.host_of(node)
        return f"isolate host {where or 'of ' + node}, relaunch as {place}-{number}"
    if name == ladder.RELAUNCH_NODE:
        return f"relaunch as {place}-{number}"
    if name == ladder.GO_ON_SMALLER:
        return f"go on without {place}"
    name_of_set = state.set_of(node)
    return action(name, "" if state.sets.critical(name_of_set) else name_of_set)


def _keep(kept: dict[int, T], number: int, one: T) -> None:
    """Keep the newest lines."""
    kept.pop(number, None)
    kept[number] = one
    while len(kept) > KEPT:
        del kept[next(iter(kept))]
