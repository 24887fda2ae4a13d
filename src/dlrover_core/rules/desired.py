"""What should be true now: names, launches and orders, from everybody's parts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from dlrover_core.diagnosis import ladder
from dlrover_core.diagnosis.evidence import CASC
from dlrover_core.job import nodes, world
from dlrover_core.job.node_lifecycle import COMING
from dlrover_core.job.orders import Desired, NodeLaunch, Order
from dlrover_core.job.state import JobState
from dlrover_core.rules import checkpoints, plans, save_on_failure, slots
from dlrover_core.rules.checks import check_orders
from dlrover_core.spec import us

DELETION_S = 1.0
CLOSING_S = 30.0
"""An agent that goes by itself says its last words and lets the memory go that it kept: a second for every few GiB."""


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
    avoid = [*state.hosts.quarantined(state.at), *slots.shunned(state)]
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
        shared = checkpoints.told(state, group)._replace(decided=save_on_failure.decided(state, group))
        made_for: list[checkpoints.Told] = current.recall("orders of", list)
        if made_for != [shared]:
            working.clear()
            made_for[:] = [shared]
        writers = {writer for writer, _ in shared.writers}
        alike: dict[object, Order] = {}
        probe, checks = state.hangs.probe(group), check_orders(state, group)
        plan = *state.planning.asked(group), plans.lenders(state, group)
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
