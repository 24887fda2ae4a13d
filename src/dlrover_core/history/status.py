"""How a job stands now: a view of its state for people and for `--json`."""

from __future__ import annotations

from typing import NamedTuple

from dlrover_core.diagnosis.classify import describe
from dlrover_core.history.headline import Headline, Headlines
from dlrover_core.job.checkpoints import MEMORY
from dlrover_core.job.names import group_of
from dlrover_core.job.state import JobState
from dlrover_core.job.waiting import Wait
from dlrover_core.kernel.events import Record


class NodeRow(NamedTuple):
    """One node. ``place`` is its rank among the nodes of its world, -1 outside; ``note`` says what is special about it."""

    node: str
    group: str
    incarnation: int
    state: str
    host: str
    place: int
    note: str


class WorldRow(NamedTuple):
    """The newest generation of a group, and the sizes that the group is to have."""

    group: str
    generation: int
    active: bool
    nodes: int
    ranks: int
    started: int
    formed_at: int
    nodes_min: int
    nodes_max: int


class KeptRow(NamedTuple):
    """A group's checkpoints: the newest ``committed`` step, the newest ``whole`` in the memory of nodes that wait, the one that
    was ``ordered`` to be written; -1: none is, or is known. ``failing``: nodes that cannot write.
    """

    group: str
    url: str
    every: int
    store_every: int
    committed: int
    whole: int
    ordered: int
    failing: tuple[str, ...]


class IncidentRow(NamedTuple):
    """An incident that is not mended yet."""

    number: int
    cause: str
    verdict: str
    signature: str
    action: str
    opened_at: int


class Status(NamedTuple):
    """Everything that `dlrover status` shows. Times are microseconds by the leader's clock; ``step`` -1: none known.

    ``headlines``: the newest incidents in a line each, those that are over with the time that they took. ``waits``: why groups
    have no world, or why a planned change is not made yet; the leader knows that, not the log, so it is empty until it is asked.
    """

    job: str
    run: str
    state: str
    reason: str
    root: str
    created_at: int
    ended_at: int
    step: int
    step_at: int
    worlds: tuple[WorldRow, ...]
    nodes: tuple[NodeRow, ...]
    incidents: tuple[IncidentRow, ...]
    restarts_left: int
    relaunches_left: dict[str, int]
    last: Record | None
    headlines: tuple[Headline, ...] = ()
    kept: tuple[KeptRow, ...] = ()
    waits: tuple[Wait, ...] = ()

    @property
    def failed(self) -> bool:
        """Has the job failed?"""
        return self.state == "failed"

    @property
    def over(self) -> bool:
        """Has it ended, one way or another?"""
        return self.ended_at > 0


def status_of(state: JobState, last: Record | None = None, headlines: Headlines | None = None) -> Status:
    """The status of a folded history; ``last`` is its newest record, ``headlines`` have been fed all of them."""
    known = state.job.state != "new"
    return Status(
        job=state.job.name,
        run=state.job.run,
        state=state.job.state,
        reason=state.job.reason,
        root=state.job.root,
        created_at=state.job.created_at,
        ended_at=state.job.ended_at,
        step=state.progress.newest.step,
        step_at=state.progress.newest.at,
        worlds=_worlds(state),
        nodes=_nodes(state),
        incidents=_incidents(state),
        restarts_left=state.job.spec.max_restarts - state.incidents.restarts if known else 0,
        relaunches_left=_relaunches_left(state) if known else {},
        last=last,
        headlines=tuple(headlines.lines.values()) if headlines is not None else (),
        kept=_kept(state),
    )


def _kept(state: JobState) -> tuple[KeptRow, ...]:
    failing = state.checkpoints.failing
    return tuple(
        KeptRow(
            group,
            kept.url,
            kept.every,
            kept.store_every,
            kept.newest[1],
            kept.resume()[0] if kept.resume()[1] == MEMORY else -1,
            kept.order.step if kept.order is not None else -1,
            tuple(node for node in failing if group_of(node) == group),
        )
        for group, kept in state.checkpoints.groups.items()
        if kept.generation
    )


def _worlds(state: JobState) -> tuple[WorldRow, ...]:
    sizes = {group.name: (group.nodes_min, group.nodes_max) for group in state.job.spec.groups} if state.seq else {}
    return tuple(
        WorldRow(
            group,
            one.generation,
            one.active and not state.job.over,
            len(one.members),
            one.size,
            len(one.started),
            one.formed_at,
            *sizes.get(group, (0, 0)),
        )
        for group, one in state.world.worlds.items()
    )


def _nodes(state: JobState) -> tuple[NodeRow, ...]:
    places = {
        member.node: place
        for world in state.world.worlds.values()
        if world.active
        for place, member in enumerate(world.members)
    }
    rows = [
        NodeRow(
            node.node,
            node.group,
            node.incarnation,
            node.state,
            node.host,
            places.get(node.node, -1),
            node.released
            or ("" if node.joined or node.state not in ("running", "suspect") else "its agent has not joined"),
        )
        for node in state.nodes.nodes.values()
    ]
    order = {group.name: place for place, group in enumerate(state.job.spec.groups)} if rows else {}
    indexes = {node.node: node.index for node in state.nodes.nodes.values()}
    return tuple(sorted(rows, key=lambda row: (order.get(row.group, 0), indexes[row.node], row.incarnation)))


def _incidents(state: JobState) -> tuple[IncidentRow, ...]:
    return tuple(
        IncidentRow(one.number, describe(one.cause), one.verdict, one.signature, one.action, one.opened_at)
        for one in state.incidents.by_number.values()
        if not one.closed
    )


def _relaunches_left(state: JobState) -> dict[str, int]:
    """Relaunches left per place, for the places that have used any."""
    return {
        place: state.job.spec.group(place.rsplit("-", 1)[0]).relaunch_max - state.incidents.relaunched(place, state.at)
        for place in sorted(state.incidents.relaunches)
    }
