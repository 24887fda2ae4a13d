"""Silence: when a silent node counts as lost, and when a joining job has waited long enough.

A silent node is *suspect*, not dead. While its backend calls it running, it is replaced only after ``unreachable_s``. If
more than half of the nodes fall silent at once, the fault may be the master's, and no node is replaced before
``mass_silence_s``.

In a job whose nodes come by themselves, no one is to blame for a node that has not come. A group that cannot form a world
for want of nodes waits ``launch_s`` for them, counted from the last node that came, and then fails the job. A place that
was given up there, because its nodes died again and again, is open to other nodes after a while.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from dlrover_core.job import incidents, nodes, silence
from dlrover_core.job.node_lifecycle import ALIVE, LIFECYCLE
from dlrover_core.job.state import JobState
from dlrover_core.kernel.engine import Rules
from dlrover_core.kernel.events import Event, Record
from dlrover_core.rules import coupling, membership, slots
from dlrover_core.spec import us
from dlrover_core.words import first_few, plain

# ---- decide


def _silent(state: JobState, command: silence.NoteSilence, now: int) -> Iterator[Event]:
    node = state.nodes.nodes.get(command.node)
    if node is None or not LIFECYCLE.may(node.state, "silence"):
        return
    yield silence.NodeSuspected(node.node, command.silent_us)


def _heard(state: JobState, command: silence.NoteHeard, now: int) -> Iterator[Event]:
    node = state.nodes.nodes.get(command.node)
    if node is None or not LIFECYCLE.may(node.state, "hear"):
        return
    yield silence.NodeHeard(node.node)


def _dead(state: JobState, command: silence.NoteDead, now: int) -> Iterator[Event]:
    node = state.nodes.nodes.get(command.node)
    if node is not None and node.joined and not node.released and node.state in ALIVE and state.job.live:
        lost = state.notices.unreached.get(node.node)
        # The platform's word, which diagnosis knows, comes first: the agent has probably died with its host.
        why = plain(f"{lost}; {command.why}", nodes.TEXT_MAX) if lost else command.why
        yield nodes.NodeFailed(node.node, 0, why, seen=False)


# ---- time


def _patience(state: JobState, node: nodes.Node) -> int | None:
    """When this node is given up for its silence; None: it is not silent."""
    if node.state == "running" and node.joined and not node.released:
        return None
    spec = state.job.spec
    if node.state == "failed" and not node.ended:
        # The node called itself unusable, and its backend never saw it end: its host is avoided from now on.
        return max(node.suspect_at, state.job.calm_at) + us(spec.unreachable_s)
    if node.released and not node.joined and node.state in ("pending", *ALIVE):
        # The node has left, or was released before it joined: its backend should have seen it end by then.
        wait_s = spec.stop_grace_s + spec.kill_wait_s + spec.unreachable_s
        return max(node.suspect_at, state.job.calm_at) + us(wait_s)
    if node.released and node.state != "suspect":
        return None
    if node.state in ("planned", "pending") or (node.state == "running" and not node.joined):
        # While the platform has no place for the node, it is not late.
        if spec.joining or node.waiting:
            return None
        return max(node.planned_at + node.waited_us, state.job.calm_at) + us(spec.launch_s)
    if node.state == "suspect" and state.job.state == "stopping":
        # The node was told to stop, or cannot hear: it gets as long as a reachable node.
        return max(node.suspect_at, state.job.calm_at) + us(spec.stop_grace_s + spec.kill_wait_s)
    if node.state == "suspect":
        by_silence = max(node.suspect_at, state.job.calm_at) + us(spec.unreachable_s)
        by_mass = max(state.nodes.mass_at, state.job.calm_at) + us(spec.mass_silence_s) if state.nodes.mass_at else 0
        return max(by_silence, by_mass)
    return None


def _waited_for(state: JobState, names: Iterable[str]) -> list[nodes.Node]:
    """The nodes whose silence matters. A stopping job waits only for nodes that should report that they have left."""
    here = state.nodes.nodes
    if state.job.live:
        return [here[name] for name in names]
    if state.job.state == "stopping":
        return [here[name] for name in names if here[name].joined and here[name].state == "suspect"]
    return []


def _short(state: JobState) -> Iterator[tuple[str, int]]:
    """Sets of a joining job without a world for want of nodes, and when that fails the job."""
    if state.job.spec.joining and state.job.forms:
        for name in coupling.sets(state):
            current = state.world.at(name)
            here = coupling.ready_by_group(state, name)
            short = not current.active and any(ready < coupling.floor_of(state, name, one) for one, ready in here)
            if short and not membership.end_pending(state, name):
                yield name, max(current.changed_at, state.job.calm_at) + us(state.job.spec.launch_s)


def _give_up_waiting(state: JobState, name: str) -> Event:
    here, floor = membership.ready_nodes(state, name), coupling.floor(state, name)
    there = first_few([f"{node.node} on {node.host}" for node in here])
    missing = max(1, floor - len(here))
    root = (
        f"only {len(here)} of {floor} nodes joined within {state.job.spec.launch_s:g} s: "
        f"{there or 'nobody'} came; {missing} more {'host' if missing == 1 else 'hosts'} must run dlrover-run"
    )
    nodes_needed = f"{floor} node{'' if floor == 1 and state.sets.several else 's'}"
    return coupling.failed(state, name, f"joining: a world of {name} needs {nodes_needed}", 0, root)


def _closed_places(state: JobState) -> Iterator[tuple[str, int, int]]:
    """Places that were given up, and when other nodes may have them: where hosts come by themselves, or there is room."""
    for group in state.job.spec.groups if state.job.live else ():
        if not state.job.spec.joining and state.queueing.room(group.name) <= 0:
            continue
        for index in sorted(state.nodes.tally.given_up.get(group.name, ())):
            if index < group.nodes_max and state.sets.at(group.name, index) not in state.job.given_up:
                slot = state.nodes.slots[f"{group.name}-{index}"]
                yield group.name, index, slot.given_up_at + us(incidents.SERVED_S)


def _due(state: JobState) -> int | None:
    times = [_patience(state, node) for node in _waited_for(state, state.nodes.tally.loose)]
    times += [deadline for _, deadline in _short(state)]
    times += [at for _, _, at in _closed_places(state)]
    return min((time for time in times if time is not None), default=None)


def _tick(state: JobState, now: int) -> Iterator[Event]:
    short = next((name for name, deadline in _short(state) if deadline <= now), None)
    if short is not None:
        yield _give_up_waiting(state, short)
        return
    for group, index in [(group, index) for group, index, at in _closed_places(state) if at <= now]:
        yield nodes.PlaceReopened(group, index)
    for node in _waited_for(state, list(state.nodes.nodes)):
        deadline = _patience(state, node)
        if deadline is not None and deadline <= now:
            if node.state == "running" and not node.released:
                yield nodes.NodeFailed(
                    node.node, -1, f"its agent did not join within {state.job.spec.launch_s:g} s", seen=False
                )
            else:
                yield nodes.NodeLost(node.node, _why_lost(state, node))


def _why_lost(state: JobState, node: nodes.Node) -> str:
    if node.released and not node.joined:
        return "its backend never saw it end"
    why = {"suspect": "silent", "failed": "its backend never saw it end"}
    return why.get(node.state, f"did not start within {state.job.spec.launch_s:g} s")


# ---- react


def _note_mass(state: JobState, fact: silence.NodeSuspected, record: Record) -> Iterator[Event]:
    tally = state.nodes.tally
    if tally.suspects * 2 > tally.alive and not state.nodes.mass_at:
        yield silence.MassSilence(tally.suspects, tally.alive)


def _fill(state: JobState, fact: nodes.PlaceReopened, record: Record) -> Iterator[Event]:
    if slots.vacant(state, fact.group, fact.index):
        yield from slots.plan(state, fact.group, fact.index)


RULES = Rules(
    decide={silence.NoteSilence: _silent, silence.NoteHeard: _heard, silence.NoteDead: _dead},
    react={silence.NodeSuspected: _note_mass, nodes.PlaceReopened: _fill},
    due=_due,
    tick=_tick,
)
