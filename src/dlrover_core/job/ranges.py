"""Members of a world in rank order, written as index ranges: never as thousands of names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from dlrover_core.job import nodes

Ranges = tuple[tuple[int, int, int, int], ...]


def to_ranges(ordered: Sequence[nodes.Node]) -> Ranges:
    """Members in rank order as ranges."""
    ranges: list[tuple[int, int, int, int]] = []
    for node in ordered:
        if ranges:
            index, count, incarnation, nproc = ranges[-1]
            if (index + count, incarnation, nproc) == (node.index, node.incarnation, node.nproc):
                ranges[-1] = (index, count + 1, incarnation, nproc)
                continue
        ranges.append((node.index, 1, node.incarnation, node.nproc))
    return tuple(ranges)


class Member(NamedTuple):
    """A node's place in a world: its workers hold ranks ``first_rank`` to ``first_rank + nproc - 1``."""

    node: str
    nproc: int
    first_rank: int


def from_ranges(group: str, ranges: Ranges) -> tuple[Member, ...]:
    """The members that `to_ranges` wrote down."""
    members: list[Member] = []
    rank = 0
    for index, count, incarnation, nproc in ranges:
        for one in range(index, index + count):
            members.append(Member(f"{group}-{one}-{incarnation}", nproc, rank))
            rank += nproc
    return tuple(members)
