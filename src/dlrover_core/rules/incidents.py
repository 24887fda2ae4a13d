"""Failures: exits and deaths open incidents, evidence leads to verdicts, verdicts choose actions.

Every exit belongs to a generation. An exit that the leader asked for, or of an older generation than desired, opens no
incident. The first other exit of a generation opens the incident. Further evidence of that generation joins it, in any
order. A node that dies while an incident of its world is open belongs to the same incident: the verdict is revised, and the
budgets follow (the restart is given back, the relaunch is charged).
"""

from __future__ import annotations

from collections.abc import Iterator

from dlrover_core.data import in_work
from dlrover_core.diagnosis import classify, ladder, signatures
from dlrover_core.diagnosis.classify import describe
from dlrover_core.diagnosis.evidence import OPENING
from dlrover_core.diagnosis.policy import Hook
from dlrover_core.errors import Refused
from dlrover_core.job import evidence, incidents, job, nodes, observing, progress, world
from dlrover_core.job.state import JobState
from dlrover_core.kernel.engine import Rules, always
from dlrover_core.kernel.events import Event, Record
from dlrover_core.rules import checks, choose_action, coupling, freeing, judge_incident, slots, worlds
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
        # The agent's clock may be wrong, but no death is older than time 0.
        min(max(command.age_us, 0), now),
        _last_bytes(command.tail),
        command.error[: incidents.ERROR_MAX],
        *_known_by(state, command),
        command.work if in_work.parsed(command.work) is not None else "",
    )


def _known_by(state: JobState, command: incidents.ReportExit) -> tuple[str, str, str, float]:
    """Signature, place, class and confidence: the agent's if the table knows its signature, else the table's."""
    table = signatures.table(state.job.spec.signatures)
    said = table.get(command.signature)
    if said is not None:
        return said.id, command.place[: incidents.LINE_MAX], said.verdict, said.confidence
    # A worker that the agent killed while it wrote its error file had failed before: its exit code says nothing.
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
            if incident.end_pending:
                yield _final(state, incident)
            elif _needs_no_step(state, state.set_of(incident.node)):
                yield incidents.IncidentClosed(incident.number, max(0, now - incident.cause.at), 0)
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
    """When a pending end of the job is carried out, and when a world that tells no steps counts as mended; None: no deadline."""
    if incident.closed or incident.state == "fatal":
        return None
    if incident.end_pending:
        return _evidence_deadline(state, incident)
    current = state.world.of(incident.node)
    runs = current.active and len(current.started) == len(current.members)
    if incident.generation != incidents.ASIDE and runs and incident.generation < current.generation:
        waits_us = 0 if _needs_no_step(state, state.set_of(incident.node)) else us(state.job.spec.evidence_s)
        return current.formed_at + waits_us
    return None


def _evidence_deadline(state: JobState, incident: incidents.Incident) -> int:
    return incident.opened_at + us(state.job.spec.evidence_s)


# ---- react: evidence -> incident -> verdict


def _on_exit(state: JobState, fact: incidents.WorkerExited, record: Record) -> Iterator[Event]:
    if not _matters(state, fact.node):
        return
    newest = state.world.of(fact.node)
    if newest.active and fact.generation == newest.generation and not fact.asked:
        yield incidents.IncidentOpened(state.incidents.number + 1, fact.node, fact.generation, (fact.rank,))
        return
    incident = state.incidents.of_generation(state.set_of(fact.node), fact.generation)
    if incident is not None and incident.tells(record.seq):
        yield from _rejudge(state, incident)


def _matters(state: JobState, node: str) -> bool:
    """Does the job go on, with this node's set?"""
    return state.job.live and state.set_of(node) not in state.job.given_up


def _rejudge(state: JobState, incident: incidents.Incident) -> Iterator[Event]:
    """Revise the verdict if new evidence changes it. It names no dead node: `_on_node` has answered those."""
    found = judge_incident.judge(state, incident)
    if judge_incident.changes(incident, found):
        yield judge_incident.diagnosis(state, incident, found, revises=incident.diagnosed_seq)


