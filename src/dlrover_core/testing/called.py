"""The duty of an agent in memory whose job has groups that use others: offers ports, and keeps what it is told of others'."""

from __future__ import annotations

import zlib
from typing import NamedTuple

from dlrover_core.job.clusters import Cluster, OfferPorts
from dlrover_core.runtime.duties import Desk, Orders

FIRST_PORT = 10_000


class Heard(NamedTuple):
    """A node was told these addresses, of this version."""

    node: str
    version: int
    peers: str


class Called(Orders):
    """Offers the ports of its place on its host, again where it had them; ``heard`` is shared by all nodes of a job."""

    def __init__(self, host: str, heard: list[Heard]) -> None:
        super().__init__()
        self._host, self._heard = host, heard

    async def run(self, desk: Desk) -> None:
        """Until cancelled."""
        offered, newest = False, 0
        while True:
            order = await self.news(desk)
            cluster = order.part(Cluster)
            if order.leave:
                continue
            if cluster.ports and not offered:
                offered = True
                again = cluster.first if cluster.address == self._host else 0
                desk.send(OfferPorts(desk.node, self._host, again or _first_port(desk.node), cluster.ports))
            if cluster.version > newest:
                newest = cluster.version
                self._heard.append(Heard(desk.node, cluster.version, cluster.peers))


def _first_port(node: str) -> int:
    """One of its own for every node that there is at a time."""
    return FIRST_PORT + 10 * (zlib.crc32(node.encode()) % 5000)
