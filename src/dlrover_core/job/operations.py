"""What people ask of a running job: scale a group, drain a node, suspend, resume. Each is one command with one answer.

* Scaling up plans nodes for the new places. A running world takes them in as it takes any late node (``on_join``).
* Scaling down releases the places beyond the new maximum, and the remaining nodes form the next world.
* A drained node leaves, and its successor in the same place avoids its host.
* Suspending stops the workers; nodes stay.

Each of these is planned: workers have ``stop_grace_s`` to save, no incident opens, and no budget is charged. Where ranks
can agree on a step boundary, the world changes there and no step is lost (`rules.plans`); else at once.

The sizes lie in the job's slice, so that every reader gets them from the effective spec.
"""

from __future__ import annotations

from typing import NamedTuple

from dlrover_core.kernel.wire import command


class ScaleGroup(NamedTuple):
    """Scale a group. ``nodes_min`` 0: as before, or ``nodes_max`` where that is less."""

    group: str
    nodes_min: int
    nodes_max: int
    reason: str


class DrainNode(NamedTuple):
    """Free a node's host. ``node``: a node, or a place such as ``worker-1``, which means its present node."""

    node: str
    reason: str


@command(13)
class LeaveNode(NamedTuple):
    """A node's own agent was asked to end, and asks the leader for an orderly leave."""

    node: str
    reason: str


def sizes(nodes_min: int, nodes_max: int) -> str:
    """'4 nodes', '2 to 4 nodes'."""
    several = f"{nodes_min} to {nodes_max}" if nodes_min < nodes_max else str(nodes_max)
    return f"{several} node{'' if nodes_max == 1 else 's'}"
