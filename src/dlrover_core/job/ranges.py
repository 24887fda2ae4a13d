"""Members of a world in rank order, written as index ranges instead of thousands of names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

from dlrover_core.job import nodes

Ranges = tuple[tuple[str, int, int, int, int], ...]
"""Group, first index, count, incarnation, nproc of each range."""
Brief = tuple[tuple[Any, ...], ...]
"""The same as the state keeps it: without the group, where the group's name is the set's name."""


def with_groups(group: Any, ranges: Any) -> Ranges:
    """Ranges of an event from before there were coupling sets."""
    return tuple((group, *one) for one in ranges)


def to_ranges(ordered: Sequence[nodes.Node]) -> Ranges:
    """Members in rank order as ranges."""
    ranges: list[tuple[str, int, int, int, int]] = []
    for node in ordered:
        if ranges:
            group, index, count, incarnation, nproc = ranges[-1]
            if (index + count, incarnation, nproc, group) == (node.index, node.incarnation, node.nproc, node.group):
                ranges[-1] = (group, index, count + 1, incarnation, nproc)
                continue
        ranges.append((node.group, node.index, 1, node.incarnation, node.nproc))
    return tuple(ranges)


def brief(name: str, ranges: Ranges) -> Brief:
    """The ranges of the set of that name, in brief."""
    return tuple(one[1:] if one[0] == name else one for one in ranges)


class Member(NamedTuple):
    """A node's place in a world: its workers have the ranks ``first_rank`` to ``first_rank + nproc - 1``."""

    node: str
    nproc: int
    first_rank: int


def from_ranges(name: str, ranges: Ranges | Brief) -> tuple[Member, ...]:
    """The members that `to_ranges` or `brief` wrote down, of the set of that name."""
    members: list[Member] = []
    rank = 0
    for one in ranges:
        group, first, count, incarnation, nproc = cast(Any, one if len(one) > 4 else (name, *one))
        for index in range(first, first + count):
            members.append(Member(f"{group}-{index}-{incarnation}", nproc, rank))
            rank += nproc
    return tuple(members)
