"""Hangs: a standstill is suspected, ranks are inspected, and one is named."""

from __future__ import annotations

from collections.abc import Iterator

from dlrover_core.diagnosis import hanging, signatures, stall
from dlrover_core.diagnosis.evidence import HANG
from dlrover_core.errors import Refused
from dlrover_core.job import evidence, hangs
from dlrover_core.job.state import JobState
from dlrover_core.kernel.engine import Rules, Telling, Tells, always
from dlrover_core.kernel.events import Event, Record
from dlrover_core.rules import slots
from dlrover_core.spec import us

REPORTED = "hang.reported"
PATH_CHARS_MAX = 300
FACTS_MAX = 64


# ---- decide


def _stall(state: JobState, command: hangs.NoteStall, now: int) -> Iterator[Event]:
    current = state.world.at(command.group)
    if not state.job.live or not current.active or not state.job.policy(command.group).hang_s:
        return
    if state.plans.waits(command.group):
        return  # ranks wait at the boundary of a planned change, as ordered; that has a time-out of its own
    patience = state.hangs.patience_us(command.group, command.generation, command.step)
    if (
        command.generation == current.generation
        and state.hangs.suspected(command.group) is None
        and 0 <= patience <= command.idle_us
        # A pause of the master, or a change of leaders, may have been recorded since the leader looked.
        and now - state.job.calm_at >= command.threshold_us
    ):
        yield hangs.HangSuspected(state.hangs.number + 1, *command)


def _moving(state: JobState, command: hangs.NoteMoving, now: int) -> Iterator[Event]:
    found = state.hangs.suspected(command.group)
    if found is not None and found.number == command.hang:
        yield hangs.HangDismissed(found.number, command.group, "a step was made meanwhile")


def _pause(state: JobState, command: hangs.NotePauseLegal, now: int) -> Iterator[Event]:
    if 0 <= command.phase < len(stall.PHASES) and command.pause_us > state.hangs.learnt_us(
        command.group, command.phase
    ):
        yield hangs.PauseLearned(*command)


def _stacks(state: JobState, command: hangs.ReportStacks, now: int) -> Iterator[Event]:
    slots.present(state, command.node)
    found = state.hangs.suspected(state.set_of(command.node))
    if found is None or found.number != command.hang:
        raise Refused(f"hang {command.hang} is not looked at any more")
    if command.node in found.facts:
        raise Refused(f"node {command.node!r} has shown its stacks already")
    if state.world.of(command.node).member(command.node) is None:
        raise Refused(f"node {command.node!r} has no rank in this world")
    facts = tuple(one for one in command.facts[:FACTS_MAX] if len(one.encode()) <= hanging.FACTS_BYTES_MAX)
    yield hangs.StacksSeen(command.hang, command.node, facts, command.path[:PATH_CHARS_MAX])


def _since(state: JobState, found: hangs.Hang) -> int:
    """When ranks could first report what they execute: without a leader, no agent was asked."""
    return max(found.at, state.job.calm_at)


def _collected(state: JobState, found: hangs.Hang) -> int:
    return _since(state, found) + us(state.job.spec.hang_collect_s)


def _due(state: JobState) -> int | None:
    if not state.job.live:
        return None
    return min((_collected(state, one) for one in state.hangs.hangs.values() if one.state == "suspected"), default=None)


def _tick(state: JobState, now: int) -> Iterator[Event]:
    for found in list(state.hangs.hangs.values()):
        if state.job.live and found.state == "suspected" and now >= _collected(state, found):
            yield from _judge(state, found, now)


# ---- react


def _seen(state: JobState, fact: hangs.StacksSeen, record: Record) -> Iterator[Event]:
    found = state.hangs.suspected(state.set_of(fact.node))
    if found is None:
        return
    current = state.world.worlds[found.group]
    if all(one.node in found.facts or current.done(one.node) for one in current.members):
        yield from _judge(state, found, record.at)


def _judge(state: JobState, found: hangs.Hang, now: int) -> Iterator[Event]:
    """Name the rank that hangs, or dismiss the suspicion."""
    current = state.world.worlds[found.group]
    ranks: dict[int, str] = {}
    for member in current.members:
        if not current.done(member.node):
            ranks |= dict.fromkeys(range(member.first_rank, member.first_rank + member.nproc), member.node)
    told = [hanging.from_text(text) for texts in found.facts.values() for text in texts]
    seen = {one.rank: one for one in told if one is not None and one.rank in ranks}
    # Nothing is known about steps made while there was no leader.
    idle_us = found.idle_us + now - _since(state, found)
    if any(0 <= one.idle_us < min(found.threshold_us, idle_us // 2) for one in seen.values()):
        yield hangs.HangDismissed(found.number, found.group, "a step was made meanwhile")
        return
    named = hanging.name(seen, list(ranks))
    limits = hangs.limits(state.job.spec, state.job.policy(found.group).hang_s)
    patience = stall.patience_us(limits, found.idle_us, found.threshold_us) if named.busy else 0
    if patience:
        who = f"rank {named.rank} is busy in {named.where}" if named.rank >= 0 else "ranks are busy"
        yield hangs.HangDismissed(found.number, found.group, who, patience)
        return
    node = ranks.get(named.rank) or next(iter(ranks.values()), "")
    path = found.paths.get(node, "")
    text = hanging.sentence(named, node, seen.get(named.rank), idle_us, path)
    yield hangs.HangNamed(
        found.number, found.group, named.signature, node, named.ranks, named.rule, text, f"hang in {named.where}"
    )


def _named(state: JobState, fact: hangs.HangNamed, record: Record) -> Iterator[Event]:
    spec = state.job.spec
    known = signatures.table(spec.signatures).get(fact.signature if spec.hang_action == "restart" else REPORTED)
    node, found = state.nodes.nodes.get(fact.node), state.hangs.hangs[fact.group]
    if known is not None and node is not None:
        yield evidence.EvidenceSeen(
            node=fact.node,
            source=HANG,
            signature=known.id,
            verdict=known.verdict,
            confidence=known.confidence,
            text=fact.text[: evidence.TEXT_MAX],
            rank=fact.ranks[0] if fact.ranks else -1,
            generation=found.generation,
            # The standstill began with the last step.
            age_us=min(record.at, found.idle_us + record.at - found.at),
            place=fact.place[: evidence.TEXT_MAX] if fact.ranks else "",
            subject=",".join(map(str, fact.ranks))[: evidence.SUBJECT_MAX],
            host=node.host,
            step=found.step,
        )


def _probe(state: JobState, group: str, hang: int) -> Telling:
    members = state.world.worlds[group].members if hang else ()
    return Telling(working=dict.fromkeys((one.node for one in members), hangs.Probe(hang)))


RULES = Rules(
    decide={
        hangs.NoteStall: _stall,
        hangs.NoteMoving: _moving,
        hangs.NotePauseLegal: _pause,
        hangs.ReportStacks: _stacks,
    },
    react={hangs.StacksSeen: _seen, hangs.HangNamed: _named},
    due=_due,
    tick=_tick,
    levels=dict.fromkeys((hangs.HangSuspected, hangs.HangDismissed, hangs.HangNamed), always),
    tells=Tells(lambda state, group: state.hangs.probe(group), _probe),
)
