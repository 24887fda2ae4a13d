"""Laggards: nodes that still run when others of their world have ended well.

They may take their time: the last rank often writes a checkpoint, or evaluates. But ``finish_s`` (an hour, unless set) sets
a bound, counted from the first node that is done, those that still run after it count as failed, and the ladder goes on
from there. (Ranks of one node are bounded by its agent's launcher, which alone knows them.)
"""

from __future__ import annotations

from dataclasses import dataclass, field

from dlrover_core.job import job, world
from dlrover_core.job.names import group_of
from dlrover_core.kernel.engine import Facts
from dlrover_core.kernel.events import Record


@dataclass(slots=True)
class LaggardSlice:
    """When the first node of each group's world was done, in microseconds."""

    since: dict[str, int] = field(default_factory=dict)


def _on_created(slice_: LaggardSlice, fact: job.JobCreated, record: Record) -> None:
    slice_.since.clear()


def _on_changed(slice_: LaggardSlice, fact: world.WorldFormed | world.WorldDissolved, record: Record) -> None:
    slice_.since.pop(fact.group, None)


def _on_finished(slice_: LaggardSlice, fact: world.WorkersFinished, record: Record) -> None:
    slice_.since.setdefault(group_of(fact.node), record.at)


FACTS = Facts(
    evolve={
        job.JobCreated: _on_created,
        world.WorldFormed: _on_changed,
        world.WorldDissolved: _on_changed,
        world.WorkersFinished: _on_finished,
    },
)
