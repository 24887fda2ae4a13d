"""Laggards: nodes that still run when others of their world have ended well.

They may take their time: the last rank often writes a checkpoint, or evaluates. But ``finish_s`` (an hour, unless set) sets
a bound, counted from the first node that is done, those that still run after it count as failed, and the ladder goes on
from there. (Ranks of one node are bounded by its agent's launcher, which alone knows them.)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dlrover_core.job import job, nodes, world
from dlrover_core.job.world import group_of
from dlrover_core.kernel.engine import Facts, Rules
from dlrover_core.kernel.events import Event, Record
from dlrover_core.spec import us

if TYPE_CHECKING:
    from dlrover_core.job.state import JobState


@dataclass(slots=True)
class LaggardSlice:
    """When the first node of each group's world was done, in microseconds."""

    since: dict[str, int] = field(default_factory=dict)


def _overdue(state: JobState) -> Iterator[tuple[str, int]]:
    """The groups of which some nodes are done and others are not, and until when the others may run."""
    bound = state.job.spec.finish_s if state.job.live else 0
    for group, since in state.laggards.since.items() if bound else ():
        current = state.world.worlds.get(group) or world.World()
        if current.active and 0 < len(current.finished) < len(current.members):
            yield group, since + us(bound)


def _due(state: JobState) -> int | None:
    return min((until for _, until in _overdue(state)), default=None)


def _tick(state: JobState, now: int) -> Iterator[Event]:
    for group in [group for group, until in _overdue(state) if now >= until]:
        current = state.world.worlds[group]
        first, bound = current.finished[0], state.job.spec.finish_s
        late = [one.node for one in current.members if one.node not in current.finished]
        for node in late:
            reason = f"still running {bound:g} s after {first} had ended well (finish_s)"
            yield nodes.NodeFailed(node, 0, reason, seen=False)


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

RULES = Rules(
    due=_due,
    tick=_tick,
)
