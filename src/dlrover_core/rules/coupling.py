"""Coupling sets: their groups, nodes and sizes, and what follows from the failure of a set.

If a group of the set is critical, the job fails. Otherwise the set is given up: its nodes are released by plan, and the job
goes on.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from dlrover_core.job import job
from dlrover_core.job.nodes import Node
from dlrover_core.job.state import JobState
from dlrover_core.kernel.events import Event
from dlrover_core.rules import slots
from dlrover_core.spec import GroupSpec


def sets(state: JobState) -> Iterator[str]:
    """The sets that have, or should have, a world: all but sets and places that were given up."""
    return (name for name in state.sets.all(state.job.spec) if exists(state, name))


def exists(state: JobState, name: str) -> bool:
    """Should this set have a world?"""
    if name in state.job.given_up:
        return False
    return state.sets.place(name) < 0 or wanted(state, name) > 0


def places(state: JobState, name: str) -> Iterator[tuple[str, int]]:
    """Group and index of every place of a set in its present size, wanted or not."""
    index = state.sets.place(name)
    for group in groups(state, name):
        indexes = range(group.nodes_max) if index < 0 else range(index, min(index + 1, group.nodes_max))
        yield from ((group.name, one) for one in indexes)


def groups(state: JobState, name: str) -> list[GroupSpec]:
    """The groups of a set, in the order of the spec."""
    spec = state.job.spec
    return [spec.group(group) for group in state.sets.groups(name)]


def ready(state: JobState, name: str) -> int:
    """How many nodes of a set are ready."""
    if state.sets.place(name) >= 0:
        return sum(node.ready for node in state.nodes.in_set(name))
    return sum(state.nodes.tally.ready.get(group, 0) for group in state.sets.groups(name))


def ready_by_group(state: JobState, name: str) -> Iterator[tuple[GroupSpec, int]]:
    """The groups of a set, each with the number of its ready nodes in the set."""
    alone = ready(state, name) if state.sets.place(name) >= 0 else 0
    for group in groups(state, name):
        yield group, alone or state.nodes.tally.ready.get(group.name, 0) * (state.sets.place(name) < 0)


def wanted_of(state: JobState, name: str, group: GroupSpec) -> int:
    """How many places of one of its groups a set still wants."""
    index = state.sets.place(name)
    if index < 0:
        return slots.wanted(state, group.name)
    return int(index < group.nodes_max and index not in state.nodes.tally.given_up.get(group.name, ()))


class Bounds(NamedTuple):
    """How many nodes of one of its groups a set needs, wants, and expects: those that the platform has a place for."""

    floor: int
    wanted: int
    expected: int


def bounds(state: JobState, name: str, group: GroupSpec) -> Bounds:
    """The bounds of one of its groups in a set."""
    if group.coupled:
        wanted = slots.wanted(state, group.name)
        return Bounds(group.floor, wanted, wanted - state.nodes.tally.waits.get(group.name, 0))
    wanted = wanted_of(state, name, group)
    return Bounds(1, wanted, wanted - sum(node.waiting for node in state.nodes.in_set(name)))


def waits(state: JobState, name: str) -> bool:
    """Has the platform no place for some node of a set?"""
    if not any(state.nodes.tally.waits.get(group) for group in state.sets.groups(name)):
        return False
    return state.sets.place(name) < 0 or any(node.waiting for node in state.nodes.in_set(name))


def wanted(state: JobState, name: str) -> int:
    """How many places of a set are still wanted."""
    return sum(wanted_of(state, name, group) for group in groups(state, name))


def floor_of(state: JobState, name: str, group: GroupSpec) -> int:
    """The fewest nodes of one of its groups that a world of a set has."""
    return group.floor if state.sets.place(name) < 0 else 1


def floor(state: JobState, name: str) -> int:
    """The fewest nodes that a world of a set has: the sum over its groups."""
    return sum(floor_of(state, name, group) for group in groups(state, name))


def serves(state: JobState, group: GroupSpec) -> bool:
    """Does a group serve others node by node, as parameter servers do: other groups use it, and its nodes are not coupled?"""
    used = any(group.name in one.uses for one in state.job.spec.groups if one.name != group.name)
    return used and not group.coupled


def users(state: JobState, name: str) -> Iterator[str]:
    """The sets that make steps and use this one."""
    groups_of = set(state.sets.groups(name))
    for group in state.job.spec.groups:
        if not groups_of.isdisjoint(group.uses):
            yield from (one for one in state.sets.of_group(group) if one != name and one in state.progress.groups)


# ---- the end of a set


def failed(state: JobState, name: str, reason: str, incident: int, root: str) -> Event:
    """The event that follows when a set cannot go on: the job fails, or the set is given up."""
    if state.sets.critical(name):
        return job.JobFailed(reason, incident, root)
    return job.SetGivenUp(name, reason, incident, root)


def over(state: JobState, name: str) -> bool:
    """Has a set finished, been given up, or lost its last place?"""
    current = state.world.at(name)
    done = current.active and len(current.finished) == len(current.members)
    return done or not exists(state, name)


def members(state: JobState, name: str) -> list[Node]:
    """The nodes of a set that should exist."""
    return [node for node in state.nodes.in_set(name) if not node.released]
