"""Cycles: what led to completed steps, and what did not.

A cycle is one generation, from its first worker to what broke it. An action has worked when steps are completed after it; a
cycle has gained something when it reaches a step that none before it had reached. A script that does not tell its own step
numbers has gained nobody knows what: an unknown step is never taken for none.
"""

from __future__ import annotations

from dataclasses import dataclass, field

AT_STEP = "step "
"""How the place of a broken loss begins (`pace`)."""


@dataclass(slots=True)
class Failure:
    """What an incident was, as far as the next one is compared with it. ``early``: its generation had made no step."""

    incident: int = 0
    signature: str = ""
    place: str = ""
    step: int = -1
    early: bool = False
    repeats: int = 0

    def same(self, other: Failure) -> bool:
        """Is it the same once more, with nothing gained between: both before any step, or at one and the same step?"""
        alike = (self.signature, self.place) == (other.signature, other.place)
        # A broken loss has no place in the program; its place is the step.
        at_step = self.place.startswith(AT_STEP) or self.step == other.step >= 0
        return alike and ((self.early and other.early) or at_step)


@dataclass(slots=True)
class Cycles:
    """One group. ``stepped``: the newest generation that made a step; ``told``: its step numbers are the script's own.

    ``mark``: the highest such number; ``gained``: it has grown in this cycle; ``stale``: cycles in a row in which it has not.
    ``tried``: restarts in place since the last step, by node; ``renewed``: places that got a new node since.
    ``retries`` in a row. ``before`` is the failure before the newest one.
    """

    stepped: int = 0
    told: bool = False
    mark: int = -1
    gained: bool = False
    stale: int = 0
    counted: bool = False
    tried: dict[str, int] = field(default_factory=dict)
    renewed: list[str] = field(default_factory=list)
    retries: int = 0
    failure: Failure = field(default_factory=Failure)
    before: Failure = field(default_factory=Failure)

    def first(self, generation: int, step: int, *, told: bool) -> None:
        """A generation has made its first step."""
        self.stepped, self.told = generation, told
        self.tried.clear()
        self.renewed.clear()
        self.retries = 0
        self.reach(step)

    def reach(self, step: int) -> None:
        """A step has been made."""
        if self.told and step > self.mark:
            self.mark, self.gained, self.stale = step, True, 0

    def broke(self, incident: int, generation: int, *, counts: bool) -> None:
        """A cycle has ended. ``counts``: by a failure of its workers."""
        self.counted = counts and self.told and not self.gained
        self.stale += self.counted
        self.gained = False
        self.before = self.failure
        self.failure = Failure(incident, early=self.stepped < generation)

    def judge(self, incident: int, signature: str, place: str, step: int, *, free: bool) -> None:
        """What it was is known, or known better. ``free``: it is nobody's failure."""
        if incident != self.failure.incident:
            return
        self.failure.signature, self.failure.place, self.failure.step = signature, place, step
        self.failure.repeats = self.before.repeats + 1 if self.failure.same(self.before) else 0
        if free and self.counted:
            self.stale, self.counted = max(0, self.stale - 1), False

    def restart(self, node: str, *, retry: bool) -> None:
        """The processes are started again, because of this node's."""
        self.tried[node] = self.tried.get(node, 0) + 1
        self.retries = self.retries + 1 if retry else 0

    def fresh(self, place: str) -> None:
        """A place gets a new node."""
        if place not in self.renewed:
            self.renewed.append(place)
