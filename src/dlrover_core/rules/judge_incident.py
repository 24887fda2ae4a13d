"""From the log's facts on an incident to its judgement: its own evidence, the members, and earlier root causes.

An incident is judged when a decision is made. The judgement is recorded (`incidents.Diagnosed`), so readers of a log judge
nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

from dlrover_core.diagnosis import classify, ladder, policy, procedure, signatures
from dlrover_core.diagnosis.cascades import Member
from dlrover_core.diagnosis.evidence import DATA, NODE, PLATFORM, Evidence
from dlrover_core.diagnosis.procedure import Judgement
from dlrover_core.diagnosis.signatures import Table
from dlrover_core.diagnosis.watched import watched
from dlrover_core.job import incidents
from dlrover_core.job.poison import FIRST, STUCK
from dlrover_core.job.state import JobState
from dlrover_core.rules import poison
from dlrover_core.spec import us


def judge(state: JobState, incident: incidents.Incident) -> Judgement:
    """The judgement on all evidence of an incident so far."""
    table = signatures.table(state.job.spec.signatures)
    seen = [_asked(one, table, state) for one in _belonging(state, incident)]
    found = procedure.judge(
        seen, table, members=_members(state, incident), history=list(_history(state, incident)), complete=False
    )
    return _unplaced(found) if watched(found.root) else _of_data(state, incident, found)


def _of_data(state: JobState, incident: incidents.Incident, found: Judgement) -> Judgement:
    """The judgement; of class DATA where the same failure has struck the same samples before."""
    hit = poison.finding(state, incident, found.root.seq, found.verdict, found.signature)
    if hit is None or hit.finding in (FIRST, STUCK):
        return found
    where = poison.where(state, state.set_of(incident.node), hit)
    rule = f"{found.rule}; the same failure again at {where}"
    return found._replace(verdict=DATA, action="proc", blamed="", host="", suspects=(), rule=rule)


def _unplaced(found: Judgement) -> Judgement:
    """The judgement without its code location, for a root cause that is a line of a rank that lived on.

    The program may have handled that error, so the line must never count as "repeats at the same place", which ends the
    job.
    """
    action = "proc" if found.action == "fail" else found.action
    return found._replace(root=found.root._replace(place=""), action=action)


def _belonging(state: JobState, incident: incidents.Incident) -> Iterator[Evidence]:
    """The incident's own evidence, and earlier evidence that belongs to no other incident and no other generation."""
    yield from incident.known
    own = {one.seq for one in incident.known}
    others = [one for one in state.incidents.by_number.values() if one.number != incident.number]
    listed: dict[int, list[incidents.Incident]] = {}
    for other in others:
        for seq in other.evidence:
            listed.setdefault(seq, []).append(other)
    of, name = state.set_of, state.set_of(incident.node)
    over = [one.spent(of(one.node)) for one in others if one.over_at and one.number < incident.number]
    over += [one for one in state.incidents.spent if one.incident < incident.number]
    here = {member.node for member in state.world.of(incident.node).members}
    for one in state.evidence.recent:
        ours = of(one.node) == name and incident.covers(one)
        if not ours or one.seq in own or one.generation not in (0, incident.generation):
            continue
        takers = [past for past in over if past.takes(one, name)]
        takers += [other.spent(of(other.node)) for other in listed.get(one.seq, ())]
        # Of two faulty machines one was the earlier root cause. The other's kernel messages count again while it is a member.
        if all(past.leaves(one) and one.node in here for past in takers):
            yield one


def _asked(one: Evidence, table: Table, state: JobState) -> Evidence:
    """The evidence with its host; a node's end also with what the table says about the platform's reason."""
    host = one.host or state.hosts.host_of(one.node)
    if one.source != NODE:
        return one._replace(host=host)
    how, _, reason = one.text.partition(": ")
    found = classify.of_platform(table, how, one.exit_code, reason) if reason else None
    if found is None or found.signature.startswith(("node.", "exit.")):
        return one._replace(host=host)
    return one._replace(
        host=host,
        source=PLATFORM,
        signature=found.signature,
        verdict=found.verdict,
        confidence=found.confidence,
    )


def _members(state: JobState, incident: incidents.Incident) -> list[Member]:
    return [
        Member(one.node, state.hosts.host_of(one.node), one.first_rank, one.nproc)
        for one in state.world.of(incident.node).members
    ]


def _history(state: JobState, incident: incidents.Incident) -> Iterator[Evidence]:
    since = incident.opened_at - us(policy.parsed(state.job.spec.policy).twice_s)
    for number, one in state.incidents.history.items():
        if number < incident.number and one.at >= since:
            yield one


def changes(incident: incidents.Incident, found: Judgement) -> bool:
    """Does this judgement differ from the incident's verdict?"""
    known = incident.verdict, incident.signature, incident.place, incident.hint
    return (found.verdict, found.signature, found.root.place, found.action) != known


def diagnosis(
    state: JobState, incident: incidents.Incident, found: Judgement, *, revises: int = 0, dead: str = ""
) -> incidents.Diagnosed:
    """The verdict as it is recorded. ``dead``: the node whose end asks for an action, whichever node is at fault.

    A node that is gone is not blamed, because no action for it is left.
    """
    root = found.root
    dropped = dict(found.discarded)
    here = [node.node for node in state.nodes.in_set(state.set_of(incident.node)) if node.ready]
    evidence = dict.fromkeys([root.seq, *(seq for seq in dropped if seq not in incident.evidence), *incident.evidence])
    kept = tuple(evidence)[: incidents.EVIDENCE_MAX]
    known = any(one.seq == root.seq for one in incident.known)
    told = not root.signature.startswith("exit.") or found.action in ("isolate", "reset")
    suspected = found.blamed if told and found.blamed in here else ""
    return incidents.Diagnosed(
        incident.number,
        found.verdict,
        found.signature,
        kept,
        found.confidence,
        revises,
        dead or suspected,
        found.rank,
        found.host,
        tuple(seq for seq in kept if seq in dropped),
        found.rule,
        found.action,
        root.place,
        root.node,
        "" if known else root.text[: incidents.LINE_MAX],
        ladder.QUARANTINE if _by_data(state, incident, found) else ladder.budget_of(found.verdict, found.signature),
    )


def _by_data(state: JobState, incident: incidents.Incident, found: Judgement) -> bool:
    """Is it of class DATA because of its samples?"""
    hit = poison.finding(state, incident, found.root.seq, found.verdict, found.signature)
    return found.verdict == DATA and hit is not None and hit.finding not in (FIRST, STUCK)


def suspicion(incident: incidents.Incident, found: Judgement) -> incidents.ActionChosen:
    """Several suspects are reported only. None is evicted before a check in pairs confirms it."""
    rule = f"suspects: {', '.join(found.suspects)}; reported only, until a check in pairs confirms it"
    return incidents.ActionChosen(incident.number, ladder.SUSPECTS, found.suspects[0], rule, 0)
