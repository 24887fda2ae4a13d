"""Restarts that somebody else counts.

Torch's own elastic agent, under ``torchrun --rdzv-backend dlrover``, restarts workers as often as *its* ``--max-restarts`` says,
and its nodes join with a spec that grants any number. When it has none left it says so: the exit that it reports next ends
the job as one beyond our own budget would, and its node, once it has gone, is not waited for.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from dlrover_core.job import job
from dlrover_core.kernel.engine import Facts
from dlrover_core.kernel.events import Record, event
from dlrover_core.kernel.wire import command


@event(65)
class RestartsSpent(NamedTuple):
    """Whoever restarts this node's workers will not do so again, now that they fail in this generation."""

    node: str
    generation: int


@command(12)
class SpendRestarts(NamedTuple):
    """An agent's workers are about to be reported dead, and nobody will start them again."""

    node: str
    generation: int


@dataclass(slots=True)
class BudgetSlice:
    """The nodes that have no restarts left."""

    spent: list[str] = field(default_factory=list)


def _on_created(slice_: BudgetSlice, fact: job.JobCreated, record: Record) -> None:
    slice_.spent.clear()


def _on_spent(slice_: BudgetSlice, fact: RestartsSpent, record: Record) -> None:
    slice_.spent.append(fact.node)


FACTS = Facts(
    kinds=(RestartsSpent,),
    evolve={job.JobCreated: _on_created, RestartsSpent: _on_spent},
)
