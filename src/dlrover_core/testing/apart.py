"""Promises about coupling sets: what happens in one stays there, a place is in one alone, the job ends with those it waits for.

Sets are worked out here from the job's spec anew, by rules so plain that one can see that they are right.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from dlrover_core.job import clusters, job, world
from dlrover_core.job.ranges import from_ranges
from dlrover_core.job.state import JobState
from dlrover_core.kernel.events import Record
from dlrover_core.spec import GroupSpec, JobSpec
from dlrover_core.testing.promises import Look, Promise


class Apart(Promise):
    """A change in one set restarts no worker of another: a world ends or forms for a cause in its own set, or in the whole job.

    So it is for every event that led to it in the same moment. Of what a set uses it is told, and that is all.
    """

    name = "apart"

    def __init__(self) -> None:
        # Of this moment: what each event is about, and what caused it.
        self._moment: dict[int, tuple[str, int, str]] = {}

    def __call__(self, state: JobState, record: Record) -> None:
        """See the class."""
        if not record.cause:
            self._moment.clear()
        fact = record.event
        about = _about(state, fact)
        self._moment[record.seq] = about, record.cause, type(fact).__name__
        if type(fact) in _CHANGES:
            self._look(about, record)

    def _look(self, about: str, record: Record) -> None:
        cause = record.cause
        while cause in self._moment:
            other, before, kind = self._moment[cause]
            assert other in ("", about), (
                f"{record.seq}: {type(record.event).__name__} of {about} follows from {kind} of {other}"
            )
            cause = before


_CHANGES = frozenset((world.WorldFormed, world.WorldDissolved))
_WHOLE = (job.GroupScaled,)


def _about(state: JobState, fact: Any) -> str:
    """The set that an event is about; empty: it is about the job."""
    if isinstance(fact, _WHOLE):
        return ""
    if isinstance(fact, job.SetGivenUp):
        return fact.set
    node = getattr(fact, "node", "")
    if node and node.count("-") == 2:
        return state.set_of(node)
    group, index = getattr(fact, "group", ""), getattr(fact, "index", None)
    return state.sets.at(group, index) if group and isinstance(index, int) else str(group)


class Coupled(Promise):
    """No place is in two sets: a world has places of its own set alone, and no node trains in two worlds.

    A set of one node has a world of one node.
    """

    name = "coupled"

    def __init__(self) -> None:
        self._groups: dict[str, GroupSpec] = {}
        self._trains: dict[str, str] = {}

    def _created(self, _state: JobState, fact: job.JobCreated, _record: Record) -> None:
        self._groups = {group.name: group for group in JobSpec.from_json(fact.spec).groups}
        self._trains.clear()

    def _set_of(self, group: str, index: int) -> str:
        spec = self._groups[group]
        return f"{group}-{index}" if spec.coupling == "each" else spec.set or group

    def _formed(self, _state: JobState, fact: world.WorldFormed, record: Record) -> None:
        self._over(fact.group)
        for member in from_ranges(fact.group, fact.members):
            group, index, _ = member.node.rsplit("-", 2)
            own = self._set_of(group, int(index))
            assert own == fact.group, f"{record.seq}: {member.node} of the set {own} trains in {fact.group}"
            other = self._trains.setdefault(f"{group}-{index}", fact.group)
            assert other == fact.group, f"{record.seq}: {group}-{index} is in {other} and in {fact.group}"

    def _dissolved(self, _state: JobState, fact: world.WorldDissolved, _record: Record) -> None:
        self._over(fact.group)

    def _over(self, name: str) -> None:
        self._trains = {place: one for place, one in self._trains.items() if one != name}

    looks: ClassVar[Mapping[type, Look]] = {
        job.JobCreated: _created,
        world.WorldFormed: _formed,
        world.WorldDissolved: _dissolved,
    }


class Ends(Promise):
    """The job succeeds as soon as every set that ends it has, fails with a critical set alone, and does without the others."""

    name = "ends"

    def __init__(self) -> None:
        self._groups: dict[str, GroupSpec] = {}

    def _created(self, _state: JobState, fact: job.JobCreated, _record: Record) -> None:
        self._groups = {group.name: group for group in JobSpec.from_json(fact.spec).groups}

    def _spec(self, state: JobState, name: str) -> list[GroupSpec]:
        return [self._groups[group] for group in state.sets.groups(name)]

    def _succeeded(self, state: JobState, _fact: job.JobSucceeded, record: Record) -> None:
        for name, current in state.world.worlds.items():
            ends = any(group.ends for group in self._spec(state, name))
            if not ends or name in state.job.given_up or not _exists(state, name):
                continue
            assert set(current.finished) >= set(current.places), f"{record.seq}: the job succeeds, and {name} trains"
        never = [
            group.name
            for group in self._groups.values()
            if group.ends
            and group.coupled
            and group.coupled not in state.job.given_up
            and group.coupled not in state.world.worlds
        ]
        assert not never, f"{record.seq}: the job succeeds, and {never} never trained"

    def _failed(self, state: JobState, fact: job.JobFailed, record: Record) -> None:
        incident = state.incidents.by_number.get(fact.incident)
        if incident is not None:
            name = state.set_of(incident.node)
            assert all(group.critical for group in self._spec(state, name)), (
                f"{record.seq}: the job fails with {name}, which it can do without"
            )

    def _given_up(self, state: JobState, fact: job.SetGivenUp, record: Record) -> None:
        assert not any(group.critical for group in self._spec(state, fact.set)), (
            f"{record.seq}: {fact.set} is given up, and the job cannot do without it"
        )

    looks: ClassVar[Mapping[type, Look]] = {
        job.JobCreated: _created,
        job.JobSucceeded: _succeeded,
        job.JobFailed: _failed,
        job.SetGivenUp: _given_up,
    }


def _exists(state: JobState, name: str) -> bool:
    """Has a set still a place in the job?"""
    place = state.sets.place(name)
    if place < 0:
        return True
    group = state.job.spec.group(state.sets.groups(name)[0])
    slot = state.nodes.slots.get(name)
    return place < group.nodes_max and not (slot is not None and slot.given_up)


class Addresses(Promise):
    """A version of addresses names each place once: by a living node of that place, and the same for all who have heard it.

    No two places have one address, and versions never go back.
    """

    name = "addresses"

    def __init__(self) -> None:
        self._heard: dict[tuple[str, ...], tuple[int, str]] = {}

    def _named(self, state: JobState, _fact: Any, record: Record) -> None:
        slice_, users = state.clusters, {group.uses for group in state.job.spec.groups if group.uses}
        for place, name in slice_.holders.items():
            node = state.nodes.nodes.get(name)
            living = node is not None and node.joined and not node.released
            assert living, f"{record.seq}: {name}, which is gone, is named under {place}"
            assert name.rsplit("-", 1)[0] == place, f"{record.seq}: {name} is named under {place}"
        for uses in sorted(users):
            version, text = slice_.told(uses)
            before, said = self._heard.get(uses, (0, ""))
            assert version >= before, f"{record.seq}: version {version} of {uses} comes after {before}"
            assert version > before or text == said, f"{record.seq}: version {version} of {uses} says two things"
            self._heard[uses] = version, text
            offers = slice_.named(uses)
            fresh = {group: {place: one.addresses for place, one in those.items()} for group, those in offers.items()}
            found = clusters.listed(text)
            assert found == fresh, (
                f"{record.seq}: version {version} is not what is so; it tells {found} of {uses}, not {fresh}"
            )
            self._each_once(fresh, record.seq)

    @staticmethod
    def _each_once(groups: clusters.Places, seq: int) -> None:
        """An address is that of one place."""
        called = [one for places in groups.values() for addresses in places.values() for one in addresses]
        assert len(set(called)) == len(called), f"{seq}: two places have one address in {groups}"

    looks: ClassVar[Mapping[type, Look]] = dict.fromkeys(clusters.FACTS.evolve, _named)
