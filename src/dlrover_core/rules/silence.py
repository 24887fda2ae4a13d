"""Silence: when a silent node counts as lost, and when a joining job has waited long enough.

Silence is not death. A silent node is *suspect*; while its backend calls it running it is replaced after ``unreachable_s`` only.
Where more than half fall silent at once the master suspects itself, and replaces nobody before ``mass_silence_s``.

In a job whose nodes come by themselves nobody is to blame for a node that has not come. There a group that cannot form a
world for want of nodes waits ``launch_s`` for them, counted anew from the last one that came, and then fails the job. And
there a place that was given up, because whoever took it died again and again, is open to others after a while.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from dlrover_core.job import incidents, job, nodes, silence, world
from dlrover_core.job.node_lifecycle import ALIVE, LIFECYCLE
from dlrover_core.job.state import JobState
from dlrover_core.kernel.engine import Rules
from dlrover_core.kernel.events import Event, Record
from dlrover_core.rules import membership, slots
from dlrover_core.spec import GroupSpec, us

NAMED_MAX = 8


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


# ---- time


def _patience(state: JobState, node: nodes.Node) -> int | None:
    """When this node's silence ends in its being given up; None: it is not silent."""
    spec = state.job.spec
    if node.state == "failed" and not node.ended:
        # No good by its own word, and its backend never saw it end: its host is avoided from then on.
        return max(node.suspect_at, state.job.calm_at) + us(spec.unreachable_s)
    if node.released and not node.joined and node.state in ("pending", *ALIVE):
        # It has left, or was let go before it had joined: its backend should have seen it end by then.
        wait_s = spec.stop_grace_s + spec.kill_wait_s + spec.unreachable_s
        return max(node.suspect_at, state.job.calm_at) + us(wait_s)
    if node.released and node.state != "suspect":
        return None
    if node.state in ("planned", "pending") or (node.state == "running" and not node.joined):
        if spec.joining:
            return None
        return max(node.planned_at, state.job.calm_at) + us(spec.launch_s)
    if node.state == "suspect" and state.job.state == "stopping":
        # It was told to stop, or cannot hear: it gets what a reachable one gets.
        return max(node.suspect_at, state.job.calm_at) + us(spec.stop_grace_s + spec.kill_wait_s)
    if node.state == "suspect":
        by_silence = max(node.suspect_at, state.job.calm_at) + us(spec.unreachable_s)
        by_mass = max(state.nodes.mass_at, state.job.calm_at) + us(spec.mass_silence_s) if state.nodes.mass_at else 0
        return max(by_silence, by_mass)
    return None


def _waited_for(state: JobState, names: Iterable[str]) -> list[nodes.Node]:
    """Those of these nodes whose silence matters. A stopping job waits for those alone that should say that they have left."""
    here = state.nodes.nodes
    if state.job.live:
        return [here[name] for name in names]
    if state.job.state == "stopping":
        return [here[name] for name in names if here[name].joined and here[name].state == "suspect"]
    return []


def _short(state: JobState) -> Iterator[tuple[GroupSpec, int]]:
    """Groups of a joining job that have no world for want of nodes, and when that fails it."""
    if state.job.spec.joining and state.job.forms:
        for group in state.job.spec.groups:
            current = state.world.worlds.get(group.name) or world.World()
            ready = state.nodes.tally.ready.get(group.name, 0)
            if ready < group.floor and not current.active and not membership.end_pending(state, group.name):
                yield group, max(current.changed_at, state.job.calm_at) + us(state.job.spec.launch_s)


def _give_up_waiting(state: JobState, group: GroupSpec) -> Event:
    here = membership.ready_nodes(state, group.name)
    there = [f"{node.node} on {node.host}" for node in here[:NAMED_MAX]]
    if len(here) > NAMED_MAX:
        there.append(f"{len(here) - NAMED_MAX} more")
    missing = group.floor - len(here)
    root = (
        f"only {len(here)} of {group.floor} nodes joined within {state.job.spec.launch_s:g} s: "
        f"{', '.join(there) or 'nobody'} came; {missing} more {'host' if missing == 1 else 'hosts'} must run dlrover-run"
    )
    return job.JobFailed(f"joining: a world of {group.name} needs {group.floor} nodes", 0, root)


def _closed_places(state: JobState) -> Iterator[tuple[str, int, int]]:
    """Places of a joining job that were given up, and when others may have them."""
    for group in state.job.spec.groups if state.job.spec.joining and state.job.live else ():
        for index in sorted(state.nodes.tally.given_up.get(group.name, ())):
            if index < group.nodes_max:
                slot = state.nodes.slots[f"{group.name}-{index}"]
                yield group.name, index, slot.given_up_at + us(incidents.SERVED_S)


def _due(state: JobState) -> int | None:
    times = [_patience(state, node) for node in _waited_for(state, state.nodes.tally.loose)]
    times += [deadline for _, deadline in _short(state)]
    times += [at for _, _, at in _closed_places(state)]
    return min((time for time in times if time is not None), default=None)


def _tick(state: JobState, now: int) -> Iterator[Event]:
    short = next((group for group, deadline in _short(state) if deadline <= now), None)
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
    decide={silence.NoteSilence: _silent, silence.NoteHeard: _heard},
    react={silence.NodeSuspected: _note_mass, nodes.PlaceReopened: _fill},
    due=_due,
    tick=_tick,
)
