"""`JobState`: the slices side by side, and the fold that makes it from a log.

One line here adds the facts of one concern; `rules.model` adds its decisions.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import ClassVar

from dlrover_core.job import (
    budgets,
    checkpoints,
    checks,
    clusters,
    evidence,
    hangs,
    hosts,
    incidents,
    job,
    laggards,
    leases,
    nodes,
    notices,
    observing,
    plans,
    poison,
    progress,
    queueing,
    shards,
    silence,
    stragglers,
    world,
)
from dlrover_core.job.sets import Coupled, Sets
from dlrover_core.kernel.codec import Codec
from dlrover_core.kernel.engine import BaseState, Fold, kept
from dlrover_core.kernel.events import Record, Registry


@dataclass(slots=True)
class JobState(BaseState):
    """Everything the master knows: the fold of the job's log, and nothing else. Each field is the slice of one concern."""

    NEW_RUN: ClassVar[type | None] = job.JobCreated

    job: job.JobSlice = kept(job.JobSlice, job.FACTS)
    nodes: nodes.NodeSlice = kept(nodes.NodeSlice, nodes.FACTS, silence.FACTS, observing.FACTS)
    queueing: queueing.QueueSlice = kept(queueing.QueueSlice, queueing.FACTS)
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
    plans: plans.PlanSlice = kept(plans.PlanSlice, plans.FACTS, notices.LEAVING)
    notices: notices.NoticeSlice = kept(notices.NoticeSlice, notices.FACTS)
    checkpoints: checkpoints.CheckpointSlice = kept(checkpoints.CheckpointSlice, checkpoints.FACTS)
    clusters: clusters.ClusterSlice = kept(clusters.ClusterSlice, clusters.FACTS)
    shards: shards.ShardSlice = kept(shards.ShardSlice, shards.FACTS, later=True)
    leases: leases.LeaseSlice = kept(leases.LeaseSlice, leases.FACTS, later=True)
    poison: poison.PoisonSlice = kept(poison.PoisonSlice, poison.FACTS, later=True)

    def __post_init__(self) -> None:
        """Give the job's sets to all slices that are kept by set."""
        sets = Sets(self.job.spec.groups) if self.job.spec_json else Sets()
        for spot in fields(self):
            slice_ = getattr(self, spot.name)
            if isinstance(slice_, Coupled):
                slice_.couple(sets)

    @property
    def sets(self) -> Sets:
        """The job's coupling sets."""
        return self.job.sets

    def set_of(self, node: str) -> str:
        """The coupling set of a node, by the node's name: the name that its world is kept under."""
        return self.job.set_of(node)


FOLD: Fold[JobState] = Fold(JobState)
REGISTRY = Registry(FOLD.events)
CODEC = Codec(REGISTRY)


def fold(records: Iterable[Record]) -> JobState:
    """The state that follows from a history."""
    return FOLD.fold(records)
