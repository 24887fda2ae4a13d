"""The waiting reasons of every set of a job, for people; each rule that waits returns its own.

A set without a world waits for one (`membership.why_waiting`). A running world may wait for the boundary of a planned
change, for such a change to be planned (`plans`), or for other nodes before it grows (`worlds`). An ended generation may
wait for nodes that have not reported what they hold (`save_on_failure`). A set that gives its nodes back says what keeps
them (`freeing`), and so does a suspended job (`suspension`).
"""

from __future__ import annotations

from collections.abc import Iterator

from dlrover_core.job.state import JobState
from dlrover_core.job.waiting import Wait
from dlrover_core.rules import coupling, freeing, membership, plans, save_on_failure, suspension, worlds


def reasons(state: JobState, now: int | None = None) -> tuple[Wait, ...]:
    """What the sets of a live job wait for. ``now``: by default the time of the newest event."""
    at = state.at if now is None else now
    found = (one for name in coupling.sets(state) for one in _of(state, name, at)) if state.job.live else ()
    return tuple(one for one in found if isinstance(one, Wait))


def _of(state: JobState, name: str, now: int) -> Iterator[object]:
    if state.job.freed:
        yield suspension.reason(state, name, now)
        return
    awaited = membership.why_waiting(state, name, now)
    yield awaited
    if name in state.queueing.back and any(not node.released for node in state.nodes.in_set(name)):
        yield freeing.awaits(state, name, now)
    if awaited is None and state.world.at(name).active:
        yield plans.why_none(state, name, now)
        yield worlds.growth(state, name, now)
    yield save_on_failure.order(state, name, now)
