"""An end that the log cannot take: workers have ended, well or not, and a log of this host alone takes no more, perhaps ever."""

from __future__ import annotations

from collections.abc import Iterable

from dlrover_core.job.incidents import ActionChosen, IncidentOpened, ReportExit
from dlrover_core.job.nodes import ObserveNodes
from dlrover_core.job.state import JobState
from dlrover_core.job.world import ReportFinished, World, WorldFormed
from dlrover_core.kernel.engine import Command
from dlrover_core.kernel.events import Record


def has_ended_well(state: JobState, waiting: Iterable[Command]) -> bool:
    """Have all workers ended well, by what was decided, recorded or not, and by what ``waiting`` commands say?"""
    if state.job.state == "succeeded":
        return True
    said = {(one.node, one.generation) for one in waiting if isinstance(one, ReportFinished)}
    worlds = [state.world.worlds.get(group.name) for group in state.job.spec.groups]
    return bool(worlds) and all(
        world is not None
        and world.active
        and world.members
        and all(world.done(one.node) or (one.node, world.generation) in said for one in world.members)
        for world in worlds
    )


def failure(state: JobState, waiting: Iterable[Command], unwritten: Iterable[Record]) -> str:
    """What failed that nobody restarts while the log takes nothing; empty: nothing.

    What is decided but ``unwritten`` is in ``state``, and was ordered of nobody.
    """
    incidents = state.incidents.by_number
    for record in unwritten:
        match record.event:
            case IncidentOpened(node=node) | ActionChosen(node=node) if node:
                return f"{node} failed"
            case WorldFormed(generation=number) if number > 1:
                return f"generation {number - 1} failed"
    for incident in incidents.values():
        if not incident.closed and not incident.over_at:
            return f"{incident.node} failed"
    generations = {world.generation for world in state.world.worlds.values()}
    for command in waiting:
        match command:
            case ReportExit(node=node, rank=rank, generation=number) if number in generations:
                return f"rank {rank} on {node} failed"
            case ObserveNodes(nodes=seen):
                for one in seen:
                    known = state.nodes.nodes.get(one.node)
                    if one.phase == "failed" and known is not None and known.state == "running":
                        return f"node {one.node} failed"
    return ""


def owed(state: JobState, waiting: Iterable[Command]) -> str:
    """Why the last state of a job that `has_ended_well` is not a checkpoint on storage, as its nodes said; empty: it is one.

    A log that takes nothing keeps checkpoints from being committed, too.
    """
    if state.job.state == "succeeded":
        return ""
    said = [(one.node, one.generation, one.due, one.unstored) for one in waiting if isinstance(one, ReportFinished)]
    for group in state.job.spec.groups:
        world = state.world.worlds.get(group.name) or World()
        known = [(node, world.generation, due, why) for node, (due, why) in world.unstored.items()]
        for node, generation, due, why in [*known, *said]:
            if why and (due < 0 or (generation, due) > state.checkpoints.of(group.name).newest):
                return f"{node}: {why}"
    return ""
