"""Incidents: one failure from first evidence to recovery, its verdict, its actions, its cost.

Exits are facts about a generation. One that we asked for, or of an older generation than desired, opens nothing. The first
unasked exit of a generation opens the incident; whatever else that generation yields joins it as evidence, in any order. A
node that dies while an incident of its world is still unmended belongs to it too: then the verdict is revised, and the
budgets follow: the restart is given back and the relaunch charged.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from dlrover_core.diagnosis import ladder
from dlrover_core.diagnosis.classify import REFUSED, Death, Verdict, describe, node_death, root, worker_death
from dlrover_core.errors import Refused
from dlrover_core.job import job, nodes, progress, world
from dlrover_core.job.incident_lifecycle import INCIDENT, Action
from dlrover_core.job.node_lifecycle import ALIVE
from dlrover_core.job.world import group_of
from dlrover_core.kernel.engine import Concern
from dlrover_core.kernel.events import Event, Record, event
from dlrover_core.spec import us

if TYPE_CHECKING:
    from dlrover_core.job.state import JobState

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
    cause: Death
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
    last: Death | None = None
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


# ---- decide


def _exit(state: JobState, command: ReportExit, now: int) -> Iterator[Event]:
    nodes.present(state, command.node)
    newest = state.world.of(command.node).generation
    if command.generation > newest or command.generation < 1:
        raise Refused(f"generation {command.generation} does not exist: generation {newest} is the newest")
    yield WorkerExited(
        command.node,
        command.generation,
        command.rank,
        command.exit_code,
        command.asked,
        command.step,
        # Nobody died before there was time, whatever clock its agent has.
        min(max(command.age_us, 0), now),
        _last_bytes(command.tail),
        command.error[:ERROR_MAX],
    )


def _last_bytes(tail: str) -> str:
    raw = tail.encode(errors="replace")
    return tail if len(raw) <= TAIL_BYTES_MAX else raw[-TAIL_BYTES_MAX:].decode(errors="ignore")


def _tick(state: JobState, now: int) -> Iterator[Event]:
    if not state.job.live:
        return
    for incident in list(state.failures.incidents.values()):
        deadline = _deadline(state, incident)
        if deadline is not None and now >= deadline:
            if incident.held:
                yield _final(incident)
            else:
                formed_at = state.world.of(incident.node).formed_at
                yield IncidentClosed(incident.number, max(0, formed_at - incident.cause.at), UNKNOWN)


def _due(state: JobState) -> int | None:
    if not state.job.live:
        return None
    times = [_deadline(state, incident) for incident in state.failures.incidents.values()]
    return min((time for time in times if time is not None), default=None)


def _deadline(state: JobState, incident: Incident) -> int | None:
    """When a held end is carried out, and when a world that tells no steps counts as mended."""
    if incident.closed or incident.state == "fatal":
        return None
    if incident.held:
        return _evidence_deadline(state, incident)
    current = state.world.of(incident.node)
    runs = current.active and len(current.started) == len(current.members)
    if incident.generation != ASIDE and runs and incident.generation < current.generation:
        return current.formed_at + us(state.job.spec.evidence_s)
    return None


def _evidence_deadline(state: JobState, incident: Incident) -> int:
    return incident.opened_at + us(state.job.spec.evidence_s)


# ---- react: evidence -> incident -> verdict


def _on_exit(state: JobState, fact: WorkerExited, record: Record) -> Iterator[Event]:
    if not state.job.live:
        return
    newest = state.world.of(fact.node)
    if newest.active and fact.generation == newest.generation and not fact.asked:
        yield IncidentOpened(state.failures.number + 1, fact.node, fact.generation, (fact.rank,))
        return
    incident = state.failures.of_generation(group_of(fact.node), fact.generation)
    if incident is not None:
        yield from _rejudge(incident)


def _rejudge(incident: Incident) -> Iterator[Event]:
    """A verdict of its own for evidence that changes it. A worker's word never outweighs a node's death."""
    cause = incident.cause
    if (
        cause.rank >= 0
        and not any(one.action in FOR_NODES for one in incident.actions)
        and cause.signature != incident.signature
    ):
        yield _diagnosis(incident, incident.diagnosed_seq)


def _diagnosis(incident: Incident, revises: int = 0, blamed: str = "") -> Diagnosed:
    cause = incident.cause
    return Diagnosed(
        incident.number, cause.verdict, cause.signature, tuple(incident.evidence), cause.confidence, revises, blamed
    )


def _on_node(
    state: JobState, fact: nodes.NodeFailed | nodes.NodeGone | nodes.NodeLost, record: Record
) -> Iterator[Event]:
    if not state.job.live or not _counts(state, fact):
        return
    current = state.world.of(fact.node)
    if current.done(fact.node):
        return
    if current.active and current.member(fact.node) is None:
        # A late or booting node: nothing is broken that anybody trains in.
        yield IncidentOpened(state.failures.number + 1, fact.node, ASIDE, ())
        return
    incident = state.failures.unmended(group_of(fact.node))
    if incident is not None:
        yield _diagnosis(incident, incident.diagnosed_seq, fact.node)
        return
    # While the job is suspended nobody trains in what is left of the last world.
    generation = ASIDE if state.job.state == "suspended" else current.generation
    yield IncidentOpened(state.failures.number + 1, fact.node, generation, ())


def _counts(state: JobState, fact: nodes.NodeFailed | nodes.NodeGone | nodes.NodeLost) -> bool:
    """Was this death unexpected, and of a node that we still wanted?"""
    if isinstance(fact, nodes.NodeGone):
        return not fact.expected
    node = state.nodes.nodes[fact.node]
    return node.released == ("lost" if isinstance(fact, nodes.NodeLost) else "")


def _judge(state: JobState, fact: IncidentOpened, record: Record) -> Iterator[Event]:
    incident = state.failures.incidents[fact.incident]
    yield _diagnosis(incident, blamed="" if fact.ranks else fact.node)


# ---- react: verdict -> action


def _choose(state: JobState, fact: Diagnosed, record: Record) -> Iterator[Event]:
    incident = state.failures.incidents[fact.incident]
    if fact.blamed and not _doomed(state, incident, fact.blamed):
        yield _chosen(incident, fact.blamed, _for_node(state, fact.blamed, fact.signature))
    elif fact.blamed:
        yield from _finish_held(state, fact, record)
    elif not incident.action:
        left = 0 if incident.node in state.budget.spent else state.job.spec.max_restarts - state.failures.restarts
        yield _chosen(incident, incident.node, ladder.for_workers(left))


def _doomed(state: JobState, incident: Incident, blamed: str) -> bool:
    """Does the end wait because of another node that is dead and cannot be replaced? Nothing done for this one would help."""
    waiting = next((one.node for one in incident.actions if one.state == "waiting"), blamed)
    node = state.nodes.nodes.get(waiting)
    return waiting != blamed and (node is None or node.state not in ALIVE)


def _chosen(incident: Incident, node: str, choice: ladder.Choice) -> ActionChosen:
    return ActionChosen(incident.number, choice.action, node, choice.rule, choice.budget_left)


def _for_node(state: JobState, name: str, signature: str) -> ladder.Choice:
    group = state.job.spec.group(group_of(name))
    relaunches = state.failures.relaunched(name.rsplit("-", 1)[0], state.at)
    left = 0 if name in state.budget.spent else group.relaunch_max - relaunches
    others = nodes.wanted(state, group.name) - 1
    return ladder.for_node(left, others, group.floor, refused=signature == REFUSED)


def _act(state: JobState, fact: ActionChosen, record: Record) -> Iterator[Event]:
    incident = state.failures.incidents[fact.incident]
    why = f"incident {incident.number}: {incident.signature}"
    if fact.action == ladder.RESTART_PROCESSES:
        yield from nodes.complete(state, incident.group)
        yield from world.reform(state, incident.group, record.at, why)
    elif fact.action == ladder.RELAUNCH_NODE:
        yield from nodes.replace(state, fact.node)
        yield from _complete(state, incident)
    elif fact.action == ladder.GO_ON_SMALLER:
        yield from nodes.give_up(state, fact.node)
        yield from _complete(state, incident)
        if incident.generation == ASIDE:
            yield _closed_aside(incident, record)
    elif fact.action == ladder.AWAIT_EVIDENCE:
        yield from world.dissolve(state, incident.group, why)
        if _all_spoke(state, incident):
            yield _final(incident)
    elif fact.action == ladder.FAIL_JOB:
        yield job.JobFailed(incident.rule, incident.number, describe(incident.cause))


def _complete(state: JobState, incident: Incident) -> Iterator[Event]:
    """Whoever had finished and gone is needed again when the world must re-form."""
    if not state.world.of(incident.node).active:
        yield from nodes.complete(state, incident.group)


def _all_spoke(state: JobState, incident: Incident) -> bool:
    """Has every member of the broken world stopped its workers, or gone?"""
    broken = state.world.worlds.get(incident.group) or world.World()
    return all(_spoke(state, broken, member.node) for member in broken.members)


def _spoke(state: JobState, broken: world.World, name: str) -> bool:
    node = state.nodes.nodes.get(name)
    return name in broken.stopped or name in broken.finished or node is None or not node.joined


def _finish_held(state: JobState, fact: object, record: Record) -> Iterator[Event]:
    if state.job.live:
        for incident in list(state.failures.incidents.values()):
            if incident.held and not incident.closed and _all_spoke(state, incident):
                yield _final(incident)


def _final(incident: Incident) -> ActionChosen:
    return ActionChosen(incident.number, ladder.FAIL_JOB, incident.node, incident.rule, 0)


# ---- react: mended


def _mended(state: JobState, fact: progress.FirstStep, record: Record) -> Iterator[Event]:
    group = group_of(fact.node)
    for incident in list(state.failures.incidents.values()):
        if not incident.closed and incident.group == group and incident.generation < fact.generation:
            yield IncidentClosed(
                incident.number, max(0, record.at - fact.age_us - incident.cause.at), _steps_lost(incident, fact)
            )


def _replaced(state: JobState, fact: nodes.NodeJoined, record: Record) -> Iterator[Event]:
    """An incident that broke no world is over when the place is filled again."""
    place = fact.node.rsplit("-", 1)[0]
    for incident in list(state.failures.incidents.values()):
        if incident.generation == ASIDE and not incident.closed and incident.node.rsplit("-", 1)[0] == place:
            yield _closed_aside(incident, record)


def _closed_aside(incident: Incident, record: Record) -> IncidentClosed:
    return IncidentClosed(incident.number, max(0, record.at - incident.cause.at), 0)


def _steps_lost(incident: Incident, fact: progress.FirstStep) -> int:
    """Steps begun before the death and made again: the one in the making, and those since what was restored."""
    if not fact.told or incident.step < 0:
        return UNKNOWN
    return max(0, incident.step + 1 - (fact.step - 1))


def _close_all(state: JobState, fact: object, record: Record) -> Iterator[Event]:
    """A script that signals no steps mends its incidents by ending well."""
    for incident in list(state.failures.incidents.values()):
        if not incident.closed:
            yield IncidentClosed(incident.number, record.at - incident.cause.at, 0)


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
    death = Death(record.seq, died, fact.node, fact.rank, code, fact.step, _brief(fact), *verdict)
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
    death = Death(
        record.seq, record.at, fact.node, -1, code, -1, f"{how}: {fact.reason}" if fact.reason else how, *verdict
    )
    _note(slice_, death, slice_.unmended(group_of(fact.node)))


def _note(slice_: FailureSlice, death: Death, incident: Incident | None) -> None:
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


CONCERN = Concern(
    name="failures",
    events=(WorkerExited, IncidentOpened, Diagnosed, ActionChosen, IncidentClosed),
    evolve={
        job.JobCreated: _on_created,
        job.GroupScaled: _on_scaled,
        nodes.PlaceReopened: lambda slice_, fact, record: slice_.relaunches.pop(f"{fact.group}-{fact.index}", None),
        nodes.NodeJoined: lambda slice_, fact, record: slice_.joined.update({fact.node.rsplit("-", 1)[0]: record.at}),
        WorkerExited: _note_exit,
        nodes.NodeFailed: _note_node,
        nodes.NodeGone: _note_node,
        nodes.NodeLost: _note_node,
        world.WorkersStopped: _note_step,
        IncidentOpened: _on_opened,
        Diagnosed: _on_diagnosed,
        ActionChosen: _on_chosen,
        IncidentClosed: _on_closed,
    },
    decide={ReportExit: _exit},
    react={
        WorkerExited: _on_exit,
        nodes.NodeFailed: _on_node,
        nodes.NodeGone: _on_node,
        nodes.NodeLost: _on_node,
        nodes.NodeLeft: _finish_held,
        nodes.NodeJoined: _replaced,
        IncidentOpened: _judge,
        Diagnosed: _choose,
        ActionChosen: _act,
        world.WorkersStopped: _finish_held,
        progress.FirstStep: _mended,
        job.JobSucceeded: _close_all,
    },
    due=_due,
    tick=_tick,
)