def _on_node(
    state: JobState, fact: nodes.NodeFailed | nodes.NodeGone | nodes.NodeLost, record: Record
) -> Iterator[Event]:
    if not _matters(state, fact.node) or not _counts(state, fact):
        return
    current = state.world.of(fact.node)
    if current.done(fact.node):
        return
    if current.active and current.member(fact.node) is None:
        # A late or booting node: no world is broken.
        yield incidents.IncidentOpened(state.incidents.number + 1, fact.node, incidents.ASIDE, ())
        return
    incident = state.incidents.unmended(state.set_of(fact.node))
    if incident is not None:
        found = judge_incident.judge(state, incident)
        yield judge_incident.diagnosis(state, incident, found, revises=incident.diagnosed_seq, dead=fact.node)
        return
    # While the job is suspended, no world trains that could break.
    generation = incidents.ASIDE if state.job.state == "suspended" else current.generation
    yield incidents.IncidentOpened(state.incidents.number + 1, fact.node, generation, ())


def _on_evidence(state: JobState, fact: evidence.EvidenceSeen, record: Record) -> Iterator[Event]:
    """A failure without a death, such as a hang or a failed check, breaks the running world.

    Other evidence is judged with the incident that it belongs to, or is kept for a later one.
    """
    if not _matters(state, fact.node):
        return
    known = signatures.table(state.job.spec.signatures).get(fact.signature)
    current = state.world.of(fact.node)
    opens = fact.source in OPENING and known is not None and known.action != "obs"
    if opens and current.active and fact.generation in (0, current.generation):
        yield incidents.IncidentOpened(state.incidents.number + 1, fact.node, current.generation, (fact.rank,))
        return
    incident = state.incidents.newest(state.set_of(fact.node))
    if incident is not None and incident.why and incident.tells(record.seq):
        yield from _rejudge(state, incident)


def _on_end_seen(state: JobState, fact: observing.NodeEnded, record: Record) -> Iterator[Event]:
    """The platform's word on a node that had failed before may change the verdict."""
    incident = state.incidents.newest(state.set_of(fact.node))
    if _matters(state, fact.node) and incident is not None and incident.why and incident.tells(record.seq):
        yield from _rejudge(state, incident)


def _counts(state: JobState, fact: nodes.NodeFailed | nodes.NodeGone | nodes.NodeLost) -> bool:
    """Was this death unexpected, and was the node still wanted?"""
    if freeing.why(state, state.set_of(fact.node)):
        return False  # all nodes of its set are released anyway, and no successor is planned
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
    if not _matters(state, incident.node):
        return
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
            # The evidence does not tell which node is at fault: nodes are checked, where checks are on, before training goes on.
            yield from checks.ask(state, state.set_of(incident.node), why)
        yield from slots.complete(state, state.set_of(incident.node))
        yield from worlds.reform(state, state.set_of(incident.node), record.at, why)
    elif fact.action in ladder.RELAUNCHES:
        yield from slots.replace(state, fact.node)
        yield from _complete(state, incident)
    elif fact.action == ladder.GO_ON_SMALLER:
        yield from slots.give_up(state, fact.node)
        yield from _complete(state, incident)
        if incident.generation == incidents.ASIDE:
            yield _closed_aside(incident, record)
    elif fact.action == ladder.AWAIT_EVIDENCE:
        yield from worlds.dissolve(state, state.set_of(incident.node), why)
        if _all_spoke(state, incident):
            yield _final(state, incident)
    elif fact.action in ladder.ENDINGS:
        name = state.set_of(incident.node)
        yield coupling.failed(state, name, incident.rule, incident.number, describe(incident.cause))


def _complete(state: JobState, incident: incidents.Incident) -> Iterator[Event]:
    """Members that had finished and left are needed again when the world must form again."""
    current = state.world.of(incident.node)
    # The release of a living member has already ended its world.
    if not current.active or incident.generation == current.generation:
        yield from slots.complete(state, state.set_of(incident.node))


def _all_spoke(state: JobState, incident: incidents.Incident) -> bool:
    """Has every member of the broken world stopped its workers, or gone?"""
    broken = state.world.of(incident.node)
    return all(_spoke(state, broken, member.node) for member in broken.members)


def _spoke(state: JobState, broken: world.World, name: str) -> bool:
    node = state.nodes.nodes.get(name)
    return name in broken.stopped or name in broken.finished or node is None or not node.joined


def _finish_held(state: JobState, fact: object, record: Record) -> Iterator[Event]:
    if state.job.live:
        for incident in list(state.incidents.by_number.values()):
            if incident.end_pending and not incident.closed and _all_spoke(state, incident):
                yield _final(state, incident)


