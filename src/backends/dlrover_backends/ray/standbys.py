"""The standbys of a run, as the desk keeps them: actors whose agents wait for a node's name. It decides nothing about nodes.

The leading master says every two seconds how many each group wants, and which agents answer (`Reserve`). So many are made, each
away from the run's other actors where another host has room. They give way: none is made before all nodes run, and none stays
where a node waits for room. One that ends is replaced at growing intervals, and costs the job nothing.

What is remembered here, since when something was so, may be lost with the desk: then it takes a little longer.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import structlog

from dlrover_backends.ray import names
from dlrover_backends.ray.endings import fits
from dlrover_backends.ray.records import Actor, Host, Place, Snapshot
from dlrover_backends.ray.seating import GRACE_S
from dlrover_core.job.nodes import STANDBY_SEAT
from dlrover_core.runtime.backend import Observation
from dlrover_core.runtime.backends import SEAT

if TYPE_CHECKING:
    from dlrover_backends.ray.cluster import Cluster
    from dlrover_backends.ray.lookout import Lookout

FAIL_S = (1.0, 5.0, 30.0, 120.0, 300.0)
"""How long no standby of a group is made after one has ended, for each time in a row."""
CALM_S = 300.0
"""A standby that lived for so long counts as none that failed."""
DEAF_S = 300.0
"""A standby that has run for so long, and whose agent no master hears, is replaced."""
UNHEARD_S = 30.0
"""After so long it becomes no node: an agent that joins takes seconds, and this one is out of reach or hangs."""
CROWD_S, CROWDED_S = 3.0, 60.0
"""A node that waits for room for so long takes that of the standbys; for so long afterwards none is made."""
APART_S, TOGETHER_S = 20.0, 300.0
"""A standby that is to be away from the run's other hosts may wait for so long; for so long afterwards any host will do."""

log = structlog.get_logger("dlrover.desk")


class Reserve(NamedTuple):
    """The standbys that a group wants.

    group:     its name
    wanted:    how many there should be
    nodes_min: nodes that must run before one is made
    avoid:     names of hosts that none may run on
    heard:     seats whose agents answer
    shape:     of those that are made now; an older one fits no node
    order:     the fields of `cluster.Order`, as for a node of the group
    """

    group: str
    wanted: int
    nodes_min: int
    avoid: tuple[str, ...]
    heard: tuple[str, ...]
    shape: str
    order: Mapping[str, Any]


def seat_of(actor: str) -> str:
    """The seat of the agent that a standby's actor keeps."""
    return f"{STANDBY_SEAT}{actor}"


def may_be(actor: Actor, place: Place, host: Host | None, *, group: str, shape: str, avoid: Collection[str]) -> bool:
    """Could this free standby become such a node now? It must run, fit, and be on a host that stays."""
    return (
        actor.state == "ALIVE"
        and (place.group, place.shape) == (group, shape)
        and host is not None
        and host.alive
        and not host.ended
        and host.drain_ms is None
        and host.name not in avoid
    )


def occupied(seen: Snapshot) -> frozenset[str]:
    """The ids of hosts that have living actors of the run."""
    return frozenset(one.host_id for one in (*seen.actors.values(), *seen.standbys.values()) if not one.is_dead)


def apart(
    seen: Snapshot, free: Mapping[str, Mapping[str, float]], wants: Mapping[str, float], avoid: Collection[str]
) -> bool:
    """Has a host without actors of the run room for a standby? ``free``: what each host has left, by its id."""
    taken = occupied(seen)
    return any(
        fits(wants, free.get(host.id, {}))
        for host in seen.hosts.values()
        if host.alive and not host.ended and host.drain_ms is None and host.id not in taken and host.name not in avoid
    )


