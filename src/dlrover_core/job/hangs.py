"""Hangs: nobody makes steps, so everybody is looked at, and whoever holds up the others is named.

The leader finds that a world stands still (`runtime.stalls`, by the rule in `diagnosis.stall`) and says so; from then on the
orders of that world carry the number of the hang, every agent shows what its ranks are at, and once all have, or time is over,
one rank is named (`diagnosis.hanging`). That is evidence, and what follows from it is recovery's. A step that comes in between,
or a rank that is busy, ends the suspicion; for the busy one with patience that doubles, up to a bound.

Nothing of a suspicion outlives its world. What was learnt about legal pauses does, and a change of leaders too.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from dlrover_core.diagnosis import stall
from dlrover_core.job import job, world
from dlrover_core.job.names import group_of
from dlrover_core.kernel.engine import Facts
from dlrover_core.kernel.events import Record, event
from dlrover_core.kernel.wire import command, part
from dlrover_core.spec import JobSpec, us


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


@command(15)
class ReportStacks(NamedTuple):
    """An agent: what its ranks are at."""

    node: str
    hang: int
    facts: tuple[str, ...]
    path: str = ""


@part(1)
class Probe(NamedTuple):
    """To members: show what your ranks are at. ``hang``: the number of the hang; 0: there is none."""

    hang: int = 0


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
