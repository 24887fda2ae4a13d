"""Crash loops: generations that make no step, or no new one, and the back-off before the next generation.

A cycle is one generation, from the start of its first worker to the failure that broke it. A cycle made progress if it
reached a step beyond all earlier cycles. Where a script does not tell its own step numbers, progress is unknown, and
unknown never counts as none. "No step at all" is certain in two cases: earlier generations of the group signalled steps and
this one did not, or the generation lived shorter than `EARLY_S`.

A restart costs a fraction of a second, so a script with a typo could burn a thousand restarts in a minute. The first
restarts come at once all the same, because most early failures are a port or a mount that was not ready. From the third
early failure in a row on, the next world waits, twice as long each time, up to `restart_pause_s`. A failure is early if its
generation made no step within `EARLY_S` of its start and the platform did not cause it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from dlrover_core.spec import us

EARLY_S = 10.0
"""A generation that lived shorter, in seconds, made no step for certain, even where the script never signals one."""
AT_STEP = "step "
"""The place of a broken loss begins with this word (`stragglers`)."""
AT_ONCE = 2
"""So many early failures in a row are answered without a pause."""
FIRST_PAUSE_S = 0.5


@dataclass(slots=True)
class Failure:
    """What the next failure of the set is compared with.

    incident: number of the incident
    place:    location in the user's program
    step:     step at the failure; -1: unknown
    early:    the generation certainly made no step
    repeats:  how many failures before it, in a row, were the same
    """

    incident: int = 0
    signature: str = ""
    place: str = ""
    step: int = -1
    early: bool = False
    repeats: int = 0

    def same(self, other: Failure) -> bool:
        """Is this the same failure once more, without progress: both before any step, or both at the same step?"""
        alike = (self.signature, self.place) == (other.signature, other.place)
        # A broken loss has no location in the program: its place is the step.
        at_step = self.place.startswith(AT_STEP) or self.step == other.step >= 0
        return alike and ((self.early and other.early) or at_step)


@dataclass(slots=True)
class Cycles:
    """Progress and restarts of one coupling set. Times are microseconds by the leader's clock.

    stepped:         newest generation that made a step
    told:            the script tells its own step numbers
    began_at:        when the newest generation formed; 0: it is over
    started_at:      when its first workers ran; 0: not yet
    perhaps:         a step may have been made in this run
    mark:            highest step told; -1: none
    gained:          ``mark`` has grown in this cycle
    stale:           cycles in a row without progress
    idle:            the newest cycle ended without progress, by a failure of its workers
    counted:         ``stale`` counts the newest cycle
    tried:           restarts in place since the last step, by node
    renewed:         places that got a new node since the last step
    retries:         retries in a row
    failure, before: the newest failure, and the one before it
    formed_at:       when the newest world formed
    early:           early failures in a row
    failed_at:       when the processes were last started again
    pause_us:        pause that the newest action asks of the next world
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
        """The next generation begins, whether or not a failure broke the one before."""
        self._over(at)
        self.began_at = self.formed_at = at

    def started(self, at: int) -> None:
        """Workers of the newest generation run."""
        self.started_at = self.started_at or at

    def _over(self, at: int) -> bool:
        """The newest generation has ended. Returns whether it may have made unreported steps."""
        # A start reported after the death does not tell how long the worker lived: the time then counts from its world.
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
        """A cycle has ended. ``counts``: a failure of its workers ended it."""
        unknown = self._over(at)
        self.idle = self.counted = counts and self.told and not self.gained
        self.stale += self.counted
        self.gained = False
        self.before = self.failure
        self.failure = Failure(incident, early=self.stepped < generation and not unknown)

    def judge(self, incident: int, signature: str, place: str, step: int, *, free: bool) -> None:
        """The newest failure's verdict is known, or was revised. ``free``: the program did not cause it."""
        if incident != self.failure.incident:
            return
        self.failure.signature, self.failure.place, self.failure.step = signature, place, step
        self.failure.repeats = self.before.repeats + 1 if self.failure.same(self.before) else 0
        counts = self.idle and not free
        self.stale, self.counted = self.stale + counts - self.counted, counts

    def restart(self, node: str, *, retry: bool) -> None:
        """The processes are started again because of a failure on this node."""
        self.tried[node] = self.tried.get(node, 0) + 1
        self.retries = self.retries + 1 if retry else 0

    def back_off(self, generation: int, at: int, *, free: bool, pause_us: int) -> None:
        """A generation is started again now: count its failure if it was early. ``free``: the program did not cause it."""
        early = self.stepped < generation and not free and at - self.formed_at < us(EARLY_S)
        self.early, self.failed_at, self.pause_us = (self.early + 1 if early else 0), at, pause_us

    def not_before(self, pause_max_s: float) -> int:
        """When the next world may form, in microseconds; 0: at once."""
        doublings = self.early - AT_ONCE - 1
        early = us(min(FIRST_PAUSE_S * 2.0 ** min(doublings, 30), pause_max_s)) if doublings >= 0 else 0
        pause = max(early, self.pause_us)
        return self.failed_at + pause if pause or doublings >= 0 else 0

    def fresh(self, place: str) -> None:
        """A place gets a new node."""
        if place not in self.renewed:
            self.renewed.append(place)
