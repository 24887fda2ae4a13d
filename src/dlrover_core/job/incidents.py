"""Incidents: one failure from first evidence to recovery, its verdict, its actions, its cost.

What is done about them: `rules.incidents`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from dlrover_core.diagnosis import ladder
from dlrover_core.diagnosis.evidence import CASC, ERROR, EXIT, LOG, NODE, OPENING, PLAT, Evidence
from dlrover_core.job import evidence, incident_lifecycle, job, nodes, progress, upcasts, world
from dlrover_core.job.crash_loops import Cycles
from dlrover_core.job.evidence import Spent
from dlrover_core.job.incident_lifecycle import Action
from dlrover_core.job.memo import unanswered
from dlrover_core.job.names import group_of
from dlrover_core.kernel.engine import Facts
from dlrover_core.kernel.events import Record, event
from dlrover_core.kernel.wire import command
from dlrover_core.spec import us

TAIL_BYTES_MAX = 4096
ERROR_MAX = 2048
CLOSED_KEPT = 16
EVIDENCE_MAX = 64
# Of what was seen so much is kept to be judged again, each with one line; copies are not kept.
KNOWN_MAX = 96
LINE_MAX = 500
# Incidents that are forgotten keep what they explained from explaining another for as long as it could.
SPENT_S, SPENT_MAX = 2 * evidence.WINDOW_S, 256
HISTORY_MAX = 64
UNKNOWN = -1
ASIDE = evidence.ASIDE
# Relaunches before a node that was there for so long are forgiven: reboots weeks apart would spend any budget.
SERVED_S = 3600.0


@event(60, version=2, upcast={1: upcasts.exit_1})
class WorkerExited(NamedTuple):
    """A worker is dead. ``exit_code`` negative: a signal; ``tail``: its last lines; ``error``: its error file's message.

    ``signature``, ``verdict`` and ``confidence``: what that was by the table of then; ``place``: where in the user's program.
    """

    node: str
    generation: int
    rank: int
    exit_code: int
    asked: bool
    step: int
    age_us: int
    tail: str
    error: str = ""
    signature: str = ""
    place: str = ""
    verdict: str = ""
    confidence: float = 0.0


@event(61)
class IncidentOpened(NamedTuple):
    """Something broke. ``ranks``: those known dead; empty for a node's death."""

    incident: int
    node: str
    generation: int
    ranks: tuple[int, ...]


@event(62, version=2, upcast={1: lambda fields: (*fields, -1, "", (), "", "", "", "", "", "")})
class Diagnosed(NamedTuple):
    """A verdict, from the evidence so far; the first of the ``evidence`` is the root.

    ``revises``: the seq of the one it replaces; ``blamed``: a node that is dead, or at fault. ``rank``, ``host``: whose fault, as
    far as known. ``discarded``: evidence that is no cause; ``why``: by which rule of the procedure. ``hint``: what usually
    suffices; ``place``: where in the user's program. ``node`` and ``text``: the root's own, the text where it is no death.
    ``budget``: what a restart in place for this is charged to; one that was charged to another is charged anew.
    """

    incident: int
    verdict: str
    signature: str
    evidence: tuple[int, ...]
    confidence: float
    revises: int = 0
    blamed: str = ""
    rank: int = -1
    host: str = ""
    discarded: tuple[int, ...] = ()
    why: str = ""
    hint: str = ""
    place: str = ""
    node: str = ""
    text: str = ""
    budget: str = ""


@event(63, version=2, upcast={1: upcasts.action_1})
class ActionChosen(NamedTuple):
    """What is done about it, by which rule, and what is left of the budget it draws on.

    ``budget``: that one's name; ``budget_before``: what was left of it, -1: unknown; ``host``: that is isolated. ``memory_mib``:
    what the group's nodes get from now on, 0: as before; ``pause_us``: how long the next world waits.
    """

    incident: int
    action: str
    node: str
    rule: str
    budget_left: int
    budget: str = ""
    budget_before: int = -1
    host: str = ""
    memory_mib: int = 0
    pause_us: int = 0


