"""Incidents: one failure from the first evidence to recovery, with its verdict, its actions and its cost.

What is done about incidents is decided in `rules.incidents`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from dlrover_core.diagnosis import ladder
from dlrover_core.diagnosis.evidence import CASC, ERROR, EXIT, LOG, NODE, OPENING, PLAT, Evidence
from dlrover_core.job import evidence, incident_lifecycle, job, nodes, observing, progress, upcasts, world
from dlrover_core.job.crash_loops import Cycles
from dlrover_core.job.evidence import Spent
from dlrover_core.job.incident_lifecycle import Action
from dlrover_core.job.memo import unanswered
from dlrover_core.job.names import group_of
from dlrover_core.job.sets import Coupled
from dlrover_core.kernel.engine import Facts
from dlrover_core.kernel.events import Record, event
from dlrover_core.kernel.state import LATER, lasting
from dlrover_core.kernel.wire import command
from dlrover_core.spec import us

TAIL_BYTES_MAX = 4096
ERROR_MAX = 2048
CLOSED_KEPT = 16
EVIDENCE_MAX = 64
# Pieces of evidence kept of one incident, to be judged again; each has one line of text, and copies are dropped.
KNOWN_MAX = 96
LINE_MAX = 500
# The used-up evidence of a forgotten incident is remembered as long as it could explain a later incident.
SPENT_S, SPENT_MAX = 2 * evidence.WINDOW_S, 256
HISTORY_MAX = 64
UNKNOWN = -1
ASIDE = evidence.ASIDE
# A node that lived so long clears its place's relaunch budget: reboots weeks apart would use up any budget.
SERVED_S = 3600.0


@event(60, version=3, upcast={1: upcasts.exit_1, 2: lambda fields: (*fields, "")})
class WorkerExited(NamedTuple):
    """A worker is dead.

    exit_code:                      negative: killed by that signal
    asked:                          the agent had stopped it
    step:                           last step it had made; -1: unknown
    age_us:                         time from the death to this record
    tail:                           its last lines
    error:                          the message of its error file
    signature, verdict, confidence: what the table of signatures said at that time
    place:                          location in the user's program
    work:                           the samples that it had in work, as `dlrover_core.data.in_work` has it; empty: unknown
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
    work: str = ""


@event(61)
class IncidentOpened(NamedTuple):
    """Something broke. ``ranks``: ranks known dead so far; empty for a node's death."""

    incident: int
    node: str
    generation: int
    ranks: tuple[int, ...]


@event(62, version=2, upcast={1: lambda fields: (*fields, -1, "", (), "", "", "", "", "", "")})
class Diagnosed(NamedTuple):
    """A verdict on an incident, from the evidence so far.

    verdict, signature, confidence: class of the failure, what it was recognised by, and how sure that is (0 to 1)
    evidence:                       records of the evidence, the root cause first
    revises:                        record of the verdict that this one replaces; 0: none
    blamed:                         node at fault that still exists, or the dead node; empty: none
    rank, host:                     rank and host at fault; -1 and empty: unknown
    discarded:                      records of evidence that is no cause
    why:                            rule of the procedure that decided
    hint:                           what usually suffices, for people
    place:                          location in the user's program
    node, text:                     node and text of the root cause; the text of a death is empty
    budget:                         what a restart in place is charged to; a restart charged to another budget is charged
                                    anew
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
    """An action for an incident, and the budget that it draws on.

    rule:                               the rule that chose it
    budget, budget_before, budget_left: the budget's name, what was left of it before (-1: unknown) and after
    host:                               the host that is isolated; empty: none
    memory_mib:                         memory that the group's nodes get from now on; 0: as before
    pause_us:                           how long the next world waits
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
    """Training goes on.

    down_us:    from the death to the next step; -1: there is none, because the set is given up and the job goes on without it
    steps_lost: steps begun before the death and made again; -1: unknown, because the script does not tell its own step
                numbers (`dlrover_adapters.torch.step`)
    """

    incident: int
    down_us: int
    steps_lost: int


@command(9)
class ReportExit(NamedTuple):
    """An agent's worker died. Fields as in `WorkerExited`; ``signature`` and ``place`` by the agent's own table."""

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
    work: str = ""


class NoteUsed(NamedTuple):
    """The leader: by heartbeats, a user of a set without own steps made a step after this generation's workers ran."""

    set: str
    generation: int


Incident = incident_lifecycle.Incident


