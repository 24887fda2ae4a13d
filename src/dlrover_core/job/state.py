"""`JobState`: the slices side by side, and the fold that makes it of a log.

A line here says what a part of the domain knows; `rules.model` says what is decided.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from dlrover_core.job import (
    budgets,
    checkpoints,
    checks,
    evidence,
    hangs,
    hosts,
    incidents,
    job,
    laggards,
    nodes,
    plans,
    progress,
    silence,
    stragglers,
    world,
)
from dlrover_core.kernel.codec import Codec
from dlrover_core.kernel.engine import BaseState, Fold, kept
from dlrover_core.kernel.events import Record, Registry


@dataclass(slots=True)
class JobState(BaseState):
    """Everything the master knows: the fold of the job's log, and nothing else."""

    job: job.JobSlice = kept(job.JobSlice, job.FACTS)
    nodes: nodes.NodeSlice = kept(nodes.NodeSlice, nodes.FACTS, silence.FACTS)
    hosts: hosts.HostSlice = kept(hosts.HostSlice, hosts.FACTS)
    world: world.WorldSlice = kept(world.WorldSlice, world.FACTS)
    evidence: evidence.EvidenceSlice = kept(evidence.EvidenceSlice, evidence.FACTS)
    incidents: incidents.IncidentSlice = kept(incidents.IncidentSlice, incidents.FACTS)
    progress: progress.ProgressSlice = kept(progress.ProgressSlice, progress.FACTS)
    stragglers: stragglers.StragglerSlice = kept(stragglers.StragglerSlice, stragglers.FACTS)
    hangs: hangs.HangSlice = kept(hangs.HangSlice, hangs.FACTS)
    budgets: budgets.BudgetSlice = kept(budgets.BudgetSlice, budgets.FACTS)
    checks: checks.CheckSlice = kept(checks.CheckSlice, checks.FACTS)
    laggards: laggards.LaggardSlice = kept(laggards.LaggardSlice, laggards.FACTS)
    plans: plans.PlanSlice = kept(plans.PlanSlice, plans.FACTS)
    checkpoints: checkpoints.CheckpointSlice = kept(checkpoints.CheckpointSlice, checkpoints.FACTS)


FOLD: Fold[JobState] = Fold(JobState)
REGISTRY = Registry(FOLD.events)
CODEC = Codec(REGISTRY)


def fold(records: Iterable[Record]) -> JobState:
    """The state of a history."""
    return FOLD.fold(records)
