"""Restart budgets that another launcher keeps.

Under ``torchrun --rdzv-backend dlrover``, torch's own elastic agent restarts the workers, as often as its
``--max-restarts`` allows. Its nodes join with a spec that grants any number of restarts. When torch's budget is used up,
the agent says so: the exit that it reports next ends the job, as an exit beyond our own budget would. The job does not wait
for that agent's node.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from dlrover_core.kernel.engine import Facts
from dlrover_core.kernel.events import Record, event
from dlrover_core.kernel.wire import command


@event(65)
class RestartsSpent(NamedTuple):
    """The launcher of this node's workers has no restarts left: after a failure of this generation it starts none."""

    node: str
    generation: int


@command(12)
class SpendRestarts(NamedTuple):
    """An agent is about to report dead workers that its launcher will not start again."""

    node: str
    generation: int


@dataclass(slots=True)
class BudgetSlice:
    """The nodes whose launcher has no restarts left."""

    spent: list[str] = field(default_factory=list)


def _on_spent(slice_: BudgetSlice, fact: RestartsSpent, record: Record) -> None:
    slice_.spent.append(fact.node)


FACTS = Facts(
    kinds=(RestartsSpent,),
    evolve={RestartsSpent: _on_spent},
)
