"""Finish time-out: nodes that still run after other nodes of their world have finished.

They may need the time: the last rank often writes a checkpoint, or evaluates. But ``finish_s`` (an hour, unless set) after
the first node of the world has finished, nodes that still run count as failed, and recovery goes on from there. (Ranks of
one node are bounded by the agent's launcher, which alone knows them.)
"""

from __future__ import annotations

from dataclasses import dataclass, field

from dlrover_core.job import world
from dlrover_core.job.sets import Coupled
from dlrover_core.kernel.engine import Facts
from dlrover_core.kernel.events import Record


@dataclass(slots=True)
class LaggardSlice(Coupled):
    """When the first node of each set's world finished, in microseconds."""

    since: dict[str, int] = field(default_factory=dict)


def _on_changed(slice_: LaggardSlice, fact: world.WorldFormed | world.WorldDissolved, record: Record) -> None:
    slice_.since.pop(fact.group, None)


def _on_finished(slice_: LaggardSlice, fact: world.WorkersFinished, record: Record) -> None:
    slice_.since.setdefault(slice_.set_of(fact.node), record.at)


FACTS = Facts(
    evolve={
        world.WorldFormed: _on_changed,
        world.WorldDissolved: _on_changed,
        world.WorkersFinished: _on_finished,
    },
)
