"""Hangs: nobody makes steps, so everybody is looked at, and whoever holds up the others is named.

The leader finds that a world stands still (`runtime.stalls`, by the rule in `diagnosis.stall`) and says so; from then on the
orders of that world carry the number of the hang, every agent shows what its ranks are at, and once all have, or time is over,
one rank is named (`diagnosis.hanging`). That is evidence, and what follows from it is recovery's. A step that comes in between,
or a rank that is busy, ends the suspicion; for the busy one with patience that doubles, up to a bound.

Nothing of a suspicion outlives its world. What was learnt about legal pauses does, and a change of leaders too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from dlrover_core.diagnosis import hanging, signatures, stall
from dlrover_core.diagnosis.evidence import HANG
from dlrover_core.errors import Refused
from dlrover_core.job import evidence, job, nodes, world
from dlrover_core.job.world import group_of
from dlrover_core.kernel.engine import Facts, Rules, always
from dlrover_core.kernel.events import Event, Record, event
from dlrover_core.spec import us

if TYPE_CHECKING:
    from dlrover_core.job.state import JobState
    from dlrover_core.spec import JobSpec

REPORTED = "hang.reported"
PATH_CHARS_MAX = 300
FACTS_MAX = 64


@event(110)
class HangSuspected(NamedTuple):
    """No rank of a generation has made a step since ``step`` for ``idle_us``; ``threshold_us`` is of that ``budget``."""

    hang: int
    group: str
    generation: int
    step: int
    idle_us: int
    threshold_us: int
    budget: str


@event(111)
class StacksSeen(NamedTuple):
    """What the ranks of a node were at, each as `hanging.to_text` writes it; all of it lies at ``path`` on its host."""

    hang: int
    node: str
    facts: tuple[str, ...]
    path: str = ""


@event(112)
class HangDismissed(NamedTuple):
    """It was none, or is none yet: with ``patience_us`` the same standstill is looked at again once it has lasted so long."""

    hang: int
    group: str
    why: str
    patience_us: int = 0


@event(113)
class HangNamed(NamedTuple):
    """Who hangs: ``ranks``, the first of them on ``node``; none where nobody stands out. ``rule`` is what told."""

    hang: int
    group: str
    signature: str
    node: str
    ranks: tuple[int, ...]
    rule: str
    text: str
    place: str = ""


@event(114)
class PauseLearned(NamedTuple):
    """A pause in this phase (`stall.PHASES`) ended by itself after so long: such a one is legal."""

    group: str
    phase: int
    pause_us: int


class NoteStall(NamedTuple):
    """The leader: by heartbeats nobody makes steps."""

    group: str
    generation: int
    step: int
    idle_us: int
    threshold_us: int
    budget: str


class NoteMoving(NamedTuple):
    """The leader: after the suspicion somebody has made a step."""

    group: str
    hang: int


class NotePauseLegal(NamedTuple):
    """The leader: a longer pause than ever has ended by itself."""

    group: str
    phase: int
    pause_us: int


class ReportStacks(NamedTuple):
    """An agent: what its ranks are at."""

    node: str
    hang: int
    facts: tuple[str, ...]
    path: str = ""


@dataclass(slots=True)
class Hang:
    """The newest standstill of a world. ``state``: suspected, named, or dismissed; then ``patience_us`` of it are legal."""

    number: int
    group: str
    generation: int
    step: int
    at: int
    idle_us: int
    threshold_us: int
    state: str = "suspected"
    patience_us: int = 0
    facts: dict[str, tuple[str, ...]] = field(default_factory=dict)
    paths: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class HangSlice:
    """The newest hang of every group's world, how many there were, and the longest legal pauses by group and phase."""

    hangs: dict[str, Hang] = field(default_factory=dict)
    number: int = 0
    pauses: dict[str, list[int]] = field(default_factory=dict)

    def suspected(self, group: str) -> Hang | None:
        """The hang about which ranks are being asked now."""
        found = self.hangs.get(group)
        return found if found is not None and found.state == "suspected" else None

    def probe(self, group: str) -> int:
        """What a group's orders carry: the number of the hang that is looked at; 0: none."""
        found = self.suspected(group)
        return found.number if found is not None else 0

    def patience_us(self, group: str, generation: int, step: int) -> int:
        """How long this standstill may last before it is looked at (again); -1: it was judged."""
        found = self.hangs.get(group)
        if found is None or found.generation != generation:
            return 0
        if found.state == "named":
            return -1 if found.step == step else 0
        return found.patience_us if found.step == step else 0

    def learnt_us(self, group: str, phase: int) -> int:
        """The longest pause in a phase that ended by itself."""
        known = self.pauses.get(group, [])
        return known[phase] if phase < len(known) else 0


