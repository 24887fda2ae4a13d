"""Desired state: names, launches and orders, put together from the parts of all concerns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dlrover_core.diagnosis import ladder
from dlrover_core.diagnosis.evidence import CASC
from dlrover_core.job import nodes, world
from dlrover_core.job.node_lifecycle import COMING
from dlrover_core.job.orders import Desired, NodeLaunch, Order, Work
from dlrover_core.job.state import JobState
from dlrover_core.kernel.engine import Model, Telling, Tells
from dlrover_core.kernel.wire import Part
from dlrover_core.rules import slots
from dlrover_core.rules.model import MODEL
from dlrover_core.spec import us

DELETION_S = 1.0
CLOSING_S = 30.0
"""Seconds that a leaving agent needs to report its end and free its staging memory: one for every few GiB."""


def deletion_grace_s(state: JobState, name: str) -> float:
    """How long a node, by its backend's name, has to end by itself once it is deleted."""
    spec, node = state.job.spec, state.nodes.nodes.get(name.removeprefix(f"{state.job.name}-"))
    if state.job.state == "stopping":
        return spec.stop_grace_s
    if node is not None and node.released in nodes.BY_PLAN:
        # Its agent gives the workers their grace, and then needs time itself.
        return spec.stop_grace_s + CLOSING_S
    if node is not None and node.released == "left":
        return CLOSING_S
    return spec.broken_grace_s + DELETION_S


def full_name(state: JobState, node: str) -> str:
    """The backend's name of a node: job and node."""
    return f"{state.job.name}-{node}"


def desired(state: JobState, model: Model[Any] = MODEL) -> Desired:
    """The desired state. It follows from the state and from nothing else."""
    if not state.job.live:
        # A released node stays until its agent has stopped its workers and left.
        staying = [node for node in state.nodes.nodes.values() if node.joined and not node.released]
        return Desired(frozenset(full_name(state, node.node) for node in staying), (), _orders(state, model.tells))
    wanted = [node for node in state.nodes.nodes.values() if not node.released and node.state in COMING]
    taken = _taken(state)
    launch = [
        _launch(state, node)
        for node in wanted
        if node.state == "planned" and taken.get((node.group, node.index), node.incarnation) >= node.incarnation
    ]
    begins = full_name(state, "")
    return Desired(frozenset([begins + node.node for node in wanted]), tuple(launch), _orders(state, model.tells))


def _taken(state: JobState) -> dict[tuple[str, int], int]:
    """Places that are not free, with the oldest incarnation that may run there.

    Free are the places of nodes that were seen to end, of lost nodes (their host is avoided), and of nodes that leave by
    plan.
    """
    taken: dict[tuple[str, int], int] = {}
    for node in state.nodes.nodes.values():
        # A node that leaves at a boundary has its successor beside it until then.
        if not node.ended and node.state != "lost" and node.node not in state.plans.leaving:
            place = (node.group, node.index)
            taken[place] = min(node.incarnation, taken.get(place, node.incarnation))
    return taken


def _launch(state: JobState, node: nodes.Node) -> NodeLaunch:
    group = state.job.spec.group(node.group)
    # Since the node was planned, other nodes may have been lost, and may run on unreached; hosts may have been quarantined.
    off = tuple(dict.fromkeys([*node.avoid, *slots.avoided(state, node.group, node.index)]))
    return NodeLaunch(
        name=full_name(state, node.node),
        node=node.node,
        group=node.group,
        index=node.index,
        incarnation=node.incarnation,
        nproc=group.nproc,
        avoid=off,
        memory_mib=node.memory_mib,
        cpu_m=group.cpu_m,
        gpus=group.gpus,
    )