# Invariants of budgets, after every event; `IncidentSlice.check` yields the broken ones.
#
#   N        `number`: the number of the newest incident
#   I        the remembered incidents
#   A        number of actions in I that restart in place, were not superseded, and are charged to `max_restarts`
#   R        `restarts`: number of charges to `max_restarts`
#   Q        `software`: times of charges to the hourly budget that were not given back
#   B(p)     `relaunches`: number of charged relaunches of place p
#
#   number   the numbers of I ascend and end at N at the latest
#   charged  A <= R: a charge stays while its action counts (R also counts forgotten incidents)
#   hour     Q ascends
#   sets     the charges of all sets add up to the job's
#   places   B(p) >= 1
#   held     an incident is held exactly while its newest action waits


@dataclass(slots=True)
class Charged:
    """Charges of one set: restarts charged to `max_restarts`, and times of restarts charged to the hourly budget."""

    restarts: int = 0
    software: list[int] = field(default_factory=list)


@dataclass(slots=True)
class IncidentSlice(Coupled):
    """Incidents and the budgets that they use.

    by_number:  open incidents and the last closed ones
    number:     of the newest incident
    restarts:   charged to `max_restarts`
    relaunches: charged relaunches, by place
    deaths:     deaths of the newest batch, by record; an incident opens with the death that its record's cause names
    joined:     when the node of a place joined, by place
    software:   times of restarts charged to the hourly budget
    memory:     MiB that a group's nodes get, by group
    history:    root causes of the newest incidents, by number
    cycles:     progress and restarts, by set
    spent:      evidence that forgotten incidents have used up
    by_set:     ``restarts`` and ``software`` by set; empty in a job of one set
    """

    by_number: dict[int, Incident] = field(default_factory=dict)
    number: int = lasting(int)
    restarts: int = 0
    relaunches: dict[str, int] = field(default_factory=dict)
    deaths: dict[int, Evidence] = field(default_factory=dict)
    joined: dict[str, int] = field(default_factory=dict)
    software: list[int] = field(default_factory=list)
    memory: dict[str, int] = field(default_factory=dict)
    # What spoke against a host speaks on.
    history: dict[int, Evidence] = lasting(dict)
    cycles: dict[str, Cycles] = field(default_factory=dict)
    spent: list[Spent] = field(default_factory=list)
    by_set: dict[str, Charged] = field(default_factory=dict, metadata=LATER)

    def of(self, name: str) -> Cycles:
        """Progress and restarts of a set."""
        return self.cycles.get(name) or Cycles()

    def charged(self, name: str) -> Charged:
        """The charges of a set."""
        if self.sets.several:
            return self.by_set.get(name) or Charged()
        return Charged(self.restarts, self.software)

    def software_used(self, name: str, now: int) -> int:
        """Restarts of a set in the last hour that were charged to the hourly budget."""
        return sum(at > now - us(3600.0) for at in self.charged(name).software)

    def relaunched(self, place: str, now: int) -> int:
        """How many relaunches of a place count; none, once its node has served for `SERVED_S`."""
        served = now - self.joined.get(place, now) >= us(SERVED_S)
        return 0 if served else self.relaunches.get(place, 0)

    def in_set(self, name: str) -> list[Incident]:
        """The remembered incidents of a set."""
        of = self.sets.of
        return [one for one in self.by_number.values() if of(one.node) == name]

    def of_generation(self, name: str, generation: int) -> Incident | None:
        """The incident that a set's generation opened, if it is still remembered."""
        found = [one for one in self.in_set(name) if one.generation == generation]
        return found[-1] if found else None

    def newest(self, name: str) -> Incident | None:
        """The newest remembered incident of a set."""
        found = self.in_set(name)
        return found[-1] if found else None

    def unmended(self, name: str) -> Incident | None:
        """The newest open incident of a set that broke a world."""
        found = [one for one in self.in_set(name) if not one.closed and one.generation]
        return found[-1] if found else None

    def check(self) -> Iterator[str]:
        """Yields what breaks the invariants above."""
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
        if self.sets.several and sum(one.restarts for one in self.by_set.values()) != self.restarts:
            yield f"sets: R = {self.restarts}, by set {self.by_set}"
        if self.software and self.software != sorted(self.software):
            yield f"hour: Q = {self.software}"
        if self.relaunches and min(self.relaunches.values()) < 1:
            yield f"places: B = {self.relaunches}"


# ---- evolve


