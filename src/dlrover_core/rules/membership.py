"""Membership: which nodes could train now, which world would form, and why none does.

`next_world` alone decides whether a world can form. It returns that world, or the reason (`Wait`) why none can. The rules
form worlds by it, their deadlines are its ``until``, and `why_waiting` shows its reason to people.
"""

from __future__ import annotations

from collections import Counter
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
from dlrover_core.rules import coupling, layout
from dlrover_core.spec import us
from dlrover_core.words import count, first_few

# Checks before one world, after which newcomers are no longer checked first: they wait.
CHECKS_PER_WORLD_MAX = 3


def may_train(state: JobState, node: nodes.Node) -> bool:
    """May this node train, as far as its checks go?"""
    if state.job.policy(node.group).precheck == OFF:
        return True
    found_at = state.checks.good.get(state.sets.at(node.group, node.index), {}).get(node.node)
    return found_at is not None and _fresh(state, found_at)


def admitted(state: JobState, name: str) -> dict[str, int]:
    """How many nodes of each group of a set could be members of a world now."""
    groups = state.sets.groups(name)
    if state.job.policy(name).precheck == OFF and state.sets.place(name) < 0:
        tally, away = state.nodes.tally.ready, departing(state, name)
        if not away:
            return {group: tally.get(group, 0) for group in groups}
        return {group: tally.get(group, 0) - sum(group_of(one) == group for one in away) for group in groups}
    here = Counter(node.group for node in ready_nodes(state, name))
    return {group: here[group] for group in groups}


def withheld(state: JobState, group: str) -> Wait | None:
    """The running or imminent check that the next world waits for; None: none."""
    if state.job.policy(group).precheck == OFF:
        return None
    check = state.checks.running.get(group)
    if check is not None and not check.aside:
        silent, busy = len(check.silent), len(check.busy)
        words = f"check {check.number} runs: {silent} of {busy} nodes have not reported round {check.round}"
        return Wait(group, waiting.CHECK, words)
    if state.checks.since_world.get(group, 0) >= CHECKS_PER_WORLD_MAX or _whole(state, group):
        return None
    aside = check.members if check is not None else ()
    first = coupling.ready(state, group) - len(state.checks.good.get(group, {})) - len(aside)
    if first <= 0:
        first = sum(node.node not in aside for node in unchecked(state, group))
    return Wait(group, waiting.CHECK, f"{count(first, 'node')} must pass a check first") if first > 0 else None


def _whole(state: JobState, group: str) -> bool:
    """Can the last world start again with the same members? A restart waits for no check of other nodes."""
    return bool(state.world.at(group).members) and all_back(state, group)


def _fresh(state: JobState, found_at: int) -> bool:
    return state.at <= found_at + us(state.job.spec.check_fresh_s)


def unchecked(state: JobState, group: str) -> list[nodes.Node]:
    """Ready nodes that must be checked before they may train."""
    good = state.checks.good.get(group, {})
    # A node that is no longer ready is removed from the good ones, so equal numbers mean that all ready nodes are good.
    if len(good) == coupling.ready(state, group) and _fresh(state, min(good.values(), default=state.at)):
        return []
    current = state.world.at(group)
    return [
        node
        for node in state.nodes.in_set(group)
        if node.ready and not may_train(state, node) and not (current.active and current.member(node.node) is not None)
    ]


def refuse_while_failing(state: JobState) -> None:
    """Raises `Refused` while the job's end is decided and only the last evidence for its cause is awaited."""
    held = (one for one in state.incidents.by_number.values() if one.end_pending)
    incident = next((one for one in held if state.sets.critical(state.set_of(one.node))), None)
    if incident is not None:
        raise Refused(f"incident {incident.number} ({incident.signature}) is about to fail the job: {incident.rule}")


def able(state: JobState, group: str) -> bool:
    """Can the running world of a group be changed at a step boundary? Not once ranks have ended: they reach none."""
    current = state.world.at(group)
    return (
        current.active
        and not current.finished
        and state.job.forms
        and state.job.spec.plan_s > 0
        and state.plans.keeping.get(group) == current.generation
    )