def _final(state: JobState, incident: incidents.Incident) -> incidents.ActionChosen:
    ends = ladder.FAIL_JOB if state.sets.critical(state.set_of(incident.node)) else ladder.GIVE_UP_SET
    return incidents.ActionChosen(incident.number, ends, incident.node, incident.rule, 0)


# ---- react: mended


def _mended(state: JobState, fact: progress.FirstStep, record: Record) -> Iterator[Event]:
    group = state.set_of(fact.node)
    for incident in list(state.incidents.by_number.values()):
        ours = not incident.closed and state.set_of(incident.node) == group
        if ours and incident.generation < fact.generation:
            yield incidents.IncidentClosed(
                incident.number, max(0, record.at - fact.age_us - incident.cause.at), _steps_lost(incident, fact)
            )


def _stepless(state: JobState, name: str) -> bool:
    """Does this set report no steps in this run, while others do?"""
    told = state.progress.groups
    return name not in told and bool(told)


def _needs_no_step(state: JobState, name: str) -> bool:
    """Does this set make no steps, and no set with steps uses it? Such a set is mended once all its workers run."""
    return state.sets.several and _stepless(state, name) and not any(True for _ in coupling.users(state, name))


def _mend(state: JobState, name: str, generation: int, now: int) -> Iterator[Event]:
    for incident in state.incidents.in_set(name):
        if not incident.closed and incidents.ASIDE != incident.generation < generation:
            yield incidents.IncidentClosed(incident.number, max(0, now - incident.cause.at), 0)


def _used(state: JobState, command: incidents.NoteUsed, now: int) -> Iterator[Event]:
    """A set without steps of its own is mended once a user of it has made a step after all its workers ran."""
    current = state.world.at(command.set)
    runs = current.active and len(current.started) == len(current.members)
    if runs and current.generation == command.generation and _stepless(state, command.set):
        yield from _mend(state, command.set, command.generation, now)


def _replaced(state: JobState, fact: nodes.NodeJoined, record: Record) -> Iterator[Event]:
    """An incident that broke no world is closed when a node joins in the same place."""
    place = fact.node.rsplit("-", 1)[0]
    for incident in list(state.incidents.by_number.values()):
        if incident.generation == incidents.ASIDE and not incident.closed and incident.node.rsplit("-", 1)[0] == place:
            yield _closed_aside(incident, record)


def _closed_aside(incident: incidents.Incident, record: Record) -> incidents.IncidentClosed:
    return incidents.IncidentClosed(incident.number, max(0, record.at - incident.cause.at), 0)


def _steps_lost(incident: incidents.Incident, fact: progress.FirstStep) -> int:
    """Steps begun before the death and made again: the one under way, and those since the restored step."""
    if not fact.told or incident.step < 0:
        return incidents.UNKNOWN
    return max(0, incident.step + 1 - (fact.step - 1))


def _close_all(state: JobState, fact: object, record: Record) -> Iterator[Event]:
    """A script that signals no steps closes its incidents by finishing without an error."""
    for incident in list(state.incidents.by_number.values()):
        if not incident.closed:
            yield incidents.IncidentClosed(incident.number, record.at - incident.cause.at, 0)


def _ends_lingering(state: JobState, fact: incidents.IncidentClosed) -> bool:
    """An open incident lets workers of a set that has no world linger: only then do its nodes' orders depend on it."""
    incident = state.incidents.by_number.get(fact.incident)
    return incident is None or not state.world.of(incident.node).active


def rules(hook: Hook | None = None) -> Rules:
    """The rules, with or without a user's hook. The hook is asked when a decision is made, never when a log is read."""

    def choose(state: JobState, fact: incidents.Diagnosed, record: Record) -> Iterator[Event]:
        return _choose(state, fact, record, hook)

    return Rules(
        decide={incidents.ReportExit: _exit, incidents.NoteUsed: _used},
        react={
            incidents.WorkerExited: _on_exit,
            evidence.EvidenceSeen: _on_evidence,
            nodes.NodeFailed: _on_node,
            observing.NodeEnded: _on_end_seen,
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
        # These events begin or end the time in which workers of a failing job may end by themselves.
        levels={
            **dict.fromkeys((incidents.Diagnosed, incidents.ActionChosen), always),
            incidents.IncidentClosed: _ends_lingering,
        },
        alarms={
            incidents.ActionChosen: lambda fact: (
                "the policy's hook failed" if choose_action.UNHEARD in fact.rule else ""
            )
        },
    )


RULES = rules()
