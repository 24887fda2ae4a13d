"""Queueing: a half-placed set gives its nodes back, and given-up places and avoided hosts are tried again on room.

Two jobs that each hold half of the room would wait for each other for ever. So a set without a world that holds some nodes
and waits for others gives them back after `gang_s` and up to a quarter more, counted from the last node that was placed. It
asks again after a pause of one to sixteen sixteenths of `gang_s`. Both times follow from the job's run, the set, and how
often it gave back. So two jobs that began to wait at once do not give back at once: the second finds the room of the first.
And if they do, they pause differently, and differently each time. Nothing is given back while a state is only in memory.

Sets that the job's end does not wait for, as rollout workers are, serve those that it does wait for. While none of the
latter trains, they hold room for nothing, and perhaps the very room that another job waits for. So they give their nodes
back together with a set that waits, for the same pause, whether they have a world or not. A set that has finished gives
its nodes to one that waits at once, and for good.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from hashlib import blake2b
from typing import NamedTuple

from dlrover_core.job import nodes, queueing
from dlrover_core.job.checkpoints import MEMORY
from dlrover_core.job.node_lifecycle import ALIVE, COMING
from dlrover_core.job.state import JobState
from dlrover_core.kernel.engine import Rules, always
from dlrover_core.kernel.events import Event, Record
from dlrover_core.rules import coupling, freeing, membership, slots, worlds
from dlrover_core.spec import us

ROOM_MAX = 2**31
SHARES = 15
"""A pause has at least one and at most all sixteen parts of `gang_s`."""
LONGER = 4
"""A set holds its nodes for `gang_s` and up to a quarter more."""


# ---- decide


def _room(state: JobState, command: queueing.NoteRoom, now: int) -> Iterator[Event]:
    """Whether there is room is recorded at once; how much, only now and then, because other jobs change it all the time."""
    known, room = state.queueing.rooms.get(command.group), max(queueing.UNKNOWN, min(command.room, ROOM_MAX))
    if not state.job.live or room == state.queueing.room(command.group):
        return
    turned = known is None or (known.many > 0) != (room > 0)
    if turned or (known is not None and now - known.said_at >= us(state.job.spec.room_s)):
        yield queueing.RoomChanged(command.group, room)


# ---- time


def _held(state: JobState, group: str) -> list[nodes.Node]:
    """The nodes of a set that their platform has placed."""
    return [node for node in state.nodes.in_set(group) if node.placed_at and not node.released and node.state in ALIVE]


def _in_memory(state: JobState, group: str) -> bool:
    """Would a set lose what only memory holds?"""
    kept = state.checkpoints.of(group)
    if not state.world.at(group).active:
        return kept.resume()[1] == MEMORY
    failing = any(state.set_of(node) == group for node in state.checkpoints.failing)
    return bool(kept.generation) and (failing or not kept.url)


class _Beside(NamedTuple):
    """The sets that give back together with a set that the job's end waits for.

    ``since``: when the last of those that hold something had its first node placed; 0: they hold nothing. That their nodes come
    and go is no progress of the set that waits.
    """

    names: tuple[str, ...] = ()
    since: int = 0


def _beside(state: JobState) -> _Beside:
    """The sets that serve others, while no set trains that the job's end waits for."""
    if not state.sets.several or not any(state.nodes.tally.waits.values()):
        return _Beside()
    names = list(coupling.sets(state))
    if any(state.sets.ends(one) and state.world.at(one).active and not coupling.over(state, one) for one in names):
        return _Beside()
    serving = (one for one in names if not state.sets.ends(one) and one not in state.queueing.back)
    found = tuple(one for one in serving if not coupling.over(state, one) and not _in_memory(state, one))
    held = (_held(state, one) for one in found)
    return _Beside(found, max((min(node.placed_at for node in those) for those in held if those), default=0))


def _back_at(state: JobState, group: str, beside: _Beside) -> int | None:
    """When a set gives its nodes back, or those beside it give theirs; None: they keep them."""
    spec = state.job.spec
    if spec.joining or not spec.gang_s or not coupling.waits(state, group) or group in state.queueing.back:
        return None
    here = [node for node in state.nodes.in_set(group) if not node.released]
    come = Counter(node.group for node in here if node.state in COMING and not node.waits)
    if all(come[one.name] >= coupling.floor_of(state, group, one) for one in coupling.groups(state, group)):
        return None  # enough nodes are on their way
    held, others = _held(state, group), beside.since if state.sets.ends(group) else 0
    if not others and (not held or _in_memory(state, group)):
        return None
    since = [node.placed_at for node in held]
    since += min(node.waits_at for node in here if node.waits), state.world.at(group).changed_at, state.job.calm_at
    return max(*since, others) + hold_us(state, group)


def _unneeded(state: JobState) -> list[nodes.Node]:
    """The nodes of finished sets, while the platform has no place for another set that the job's end waits for."""
    if state.job.spec.joining or not state.sets.several or not any(state.nodes.tally.waits.values()):
        return []
    if not any(state.sets.ends(one) and coupling.waits(state, one) for one in membership.waiting_sets(state)):
        return []
    done = [
        one for one in coupling.sets(state) if coupling.over(state, one) and state.checkpoints.of(one).order is None
    ]
    free = [one for one in done if not any(worlds.owed(state, one))]
    return [node for one in free for node in state.nodes.in_set(one) if not node.released]