class OrderBook:
    """The orders of one world's members, each made once and kept until its contents change.

    The book is cached with the world (`memo`), so another world begins with an empty book.
    """

    def __init__(self) -> None:
        self._keys: list[Any] = []
        self._told: list[Telling] = []
        # What most nodes are told alike, and what is told apart to those who work.
        self._alike: tuple[Part, ...] = ()
        self._working: list[Mapping[str, Part]] = []
        self.named: frozenset[str] = frozenset()
        self.working: dict[str, Order] = {}
        self._before: dict[str, Order] = {}

    def read(self, state: JobState, group: str, tells: Sequence[Tells]) -> None:
        """Read the concerns' parts. Orders whose parts have changed are made anew when they are asked for."""
        keys = [one.key(state, group) for one in tells]
        if keys == self._keys:
            return
        known = len(self._keys)
        self._told = [
            self._told[at] if at < known and self._keys[at] == key else one.telling(state, group, key)
            for at, (one, key) in enumerate(zip(tells, keys, strict=True))
        ]
        self._keys, self.named = keys, frozenset(name for one in self._told for name in one.named)
        self._alike = tuple(one.to_all for one in self._told if one.to_all)
        self._working = [one.working for one in self._told if one.working]
        self._before.update(self.working)
        self.working = {}

    def parts(self, node: str, *, works: bool) -> tuple[Part, ...]:
        """The parts of a node's order."""
        if node not in self.named and not (works and any(node in one for one in self._working)):
            return self._alike
        found = (one.named.get(node) or (works and one.working.get(node)) or one.to_all for one in self._told)
        return tuple(part for part in found if part)

    def make(self, node: str, state: JobState, current: world.World, place: int) -> Order:
        """The order of a member that works."""
        parts, before = self.parts(node, works=True), self._before.get(node)
        if before is None:
            before = _works(state, current, place)
        order = self.working[node] = before if before.parts == parts else before._replace(parts=parts)
        return order


def _orders(state: JobState, tells: Sequence[Tells]) -> Mapping[str, Order]:
    orders: dict[str, Order] = {}
    for group, current in state.world.worlds.items():
        book = current.recall("orders", OrderBook)
        book.read(state, group, tells)
        runs = state.job.live and current.active
        alike: dict[object, Order] = {}
        for node in state.nodes.in_set(group):
            # A released node must be told even if it was given up as lost and has come back.
            if not (node.joined or node.released):
                continue
            name = node.node
            place = current.places.get(name, -1)
            if runs and place >= 0 and not node.released:
                orders[name] = book.working.get(name) or book.make(name, state, current, place)
                continue
            told_apart = name if name in book.named else ""
            key = node.released, place >= 0, name in state.plans.leaving, told_apart
            order = alike.get(key)
            if order is None:
                order = alike[key] = _idle(state, node, current, place)._replace(parts=book.parts(name, works=False))
            orders[name] = order
    return orders


def _idle(state: JobState, node: nodes.Node, current: world.World, place: int) -> Order:
    """The order of a node that should have no workers."""
    spec = state.job.spec
    if not state.job.live:
        # A leaving node still writes its states, and needs to know what is committed.
        return farewell(state)
    if node.released:
        grace = spec.stop_grace_s if node.released in nodes.BY_PLAN else spec.broken_grace_s
        return Order(True, f"the node {node.stands()}", us(grace), outcome=node.released)
    polite = current.planned_stop or node.node in state.plans.leaving
    grace = spec.stop_grace_s if polite else spec.broken_grace_s
    over = current.generation if place >= 0 else 0
    waits = "the job is suspended" if state.job.state == "suspended" else "waiting for a world"
    return Order(False, waits, us(grace), over=over, linger_us=_linger_us(state, state.set_of(node.node)))


def _works(state: JobState, current: world.World, place: int) -> Order:
    """The order of a member of the running world."""
    spec, member = state.job.spec, current.members[place]
    work = Work(
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
    return Order(False, "", us(spec.stop_grace_s if current.planned_change else spec.broken_grace_s), work=work)


def farewell(state: JobState) -> Order:
    """The order for all agents, standbys too, of a job that has ended or is stopping."""
    grace = 0.0 if state.job.state == "failed" else state.job.spec.stop_grace_s
    outcome = "stopped" if state.job.state == "stopping" else state.job.state
    root = state.job.root or state.job.reason
    # A launcher's exit code distinguishes this end from others.
    why = f": {state.job.reason}" if state.job.reason.startswith(ladder.NO_PROGRESS) else ""
    return Order(True, f"the job is {state.job.state}{why}", us(grace), outcome=outcome, root=root)


def _linger_us(state: JobState, group: str) -> int:
    """Time for workers to end by themselves, where a job is about to fail and only cascades are known.

    The rank that caused the failure may report later than the others.

    Torch's elastic agent sums up the failures of its own workers only if they died by themselves, so it gets this time too.
    """
    incident = state.incidents.unmended(group)
    knows = incident is None or not incident.end_pending or (incident.cause.verdict != CASC and not state.budgets.spent)
    return 0 if knows else us(state.job.spec.linger_s)