@event(64)
class IncidentClosed(NamedTuple):
    """Training goes on: ``down_us`` from the death to the next step, ``steps_lost`` begun and made again.

    -1 steps: unknown, because the script does not tell its own numbers (`dlrover_adapters.torch.step`).
    """

    incident: int
    down_us: int
    steps_lost: int


@command(9)
class ReportExit(NamedTuple):
    """An agent's worker died, ``age_us`` ago. ``signature`` and ``place``: what its agent knows it by; empty: nothing."""

    node: str
    generation: int
    rank: int
    exit_code: int
    asked: bool = False
    step: int = -1
    age_us: int = 0
    tail: str = ""
    error: str = ""
    signature: str = ""
    place: str = ""


Incident = incident_lifecycle.Incident


# What holds of budgets after every event; `IncidentSlice.check` says what does not.
#
#   N        `number`: the number of the newest incident; I are those that are remembered
#   a        an action of one of I: it counts if it starts processes again in place, and was not superseded
#   R, A     `restarts`: what is charged to `max_restarts`; of that, the a that count there
#   Q        `software`: when restarts were charged to the budget of an hour, and not given back
#   B(p)     `relaunches`: the nodes that place p was given anew
#
#   number   the numbers of I ascend and end at N at the latest
#   charged  A <= R: what was charged stays so while its action counts; of incidents that are forgotten A knows nothing
#   hour     Q ascends
#   places   B(p) >= 1
#   held     an incident is held exactly while its newest action waits


@dataclass(slots=True)
class IncidentSlice:
    """Open incidents and the last closed ones by number; budgets used; ``joined``: when, by place.

    ``deaths``: those of the newest moment, by record: an incident opens with the one that its record's cause tells.
    ``software``: when restarts were charged to that budget; ``memory``: what a group's nodes get, in MiB; ``history``: the roots
    of the newest incidents, by number; ``cycles``: what led to steps, by group.
    ``spent``: of incidents that are no longer remembered.
    """

    by_number: dict[int, Incident] = field(default_factory=dict)
    number: int = 0
    restarts: int = 0
    relaunches: dict[str, int] = field(default_factory=dict)
    deaths: dict[int, Evidence] = field(default_factory=dict)
    joined: dict[str, int] = field(default_factory=dict)
    software: list[int] = field(default_factory=list)
    memory: dict[str, int] = field(default_factory=dict)
    history: dict[int, Evidence] = field(default_factory=dict)
    cycles: dict[str, Cycles] = field(default_factory=dict)
    spent: list[Spent] = field(default_factory=list)

    def of(self, group: str) -> Cycles:
        """What led to steps in a group."""
        return self.cycles.get(group) or Cycles()

    def software_used(self, now: int) -> int:
        """Restarts of the last hour that were charged to the system's own failures."""
        return sum(at > now - us(3600.0) for at in self.software)

    def relaunched(self, place: str, now: int) -> int:
        """How many relaunches of a place count: none once its node has served."""
        served = now - self.joined.get(place, now) >= us(SERVED_S)
        return 0 if served else self.relaunches.get(place, 0)

    def of_generation(self, group: str, generation: int) -> Incident | None:
        """The incident that a generation opened, if it is still remembered."""
        found = [one for one in self.by_number.values() if one.generation == generation and one.group == group]
        return found[-1] if found else None

    def newest(self, group: str) -> Incident | None:
        """The newest remembered incident of a group."""
        found = [one for one in self.by_number.values() if one.group == group]
        return found[-1] if found else None

    def unmended(self, group: str) -> Incident | None:
        """The newest open incident of a group that broke a world."""
        found = [one for one in self.by_number.values() if not one.closed and one.group == group and one.generation]
        return found[-1] if found else None

    def check(self) -> Iterator[str]:
        """What of the formula above does not hold."""
        counted = before = 0
        for number, one in self.by_number.items():
            if not before < number == one.number <= self.number:
                yield f"number: I = {list(self.by_number)}, N = {self.number}"
            before = number
            if not one.actions:
                continue
            if (one.state == "held") != (one.actions[-1].state == "waiting"):
                yield f"held: incident {one.number} is {one.state}, {one.actions[-1:]}"
            for action in one.actions:
                if action.budget == ladder.RESTARTS and action.state in ("in_force", "done"):
                    counted += action.action in ladder.IN_PLACE
        if counted > self.restarts:
            yield f"charged: A = {counted}, R = {self.restarts}"
        if self.software and self.software != sorted(self.software):
            yield f"hour: Q = {self.software}"
        if self.relaunches and min(self.relaunches.values()) < 1:
            yield f"places: B = {self.relaunches}"


