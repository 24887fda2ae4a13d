"""`JobState`: the slices side by side, the model that folds them, and `desired`: what should be true now.

Adding a concern is adding a file and a line here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from dlrover_core.diagnosis import ladder
from dlrover_core.diagnosis.evidence import CASC
from dlrover_core.job import (
    backoff,
    budget,
    changing,
    checking,
    checkpoints,
    evidence,
    failures,
    hangs,
    health,
    hosts,
    job,
    laggards,
    nodes,
    pace,
    planning,
    progress,
    recovery,
    salvage,
    scaling,
    silence,
    world,
)
from dlrover_core.job.node_lifecycle import COMING
from dlrover_core.kernel.codec import Codec
from dlrover_core.kernel.engine import BaseState, Fold, Model, kept
from dlrover_core.kernel.events import Record, Registry
from dlrover_core.spec import us

if TYPE_CHECKING:
    from dlrover_core.diagnosis.policy import Hook


@dataclass(slots=True)
class JobState(BaseState):
    """Everything the master knows: the fold of the job's log, and nothing else."""

    job: job.JobSlice = kept(job.JobSlice, job.FACTS)
    nodes: nodes.NodeSlice = kept(nodes.NodeSlice, nodes.FACTS, silence.FACTS)
    hosts: hosts.HostSlice = kept(hosts.HostSlice, hosts.FACTS)
    world: world.WorldSlice = kept(world.WorldSlice, world.FACTS)
    evidence: evidence.EvidenceSlice = kept(evidence.EvidenceSlice, evidence.FACTS)
    failures: failures.FailureSlice = kept(failures.FailureSlice, failures.FACTS)
    progress: progress.ProgressSlice = kept(progress.ProgressSlice, progress.FACTS)
    pace: pace.PaceSlice = kept(pace.PaceSlice, pace.FACTS)
    hangs: hangs.HangSlice = kept(hangs.HangSlice, hangs.FACTS)
    budget: budget.BudgetSlice = kept(budget.BudgetSlice, budget.FACTS)
    health: health.HealthSlice = kept(health.HealthSlice, health.FACTS)
    laggards: laggards.LaggardSlice = kept(laggards.LaggardSlice, laggards.FACTS)
    planning: planning.PlanningSlice = kept(planning.PlanningSlice, planning.FACTS)
    checkpoints: checkpoints.CheckpointSlice = kept(checkpoints.CheckpointSlice, checkpoints.FACTS)


FOLD: Fold[JobState] = Fold(JobState)
REGISTRY = Registry(FOLD.events)
CODEC = Codec(REGISTRY)

# In the order in which they react.
_RULES = (
    job.RULES,
    nodes.RULES,
    silence.RULES,
    # Before recovery: where a host is kept off because of a failure, whoever is planned in answer to it keeps off already.
    hosts.RULES,
    evidence.RULES,
    recovery.RULES,
    world.RULES,
    progress.RULES,
    pace.RULES,
    hangs.RULES,
    scaling.RULES,
    changing.RULES,
    budget.RULES,
    backoff.RULES,
    checking.RULES,
    laggards.RULES,
    checkpoints.RULES,
    salvage.RULES,
)


def model(hook: Hook | None = None) -> Model[JobState]:
    """The rules. With a ``hook``, a user's say in what is done about failures, they may decide otherwise, and fold alike."""
    return Model(FOLD, [recovery.rules(hook) if hook is not None and one is recovery.RULES else one for one in _RULES])


MODEL: Model[JobState] = model()


DELETION_S = 1.0
CLOSING_S = 30.0
"""An agent that goes by itself says its last words and lets the memory go that it kept: a second for every few GiB."""


class NodeLaunch(NamedTuple):
    """A node that should exist and does not yet. ``name`` is the backend's name for it, unique for ever.

    ``avoid`` names hosts that it should not run on while there are others. Which there are only the backend knows: one with a
    single host starts the node there all the same, or draining a one-host job would end it. ``memory_mib`` is what it needs, 0:
    what there is; a backend that cannot give memory leaves it out of account.
    """

    name: str
    node: str
    group: str
    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody calls on a launch
    incarnation: int
    nproc: int
    avoid: tuple[str, ...]
    memory_mib: int = 0


