"""What people ask of a running job: other sizes, a node's leave, a pause. Each is one command with one answer.

Growing plans nodes for the new places; a running world takes them in as it takes any late node (``on_join``). Shrinking
releases the places beyond the new maximum and forms the next world with those who stay. A drained node goes, and its
successor in the same place keeps off its host. Suspending stops the workers and leaves the nodes. All of it is planned: workers
have ``stop_grace_s`` to save what they have, no incident opens, and no budget is charged. Where ranks can agree on a step
boundary, the world is changed there and no step is lost (`rules.plans`); else at once.

The sizes lie in the job's slice, so that everybody reads them from the effective spec.
"""

from __future__ import annotations

from typing import NamedTuple

from dlrover_core.kernel.wire import command


class ScaleGroup(NamedTuple):
    """Give a group other sizes. ``nodes_min`` 0: what it was, or ``nodes_max`` where that is less."""

    group: str
    nodes_min: int
    nodes_max: int
    reason: str


class DrainNode(NamedTuple):
    """Free a node's host. ``node`` may be a place, as ``worker-1``: then whoever is in it now."""

    node: str
    reason: str


@command(13)
class LeaveNode(NamedTuple):
    """A node's own agent was told to go, and asks to be let go in order."""

    node: str
    reason: str


class NoticeNode(NamedTuple):
    """A node's platform announces that it will take it away: ``within_us`` from now; 0: it does not say when."""

    node: str
    notice: str
    within_us: int


def sizes(nodes_min: int, nodes_max: int) -> str:
    """'4 nodes', '2 to 4 nodes'."""
    several = f"{nodes_min} to {nodes_max}" if nodes_min < nodes_max else str(nodes_max)
    return f"{several} node{'' if nodes_max == 1 else 's'}"