# ---- evolve


def _on_created(slice_: IncidentSlice, fact: job.JobCreated, record: Record) -> None:
    """A new run has its budgets whole; what spoke against a host speaks on."""
    slice_.by_number.clear()
    slice_.deaths.clear()
    slice_.relaunches.clear()
    slice_.joined.clear()
    slice_.restarts = 0
    slice_.software.clear()
    slice_.memory.clear()
    slice_.cycles.clear()
    slice_.spent.clear()


def _on_scaled(slice_: IncidentSlice, fact: job.GroupScaled, record: Record) -> None:
    for index in fact.revived:
        slice_.relaunches.pop(f"{fact.group}-{index}", None)


def _note_exit(slice_: IncidentSlice, fact: WorkerExited, record: Record) -> None:
    _step(slice_, group_of(fact.node), fact.step)
    if fact.asked and not fact.error:
        return
    # Who was killed by us while it told its own error had failed before: its exit code says nothing.
    code = 1 if fact.asked else fact.exit_code
    bare = fact.signature.startswith("exit.")
    source = ERROR if fact.error and not bare else EXIT if bare else LOG
    death = Evidence(
        record.seq,
        record.at - fact.age_us,
        fact.node,
        fact.rank,
        code,
        fact.step,
        _brief(fact),
        fact.verdict,
        fact.signature,
        fact.confidence,
        source,
        place=fact.place,
    )
    _note(slice_, death, slice_.of_generation(group_of(fact.node), fact.generation), record.cause)


def _brief(fact: WorkerExited) -> str:
    lines = [line for line in (fact.error or fact.tail).strip().splitlines() if line.strip()]
    return lines[-1][:LINE_MAX] if lines and (fact.error or fact.exit_code > 0) else ""


def _note_node(slice_: IncidentSlice, fact: nodes.NodeFailed | nodes.NodeGone | nodes.NodeLost, record: Record) -> None:
    if isinstance(fact, nodes.NodeGone) and fact.expected:
        return
    how = {nodes.NodeFailed: "failed", nodes.NodeGone: "gone", nodes.NodeLost: "lost"}[type(fact)]
    code = fact.exit_code if isinstance(fact, nodes.NodeFailed) else 0
    text = f"{how}: {fact.reason}" if fact.reason else how
    verdict = upcasts.node_death(how, code, fact.reason)
    death = Evidence(record.seq, record.at, fact.node, -1, code, -1, text, *verdict, NODE)
    _note(slice_, death, slice_.unmended(group_of(fact.node)), record.cause)


def _note_evidence(slice_: IncidentSlice, fact: evidence.EvidenceSeen, record: Record) -> None:
    one = evidence.of(fact, record)
    if fact.source in OPENING:
        _note(slice_, one, slice_.of_generation(group_of(fact.node), fact.generation), record.cause)
        return
    incident = slice_.newest(group_of(fact.node))
    if incident is not None and fact.generation in (0, incident.generation) and incident.covers(one):
        _remember(incident, one)


def _note(slice_: IncidentSlice, death: Evidence, incident: Incident | None, cause: int) -> None:
    slice_.deaths = {**unanswered(slice_.deaths, cause), death.seq: death}
    if incident is None:
        return
    earliest = min(incident.cause.at, death.at)
    # The cause may change with new evidence; when it began to hurt does not.
    if not incident.why:
        incident.cause = upcasts.root((incident.cause, death))
    incident.cause = incident.cause._replace(at=earliest)
    incident.step = max(incident.step, death.step)
    _remember(incident, death)


def _remember(incident: Incident, one: Evidence) -> None:
    """Keep it to be judged. Where there is no more room a cascade gives way to what is none."""
    if len(incident.evidence) < EVIDENCE_MAX:
        incident.evidence.append(one.seq)
    copies = one.verdict == CASC and any(
        (other.node, other.signature, other.subject) == (one.node, one.signature, one.subject)
        for other in incident.known
    )
    if copies:
        return
    if len(incident.known) >= KNOWN_MAX:
        spare = [place for place, other in enumerate(incident.known) if other.verdict == CASC]
        if not spare or one.verdict == CASC:
            return
        del incident.known[spare[-1]]
    incident.known.append(one)


