"""Membership: which nodes could train now, which world would form, and why none does.

`next_world` is the one place that decides whether a world can form. It returns that world, or the reason why not (`Wait`): the
rules form worlds by it, their deadlines are its ``until``, and `why_waiting` shows its reason to people.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from dlrover_core.errors import Refused
from dlrover_core.job import nodes, plans, waiting
from dlrover_core.job.checkpoints import MEMORY
from dlrover_core.job.checks import OFF
from dlrover_core.job.names import group_of
from dlrover_core.job.node_lifecycle import COMING
from dlrover_core.job.plans import NONE
from dlrover_core.job.state import JobState
from dlrover_core.job.waiting import Wait
from dlrover_core.job.world import World
from dlrover_core.rules import layout, slots
from dlrover_core.spec import us

# Checks of one wait for a world after which newcomers wait instead.
HELD_MAX = 3


def may_train(state: JobState, node: nodes.Node) -> bool:
    """May this node train, as far as its health goes?"""
    spec = state.job.spec
    if spec.precheck == OFF:
        return True
    found_at = state.checks.good.get(node.group, {}).get(node.node)
    return found_at is not None and _fresh(state, found_at)


def admitted(state: JobState, group: str) -> int:
    """How many nodes of a group could be members of a world now."""
    if state.job.spec.precheck == OFF:
        return state.nodes.tally.ready.get(group, 0) - len(departing(state, group))
    return len(ready_nodes(state, group))


def withheld(state: JobState, group: str) -> Wait | None:
    """Why the next world waits for a check that runs, or is about to begin; None: for no check."""
    if state.job.spec.precheck == OFF:
        return None
    check = state.checks.running.get(group)
    if check is not None and not check.aside:
        silent, busy = len(check.silent), len(check.busy)
        words = f"check {check.number} runs: {silent} of {busy} nodes have not reported round {check.round}"
        return Wait(group, waiting.CHECK, words)
    if state.checks.held.get(group, 0) >= HELD_MAX or _whole(state, group):
        return None
    aside = check.members if check is not None else ()
    first = state.nodes.tally.ready.get(group, 0) - len(state.checks.good.get(group, {})) - len(aside)
    if first <= 0:
        first = sum(node.node not in aside for node in unchecked(state, group))
    return Wait(group, waiting.CHECK, f"{_nodes(first)} must pass a check first") if first > 0 else None


def _whole(state: JobState, group: str) -> bool:
    """Can the last world go on as it was? A restart waits for nobody's check."""
    last = state.world.worlds.get(group)
    return last is not None and bool(last.members) and all_back(state, group)


def _fresh(state: JobState, found_at: int) -> bool:
    return state.at <= found_at + us(state.job.spec.check_fresh_s)


def unchecked(state: JobState, group: str) -> list[nodes.Node]:
    """Ready nodes that must not train before they are checked."""
    good = state.checks.good.get(group, {})
    # Whoever is no longer ready is no longer among the good: as many as those are all of them.
    if len(good) == state.nodes.tally.ready.get(group, 0) and _fresh(state, min(good.values(), default=state.at)):
        return []
    current = state.world.worlds.get(group) or World()
    return [
        node
        for node in state.nodes.of(group)
        if node.ready and not may_train(state, node) and not (current.active and current.member(node.node) is not None)
    ]


def refuse_while_failing(state: JobState) -> None:
    """Raises `Refused` while the job's end is decided, and only the last evidence for its cause is awaited."""
    incident = next((one for one in state.incidents.by_number.values() if one.held), None)
    if incident is not None:
        raise Refused(f"incident {incident.number} ({incident.signature}) is about to fail the job: {incident.rule}")


def able(state: JobState, group: str) -> bool:
    """Can the running world of a group be changed at a step boundary? Not once ranks have ended: they come to none."""
    current = state.world.worlds.get(group)
    return (
        current is not None
        and current.active
        and not current.finished
        and state.job.forms
        and state.job.spec.plan_s > 0
        and state.plans.keeping.get(group) == current.generation
    )


def resume(state: JobState, group: str) -> int:
    """The step at which all ranks of the last world wait, or were stopped, at a boundary; -1: there is none."""
    plan, last = state.plans.by_group.get(group), state.world.worlds.get(group)
    if plan is None or last is None or plan.generation != last.generation or not plan.held:
        return NONE
    return plan.boundary(member.node for member in last.members)


def departing(state: JobState, group: str) -> frozenset[str]:
    """Ready nodes that are no members of the next world all the same: they leave.

    Who is drained stays a candidate until its successor is there: a world that must be formed meanwhile, because of a
    failure, would else have to wait for it.
    """
    if not state.plans.leaving:
        return frozenset()
    plan = state.plans.by_group.get(group)
    parted = plan.leaving if plan is not None and resume(state, group) >= 0 else ()
    found = []
    for name, leaving in state.plans.leaving.items():
        node = state.nodes.nodes.get(name)
        if node is None or node.group != group or not node.ready or not may_train(state, node):
            continue
        if leaving.out or leaving.why == nodes.SCALED_DOWN or name in parted or succeeded(state, node):
            found.append(name)
    return frozenset(found)


