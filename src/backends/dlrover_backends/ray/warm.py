"""Warm nodes, as a master asks for them: how many standbys each group wants, what they run, and which of them answer.

The desk keeps them (`standbys`). It is told all of it whenever the leader says which agents answer, every two seconds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any

import structlog

from dlrover_backends.ray import names
from dlrover_core.errors import CoreError, SpecError
from dlrover_core.job.orders import NodeLaunch
from dlrover_core.runtime.backend import RUNNING, GroupSize, Wanted
from dlrover_core.runtime.backends import MASTERS, NODE, SEAT, STANDBY

log = structlog.get_logger("dlrover.backend")

Order = Callable[[NodeLaunch], dict[str, Any]]
Call = Callable[..., Awaitable[object]]


def node_of(size: GroupSize) -> NodeLaunch:
    """What a standby of a group needs: as a node of it, which has no name."""
    return NodeLaunch(size.name, size.name, size.name, 0, 0, size.nproc, (), size.memory_mib, size.cpu_m, size.gpus)


def nameless(order: Mapping[str, Any], group: str) -> dict[str, Any]:
    """A node's order as that of a standby of its group: its agent is told the group in place of a name."""
    plan = order["plan"]
    env = {name: value for name, value in plan["env"].items() if name not in {NODE, SEAT}}
    return {**order, "again": False, "plan": {**plan, "env": {**env, STANDBY: group}}}


def shape_of(order: Mapping[str, Any], group: str) -> str:
    """What nodes a standby fits: those whose orders differ in their names, the hosts to avoid, and the masters, alone.

    Each master names itself first, and those of another life have other addresses: a standby that one of them hears fits it.
    The desk adds the runtime environment (`cluster.Cluster.shape`), whose folders each master names in its own way.
    """
    same = nameless(order, group)
    env = {name: value for name, value in same["plan"]["env"].items() if name != MASTERS}
    plan = {**same["plan"], "env": env}
    return names.digest({**same, "name": "", "avoid": [], "runtime_env": {}, "plan": plan})


class Warm:
    """The standbys that one master wants. ``order``: the fields of a node's order; ``call``: asks the desk."""

    def __init__(self, order: Order, call: Call) -> None:
        self._order, self._call = order, call
        self._wanted: Wanted | None = None
        self._token = 0
        self._heard: tuple[str, ...] = ()
        self._avoid: dict[str, tuple[str, ...]] = {}
        self._used = False
        self._news = asyncio.Event()
        self._said = ""

    def sized(self, wanted: Wanted, token: int) -> None:
        """The job wants this."""
        self._wanted, self._token = wanted, token
        self._used = self._used or any(one.standby for one in wanted.groups)

    def heard(self, seats: Collection[str]) -> None:
        """Agents wait in these seats, and answer: this master leads."""
        self._heard = tuple(sorted(seats))
        self._news.set()

    def fit(self, node: NodeLaunch, order: Mapping[str, Any]) -> dict[str, Any]:
        """What a standby must be that becomes this node, for the desk; empty: none may."""
        self._avoid[node.group] = node.avoid
        groups = self._wanted.groups if self._wanted is not None else ()
        if node.incarnation == 0 or not any(one.standby for one in groups if one.name == node.group):
            return {}  # only the place of a dead node is a standby's
        return {"group": node.group, "shape": shape_of(order, node.group), "heard": self._heard}

    async def run(self) -> None:
        """Tell the desk, as often as the leader says who answers, until cancelled."""
        while True:
            await self._news.wait()
            self._news.clear()
            if not self._used:
                continue
            try:
                await self._call("reserve", self._token, self.reserves())
                self._said = ""
            except Exception as error:  # noqa: BLE001  # no failure may be the end of all standbys
                why = str(error) if isinstance(error, CoreError) else f"{type(error).__name__}: {error}"
                if why != self._said:
                    log.warning("standbys are looked after again", error=why)
                self._said = why

    def reserves(self) -> tuple[dict[str, Any], ...]:
        """The fields of `standbys.Reserve` for each group with standbys; none where the job wants no nodes now."""
        wanted = self._wanted
        if wanted is None or wanted.state != RUNNING:
            return ()
        found = []
        for size in wanted.groups:
            if not size.standby:
                continue
            try:
                order = self._order(node_of(size))
            except SpecError as error:
                log.warning("a group has no standbys", group=size.name, error=str(error))
                continue
            found.append(
                {
                    "group": size.name,
                    "wanted": size.standby,
                    "nodes_min": size.nodes_min,
                    "avoid": self._avoid.get(size.name, ()),
                    "heard": self._heard,
                    "shape": shape_of(order, size.name),
                    "order": nameless(order, size.name),
                }
            )
        return tuple(found)
