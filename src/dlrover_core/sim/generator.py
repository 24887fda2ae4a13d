"""A stream of failures drawn from a data set: all chance is spent before a run begins, and what is left is a list of faults.

Failures come as a Poisson process, each of a cause by the data set's counts. Those of machines fall on hosts by their own
inclination, log-normal, so that 1.5 % of all hosts, the lemons, have 30 % of them; a host that comes back from repair fails again
within a day with p = 0.2. Of a program's errors 70 % strike within ten minutes of a start. These shares are ours unless a data
set has them, but lemons are everywhere: in arXiv 2605.09370 three hosts of 63 have half of all exclusions.

What strikes when does not depend on how long things take: other constants, the same failures.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field

from dlrover_core.errors import PlanError
from dlrover_core.sim.constants import DAY_S, Constants
from dlrover_core.sim.datasets import RARELY_A_RACK, SHAPES, USER, Cause, Dataset
from dlrover_core.sim.faults import Fault
from dlrover_core.sim.training import SLOW_S

LEMON_SIGMA = 1.65
"""Of a log-normal distribution: then the upper 1.5 % of hosts have 30 % of the hazard."""
FAILS_AGAIN, AGAIN_DAYS = 0.2, 1.0
INFANT, INFANT_S = 0.7, 600.0
RESET_CURES, REBOOT_CURES = 0.8, 0.75
SPREAD = 2.0
"""A repair takes from a half to twice its constant, log-uniformly."""
FAILURES_MAX = 100_000


@dataclass
class _Fleet:
    """Hosts, how much each is inclined to fail, and until when it is away."""

    chance: random.Random
    count: int
    weights: list[float] = field(default_factory=list)
    away: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        total = 0.0
        for _ in range(self.count):
            total += self.chance.lognormvariate(0.0, LEMON_SIGMA)
            self.weights.append(total)

    def pick(self, chance: random.Random, now: float) -> int:
        """A host that is there, by inclination."""
        for _ in range(100):
            (host,) = chance.choices(range(self.count), cum_weights=self.weights)
            if self.away.get(host, 0.0) <= now:
                return host
        return chance.randrange(self.count)


def stream(
    dataset: Dataset,
    *,
    nodes: int,
    days: float,
    seed: int,
    spares: int = 0,
    workers_per_node: int = 8,
    hosts_per_rack: int = 16,
    rate: float | None = None,
    constants: Constants | None = None,
) -> tuple[Fault, ...]:
    """What fails in so many days, in order of time. ``rate`` replaces the data set's. Raises `PlanError`."""
    if nodes < 1 or days < 0 or spares < 0:
        raise PlanError(f"{nodes} nodes, {spares} spares, {days:g} days: there is nothing that could fail")
    data = dataset if rate is None else dataset._replace(rate=rate)
    drawn = _Stream(data, nodes, spares, workers_per_node, hosts_per_rack, seed, constants or Constants.default())
    if drawn.per_day * days > FAILURES_MAX:
        raise PlanError(
            f"{drawn.per_day * days:.0f} failures are more than can be simulated: fewer nodes, days, or a lower rate"
        )
    faults = sorted(drawn.faults(days * DAY_S), key=lambda one: one[0])
    return tuple(Fault(f"{at:.3f} s", kind, target, much, cause) for at, kind, target, much, cause in faults)


_Drawn = tuple[float, str, "str | int", float, str]


