"""Silence: which nodes are silent, since when, and whether most fell silent at once. It folds into the nodes' slice.

A silent node is *suspect*, not dead. What follows from silence is decided in `rules.silence`.
"""

from __future__ import annotations

from typing import NamedTuple

from dlrover_core.job import nodes
from dlrover_core.job.node_lifecycle import ALIVE
from dlrover_core.job.nodes import tallied
from dlrover_core.kernel.engine import Facts
from dlrover_core.kernel.events import Record, event


@event(24)
class NodeSuspected(NamedTuple):
    """A node's agent has been silent for too long. That does not mean that it is dead."""

    node: str
    silent_us: int


@event(25)
class NodeHeard(NamedTuple):
    """The agent of a suspect node spoke again."""

    node: str


@event(35)
class MassSilence(NamedTuple):
    """More than half of the nodes are suspect at once: the fault may be the master's, which replaces no node for silence yet."""

    suspects: int
    nodes: int


class NoteSilence(NamedTuple):
    """The master has not heard from this node's agent for so long."""

    node: str
    silent_us: int


class NoteHeard(NamedTuple):
    """The master hears from a suspect node again."""

    node: str


class NoteDead(NamedTuple):
    """The agent of a launched node has died: its kernel ended the connection, and it did not come back."""

    node: str
    why: str


# ---- evolve


def _on_suspected(slice_: nodes.NodeSlice, fact: NodeSuspected, record: Record) -> None:
    nodes.move(slice_, fact.node, "silence").suspect_at = record.at


def _on_heard(slice_: nodes.NodeSlice, fact: NodeHeard, record: Record) -> None:
    nodes.move(slice_, fact.node, "hear").suspect_at = 0
    _end_mass(slice_)


def _end_mass(slice_: nodes.NodeSlice) -> None:
    if not slice_.mass_at:
        return
    alive = [node for node in slice_.nodes.values() if node.joined and node.state in ALIVE]
    if sum(node.state == "suspect" for node in alive) * 2 <= len(alive):
        slice_.mass_at = 0


def _on_mass(slice_: nodes.NodeSlice, fact: MassSilence, record: Record) -> None:
    slice_.mass_at = record.at


def _fewer(slice_: nodes.NodeSlice, fact: object, record: Record) -> None:
    _end_mass(slice_)


FACTS = Facts(
    kinds=(NodeSuspected, NodeHeard, MassSilence),
    evolve={
        **tallied({NodeSuspected: _on_suspected, NodeHeard: _on_heard}),
        MassSilence: _on_mass,
        nodes.NodeFailed: _fewer,
        nodes.NodeSucceeded: _fewer,
        nodes.NodeGone: _fewer,
        nodes.NodeLost: _fewer,
        nodes.NodeLeft: _fewer,
    },
)
