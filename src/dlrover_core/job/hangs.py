"""Hangs: no rank makes a step, so every rank is inspected, and the rank that holds up the others is named.

The leader finds that a world stands still (`runtime.stalls`, by the rule in `diagnosis.stall`) and records it. From then on
the orders of that world carry the number of the hang, and every agent reports what its ranks execute. Once all agents have,
or the time is over, one rank is named (`diagnosis.hanging`). That is evidence, and recovery follows from it. A step made
meanwhile, or a rank that is busy, ends the suspicion. After a busy rank, the patience for the same standstill doubles, up
to a bound.

A suspicion ends with its world. The pauses that were learned as legal outlive it, and changes of the leader too.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from dlrover_core.diagnosis import stall
from dlrover_core.job import world
from dlrover_core.job.sets import Coupled
from dlrover_core.kernel.engine import Facts
from dlrover_core.kernel.events import Record, event
from dlrover_core.kernel.state import lasting
from dlrover_core.kernel.wire import command, part
from dlrover_core.spec import JobSpec, us


@event(110)
class HangSuspected(NamedTuple):
    """No rank of a generation has made a step since ``step``.

    idle_us:      time since then
    threshold_us: time after which that is suspicious
    budget:       what the threshold follows from
    """

    hang: int
    group: str
    generation: int
    step: int
    idle_us: int
    threshold_us: int
    budget: str


@event(111)
class StacksSeen(NamedTuple):
    """What the ranks of a node execute, each as `hanging.to_text` writes it. ``path``: the full stacks, on the node's host."""

    hang: int
    node: str
    facts: tuple[str, ...]
    path: str = ""


@event(112)
class HangDismissed(NamedTuple):
    """The suspicion was wrong, or early: the same standstill is inspected again once it has lasted for ``patience_us``."""

    hang: int
    group: str
    why: str
    patience_us: int = 0


@event(113)
class HangNamed(NamedTuple):
    """The ranks that hang.

    signature: of the hang
    node:      node of the first of ``ranks``
    ranks:     global ranks; empty: no rank stands out
    rule:      the rule of `diagnosis.hanging` that named them
    place:     location in the user's program
    """

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
    """A pause in this phase (`stall.PHASES`) ended by itself after this time, so a pause of this length is legal from now on."""

    group: str
    phase: int
    pause_us: int


class NoteStall(NamedTuple):
    """The leader: by heartbeats no rank makes steps. Fields as in `HangSuspected`."""

    group: str
    generation: int
    step: int
    idle_us: int
    threshold_us: int
    budget: str


class NoteMoving(NamedTuple):
    """The leader: a rank made a step after the suspicion."""

    group: str
    hang: int


class NotePauseLegal(NamedTuple):
    """The leader: a pause longer than any before ended by itself."""

    group: str
    phase: int
    pause_us: int


@command(15)
class ReportStacks(NamedTuple):
    """An agent: what its ranks execute."""

    node: str
    hang: int
    facts: tuple[str, ...]
    path: str = ""


@part(1)
class Probe(NamedTuple):
    """To members: report what your ranks execute. ``hang``: number of the hang; 0: there is none."""

    hang: int = 0


@dataclass(slots=True)
class Hang:
    """The newest standstill of a world.

    at:                    when it was suspected, microseconds
    idle_us, threshold_us: as in `HangSuspected`
    state:                 suspected, named or dismissed
    patience_us:           time without a step that is legal, once it is dismissed
    facts:                 what ranks execute, by node
    paths:                 where the full stacks are, by node
    """

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
class HangSlice(Coupled):
    """The newest hang of every set's world, how many hangs there were, and the longest legal pauses by set and phase."""

    hangs: dict[str, Hang] = field(default_factory=dict)
    number: int = lasting(int)
    pauses: dict[str, list[int]] = field(default_factory=dict)

    def suspected(self, group: str) -> Hang | None:
        """The hang that ranks are inspected for now; None: none."""
        found = self.hangs.get(group)
        return found if found is not None and found.state == "suspected" else None

    def probe(self, group: str) -> int:
        """What orders carry: the number of the hang that is inspected; 0: none."""
        found = self.suspected(group)
        return found.number if found is not None else 0

    def patience_us(self, group: str, generation: int, step: int) -> int:
        """How long this standstill may last before ranks are inspected (again); -1: it was judged."""
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


def limits(spec: JobSpec, hang_s: float) -> stall.Limits:
    """The spec's limits for a standstill. ``hang_s``: the set's (`job.JobSlice.policy`)."""
    return stall.Limits(us(hang_s), us(spec.hang_first_step_s), us(spec.hang_phase_s))


# ---- evolve


def _on_world(slice_: HangSlice, fact: world.WorldFormed | world.WorldDissolved, record: Record) -> None:
    slice_.hangs.pop(fact.group, None)


def _on_suspected(slice_: HangSlice, fact: HangSuspected, record: Record) -> None:
    slice_.number = fact.hang
    slice_.hangs[fact.group] = Hang(
        fact.hang, fact.group, fact.generation, fact.step, record.at, fact.idle_us, fact.threshold_us
    )


def _on_stacks(slice_: HangSlice, fact: StacksSeen, record: Record) -> None:
    found = slice_.hangs[slice_.set_of(fact.node)]
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
        world.WorldFormed: _on_world,
        world.WorldDissolved: _on_world,
        HangSuspected: _on_suspected,
        StacksSeen: _on_stacks,
        HangDismissed: _on_dismissed,
        HangNamed: _on_named,
        PauseLearned: _on_learned,
    },
)
