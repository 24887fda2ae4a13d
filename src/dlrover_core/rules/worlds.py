"""Worlds form, dissolve and grow.

A world forms at once when everybody expected is there; else, once the fewest are, after a last call.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

from dlrover_core.errors import Refused
from dlrover_core.job import job, nodes
from dlrover_core.job.names import group_of
from dlrover_core.job.ranges import to_ranges
from dlrover_core.job.state import JobState
from dlrover_core.job.waiting import Wait
from dlrover_core.job.world import (
    STORES_MAX,
    Ended,
    OfferStore,
    ReportFinished,
    ReportStarted,
    ReportStopped,
    StoreOffered,
    StoreWithdrawn,
    WithdrawStore,
    WorkersFinished,
    WorkersStarted,
    WorkersStopped,
    World,
    WorldDissolved,
    WorldFormed,
)
from dlrover_core.kernel.engine import Rules, always
from dlrover_core.kernel.events import Event, Record
from dlrover_core.rules import membership, slots
from dlrover_core.spec import us


def form(state: JobState, group: str, now: int, reason: str, *, at_once: bool = False) -> Iterator[Event]:
    """The next generation, if it can form now (`membership.next_world`)."""
    yield from _formed(state, group, membership.next_world(state, group, now, at_once=at_once), reason)


def form_where_awaited(state: JobState, group: str, now: int, reason: str) -> Iterator[Event]:
    """The next generation of a group that waits for one; without a last call where all of the last world are back."""
    if membership.waits(state, group):
        yield from form(state, group, now, reason, at_once=membership.all_back(state, group))


def _formed(state: JobState, group: str, found: membership.NextWorld | Wait, reason: str) -> Iterator[Event]:
    if isinstance(found, membership.NextWorld):
        world = state.world.worlds.get(group) or World()
        yield WorldFormed(group, world.generation + 1, to_ranges(found.nodes), found.store, reason, *found.resume)


def reform(state: JobState, group: str, now: int, reason: str) -> Iterator[Event]:
    """Replace the active generation at once; where that cannot be, stop it and wait for what is missing."""
    formed = list(form(state, group, now, reason, at_once=membership.all_back(state, group)))
    if formed:
        yield from formed
    else:
        yield from dissolve(state, group, reason)


def dissolve(state: JobState, group: str, reason: str, *, planned: bool = False) -> Iterator[Event]:
    """Stop the active generation, if there is one."""
    world = state.world.worlds.get(group)
    if world is not None and world.active:
        yield WorldDissolved(group, world.generation, reason, planned)


def growable(state: JobState, group: str) -> int:
    """The size a running smaller world could grow to by a plain restart; 0: it could not, or must not.

    Where ranks can agree on a step boundary it grows there (`plans`).
    """
    return larger(state, group) if state.job.spec.on_join == "restart" and not membership.able(state, group) else 0


def larger(state: JobState, group: str) -> int:
    """The size a running smaller world could have now; 0: no other."""
    world = state.world.worlds.get(group)
    if world is None or not world.active or world.finished or not state.job.forms:
        return 0
    found = membership.gathered(state, group)
    count = found.many if isinstance(found, membership.Gathered) else 0
    # Rank 0 stays where it is.
    return count if count > len(world.members) and state.world.offers.get(world.members[0].node) else 0


def grow_at(state: JobState, group: str) -> int:
    """When a world that could be larger is made so: at once where everybody wanted is there, else once others had their time."""
    world = state.world.worlds[group]
    everybody = larger(state, group) == slots.wanted(state, group)
    return state.at if everybody else world.joined_at + us(state.job.spec.grow_window_s)


def grow(state: JobState, group: str, now: int) -> Iterator[Event]:
    """Take late nodes into a running world. Nothing has failed: its workers have their grace."""
    formed = list(form(state, group, now, "nodes joined", at_once=True))
    yield from dissolve(state, group, "nodes joined", planned=True) if formed else ()
    yield from formed


def _due(state: JobState) -> int | None:
    times = [_due_in(state, group) for group in membership.waiting_groups(state)]
    times += [grow_at(state, group) for group in state.world.worlds if growable(state, group)]
    return min((at for at in times if at), default=None)


def _due_in(state: JobState, group: str) -> int:
    """When time alone lets a world form: after a pause a last call may still have to end; 0: never."""
    at = state.at
    while isinstance(found := membership.next_by_time(state, group, at), Wait):
        if found.until <= at:
            return 0
        at = found.until
    return at


def _tick(state: JobState, now: int) -> Iterator[Event]:
    for group in list(membership.waiting_groups(state)):
        called = now >= membership.last_call(state, group)
        why = "last call is over" if called else "after a pause: the program fails at once"
        yield from _formed(state, group, membership.next_by_time(state, group, now), why)
    for group in list(state.world.worlds):
        if growable(state, group) and now >= grow_at(state, group):
            yield from grow(state, group, now)


# ---- decide


def _current(state: JobState, node: str, generation: int) -> World:
    slots.present(state, node)
    world = state.world.of(node)
    if generation != world.generation or world.member(node) is None:
        raise Refused(f"generation {generation} is over: generation {world.generation} is the newest")
    return world


def _started(state: JobState, command: ReportStarted, now: int) -> Iterator[Event]:
    if _current(state, command.node, command.generation).listed("started", command.node):
        raise Refused(f"node {command.node!r} has started generation {command.generation} already")
    yield WorkersStarted(command.node, command.generation)


def _stopped(state: JobState, command: ReportStopped, now: int) -> Iterator[Event]:
    if _current(state, command.node, command.generation).listed("stopped", command.node):
        raise Refused(f"node {command.node!r} has stopped generation {command.generation} already")
    yield WorkersStopped(command.node, command.generation, command.step)


def _finished(state: JobState, command: ReportFinished, now: int) -> Iterator[Event]:
    world = _current(state, command.node, command.generation)
    if not world.active or world.listed("finished", command.node):
        raise Refused(f"generation {command.generation} is not running on {command.node!r}")
    yield WorkersFinished(*command[:3], command.unstored[: nodes.TEXT_MAX], max(-1, command.due))


def _offer(state: JobState, command: OfferStore, now: int) -> Iterator[Event]:
    node = slots.present(state, command.node)
    offers = state.world.offers.get(node.node, ())
    if len(command.address) > nodes.NAME_MAX:
        raise Refused(f"the address of a store has at most {nodes.NAME_MAX} characters")
    if not node.joined or command.address in offers or len(offers) >= STORES_MAX:
        raise Refused(f"node {node.node!r} is {node.state} and has offered {len(offers)} stores already")
    yield StoreOffered(node.node, command.address)


def _withdraw(state: JobState, command: WithdrawStore, now: int) -> Iterator[Event]:
    if command.address not in state.world.offers.get(command.node, ()):
        raise Refused(f"store {command.address} is not on offer")
    yield StoreWithdrawn(command.node, command.address)


# ---- react


def _start_job(state: JobState, fact: WorldFormed, record: Record) -> Iterator[Event]:
    if state.job.state == "created":
        yield job.JobStarted()


def _on_arrival(state: JobState, fact: nodes.NodeJoined | StoreOffered, record: Record) -> Iterator[Event]:
    group = group_of(fact.node)
    if membership.waits(state, group):
        yield from form(state, group, record.at, "everybody expected is there")
    elif isinstance(fact, nodes.NodeJoined) and growable(state, group) and grow_at(state, group) <= record.at:
        yield from grow(state, group, record.at)


def _on_loss(state: JobState, fact: Ended, record: Record) -> Iterator[Event]:
    if not state.job.live:
        return
    group = group_of(fact.node)
    world = state.world.of(fact.node)
    if world.active and world.member(fact.node) is not None and not world.done(fact.node):
        yield from dissolve(state, group, f"{fact.node} is no longer a member: {type(fact).__name__}")
    if membership.waits(state, group):
        yield from form(state, group, record.at, "going on without it")


def _all_finished(state: JobState, fact: WorkersFinished, record: Record) -> Iterator[Event]:
    if not state.job.live:
        return
    worlds = [state.world.worlds.get(group.name) or World() for group in state.job.spec.groups]
    if all(world.active and len(world.finished) == len(world.members) for world in worlds):
        owed = [
            f"{node}: {why}"
            for group, world in state.world.worlds.items()
            for node, (due, why) in world.unstored.items()
            if due < 0 or (world.generation, due) > state.checkpoints.of(group).newest
        ]
        why = "unstored: the script ended well, and its last state is not on storage"
        yield job.JobFailed(why, 0, owed[0]) if owed else job.JobSucceeded(fact.generation)


RULES = Rules(
    decide={
        OfferStore: _offer,
        WithdrawStore: _withdraw,
        ReportStarted: _started,
        ReportStopped: _stopped,
        ReportFinished: _finished,
    },
    react={
        WorldFormed: _start_job,
        nodes.NodeJoined: _on_arrival,
        StoreOffered: _on_arrival,
        **dict.fromkeys(set(get_args(Ended)) - {nodes.NodeSucceeded}, _on_loss),
        WorkersFinished: _all_finished,
    },
    due=_due,
    tick=_tick,
    levels=dict.fromkeys((WorldFormed, WorldDissolved), always),
)
