"""Save on failure: when a generation has ended, its newest complete step in memory is written to storage at once.

The nodes report what they hold (`checkpoints.StepsHeld`). Once all remaining nodes have, or had the time to, the leader
orders the newest step of which every part is held to be written, if it is newer than the newest checkpoint. The next world
does not wait.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import get_args

from dlrover_core.job import checkpoints, job, waiting, world
from dlrover_core.job.holdings import NO_STEP, Holdings
from dlrover_core.job.state import JobState
from dlrover_core.job.waiting import Wait
from dlrover_core.kernel.engine import Rules, to_named
from dlrover_core.kernel.events import Event, Record
from dlrover_core.spec import us
from dlrover_core.words import first_few

HELD_WAIT_S = 5.0
"""Seconds that nodes with a state wait for the reports of others, beyond the grace that those have to stop."""


def _lasts(state: JobState) -> bool:
    """Will agents still write? Not after success: then storage has what the script wanted to be written."""
    return state.job.live or state.job.state in ("stopping", "failed")


def _orderable(state: JobState, group: str, ended: Holdings | None) -> int:
    """The step of an ended generation that should be written, as far as its nodes have reported; -1: none."""
    if ended is None or not ended.ended_at or ended.saved or not ended.heard_at or not _lasts(state):
        return NO_STEP
    step, kept, current = ended.whole, state.checkpoints.of(group), state.world.at(group)
    if step < 0 or (ended.generation, step) <= kept.newest or not kept.url:
        return NO_STEP  # or the set saves in memory only
    if state.job.live and ended.planned and not ended.gone and current.active:
        # No failure: all nodes that hold the step go on from it.
        return NO_STEP if all(current.member(node) is not None for node in ended.held) else step
    return step


def decided(state: JobState, group: str) -> int:
    """The newest ended generation for which it is decided what is written; nodes may drop what else they hold of it."""
    kept = state.checkpoints.of(group)
    ended = kept.ended
    if ended is None:
        return max(0, kept.formed - 1)
    if not ended.saved and (ended.waiting or _orderable(state, group, ended) >= 0):
        return ended.generation - 1
    return max(ended.generation, kept.formed - 1)


def save_at(state: JobState, ended: Holdings) -> int:
    """When missing reports are no longer waited for."""
    spec = state.job.spec
    grace_s = spec.stop_grace_s if ended.planned else spec.broken_grace_s
    return max(ended.ended_at, ended.heard_at) + us(grace_s + HELD_WAIT_S)


def order(state: JobState, group: str, now: int) -> checkpoints.SaveOrdered | Wait | None:
    """The order to write that is due now, or which reports it waits for; None: nothing should be written."""
    ended = state.checkpoints.of(group).ended
    step = _orderable(state, group, ended)
    if ended is None or step < 0:
        return None
    at = save_at(state, ended)
    if ended.waiting and now < at:
        silent = tuple(node for node in ended.places if node not in ended.held and node not in ended.gone)
        who = f"{first_few(silent)} to say what they hold of generation {ended.generation}"
        words = f"step {step} in memory is written to storage: it waits for {who}"
        return Wait(group, waiting.SAVE, words, at, silent)
    why = f"generation {ended.generation} ended: {ended.why}"
    return checkpoints.SaveOrdered(group, ended.generation, step, why[: checkpoints.TEXT_MAX])


def _save(state: JobState, group: str, now: int) -> Iterator[Event]:
    found = order(state, group, now)
    if isinstance(found, checkpoints.SaveOrdered):
        yield found


def _due(state: JobState) -> int | None:
    times = [
        save_at(state, kept.ended)
        for group, kept in state.checkpoints.groups.items()
        if kept.ended is not None and _orderable(state, group, kept.ended) >= 0
    ]
    return min(times, default=None)


def _tick(state: JobState, now: int) -> Iterator[Event]:
    for group in list(state.checkpoints.groups):
        yield from _save(state, group, now)


def _on_word(state: JobState, fact: checkpoints.StepsHeld | world.Ended, record: Record) -> Iterator[Event]:
    if state.set_of(fact.node) in state.checkpoints.groups:
        yield from _save(state, state.set_of(fact.node), record.at)


def _all_told(state: JobState, fact: checkpoints.StepsHeld) -> bool:
    """Is it decided what is written of that generation, be it nothing?"""
    ended = state.checkpoints.of(state.set_of(fact.node)).ended
    return ended is not None and not ended.waiting


def _on_end(state: JobState, fact: world.WorldFormed | world.WorldDissolved, record: Record) -> Iterator[Event]:
    """All nodes may have reported before the end of their generation was recorded."""
    if fact.group in state.checkpoints.groups:
        yield from _save(state, fact.group, record.at)


def _on_farewell(state: JobState, fact: job.JobStopping | job.JobFailed, record: Record) -> Iterator[Event]:
    """All nodes may have reported before."""
    yield from _tick(state, record.at)


def _persist(state: JobState, group: str) -> Mapping[str, checkpoints.Persist]:
    """Tell each node which states of an ended generation it must write, wherever the node now works."""
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
