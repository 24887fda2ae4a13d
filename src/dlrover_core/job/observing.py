"""Observing: what a backend's words add about a node whose state they do not change. It folds into the nodes' slice.

A platform may name the host of a node that does not run yet, and the end of a node that had failed before it was seen to end.
"""

from __future__ import annotations

from typing import NamedTuple

from dlrover_core.job import nodes
from dlrover_core.kernel.engine import Facts
from dlrover_core.kernel.events import Record, event


@event(38)
class NodePlaced(NamedTuple):
    """The platform has placed the node on a host, on which it does not run yet. ``rack``: the host's failure domain."""

    node: str
    host: str
    rack: str = ""


@event(37)
class NodeEnded(NamedTuple):
    """The backend has seen the end of a node that had failed without that: its place is free.

    node:      which
    exit_code: how it ended
    reason:    the platform's word for it
    tells:     that word explains the end, so the verdict on the failure may be another one
    """

    node: str
    exit_code: int
    reason: str
    tells: bool = False


# ---- evolve


def _on_placed(slice_: nodes.NodeSlice, fact: NodePlaced, record: Record) -> None:
    slice_.nodes[fact.node].host = fact.host


def _on_end_seen(slice_: nodes.NodeSlice, fact: NodeEnded, record: Record) -> None:
    node = slice_.nodes.get(fact.node)
    if node is not None:
        node.ended = True


EVENTS = (NodePlaced, NodeEnded)

FACTS = Facts(kinds=EVENTS, evolve=nodes.tallied({NodePlaced: _on_placed, NodeEnded: _on_end_seen}))
