"""What must hold of every history, whatever was done to the job. `check` asks it of a cluster, `check_history` of a log.

The promises themselves are in `promises`, `recovering` and `reference`; `DEFAULT` is all of them, for `Run.check` and for whoever
watches a run. Each function here raises AssertionError with the sequence number at which the promise was broken.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from dlrover_core.job.state import FOLD, JobState
from dlrover_core.kernel.events import Record
from dlrover_core.kernel.state import digest
from dlrover_core.testing.apart import Addresses, Apart, Coupled, Ends
from dlrover_core.testing.checkpointing import Checkpoints
from dlrover_core.testing.consuming import Cuts
from dlrover_core.testing.freed import Freed
from dlrover_core.testing.liveness import Liveness, Prompt, Reasons
from dlrover_core.testing.planned import Plans
from dlrover_core.testing.promises import (
    Commands,
    Invariant,
    Order,
    Patience,
    Places,
    Promise,
    Provoked,
    Sizes,
    Slices,
    Together,
    Told,
    Worlds,
)
from dlrover_core.testing.queues import Waiting
from dlrover_core.testing.recovering import Absorbing, Bounded, Budgets, Effects, Incidents, Pauses
from dlrover_core.testing.reference import Reference
from dlrover_core.testing.stays import Stays

if TYPE_CHECKING:
    from dlrover_core.testing.cluster import Cluster

# Of a log by itself, whoever wrote it.
OF_LOGS: tuple[type[Promise], ...] = (
    Order, Commands, Slices, Worlds, Sizes, Provoked, Places, Told, Patience, Incidents, Effects, Budgets, Pauses, Absorbing,
    Bounded, Prompt, Reasons, Reference, Checkpoints, Plans, Waiting, Freed, Stays,
    Addresses, Apart, Coupled, Ends, Cuts,
)  # fmt: skip
# And of a run, of which it is known what was done to it.
DEFAULT: tuple[type[Promise], ...] = (*OF_LOGS, Liveness)

__all__ = [
    "DEFAULT", "OF_LOGS", "Absorbing", "Addresses", "Apart", "Bounded", "Budgets", "Checkpoints", "Commands",
    "Coupled", "Cuts", "Effects", "Ends", "Freed", "Incidents", "Invariant", "Liveness", "Order", "Patience", "Pauses", "Places",
    "Plans", "Promise", "Prompt", "Provoked", "Reasons", "Reference", "Sizes", "Slices", "Stays", "Together", "Told",
    "Waiting", "Worlds", "check", "check_history", "check_steps", "watched",
]  # fmt: skip


def watched(records: Iterable[Record], *invariants: Invariant) -> JobState:
    """The fold of a history, in which every promise was asked after every record: an illegal transition raises too."""
    state, watch = FOLD.new(), Together(*invariants)
    for record in records:
        FOLD.apply(state, record)
        watch(state, record)
    return state


async def check(cluster: Cluster) -> JobState:
    """The log keeps every promise, and the leader's state is its fold. Returns that state."""
    state = check_history(await cluster.records())
    assert digest(state) == digest(cluster.state), "the master's state is not the fold of the log"
    return state


def check_history(records: Sequence[Record]) -> JobState:
    """Every promise about a log; returns its fold."""
    return watched(records, OF_LOGS)


def check_steps(cluster: Cluster) -> None:
    """Every step was made exactly once by whoever held the newest generation, in order, to the last."""
    training = cluster.training
    assert [step for _, step in training.log] == list(range(1, training.done + 1)), "a step was lost or made twice"
    generations = [generation for generation, _ in training.log]
    assert generations == sorted(generations) and not training.astray, (
        "an older generation made a step after a newer one"
    )
