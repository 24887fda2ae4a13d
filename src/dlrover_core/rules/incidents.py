"""What is done about failures: exits and deaths open incidents, evidence makes verdicts, verdicts choose actions.

Exits are facts about a generation. One that we asked for, or of an older generation than desired, opens nothing. The first
unasked exit of a generation opens the incident; whatever else that generation yields joins it as evidence, in any order. A
node that dies while an incident of its world is still unmended belongs to it too: then the verdict is revised, and the
budgets follow: the restart is given back and the relaunch charged.
"""

from __future__ import annotations

from collections.abc import Iterator

from dlrover_core.diagnosis import classify, ladder, signatures
from dlrover_core.diagnosis.classify import describe
from dlrover_core.diagnosis.evidence import OPENING
from dlrover_core.diagnosis.policy import Hook
from dlrover_core.errors import Refused
from dlrover_core.job import evidence, incidents, job, nodes, progress, world
from dlrover_core.job.names import group_of
from dlrover_core.job.state import JobState
from dlrover_core.kernel.engine import Rules, always
from dlrover_core.kernel.events import Event, Record
from dlrover_core.rules import checks, choose_action, judge_incident, slots, worlds
from dlrover_core.spec import us

# ---- decide


def _exit(state: JobState, command: incidents.ReportExit, now: int) -> Iterator[Event]:
    slots.present(state, command.node)
    newest = state.world.of(command.node).generation
    if command.generation > newest or command.generation < 1:
        raise Refused(f"generation {command.generation} does not exist: generation {newest} is the newest")
    yield incidents.WorkerExited(
        command.node,
        command.generation,
        command.rank,
        command.exit_code,
        command.asked,
        command.step,
        # Nobody died before there was time, whatever clock its agent has.
        min(max(command.age_us, 0), now),
        _last_bytes(command.tail),
        command.error[: incidents.ERROR_MAX],
        *_known_by(state, command),
    )


def _known_by(state: JobState, command: incidents.ReportExit) -> tuple[str, str, str, float]:
    """Signature, place, class and confidence: as its agent says, else by the table. In the log from then on."""
    table = signatures.table(state.job.spec.signatures)
    said = table.get(command.signature)
    if said is not None:
        return said.id, command.place[: incidents.LINE_MAX], said.verdict, said.confidence
    # Who was killed by us while it told its own error had failed before: its exit code says nothing.
    code = 1 if command.asked else command.exit_code
    found = classify.of_exit(table, code, command.error, command.tail)
    return found.signature, (command.place or found.place)[: incidents.LINE_MAX], found.verdict, found.confidence


def _last_bytes(tail: str) -> str:
    raw = tail.encode(errors="replace")
    return tail if len(raw) <= incidents.TAIL_BYTES_MAX else raw[-incidents.TAIL_BYTES_MAX :].decode(errors="ignore")


def _tick(state: JobState, now: int) -> Iterator[Event]:
    if not state.job.live:
        return
    for incident in list(state.incidents.by_number.values()):
        deadline = _deadline(state, incident)
        if deadline is not None and now >= deadline:
            if incident.held:
                yield _final(incident)
            else:
                formed_at = state.world.of(incident.node).formed_at
                yield incidents.IncidentClosed(
                    incident.number, max(0, formed_at - incident.cause.at), incidents.UNKNOWN
                )


def _due(state: JobState) -> int | None:
    if not state.job.live:
        return None
    times = [_deadline(state, incident) for incident in state.incidents.by_number.values()]
    return min((time for time in times if time is not None), default=None)


def _deadline(state: JobState, incident: incidents.Incident) -> int | None:
    """When a held end is carried out, and when a world that tells no steps counts as mended."""
    if incident.closed or incident.state == "fatal":
        return None
    if incident.held:
        return _evidence_deadline(state, incident)
    current = state.world.of(incident.node)
    runs = current.active and len(current.started) == len(current.members)
    if incident.generation != incidents.ASIDE and runs and incident.generation < current.generation:
        return current.formed_at + us(state.job.spec.evidence_s)
    return None


def _evidence_deadline(state: JobState, incident: incidents.Incident) -> int:
    return incident.opened_at + us(state.job.spec.evidence_s)


# ---- react: evidence -> incident -> verdict


def _on_exit(state: JobState, fact: incidents.WorkerExited, record: Record) -> Iterator[Event]:
    if not state.job.live:
        return
    newest = state.world.of(fact.node)
    if newest.active and fact.generation == newest.generation and not fact.asked:
        yield incidents.IncidentOpened(state.incidents.number + 1, fact.node, fact.generation, (fact.rank,))
        return
    incident = state.incidents.of_generation(group_of(fact.node), fact.generation)
    if incident is not None and incident.tells(record.seq):
        yield from _rejudge(state, incident)


