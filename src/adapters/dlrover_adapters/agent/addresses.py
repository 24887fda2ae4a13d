"""Addresses as news, at the agent: keep the node's ports, offer them, and write down for its workers whom they can call.

What workers see: `LISTEN_VARIABLE` (where this one is to listen, if anybody calls its group) and `PEERS_VARIABLE` (the file with
the addresses of the groups that its group uses; `dlrover_adapters.peers` reads it). The file is replaced whole, so a worker never
reads half of it, and hears of a change by watching the file's folder (inotify).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import threading
from collections.abc import Callable

import structlog

from dlrover_adapters.peers import FORMAT, LISTEN_VARIABLE, PEERS_VARIABLE
from dlrover_core.errors import MalformedMessage
from dlrover_core.job.clusters import Cluster, OfferPorts, Places, listed
from dlrover_core.runtime.duties import Desk, Orders
from dlrover_core.runtime.within import within

from .ports import Ports

FILE = "peers.json"
READY_S = 5.0
"""Workers that start wait so long for what was ordered to be written down."""

log = structlog.get_logger("dlrover.agent")


class PeersFile:
    """The file of addresses in an agent's folder. One thread may write it while another one restores it."""

    def __init__(self) -> None:
        self.path = ""
        self._text = ""
        self._writing = threading.Lock()

    def open(self, folder: str) -> None:
        """It lies there from now on."""
        self.path = os.path.join(folder, FILE)

    def write(self, version: int, groups: Places) -> None:
        """Replace what it says. Raises `OSError`."""
        text = json.dumps({"format": FORMAT, "version": version, "groups": groups})
        with self._writing:
            self._put(text)
            self._text = text

    def _put(self, text: str) -> None:
        whole = f"{self.path}.new"
        with open(whole, "w") as file:
            file.write(text)
        os.replace(whole, self.path)

    def restore(self) -> bool:
        """Write it again where it was removed; was it? Waits for nobody who writes it. Raises `OSError`."""
        if not self._text or os.path.exists(self.path) or not self._writing.acquire(blocking=False):
            return False
        try:
            self._put(self._text)
        finally:
            self._writing.release()
        return True


class Addresses(Orders):
    """The duty. ``address`` is where others reach this host, ``bind`` where workers listen on it."""

    def __init__(self, *, address: str, bind: str, say: Callable[[str], None]) -> None:
        super().__init__()
        self.file = PeersFile()
        self._address, self._say = address, say
        self._ports, self._offered, self._failed = Ports(bind), False, False
        self._cluster, self._uses = Cluster(), False
        self._handled = asyncio.Event()
        self._handled.set()

    def ordered(self, order: object) -> None:
        """There may be news; who starts workers waits until they are written down."""
        self._handled.clear()
        super().ordered(order)  # type: ignore[arg-type]  # the port's

    async def run(self, desk: Desk) -> None:
        """Until cancelled."""
        try:
            while True:
                order = await self.news(desk)
                cluster = order.part(Cluster)
                if not order.leave and cluster != self._cluster:
                    self._uses = cluster.version > 0
                    self._keep(desk, cluster)
                    await self._write(cluster)
                    self._cluster = cluster
                if not self._news.is_set():
                    self._handled.set()
        finally:
            self._ports.close()

    def _keep(self, desk: Desk, cluster: Cluster) -> None:
        if not cluster.ports or self._offered or self._failed:
            return
        again = cluster.first if cluster.address == self._address else 0
        place = desk.node.rsplit("-", 1)[0]
        try:
            first = self._ports.keep(f"{desk.run}/{place}", cluster.ports, again)
        except OSError as error:
            self._failed = True
            self._say(f"others cannot call the workers of {desk.node}: {error}; free some, and replace the node")
            return
        self._offered = True
        desk.send(OfferPorts(desk.node, self._address, first, cluster.ports))

    async def _write(self, cluster: Cluster) -> None:
        if not cluster.version or cluster[3:] == self._cluster[3:]:
            return
        try:
            await asyncio.to_thread(lambda: self.file.write(cluster.version, listed(cluster.peers)))
        except (OSError, MalformedMessage) as error:
            self._say(f"workers are not told the addresses of version {cluster.version}: {error}")

    async def environment(self, nproc: int) -> tuple[dict[str, str], ...]:
        """What each worker that starts now finds in its environment, by local rank."""
        with contextlib.suppress(asyncio.TimeoutError):
            await within(READY_S, self._handled.wait())
        # Also before there is a file: whoever waits for it sees it come.
        common = {PEERS_VARIABLE: self.file.path} if self._uses else {}
        first, host = self._ports.first, self._ports.listens
        host = f"[{host}]" if ":" in host else host
        return tuple(
            {**common, **({LISTEN_VARIABLE: f"{host}:{first + rank}"} if first else {})} for rank in range(nproc)
        )
