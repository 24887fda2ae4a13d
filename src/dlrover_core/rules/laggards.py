"""Finish time-out: nodes that still run after others of their world have finished have ``finish_s`` left.

This is a module of its own, beside `worlds`, because it has a fact of its own (when the first node finished), a deadline of
its own, and no part in how worlds form.
"""

from __future__ import annotations

from collections.abc import Iterator

from dlrover_core.job import nodes
from dlrover_core.job.state import JobState
from dlrover_core.kernel.engine import Rules
from dlrover_core.kernel.events import Event
from dlrover_core.spec import us


def _overdue(state: JobState) -> Iterator[tuple[str, int]]:
    """Sets of which some nodes have finished and others have not, each with the time-out."""
    for group, since in state.laggards.since.items() if state.job.live else ():
        current, bound = state.world.at(group), state.job.policy(group).finish_s
        if bound and current.active and 0 < len(current.finished) < len(current.members):
            yield group, since + us(bound)


def _due(state: JobState) -> int | None:
    return min((until for _, until in _overdue(state)), default=None)


def _tick(state: JobState, now: int) -> Iterator[Event]:
    for group in [group for group, until in _overdue(state) if now >= until]:
        current = state.world.worlds[group]
        first, bound = current.finished[0], state.job.policy(group).finish_s
        late = [one.node for one in current.members if one.node not in current.finished]
        for node in late:
            reason = f"still running {bound:g} s after {first} had ended well (finish_s)"
            yield nodes.NodeFailed(node, 0, reason, seen=False)


RULES = Rules(
    due=_due,
    tick=_tick,
)
