"""Worlds form, dissolve and grow.

A world forms at once when all expected nodes are ready; else after a last call, once the fewest allowed are.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

from dlrover_core.errors import Refused
from dlrover_core.job import incidents, job, nodes, waiting
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
from dlrover_core.rules import coupling, membership, slots
from dlrover_core.spec import us


def form(state: JobState, group: str, now: int, reason: str, *, at_once: bool = False) -> Iterator[Event]:
    """Form the next generation, if it can form now (`membership.next_world`)."""
    yield from _formed(state, group, membership.next_world(state, group, now, at_once=at_once), reason)


def form_where_awaited(state: JobState, group: str, now: int, reason: str) -> Iterator[Event]:
    """Form the next generation of a group that waits for one; without a last call if all members of the last world are back."""
    if membership.waits(state, group):
        yield from form(state, group, now, reason, at_once=membership.all_back(state, group))


def _formed(state: JobState, group: str, found: membership.NextWorld | Wait, reason: str) -> Iterator[Event]:
    if isinstance(found, membership.NextWorld):
        world = state.world.at(group)
        yield WorldFormed(group, world.generation + 1, to_ranges(found.nodes), found.store, reason, *found.resume)


def reform(state: JobState, group: str, now: int, reason: str) -> Iterator[Event]:
    """Replace the running generation at once; if that cannot be, stop it and wait for what is missing."""
    formed = list(form(state, group, now, reason, at_once=membership.all_back(state, group)))
    if formed:
        yield from formed
    else:
        yield from dissolve(state, group, reason)


def dissolve(state: JobState, group: str, reason: str, *, planned: bool = False) -> Iterator[Event]:
    """Stop the running generation, if there is one."""
    world = state.world.at(group)
    if world.active:
        yield WorldDissolved(group, world.generation, reason, planned)


def growth(state: JobState, group: str, now: int) -> int | Wait:
    """The size to which a running world should grow now by a plain restart, or what it waits for; 0: it keeps its size."""
    size = growable(state, group)
    return size if isinstance(size, Wait) or not size else in_time(state, group, size, now)


def growable(state: JobState, group: str) -> int | Wait:
    """The size to which a running smaller world could grow by a plain restart, or what it lacks; 0: it cannot, or must not.

    A world whose ranks can agree on a step boundary grows there instead (`plans`).
    """
    restarts = state.job.policy(group).on_join == "restart"
    return larger(state, group) if restarts and not membership.able(state, group) else 0


def in_time(state: JobState, group: str, size: int, now: int) -> int | Wait:
    """``size``, if a world should grow to it now; or until when other nodes have time to come."""
    at = grow_at(state, group)
    words = f"{size} of {coupling.wanted(state, group)} nodes could train; the others have time to come"
    return size if now >= at else Wait(group, waiting.GROW, words, at)


def larger(state: JobState, group: str) -> int | Wait:
    """The larger size that a running world could have now, or what that lacks; 0: no other node is there."""
    world = state.world.at(group)
    if not world.active or world.finished or not state.job.forms:
        return 0
    found = membership.gathered(state, group)
    if isinstance(found, Wait):
        return found._replace(why=waiting.GROW) if found.why == waiting.CHECK else 0
    if found.many <= len(world.members):
        return 0
    # Rank 0 stays on its node.
    first = world.members[0].node
    if state.sets.stored(group) and not state.world.offers.get(first):
        words = f"{found.many} nodes could train; {first}, which keeps rank 0, offers no store for a larger world"
        return Wait(group, waiting.GROW, words, nodes=(first,))
    return found.many


def grow_at(state: JobState, group: str) -> int:
    """When a world grows: at once if all wanted nodes are ready, else after their time to come."""
    world = state.world.worlds[group]
    everybody = larger(state, group) == coupling.wanted(state, group)
    return state.at if everybody else world.joined_at + us(state.job.spec.grow_window_s)


def grows(state: JobState, group: str, now: int) -> bool:
    """Should a running world grow now by a plain restart?"""
    return size_of(growth(state, group, now)) > 0


def size_of(found: int | Wait) -> int:
    """The size that was found; 0: none."""
    return 0 if isinstance(found, Wait) else found


def grow(state: JobState, group: str, now: int) -> Iterator[Event]:
    """Take late nodes into a running world. This is no failure, so its workers have their grace."""
    formed = list(form(state, group, now, "nodes joined", at_once=True))
    yield from dissolve(state, group, "nodes joined", planned=True) if formed else ()
    yield from formed


def _due(state: JobState) -> int | None:
    times = [_due_in(state, group) for group in membership.waiting_sets(state)]
    times += [grow_at(state, group) for group in state.world.worlds if size_of(growable(state, group))]
    return min((at for at in times if at), default=None)


def _due_in(state: JobState, group: str) -> int:
    """When a world can form by time alone; 0: never. After a pause, a last call may still have to end."""
    at = state.at
    while isinstance(found := membership.next_by_time(state, group, at), Wait):
        if found.until <= at:
            return 0
        at = found.until
    return at


def _tick(state: JobState, now: int) -> Iterator[Event]:
    for group in list(membership.waiting_sets(state)):
        called = now >= membership.last_call(state, group)
        why = "last call is over" if called else "after a pause: the program fails at once"
        yield from _formed(state, group, membership.next_by_time(state, group, now), why)
    for group in list(state.world.worlds):
        if grows(state, group, now):
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
    group = state.set_of(fact.node)
    if membership.waits(state, group):
        yield from form(state, group, record.at, "all expected nodes are there")
    elif isinstance(fact, nodes.NodeJoined) and grows(state, group, record.at):
        yield from grow(state, group, record.at)


def _on_wait(state: JobState, fact: nodes.NodePending, record: Record) -> Iterator[Event]:
    """A waiting node is no longer expected, so the other nodes may be all that are."""
    group = state.set_of(fact.node)
    if fact.waits and membership.waits(state, group):
        yield from form(state, group, record.at, f"{fact.node} waits for its platform")


def _on_loss(state: JobState, fact: Ended, record: Record) -> Iterator[Event]:
    if not state.job.live:
        return
    group = state.set_of(fact.node)
    world = state.world.of(fact.node)
    if world.active and world.member(fact.node) is not None and not world.done(fact.node):
        yield from dissolve(state, group, f"{fact.node} is no longer a member: {type(fact).__name__}")
    if membership.waits(state, group):
        yield from form(state, group, record.at, "going on without it")


def _all_finished(state: JobState, fact: WorkersFinished, record: Record) -> Iterator[Event]:
    if state.job.live and coupling.over(state, state.set_of(fact.node)):
        yield from _ended(state, fact.generation)


def _ended(state: JobState, generation: int) -> Iterator[Event]:
    """The job's end, once all sets that it waits for are over. It stops the workers of other sets, with grace."""
    names = state.sets.ending(state.job.spec)
    if not all(coupling.over(state, name) for name in names):
        return
    owing = [one for name in names for one in owed(state, name)]
    why = "unstored: the script ended well, and its last state is not on storage"
    yield job.JobFailed(why, 0, owing[0]) if owing else job.JobSucceeded(generation)


