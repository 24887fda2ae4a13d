"""`JobState`: the slices side by side, the model that folds them, and `desired`: what should be true now.

Adding a concern is adding a file and a line here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

from dlrover_core.diagnosis.evidence import CASC
from dlrover_core.job import (
    budget,
    evidence,
    failures,
    haste,
    job,
    laggards,
    nodes,
    progress,
    recovery,
    scaling,
    silence,
    world,
)
from dlrover_core.job.node_lifecycle import COMING
from dlrover_core.kernel.codec import Codec
from dlrover_core.kernel.engine import BaseState, Model
from dlrover_core.kernel.events import Record, Registry
from dlrover_core.spec import us


@dataclass(slots=True)
class JobState(BaseState):
    """Everything the master knows: the fold of the job's log, and nothing else."""

    job: job.JobSlice = field(default_factory=job.JobSlice)
    nodes: nodes.NodeSlice = field(default_factory=nodes.NodeSlice)
    world: world.WorldSlice = field(default_factory=world.WorldSlice)
    evidence: evidence.EvidenceSlice = field(default_factory=evidence.EvidenceSlice)
    failures: failures.FailureSlice = field(default_factory=failures.FailureSlice)
    progress: progress.ProgressSlice = field(default_factory=progress.ProgressSlice)
    budget: budget.BudgetSlice = field(default_factory=budget.BudgetSlice)
    haste: haste.HasteSlice = field(default_factory=haste.HasteSlice)
    laggards: laggards.LaggardSlice = field(default_factory=laggards.LaggardSlice)


MODEL: Model[JobState] = Model(
    JobState,
    (
        job.CONCERN,
        nodes.CONCERN,
        silence.CONCERN,
        evidence.CONCERN,
        recovery.CONCERN,
        world.CONCERN,
        progress.CONCERN,
        scaling.CONCERN,
        budget.CONCERN,
        haste.CONCERN,
        laggards.CONCERN,
    ),
    # A sender is forgotten with its node; all of them with their run.
    forgets=MappingProxyType({nodes.NodeGone: lambda fact: fact.node, job.JobCreated: lambda _: None}),
)
REGISTRY = Registry(MODEL.events)
CODEC = Codec(REGISTRY)

# A batch without any of these leaves desired as it was.
LEVELLING: frozenset[type] = frozenset(
    {
        job.JobCreated, job.JobStopping, job.JobStopped, job.JobSucceeded, job.JobFailed, job.LeaderStarted,
        job.JobSuspended, job.JobResumed, job.GroupScaled,
        nodes.NodePlanned, nodes.NodeJoined, nodes.NodeFailed, nodes.NodeSucceeded, nodes.NodeGone, nodes.NodeLost,
        nodes.NodeReleased, nodes.NodeLeft, world.WorldFormed, world.WorldDissolved, failures.Diagnosed,
    }
)  # fmt: skip


DELETION_S = 1.0


class NodeLaunch(NamedTuple):
    """A node that should exist and does not yet. ``name`` is the backend's name for it, unique for ever.

    ``avoid`` names hosts that it should not run on while there are others. Which there are only the backend knows: one with a
    single host starts the node there all the same, or draining a one-host job would end it.
    """

    name: str
    node: str
    group: str
    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody calls on a launch
    incarnation: int
    nproc: int
    avoid: tuple[str, ...]


class Order(NamedTuple):
    """What one agent should be doing. ``generation`` 0: no workers. ``leave``: stop them and go.

    ``over`` is the generation whose end on this node the leader wants to hear of; 0: none. ``restarts`` counts the generations
    of this run before this one: scripts are told, and torch's store keys contain it, so all ranks must be told the same.
    For ``linger_us`` workers that are to be stopped may end by themselves. ``outcome`` says what to ``leave`` means: the job is
    over (succeeded, failed with its ``root`` cause, stopped), or why this node alone is released.
    """

    leave: bool
    reason: str
    grace_us: int
    generation: int = 0
    first_rank: int = 0
    nproc: int = 0
    world_size: int = 0
    node_rank: int = 0
    nodes: int = 0
    store: str = ""
    resume_step: int = -1
    over: int = 0
    restarts: int = 0
    linger_us: int = 0
    outcome: str = ""
    root: str = ""


class Desired(NamedTuple):
    """What should be true now. Whatever a backend lists that is not in ``names`` is deleted."""

    names: frozenset[str]
    launch: tuple[NodeLaunch, ...]
    orders: Mapping[str, Order]


def deletion_grace_s(state: JobState, name: str) -> float:
    """How long a node, by its backend's name, has to end by itself once it is deleted."""
    spec, node = state.job.spec, state.nodes.nodes.get(name.removeprefix(f"{state.job.name}-"))
    if state.job.state == "stopping":
        return spec.stop_grace_s
    if node is not None and node.released in nodes.BY_PLAN:
        # Its agent gives the workers their grace, and then needs a moment itself.
        return spec.stop_grace_s + DELETION_S
    return spec.broken_grace_s + DELETION_S


