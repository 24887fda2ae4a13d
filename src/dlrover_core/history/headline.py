"""An incident in one line: who failed, of what, what was done about it, and how long it took.

``worker-3: CUDA uncorrectable ECC error (signature cuda.ecc) -> isolate host gpu-17, relaunch as worker-3-1; back in 41.0 s``

`Headlines` is fed records in order together with the state they fold to. It has a line when something is decided, another one
when that changes, and one at the end.
"""

from __future__ import annotations

from typing import NamedTuple, TypeVar

from dlrover_core.diagnosis import ladder, signatures
from dlrover_core.history.phrases import action, duration, one_line
from dlrover_core.job import incidents, job
from dlrover_core.job.state import JobState
from dlrover_core.kernel.events import Record

T = TypeVar("T")

KEPT = 16
# What is done to a node as a whole: which of its ranks was first does not matter.
_NODES = (ladder.RELAUNCH_NODE, ladder.ISOLATE_HOST, ladder.GO_ON_SMALLER)


class Headline(NamedTuple):
    """One incident's line. ``down_us`` -1: it is not over."""

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
        """Take in the next record; ``state`` is the fold up to and including it. The line that is news, mostly none."""
        fact = record.event
        if isinstance(fact, job.JobCreated):
            self.lines.clear()
        elif isinstance(fact, incidents.Diagnosed):
            _keep(self._judged, fact.incident, fact)
        elif isinstance(fact, incidents.ActionChosen) and fact.action != ladder.SUSPECTS:
            _keep(self._chosen, fact.incident, fact)
            return self._news(state, fact.incident, -1)
        elif isinstance(fact, incidents.IncidentClosed):
            return self._news(state, fact.incident, fact.down_us)
        return None

    def _news(self, state: JobState, number: int, down_us: int) -> Headline | None:
        """The line of an incident; None where it says nothing new, or all that was known of it is forgotten."""
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
        if down_us >= 0:
            # Where no world was broken, a filled place is all that there is to say.
            aside = known is not None and known.generation == incidents.ASIDE
            text += f"; {'filled again after' if aside else 'back in'} {duration(down_us)}"
        told = Headline(number, one_line(text, 400), down_us)
        before = self.lines.get(number)
        _keep(self.lines, number, told)
        return told if before != told else None


def named(state: JobState, signature: str) -> str:
    """What a signature means and its id, or the id alone where nobody has given it a title."""
    extra = state.job.spec.signatures if state.job.state != "new" else ""
    known = signatures.table(extra).get(signature)
    return f"{known.title} (signature {signature})" if known is not None else f"signature {signature or 'unknown'}"


def _who(node: str, rank: int) -> str:
    place = node.rpartition("-")[0] or node
    return f"{place}, rank {rank}" if rank >= 0 else place


def _done(state: JobState, name: str, node: str, host: str) -> str:
    place, _, incarnation = node.rpartition("-")
    slot = state.nodes.slots.get(place)
    # Its successor may have been planned by the same batch, and may not be in the state yet.
    number = max(slot.incarnation if slot is not None else 0, int(incarnation) + 1) if incarnation.isdigit() else 0
    if name == ladder.ISOLATE_HOST:
        where = host or state.hosts.host_of(node)
        return f"isolate host {where or 'of ' + node}, relaunch as {place}-{number}"
    if name == ladder.RELAUNCH_NODE:
        return f"relaunch as {place}-{number}"
    if name == ladder.GO_ON_SMALLER:
        return f"go on without {place}"
    return action(name)


def _keep(kept: dict[int, T], number: int, one: T) -> None:
    """Remember the newest of them."""
    kept.pop(number, None)
    kept[number] = one
    while len(kept) > KEPT:
        del kept[next(iter(kept))]