class Order(NamedTuple):
    """What one agent should be doing. ``generation`` 0: no workers. ``leave``: stop them and go.

    ``over`` is the generation whose end on this node the leader wants to hear of; 0: none. ``restarts`` counts the generations
    of this run before this one: scripts are told, and torch's store keys contain it, so all ranks must be told the same.
    For ``linger_us`` workers that are to be stopped may end by themselves. ``outcome`` says what to ``leave`` means: the job is
    over (succeeded, failed with its ``root`` cause, stopped), or why this node alone is released. ``probe`` is the number of a
    hang: show what the ranks are at; 0: there is none.

    ``check``: the number of the node check that it takes part in now; 0: none. Its round and kind; its place among the
    ``check_size`` nodes that work together, ``check_with`` whom, over ``check_store``; for how long at most; and
    when that was decided, by the leader's clock.

    ``committed`` is the newest step that is whole on storage, by the log (-1: none), of generation ``committed_of``: a step of
    that number of another generation is another state. ``persist``: the step of generation ``persist_of`` that is to be written
    there now, because that generation has ended (-1: none), by this node the parts of ``persist_places``: its own place in that
    world, or those of others that it keeps copies of. ``plan``: get ready for this planned change (0: none); ``plan_go``: its
    boundary may be chosen. ``replica_to``: where copies of this node's states go; empty: nowhere. ``lenders``: nodes that have
    left this world at the boundary ``resume_step``, and from where what they held there can still be had: the address, the
    first rank of theirs in the world before, and how many. ``mtbf_s``: seconds between failures to be expected; 0: unknown.
    ``decided``: of generations up to this one the leader will order nothing to be written beside ``persist``.
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
    probe: int = 0
    check: int = 0
    check_round: int = 0
    check_kind: str = ""
    check_rank: int = 0
    check_size: int = 0
    check_store: str = ""
    check_with: tuple[str, ...] = ()
    check_us: int = 0
    check_at: int = 0
    committed: int = -1
    persist: int = -1
    persist_of: int = 0
    plan: int = 0
    plan_go: bool = False
    replica_to: str = ""
    mtbf_s: int = 0
    persist_places: tuple[int, ...] = ()
    lenders: tuple[tuple[str, int, int], ...] = ()
    committed_of: int = 0
    decided: int = 0


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
        # Its agent gives the workers their grace, and then needs a while itself.
        return spec.stop_grace_s + CLOSING_S
    if node is not None and node.released == "left":
        return CLOSING_S
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
    # Since they were planned others may have been lost, and may run on where nobody can reach them; or been quarantined.
    avoid = [*state.hosts.quarantined(state.at), *nodes.shunned(state)]
    launch = [
        _launch(state, node, avoid)
        for node in wanted
        if node.state == "planned" and taken.get((node.group, node.index), node.incarnation) >= node.incarnation
    ]
    return Desired(frozenset(full_name(state, node.node) for node in wanted), tuple(launch), _orders(state))


def _taken(state: JobState) -> dict[tuple[str, int], int]:
    """Places that are not free, with the oldest incarnation that may run there.

    Free are places whose nodes were seen to end; those of a lost one, whose host is avoided; and of one that leaves by plan.
    """
    taken: dict[tuple[str, int], int] = {}
    for node in state.nodes.nodes.values():
        # Whoever leaves at a boundary has its successor beside it until then.
        if not node.ended and node.state != "lost" and node.node not in state.planning.leaving:
            place = (node.group, node.index)
            taken[place] = min(node.incarnation, taken.get(place, node.incarnation))
    return taken


def _launch(state: JobState, node: nodes.Node, avoid: Iterable[str]) -> NodeLaunch:
    nproc = state.job.spec.group(node.group).nproc
    off = tuple(dict.fromkeys([*node.avoid, *avoid]))
    return NodeLaunch(
        full_name(state, node.node), node.node, node.group, node.index, node.incarnation, nproc, off, node.memory_mib
    )


def _orders(state: JobState) -> Mapping[str, Order]:
    orders: dict[str, Order] = {}
    for group, current in state.world.worlds.items():
        # Made once each: a member's for as long as its world stands, and one for all who wait or leave alike.
        working: dict[object, Order] = current.recall("orders", dict)
        shared = checkpoints.told(state, group)._replace(decided=salvage.decided(state, group))
        made_for: list[checkpoints.Told] = current.recall("orders of", list)
        if made_for != [shared]:
            working.clear()
            made_for[:] = [shared]
        writers = {writer for writer, _ in shared.writers}
        alike: dict[object, Order] = {}
        probe, checks = state.hangs.probe(group), health.orders(state, group)
        plan = *state.planning.asked(group), planning.lenders(state, group)
        for node in state.nodes.of(group):
            # Who is released must hear it even where nobody counts on it any more: given up as lost, and back again.
            if not (node.joined or node.released):
                continue
            place = current.places.get(node.node, -1)
            works = state.job.live and current.active and place >= 0 and not node.released
            known = working if works else alike
            # Who has states to write is told so wherever it is.
            own = works or node.node in writers
            apart = node.released, place >= 0, node.node in state.planning.leaving
            key: object = (node.node, probe, plan) if own else apart
            order = known.get(key)
            if order is None:
                order = _order(state, node, current, place)._replace(decided=shared.decided)
                if works:
                    order = order._replace(plan=plan[0], plan_go=plan[1], lenders=plan[2])
                known[key] = order
            checked = checks.get(node.node)
            orders[node.node] = order._replace(**checked) if checked and not order.leave else order
    return orders


def _order(state: JobState, node: nodes.Node, current: world.World, place: int) -> Order:
    spec = state.job.spec
    if not state.job.live:
        # Who goes writes what it has, and seals what is committed.
        return farewell(state)._replace(**checkpoints.ordered(state, node.node, -1))
    if node.released:
        grace = spec.stop_grace_s if node.released in nodes.BY_PLAN else spec.broken_grace_s
        released = Order(True, f"the node is {node.released}", us(grace), outcome=node.released)
        return released._replace(**checkpoints.ordered(state, node.node, -1))
    if place < 0 or not current.active:
        polite = current.planned_stop or node.node in state.planning.leaving
        grace = spec.stop_grace_s if polite else spec.broken_grace_s
        over = current.generation if place >= 0 else 0
        waits = "the job is suspended" if state.job.state == "suspended" else "waiting for a world"
        waiting = Order(False, waits, us(grace), over=over, linger_us=_linger_us(state, node.group))
        return waiting._replace(**checkpoints.ordered(state, node.node, -1))
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
        probe=state.hangs.probe(node.group),
        **checkpoints.ordered(state, node.node, place),
    )


def farewell(state: JobState) -> Order:
    """What everybody hears of a job that has ended, or is stopping; waiting standbys too."""
    grace = 0.0 if state.job.state == "failed" else state.job.spec.stop_grace_s
    outcome = "stopped" if state.job.state == "stopping" else state.job.state
    root = state.job.root or state.job.reason
    # A launcher's exit code tells this end from others.
    why = f": {state.job.reason}" if state.job.reason.startswith(ladder.NO_PROGRESS) else ""
    return Order(True, f"the job is {state.job.state}{why}", us(grace), outcome=outcome, root=root)


def _linger_us(state: JobState, group: str) -> int:
    """A job that is about to fail and knows only of cascades gives the one who knows why a moment to say so.

    Torch's elastic agent sums up the failures of its own workers only where they died by themselves: it too gets the moment.
    """
    incident = state.failures.unmended(group)
    knows = incident is None or not incident.held or (incident.cause.verdict != CASC and not state.budget.spent)
    return 0 if knows else us(state.job.spec.linger_s)


def fold(records: Iterable[Record]) -> JobState:
    """The state of a history."""
    return FOLD.fold(records)