def _on_scaled(slice_: IncidentSlice, fact: job.GroupScaled, record: Record) -> None:
    for index in fact.revived:
        slice_.relaunches.pop(f"{fact.group}-{index}", None)


def _note_exit(slice_: IncidentSlice, fact: WorkerExited, record: Record) -> None:
    _step(slice_, slice_.set_of(fact.node), fact.step)
    if fact.asked and not fact.error:
        return
    # A worker that the agent killed while it wrote its error file had failed before: its exit code says nothing.
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
    _note(slice_, death, slice_.of_generation(slice_.set_of(fact.node), fact.generation), record.cause)


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
    _note(slice_, death, slice_.unmended(slice_.set_of(fact.node)), record.cause)


def _note_end(slice_: IncidentSlice, fact: observing.NodeEnded, record: Record) -> None:
    """A word of the platform that comes after the node's failure belongs to the incident that has this failure."""
    incident = slice_.newest(slice_.set_of(fact.node)) if fact.tells else None
    if incident is not None and any(one.node == fact.node and one.source == NODE for one in incident.known):
        verdict = upcasts.node_death("failed", fact.exit_code, fact.reason)
        text = f"failed: {fact.reason}"
        _remember(incident, Evidence(record.seq, record.at, fact.node, -1, fact.exit_code, -1, text, *verdict, NODE))


def _note_evidence(slice_: IncidentSlice, fact: evidence.EvidenceSeen, record: Record) -> None:
    one = evidence.of(fact, record)
    if fact.source in OPENING:
        _note(slice_, one, slice_.of_generation(slice_.set_of(fact.node), fact.generation), record.cause)
        return
    incident = slice_.newest(slice_.set_of(fact.node))
    if incident is not None and fact.generation in (0, incident.generation) and incident.covers(one):
        _remember(incident, one)


def _note(slice_: IncidentSlice, death: Evidence, incident: Incident | None, cause: int) -> None:
    slice_.deaths = {**unanswered(slice_.deaths, cause), death.seq: death}
    if incident is None:
        return
    earliest = min(incident.cause.at, death.at)
    # New evidence may change the cause, but not the time at which training stopped.
    if not incident.why:
        incident.cause = upcasts.root((incident.cause, death))
    incident.cause = incident.cause._replace(at=earliest)
    incident.step = max(incident.step, death.step)
    _remember(incident, death)


def _remember(incident: Incident, one: Evidence) -> None:
    """Keep the evidence to be judged again. Where there is no more room, it takes the place of a cascade."""
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
    """Survivors of a dead node tell which step the broken generation had reached."""
    _step(slice_, slice_.set_of(fact.node), fact.step)
    incident = slice_.of_generation(slice_.set_of(fact.node), fact.generation)
    if incident is not None:
        incident.step = max(incident.step, fact.step)


def _step(slice_: IncidentSlice, group: str, step: int) -> None:
    known = slice_.cycles.get(group)
    if known is not None:
        known.reach(step)


def _on_first(slice_: IncidentSlice, fact: progress.FirstStep, record: Record) -> None:
    slice_.cycles.setdefault(slice_.set_of(fact.node), Cycles()).first(fact.generation, fact.step, told=fact.told)


def _on_formed(slice_: IncidentSlice, fact: world.WorldFormed, record: Record) -> None:
    slice_.cycles.setdefault(fact.group, Cycles()).formed(record.at)
    for incident in slice_.by_number.values():
        if slice_.set_of(incident.node) == fact.group and incident.generation != ASIDE:
            incident.over_at = incident.over_at or record.at


def _on_started(slice_: IncidentSlice, fact: world.WorkersStarted, record: Record) -> None:
    slice_.cycles.setdefault(slice_.set_of(fact.node), Cycles()).started(record.at)


def _on_opened(slice_: IncidentSlice, fact: IncidentOpened, record: Record) -> None:
    death = slice_.deaths.get(record.cause)
    if death is None:
        raise ValueError(f"incident {fact.incident} opens because of record {record.cause}, which tells of no death")
    slice_.number = fact.incident
    opened = Incident(fact.incident, fact.node, fact.generation, record.at, death, [], death.step)
    _remember(opened, death)
    slice_.by_number[fact.incident] = opened
    if fact.generation != ASIDE:
        ended = slice_.cycles.setdefault(slice_.set_of(opened.node), Cycles())
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
        # The root cause is always kept.
        incident.evidence[-1] = fact.evidence[0]
    past = incident.cause._replace(text="", host=fact.host or incident.cause.host, place=fact.place)
    slice_.history[fact.incident] = past
    while len(slice_.history) > HISTORY_MAX:
        del slice_.history[next(iter(slice_.history))]
    slice_.cycles.setdefault(slice_.set_of(incident.node), Cycles()).judge(
        fact.incident, fact.signature, fact.place, incident.step, free=fact.verdict == PLAT
    )
    _charge_anew(slice_, incident, fact.budget, record)


