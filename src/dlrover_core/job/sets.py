"""Coupling sets: which nodes train in one world, by the job's spec.

A set is one of three: a group (the default, and the set then has the group's name); several groups that name the same set;
or one node of a group whose nodes are not coupled (the set then has the place's name, ``rollout-3``). Every set has worlds
of its own, and a failure in one set restarts no other.

Sets follow from the spec alone and are no part of the state. Slices that fold by node look them up (`Coupled`), and so do
readers of a history.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from dlrover_core.job.names import group_of
from dlrover_core.spec import GroupSpec, JobSpec


class Sets:
    """The coupling sets of one job, by the groups of its spec."""

    __slots__ = ("_groups", "_named", "_silent", "_spare", "_storeless", "several")

    def __init__(self, groups: tuple[GroupSpec, ...] = ()) -> None:
        self.read(groups)

    def read(self, groups: tuple[GroupSpec, ...]) -> None:
        """Take the groups of a new run."""
        # A group that is a set of its own has no entry; one whose nodes are sets of their own has an empty one.
        self._named = {group.name: group.coupled for group in groups if group.coupled != group.name}
        self._groups: dict[str, tuple[str, ...]] = {}
        for group in groups:
            if group.coupled:
                self._groups[group.coupled] = (*self._groups.get(group.coupled, ()), group.name)
        self._silent = frozenset(group.name for group in groups if not group.ends)
        self._spare = frozenset(group.name for group in groups if not group.critical)
        self._storeless = frozenset(group.name for group in groups if not group.store)
        self.several = len(self._groups) > 1 or "" in self._named.values()
        """May the job have more than one set?"""

    def of(self, node: str) -> str:
        """The set of a node, by the node's name."""
        group = node.rsplit("-", 2)[0]
        if not self._named:
            return group
        found = self._named.get(group)
        return group if found is None else found or node.rsplit("-", 1)[0]

    def at(self, group: str, index: int) -> str:
        """The set of a place."""
        found = self._named.get(group)
        return group if found is None else found or f"{group}-{index}"

    def groups(self, name: str) -> tuple[str, ...]:
        """The groups of a set, in the order of the spec."""
        return self._groups.get(name) or (name.rsplit("-", 1)[0],)

    def stored(self, name: str) -> bool:
        """Do the worlds of a set have stores?"""
        return not self._storeless or self.groups(name)[0] not in self._storeless

    def critical(self, name: str) -> bool:
        """Does the job fail if a set fails? If not, the set is given up, and the job goes on."""
        return not self._spare or self.groups(name)[0] not in self._spare

    def ends(self, name: str) -> bool:
        """Does the job's end wait for a set? If so, the set's steps count as the job's, and its down time as the job's."""
        return not self._silent or not self._silent.issuperset(self.groups(name))

    def place(self, name: str) -> int:
        """The index of the one place of a set, if the set is one node; -1: it consists of groups."""
        return int(name[name.index("-") + 1 :]) if "-" in name else -1

    def of_group(self, group: GroupSpec) -> Iterator[str]:
        """The sets that the nodes of a group belong to."""
        if group.coupled:
            yield group.coupled
        else:
            yield from (f"{group.name}-{index}" for index in range(group.nodes_max))

    def all(self, spec: JobSpec) -> Iterator[str]:
        """Every set of a job in its present sizes, in the order of the spec."""
        for group in spec.groups:
            if not group.coupled:
                yield from self.of_group(group)
            elif self._groups[group.coupled][0] == group.name:
                yield group.coupled

    def ending(self, spec: JobSpec) -> tuple[str, ...]:
        """The sets that the job's end waits for, each once."""
        return tuple(dict.fromkeys(name for group in spec.groups if group.ends for name in self.of_group(group)))


NO_SETS = Sets()
"""The sets of no job. It must never be changed."""


@lru_cache(maxsize=64)
def sets_of(spec_json: str) -> Sets:
    """The sets of the spec in a `JobCreated`. The sizes of groups change while a job runs; its sets do not."""
    return Sets(JobSpec.from_json(spec_json).groups) if spec_json else NO_SETS


class Coupled:
    """The link of a slice to the job's sets: all slices of a state share one `Sets`."""

    __slots__ = ("_sets",)
    _sets: Sets

    def couple(self, sets: Sets) -> None:
        """Look sets up there from now on."""
        self._sets = sets

    @property
    def sets(self) -> Sets:
        """The job's sets. A slice outside a state has none, and there every group is a set of its own."""
        try:
            return self._sets
        except AttributeError:
            self._sets = made = Sets()
            return made

    def set_of(self, node: str) -> str:
        """The set of a node. Called for every message of every agent, hence without a detour."""
        try:
            return self._sets.of(node)
        except AttributeError:
            return group_of(node)