def _rejudge(state: JobState, incident: incidents.Incident) -> Iterator[Event]:
    """A verdict of its own for evidence that changes it. It decides nothing about nodes that are dead: their ends did."""
    found = judge_incident.judge(state, incident)
    if judge_incident.changes(incident, found):
        yield judge_incident.diagnosis(state, incident, found, revises=incident.diagnosed_seq)


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
        yield incidents.IncidentOpened(state.incidents.number + 1, fact.node, incidents.ASIDE, ())
        return
    incident = state.incidents.unmended(group_of(fact.node))
    if incident is not None:
        found = judge_incident.judge(state, incident)
        yield judge_incident.diagnosis(state, incident, found, revises=incident.diagnosed_seq, dead=fact.node)
        return
    # While the job is suspended nobody trains in what is left of the last world.
    generation = incidents.ASIDE if state.job.state == "suspended" else current.generation
    yield incidents.IncidentOpened(state.incidents.number + 1, fact.node, generation, ())


def _on_evidence(state: JobState, fact: evidence.EvidenceSeen, record: Record) -> Iterator[Event]:
    """What does not die is a failure all the same: a hang, a failed check. It breaks the world that runs.

    Whatever else is seen is judged with the incident that it belongs to, or waits for one.
    """
    if not state.job.live:
        return
    known = signatures.table(state.job.spec.signatures).get(fact.signature)
    current = state.world.of(fact.node)
    opens = fact.source in OPENING and known is not None and known.action != "obs"
    if opens and current.active and fact.generation in (0, current.generation):
        yield incidents.IncidentOpened(state.incidents.number + 1, fact.node, current.generation, (fact.rank,))
        return
    incident = state.incidents.newest(group_of(fact.node))
    if incident is not None and incident.why and incident.tells(record.seq):
        yield from _rejudge(state, incident)


def _counts(state: JobState, fact: nodes.NodeFailed | nodes.NodeGone | nodes.NodeLost) -> bool:
    """Was this death unexpected, and of a node that we still wanted?"""
    if isinstance(fact, nodes.NodeGone):
        return not fact.expected
    node = state.nodes.nodes[fact.node]
    return node.released == ("lost" if isinstance(fact, nodes.NodeLost) else "")


def _judge(state: JobState, fact: incidents.IncidentOpened, record: Record) -> Iterator[Event]:
    incident = state.incidents.by_number[fact.incident]
    found = judge_incident.judge(state, incident)
    yield judge_incident.diagnosis(state, incident, found, dead="" if fact.ranks else fact.node)
    if found.suspects:
        yield judge_incident.suspicion(incident, found)


# ---- react: verdict -> action


def _choose(state: JobState, fact: incidents.Diagnosed, record: Record, hook: Hook | None = None) -> Iterator[Event]:
    incident = state.incidents.by_number[fact.incident]
    if fact.blamed and not choose_action.alive(state, fact.blamed):
        if choose_action.doomed(state, incident, fact.blamed):
            yield from _finish_held(state, fact, record)
        elif not choose_action.settled(incident, fact.blamed):
            yield choose_action.action(state, incident, fact.blamed, hook, dead=True)
        return
    if incident.closed or incident.state == "fatal":
        return
    chosen = choose_action.action(state, incident, choose_action.target(state, incident, fact.blamed), hook)
    if not incident.action or choose_action.stronger(state, incident, chosen):
        yield chosen


def _act(state: JobState, fact: incidents.ActionChosen, record: Record) -> Iterator[Event]:
    incident = state.incidents.by_number[fact.incident]
    why = f"incident {incident.number}: {incident.signature}"
    if fact.action in ladder.IN_PLACE:
        if incident.hint == "check":
            # Who is at fault cannot be told from words: nodes that agree to be checked are, before anybody trains again.
            yield from checks.ask(state, incident.group, why)
        yield from slots.complete(state, incident.group)
        yield from worlds.reform(state, incident.group, record.at, why)
    elif fact.action in ladder.RELAUNCHES:
        yield from slots.replace(state, fact.node)
        yield from _complete(state, incident)
    elif fact.action == ladder.GO_ON_SMALLER:
        yield from slots.give_up(state, fact.node)
        yield from _complete(state, incident)
        if incident.generation == incidents.ASIDE:
            yield _closed_aside(incident, record)
    elif fact.action == ladder.AWAIT_EVIDENCE:
        yield from worlds.dissolve(state, incident.group, why)
        if _all_spoke(state, incident):
            yield _final(incident)
    elif fact.action == ladder.FAIL_JOB:
        yield job.JobFailed(incident.rule, incident.number, describe(incident.cause))