def resume(state: JobState, group: str) -> int:
    """The step at whose boundary all ranks of the last world wait, or were stopped; -1: there is none."""
    plan, last = state.plans.by_group.get(group), state.world.at(group)
    if plan is None or plan.generation != last.generation or not plan.at_boundary:
        return NONE
    return plan.boundary(member.node for member in last.members)


def departing(state: JobState, group: str) -> frozenset[str]:
    """Ready nodes that must leave, and so are no members of the next world.

    A drained node remains a candidate until its successor is ready. A world that must form meanwhile, because of a failure,
    would otherwise have to wait for the successor.
    """
    if not state.plans.leaving:
        return frozenset()
    plan = state.plans.by_group.get(group)
    parted = plan.leaving if plan is not None and resume(state, group) >= 0 else ()
    found = []
    for name, leaving in state.plans.leaving.items():
        node = state.nodes.nodes.get(name)
        if node is None or state.set_of(name) != group or not node.ready or not may_train(state, node):
            continue
        if leaving.out or leaving.why == nodes.SCALED_DOWN or name in parted or succeeded(state, node):
            found.append(name)
    return frozenset(found)


def successor(state: JobState, node: nodes.Node) -> nodes.Node | None:
    """The node planned for the place of a node that has not gone yet; None: none is."""
    latest = state.nodes.latest(node.group, node.index)
    coming = latest is not None and latest.incarnation > node.incarnation and not latest.released
    return latest if coming and latest is not None and latest.state in COMING else None


def succeeded(state: JobState, node: nodes.Node) -> bool:
    """Is the node's successor ready to train?"""
    latest = successor(state, node)
    return latest is not None and latest.ready and may_train(state, latest)


def ready_nodes(state: JobState, group: str) -> list[nodes.Node]:
    """Nodes of a group that could be members now."""
    admits, away = may_train, departing(state, group)
    here = state.nodes.in_set(group)
    return [one for one in here if one.ready and admits(state, one) and one.node not in away]


def all_back(state: JobState, group: str) -> bool:
    """Are all members of the last world ready whose places are still wanted? Then no last call is needed."""
    last = state.world.at(group)
    nodes_max = {one.name: one.nodes_max for one in coupling.groups(state, group)}
    here, away = {node.node for node in ready_nodes(state, group)}, departing(state, group)
    named = ((member.node, *member.node.split("-")) for member in last.members)
    wanted = [name for name, group_name, index, _ in named if int(index) < nodes_max[group_name]]
    staying = [node for node in wanted if node not in away]
    return bool(staying) and here.issuperset(staying)


def waiting_sets(state: JobState) -> Iterator[str]:
    """Sets without an active world that should have one."""
    if state.job.forms:
        yield from (name for name in coupling.sets(state) if waits(state, name))


def waits(state: JobState, name: str) -> bool:
    """Is this set without an active world although it should have one?"""
    if state.world.at(name).active:
        return False
    return state.job.forms and coupling.exists(state, name) and not end_pending(state, name)


def end_pending(state: JobState, group: str) -> Wait | None:
    """Is the decision to fail the group pending? Then no world forms."""
    for incident in state.incidents.by_number.values():
        if incident.end_pending and state.set_of(incident.node) == group:
            what = "the job" if state.sets.critical(group) else group
            words = f"incident {incident.number} ({incident.signature}) is about to fail {what}"
            return Wait(group, waiting.END, words)
    return None


# ---- the next world, or why there is none


class Gathered(NamedTuple):
    """How many nodes of each of its groups the next world would have, and whether these are all that are expected."""

    counts: tuple[tuple[str, int], ...]
    everybody: bool

    @property
    def many(self) -> int:
        """How many nodes in all."""
        return sum(count for _, count in self.counts)


class NextWorld(NamedTuple):
    """A world that can form: nodes in rank order, store of rank 0's node, step to resume from, and its tier."""

    nodes: list[nodes.Node]
    store: str
    resume: tuple[int, str]