class Standbys:
    """Keeps the standbys of one run. Its calls must not overlap. ``now``: steady seconds."""

    def __init__(self, cluster: Cluster, lookout: Lookout, now: Callable[[], float] = time.monotonic) -> None:
        self._cluster, self._lookout, self._now = cluster, lookout, now
        # Since when nodes wait, and standbys are there, run and were heard.
        self._waiting: dict[str, float] = {}
        self._since: dict[str, float] = {}
        self._ran: dict[str, float] = {}
        self._heard: dict[str, float] = {}
        self._failures: dict[str, int] = {}
        self._not_before: dict[str, float] = {}
        self._together_until: dict[str, float] = {}
        self._crowded_until = float("-inf")

    def fitting(self, group: str, shape: str, heard: Collection[str], avoid: Collection[str]) -> list[str]:
        """The free standbys that could be such a node, the one that would train soonest first."""
        seen = self._lookout.seen
        found = [
            name
            for name, actor in self._free(seen).items()
            if may_be(
                actor, self._lookout.place(name), seen.hosts.get(actor.host_id), group=group, shape=shape, avoid=avoid
            )
            and (seat_of(name) in heard or self._unheard_s(name) <= UNHEARD_S)
        ]
        return sorted(found, key=lambda name: (seat_of(name) not in heard, names.number_of(name)))

    async def level(self, wanted: Collection[Reserve]) -> None:
        """Make and remove standbys as is wanted now. Raises whatever Ray does."""
        if not self._lookout.has_looked:
            await self._lookout.look()
        seen, now, groups = self._lookout.seen, self._now(), {one.group: one for one in wanted}
        self._note(seen, groups, now)
        for name, actor in self._free(seen).items():
            group = groups.get(self._lookout.place(name).group)
            if why := self._unfit(name, actor, seen, group):
                await self._remove(name, actor, why)
        for group in groups.values():
            there = sorted(
                (one for one in self._free(seen) if self._lookout.place(one).group == group.group), key=names.number_of
            )
            there = [one for one in there if self._cluster.seating.taker(one) is None]
            for name in there[group.wanted :]:
                await self._remove(name, seen.standbys[name], "there is one too many")
            if len(there) < group.wanted and self._may_make(group, now):
                await self._make(group, seen, group.wanted - len(there))

    def _free(self, seen: Snapshot) -> dict[str, Actor]:
        return {name: actor for name, actor in seen.standbys.items() if name not in seen.retired}

    def _note(self, seen: Snapshot, groups: Mapping[str, Reserve], now: float) -> None:
        """Note since when what is seen is so."""
        nodes, free = self._lookout.nodes, self._free(seen)
        self._waiting = {
            name: self._waiting.get(name, now)
            for name, node in nodes.items()
            if node.phase == "pending" and node.waits and not node.host
        }
        self._since = {name: self._since.get(name, now) for name in free}
        self._ran = {name: self._ran.get(name, now) for name, one in free.items() if one.state == "ALIVE"}
        heard = {seat for one in groups.values() for seat in one.heard}
        self._heard = {name: now if seat_of(name) in heard else self._heard.get(name, now) for name in self._ran}
        if any(now - since > CROWD_S for since in self._waiting.values()):
            self._crowded_until = now + CROWDED_S

    def _unfit(self, name: str, actor: Actor, seen: Snapshot, group: Reserve | None) -> str:
        """Why a free standby is of no use; empty: it is."""
        now, host = self._now(), seen.hosts.get(actor.host_id)
        if actor.is_dead:
            return "it has ended"
        if group is None or not group.wanted:
            return "the job wants none"
        if self._lookout.place(name).shape != group.shape:
            return "nodes are made otherwise by now"
        if host is not None and (host.ended or not host.alive):
            return "its host is lost"
        if host is not None and (host.drain_ms is not None or host.name in group.avoid):
            return f"nodes must not run on {host.name}"
        if self._crowded_until > now:
            return "a node waits for room"
        if self._unheard_s(name) > DEAF_S:
            return "no master hears its agent"
        if name not in self._ran and group.group not in self._together_until and now - self._since[name] > APART_S:
            self._together_until[group.group] = now + TOGETHER_S
            return "there is no room away from the other nodes"
        return ""

    def _unheard_s(self, name: str) -> float:
        """For how long a standby has run without a master that hears it."""
        return self._now() - max(self._ran[name], self._heard[name]) if name in self._ran else 0.0

    async def _remove(self, name: str, actor: Actor, why: str) -> None:
        if not await asyncio.to_thread(self._cluster.seating.retire, name):
            return  # it has become a node
        if actor.is_dead or why.startswith("no master"):
            group = self._lookout.place(name).group
            now = self._now()
            lived_s = now - self._ran.get(name, now)
            times = 0 if lived_s >= CALM_S else self._failures.get(group, 0)
            self._failures[group] = times + 1
            self._not_before[group] = now + FAIL_S[min(times, len(FAIL_S) - 1)]
            log.warning("a standby has ended, and another one is made", actor=name, reason=why)
        if not actor.is_dead:
            log.info("a standby is removed", actor=name, reason=why)
            await asyncio.to_thread(self._cluster.end, actor, GRACE_S)
            self._lookout.ends(name, GRACE_S)

    def _may_make(self, group: Reserve, now: float) -> bool:
        """Is it time: enough nodes run, none waits, and the last standby has not just ended?"""
        if now < max(self._not_before.get(group.group, now), self._crowded_until):
            return False
        if self._together_until.get(group.group, now) < now:
            del self._together_until[group.group]
        nodes = self._lookout.nodes
        running = sum(one.phase == "running" and self._is_of(one, group.group) for one in nodes.values())
        return running >= group.nodes_min and all(one.phase != "pending" for one in nodes.values())

    def _is_of(self, node: Observation, group: str) -> bool:
        return node.name.rsplit("-", 2)[0] == f"{self._cluster.run.job}-{group}"

    async def _make(self, group: Reserve, seen: Snapshot, missing: int) -> None:
        """Make the standbys that are missing. Raises whatever Ray does."""
        from dlrover_backends.ray.cluster import Order

        used = (*seen.standbys, *(one.seat for one in seen.actors.values() if one.seat))
        number = 1 + max(map(names.number_of, used), default=-1)
        for _ in range(missing):
            made = False
            while not made:
                name = names.standby(self._cluster.run.job, group.group, number)
                order = Order(**{**group.order, "name": name, "avoid": group.avoid, "plan": _seated(group.order, name)})
                order = order._replace(group=group.group, shape=group.shape)
                made = await asyncio.to_thread(self._placed, order, group.group, seen)
                number += 1
        await self._lookout.look()  # what was made is not published yet, and would be made again

    def _placed(self, order: Any, group: str, seen: Snapshot) -> bool:
        """Make one, away from the run's other hosts if there is room; False: the name is an older one's. Blocks."""
        without: Collection[str] = ()
        if group not in self._together_until and apart(seen, self._cluster.free(), order.wants, order.avoid):
            without = occupied(seen)
        return bool(self._cluster.create(order, without=without).new)


def _seated(order: Mapping[str, Any], name: str) -> dict[str, Any]:
    """How the keeper starts a standby's agent: with its seat."""
    plan: dict[str, Any] = dict(order["plan"])
    return {**plan, "env": {**plan["env"], SEAT: name}}
