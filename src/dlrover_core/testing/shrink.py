"""From a failure with forty faults to the one or two that it takes, by delta debugging.

A run is its plan and nothing else, so a plan with fewer faults can simply be run: if the same promise breaks, the rest was not
needed. What is looked for is the last fault without which it does not fail, by halving; then, with that one kept, the one before
it. Causes are few, so that takes a few times log2(faults) replays, where trying all subsets of a size would take thousands.
Whatever is accepted has been seen to fail: a failure that comes and goes with other faults costs replays, never the truth.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any, NamedTuple

from dlrover_core.errors import PlanError
from dlrover_core.sim.faults import Fault
from dlrover_core.sim.scenario import Plan, Scenario

REPLAYS_MAX = 50

_PARTICULAR = re.compile(r"[\w.-]*\d[\w.-]*")


class Shrunk(NamedTuple):
    """The least plan found, what it broke, and after how many replays. Not ``whole``: they ran out before all was tried."""

    plan: Plan
    error: BaseException
    replays: int
    whole: bool


class _Enough(BaseException):
    """No more replays."""


def promise_of(error: BaseException) -> str:
    """Which promise was broken, without the particulars: two failures with the same answer are the same failure.

    A `Broken` says it in words, up to the first semicolon, of which numbers and names with numbers are left out. Of anything else
    it is where it was raised.
    """
    promise = getattr(error.__cause__, "promise", "") or getattr(error, "promise", "")
    if isinstance(promise, str) and promise:
        return _PARTICULAR.sub("#", re.split("[;\n]", promise)[0])
    trace, where = error.__traceback__, ""
    while trace is not None:
        where, trace = f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}", trace.tb_next
    return f"{type(error).__name__} at {where}"


def shrink(
    plan: Plan,
    run: Callable[[Plan], object],
    *,
    error: BaseException | None = None,
    replays_max: int = REPLAYS_MAX,
    failures: tuple[type[BaseException], ...] = (Exception,),
    enough: Callable[[], bool] = lambda: False,
) -> Shrunk:
    """A plan that breaks the same promise with as little as possible. ``run`` raises one of ``failures`` where a plan fails.

    ``error`` is what the plan is known to raise; without it that takes one replay, and a plan that keeps every promise is a
    ValueError. Before each replay ``enough`` is asked whether to leave it at that.
    """
    search = _Search(plan, run, error, replays_max, failures, enough)
    try:
        search.fewer_faults()
        search.simpler()
    except _Enough:
        return Shrunk(search.best, search.error, search.replays, whole=False)
    return Shrunk(search.best, search.error, search.replays, whole=True)


class _Search:
    def __init__(
        self,
        plan: Plan,
        run: Callable[[Plan], object],
        error: BaseException | None,
        replays_max: int,
        failures: tuple[type[BaseException], ...],
        enough: Callable[[], bool],
    ) -> None:
        self._run, self._failures, self._enough, self._replays_max = run, failures, enough, replays_max
        self.best, self.replays = plan, 0
        self._tried: dict[Plan, bool] = {}
        if error is None:
            error = self._raised(plan)
            if error is None:
                raise ValueError("the plan keeps every promise: nothing to shrink")
        self.error: BaseException = error
        self._promise = promise_of(error)
        self._tried[plan] = True

    def _raised(self, plan: Plan) -> BaseException | None:
        __tracebackhide__ = True
        self.replays += 1
        try:
            self._run(plan)
        except self._failures as raised:
            return raised
        return None

    def fails(self, plan: Plan) -> bool:
        """Does it break the same promise? Then it is the best so far."""
        known = self._tried.get(plan)
        if known is None:
            if self.replays >= self._replays_max or self._enough():
                raise _Enough
            raised = self._raised(plan)
            known = raised is not None and promise_of(raised) == self._promise
            self._tried[plan] = known
            if raised is not None and known:
                self.best, self.error = plan, raised
        return known

    def _with(self, faults: tuple[Fault, ...]) -> bool:
        return self.fails(self.best._replace(faults=faults))

    def fewer_faults(self) -> None:
        """Leave out whatever it does not take."""
        rest, kept = self.best.faults, tuple[Fault, ...]()
        while rest and not self._with(kept):
            # Invariant: rest[:most] with kept fails, rest[:fewest] with kept does not.
            fewest, most = 0, len(rest)
            while most - fewest > 1:
                middle = (fewest + most) // 2
                if self._with(rest[:middle] + kept):
                    most = middle
                else:
                    fewest = middle
            kept, rest = (rest[most - 1], *kept), rest[: most - 1]
        # A cause found early may have become dispensable with those found after it.
        shorter = True
        while shorter:
            faults = self.best.faults
            shorter = any(self._with(faults[:one] + faults[one + 1 :]) for one in range(len(faults)))

    def simpler(self) -> None:
        """Smaller jobs, default settings, usual amounts: whatever leaves less to read. Each is tried once, large ones first."""
        now = self.best.scenario
        for size in sorted({now.unit, max(4, now.unit), now.nodes // 4 // now.unit * now.unit, now.nodes // 2}):
            if 0 < size < now.nodes and self._with_scenario(nodes=size, nodes_min=min(now.nodes_min, size)):
                break
        plain = Scenario()
        for name in (one.name for one in fields(Scenario) if one.name not in ("nodes", "nodes_min", "steps")):
            if getattr(self.best.scenario, name) != getattr(plain, name):
                self._with_scenario(**{name: getattr(plain, name)})
        for one, fault in enumerate(self.best.faults):
            if fault.amount or fault.cause:
                faults = self.best.faults
                self._with((*faults[:one], fault._replace(amount=0.0, cause=""), *faults[one + 1 :]))

    def _with_scenario(self, **changes: Any) -> bool:
        try:
            return self.fails(self.best._replace(scenario=replace(self.best.scenario, **changes)))
        except PlanError:
            return False