def _complete(state: JobState, incident: incidents.Incident) -> Iterator[Event]:
    """Whoever had finished and gone is needed again when the world must re-form."""
    current = state.world.of(incident.node)
    # A member that was let go while it lived takes its world with it.
    if not current.active or incident.generation == current.generation:
        yield from slots.complete(state, incident.group)


def _all_spoke(state: JobState, incident: incidents.Incident) -> bool:
    """Has every member of the broken world stopped its workers, or gone?"""
    broken = state.world.worlds.get(incident.group) or world.World()
    return all(_spoke(state, broken, member.node) for member in broken.members)


def _spoke(state: JobState, broken: world.World, name: str) -> bool:
    node = state.nodes.nodes.get(name)
    return name in broken.stopped or name in broken.finished or node is None or not node.joined


def _finish_held(state: JobState, fact: object, record: Record) -> Iterator[Event]:
    if state.job.live:
        for incident in list(state.incidents.by_number.values()):
            if incident.held and not incident.closed and _all_spoke(state, incident):
                yield _final(incident)


def _final(incident: incidents.Incident) -> incidents.ActionChosen:
    return incidents.ActionChosen(incident.number, ladder.FAIL_JOB, incident.node, incident.rule, 0)


# ---- react: mended


def _mended(state: JobState, fact: progress.FirstStep, record: Record) -> Iterator[Event]:
    group = group_of(fact.node)
    for incident in list(state.incidents.by_number.values()):
        if not incident.closed and incident.group == group and incident.generation < fact.generation:
            yield incidents.IncidentClosed(
                incident.number, max(0, record.at - fact.age_us - incident.cause.at), _steps_lost(incident, fact)
            )


def _replaced(state: JobState, fact: nodes.NodeJoined, record: Record) -> Iterator[Event]:
    """An incident that broke no world is over when the place is filled again."""
    place = fact.node.rsplit("-", 1)[0]
    for incident in list(state.incidents.by_number.values()):
        if incident.generation == incidents.ASIDE and not incident.closed and incident.node.rsplit("-", 1)[0] == place:
            yield _closed_aside(incident, record)


def _closed_aside(incident: incidents.Incident, record: Record) -> incidents.IncidentClosed:
    return incidents.IncidentClosed(incident.number, max(0, record.at - incident.cause.at), 0)


def _steps_lost(incident: incidents.Incident, fact: progress.FirstStep) -> int:
    """Steps begun before the death and made again: the one in the making, and those since what was restored."""
    if not fact.told or incident.step < 0:
        return incidents.UNKNOWN
    return max(0, incident.step + 1 - (fact.step - 1))


def _close_all(state: JobState, fact: object, record: Record) -> Iterator[Event]:
    """A script that signals no steps mends its incidents by ending well."""
    for incident in list(state.incidents.by_number.values()):
        if not incident.closed:
            yield incidents.IncidentClosed(incident.number, record.at - incident.cause.at, 0)


def rules(hook: Hook | None = None) -> Rules:
    """The rules, with a user's hook or without one. A hook is asked when something is decided, never when a log is read."""

    def choose(state: JobState, fact: incidents.Diagnosed, record: Record) -> Iterator[Event]:
        return _choose(state, fact, record, hook)

    return Rules(
        decide={incidents.ReportExit: _exit},
        react={
            incidents.WorkerExited: _on_exit,
            evidence.EvidenceSeen: _on_evidence,
            nodes.NodeFailed: _on_node,
            nodes.NodeGone: _on_node,
            nodes.NodeLost: _on_node,
            nodes.NodeLeft: _finish_held,
            nodes.NodeJoined: _replaced,
            incidents.IncidentOpened: _judge,
            incidents.Diagnosed: choose,
            incidents.ActionChosen: _act,
            world.WorkersStopped: _finish_held,
            progress.FirstStep: _mended,
            job.JobSucceeded: _close_all,
        },
        due=_due,
        tick=_tick,
        # Workers of a job that is about to fail may end by themselves, or need not any more.
        levels=dict.fromkeys((incidents.Diagnosed, incidents.ActionChosen, incidents.IncidentClosed), always),
        alarms={
            incidents.ActionChosen: lambda fact: (
                "the policy's hook failed" if choose_action.UNHEARD in fact.rule else ""
            )
        },
    )


RULES = rules()
