"""The rules in the order in which they react; the model that decides by them."""

from __future__ import annotations

from dlrover_core.diagnosis.policy import Hook
from dlrover_core.job.state import FOLD, JobState
from dlrover_core.kernel.engine import Model
from dlrover_core.rules import (
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
    operations,
    plans,
    progress,
    save_on_failure,
    silence,
    stragglers,
    worlds,
)

# In the order in which they react.
_RULES = (
    job.RULES,
    nodes.RULES,
    silence.RULES,
    # Before recovery: where a host is kept off because of a failure, whoever is planned in answer to it keeps off already.
    hosts.RULES,
    evidence.RULES,
    incidents.RULES,
    worlds.RULES,
    progress.RULES,
    stragglers.RULES,
    hangs.RULES,
    operations.RULES,
    plans.RULES,
    budgets.RULES,
    checks.RULES,
    laggards.RULES,
    checkpoints.RULES,
    save_on_failure.RULES,
)


def model(hook: Hook | None = None) -> Model[JobState]:
    """The rules. With a ``hook``, a user's say in what is done about failures, they may decide otherwise, and fold alike."""
    return Model(
        FOLD, [incidents.rules(hook) if hook is not None and one is incidents.RULES else one for one in _RULES]
    )


MODEL: Model[JobState] = model()