def _charge_anew(slice_: IncidentSlice, incident: Incident, budget: str, record: Record) -> None:
    """Charges follow the verdict: a restart in place is given back to the budget that it was charged to before."""
    for one in incident.actions:
        if one.action in ladder.IN_PLACE and one.state != "superseded" and budget and one.budget != budget:
            name = slice_.set_of(incident.node)
            _give_back(slice_, one, name)
            one.budget = budget
            _charge(slice_, budget, name, record)


def _accounts(slice_: IncidentSlice, name: str) -> list[IncidentSlice | Charged]:
    """Where a set's restarts are charged: the job's account, and in a job of several sets the set's own account too."""
    return [slice_, slice_.by_set.setdefault(name, Charged())] if slice_.sets.several else [slice_]


def _charge(slice_: IncidentSlice, budget: str, name: str, record: Record) -> None:
    for account in _accounts(slice_, name):
        if budget == ladder.RESTARTS:
            account.restarts += 1
        elif budget == ladder.SOFTWARE:
            account.software = [*(at for at in account.software if at > record.at - us(3600.0)), record.at]


def _give_back(slice_: IncidentSlice, action: Action, name: str) -> None:
    for account in _accounts(slice_, name):
        if action.budget == ladder.RESTARTS:
            account.restarts -= 1
        elif action.budget == ladder.SOFTWARE and account.software:
            account.software.pop()


def _on_chosen(slice_: IncidentSlice, fact: ActionChosen, record: Record) -> None:
    if fact.action == ladder.SUSPECTS:
        return
    incident = slice_.by_number[fact.incident]
    waits = fact.action == ladder.AWAIT_EVIDENCE
    incident.fire("fail" if fact.action in ladder.ENDINGS else "hold" if waits else "act")
    incident.rule = fact.rule
    for one in incident.actions:
        if one.state == "waiting":
            one.fire("supersede")
    if fact.action in ladder.FOR_NODES:
        _give_back_restarts(slice_, slice_.set_of(incident.node))
    if waits:
        # No process is started again for this incident after all.
        for one in incident.actions:
            if one.state == "in_force" and one.action in ladder.IN_PLACE:
                one.fire("supersede")
                _give_back(slice_, one, slice_.set_of(incident.node))
    chosen = Action(fact.action, fact.node, budget=fact.budget)
    chosen.fire("hold" if waits else "take")
    incident.actions.append(chosen)
    tried = slice_.cycles.setdefault(slice_.set_of(incident.node), Cycles())
    if fact.action in ladder.IN_PLACE:
        _charge(slice_, fact.budget, slice_.set_of(incident.node), record)
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


def _give_back_restarts(slice_: IncidentSlice, name: str) -> None:
    """A node's death explains all that its world suffered since: restarts charged meanwhile are given back."""
    for incident in slice_.in_set(name):
        for one in incident.actions if not incident.closed else ():
            if one.state == "in_force" and one.action in ladder.IN_PLACE:
                one.fire("supersede")
                _give_back(slice_, one, name)


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
        gone = slice_.by_number.pop(number)
        slice_.spent = [*slice_.spent, gone.spent(slice_.set_of(gone.node))][-SPENT_MAX:]


EVENTS = (WorkerExited, IncidentOpened, Diagnosed, ActionChosen, IncidentClosed)

FACTS = Facts(
    kinds=EVENTS,
    evolve={
        job.GroupScaled: _on_scaled,
        nodes.PlaceReopened: lambda slice_, fact, record: slice_.relaunches.pop(f"{fact.group}-{fact.index}", None),
        nodes.NodeJoined: lambda slice_, fact, record: slice_.joined.update({fact.node.rsplit("-", 1)[0]: record.at}),
        WorkerExited: _note_exit,
        evidence.EvidenceSeen: _note_evidence,
        nodes.NodeFailed: _note_node,
        observing.NodeEnded: _note_end,
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
