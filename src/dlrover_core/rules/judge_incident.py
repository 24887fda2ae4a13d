"""From what the log has of an incident to the judgement on it: which evidence is its own, who took part, what was before.

Judging happens when something is decided. What it gave is in the log (`incidents.Diagnosed`), and no reader of the log judges.
"""

from __future__ import annotations

from collections.abc import Iterator

from dlrover_core.diagnosis import classify, ladder, policy, procedure, signatures
from dlrover_core.diagnosis.cascades import Member
from dlrover_core.diagnosis.evidence import NODE, PLATFORM, Evidence
from dlrover_core.diagnosis.procedure import Judgement
from dlrover_core.diagnosis.signatures import Table
from dlrover_core.diagnosis.watched import watched
from dlrover_core.job import incidents
from dlrover_core.job.names import group_of
from dlrover_core.job.state import JobState
from dlrover_core.spec import us


def judge(state: JobState, incident: incidents.Incident) -> Judgement:
    """The judgement on all that is known of an incident now."""
    table = signatures.table(state.job.spec.signatures)
    seen = [_asked(one, table, state) for one in _belonging(state, incident)]
    found = procedure.judge(
        seen, table, members=_members(state, incident), history=list(_history(state, incident)), complete=False
    )
    return _unplaced(found) if watched(found.root) else found


def _unplaced(found: Judgement) -> Judgement:
    """A line that was written while its rank lived may have been handled: it ends no job, however often it comes back."""
    action = "proc" if found.action == "fail" else found.action
    return found._replace(root=found.root._replace(place=""), action=action)


def _belonging(state: JobState, incident: incidents.Incident) -> Iterator[Evidence]:
    """Its own evidence, and what was seen before it opened and belongs to no other incident and no other generation."""
    yield from incident.known
    own = {one.seq for one in incident.known}
    others = [one for one in state.incidents.by_number.values() if one.number != incident.number]
    listed: dict[int, list[incidents.Incident]] = {}
    for other in others:
        for seq in other.evidence:
            listed.setdefault(seq, []).append(other)
    over = [one.spent for one in others if one.over_at and one.number < incident.number]
    over += [one for one in state.incidents.spent if one.incident < incident.number]
    current = state.world.worlds.get(incident.group)
    here = {member.node for member in current.members} if current is not None else set()
    for one in state.evidence.recent:
        ours = group_of(one.node) == incident.group and incident.covers(one)
        if not ours or one.seq in own or one.generation not in (0, incident.generation):
            continue
        takers = [past for past in over if past.takes(one)] + [other.spent for other in listed.get(one.seq, ())]
        # Of two broken machines one was the root: the other's kernel is heard again as long as that machine takes part.
        if all(past.leaves(one) and one.node in here for past in takers):
            yield one


def _asked(one: Evidence, table: Table, state: JobState) -> Evidence:
    """With its host; and of a node's end what the table knows of the platform's reason."""
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
    current = state.world.worlds.get(incident.group)
    return [
        Member(one.node, state.hosts.host_of(one.node), one.first_rank, one.nproc)
        for one in (current.members if current is not None else ())
    ]


def _history(state: JobState, incident: incidents.Incident) -> Iterator[Evidence]:
    since = incident.opened_at - us(policy.parsed(state.job.spec.policy).twice_s)
    for number, one in state.incidents.history.items():
        if number < incident.number and one.at >= since:
            yield one


def changes(incident: incidents.Incident, found: Judgement) -> bool:
    """Is this another verdict than the one that stands?"""
    known = incident.verdict, incident.signature, incident.place, incident.hint
    return (found.verdict, found.signature, found.root.place, found.action) != known


def diagnosis(
    state: JobState, incident: incidents.Incident, found: Judgement, *, revises: int = 0, dead: str = ""
) -> incidents.Diagnosed:
    """The verdict as the log has it. ``dead``: the node whose end asks for an action, whoever is at fault.

    A node that is gone by now is not blamed: there is nothing left to do about it.
    """
    root = found.root
    dropped = dict(found.discarded)
    here = [node.node for node in state.nodes.of(incident.group) if node.ready]
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
        ladder.budget_of(found.verdict, found.signature),
    )


def suspicion(incident: incidents.Incident, found: Judgement) -> incidents.ActionChosen:
    """A set of suspects is reported, and nobody is evicted before pairs have been checked."""
    rule = f"suspects: {', '.join(found.suspects)}; reported only, until a check in pairs confirms it"
    return incidents.ActionChosen(incident.number, ladder.SUSPECTS, found.suspects[0], rule, 0)
