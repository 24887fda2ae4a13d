"""A job as a master's status shows it: its state, and the levels that agents have reported."""

from __future__ import annotations

from typing import Any

from dlrover_core.job.names import group_of
from dlrover_core.job.state import JobState
from dlrover_core.rules import membership
from dlrover_core.runtime.sessions import Sessions


def shown(state: JobState, sessions: Sessions, now: int | None = None) -> dict[str, Any]:
    """What is so at ``now``, by default the time of the newest event, as plain values."""
    group, world = next(iter(state.world.worlds.items()), ("", None))
    generation = world.generation if world else 0
    # Between two worlds the last one's steps are the newest that is known.
    steps = sessions.steps.of(group, generation) or sessions.steps.of(group)
    incidents = list(state.incidents.by_number.values())
    last = incidents[-1] if incidents else None
    return {
        "job": state.job.name,
        "run": state.job.run,
        "state": state.job.state,
        "seq": state.seq,
        "generation": generation,
        "world_size": world.size if world and world.active else 0,
        "waits": [wait._asdict() for wait in membership.reasons(state, now)],
        "step": max([*steps, state.progress.of(group).step]),
        "live": sessions.stalls.live(group),
        "agents": len(sessions),
        "standbys": len(sessions.standbys),
        "nodes": {
            node.node: {"state": node.state, "host": node.host, "joined": node.joined}
            for node in state.nodes.nodes.values()
        },
        "incidents": state.incidents.number,
        "open_incidents": [one.number for one in incidents if not one.closed],
        "last_incident": f"{last.number}: {last.signature} -> {last.action}" if last else "",
        "root": state.job.root,
        "checkpoints": {
            name: {
                "url": kept.url,
                "committed": kept.newest[1],
                "whole": sessions.keeping.whole(name, state.world.worlds[name]),
                "failing": [node for node in state.checkpoints.failing if group_of(node) == name],
            }
            for name, kept in state.checkpoints.groups.items()
            if kept.generation and name in state.world.worlds
        },
    }
