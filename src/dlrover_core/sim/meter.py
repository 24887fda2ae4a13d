"""Where the time goes: every moment of the job's life is of one class, and every recovery has its phases.

A class follows from a few facts, and is looked up anew whenever one of them changes. Only while training makes steps it is
training itself that says how much of the time was for what.
"""

from __future__ import annotations

from typing import Protocol

from dlrover_core.job import incidents, job, world
from dlrover_core.kernel.events import Record
from dlrover_core.sim import training
from dlrover_core.sim.clock import SECOND_US, Clock
from dlrover_core.sim.run import (
    CHECKPOINT,
    CLASSES,
    DEGRADED,
    DETECT,
    FINISH,
    FORM,
    LOAD,
    REPLAY,
    STARTUP,
    STOP,
    SUSPENDED,
    TRAINING,
    WAIT,
    Recovery,
)
from dlrover_core.sim.scenario import Scenario
from dlrover_core.sim.training import Training
from dlrover_core.spec import us

# The records that change a fact.
MARKS = frozenset(
    {
        incidents.IncidentOpened,
        world.WorldFormed,
        world.WorldDissolved,
        job.JobSuspended,
        job.JobResumed,
        job.JobSucceeded,
        job.JobFailed,
        job.JobStopped,
    }
)


class Strikes(Protocol):
    """Who breaks things."""

    newest: str


class Site(Protocol):
    """What the meter needs of a run."""

    clock: Clock
    scenario: Scenario
    training: Training

    @property
    def strikes(self) -> Strikes:
        """Who breaks things."""
        ...


class Meter(training.Meter):
    """One job's time, in microseconds while it is measured."""

    def __init__(self, sim: Site) -> None:
        self._sim, self._clock = sim, sim.clock
        self._step_us = us(sim.scenario.step_s)
        self._us = dict.fromkeys(CLASSES, 0.0)
        self._class, self._since, self._told = STARTUP, 0, 0.0
        self._stepped = self._stepping = self._undetected = self._formed = False
        self._suspended = self._finished = self._over = False
        self._stopping: set[str] = set()
        self._incident: incidents.IncidentOpened | None = None
        self._cause = ""
        self._down: dict[str, float] | None = None
        self._evidence_at = -1
        self._decided = 0.0
        self._lost_us = 0.0
        self.recoveries: list[Recovery] = []

    # ---- classes

    def _now(self) -> str:
        if not self._stepped:
            return STARTUP
        if self._stepping:
            return TRAINING
        if self._finished:
            return FINISH
        if self._suspended:
            return SUSPENDED
        if self._undetected:
            return DETECT
        if self._stopping:
            return STOP
        current = self._sim.training.world
        if current is not None and current.full and not current.broken:
            return LOAD
        return FORM if self._formed else WAIT

    def _look(self) -> None:
        """A fact has changed: what was until now is accounted for."""
        becomes = self._now()
        if becomes != self._class:
            self._account()
            self._class = becomes

    def _account(self) -> None:
        now = self._clock.now
        # What training has not said itself is a rounding of less than a microsecond.
        rest = now - self._since - self._told
        self._us[self._class] += rest
        if self._down is not None:
            self._down[self._class] = self._down.get(self._class, 0.0) + now - self._since
        self._since, self._told = now, 0.0

    def over(self) -> dict[str, float]:
        """The job is over: the seconds of every class."""
        if not self._over:
            self._over = True
            self._sim.training.settle()
            self._account()
        return {kind: spent / SECOND_US for kind, spent in self._us.items()}

    # ---- what training says

    def made(self, new: float, again: float, step_us: int, checkpoint_us: float) -> None:
        """Steps were made for the first time and again, and time went into checkpoints."""
        if self._over:
            return
        full = min(step_us, self._step_us)
        self._us[TRAINING] += new * full
        self._us[DEGRADED] += new * (step_us - full)
        self._us[REPLAY] += again * step_us
        self._us[CHECKPOINT] += checkpoint_us
        self._told += (new + again) * step_us + checkpoint_us

    def cut_short(self, part: float, step_us: int) -> None:
        """A new step was begun, and never made."""
        full = min(step_us, self._step_us)
        self._us[TRAINING] -= part * full
        self._us[DEGRADED] -= part * (step_us - full)
        self._us[REPLAY] += part * step_us

    def loading(self) -> None:
        """All workers of a world are started."""
        self._look()

    def trains(self, again_us: float = 0.0) -> None:
        """Steps are made from now on, of which the first so much worth are made again."""
        self._stepped = self._stepping = True
        self._undetected = False
        self._lost_us = again_us
        self._look()
        self._recovered()

    def hung(self) -> None:
        """Everybody lives, and nobody makes a step."""
        self._stepping, self._undetected = False, True
        self._begin_recovery()
        self._look()

    def broke(self) -> None:
        """Somebody died in a world that stood."""
        self._undetected = True
        self._begin_recovery()

    def halted(self) -> None:
        """No step is made any more."""
        self._stepping = False
        self._look()

    def done(self) -> None:
        """The last step of all is made."""
        self._stepping, self._finished = False, True
        self._look()

    def stopping(self, node: str, *, busy: bool) -> None:
        """A node's workers are being stopped, or are stopped."""
        if busy:
            self._stopping.add(node)
        else:
            self._stopping.discard(node)
        if len(self._stopping) <= 1:
            self._look()

    # ---- recoveries

    def _begin_recovery(self) -> None:
        if self._down is None and self._stepped:
            self._account()
            self._down, self._incident, self._evidence_at, self._decided = {}, None, -1, 0.0
            self._cause = self._sim.strikes.newest

    def evidence(self) -> None:
        """A master hears of something wrong."""
        if self._undetected and self._evidence_at < 0:
            self._evidence_at = self._clock.now

    def _recovered(self) -> None:
        if self._down is None:
            return
        down = {kind: spent / SECOND_US for kind, spent in self._down.items()}
        self._down = None
        if self._incident is not None:
            self.recoveries.append(
                Recovery(
                    self._incident.incident,
                    self._cause,
                    max(0.0, down.get(DETECT, 0.0) - self._decided),
                    self._decided,
                    down.get(STOP, 0.0),
                    down.get(FORM, 0.0),
                    down.get(LOAD, 0.0),
                    self._lost_us / SECOND_US,
                    down.get(WAIT, 0.0) + down.get(SUSPENDED, 0.0),
                )
            )

    # ---- what the log says

    def durable(self, record: Record) -> None:
        """A record that changes a fact is durable."""
        fact = record.event
        if isinstance(fact, incidents.IncidentOpened):
            if fact.generation != incidents.ASIDE:
                if self._evidence_at >= 0:
                    self._decided = (self._clock.now - self._evidence_at) / SECOND_US
                self._undetected = False
                self._incident = self._incident or fact
        elif isinstance(fact, (world.WorldFormed, world.WorldDissolved)):
            self._formed = isinstance(fact, world.WorldFormed)
            self._undetected = False
            # Whoever had finished is needed again.
            self._finished = self._finished and self._formed
        elif isinstance(fact, (job.JobSuspended, job.JobResumed)):
            self._suspended = isinstance(fact, job.JobSuspended)
        elif isinstance(fact, (job.JobSucceeded, job.JobFailed, job.JobStopped)):
            self.over()
        self._look()
