"""Checkpoints: which reports of agents become facts, when a step is committed, and what orders say of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from dlrover_core.checkpoint.partners import ALONE, partners
from dlrover_core.data.trained import all_counted
from dlrover_core.errors import Refused
from dlrover_core.job import checkpoints, incidents, nodes, world
from dlrover_core.job.leases import LeasesSaved
from dlrover_core.job.lineage import readable
from dlrover_core.job.state import JobState
from dlrover_core.kernel.engine import Rules, Telling, Tells, always
from dlrover_core.kernel.events import Event
from dlrover_core.rules import plans, save_on_failure, shards, slots
from dlrover_core.spec import us


class _Known(NamedTuple):
    """Cache key of a set's `Keep`, beside its world. ``offered``: number of changes of the nodes' replica addresses."""

    committed_of: int
    committed: int
    mtbf_s: int
    offered: int
    lenders: tuple[tuple[str, int, int], ...]
    decided: int


def _known(state: JobState, group: str) -> _Known:
    slice_, decided = state.checkpoints, save_on_failure.decided(state, group)
    return _Known(*slice_.of(group).newest, slice_.mtbf(group), slice_.offered, plans.lenders(state, group), decided)


def _keep(state: JobState, group: str, known: _Known) -> Telling:
    """Members get the address for their replica, and the lenders. Other nodes get the newest checkpoint alone."""
    keep = checkpoints.Keep(known.committed, known.committed_of, "", known.mtbf_s, (), known.decided)
    current, replicas = state.world.worlds[group], state.checkpoints.replicas
    to_all = keep if keep != checkpoints.Keep() else None
    if not current.active or not (replicas or known.lenders):
        return Telling(to_all)
    to = [replicas.get(_partner(state, group, place), "") if replicas else "" for place in range(len(current.members))]
    told = {one: keep._replace(replica_to=one, lenders=known.lenders) for one in set(to)}
    return Telling(to_all, {member.node: told[one] for member, one in zip(current.members, to, strict=True)})


def _partner(state: JobState, group: str, place: int) -> str:
    """The node that holds the replica of the node at this place of the running world; empty: no node can."""
    current = state.world.worlds[group]

    def chosen() -> tuple[int, ...]:
        racks = {seat.host: seat.rack for seat in state.hosts.seats.values()}
        known = [state.nodes.nodes.get(one.node) for one in current.members]
        hosts = [one.host if one is not None else "" for one in known]
        return partners([(racks.get(host) or host, host) for host in hosts])

    partner = current.recall("partners", chosen)[place]
    return current.members[partner].node if partner != ALONE else ""


# ---- decide


def _member(state: JobState, node: str, generation: int) -> world.World:
    """The world that a node is a member of. Raises `Refused`."""
    slots.present(state, node)
    current = state.world.of(node)
    if not current.active or current.generation != generation or current.member(node) is None:
        raise Refused(f"{node} is no member of a running generation {generation}")
    return current


def _bounded(*numbers: int) -> None:
    if not all(0 <= one <= checkpoints.NUMBER_MAX for one in numbers):
        raise Refused(f"{numbers}: not all are from 0 to {checkpoints.NUMBER_MAX}")


def _readable(cut: bytes) -> None:
    if cut and not readable(cut):
        raise Refused(f"{len(cut)} bytes are no position in data")


def _keeping(state: JobState, command: checkpoints.ReportKeeping, now: int) -> Iterator[Event]:
    current, group = _member(state, command.node, command.generation), state.set_of(command.node)
    if current.places[command.node] != 0:
        raise Refused(f"{command.node} does not run rank 0, which speaks for all")
    if state.checkpoints.of(group).generation >= command.generation:
        raise Refused(f"generation {command.generation} has said that it saves")
    if len(command.url) > checkpoints.URL_MAX:
        raise Refused(f"a url has at most {checkpoints.URL_MAX} characters")
    _bounded(command.every, command.store_every, command.keep, command.node_bytes, command.spread)
    yield checkpoints.KeepingStarted(group, *command[1:])


def _commit(state: JobState, command: checkpoints.CommitCheckpoint, now: int) -> Iterator[Event]:
    """Commit a step. The leader repeats the command until the log has the step; a repetition leaves no record."""
    kept, this = state.checkpoints.of(command.group), (command.generation, command.step)
    # Steps are committed too while the job ends and agents still write.
    if this <= kept.newest or command.generation > kept.generation:
        return
    ordered = kept.order is not None and (kept.order.generation, kept.order.step) == this
    why = kept.order.why if ordered and kept.order is not None else checkpoints.DUE
    cuts = [one for one in command.cuts if one and readable(one)]
    yield checkpoints.CheckpointCommitted(
        command.group, *this, kept.url, command.parts, max(0, command.size), max(0, command.took_us), why, *cuts[:1]
    )
    for other in cuts[1:]:
        yield from shards.unlike(command.group, this, cuts[0], other)
    leased = state.leases.of(command.group)
    for one in all_counted(command.trained):
        if one.dataset in leased and leased[one.dataset].of_model:
            yield LeasesSaved(command.group, one.dataset, *this, one.samples, one.checksum)


def _storage(state: JobState, command: checkpoints.ReportStorage, now: int) -> Iterator[Event]:
    slots.present(state, command.node)
    url, failing = command.url[: checkpoints.URL_MAX], command.node in state.checkpoints.failing
    if failing == bool(command.reason):
        raise Refused(f"the storage of {command.node} is known to {'fail' if failing else 'work'}")
    count, at = state.checkpoints.outages.get(command.node, (0, 0))
    # Half of the time that its agent waits: the agent's report of the failure may have been under way for long.
    if failing and now < at + us(checkpoints.storage_calm_s(count) / 2):
        raise Refused(f"the storage of {command.node} comes and goes: it failed {(now - at) // us(1)} s ago")
    yield (
        checkpoints.StorageFailed(command.node, url, command.reason[: checkpoints.TEXT_MAX])
        if command.reason
        else checkpoints.StorageBack(command.node, url)
    )


def _offer(state: JobState, command: checkpoints.OfferReplica, now: int) -> Iterator[Event]:
    node = slots.present(state, command.node)
    if len(command.address) > nodes.NAME_MAX:
        raise Refused(f"an address has at most {nodes.NAME_MAX} characters")
    if not node.joined or state.checkpoints.replicas.get(command.node, "") == command.address:
        raise Refused(f"{command.node} is {node.state}, and takes copies at {command.address!r} already")
    yield checkpoints.ReplicaOffered(command.node, command.address)


def _held(state: JobState, command: checkpoints.ReportHeld, now: int) -> Iterator[Event]:
    slots.present(state, command.node)
    held = state.checkpoints.of(state.set_of(command.node)).holdings(command.generation)
    if held is None or command.node not in held.places or command.node in held.gone:
        raise Refused(f"{command.node} is no member of a generation {command.generation} that saves")
    if len(command.steps) > checkpoints.STEPS_MAX or len(command.copies) > checkpoints.COPIES_MAX:
        raise Refused(f"{command.node} tells of {len(command.steps)} steps and {len(command.copies)} copies")
    _bounded(*command.steps, *(number for one in command.copies for number in one))
    if command.plan:
        _member(state, command.node, command.generation)
    elif command.node in held.held or held.saved:
        raise Refused(f"what {command.node} holds of generation {command.generation} is known, or decided upon")
    steps, copies = tuple(sorted(set(command.steps))), tuple(sorted(set(command.copies)))
    _readable(command.cut)
    yield checkpoints.StepsHeld(command.node, command.generation, steps, command.plan, copies, command.cut)


def _restored(state: JobState, command: checkpoints.ReportRestored, now: int) -> Iterator[Event]:
    current = _member(state, command.node, command.generation)
    rank_0 = current.places[command.node] == 0
    if (
        command.tier not in checkpoints.TIERS
        or len(command.fell) > checkpoints.FELL_MAX
        or command.step < 0
        or command.took_us < 0
        or not 0 <= command.of < command.generation
    ):
        raise Refused(f"no restore is like this: step {command.step} from {command.tier[: checkpoints.TEXT_MAX]!r}")
    _readable(command.cut)
    if command.node in state.checkpoints.of(state.set_of(command.node)).restored:
        raise Refused(f"{command.node} has told from where generation {command.generation} began")
    if not checkpoints.worth_telling(command.tier, command.fell, rank_0=rank_0):
        raise Refused(f"{command.node} found its own memory, or nothing, like everybody")
    fell = tuple((tier[: checkpoints.TEXT_MAX], why[: checkpoints.TEXT_MAX]) for tier, why in command.fell)
    yield checkpoints.Restored(*command[:5], fell, command.of, command.cut)


RULES = Rules(
    decide={
        checkpoints.ReportKeeping: _keeping,
        checkpoints.ReportHeld: _held,
        checkpoints.ReportStorage: _storage,
        checkpoints.OfferReplica: _offer,
        checkpoints.ReportRestored: _restored,
        checkpoints.CommitCheckpoint: _commit,
    },
    # A failure changes how often failures are expected.
    levels=dict.fromkeys(
        (
            checkpoints.CheckpointCommitted,
            checkpoints.ReplicaOffered,
            checkpoints.SaveOrdered,
            incidents.IncidentOpened,
        ),
        always,
    ),
    tells=Tells(_known, _keep),
    alarms={checkpoints.StorageFailed: lambda _: "checkpoints cannot be written"},
)