# Its identity is over, the job may go on without it: what a node hears that comes back after it was given up.
STRANGER = Order(leave=True, reason="not a node of this run", grace_us=0, outcome="lost")


def full_name(state: JobState, node: str) -> str:
    """The backend's name of a node: job and node."""
    return f"{state.job.name}-{node}"


def desired(state: JobState) -> Desired:
    """What should be true now, derived from the state and from nothing else."""
    if not state.job.live:
        # Nodes whose agents are still stopping their workers stay until they have left.
        staying = [node for node in state.nodes.nodes.values() if node.joined and not node.released]
        return Desired(frozenset(full_name(state, node.node) for node in staying), (), _orders(state))
    wanted = [node for node in state.nodes.nodes.values() if not node.released and node.state in COMING]
    taken = _taken(state)
    launch = [
        _launch(state, node)
        for node in wanted
        if node.state == "planned" and taken.get((node.group, node.index), node.incarnation) >= node.incarnation
    ]
    return Desired(frozenset(full_name(state, node.node) for node in wanted), tuple(launch), _orders(state))


def _taken(state: JobState) -> dict[tuple[str, int], int]:
    """Places that are not free, with the oldest incarnation that may run there.

    Free are places whose nodes were seen to end; and those of a lost one, whose host is avoided.
    """
    taken: dict[tuple[str, int], int] = {}
    for node in state.nodes.nodes.values():
        if not node.ended and node.state != "lost":
            place = (node.group, node.index)
            taken[place] = min(node.incarnation, taken.get(place, node.incarnation))
    return taken


def _launch(state: JobState, node: nodes.Node) -> NodeLaunch:
    nproc = state.job.spec.group(node.group).nproc
    # Since it was planned another may have been lost, and may run on where nobody can reach it.
    avoid = tuple(dict.fromkeys([*node.avoid, *nodes.shunned(state)]))
    return NodeLaunch(full_name(state, node.node), node.node, node.group, node.index, node.incarnation, nproc, avoid)


def _orders(state: JobState) -> Mapping[str, Order]:
    orders: dict[str, Order] = {}
    for group, current in state.world.worlds.items():
        # Made once each: a member's for as long as its world stands, and one for all who wait or leave alike.
        working: dict[object, Order] = current.recall("orders", dict)
        alike: dict[object, Order] = {}
        for node in state.nodes.of(group):
            # Who is released must hear it even where nobody counts on it any more: given up as lost, and back again.
            if not (node.joined or node.released):
                continue
            place = current.places.get(node.node, -1)
            works = state.job.live and current.active and place >= 0 and not node.released
            known = working if works else alike
            key: object = node.node if works else (node.released, place >= 0)
            order = known.get(key)
            if order is None:
                order = known[key] = _order(state, node, current, place)
            orders[node.node] = order
    return orders


def _order(state: JobState, node: nodes.Node, current: world.World, place: int) -> Order:
    spec = state.job.spec
    if not state.job.live:
        return farewell(state)
    if node.released:
        grace = spec.stop_grace_s if node.released in nodes.BY_PLAN else spec.broken_grace_s
        return Order(True, f"the node is {node.released}", us(grace), outcome=node.released)
    if place < 0 or not current.active:
        grace = spec.stop_grace_s if current.planned_stop else spec.broken_grace_s
        over = current.generation if place >= 0 else 0
        waits = "the job is suspended" if state.job.state == "suspended" else "waiting for a world"
        return Order(False, waits, us(grace), over=over, linger_us=_linger_us(state, node.group))
    member = current.members[place]
    return Order(
        leave=False,
        reason="",
        grace_us=us(spec.stop_grace_s if current.planned_change else spec.broken_grace_s),
        generation=current.generation,
        first_rank=member.first_rank,
        nproc=member.nproc,
        world_size=current.size,
        node_rank=place,
        nodes=len(current.members),
        store=current.store,
        resume_step=current.resume_step,
        restarts=current.generation - current.before - 1,
    )


def farewell(state: JobState) -> Order:
    """What everybody hears of a job that has ended, or is stopping; waiting standbys too."""
    grace = 0.0 if state.job.state == "failed" else state.job.spec.stop_grace_s
    outcome = "stopped" if state.job.state == "stopping" else state.job.state
    root = state.job.root or state.job.reason
    return Order(True, f"the job is {state.job.state}", us(grace), outcome=outcome, root=root)


def _linger_us(state: JobState, group: str) -> int:
    """A job that is about to fail and knows only of cascades gives the one who knows why a moment to say so.

    Torch's elastic agent sums up the failures of its own workers only where they died by themselves: it too gets the moment.
    """
    incident = state.failures.unmended(group)
    knows = incident is None or not incident.held or (incident.cause.verdict != CASC and not state.budget.spent)
    return 0 if knows else us(state.job.spec.linger_s)


def fold(records: Iterable[Record]) -> JobState:
    """The state of a history."""
    return MODEL.fold(records)
