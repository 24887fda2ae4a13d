"""The end of a job whose log takes no records: all workers have ended, and the log may be unwritable for ever."""

from __future__ import annotations

from collections.abc import Iterable

from dlrover_core.job.incidents import ActionChosen, IncidentOpened, ReportExit
from dlrover_core.job.nodes import ObserveNodes
from dlrover_core.job.state import JobState
from dlrover_core.job.world import ReportFinished, World, WorldFormed
from dlrover_core.kernel.engine import Command
from dlrover_core.kernel.events import Record
from dlrover_core.rules.coupling import over


def has_ended_well(state: JobState, waiting: Iterable[Command]) -> bool:
    """Have all workers ended well, by decisions recorded or not, and by the ``waiting`` commands?"""
    if state.job.state == "succeeded":
        return True
    said = {(one.node, one.generation) for one in waiting if isinstance(one, ReportFinished)}
    names = state.sets.ending(state.job.spec)
    return bool(names) and all(over(state, name) or _all_said(state.world.at(name), said) for name in names)


def _all_said(world: World, said: set[tuple[str, int]]) -> bool:
    """Has every member of a world that runs ended well, by what is recorded or what it said?"""
    return (
        world.active
        and bool(world.members)
        and all(world.done(one.node) or (one.node, world.generation) in said for one in world.members)
    )


def failure(state: JobState, waiting: Iterable[Command], unwritten: Iterable[Record]) -> str:
    """What failed and cannot be restarted while the log takes no records; empty: nothing.

    Decisions that are ``unwritten`` are in ``state``, and no agent was ordered to carry them out.
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
    """Why the last state of a job that `has_ended_well` is not on storage, by its nodes' reports; empty: it is.

    A log that takes no records keeps checkpoints from being committed, too.
    """
    if state.job.state == "succeeded":
        return ""
    said = [(one.node, one.generation, one.due, one.unstored) for one in waiting if isinstance(one, ReportFinished)]
    for name in state.sets.ending(state.job.spec):
        world = state.world.at(name)
        known = [(node, world.generation, due, why) for node, (due, why) in world.unstored.items()]
        own = [one for one in said if state.set_of(one[0]) == name]
        for node, generation, due, why in [*known, *own]:
            if why and (due < 0 or (generation, due) > state.checkpoints.of(name).newest):
                return f"{node}: {why}"
    return ""
