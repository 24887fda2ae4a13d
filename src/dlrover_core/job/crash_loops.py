"""Crash loops: generations that make no step, or none that is new; and how long the next one waits.

A cycle is one generation, from its first worker to what broke it. An action has worked when steps are completed after it; a
cycle has gained something when it reaches a step that none before it had reached. A script that does not tell its own step
numbers has gained nobody knows what: an unknown step is never taken for none. So it is with one that signals no steps at all:
that a generation has made none is known where its group has signalled steps before, or where it ran shorter than `EARLY_S`.

A restart costs a fraction of a second, so a script with a typo could burn a thousand of them in a minute. The first restarts
come at once all the same, because most early failures are a port or a mount that was not ready. From the third early failure
in a row on there is a pause before the next world forms, twice as long each time, up to `restart_pause_s`. Such a failure is
not the platform's doing, and is of a generation that has made no step within `EARLY_S` of its start.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from dlrover_core.spec import us

EARLY_S = 10.0
"""Of who lived shorter it is known that it made no step, even in a job that never signals one."""
AT_STEP = "step "
"""How the place of a broken loss begins (`stragglers`)."""
AT_ONCE = 2
"""Early failures in a row that are answered at once."""
FIRST_PAUSE_S = 0.5


@dataclass(slots=True)
class Failure:
    """What an incident was, as far as the next one is compared with it. ``early``: it is known that no step was made."""

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

    ``began_at``: when the newest generation formed, 0: it is over; ``started_at``: when its first workers ran. ``perhaps``: a
    step may have been made in this run, as far as anybody knows. ``mark``: the highest told; ``gained``: it has grown in this
    cycle; ``stale``: cycles in a row in which it has not; ``idle``: the newest was one; ``counted``: it is among them.
    ``tried``: restarts in place since the last step, by node; ``renewed``: places that got a new node since.
    ``retries`` in a row. ``before`` is the failure before the newest one.
    ``formed_at``: when the newest world formed; ``early``: early failures in a row; ``failed_at``: when the processes were last
    started again; ``pause_us``: how long the action of then asks the next world to wait.
    """

    stepped: int = 0
    told: bool = False
    began_at: int = 0
    started_at: int = 0
    perhaps: bool = False
    mark: int = -1
    gained: bool = False
    stale: int = 0
    idle: bool = False
    counted: bool = False
    tried: dict[str, int] = field(default_factory=dict)
    renewed: list[str] = field(default_factory=list)
    retries: int = 0
    failure: Failure = field(default_factory=Failure)
    before: Failure = field(default_factory=Failure)
    formed_at: int = 0
    early: int = 0
    failed_at: int = 0
    pause_us: int = 0

    def formed(self, at: int) -> None:
        """The next generation begins, whether or not anything has broken the one before."""
        self._over(at)
        self.began_at = self.formed_at = at

    def started(self, at: int) -> None:
        """Workers of the newest generation run."""
        self.started_at = self.started_at or at

    def _over(self, at: int) -> bool:
        """The newest generation has ended: may it have made steps that nobody knows of?"""
        # A start that was told after the death says nothing of how long it lived: then it is as old as its world.
        since = self.started_at if self.started_at <= at else 0
        unknown = not self.stepped and self.began_at > 0 and at - (since or self.began_at) >= us(EARLY_S)
        self.perhaps = self.perhaps or unknown
        self.began_at = self.started_at = 0
        return unknown

    def first(self, generation: int, step: int, *, told: bool) -> None:
        """A generation has made its first step."""
        self.stepped, self.told, self.perhaps = generation, told, True
        self.tried.clear()
        self.renewed.clear()
        self.retries = self.early = 0
        self.reach(step)

    def reach(self, step: int) -> None:
        """A step has been made."""
        if self.told and step > self.mark:
            self.mark, self.gained, self.stale = step, True, 0
            self.idle = self.counted = False

    def broke(self, incident: int, generation: int, at: int, *, counts: bool) -> None:
        """A cycle has ended. ``counts``: by a failure of its workers."""
        unknown = self._over(at)
        self.idle = self.counted = counts and self.told and not self.gained
        self.stale += self.counted
        self.gained = False
        self.before = self.failure
        self.failure = Failure(incident, early=self.stepped < generation and not unknown)

    def judge(self, incident: int, signature: str, place: str, step: int, *, free: bool) -> None:
        """What it was is known, or known better. ``free``: it is nobody's failure."""
        if incident != self.failure.incident:
            return
        self.failure.signature, self.failure.place, self.failure.step = signature, place, step
        self.failure.repeats = self.before.repeats + 1 if self.failure.same(self.before) else 0
        counts = self.idle and not free
        self.stale, self.counted = self.stale + counts - self.counted, counts

    def restart(self, node: str, *, retry: bool) -> None:
        """The processes are started again, because of this node's."""
        self.tried[node] = self.tried.get(node, 0) + 1
        self.retries = self.retries + 1 if retry else 0

    def back_off(self, generation: int, at: int, *, free: bool, pause_us: int) -> None:
        """A generation is started again now: count it if it failed early. ``free``: it is nobody's failure."""
        early = self.stepped < generation and not free and at - self.formed_at < us(EARLY_S)
        self.early, self.failed_at, self.pause_us = (self.early + 1 if early else 0), at, pause_us

    def not_before(self, pause_max_s: float) -> int:
        """When the next world may form, in microseconds; 0 where nothing has to wait."""
        doublings = self.early - AT_ONCE - 1
        early = us(min(FIRST_PAUSE_S * 2.0 ** min(doublings, 30), pause_max_s)) if doublings >= 0 else 0
        pause = max(early, self.pause_us)
        return self.failed_at + pause if pause or doublings >= 0 else 0

    def fresh(self, place: str) -> None:
        """A place gets a new node."""
        if place not in self.renewed:
            self.renewed.append(place)