def successor(state: JobState, node: nodes.Node) -> nodes.Node | None:
    """Who is to take the place of a node that has not gone yet; None: nobody is planned."""
    latest = state.nodes.latest(node.group, node.index)
    coming = latest is not None and latest.incarnation > node.incarnation and not latest.released
    return latest if coming and latest is not None and latest.state in COMING else None


def succeeded(state: JobState, node: nodes.Node) -> bool:
    """Is its successor there, ready to train?"""
    latest = successor(state, node)
    return latest is not None and latest.ready and may_train(state, latest)


def ready_nodes(state: JobState, group: str) -> list[nodes.Node]:
    """Nodes of a group that could be members now."""
    admits, away = may_train, departing(state, group)
    here = state.nodes.nodes.values()
    return [one for one in here if one.group == group and one.ready and admits(state, one) and one.node not in away]


def all_back(state: JobState, group: str) -> bool:
    """Are all members of the last world here whose places are still wanted? They wait for nobody, last call or not."""
    nodes_max, last = state.job.spec.group(group).nodes_max, state.world.worlds.get(group) or World()
    here, away = {node.node for node in ready_nodes(state, group)}, departing(state, group)
    wanted = [member.node for member in last.members if int(member.node.rsplit("-", 2)[1]) < nodes_max]
    staying = [node for node in wanted if node not in away]
    return bool(staying) and here.issuperset(staying)


def waiting_groups(state: JobState) -> Iterator[str]:
    """Groups that have no active world though they should."""
    if state.job.forms:
        for group in state.job.spec.groups:
            world = state.world.worlds.get(group.name)
            if (world is None or not world.active) and not end_pending(state, group.name):
                yield group.name


def waits(state: JobState, group: str) -> bool:
    """Has this group no active world though it should?"""
    return group in waiting_groups(state)


def end_pending(state: JobState, group: str) -> Wait | None:
    """The decision over the group's failure that is pending, if one is: then no world forms."""
    for incident in state.incidents.by_number.values():
        if incident.held and group_of(incident.node) == group:
            words = f"incident {incident.number} ({incident.signature}) is about to fail the job"
            return Wait(group, waiting.END, words)
    return None


# ---- the next world, or why there is none


class Gathered(NamedTuple):
    """How many nodes the next world would have, and are these all that are expected?"""

    many: int
    everybody: bool


class NextWorld(NamedTuple):
    """A world that can form: its nodes in rank order, the store of rank 0's node, and the step and tier to resume from."""

    nodes: list[nodes.Node]
    store: str
    resume: tuple[int, str]