def gathered(state: JobState, group: str) -> Gathered | Wait:
    """The nodes for the next world, or the reason why there cannot be one."""
    withheld_by = withheld(state, group)
    if withheld_by is not None:
        return withheld_by
    admits, groups = admitted(state, group), coupling.groups(state, group)
    counts, everybody = list[tuple[str, int]](), True
    for spec in groups:
        here, (floor, *many) = admits[spec.name], coupling.bounds(state, group, spec)
        there, most, expected = (nodes // spec.unit * spec.unit for nodes in (here, *many))
        if there < floor:
            whose = f" of {spec.name}" if len(groups) > 1 else ""
            return Wait(group, waiting.NODES, f"{here} of at least {count(floor, 'node')}{whose} are there")
        # A leaving node and its waiting successor are of one place.
        whole = here >= expected and most >= floor
        counts.append((spec.name, min(there, most) if whole else there))
        everybody = everybody and whole
    return Gathered(tuple(counts), everybody)


def last_call(state: JobState, group: str) -> int:
    """When a world forms without the expected nodes that have not come."""
    world = state.world.at(group)
    return max(world.called_at, state.job.calm_at) + us(state.job.spec.last_call_s)


def paused(state: JobState, group: str) -> int:
    """Until when the next world waits because the program failed early; 0: no pause."""
    cycles = state.incidents.cycles.get(group)
    return cycles.not_before(state.job.spec.restart_pause_s) if cycles is not None else 0


def next_world(state: JobState, group: str, now: int, *, at_once: bool = False) -> NextWorld | Wait:
    """The world that can form now, or the reason why none can. ``at_once``: without a last call.

    If the last world waits at a boundary, the next one resumes from there.
    """
    if not state.job.forms:
        return Wait(group, waiting.JOB, f"the job is {state.job.state}")
    if state.job.pausing:
        return Wait(group, waiting.JOB, "the job is about to be suspended")
    asks_at = state.queueing.back.get(group, 0)
    if asks_at:
        words = "it has given back its nodes, because there was no room for all that the job needs, and asks again"
        return Wait(group, waiting.ROOM, words, asks_at)
    found = gathered(state, group)
    if isinstance(found, Wait):
        return found
    stored = state.sets.stored(group)
    if stored and not _stores(state, group):
        return Wait(group, waiting.STORE, "none of its nodes offers a store")
    until, called = paused(state, group), last_call(state, group)
    if now < until:
        early = state.incidents.of(group).early
        failed = f"its program failed at once {early} times in a row" if early else "its last restart asked for a pause"
        return Wait(group, waiting.PAUSE, failed, until)
    if now < called and not (found.everybody or at_once):
        words = f"{found.many} of {count(coupling.wanted(state, group), 'node')} are there"
        return Wait(group, waiting.LAST_CALL, words, called)
    ordered = _seats(state, group, found)
    if stored and not state.world.offers.get(ordered[0].node):
        if now < called:
            return Wait(group, waiting.STORE, f"{ordered[0].node} offers no store", called, (ordered[0].node,))
        ordered = _led_with_a_store(state, group, ordered)
    boundary = resume(state, group)
    begins = (boundary, MEMORY) if boundary >= 0 else state.checkpoints.of(group).resume()
    return NextWorld(ordered, state.world.offers[ordered[0].node][0] if stored else "", begins)


def next_by_time(state: JobState, group: str, now: int) -> NextWorld | Wait:
    """The world that a tick forms now, or the reason why none does.

    After a pause, nodes that were ready before need no last call.
    """
    at_once = paused(state, group) > 0 and all_back(state, group)
    return next_world(state, group, now, at_once=at_once)


def _stores(state: JobState, group: str) -> list[nodes.Node]:
    """A node that could lead the next world: it offers a store, and is of the set's first group; None: there is none."""
    here, away, first = state.nodes.nodes, departing(state, group), state.sets.groups(group)[0]
    offers = state.world.offers
    if state.sets.place(group) >= 0:
        offers = {node.node: offers.get(node.node, ()) for node in state.nodes.in_set(group)}
    for name, offered in offers.items():
        node = here.get(name) if offered and group_of(name) == first and name not in away else None
        if node is not None and node.ready and may_train(state, node):
            return [node]
    return []


def _seats(state: JobState, group: str, found: Gathered) -> list[nodes.Node]:
    """The present layout, cached while only stores come and go: the stores of all nodes may come before rank 0's."""
    tally, world = state.nodes.tally, state.world.at(group)
    key = (found.counts, world.generation, tally.changes + state.checks.changes)
    known, ordered = tally.seats.get(group, (None, []))
    if known != key or state.plans.leaving:
        before, ready = [member.node for member in world.members], ready_nodes(state, group)
        ordered = layout.by_group(before, ready, found.counts)
        tally.seats[group] = (key, ordered)
    return ordered


def _led_with_a_store(state: JobState, group: str, ordered: list[nodes.Node]) -> list[nodes.Node]:
    """The layout with another leader, if rank 0's node has offered no store for so long and another node of its group has one."""
    first = ordered[0].group
    seated = (node for node in ordered if node.group == first and state.world.offers.get(node.node))
    leads = next(seated, None) or _stores(state, group)[0]
    others = {leads.node: ordered[0]}
    return [leads, *(others.get(node.node, node) for node in ordered[1:])]


# ---- the reason, for people


def why_waiting(state: JobState, group: str, now: int | None = None) -> Wait | None:
    """Why a group has no world, or why its running world is not changed as planned; None: it waits for nothing.

    For a group without a world, None means that a tick forms one. ``now``: by default the time of the newest event.
    """
    if state.world.at(group).active and state.job.forms:
        return boundary(state, group)
    pending = end_pending(state, group) if state.job.forms else None
    found = pending or next_by_time(state, group, state.at if now is None else now)
    if not isinstance(found, Wait):
        return None
    if found.why not in (waiting.NODES, waiting.LAST_CALL):
        return found
    missed = _missed(state, group)
    said = [f"{name} ({how})" for name, how in missed.items()]
    return found._replace(words=f"{found.words}; missed: {first_few(said, plans.NODES_NAMED_MAX)}", nodes=tuple(missed))


def _missed(state: JobState, group: str) -> dict[str, str]:
    """The nodes, or vacant places, that the next world lacks, each with the reason."""
    here = {(node.group, node.index) for node in ready_nodes(state, group)}
    away, found = departing(state, group), dict[str, str]()
    for place in coupling.places(state, group):
        node = state.nodes.latest(*place)
        if place in here or place[1] in state.nodes.tally.given_up.get(place[0], ()):
            continue
        if node is None:
            found[f"{place[0]}-{place[1]}"] = "nobody is planned there"
        elif node.node in away or node.released:
            found[node.node] = node.released or "leaves"
        elif node.waits:
            found[node.node] = f"waits: {node.waits}"
        elif node.state in COMING and not node.joined:
            found[node.node] = "its agent has not joined" if node.state == "running" else node.state
        else:
            found[node.node] = node.state if not node.ready else "not checked"
    return found


def boundary(state: JobState, group: str) -> Wait | None:
    """What the planned change of a running world waits for; None: no change is planned, or all ranks wait at its boundary."""
    plan = state.plans.by_group.get(group)
    if plan is None or not able(state, group):
        return None
    members = [member.node for member in state.world.worlds[group].members]
    if plan.asked_at and not plan.awaited(len(members)):
        return None
    if plan.asked_at:
        done, lacks = (
            (plan.at_boundary, "to reach its boundary") if plan.go_at else (plan.armed, "to look for its boundary")
        )
        awaited = [name for name in members if name not in done]
    else:
        awaited, lacks = unready(state, plan), "to be ready"
    who = f"{first_few(awaited, plans.NODES_NAMED_MAX)} {lacks}" if awaited else "its ranks to be asked"
    what = plans.in_words(plan.joining, plan.leaving) or "the job is to be suspended"
    words = f"planned change {plan.number} ({what}) waits for {who}"
    return Wait(group, waiting.PLAN, words, plan.deadline, tuple(awaited))


def unready(state: JobState, plan: plans.Plan) -> list[str]:
    """Joining nodes of a plan that could not train yet."""
    here = state.nodes.nodes
    return [name for name in plan.joining if not (name in here and here[name].ready and may_train(state, here[name]))]
