"""How often to save: fixed by the user, or from what a save costs and how often jobs like this one fail.

A job that saves too often pays for saves, one that saves too rarely makes steps again. With a save that costs ``C`` seconds of
training and a failure every ``M`` seconds on average, the time between two saves with the least loss is to first order

    sqrt(2 C M)                                            Young, CACM 17(9), 1974

and to higher order, where a failure may also strike the save itself,

    sqrt(2 C M) (1 + sqrt(C / 2M) / 3 + (C / 2M) / 9) - C  for C < 2M, else M      Daly, FGCS 22(3), 2006

`daly_s` is what is used; the two differ by less than C. Both tiers are computed in the same way, each with its own ``C`` and with
the ``M`` of those failures that need it.

All ranks must save at the same steps, so rank 0 measures and decides, and a plan names the step from which on the next one is
asked for: every rank asks at that step, and nobody needs to be told in between. Plans change at saves only, so that no two saves
are nearer than the newer plan's interval. No clock here: who calls has one.
"""

from __future__ import annotations

import math
import struct
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

AUTO = "auto"
MTBF_UNKNOWN_S = 3 * 3600.0
"""Between failures of a job of which nothing is known: as with 16,384 GPUs, 419 in 54 days (Llama 3, arXiv 2407.21783)."""
EVERY_FIRST, STORE_EVERY_FIRST = 10, 100
"""Steps between saves until something is measured."""
SAMPLES = 64
"""Steps of each kind that medians are of."""
SAMPLES_MIN = 3
_PLAN = struct.Struct(">3q")


def young_s(cost_s: float, mtbf_s: float) -> float:
    """Seconds between saves, to first order (Young 1974)."""
    return math.sqrt(2 * cost_s * mtbf_s)


def daly_s(cost_s: float, mtbf_s: float) -> float:
    """Seconds of training between the end of a save and the beginning of the next, to higher order (Daly 2006, equation 37)."""
    if cost_s >= 2 * mtbf_s:
        return mtbf_s
    share = cost_s / (2 * mtbf_s)
    return young_s(cost_s, mtbf_s) * (1 + math.sqrt(share) / 3 + share / 9) - cost_s


@dataclass(frozen=True, slots=True)
class Bounds:
    """What no plan leaves. Intervals are in steps or seconds of training.

    ``least``: steps between saves into memory; two slots need 2. ``share_max``: of the time, for saving, each tier; it wins over
    ``memory_s_max`` and ``store_s_max``, which are the longest times between two saves. ``lost_share``: of all failures, those
    that memory does not survive; 1 where no other node holds a copy. ``change``: by which factor an interval must differ to be
    changed. ``plan_s``: how long a plan stands; ``plan_steps_min``: and for how many steps at least.
    """

    least: int = 2
    share_max: float = 0.01
    memory_s_max: float = 60.0
    store_s_max: float = 1800.0
    lost_share: float = 1.0
    change: float = 1.25
    plan_s: float = 60.0
    plan_steps_min: int = 20


class Measured(NamedTuple):
    """By rank 0, in seconds. ``step_s``: a step in which nothing is saved; ``save_s``: what a save into memory costs training,
    ``store_s``: one that is written to storage too; ``write_s``: how long that writing takes; ``mtbf_s``: 0 if unknown.
    """

    step_s: float
    save_s: float
    store_s: float = 0.0
    write_s: float = 0.0
    mtbf_s: float = 0.0


class Plan(NamedTuple):
    """Steps between saves into memory and to storage (0: to storage never by itself), and the step of the next plan (0: none)."""

    every: int
    store_every: int
    next: int = 0


class Due(NamedTuple):
    """What is to be saved after a step. What goes to storage goes into memory."""

    memory: bool
    storage: bool


def planned(measured: Measured, bounds: Bounds, step: int, now: Plan) -> Plan:
    """The plan from ``step`` on, where ``now`` is the present one."""
    step_s, mtbf_s = max(measured.step_s, 1e-6), measured.mtbf_s or MTBF_UNKNOWN_S
    memory_s = _bounded(measured.save_s, mtbf_s, bounds.share_max, bounds.memory_s_max)
    every = _kept(now.every, max(bounds.least, round(memory_s / step_s)), bounds.change)
    store_every = now.store_every
    if store_every:
        store_s = _bounded(measured.store_s, mtbf_s / bounds.lost_share, bounds.share_max, bounds.store_s_max)
        # A slot that is being written is in use: the next one is due when it is free.
        steps = max(store_s, measured.write_s) / step_s
        store_every = every * max(1, round(_kept(store_every, max(1, round(steps)), bounds.change) / every))
    after = max(bounds.plan_steps_min, every, round(bounds.plan_s / step_s))
    return Plan(every, store_every, step + after)


def _bounded(cost_s: float, mtbf_s: float, share_max: float, s_max: float) -> float:
    return max(min(daly_s(cost_s, mtbf_s), s_max), cost_s / share_max)


def _kept(now: int, better: int, change: float) -> int:
    return now if max(now, better) <= min(now, better) * change else better


