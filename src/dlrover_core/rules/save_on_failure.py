"""Save on failure: when a generation has ended, what its nodes still hold whole in memory is written to storage at once.

Its nodes say what they hold (`checkpoints.StepsHeld`). Once all that are left have, or have had the time to, the newest step of
which every part is there is ordered to be written, if it is newer than what is on storage. The next world does not wait for that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import get_args

from dlrover_core.job import checkpoints, job, world
from dlrover_core.job.holdings import NO_STEP, Holdings
from dlrover_core.job.names import group_of
from dlrover_core.job.state import JobState
from dlrover_core.kernel.engine import Rules, to_named
from dlrover_core.kernel.events import Event, Record
from dlrover_core.spec import us

HELD_WAIT_S = 5.0
"""How long those who hold a step wait for those who have not said what they hold, beyond the grace that they have to stop."""


def _lasts(state: JobState) -> bool:
    """Are there agents that would write? Those of a job that has succeeded have what its script wanted to be written."""
    return state.job.live or state.job.state in ("stopping", "failed")


def _orderable(state: JobState, group: str, ended: Holdings | None) -> int:
    """The step of an ended generation that is to be written, as far as its nodes have told; -1: none is."""
    if ended is None or not ended.ended_at or ended.saved or not ended.heard_at or not _lasts(state):
        return NO_STEP
    step, kept, current = ended.whole, state.checkpoints.of(group), state.world.worlds.get(group)
    if step < 0 or (ended.generation, step) <= kept.newest or not kept.url:
        return NO_STEP  # or it is kept in memory alone
    if state.job.live and ended.planned and not ended.gone and current is not None and current.active:
        # Everybody who holds it is here, and goes on from there: there was no failure.
        return NO_STEP if all(current.member(node) is not None for node in ended.held) else step
    return step


def decided(state: JobState, group: str) -> int:
    """The newest generation that has ended and of which it is decided what is written: nodes keep nothing of it beside that."""
    kept = state.checkpoints.of(group)
    ended = kept.ended
    if ended is None:
        return max(0, kept.formed - 1)
    if not ended.saved and (ended.waiting or _orderable(state, group, ended) >= 0):
        return ended.generation - 1
    return max(ended.generation, kept.formed - 1)


def _save_at(state: JobState, ended: Holdings) -> int:
    """When nobody is waited for any longer."""
    spec = state.job.spec
    grace_s = spec.stop_grace_s if ended.planned else spec.broken_grace_s
    return max(ended.ended_at, ended.heard_at) + us(grace_s + HELD_WAIT_S)


def _save(state: JobState, group: str, now: int) -> Iterator[Event]:
    ended = state.checkpoints.of(group).ended
    step = _orderable(state, group, ended)
    if ended is not None and step >= 0 and (not ended.waiting or now >= _save_at(state, ended)):
        why = f"generation {ended.generation} ended: {ended.why}"
        yield checkpoints.SaveOrdered(group, ended.generation, step, why[: checkpoints.TEXT_MAX])


def _due(state: JobState) -> int | None:
    times = [
        _save_at(state, kept.ended)
        for group, kept in state.checkpoints.groups.items()
        if kept.ended is not None and _orderable(state, group, kept.ended) >= 0
    ]
    return min(times, default=None)


def _tick(state: JobState, now: int) -> Iterator[Event]:
    for group in list(state.checkpoints.groups):
        yield from _save(state, group, now)


def _on_word(state: JobState, fact: checkpoints.StepsHeld | world.Ended, record: Record) -> Iterator[Event]:
    if group_of(fact.node) in state.checkpoints.groups:
        yield from _save(state, group_of(fact.node), record.at)


def _all_told(state: JobState, fact: checkpoints.StepsHeld) -> bool:
    """Is it decided now what is written of that generation, even if that is nothing?"""
    ended = state.checkpoints.of(group_of(fact.node)).ended
    return ended is not None and not ended.waiting


def _on_end(state: JobState, fact: world.WorldFormed | world.WorldDissolved, record: Record) -> Iterator[Event]:
    """All may have told before it was known that their generation has ended."""
    if fact.group in state.checkpoints.groups:
        yield from _save(state, fact.group, record.at)


def _on_farewell(state: JobState, fact: job.JobStopping | job.JobFailed, record: Record) -> Iterator[Event]:
    """All may have told before."""
    yield from _tick(state, record.at)


def _persist(state: JobState, group: str) -> Mapping[str, checkpoints.Persist]:
    """Who has states of a generation that has ended to write is told so wherever it is."""
    order = state.checkpoints.of(group).order
    if order is None:
        return {}
    return {node: checkpoints.Persist(order.step, order.generation, places) for node, places in order.writers.items()}


RULES = Rules(
    react={
        **dict.fromkeys((job.JobStopping, job.JobFailed), _on_farewell),
        world.WorldFormed: _on_end,
        world.WorldDissolved: _on_end,
        checkpoints.StepsHeld: _on_word,
        **dict.fromkeys(get_args(world.Ended), _on_word),
    },
    due=_due,
    tick=_tick,
    levels={checkpoints.StepsHeld: _all_told},
    tells=to_named(_persist),
)
