"""When the pause before the next world is over that follows early failures (`crash_loops`), a world is formed."""

from __future__ import annotations

from collections.abc import Iterator

from dlrover_core.job.state import JobState
from dlrover_core.kernel.engine import Rules
from dlrover_core.kernel.events import Event
from dlrover_core.rules import membership, worlds


def _pausing(state: JobState) -> Iterator[tuple[str, int]]:
    """The groups whose next world waits for the end of a pause."""
    for group, cycles in state.failures.cycles.items() if state.job.forms else ():
        until = cycles.not_before(state.job.spec.restart_pause_s)
        last = state.world.worlds.get(group)
        if until and last is not None and not last.active and not membership.end_pending(state, group):
            yield group, until


def _form(state: JobState, group: str, at: int) -> Iterator[Event]:
    at_once = membership.all_back(state, group)
    yield from worlds.form(state, group, at, "after a pause: the program fails at once", at_once=at_once)


def _due(state: JobState) -> int | None:
    # Only where a world could form then: what else it lacks says so by itself when it comes.
    times = [until for group, until in _pausing(state) if any(_form(state, group, until))]
    return min(times, default=None)


def _tick(state: JobState, now: int) -> Iterator[Event]:
    for group, until in list(_pausing(state)):
        if now >= until:
            yield from _form(state, group, now)


RULES = Rules(
    due=_due,
    tick=_tick,
)