class Cadence:
    """When this rank saves: the same steps on all ranks that are asked about the same steps and take the same plans.

    ``every`` and ``store_every`` are in steps or `AUTO`; ``store_every`` None: ten times ``every``, 0: never by itself.
    ``start``: the step that was restored. Fixed intervals count from step 0, so that step numbers are round ones.
    """

    def __init__(
        self, every: int | str, store_every: int | str | None = None, *, bounds: Bounds | None = None, start: int = 0
    ) -> None:
        self._auto = every == AUTO
        self.bounds = bounds if bounds is not None else Bounds()
        first = max(EVERY_FIRST, self.bounds.least) if self._auto else _steps("every", every, 1)
        if store_every is None:
            store_every = AUTO if self._auto else first * 10
        if store_every == AUTO and not self._auto:
            raise ValueError('store_every="auto" needs every="auto"; give both in steps, or neither')
        self._store_auto = store_every == AUTO
        stored = STORE_EVERY_FIRST if self._store_auto else _steps("store_every", store_every, 0)
        self.plan = Plan(first, stored, start + self.bounds.plan_steps_min if self._auto else 0)
        self._saved = self._stored = start
        self._last = (start, Due(memory=False, storage=False))

    def due(self, step: int) -> Due:
        """What is to be saved after ``step``. Asked again about the same step it says the same."""
        if step == self._last[0]:
            return self._last[1]
        if step < self._last[0]:
            self._saved, self._stored = min(self._saved, step - 1), min(self._stored, step - 1)  # the loop went back
        since, every = step - self._saved, self.plan.every
        # A round step is taken early, but never so early that two slots cannot alternate.
        memory = since >= every or (not self._auto and step % every == 0 and since >= min(every, 2))
        storage = memory and self._storage_due(step)
        if memory:
            self._saved = step
        if storage:
            self._stored = step
        self._last = (step, Due(memory, storage))
        return self._last[1]

    def _storage_due(self, step: int) -> bool:
        every = self.plan.store_every
        if not every:
            return False
        if self._store_auto:
            return step - self._stored >= every
        return step // every > self._stored // every

    def replans(self, step: int) -> bool:
        """Is a new plan asked for after ``step``? Only where `due` said that something is saved."""
        return 0 < self.plan.next <= step == self._saved

    def replan(
        self, step: int, share: Callable[[bytes | None], bytes], *, decides: bool, measured: Measured | None = None
    ) -> Plan | None:
        """Take the next plan if it is time; None: it is not. On all ranks alike, after `due`.

        ``decides``: on rank 0 alone, by what it has ``measured`` (None: not enough; the intervals stay). ``share`` is given rank
        0's word there and None elsewhere, and returns rank 0's word everywhere. What it raises is raised: a rank that went on by
        the old plan would save at other steps than the rest.
        """
        if not self.replans(step):
            return None
        told = share(_PLAN.pack(*self._proposed(step, measured)) if decides else None)
        try:
            self.adopt(Plan(*_PLAN.unpack(told)))
        except struct.error as error:
            raise ValueError(f"{len(told)} bytes are no plan; do all ranks run the same version?") from error
        return self.plan

    def _proposed(self, step: int, measured: Measured | None) -> Plan:
        if measured is None:
            return self.plan._replace(next=step + max(self.bounds.plan_steps_min, self.plan.every))
        better = planned(measured, self.bounds, step, self.plan)
        return better if self._store_auto else better._replace(store_every=self.plan.store_every)

    def adopt(self, plan: Plan) -> None:
        """Go by ``plan`` from the newest save on. Raises `ValueError` for one that no rank can go by."""
        if plan.every < self.bounds.least or plan.store_every < 0 or plan.next <= self._saved:
            raise ValueError(
                f"no plan is like this after step {self._saved}: {plan}; do all ranks run the same version?"
            )
        self.plan = plan

    def restored(self, step: int) -> None:
        """Count from ``step``, which was restored: on all ranks alike, before the first `due`."""
        self._saved = self._stored = step
        self._last = (step, Due(memory=False, storage=False))
        if self.plan.next:
            self.plan = self.plan._replace(next=step + self.bounds.plan_steps_min)


def _steps(name: str, value: int | str, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f'{name}={value!r}: give a number of steps, at least {least}, or "auto"')
    return value


def _durations() -> deque[float]:
    return deque(maxlen=SAMPLES)


@dataclass(slots=True)
class Costs:
    """What saves cost, from how long steps take: steps beside a copy, beside a write to storage, and beside neither.

    Medians, so that an evaluation or a hiccup between two steps is not taken for the cost of a save.
    """

    plain: deque[float] = field(default_factory=_durations)
    copying: deque[float] = field(default_factory=_durations)
    writing: deque[float] = field(default_factory=_durations)
    stalls: deque[float] = field(default_factory=_durations)
    writes: deque[float] = field(default_factory=_durations)

    def step(self, took_s: float, *, copying: bool, writing: bool) -> None:
        """A step took so long, our own part of it included: with a save in it, or while one was being written to storage."""
        (self.copying if copying else self.writing if writing else self.plain).append(took_s)

    def saved(self, stall_s: float) -> None:
        """The training thread stood so long for one save."""
        self.stalls.append(stall_s)

    def written(self, took_s: float) -> None:
        """Writing one state to storage took so long, beside training."""
        self.writes.append(took_s)

    def measured(self, mtbf_s: float = 0.0) -> Measured | None:
        """All of that in numbers; None: too little is known."""
        known = self.plain if len(self.plain) >= SAMPLES_MIN else self.copying
        if len(known) < SAMPLES_MIN:
            return None
        step_s = median(known)
        save_s = median(self.stalls) if self.stalls else 0.0
        if known is self.plain and len(self.copying) >= SAMPLES_MIN:
            save_s = max(save_s, median(self.copying) - step_s)
        write_s = median(self.writes) if self.writes else 0.0
        slower_s = max(0.0, median(self.writing) - step_s) if len(self.writing) >= SAMPLES_MIN else 0.0
        return Measured(step_s, save_s, save_s + slower_s * write_s / (step_s + slower_s), write_s, mtbf_s)
