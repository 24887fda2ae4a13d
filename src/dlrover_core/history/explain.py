"""Why something happened, and what came of it: the links between records, followed both ways.

`Record.cause` links what the engine decided to what it decided upon. Observations from outside have no cause in the log; yet
they answer something: a node joins because it was planned, a first step is made by a world that was formed. Those links are
added here by name, and so are the evidence of a diagnosis, the diagnosis that it revises, and the action that a later one of
the same incident continues. Links lead only backwards in the log, so there is no loop to be caught in.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from dlrover_core.history.incidents import is_death
from dlrover_core.job import checkpoints, incidents, job, nodes, plans, progress, world
from dlrover_core.job.names import group_of
from dlrover_core.kernel.events import Event, Record

BEFORE_MAX = 200
AFTER_MAX = 40
ENDS = (job.JobSucceeded, job.JobFailed, job.JobStopped, job.JobAbandoned)


class Fact(NamedTuple):
    """One record of an explanation, and the seqs of those it follows from."""

    record: Record
    follows: tuple[int, ...]


class Explanation(NamedTuple):
    """Why ``target`` happened. ``before`` ends with the target; ``left_out`` counts what followed beyond ``after``."""

    job: str
    began: int
    target: Record
    before: tuple[Fact, ...]
    after: tuple[Fact, ...]
    left_out: int
    end: Record | None


class _Links:
    """What each record follows from, found in one pass."""

    def __init__(self) -> None:
        self.follows: dict[int, tuple[int, ...]] = {}
        self._planned: dict[str, int] = {}
        self._released: dict[str, int] = {}
        self._formed: dict[tuple[str, int], int] = {}
        self._dissolved: dict[str, int] = {}
        self._change: dict[str, int] = {}
        self._opened: dict[int, int] = {}
        self._judged: dict[int, int] = {}
        self._acted: dict[int, int] = {}
        self._ordered: dict[tuple[str, int, int], int] = {}
        self._failing: dict[str, int] = {}
        self._stopping = self._suspended = 0

    def add(self, record: Record) -> None:
        found = (record.cause, *self._named(record.event, record))
        self.follows[record.seq] = tuple(sorted({seq for seq in found if 0 < seq < record.seq}))
        self._remember(record.event, record.seq)

    def _named(self, fact: Event, record: Record) -> Iterable[int]:
        """The links that the engine did not write down."""
        if isinstance(fact, incidents.Diagnosed):
            return (*fact.evidence, fact.revises)
        if isinstance(fact, incidents.ActionChosen) and record.cause != self._judged.get(fact.incident):
            # A final action that was held: time, or the last rank's word, released it.
            return (self._acted.get(fact.incident, 0), self._judged.get(fact.incident, 0))
        if isinstance(fact, incidents.IncidentClosed):
            return (self._opened.get(fact.incident, 0),)
        if isinstance(fact, (nodes.NodePending, nodes.NodeRunning, nodes.NodeJoined)):
            return (self._planned.get(fact.node, 0),)
        if isinstance(fact, nodes.NodeLeft) or (isinstance(fact, nodes.NodeGone) and fact.expected):
            return (self._released.get(fact.node, 0),)
        if isinstance(fact, (progress.FirstStep, world.WorkersStarted)):
            return (self._formed.get((group_of(fact.node), fact.generation), 0),)
        if isinstance(fact, checkpoints.Restored):
            return (self._formed.get((group_of(fact.node), fact.generation), 0),)
        if isinstance(fact, checkpoints.KeepingStarted):
            return (self._formed.get((fact.group, fact.generation), 0),)
        if isinstance(fact, checkpoints.StepsHeld):
            group = group_of(fact.node)
            return (self._dissolved.get(group) or self._formed.get((group, fact.generation + 1), 0),)
        if isinstance(fact, checkpoints.CheckpointCommitted):
            return (self._ordered.get((fact.group, fact.generation, fact.step), 0),)
        if isinstance(fact, checkpoints.StorageBack):
            return (self._failing.get(fact.node, 0),)
        if isinstance(fact, world.WorkersStopped):
            return (self._dissolved.get(group_of(fact.node), 0),)
        if isinstance(fact, world.WorldFormed):
            return (self._dissolved.get(fact.group, 0),)
        if isinstance(fact, (plans.BoundaryAsked, plans.WorldPlanDropped)) or (
            isinstance(fact, world.WorldDissolved) and fact.planned
        ):
            return (self._change.get(fact.group, 0),)
        if isinstance(fact, (checkpoints.RanksArmed, checkpoints.StepsHeld)) and fact.plan:
            return (self._change.get(group_of(fact.node), 0),)
        if isinstance(fact, job.JobStopped):
            return (self._stopping,)
        if isinstance(fact, job.JobResumed):
            return (self._suspended,)
        return ()

    def _remember(self, fact: Event, seq: int) -> None:
        if isinstance(fact, nodes.NodePlanned):
            self._planned[fact.node] = seq
        elif isinstance(fact, nodes.NodeReleased):
            self._released[fact.node] = seq
        elif isinstance(fact, world.WorldFormed):
            self._formed[fact.group, fact.generation] = seq
            self._dissolved.pop(fact.group, None)
        elif isinstance(fact, world.WorldDissolved):
            self._dissolved[fact.group] = seq
            self._change.pop(fact.group, None)
        elif isinstance(fact, plans.WorldPlanned):
            self._change[fact.group] = seq
        elif isinstance(fact, plans.WorldPlanDropped):
            self._change.pop(fact.group, None)
        elif isinstance(fact, incidents.IncidentOpened):
            self._opened[fact.incident] = seq
        elif isinstance(fact, incidents.Diagnosed):
            self._judged[fact.incident] = seq
        elif isinstance(fact, incidents.ActionChosen):
            self._acted[fact.incident] = seq
        elif isinstance(fact, checkpoints.SaveOrdered):
            self._ordered[fact.group, fact.generation, fact.step] = seq
        elif isinstance(fact, checkpoints.StorageFailed):
            self._failing[fact.node] = seq
        elif isinstance(fact, job.JobStopping):
            self._stopping = seq
        elif isinstance(fact, job.JobSuspended):
            self._suspended = seq


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
    """The record and everything that it follows from, oldest first; the nearest `BEFORE_MAX`."""
    found, edge = {seq}, [seq]
    while edge and len(found) < BEFORE_MAX:
        edge = sorted({one for later in edge for one in links.follows.get(later, ())} - found, reverse=True)
        found.update(edge[: BEFORE_MAX - len(found)])
    return sorted(found)


def _descendants(links: _Links, known: dict[int, Record], seq: int) -> list[int]:
    """Everything that followed from the record, oldest first. Another death is a story of its own and is left out."""
    found = {seq}
    for later in sorted(links.follows):
        if later > seq and found.intersection(links.follows[later]) and not is_death(known[later].event):
            found.add(later)
    found.discard(seq)
    return sorted(found)
