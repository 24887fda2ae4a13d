"""Nodes that still run when others of their world have ended well have ``finish_s`` left."""

from __future__ import annotations

from collections.abc import Iterator

from dlrover_core.job import nodes, world
from dlrover_core.job.state import JobState
from dlrover_core.kernel.engine import Rules
from dlrover_core.kernel.events import Event
from dlrover_core.spec import us


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


RULES = Rules(
    due=_due,
    tick=_tick,
)