def owed(state: JobState, name: str) -> Iterator[str]:
    """The finished nodes of a set whose last state is not on storage, each with the reason."""
    current, newest = state.world.at(name), state.checkpoints.of(name).newest
    for node, (due, why) in current.unstored.items():
        if due < 0 or (current.generation, due) > newest:
            yield f"{node}: {why}"


def _give_up(state: JobState, fact: job.SetGivenUp, record: Record) -> Iterator[Event]:
    """Stop the set's workers with grace and release its nodes by plan. The job may have waited for this set alone."""
    yield from dissolve(state, fact.set, fact.reason, planned=True)
    for node in state.nodes.in_set(fact.set):
        if not node.released:
            yield from slots.release(state, node, nodes.SET_GIVEN_UP)
    for incident in state.incidents.in_set(fact.set):
        if not incident.closed:
            yield incidents.IncidentClosed(incident.number, incidents.UNKNOWN, incidents.UNKNOWN)
    newest = max((world.generation for world in state.world.worlds.values()), default=0)
    yield from _ended(state, newest)


def _place_given_up(state: JobState, fact: nodes.NodeReleased, record: Record) -> Iterator[Event]:
    """A node that trained alone is gone for good, and its group goes on. The job may have waited for this node alone."""
    alone = state.sets.place(state.set_of(fact.node)) >= 0
    if state.job.live and fact.reason == "given up" and alone:
        yield from _ended(state, state.world.of(fact.node).generation)


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
        nodes.NodePending: _on_wait,
        **dict.fromkeys(set(get_args(Ended)) - {nodes.NodeSucceeded}, _on_loss),
        WorkersFinished: _all_finished,
        job.SetGivenUp: _give_up,
    },
    due=_due,
    tick=_tick,
    levels=dict.fromkeys((WorldFormed, WorldDissolved, job.SetGivenUp), always),
)
