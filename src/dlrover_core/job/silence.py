"""Silence: the other half of the nodes concern. Who is only silent, for how long, and when that ends in being replaced.

Silence is not death. A silent node is *suspect*; while its backend calls it running it is replaced after ``unreachable_s`` only.
Where more than half fall silent at once the master suspects itself, and replaces nobody before ``mass_silence_s``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from dlrover_core.job import nodes
from dlrover_core.job.node_lifecycle import ALIVE, LIFECYCLE
from dlrover_core.kernel.engine import Concern
from dlrover_core.kernel.events import Event, Record, event
from dlrover_core.spec import us

if TYPE_CHECKING:
    from dlrover_core.job.state import JobState


@event(24)
class NodeSuspected(NamedTuple):
    """Its agent has been silent for too long. Silence is not death."""

    node: str
    silent_us: int


@event(25)
class NodeHeard(NamedTuple):
    """A suspect spoke again."""

    node: str


@event(35)
class MassSilence(NamedTuple):
    """More than half of the nodes are suspect at once: the master suspects itself and replaces nobody for silence yet."""

    suspects: int
    nodes: int


class NoteSilence(NamedTuple):
    """The master has not heard from this agent for so long."""

    node: str
    silent_us: int


class NoteHeard(NamedTuple):
    """The master hears the suspect again."""

    node: str


# ---- decide


def _silent(state: JobState, command: NoteSilence, now: int) -> Iterator[Event]:
    node = state.nodes.nodes.get(command.node)
    if node is None or not LIFECYCLE.may(node.state, "silence"):
        return
    yield NodeSuspected(node.node, command.silent_us)


def _heard(state: JobState, command: NoteHeard, now: int) -> Iterator[Event]:
    node = state.nodes.nodes.get(command.node)
    if node is None or not LIFECYCLE.may(node.state, "hear"):
        return
    yield NodeHeard(node.node)


# ---- time


def _patience(state: JobState, node: nodes.Node) -> int | None:
    """When this node's silence ends in its being given up; None: it is not silent."""
    spec = state.job.spec
    if node.state == "failed" and not node.ended:
        # No good by its own word, and its backend never saw it end: its host is avoided from then on.
        return max(node.suspect_at, state.job.calm_at) + us(spec.unreachable_s)
    if node.released:
        return None
    if node.state in ("planned", "pending") or (node.state == "running" and not node.joined):
        return max(node.planned_at, state.job.calm_at) + us(spec.launch_s)
    if node.state == "suspect" and state.job.state == "stopping":
        # It was told to stop, or cannot hear: it gets what a reachable one gets.
        return max(node.suspect_at, state.job.calm_at) + us(spec.stop_grace_s + spec.kill_wait_s)
    if node.state == "suspect":
        by_silence = max(node.suspect_at, state.job.calm_at) + us(spec.unreachable_s)
        by_mass = max(state.nodes.mass_at, state.job.calm_at) + us(spec.mass_silence_s) if state.nodes.mass_at else 0
        return max(by_silence, by_mass)
    return None


def _waited_for(state: JobState) -> list[nodes.Node]:
    """Nodes whose silence matters. A stopping job waits for those alone that should say that they have left."""
    if state.job.live:
        return list(state.nodes.nodes.values())
    if state.job.state == "stopping":
        return [node for node in state.nodes.nodes.values() if node.joined and node.state == "suspect"]
    return []


def _due(state: JobState) -> int | None:
    times = [_patience(state, node) for node in _waited_for(state)]
    return min((time for time in times if time is not None), default=None)


def _tick(state: JobState, now: int) -> Iterator[Event]:
    for node in _waited_for(state):
        deadline = _patience(state, node)
        if deadline is not None and deadline <= now:
            if node.state == "running":
                yield nodes.NodeFailed(
                    node.node, -1, f"its agent did not join within {state.job.spec.launch_s:g} s", seen=False
                )
            else:
                yield nodes.NodeLost(node.node, _why_lost(state, node))


def _why_lost(state: JobState, node: nodes.Node) -> str:
    why = {"suspect": "silent", "failed": "its backend never saw it end"}
    return why.get(node.state, f"did not start within {state.job.spec.launch_s:g} s")


# ---- react


def _note_mass(state: JobState, fact: NodeSuspected, record: Record) -> Iterator[Event]:
    alive = [node for node in state.nodes.nodes.values() if node.joined and node.state in ALIVE]
    suspects = sum(node.state == "suspect" for node in alive)
    if suspects * 2 > len(alive) and not state.nodes.mass_at:
        yield MassSilence(suspects, len(alive))


# ---- evolve


def _on_suspected(slice_: nodes.NodeSlice, fact: NodeSuspected, record: Record) -> None:
    nodes.move(slice_, fact.node, "silence").suspect_at = record.at


def _on_heard(slice_: nodes.NodeSlice, fact: NodeHeard, record: Record) -> None:
    nodes.move(slice_, fact.node, "hear").suspect_at = 0
    _end_mass(slice_)


def _end_mass(slice_: nodes.NodeSlice) -> None:
    alive = [node for node in slice_.nodes.values() if node.joined and node.state in ALIVE]
    if slice_.mass_at and sum(node.state == "suspect" for node in alive) * 2 <= len(alive):
        slice_.mass_at = 0


def _on_mass(slice_: nodes.NodeSlice, fact: MassSilence, record: Record) -> None:
    slice_.mass_at = record.at


def _fewer(slice_: nodes.NodeSlice, fact: object, record: Record) -> None:
    _end_mass(slice_)


# The slice is that of the nodes: this is their concern's second module.
CONCERN = Concern(
    name="nodes",
    events=(NodeSuspected, NodeHeard, MassSilence),
    evolve={
        NodeSuspected: _on_suspected,
        NodeHeard: _on_heard,
        MassSilence: _on_mass,
        nodes.NodeFailed: _fewer,
        nodes.NodeSucceeded: _fewer,
        nodes.NodeGone: _fewer,
        nodes.NodeLost: _fewer,
        nodes.NodeLeft: _fewer,
    },
    decide={NoteSilence: _silent, NoteHeard: _heard},
    react={NodeSuspected: _note_mass},
    due=_due,
    tick=_tick,
)