def gathered(state: JobState, group: str) -> Gathered | Wait:
    """The nodes that are there for a world; or why there cannot be one of them."""
    withheld_by = withheld(state, group)
    if withheld_by is not None:
        return withheld_by
    spec, here = state.job.spec.group(group), admitted(state, group)
    count, expected = (nodes // spec.unit * spec.unit for nodes in (here, slots.wanted(state, group)))
    if count < spec.floor:
        return Wait(group, waiting.NODES, f"{here} of at least {_nodes(spec.floor)} are there")
    return Gathered(expected, everybody=True) if here >= expected >= spec.floor else Gathered(count, everybody=False)


def last_call(state: JobState, group: str) -> int:
    """When a world forms with those who are there, if not everybody expected has come."""
    world = state.world.worlds.get(group) or World()
    return max(world.called_at, state.job.calm_at) + us(state.job.spec.last_call_s)


def paused(state: JobState, group: str) -> int:
    """Until when the next world waits because its program failed at once; 0: it was not paused."""
    cycles = state.incidents.cycles.get(group)
    return cycles.not_before(state.job.spec.restart_pause_s) if cycles is not None else 0


def next_world(state: JobState, group: str, now: int, *, at_once: bool = False) -> NextWorld | Wait:
    """The world that can form now; or why none can. ``at_once``: without the last call.

    It goes on from the boundary at which the last world waits, if it does.
    """
    if not state.job.forms:
        return Wait(group, waiting.JOB, f"the job is {state.job.state}")
    found = gathered(state, group)
    if isinstance(found, Wait):
        return found
    if not _stores(state, group):
        return Wait(group, waiting.STORE, "none of its nodes offers a store")
    until, called = paused(state, group), last_call(state, group)
    if now < until:
        early = state.incidents.of(group).early
        failed = f"its program failed at once {early} times in a row" if early else "its last restart asked for a pause"
        return Wait(group, waiting.PAUSE, failed, until)
    if now < called and not (found.everybody or at_once):
        words = f"{found.many} of {_nodes(slots.wanted(state, group))} are there"
        return Wait(group, waiting.LAST_CALL, words, called)
    ordered = _seats(state, group, found.many)
    if not state.world.offers.get(ordered[0].node):
        if now < called:
            return Wait(group, waiting.STORE, f"{ordered[0].node} offers no store", called, (ordered[0].node,))
        ordered = _led_with_a_store(state, group, ordered)
    boundary = resume(state, group)
    begins = (boundary, MEMORY) if boundary >= 0 else state.checkpoints.of(group).resume()
    return NextWorld(ordered, state.world.offers[ordered[0].node][0], begins)


def next_by_time(state: JobState, group: str, now: int) -> NextWorld | Wait:
    """The world that a tick forms now, or why it forms none: after a pause nobody waits for a last call who was there before."""
    at_once = paused(state, group) > 0 and all_back(state, group)
    return next_world(state, group, now, at_once=at_once)


def _stores(state: JobState, group: str) -> list[nodes.Node]:
    """A node that could lead the next world, if there is one: it offers a store."""
    here, away = state.nodes.nodes, departing(state, group)
    for name, offered in state.world.offers.items():
        node = here.get(name) if offered and group_of(name) == group and name not in away else None
        if node is not None and node.ready and may_train(state, node):
            return [node]
    return []


def _seats(state: JobState, group: str, count: int) -> list[nodes.Node]:
    """The layout of now. Worked out once for as long as only stores come and go: everybody's may come before rank 0's."""
    tally, world = state.nodes.tally, state.world.worlds.get(group) or World()
    key = (count, world.generation, tally.changes + state.checks.changes)
    known, ordered = tally.seats.get(group, (None, []))
    if known != key or state.plans.leaving:
        ordered = layout.layout([member.node for member in world.members], ready_nodes(state, group), count)
        tally.seats[group] = (key, ordered)
    return ordered


def _led_with_a_store(state: JobState, group: str, ordered: list[nodes.Node]) -> list[nodes.Node]:
    """Where the node of rank 0 offers no store for so long, one that does takes its place: better than no world."""
    leads = next((node for node in ordered if state.world.offers.get(node.node)), None) or _stores(state, group)[0]
    others = {leads.node: ordered[0]}
    return [leads, *(others.get(node.node, node) for node in ordered[1:])]


# ---- the reason, for people


def why_waiting(state: JobState, group: str, now: int | None = None) -> Wait | None:
    """Why a group has no world, or why its running world is not changed as planned yet; None: it waits for nothing.

    Of a group without a world None means that a tick forms one. ``now``: by default the time of the newest event.
    """
    current = state.world.worlds.get(group)
    if current is not None and current.active and state.job.forms:
        return boundary(state, group)
    pending = end_pending(state, group) if state.job.forms else None
    found = pending or next_by_time(state, group, state.at if now is None else now)
    if not isinstance(found, Wait):
        return None
    if found.why not in (waiting.NODES, waiting.LAST_CALL):
        return found
    missed = _missed(state, group)
    said = [f"{name} ({how})" for name, how in missed.items()]
    return found._replace(words=f"{found.words}; missed: {plans.named(said)}", nodes=tuple(missed))


def reasons(state: JobState, now: int | None = None) -> tuple[Wait, ...]:
    """What every group of a live job waits for."""
    groups = state.job.spec.groups if state.job.live else ()
    found = (why_waiting(state, group.name, now) for group in groups)
    return tuple(one for one in found if one is not None)


def _missed(state: JobState, group: str) -> dict[str, str]:
    """The nodes, or vacant places, that the next world could have besides those who are there, each with what it lacks."""
    here, away, found = {node.index for node in ready_nodes(state, group)}, departing(state, group), dict[str, str]()
    for index in range(state.job.spec.group(group).nodes_max):
        node = state.nodes.latest(group, index)
        if index in here or index in state.nodes.tally.given_up.get(group, ()):
            continue
        if node is None:
            found[f"{group}-{index}"] = "nobody is planned there"
        elif node.node in away or node.released:
            found[node.node] = node.released or "leaves"
        elif node.state in COMING and not node.joined:
            found[node.node] = "its agent has not joined" if node.state == "running" else node.state
        else:
            found[node.node] = node.state if not node.ready else "not checked"
    return found


def boundary(state: JobState, group: str) -> Wait | None:
    """What a planned change of a running world waits for; None: nothing is planned, or all ranks wait at its boundary."""
    plan = state.plans.by_group.get(group)
    if plan is None or not able(state, group):
        return None
    members = [member.node for member in state.world.worlds[group].members]
    if plan.asked_at and not plan.awaited(len(members)):
        return None
    if plan.asked_at:
        done, lacks = (plan.held, "to reach its boundary") if plan.go_at else (plan.armed, "to look for its boundary")
        awaited = [name for name in members if name not in done]
    else:
        awaited, lacks = unready(state, plan), "to be ready"
    who = f"{plans.named(awaited)} {lacks}" if awaited else "its ranks to be asked"
    words = f"planned change {plan.number} ({plans.in_words(plan.joining, plan.leaving)}) waits for {who}"
    return Wait(group, waiting.PLAN, words, plan.deadline, tuple(awaited))


def unready(state: JobState, plan: plans.Plan) -> list[str]:
    """Those who join by a plan and could not train yet."""
    here = state.nodes.nodes
    return [name for name in plan.joining if not (name in here and here[name].ready and may_train(state, here[name]))]


def _nodes(many: int) -> str:
    return f"{many} node{'' if many == 1 else 's'}"
