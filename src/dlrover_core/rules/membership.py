"""Membership: which nodes could train now, which worlds wait, and for what."""

from __future__ import annotations

from collections.abc import Iterator

from dlrover_core.errors import Refused
from dlrover_core.job import nodes
from dlrover_core.job.health import OFF
from dlrover_core.job.names import group_of
from dlrover_core.job.node_lifecycle import COMING
from dlrover_core.job.planning import NONE
from dlrover_core.job.state import JobState
from dlrover_core.job.world import World
from dlrover_core.spec import us

# Checks of one wait for a world after which newcomers wait instead.
HELD_MAX = 3


def may_train(state: JobState, node: nodes.Node) -> bool:
    """May this node train, as far as its health goes?"""
    spec = state.job.spec
    if spec.precheck == OFF:
        return True
    found_at = state.health.good.get(node.group, {}).get(node.node)
    return found_at is not None and _fresh(state, found_at)


def admitted(state: JobState, group: str) -> int:
    """How many nodes of a group could be members of a world now; none while it is to wait for a check."""
    ready = state.nodes.tally.ready.get(group, 0)
    if state.job.spec.precheck == OFF:
        return ready - len(departing(state, group))
    return 0 if withholds(state, group) else len(ready_nodes(state, group))


def withholds(state: JobState, group: str) -> bool:
    """Does the next world wait for a check that runs, or is about to begin?"""
    check = state.health.running.get(group)
    if check is not None and not check.aside:
        return True
    if state.health.held.get(group, 0) >= HELD_MAX:
        return False
    if _whole(state, group):
        return False
    aside = check.members if check is not None else ()
    ready = state.nodes.tally.ready.get(group, 0)
    if ready > len(state.health.good.get(group, {})) + len(aside):
        return True
    return any(node.node not in aside for node in unchecked(state, group))


def _whole(state: JobState, group: str) -> bool:
    """Can the last world go on as it was? A restart waits for nobody's check."""
    last = state.world.worlds.get(group)
    return last is not None and bool(last.members) and all_back(state, group)


def _fresh(state: JobState, found_at: int) -> bool:
    return state.at <= found_at + us(state.job.spec.check_fresh_s)


def unchecked(state: JobState, group: str) -> list[nodes.Node]:
    """Ready nodes that must not train before they are checked."""
    good = state.health.good.get(group, {})
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
    incident = next((one for one in state.failures.incidents.values() if one.held), None)
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
        and state.planning.keeping.get(group) == current.generation
    )


def resume(state: JobState, group: str) -> int:
    """The step at which all ranks of the last world wait, or were stopped, at a boundary; -1: there is none."""
    plan, last = state.planning.plans.get(group), state.world.worlds.get(group)
    if plan is None or last is None or plan.generation != last.generation or not plan.held:
        return NONE
    return plan.boundary(member.node for member in last.members)


def departing(state: JobState, group: str) -> frozenset[str]:
    """Ready nodes that are no members of the next world all the same: they leave.

    Who is drained stays a candidate until its successor is there: a world that must be formed meanwhile, because of a
    failure, would else have to wait for it.
    """
    if not state.planning.leaving:
        return frozenset()
    plan = state.planning.plans.get(group)
    parted = plan.leaving if plan is not None and resume(state, group) >= 0 else ()
    found = []
    for name, leaving in state.planning.leaving.items():
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


def waiting_groups(state: JobState) -> Iterator[tuple[str, World]]:
    """Groups that have no active world though they should."""
    if state.job.forms:
        for group in state.job.spec.groups:
            world = state.world.worlds.get(group.name) or World()
            if not world.active and not end_pending(state, group.name):
                yield group.name, world


def waits(state: JobState, group: str) -> bool:
    """Has this group no active world though it should?"""
    return any(group == waiting for waiting, _ in waiting_groups(state))


def end_pending(state: JobState, group: str) -> bool:
    """Is a final decision pending over the group's failure? Then no world forms."""
    return any(incident.held and group_of(incident.node) == group for incident in state.failures.incidents.values())
