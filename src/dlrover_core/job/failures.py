"""Incidents: one failure from first evidence to recovery, its verdict, its actions, its cost.

What is done about them: `recovery`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from dlrover_core.diagnosis import ladder
from dlrover_core.diagnosis.classify import Verdict, node_death, root, worker_death
from dlrover_core.diagnosis.evidence import OPENING, Evidence
from dlrover_core.job import evidence, job, nodes, world
from dlrover_core.job.incident_lifecycle import INCIDENT, Action
from dlrover_core.job.world import group_of
from dlrover_core.kernel.events import Record, event
from dlrover_core.spec import us

TAIL_BYTES_MAX = 4096
ERROR_MAX = 2048
CLOSED_KEPT = 16
EVIDENCE_MAX = 64
UNKNOWN = -1
# The generation of an incident that broke no world.
ASIDE = 0
# Relaunches before a node that was there for so long are forgiven: reboots weeks apart would spend any budget.
SERVED_S = 3600.0

# What a node's death is answered with: these take the place of a restart that was charged before the death was known.
FOR_NODES = (ladder.RELAUNCH_NODE, ladder.GO_ON_SMALLER)


@event(60)
class WorkerExited(NamedTuple):
    """A worker is dead. ``exit_code`` negative: a signal; ``tail``: its last lines; ``error``: its error file's message."""

    node: str
    generation: int
    rank: int
    exit_code: int
    asked: bool
    step: int
    age_us: int
    tail: str
    error: str = ""


@event(61)
class IncidentOpened(NamedTuple):
    """Something broke. ``ranks``: those known dead; empty for a node's death."""

    incident: int
    node: str
    generation: int
    ranks: tuple[int, ...]


@event(62)
class Diagnosed(NamedTuple):
    """A verdict, from the evidence so far.

    ``revises`` is the seq of the one it replaces; ``blamed`` a node, where its own death is the cause.
    """

    incident: int
    verdict: str
    signature: str
    evidence: tuple[int, ...]
    confidence: float
    revises: int = 0
    blamed: str = ""


@event(63)
class ActionChosen(NamedTuple):
    """What is done about it, by which rule, and what is left of the budget it draws on."""

    incident: int
    action: str
    node: str
    rule: str
    budget_left: int


@event(64)
class IncidentClosed(NamedTuple):
    """Training goes on: ``down_us`` from the death to the next step, ``steps_lost`` begun and made again.

    -1 steps: unknown, because the script does not tell its own numbers (`dlrover_adapters.torch.step`).
    """

    incident: int
    down_us: int
    steps_lost: int


class ReportExit(NamedTuple):
    """An agent's worker died, ``age_us`` ago."""

    node: str
    generation: int
    rank: int
    exit_code: int
    asked: bool = False
    step: int = -1
    age_us: int = 0
    tail: str = ""
    error: str = ""


@dataclass(slots=True)
class Incident:
    """An incident as far as decisions need it; ``state`` by `INCIDENT`."""

    number: int
    node: str
    generation: int
    opened_at: int
    cause: Evidence
    evidence: list[int]
    step: int = -1
    diagnosed_seq: int = 0
    verdict: str = ""
    signature: str = ""
    state: str = INCIDENT.initial
    actions: list[Action] = field(default_factory=list)
    rule: str = ""

    @property
    def action(self) -> str:
        """The newest action; empty before the first."""
        return self.actions[-1].action if self.actions else ""

    @property
    def held(self) -> bool:
        """Does a final action wait for the rest of the evidence?"""
        return self.state == "held"

    @property
    def closed(self) -> bool:
        """Does training go on?"""
        return self.state == "closed"

    def fire(self, trigger: str) -> None:
        """Move by `INCIDENT`."""
        self.state = INCIDENT.fire(f"incident {self.number}", self.state, trigger)

    @property
    def group(self) -> str:
        """The group whose world broke."""
        return group_of(self.node)


