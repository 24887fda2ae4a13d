"""How many jobs of a service get to their end: with the ladder, and if the first failure is the last.

A service runs many small jobs, and what ends them is mostly their own program, which no restart mends. Jobs are drawn with
their failure: its cause by the data set's counts, struck when training has gone for a while. A cause that a restart does not cure
strikes again after every start. *With*: the real engine, with a job's usual budgets. *Without*: the job ends there and then.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import NamedTuple

from dlrover_core.sim.constants import Constants
from dlrover_core.sim.datasets import SHAPES, Cause, Dataset
from dlrover_core.sim.faults import ENGINE, Fault
from dlrover_core.sim.policies import simulated
from dlrover_core.sim.scenario import Plan

FAILED_SHARE = 0.41
"""Of Acme's jobs that nobody cancelled, those that failed: 0.429 / (0.497 + 0.429) on Seren, 0.397 / (0.541 + 0.397) on Kalos."""
RESTARTS, RELAUNCHES = 3, 3
HOURS_MAX = 24.0


class Job(NamedTuple):
    """A job as drawn: its size, its length, and what befalls it, if anything does."""

    nodes: int
    hours: float
    cause: Cause | None
    at_s: float

    def plan(self, seed: int, constants: Constants) -> Plan:
        """Its run."""
        changes = {"max_restarts": RESTARTS, "relaunch_max": RELAUNCHES}
        scenario = constants.set(changes).scenario(self.nodes, 8, self.hours / 24, 1, 4 * 3600.0)
        return Plan(ENGINE, scenario, tuple(self._faults(constants)), seed)

    def _faults(self, constants: Constants) -> list[Fault]:
        if self.cause is None:
            return []
        label, shape = self.cause.label, self.cause.shape
        if shape == "code":
            # Wherever it runs next: again with the next step, once more than it may.
            again = [Fault("FirstStep", "fail_worker", 0, 0.0, label)] * RESTARTS
            return [Fault(f"{self.at_s:.0f} s", "fail_worker", 0, 0.0, label), *again]
        if SHAPES[shape].hosts and shape != "gone":
            found = constants["inspect_s"]
            return [
                Fault(f"{self.at_s:.0f} s", "sick_host", "host-0", 3600.0, label),
                Fault(f"{self.at_s + found:.0f} s", "kill_host", "host-0", 3600.0, label),
            ]
        kinds = {"fail": "fail_worker", "hang": "hang_worker", "gone": "kill_host", "kill": "kill_worker"}
        return [Fault(f"{self.at_s:.0f} s", kinds[shape], "host-0" if shape == "gone" else 0, 0.0, label)]


class Completion(NamedTuple):
    """Shares of jobs that came to their end. ``hardware``: of those that the program itself did not fail."""

    jobs: int
    without: float
    ladder: float
    cured: dict[str, tuple[int, int]]
    """By class of cause: jobs struck, and jobs that got through all the same."""


def draw(dataset: Dataset, jobs: int, seed: int) -> list[Job]:
    """So many jobs. Sizes and lengths are log-uniform, which is ours: most are small and short."""
    chance, drawn = random.Random(f"jobs/{dataset.name}/{seed}"), []
    counts = [cause.cases for cause in dataset.causes]
    for _ in range(jobs):
        nodes = round(2 ** chance.uniform(0, 5))
        hours = HOURS_MAX ** chance.uniform(0, 1)
        (cause,) = chance.choices(dataset.causes, counts)
        fails, at_s = chance.random() < FAILED_SHARE, 120.0 + chance.random() ** 3 * hours * 3000
        drawn.append(Job(nodes, hours, cause if fails else None, at_s))
    return drawn


def completion(dataset: Dataset, jobs: int, seed: int, constants: Constants) -> Completion:
    """Run them all; those that nothing befalls are known to get through."""
    through, struck, cured = 0, Counter[str](), Counter[str]()
    drawn = draw(dataset, jobs, seed)
    for number, job in enumerate(drawn):
        if job.cause is None:
            through += 1
            continue
        run = simulated(job.plan(number, constants), job.hours / 24)
        struck[job.cause.kind] += 1
        if run.outcome == "succeeded":
            cured[job.cause.kind] += 1
    ended = through + sum(cured.values())
    return Completion(
        jobs, through / jobs, ended / jobs, {kind: (struck[kind], cured[kind]) for kind in sorted(struck)}
    )
