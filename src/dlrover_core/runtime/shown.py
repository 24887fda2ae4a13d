"""A job as a master's status shows it: its state, and the levels that agents have reported."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from dlrover_core.job.leases import LeaseSlice
from dlrover_core.job.shards import Ledger
from dlrover_core.job.state import JobState
from dlrover_core.rules.reasons import reasons
from dlrover_core.runtime.sessions import Sessions


def shown(state: JobState, sessions: Sessions, now: int | None = None) -> dict[str, Any]:
    """The status at ``now``, by default the time of the newest event, as plain values."""
    # Of several worlds, show the first set's, as for a job of one set.
    names = [name for name in state.sets.all(state.job.spec) if name in state.world.worlds] if state.job.run else []
    names.sort(key=lambda name: (not state.sets.ends(name), name not in state.progress.groups))
    group = names[0] if names else ""
    world = state.world.at(group)
    generation = world.generation
    # Between two worlds, the last one's steps are the newest known.
    steps = sessions.steps.of(group, generation) or sessions.steps.of(group)
    incidents = list(state.incidents.by_number.values())
    last = incidents[-1] if incidents else None
    step = max([*steps, state.progress.of(group).step])
    return {
        "job": state.job.name,
        "run": state.job.run,
        "state": state.job.state,
        "seq": state.seq,
        "generation": generation,
        "world_size": world.size if world.active else 0,
        "given_up": dict(state.job.given_up),
        "waits": [wait._asdict() for wait in reasons(state, now)],
        "step": step,
        "live": sessions.stalls.live(group),
        "agents": len(sessions),
        "standbys": len(sessions.standbys),
        "standbys_wanted": sessions.reception.standbys_wanted,
        "nodes": {
            node.node: {"state": node.state, "host": node.host, "joined": node.joined}
            for node in state.nodes.nodes.values()
        },
        "incidents": state.incidents.number,
        "open_incidents": [one.number for one in incidents if not one.closed],
        "last_incident": f"{last.number}: {last.signature} -> {last.action}" if last else "",
        "root": state.job.root,
        "data": [*consumed(state.shards.of(group), step), *used(state.leases, state.sets.groups(group))],
        "checkpoints": {
            name: {
                "url": kept.url,
                "committed": kept.newest[1],
                "whole": sessions.keeping.whole(name, state.world.worlds[name]),
                "failing": [node for node in state.checkpoints.failing if state.set_of(node) == name],
            }
            for name, kept in state.checkpoints.groups.items()
            if kept.generation and name in state.world.worlds
        },
    }


def consumed(ledger: Ledger, step: int) -> list[dict[str, Any]]:
    """How far the datasets of a set are at a step. ``about``: samples over all epochs."""
    return [
        {"dataset": name, "size": one.terms.counted, "epochs": one.terms.epochs, "about": ledger.about(name, step)}
        for name, one in ledger.datasets.items()
    ]


def used(leases: LeaseSlice, groups: Iterable[str]) -> list[dict[str, Any]]:
    """How far the leased datasets of groups are, as `consumed`."""
    return [
        {
            "dataset": name,
            "size": one.terms.size,
            "epochs": one.terms.epochs,
            "about": sum(end - start for start, end in one.acked),
        }
        for group in groups
        for name, one in leases.of(group).items()
    ]
