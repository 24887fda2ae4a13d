"""Profiles of nodes: which are asked for, and how many ever were."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, get_args

from dlrover_core.job import world
from dlrover_core.job.names import group_of
from dlrover_core.kernel.engine import Facts
from dlrover_core.kernel.events import Record, event
from dlrover_core.kernel.state import lasting
from dlrover_core.kernel.wire import command, part


@event(9001)
class ProfileAsked(NamedTuple):
    """A node is to be profiled."""

    node: str
    number: int
    steps: int


@event(9002)
class ProfileTaken(NamedTuple):
    """It was, and the profile lies there."""

    node: str
    number: int
    path: str


class ProfileNode(NamedTuple):
    """A person: profile this node."""

    node: str
    steps: int


@command(9001, since=5)
class ReportProfile(NamedTuple):
    """An agent: the profile lies there."""

    node: str
    number: int
    path: str


@part(9001)
class Profile(NamedTuple):
    """To a node: profile so many steps; ``number`` 0: none."""

    number: int = 0
    steps: int = 0


@dataclass(slots=True)
class ProfileSlice:
    """The profiles that are asked for, by node, and the number of the last one: numbers go on counting over runs."""

    open: dict[str, ProfileAsked] = field(default_factory=dict)
    number: int = lasting(int)

    def of(self, group: str) -> Mapping[str, Profile]:
        """What the nodes of a group are told."""
        return {node: Profile(one.number, one.steps) for node, one in self.open.items() if group_of(node) == group}


def _on_asked(slice_: ProfileSlice, fact: ProfileAsked, record: Record) -> None:
    slice_.open[fact.node], slice_.number = fact, fact.number


def _on_over(slice_: ProfileSlice, fact: Any, record: Record) -> None:
    slice_.open.pop(fact.node, None)


FACTS = Facts(
    kinds=(ProfileAsked, ProfileTaken),
    evolve={ProfileAsked: _on_asked, ProfileTaken: _on_over, **dict.fromkeys(get_args(world.Ended), _on_over)},
)
