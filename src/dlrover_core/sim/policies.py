"""One question, put to several policies: how much of the time would this job have trained, had it failed like these others?

*Ours* is the real engine in a simulated cluster. *restart-all* is a model of what one has without it, and *restart-async* the
same with checkpoints that are written beside training. All meet the same failures.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from dlrover_core.errors import PlanError
from dlrover_core.sim import generator, restart_all
from dlrover_core.sim.constants import DAY_S, Constants
from dlrover_core.sim.datasets import Dataset, nearest
from dlrover_core.sim.faults import ENGINE, Fault
from dlrover_core.sim.report import Incident, Report
from dlrover_core.sim.run import Run, Watcher
from dlrover_core.sim.scenario import Plan, Scenario

OURS, RESTART_ALL, RESTART_ASYNC = "default", "restart-all", "restart-async"
POLICIES = (OURS, RESTART_ALL, RESTART_ASYNC)
HORIZON = 1.5
"""Failures are drawn for so many times the days asked for: work for so long takes longer."""


class Policy(NamedTuple):
    """``engine``: ours; ``changes`` to constants, the scenario, and the job's settings."""

    name: str = OURS
    engine: bool = True
    changes: Mapping[str, Any] = {}


def policy(name: str) -> Policy:
    """A policy by its name. Raises `PlanError`."""
    if name not in POLICIES:
        raise PlanError(
            f"no policy is called {name!r}{nearest(name, POLICIES)} There are {', '.join(POLICIES)}, and files"
        )
    return Policy(name, name == OURS)


def mttf_s(nodes: int, rate: float) -> float:
    """A job's mean time to failure, in seconds: hazards of independent nodes add up. ``rate``: failures per 1,000 node-days.

    Kokolis et al., arXiv 2410.21680, section on job-level reliability: MTTF = 1 / (N r_f).
    """
    return math.inf if not nodes * rate else DAY_S * 1000 / (nodes * rate)


class Question(NamedTuple):
    """A job and what befalls it. ``nodes_min`` 0: it needs all of its nodes; ``rate``: instead of the data set's."""

    dataset: Dataset
    nodes: int
    days: float
    seed: int = 0
    workers_per_node: int = 8
    spares: int = 0
    nodes_min: int = 0
    rate: float | None = None

    @property
    def mttf_s(self) -> float:
        """Mean time between two stops of the job, planned ones included, in seconds."""
        data = self.dataset if self.rate is None else self.dataset._replace(rate=self.rate)
        per_job = (data.user_per_day or 0.0) / DAY_S
        return 1 / (1 / mttf_s(self.nodes, data.rate) + per_job)

    def scenario(self, constants: Constants) -> Scenario:
        """The job, and the world around it."""
        return constants.scenario(
            self.nodes,
            self.workers_per_node,
            self.days,
            self.spares,
            constants["mttf_s"] or self.mttf_s,
            self.nodes_min,
        )

    def faults(self, constants: Constants, hosts_per_rack: int = 16) -> tuple[Fault, ...]:
        """What fails, and some more after the end."""
        return generator.stream(
            self.dataset,
            nodes=self.nodes,
            days=self.days * HORIZON,
            seed=self.seed,
            spares=self.spares,
            workers_per_node=self.workers_per_node,
            hosts_per_rack=hosts_per_rack,
            rate=self.rate,
            constants=constants,
        )

    def plan(self, constants: Constants) -> Plan:
        """The whole run of ours."""
        scenario = self.scenario(constants)
        return Plan(ENGINE, scenario, self.faults(constants, scenario.hosts_per_rack), self.seed)


def answer(
    question: Question, of: Policy, constants: Constants, watch: Sequence[Watcher] = (), every: int = 1
) -> tuple[Report, Run | None]:
    """What this policy makes of it. Raises `PlanError`, and `Stalled` where the engine does not come to an end."""
    constants = constants.set(of.changes)
    plan = question.plan(constants)
    if not of.engine:
        return _modelled(question, of.name, plan, constants), None
    run = simulated(plan, question.days, watch, every)
    return _run(question, of.name, run), run


def simulated(plan: Plan, days: float, watch: Sequence[Watcher] = (), every: int = 1) -> Run:
    """The engine's run, with room for a goodput of a tenth."""
    from dlrover_core.sim.simulation import simulate

    return simulate(plan, watch=watch, every=every, keep=False, limit_s=10 * days * DAY_S + 10 * DAY_S)


def _modelled(question: Question, name: str, plan: Plan, constants: Constants) -> Report:
    mttf = constants["mttf_s"] or question.mttf_s
    beside = name == RESTART_ASYNC
    told = restart_all.run(plan.scenario, plan.faults, question.days * DAY_S, mttf, constants, asynchronous=beside)
    return Report(
        name,
        "ended",
        told.goodput,
        told.virtual_s,
        told.lost_s,
        told.by_class,
        _incidents(question.dataset, told.struck),
        tuple(told.recoveries),
    )


def _run(question: Question, name: str, run: Run) -> Report:
    return Report(
        name,
        run.outcome if not run.root else f"{run.outcome}: {run.root}",
        run.goodput,
        run.virtual_s,
        run.lost_steps * run.plan.scenario.step_s,
        dict(run.by_class),
        _incidents(question.dataset, [fault for fault, _ in run.struck]),
        tuple(run.recoveries),
        run.events,
        run.log_hash,
    )


def _incidents(dataset: Dataset, struck: Sequence[Fault]) -> tuple[Incident, ...]:
    """Failures by cause, the most frequent first."""
    counts: Counter[tuple[str, str]] = Counter()
    for fault in struck:
        if generator.begins(fault):
            cause = generator.cause_of(dataset, fault)
            counts[(cause.name, cause.kind) if cause is not None else (fault.cause or fault.kind, "")] += 1
    return tuple(
        Incident(name, kind, count) for (name, kind), count in sorted(counts.items(), key=lambda one: (-one[1], one[0]))
    )
