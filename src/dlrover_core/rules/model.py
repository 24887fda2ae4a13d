"""All rules, in the order in which they react, and the model that decides by them."""

from __future__ import annotations

from dlrover_core.diagnosis.policy import Hook
from dlrover_core.job.state import FOLD, JobState
from dlrover_core.kernel.engine import Model
from dlrover_core.rules import (
    budgets,
    checkpoints,
    checks,
    clusters,
    evidence,
    freeing,
    hangs,
    hosts,
    incidents,
    job,
    laggards,
    leases,
    nodes,
    notices,
    operations,
    plans,
    poison,
    progress,
    queueing,
    save_on_failure,
    shards,
    silence,
    stragglers,
    suspension,
    worlds,
)

# In the order in which they react.
_RULES = (
    job.RULES,
    nodes.RULES,
    silence.RULES,
    queueing.RULES,
    # Before incidents: a node planned in answer to a failure already avoids the host that the failure quarantines.
    hosts.RULES,
    evidence.RULES,
    # Before incidents: the action follows from what is done about the samples.
    poison.RULES,
    incidents.RULES,
    worlds.RULES,
    progress.RULES,
    stragglers.RULES,
    hangs.RULES,
    operations.RULES,
    plans.RULES,
    notices.RULES,
    budgets.RULES,
    checks.RULES,
    laggards.RULES,
    checkpoints.RULES,
    save_on_failure.RULES,
    # After the rules that order states to be written.
    freeing.RULES,
    suspension.RULES,
    clusters.RULES,
    shards.RULES,
    leases.RULES,
)


def model(hook: Hook | None = None) -> Model[JobState]:
    """The model. A user's ``hook`` may change what it decides about failures, never how it folds events."""
    return Model(
        FOLD, [incidents.rules(hook) if hook is not None and one is incidents.RULES else one for one in _RULES]
    )


MODEL: Model[JobState] = model()
