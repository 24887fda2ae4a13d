"""The present status of a job: a view of its state for people and for `--json`."""

from __future__ import annotations

from typing import NamedTuple

from dlrover_core.diagnosis.classify import describe
from dlrover_core.history.headline import Headline, Headlines
from dlrover_core.history.leased import LeasedRow, leased_of
from dlrover_core.history.ledger import DataRow, ledger_of
from dlrover_core.history.words.notices import announced
from dlrover_core.job.checkpoints import MEMORY
from dlrover_core.job.sets import Sets
from dlrover_core.job.state import JobState
from dlrover_core.job.waiting import Wait
from dlrover_core.kernel.events import Record
from dlrover_core.spec import JobSpec


class NodeRow(NamedTuple):
    """One node. ``place``: its rank among the nodes of its world, -1: it is no member; ``note``: what is special about it."""

    node: str
    group: str
    incarnation: int
    state: str
    host: str
    place: int
    note: str


class WorldRow(NamedTuple):
    """The newest generation of a set, and the sizes that the set should have.

    active:       it runs
    nodes, ranks: its size
    started:      number of nodes whose workers run
    formed_at:    microseconds
    """

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
    """A group's checkpoints. A step of -1: none, or unknown.

    url, every, store_every: as in `KeepingStarted`
    committed:               newest step on storage
    whole:                   newest step complete in the memory of waiting nodes
    ordered:                 step that is ordered to be written
    failing:                 nodes that cannot write
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
    """An open incident."""

    number: int
    cause: str
    verdict: str
    signature: str
    action: str
    opened_at: int


class Status(NamedTuple):
    """Everything that `dlrover status` shows. Times are microseconds by the leader's clock.

    state, reason, root: how the job stands or ended, why, and the root cause of a failure
    step, step_at:       newest known step (-1: none) and its time
    restarts_left:       restarts left of `max_restarts`
    relaunches_left:     relaunches left, by place that has used any
    last:                the newest record
    headlines:           one line for each of the newest incidents
    kept:                checkpoints by group
    waits:               why sets have no world, or why a planned change waits; only the leader knows, so it is empty until
                         the leader is asked
    given_up:            coupling sets that the job continues without, each with the reason
    restarts_left_of:    ``restarts_left`` of sets that have used any; empty in a job of one set
    data:                how far each dataset is
    leased:              how far each leased dataset is
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
    given_up: tuple[tuple[str, str], ...] = ()
    restarts_left_of: tuple[tuple[str, int], ...] = ()
    data: tuple[DataRow, ...] = ()
    leased: tuple[LeasedRow, ...] = ()

    @property
    def failed(self) -> bool:
        """Has the job failed?"""
        return self.state == "failed"

    @property
    def over(self) -> bool:
        """Has the job ended?"""
        return self.ended_at > 0


def status_of(state: JobState, last: Record | None = None, headlines: Headlines | None = None) -> Status:
    """The status of a folded history. ``last``: its newest record; ``headlines``: fed with all records."""
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
        restarts_left=_restarts_left(state) if known else 0,
        relaunches_left=_relaunches_left(state) if known else {},
        last=last,
        headlines=tuple(headlines.lines.values()) if headlines is not None else (),
        kept=_kept(state),
        given_up=tuple(state.job.given_up.items()),
        restarts_left_of=tuple(
            (name, state.job.policy(name).max_restarts - one.restarts)
            for name, one in state.incidents.by_set.items()
            if one.restarts
        ),
        data=ledger_of(state),
        leased=leased_of(state),
    )


def _restarts_left(state: JobState) -> int:
    """Restarts left of the only set; in a job of several sets, of a set that has used none and has no limit of its own."""
    if state.sets.several:
        return state.job.spec.max_restarts
    return state.job.policy(next(state.sets.all(state.job.spec))).max_restarts - state.incidents.restarts


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
            tuple(node for node in failing if state.set_of(node) == group),
        )
        for group, kept in state.checkpoints.groups.items()
        if kept.generation
    )


def _worlds(state: JobState) -> tuple[WorldRow, ...]:
    spec = state.job.spec if state.job.run else None
    sizes = {name: _sizes(state.sets, spec, name) for name in state.sets.all(spec)} if spec is not None else {}
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


def _sizes(sets: Sets, spec: JobSpec, name: str) -> tuple[int, int]:
    """The fewest and the most nodes of a set."""
    if sets.place(name) >= 0:
        return 1, 1
    groups = [spec.group(group) for group in sets.groups(name)]
    return sum(group.nodes_min for group in groups), sum(group.nodes_max for group in groups)


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
            or (f"waits: {node.waits}" if node.waits else "")
            or announced(state.notices, node.node)
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
    """Relaunches left, by place that has used any."""
    return {
        place: state.job.spec.group(place.rsplit("-", 1)[0]).relaunch_max - state.incidents.relaunched(place, state.at)
        for place in sorted(state.incidents.relaunches)
    }
