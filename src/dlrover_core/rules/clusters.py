"""Clusters: which offers of addresses become facts, and which nodes are told of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, get_args

from dlrover_core.errors import Refused
from dlrover_core.job import clusters, nodes, world
from dlrover_core.job.clusters import Cluster, OfferPorts, PortsOffered
from dlrover_core.job.names import group_of
from dlrover_core.job.state import JobState
from dlrover_core.kernel.engine import Rules, Telling, Tells, always
from dlrover_core.kernel.events import Event
from dlrover_core.kernel.wire import Part
from dlrover_core.rules import slots
from dlrover_core.spec import GroupSpec, JobSpec


def used(spec: JobSpec, group: str) -> bool:
    """Does any group use the addresses of this one?"""
    return any(group in one.uses for one in spec.groups)


class _Known(NamedTuple):
    """Cache key of the nodes' `Cluster` parts.

    groups: the groups of the set, each with the number of ports of a node and the version that it is told
    again:  nodes without an offer yet, each with address and port of the last node of its place
    """

    groups: tuple[tuple[str, int, int], ...] = ()
    again: tuple[tuple[str, str, int], ...] = ()


def _groups(spec: JobSpec, name: str) -> Iterator[GroupSpec]:
    """The groups of a coupling set."""
    for group in spec.groups:
        if name in (group.name, group.coupled) or (not group.coupled and name.rpartition("-")[0] == group.name):
            yield group


def _known(state: JobState, name: str) -> _Known:
    spec, slice_ = state.job.spec, state.clusters
    if not any(group.uses for group in spec.groups):
        return _Known()
    told, keeping = [], []
    for group in _groups(spec, name):
        keeps = used(spec, group.name)
        version = slice_.newest(group.uses) if group.uses else 0
        if keeps or version:
            told.append((group.name, group.nproc if keeps else 0, version))
        if keeps:
            keeping.append(group.name)
    return _Known(tuple(told), tuple(_again(state, keeping)) if slice_.vacant else ())


def _again(state: JobState, groups: list[str]) -> Iterator[tuple[str, str, int]]:
    for place, offer in state.clusters.vacant.items():
        group, _, index = place.rpartition("-")
        latest = state.nodes.latest(group, int(index)) if group in groups else None
        if latest is not None and latest.joined and not latest.released:
            yield latest.node, offer.address, offer.first


def _telling(state: JobState, name: str, known: _Known) -> Telling:
    """One part for all nodes of a group, and parts of their own for nodes that should take their place's ports again."""
    parts: dict[str, Cluster] = {}
    for group, ports, version in known.groups:
        peers = state.clusters.told(state.job.spec.group(group).uses)[1] if version else ""
        parts[group] = Cluster(ports=ports, version=version, peers=peers)
    named: dict[str, Part] = {
        node: parts[group_of(node)]._replace(address=address, first=first) for node, address, first in known.again
    }
    if len(parts) == 1 and len(list(_groups(state.job.spec, name))) == 1:
        return Telling(next(iter(parts.values())), named=named)
    # Groups that share a world: each its own.
    for node in state.nodes.nodes.values():
        if node.group in parts:
            named.setdefault(node.node, parts[node.group])
    return Telling(named=named)


# ---- decide


def _offer(state: JobState, command: OfferPorts, now: int) -> Iterator[Event]:
    node = slots.present(state, command.node)
    if not node.joined or node.released:
        raise Refused(f"{command.node} {node.stands()}: nobody is to call its workers")
    if not used(state.job.spec, node.group):
        raise Refused(f"no group uses {node.group!r}: nobody calls its workers")
    if not 0 < len(command.address) <= nodes.NAME_MAX:
        raise Refused(f"an address has 1 to {nodes.NAME_MAX} characters")
    if command.ports != node.nproc or not 1 <= command.first <= clusters.PORT_MAX - command.ports + 1:
        raise Refused(f"{command.ports} ports from {command.first} on are not one for each of {node.nproc} workers")
    if state.clusters.offer(command.node) != clusters.Offer(*command[1:]):
        yield PortsOffered(*command)


def _has_any(state: JobState, fact: Event) -> bool:
    return state.clusters.version > 1


RULES = Rules(
    decide={OfferPorts: _offer},
    levels={PortsOffered: always, **dict.fromkeys((world.WorkersStarted, *get_args(world.Ended)), _has_any)},
    tells=Tells(_known, _telling),
)
