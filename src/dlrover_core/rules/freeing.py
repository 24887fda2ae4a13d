"""Freeing: the nodes of a set are released once its workers have stopped, and what they hold is on storage.

That is how a suspended job gives its nodes back (`rules.suspension`), and a set for which there is no room
(`rules.queueing`). The workers stop with their grace. What the nodes hold is written to storage as after any end of a
generation (`rules.save_on_failure`). Nobody is planned meanwhile (`slots.asks`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

from dlrover_core.job import checkpoints, nodes, world
from dlrover_core.job.state import JobState
from dlrover_core.job.waiting import JOB, Wait
from dlrover_core.kernel.engine import Rules
from dlrover_core.kernel.events import Event, Record
from dlrover_core.rules import slots, worlds
from dlrover_core.rules.save_on_failure import order, save_at
from dlrover_core.words import count

Word = world.WorkersStopped | checkpoints.StepsHeld | checkpoints.StorageFailed | world.Ended
"""What may be the last thing that the nodes of a set were waited for."""


def why(state: JobState, name: str) -> str:
    """Why the nodes of a set are released, as the reason of a release; empty: they are kept."""
    if state.job.freed:
        return nodes.SUSPENDED
    return nodes.GIVEN_BACK if state.job.live and name in state.queueing.back else ""


def begin(state: JobState, name: str, now: int, words: str) -> Iterator[Event]:
    """Stop the workers of a set with grace, and release at once whoever holds nothing."""
    yield from worlds.dissolve(state, name, words, planned=True)
    reason = why(state, name)
    for node in state.nodes.in_set(name) if reason else ():
        if not (node.joined or node.released):
            yield from slots.release(state, node, reason)
    yield from free(state, name, now)


def free(state: JobState, name: str, now: int) -> Iterator[Event]:
    """Release the nodes of a set that are to be freed, once nothing keeps them."""
    reason = why(state, name)
    here = [node for node in state.nodes.in_set(name) if not node.released] if reason else []
    if here and awaits(state, name, now) is None:
        for node in here:
            yield from slots.release(state, node, reason)


def awaits(state: JobState, name: str, now: int) -> Wait | None:
    """What the nodes of a set still have to do before they are released; None: nothing."""
    stopping = _stopping(state, name)
    if stopping:
        words = f"workers of {count(len(stopping), 'node')} have not stopped yet"
        return Wait(name, JOB, words, nodes=tuple(stopping))
    kept, suspension = state.checkpoints.of(name), state.job.suspension
    ended = kept.ended
    if ended is not None and not ended.saved and ended.waiting and now < save_at(state, ended):
        return Wait(
            name, JOB, f"{count(ended.waiting, 'node')} have not said yet what they hold", save_at(state, ended)
        )
    if order(state, name, now) is not None:
        return Wait(name, JOB, "what they hold is to be written")
    if kept.order is None:
        return None
    failing = [node for node in kept.order.writers if node in state.checkpoints.failing]
    if failing and suspension is not None and suspension.lose:
        return None
    unable = f", and {count(len(failing), 'node')} cannot write there now" if failing else ""
    return Wait(name, JOB, f"step {kept.order.step} is being written to {kept.url}{unable}", nodes=tuple(failing))


def _stopping(state: JobState, name: str) -> list[str]:
    """The members of a set's last world whose workers have not stopped."""
    current, here = state.world.at(name), state.nodes.nodes
    return [
        member.node
        for member in current.members
        if not current.listed("stopped", member.node)
        and not current.listed("finished", member.node)
        and (node := here.get(member.node)) is not None
        and node.joined
        and not node.released
    ]


# ---- course


def _freed(state: JobState) -> Iterator[str]:
    """The sets whose nodes are to be released."""
    yield from state.sets.all(state.job.spec) if state.job.freed else state.queueing.back


def _on_word(state: JobState, fact: Word, record: Record) -> Iterator[Event]:
    yield from free(state, state.set_of(fact.node), record.at)


def _on_stored(state: JobState, fact: checkpoints.CheckpointCommitted, record: Record) -> Iterator[Event]:
    yield from free(state, fact.group, record.at)


def _due(state: JobState) -> int | None:
    return min(_told_at(state), default=None)


def _told_at(state: JobState) -> Iterator[int]:
    """When missing reports of what nodes hold are no longer waited for."""
    for name, kept in state.checkpoints.groups.items():
        ended = kept.ended
        if ended is None or ended.saved or not ended.waiting or not why(state, name) or _stopping(state, name):
            continue
        if any(not node.released for node in state.nodes.in_set(name)):
            yield save_at(state, ended)


def _tick(state: JobState, now: int) -> Iterator[Event]:
    for name in list(_freed(state)):
        yield from free(state, name, now)


RULES = Rules(
    react={
        **dict.fromkeys(get_args(Word), _on_word),
        checkpoints.CheckpointCommitted: _on_stored,
    },
    due=_due,
    tick=_tick,
)