def limits(spec: JobSpec) -> stall.Limits:
    """What the job's spec says about standing still."""
    return stall.Limits(us(spec.hang_s), us(spec.hang_first_step_s), us(spec.hang_phase_s))


# ---- decide


def _stall(state: JobState, command: NoteStall, now: int) -> Iterator[Event]:
    current = state.world.worlds.get(command.group)
    if not state.job.live or not state.job.spec.hang_s or current is None or not current.active:
        return
    if state.planning.waits(command.group):
        return  # they stand at the boundary of a planned change, as they were told to: that has a bound of its own
    patience = state.hangs.patience_us(command.group, command.generation, command.step)
    if (
        command.generation == current.generation
        and state.hangs.suspected(command.group) is None
        and 0 <= patience <= command.idle_us
        # A pause of everything, or a change of leaders, may have been recorded since the leader looked.
        and now - state.job.calm_at >= command.threshold_us
    ):
        yield HangSuspected(state.hangs.number + 1, *command)


def _moving(state: JobState, command: NoteMoving, now: int) -> Iterator[Event]:
    found = state.hangs.suspected(command.group)
    if found is not None and found.number == command.hang:
        yield HangDismissed(found.number, command.group, "a step was made meanwhile")


def _pause(state: JobState, command: NotePauseLegal, now: int) -> Iterator[Event]:
    if 0 <= command.phase < len(stall.PHASES) and command.pause_us > state.hangs.learnt_us(
        command.group, command.phase
    ):
        yield PauseLearned(*command)


def _stacks(state: JobState, command: ReportStacks, now: int) -> Iterator[Event]:
    nodes.present(state, command.node)
    found = state.hangs.suspected(group_of(command.node))
    if found is None or found.number != command.hang:
        raise Refused(f"hang {command.hang} is not looked at any more")
    if command.node in found.facts:
        raise Refused(f"node {command.node!r} has shown its stacks already")
    if state.world.of(command.node).member(command.node) is None:
        raise Refused(f"node {command.node!r} has no rank in this world")
    facts = tuple(one for one in command.facts[:FACTS_MAX] if len(one.encode()) <= hanging.FACTS_BYTES_MAX)
    yield StacksSeen(command.hang, command.node, facts, command.path[:PATH_CHARS_MAX])


def _since(state: JobState, found: Hang) -> int:
    """From when on ranks could show what they are at: without a leader nobody asked them."""
    return max(found.at, state.job.calm_at)


def _collected(state: JobState, found: Hang) -> int:
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


def _seen(state: JobState, fact: StacksSeen, record: Record) -> Iterator[Event]:
    found = state.hangs.suspected(group_of(fact.node))
    if found is None:
        return
    current = state.world.worlds[found.group]
    if all(one.node in found.facts or current.done(one.node) for one in current.members):
        yield from _judge(state, found, record.at)