def hold_us(state: JobState, group: str) -> int:
    """How long a set holds its nodes and waits for others: jobs that began to wait at once give back one after the other."""
    gang_us = us(state.job.spec.gang_s)
    return gang_us + _share(state, group, "hold", state.queueing.times.get(group, 0) + 1, gang_us // LONGER)


def pause_us(state: JobState, group: str, times: int) -> int:
    """How long a set pauses after giving back for the ``times``-th time in a row."""
    gang_us = us(state.job.spec.gang_s)
    return gang_us // (SHARES + 1) + _share(state, group, "pause", times, gang_us * SHARES // (SHARES + 1))


def _share(state: JobState, group: str, what: str, times: int, most: int) -> int:
    """A part of ``most`` that follows from these, and is another one for every job."""
    said = f"{state.job.name}/{state.job.run}/{group}/{times}" + (f"/{what}" if what != "pause" else "")
    return most * int.from_bytes(blake2b(said.encode(), digest_size=6).digest(), "big") // 2**48


def _off_avoided_at(state: JobState, node: nodes.Node) -> int | None:
    """When this node may be placed on avoided hosts; None: it does not wait because of them."""
    if not node.waiting or not nodes.off_avoided(node.waits):
        return None
    if f"{node.group}-{node.index}" in state.queueing.anywhere:
        return None
    return max(node.waits_at, state.job.calm_at) + us(state.job.spec.last_call_s)


def _waiting(state: JobState) -> list[nodes.Node]:
    """The nodes whose platform has no place for them."""
    if not any(state.nodes.tally.waits.values()):
        return []
    return [state.nodes.nodes[name] for name in state.nodes.tally.loose if state.nodes.nodes[name].waiting]


def _due(state: JobState) -> int | None:
    if not state.job.live:
        return None
    times: list[int | None] = list(state.queueing.back.values())
    beside = _beside(state)
    times += [_back_at(state, group, beside) for group in membership.waiting_sets(state)]
    times += [_off_avoided_at(state, node) for node in _waiting(state)]
    times += [state.at] if _unneeded(state) else []
    return min((at for at in times if at is not None), default=None)


def _tick(state: JobState, now: int) -> Iterator[Event]:
    if not state.job.live:
        return
    # Those first that the others serve: who asks first is placed first.
    again = [group for group, until in state.queueing.back.items() if until <= now]
    for group in sorted(again, key=lambda one: not state.sets.ends(one)):
        yield queueing.AskedAgain(group)
    for node in sorted(_waiting(state), key=lambda one: (one.group, one.index, one.incarnation)):
        at = _off_avoided_at(state, node)
        if at is not None and at <= now:
            yield queueing.HostsAllowed(node.group, node.index, node.avoid)
    for node in _unneeded(state):
        yield from slots.release(state, node, nodes.UNNEEDED)
    beside = _beside(state)
    for group in list(membership.waiting_sets(state)):
        at = _back_at(state, group, beside)
        if at is not None and at <= now:
            yield from _give_back(state, group, beside, now)
            beside = _beside(state)


def _give_back(state: JobState, group: str, beside: _Beside, now: int) -> Iterator[Event]:
    """All of them ask again at the same time. Those that hold nothing give back their places in the platform's queue."""
    own = () if _in_memory(state, group) else (group,)
    together = own + (beside.names if state.sets.ends(group) else ())
    waits = [f"{node.node} waits: {node.waits}" for node in state.nodes.in_set(group) if node.waiting]
    more = f", and {len(waits) - 1} more" if len(waits) > 1 else ""
    until = now + pause_us(state, group, state.queueing.times.get(group, 0) + 1)
    there = [(one, tuple(node.node for node in _held(state, one))) for one in together]
    for one, held in sorted(there, key=lambda known: not known[1]):
        times = state.queueing.times.get(one, 0) + 1
        yield queueing.GivenBack(one, held, until, times, f"{waits[0]}{more}"[: nodes.TEXT_MAX])


# ---- react


def _release(state: JobState, fact: queueing.GivenBack, record: Record) -> Iterator[Event]:
    """Release the waiting nodes too: the platform would place them one by one meanwhile."""
    yield from freeing.begin(state, fact.group, record.at, "its nodes are given back")


def _ask(state: JobState, fact: queueing.AskedAgain, record: Record) -> Iterator[Event]:
    """Plan nodes again. Those that have not been released yet, because they still wrote to storage, stay."""
    yield from slots.complete(state, fact.group)
    yield from worlds.form_where_awaited(state, fact.group, record.at, "it asks again, and its nodes are still there")


def _elsewhere(state: JobState, fact: queueing.HostsAllowed, record: Record) -> Iterator[Event]:
    """The successor in the same place avoids no host."""
    node = state.nodes.latest(fact.group, fact.index)
    if node is not None and node.waiting:
        yield from slots.release(state, node, "avoided hosts are allowed")
        yield from slots.plan(state, fact.group, fact.index)


RULES = Rules(
    decide={queueing.NoteRoom: _room},
    react={
        queueing.GivenBack: _release,
        queueing.AskedAgain: _ask,
        queueing.HostsAllowed: _elsewhere,
    },
    due=_due,
    tick=_tick,
    levels=dict.fromkeys((queueing.GivenBack, queueing.AskedAgain, queueing.HostsAllowed), always),
)
