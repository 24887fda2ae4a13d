"""Queueing: how much room the platform has, which groups gave their nodes back, and which places may use avoided hosts.

A node that its platform cannot place waits (`nodes.Node.waits`). Waiting is no failure. A set that holds some nodes and
waits for the rest blocks other jobs, and those may hold just what it waits for. So after `gang_s` the set gives back what
it holds, and asks again after a pause that differs between jobs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from dlrover_core.job import nodes, world
from dlrover_core.kernel.engine import Facts
from dlrover_core.kernel.events import Record, event

UNKNOWN = -1
"""The room of a group whose platform does not tell."""


@event(131)
class RoomChanged(NamedTuple):
    """So many more nodes of a group would start now; -1: unknown. Recorded once the change has lasted."""

    group: str
    room: int


@event(132)
class GivenBack(NamedTuple):
    """A group held some nodes and waited for others too long: it releases all its nodes and asks again later.

    held:   its nodes that the platform had placed
    until:  when it asks again, microseconds by the leader's clock
    times:  how often in a row it gave back
    reason: what it waited for, for people
    """

    group: str
    held: tuple[str, ...]
    until: int
    times: int
    reason: str


@event(133)
class AskedAgain(NamedTuple):
    """A group that gave its nodes back asks for them again: its pause is over."""

    group: str


@event(134)
class HostsAllowed(NamedTuple):
    """The place of a node that found no host except avoided ones may be filled on ``hosts`` too, until a node joins there."""

    group: str
    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody calls on an event
    hosts: tuple[str, ...]


class NoteRoom(NamedTuple):
    """A group's platform has said twice that so many more nodes of the group would start now; -1: unknown."""

    group: str
    room: int


@dataclass(slots=True)
class Room:
    """How many more nodes of a group would start, and since when that is known."""

    many: int
    said_at: int


@dataclass(slots=True)
class QueueSlice:
    """Room and waiting.

    rooms:    room by group; a group without an answer is missing
    back:     end of the pause, by group that gave its nodes back
    times:    how often a group gave back since its last world, by group
    anywhere: places, as ``group-index``, that may be filled on avoided hosts
    """

    rooms: dict[str, Room] = field(default_factory=dict)
    back: dict[str, int] = field(default_factory=dict)
    times: dict[str, int] = field(default_factory=dict)
    anywhere: list[str] = field(default_factory=list)

    def room(self, group: str) -> int:
        """How many more nodes of a group would start now; -1: unknown."""
        known = self.rooms.get(group)
        return known.many if known is not None else UNKNOWN


# ---- evolve


def _on_room(slice_: QueueSlice, fact: RoomChanged, record: Record) -> None:
    slice_.rooms[fact.group] = Room(fact.room, record.at)


def _on_back(slice_: QueueSlice, fact: GivenBack, record: Record) -> None:
    slice_.back[fact.group], slice_.times[fact.group] = fact.until, fact.times


def _on_again(slice_: QueueSlice, fact: AskedAgain, record: Record) -> None:
    slice_.back.pop(fact.group, None)


def _on_formed(slice_: QueueSlice, fact: world.WorldFormed, record: Record) -> None:
    slice_.times.pop(fact.group, None)


def _on_allowed(slice_: QueueSlice, fact: HostsAllowed, record: Record) -> None:
    slice_.anywhere.append(f"{fact.group}-{fact.index}")


def _on_joined(slice_: QueueSlice, fact: nodes.NodeJoined, record: Record) -> None:
    place = fact.node.rsplit("-", 1)[0]
    if place in slice_.anywhere:
        slice_.anywhere.remove(place)


FACTS = Facts(
    kinds=(RoomChanged, GivenBack, AskedAgain, HostsAllowed),
    evolve={
        RoomChanged: _on_room,
        GivenBack: _on_back,
        AskedAgain: _on_again,
        HostsAllowed: _on_allowed,
        world.WorldFormed: _on_formed,
        nodes.NodeJoined: _on_joined,
    },
)
