"""Why something happened, and what followed from it: the links between records, in both directions.

`Record.cause` links a decision to the record that it answers. Observations from outside have no cause in the log, yet they
answer something: a node joins because it was planned, and a world makes its first step because it was formed. Such links
are added here by name. So are the evidence of a diagnosis, the diagnosis that it revises, and the earlier action of the
same incident. Links lead only backwards in the log, so they form no loop.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any, NamedTuple

from dlrover_core.history.incidents import is_death
from dlrover_core.history.plain import plain, record_of
from dlrover_core.history.words import about
from dlrover_core.job import incidents, job
from dlrover_core.job.sets import NO_SETS, sets_of
from dlrover_core.kernel.events import Record

BEFORE_MAX = 200
AFTER_MAX = 40
ENDS = (job.JobSucceeded, job.JobFailed, job.JobStopped, job.JobAbandoned)


class Fact(NamedTuple):
    """One record of an explanation, and the numbers of the records that it follows from."""

    record: Record
    follows: tuple[int, ...]


class Explanation(NamedTuple):
    """Why a record happened.

    began:    when the run began, microseconds by the leader's clock
    target:   the record
    before:   what it follows from, oldest first; ends with the target
    after:    what followed from it
    left_out: number of later records that followed too
    end:      the end of the run; None: it has not ended
    """

    job: str
    began: int
    target: Record
    before: tuple[Fact, ...]
    after: tuple[Fact, ...]
    left_out: int
    end: Record | None


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


class _Links:
    """The records that each record follows from, found in one pass."""

    def __init__(self) -> None:
        self.sets, self.cause = NO_SETS, 0
        self.follows: dict[int, tuple[int, ...]] = {}
        self._newest: dict[tuple[type, Hashable], int] = {}

    def newest(self, kind: type, key: Hashable = None) -> int:
        return self._newest.get((kind, key), 0)

    def add(self, record: Record) -> None:
        fact, self.cause = record.event, record.cause
        if isinstance(fact, job.JobCreated):
            self.sets = sets_of(fact.spec)
        said = about(type(fact))
        found = (record.cause, *(said.follows(fact, self) if said.follows is not None else ()))
        self.follows[record.seq] = tuple(sorted({seq for seq in found if 0 < seq < record.seq}))
        if said.ends is not None:
            kind, key_of = said.ends
            self._newest.pop((kind, key_of(fact)), None)
        if said.key is not None:
            self._newest[type(fact), said.key(fact)] = record.seq


class _Run(NamedTuple):
    """One run in the log: its records from ``first`` on, when it began, and what ended it."""

    name: str
    first: int
    began: int
    end: Record | None


def explanation_of(records: Iterable[Record], seq: int = 0) -> Explanation | None:
    """Why record ``seq`` happened; None where there is no such record.

    Without ``seq``, of the last run: its end if it failed, else the last action chosen, else its end, else its newest record.
    """
    links, known = _Links(), dict[int, Record]()
    runs: list[_Run] = []
    for record in records:
        links.add(record)
        known[record.seq] = record
        if isinstance(record.event, job.JobCreated) or not runs:
            name = record.event.job if isinstance(record.event, job.JobCreated) else ""
            runs.append(_Run(name, record.seq, record.at, None))
        elif isinstance(record.event, ENDS):
            runs[-1] = runs[-1]._replace(end=record)
    target = known.get(seq) if seq else _worth_explaining(known, runs)
    if target is None:
        return None
    run = next(one for one in reversed(runs) if one.first <= target.seq)
    after = _descendants(links, known, target.seq)
    return Explanation(
        job=run.name or runs[-1].name,
        began=run.began,
        target=target,
        before=tuple(Fact(known[one], links.follows[one]) for one in _ancestors(links, target.seq) if one in known),
        after=tuple(Fact(known[one], links.follows[one]) for one in after[:AFTER_MAX]),
        left_out=max(0, len(after) - AFTER_MAX),
        end=run.end,
    )


def _worth_explaining(known: dict[int, Record], runs: list[_Run]) -> Record | None:
    if not runs:
        return None
    end = runs[-1].end
    if end is not None and isinstance(end.event, job.JobFailed):
        return end
    ours = (record for seq, record in known.items() if seq >= runs[-1].first)
    actions = [record for record in ours if isinstance(record.event, incidents.ActionChosen)]
    return actions[-1] if actions else end or known[max(known)]


def _ancestors(links: _Links, seq: int) -> list[int]:
    """The record and all that it follows from, oldest first; the nearest `BEFORE_MAX`."""
    found, edge = {seq}, [seq]
    while edge and len(found) < BEFORE_MAX:
        edge = sorted({one for later in edge for one in links.follows.get(later, ())} - found, reverse=True)
        found.update(edge[: BEFORE_MAX - len(found)])
    return sorted(found)


def _descendants(links: _Links, known: dict[int, Record], seq: int) -> list[int]:
    """All that followed from the record, oldest first. Another death is another story and is left out."""
    found = {seq}
    for later in sorted(links.follows):
        if later > seq and found.intersection(links.follows[later]) and not is_death(known[later].event):
            found.add(later)
    found.discard(seq)
    return sorted(found)