def _judge(state: JobState, found: Hang, now: int) -> Iterator[Event]:
    """Name one, or let it be."""
    current = state.world.worlds[found.group]
    ranks: dict[int, str] = {}
    for member in current.members:
        if not current.done(member.node):
            ranks |= dict.fromkeys(range(member.first_rank, member.first_rank + member.nproc), member.node)
    told = [hanging.from_text(text) for texts in found.facts.values() for text in texts]
    seen = {one.rank: one for one in told if one is not None and one.rank in ranks}
    # Of a time without a leader nobody knows whether steps were made in it.
    idle_us = found.idle_us + now - _since(state, found)
    if any(0 <= one.idle_us < min(found.threshold_us, idle_us // 2) for one in seen.values()):
        yield HangDismissed(found.number, found.group, "a step was made meanwhile")
        return
    named = hanging.name(seen, list(ranks))
    patience = stall.patience_us(limits(state.job.spec), found.idle_us, found.threshold_us) if named.busy else 0
    if patience:
        who = f"rank {named.rank} is busy in {named.where}" if named.rank >= 0 else "ranks are busy"
        yield HangDismissed(found.number, found.group, who, patience)
        return
    node = ranks.get(named.rank) or next(iter(ranks.values()), "")
    path = found.paths.get(node, "")
    text = hanging.sentence(named, node, seen.get(named.rank), idle_us, path)
    yield HangNamed(
        found.number, found.group, named.signature, node, named.ranks, named.rule, text, f"hang in {named.where}"
    )


def _named(state: JobState, fact: HangNamed, record: Record) -> Iterator[Event]:
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
            # It began with the last step.
            age_us=min(record.at, found.idle_us + record.at - found.at),
            place=fact.place[: evidence.TEXT_MAX] if fact.ranks else "",
            subject=",".join(map(str, fact.ranks))[: evidence.SUBJECT_MAX],
            host=node.host,
            step=found.step,
        )


# ---- evolve


def _on_created(slice_: HangSlice, fact: job.JobCreated, record: Record) -> None:
    slice_.hangs.clear()
    slice_.pauses.clear()


def _on_world(slice_: HangSlice, fact: world.WorldFormed | world.WorldDissolved, record: Record) -> None:
    slice_.hangs.pop(fact.group, None)


def _on_suspected(slice_: HangSlice, fact: HangSuspected, record: Record) -> None:
    slice_.number = fact.hang
    slice_.hangs[fact.group] = Hang(
        fact.hang, fact.group, fact.generation, fact.step, record.at, fact.idle_us, fact.threshold_us
    )


def _on_stacks(slice_: HangSlice, fact: StacksSeen, record: Record) -> None:
    found = slice_.hangs[group_of(fact.node)]
    found.facts[fact.node], found.paths[fact.node] = fact.facts, fact.path


def _on_dismissed(slice_: HangSlice, fact: HangDismissed, record: Record) -> None:
    found = slice_.hangs[fact.group]
    found.state, found.patience_us = "dismissed", fact.patience_us
    found.facts, found.paths = {}, {}


def _on_named(slice_: HangSlice, fact: HangNamed, record: Record) -> None:
    found = slice_.hangs[fact.group]
    found.state = "named"
    found.facts, found.paths = {}, {}


def _on_learned(slice_: HangSlice, fact: PauseLearned, record: Record) -> None:
    known = slice_.pauses.setdefault(fact.group, [0] * len(stall.PHASES))
    known[fact.phase] = max(known[fact.phase], fact.pause_us)


FACTS = Facts(
    kinds=(HangSuspected, StacksSeen, HangDismissed, HangNamed, PauseLearned),
    evolve={
        job.JobCreated: _on_created,
        world.WorldFormed: _on_world,
        world.WorldDissolved: _on_world,
        HangSuspected: _on_suspected,
        StacksSeen: _on_stacks,
        HangDismissed: _on_dismissed,
        HangNamed: _on_named,
        PauseLearned: _on_learned,
    },
)

RULES = Rules(
    decide={NoteStall: _stall, NoteMoving: _moving, NotePauseLegal: _pause, ReportStacks: _stacks},
    react={StacksSeen: _seen, HangNamed: _named},
    due=_due,
    tick=_tick,
    levels=dict.fromkeys((HangSuspected, HangDismissed, HangNamed), always),
)