def _note_step(slice_: IncidentSlice, fact: world.WorkersStopped, record: Record) -> None:
    """Survivors of a dead node know how far the broken generation had come."""
    _step(slice_, group_of(fact.node), fact.step)
    incident = slice_.of_generation(group_of(fact.node), fact.generation)
    if incident is not None:
        incident.step = max(incident.step, fact.step)


def _step(slice_: IncidentSlice, group: str, step: int) -> None:
    known = slice_.cycles.get(group)
    if known is not None:
        known.reach(step)


def _on_first(slice_: IncidentSlice, fact: progress.FirstStep, record: Record) -> None:
    slice_.cycles.setdefault(group_of(fact.node), Cycles()).first(fact.generation, fact.step, told=fact.told)


def _on_formed(slice_: IncidentSlice, fact: world.WorldFormed, record: Record) -> None:
    slice_.cycles.setdefault(fact.group, Cycles()).formed(record.at)
    for incident in slice_.by_number.values():
        if incident.group == fact.group and incident.generation != ASIDE:
            incident.over_at = incident.over_at or record.at


def _on_started(slice_: IncidentSlice, fact: world.WorkersStarted, record: Record) -> None:
    slice_.cycles.setdefault(group_of(fact.node), Cycles()).started(record.at)


def _on_opened(slice_: IncidentSlice, fact: IncidentOpened, record: Record) -> None:
    death = slice_.deaths.get(record.cause)
    if death is None:
        raise ValueError(f"incident {fact.incident} opens because of record {record.cause}, which tells of no death")
    slice_.number = fact.incident
    opened = Incident(fact.incident, fact.node, fact.generation, record.at, death, [], death.step)
    _remember(opened, death)
    slice_.by_number[fact.incident] = opened
    if fact.generation != ASIDE:
        ended = slice_.cycles.setdefault(opened.group, Cycles())
        ended.broke(fact.incident, fact.generation, death.at, counts=bool(fact.ranks))


def _on_diagnosed(slice_: IncidentSlice, fact: Diagnosed, record: Record) -> None:
    incident = slice_.by_number[fact.incident]
    incident.fire("diagnose")
    incident.diagnosed_seq, incident.verdict, incident.signature = record.seq, fact.verdict, fact.signature
    if not fact.why:
        return
    incident.hint, incident.place, incident.host = fact.hint, fact.place, fact.host
    incident.blamed, incident.confidence, incident.why = fact.blamed, fact.confidence, fact.why
    known = next((one for one in incident.known if one.seq == fact.evidence[0]), None)
    found = known or Evidence(fact.evidence[0], 0, fact.node, fact.rank, 0, -1, fact.text, "", "", 0.0)
    incident.cause = found._replace(
        at=incident.cause.at, verdict=fact.verdict, signature=fact.signature, confidence=fact.confidence
    )
    for seq in fact.evidence:
        if seq not in incident.evidence and len(incident.evidence) < EVIDENCE_MAX:
            incident.evidence.append(seq)
    if fact.evidence[0] not in incident.evidence:
        # The root always has its place.
        incident.evidence[-1] = fact.evidence[0]
    past = incident.cause._replace(text="", host=fact.host or incident.cause.host, place=fact.place)
    slice_.history[fact.incident] = past
    while len(slice_.history) > HISTORY_MAX:
        del slice_.history[next(iter(slice_.history))]
    slice_.cycles.setdefault(incident.group, Cycles()).judge(
        fact.incident, fact.signature, fact.place, incident.step, free=fact.verdict == PLAT
    )
    _charge_anew(slice_, incident, fact.budget, record)


def _charge_anew(slice_: IncidentSlice, incident: Incident, budget: str, record: Record) -> None:
    """Budgets follow the verdict: what a restart in place was charged to is given back."""
    for one in incident.actions:
        if one.action in ladder.IN_PLACE and one.state != "superseded" and budget and one.budget != budget:
            _give_back(slice_, one)
            one.budget = budget
            _charge(slice_, budget, record)