@dataclass(slots=True)
class FailureSlice:
    """Open incidents and the last closed ones by number; budgets used; ``last``: the newest death; ``joined``: when, by place."""

    incidents: dict[int, Incident] = field(default_factory=dict)
    number: int = 0
    restarts: int = 0
    relaunches: dict[str, int] = field(default_factory=dict)
    last: Evidence | None = None
    joined: dict[str, int] = field(default_factory=dict)

    def relaunched(self, place: str, now: int) -> int:
        """How many relaunches of a place count: none once its node has served."""
        served = now - self.joined.get(place, now) >= us(SERVED_S)
        return 0 if served else self.relaunches.get(place, 0)

    def of_generation(self, group: str, generation: int) -> Incident | None:
        """The incident that a generation opened, if it is still remembered."""
        found = [one for one in self.incidents.values() if one.generation == generation and one.group == group]
        return found[-1] if found else None

    def unmended(self, group: str) -> Incident | None:
        """The newest open incident of a group that broke a world."""
        found = [one for one in self.incidents.values() if not one.closed and one.group == group and one.generation]
        return found[-1] if found else None


# ---- evolve


def _on_created(slice_: FailureSlice, fact: job.JobCreated, record: Record) -> None:
    """A new run has its budgets whole."""
    slice_.incidents.clear()
    slice_.relaunches.clear()
    slice_.joined.clear()
    slice_.restarts = 0


def _on_scaled(slice_: FailureSlice, fact: job.GroupScaled, record: Record) -> None:
    for index in fact.revived:
        slice_.relaunches.pop(f"{fact.group}-{index}", None)


def _note_exit(slice_: FailureSlice, fact: WorkerExited, record: Record) -> None:
    if fact.asked and not fact.error:
        return
    # Who was killed by us while it told its own error had failed before: its exit code says nothing.
    code = 1 if fact.asked else fact.exit_code
    verdict = worker_death(code, fact.error, fact.tail)
    died = record.at - fact.age_us
    death = Evidence(record.seq, died, fact.node, fact.rank, code, fact.step, _brief(fact), *verdict)
    _note(slice_, death, slice_.of_generation(group_of(fact.node), fact.generation))


def _brief(fact: WorkerExited) -> str:
    if fact.error:
        return fact.error[-ERROR_MAX:]
    lines = [line for line in fact.tail.strip().splitlines() if line.strip()]
    return lines[-1][:500] if lines and fact.exit_code > 0 else ""


def _note_node(slice_: FailureSlice, fact: nodes.NodeFailed | nodes.NodeGone | nodes.NodeLost, record: Record) -> None:
    if isinstance(fact, nodes.NodeGone) and fact.expected:
        return
    how = {nodes.NodeFailed: "failed", nodes.NodeGone: "gone", nodes.NodeLost: "lost"}[type(fact)]
    code = fact.exit_code if isinstance(fact, nodes.NodeFailed) else 0
    verdict: Verdict = node_death(how, code, fact.reason)
    death = Evidence(
        record.seq, record.at, fact.node, -1, code, -1, f"{how}: {fact.reason}" if fact.reason else how, *verdict
    )
    _note(slice_, death, slice_.unmended(group_of(fact.node)))


def _note_evidence(slice_: FailureSlice, fact: evidence.EvidenceSeen, record: Record) -> None:
    if fact.source in OPENING:
        _note(slice_, evidence.of(fact, record), slice_.of_generation(group_of(fact.node), fact.generation))


def _note(slice_: FailureSlice, death: Evidence, incident: Incident | None) -> None:
    slice_.last = death
    if incident is None:
        return
    earliest = min(incident.cause.at, death.at)
    # The cause may change with new evidence; when it began to hurt does not.
    incident.cause = root((incident.cause, death))._replace(at=earliest)
    incident.step = max(incident.step, death.step)
    if len(incident.evidence) < EVIDENCE_MAX:
        incident.evidence.append(death.seq)