class _Stream:
    """One draw. Every failure has a source of chance of its own, so that none shifts another."""

    def __init__(
        self, data: Dataset, nodes: int, spares: int, nproc: int, hosts_per_rack: int, seed: int, constants: Constants
    ) -> None:
        self._data, self._nodes, self._nproc = data, nodes, nproc
        self._hosts, self._racks_of = nodes + spares, hosts_per_rack
        self._seed, self._constants = seed, constants
        self._fleet = _Fleet(self._chance("hosts"), self._hosts)
        self._weights = [self._first(cause) for cause in data.causes]
        self.per_day = sum(self._weights)

    def _chance(self, what: object) -> random.Random:
        return random.Random(f"{self._data.name}/{self._seed}/{what}")

    def _first(self, cause: Cause) -> float:
        """Failures a day of this cause, those of a host that fails again not counted: they come by themselves."""
        if self._data.per_job(cause):
            return self._data.hazard(cause)
        there = self._hosts if SHAPES[cause.shape].hosts else self._nodes
        again = FAILS_AGAIN if cause.repair else 0.0
        return self._data.hazard(cause) * there * (1 - again)

    def faults(self, until: float) -> Iterator[_Drawn]:
        """All of them, by the order in which they were decided."""
        if not self.per_day:
            return
        arrivals, clock, number = self._chance("arrivals"), 0.0, 0
        again: list[tuple[float, int, Cause, int]] = []
        started = 0.0
        while True:
            clock += arrivals.expovariate(self.per_day) * DAY_S
            while again and again[0][0] <= min(clock, until):
                at, which, cause, host = heapq.heappop(again)
                yield from self._strike(self._chance(f"again {which}"), at, cause, host, which, again)
            if clock > until:
                return
            number += 1
            chance = self._chance(number)
            (cause,) = chance.choices(self._data.causes, self._weights)
            at = clock
            if cause.kind == USER and chance.random() < INFANT:
                # After the last start that we know of: errors come in rows, each soon after the last one was mended.
                at = min(clock, started + chance.uniform(0, INFANT_S))
            host = self._fleet.pick(chance, at) if SHAPES[cause.shape].hosts else chance.randrange(self._nodes)
            yield from self._strike(chance, at, cause, host, number, again)
            started = at + (self._constants["mend_s"] if cause.shape == "code" else 0.0)

    def _strike(
        self,
        chance: random.Random,
        at: float,
        cause: Cause,
        host: int,
        number: int,
        again: list[tuple[float, int, Cause, int]],
    ) -> Iterator[_Drawn]:
        """The faults of one failure; whether it comes again is decided here."""
        repair_s = self._repair_s(chance, cause)
        rank = host * self._nproc + chance.randrange(self._nproc)
        rack = cause.shape == "link" and chance.random() < RARELY_A_RACK
        comes_again, after = chance.random() < FAILS_AGAIN, chance.uniform(0, AGAIN_DAYS * DAY_S)
        if cause.repair:
            back = at + repair_s
            self._fleet.away[host] = back
            if comes_again:
                # Of chance that is its own: its number is that of the failure that it repeats, with one bit more.
                heapq.heappush(again, (back + after, number + FAILURES_MAX, cause, host))
        yield from self._faults(at, cause, host, rank, repair_s, rack=rack)

    def _faults(
        self, at: float, cause: Cause, host: int, rank: int, repair_s: float, *, rack: bool
    ) -> Iterator[_Drawn]:
        name, label, shape = f"host-{host}", cause.label, cause.shape
        if rack:
            yield at, "kill_rack", f"rack-{host // self._racks_of}", repair_s, label
        elif shape in ("sick", "link"):
            found = self._constants["inspect_s"]
            yield at, "sick_host", name, found + repair_s, label
            yield at + found, "kill_host", name, repair_s, f"{INSPECTED}{label}"
        elif shape == "gone":
            yield at, "kill_host", name, repair_s, label
        elif shape == "dark":
            yield at, "lose_host", name, self._constants["dark_s"], label
        elif shape == "code":
            yield at, "sick_host", name, self._constants["mend_s"], label
        elif shape == "slow":
            for turn in range(max(1, round(self._constants["slow_s"] / SLOW_S))):
                yield (
                    at + turn * SLOW_S,
                    "slow_worker",
                    rank,
                    self._constants["slow_by"],
                    label if not turn else STILL + label,
                )
        else:
            kind, target = _PLAIN[shape]
            yield at, kind, rank if target == "worker" else host, 0.0, label

    def _repair_s(self, chance: random.Random, cause: Cause) -> float:
        if not cause.repair:
            return 0.0
        rule, first, second = cause.repair, chance.random(), chance.random()
        spread = math.exp(chance.uniform(-1, 1) * math.log(SPREAD))
        if rule == "gpu":
            rule = "reset" if first < RESET_CURES else "reboot" if second < REBOOT_CURES else "rma"
        return self._constants[f"{rule}_s"] * spread


_PLAIN = {
    "fail": ("fail_worker", "worker"),
    "kill": ("kill_worker", "worker"),
    "hang": ("hang_worker", "worker"),
    "node": ("kill_node", "node"),
    "stop": ("interrupt", "worker"),
}
INSPECTED, STILL = "inspected: ", "still: "
"""How the label begins of a fault that only goes on with a failure which has struck before."""


def begins(fault: Fault) -> bool:
    """Is this a failure of its own, not a part of one that has struck before?"""
    return not fault.cause.startswith((INSPECTED, STILL))


def cause_of(dataset: Dataset, fault: Fault) -> Cause | None:
    """The data set's cause of a fault."""
    return dataset.cause_of(fault.cause.removeprefix(INSPECTED).removeprefix(STILL))