def _charge(slice_: IncidentSlice, budget: str, record: Record) -> None:
    if budget == ladder.RESTARTS:
        slice_.restarts += 1
    elif budget == ladder.SOFTWARE:
        slice_.software = [*(at for at in slice_.software if at > record.at - us(3600.0)), record.at]


def _give_back(slice_: IncidentSlice, action: Action) -> None:
    if action.budget == ladder.RESTARTS:
        slice_.restarts -= 1
    elif action.budget == ladder.SOFTWARE and slice_.software:
        slice_.software.pop()


def _on_chosen(slice_: IncidentSlice, fact: ActionChosen, record: Record) -> None:
    if fact.action == ladder.SUSPECTS:
        return
    incident = slice_.by_number[fact.incident]
    waits = fact.action == ladder.AWAIT_EVIDENCE
    incident.fire("fail" if fact.action == ladder.FAIL_JOB else "hold" if waits else "act")
    incident.rule = fact.rule
    for one in incident.actions:
        if one.state == "waiting":
            one.fire("supersede")
    if fact.action in ladder.FOR_NODES:
        _give_back_restarts(slice_, incident.group)
    if waits:
        # Nothing is started again for this one after all.
        for one in incident.actions:
            if one.state == "in_force" and one.action in ladder.IN_PLACE:
                one.fire("supersede")
                _give_back(slice_, one)
    chosen = Action(fact.action, fact.node, budget=fact.budget)
    chosen.fire("hold" if waits else "take")
    incident.actions.append(chosen)
    tried = slice_.cycles.setdefault(incident.group, Cycles())
    if fact.action in ladder.IN_PLACE:
        _charge(slice_, fact.budget, record)
        tried.restart(incident.cause.node, retry=fact.action == ladder.RETRY)
        tried.back_off(incident.generation, record.at, free=incident.verdict == PLAT, pause_us=fact.pause_us)
    elif fact.action in ladder.RELAUNCHES:
        _relaunch(slice_, fact, record)
        tried.fresh(fact.node.rsplit("-", 1)[0])


def _relaunch(slice_: IncidentSlice, fact: ActionChosen, record: Record) -> None:
    place = fact.node.rsplit("-", 1)[0]
    if fact.memory_mib:
        slice_.memory[group_of(fact.node)] = fact.memory_mib
    if fact.budget != ladder.PLATFORM:
        slice_.relaunches[place] = slice_.relaunched(place, record.at) + 1
    slice_.joined.pop(place, None)


def _give_back_restarts(slice_: IncidentSlice, group: str) -> None:
    """A node's death explains what its world suffered since: the restarts charged meanwhile were not the program's doing."""
    for incident in slice_.by_number.values():
        for one in incident.actions if incident.group == group and not incident.closed else ():
            if one.state == "in_force" and one.action in ladder.IN_PLACE:
                one.fire("supersede")
                _give_back(slice_, one)


def _on_closed(slice_: IncidentSlice, fact: IncidentClosed, record: Record) -> None:
    incident = slice_.by_number[fact.incident]
    incident.fire("close")
    incident.over_at = incident.over_at or record.at
    for one in incident.actions:
        one.fire("finish")
    closed = [number for number, incident in slice_.by_number.items() if incident.closed]
    if len(closed) > CLOSED_KEPT:
        slice_.spent = [one for one in slice_.spent if one.until > record.at - us(SPENT_S)]
    for number in closed[:-CLOSED_KEPT]:
        slice_.spent = [*slice_.spent, slice_.by_number.pop(number).spent][-SPENT_MAX:]


EVENTS = (WorkerExited, IncidentOpened, Diagnosed, ActionChosen, IncidentClosed)

FACTS = Facts(
    kinds=EVENTS,
    evolve={
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
        world.WorldFormed: _on_formed,
        world.WorkersStarted: _on_started,
        progress.FirstStep: _on_first,
        progress.Progressed: lambda slice_, fact, record: _step(slice_, fact.group, fact.step),
        IncidentOpened: _on_opened,
        Diagnosed: _on_diagnosed,
        ActionChosen: _on_chosen,
        IncidentClosed: _on_closed,
    },
)