def _note_step(slice_: FailureSlice, fact: world.WorkersStopped, record: Record) -> None:
    """Survivors of a dead node know how far the broken generation had come."""
    incident = slice_.of_generation(group_of(fact.node), fact.generation)
    if incident is not None:
        incident.step = max(incident.step, fact.step)


def _on_opened(slice_: FailureSlice, fact: IncidentOpened, record: Record) -> None:
    death = slice_.last
    if death is None:
        raise ValueError(f"incident {fact.incident} opens without a death")
    slice_.number = fact.incident
    slice_.incidents[fact.incident] = Incident(
        fact.incident, fact.node, fact.generation, record.at, death, [death.seq], death.step
    )


def _on_diagnosed(slice_: FailureSlice, fact: Diagnosed, record: Record) -> None:
    incident = slice_.incidents[fact.incident]
    incident.fire("diagnose")
    incident.diagnosed_seq, incident.verdict, incident.signature = record.seq, fact.verdict, fact.signature


def _on_chosen(slice_: FailureSlice, fact: ActionChosen, record: Record) -> None:
    incident = slice_.incidents[fact.incident]
    waits = fact.action == ladder.AWAIT_EVIDENCE
    incident.fire("fail" if fact.action == ladder.FAIL_JOB else "hold" if waits else "act")
    incident.rule = fact.rule
    for one in incident.actions:
        if one.state == "waiting":
            one.fire("supersede")
    if fact.action in FOR_NODES:
        _give_back_restarts(slice_, incident.group)
    chosen = Action(fact.action, fact.node)
    chosen.fire("hold" if waits else "take")
    incident.actions.append(chosen)
    if fact.action == ladder.RESTART_PROCESSES:
        slice_.restarts += 1
    elif fact.action == ladder.RELAUNCH_NODE:
        place = fact.node.rsplit("-", 1)[0]
        slice_.relaunches[place] = slice_.relaunched(place, record.at) + 1
        slice_.joined.pop(place, None)


def _give_back_restarts(slice_: FailureSlice, group: str) -> None:
    """A node's death explains what its world suffered since: the restarts charged meanwhile were not the program's doing."""
    for incident in slice_.incidents.values():
        for one in incident.actions if incident.group == group and not incident.closed else ():
            if one.state == "in_force" and one.action == ladder.RESTART_PROCESSES:
                one.fire("supersede")
                slice_.restarts -= 1


def _on_closed(slice_: FailureSlice, fact: IncidentClosed, record: Record) -> None:
    incident = slice_.incidents[fact.incident]
    incident.fire("close")
    for one in incident.actions:
        one.fire("finish")
    closed = [number for number, incident in slice_.incidents.items() if incident.closed]
    for number in closed[:-CLOSED_KEPT]:
        del slice_.incidents[number]


EVENTS = (WorkerExited, IncidentOpened, Diagnosed, ActionChosen, IncidentClosed)

EVOLVE: Mapping[type, Callable[[Any, Any, Record], None]] = {
    job.JobCreated: _on_created,
    job.GroupScaled: _on_scaled,
    nodes.PlaceReopened: lambda slice_, fact, record: slice_.relaunches.pop(f"{fact.group}-{fact.index}", None),
    nodes.NodeJoined: lambda slice_, fact, record: slice_.joined.update({fact.node.rsplit("-", 1)[0]: record.at}),
    WorkerExited: _note_exit,
    evidence.EvidenceSeen: _note_evidence,
    nodes.NodeFailed: _note_node,
    nodes.NodeGone: _note_node,
    nodes.NodeLost: _note_node,
    world.WorkersStopped: _note_step,
    IncidentOpened: _on_opened,
    Diagnosed: _on_diagnosed,
    ActionChosen: _on_chosen,
    IncidentClosed: _on_closed,
}
