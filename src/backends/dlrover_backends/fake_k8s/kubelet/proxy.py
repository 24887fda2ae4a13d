"""Services as addresses of this machine: each port of a service is forwarded to a pod that it selects."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from typing import Any

from dlrover_backends.fake_k8s import selectors
from dlrover_backends.fake_k8s.kubelet.client import Cache, Client

Object = dict[str, Any]


class Proxy:
    """Forwards connections to services' cluster addresses, where those are loopback addresses.

    Args:
        client: of the API server.
    """

    def __init__(self, client: Client) -> None:
        self._pods = Cache(client, "/api/v1/pods", lambda _event, _obj: None)
        self._services = Cache(client, "/api/v1/services", self._heard)
        self._servers: dict[str, list[asyncio.Server]] = {}
        self._pipes: set[asyncio.Task[None]] = set()
        self._turn = itertools.count()
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Follow services and pods."""
        self._tasks = [asyncio.create_task(one.run()) for one in (self._pods, self._services)]
        await self._pods.synced.wait()
        await self._services.synced.wait()

    async def stop(self) -> None:
        """Close everything."""
        tasks = [*self._tasks, *self._pipes]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for server in itertools.chain.from_iterable(self._servers.values()):
            server.close()

    def _heard(self, event: str, service: Object) -> None:
        uid = service["metadata"]["uid"]
        if event == "DELETED":
            for server in self._servers.pop(uid, []):
                server.close()
        elif uid not in self._servers and str(service["spec"].get("clusterIP", "")).startswith("127."):
            self._servers[uid] = []
            task = asyncio.create_task(self._serve(service))
            self._pipes.add(task)
            task.add_done_callback(self._pipes.discard)

    async def _serve(self, service: Object) -> None:
        for port in service["spec"].get("ports") or []:

            async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, port: Object = port) -> None:
                task = asyncio.current_task()
                assert task is not None
                self._pipes.add(task)
                task.add_done_callback(self._pipes.discard)
                await self._forward(service, port, reader, writer)

            with contextlib.suppress(OSError):
                server = await asyncio.start_server(accept, service["spec"]["clusterIP"], port["port"])
                self._servers[service["metadata"]["uid"]].append(server)

    async def _forward(
        self, service: Object, port: Object, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        addresses = self._ready(service)
        for _ in addresses:
            address = addresses[next(self._turn) % len(addresses)]
            with contextlib.suppress(OSError):
                to_reader, to_writer = await asyncio.open_connection(address, _target(port))
                await asyncio.gather(_pipe(reader, to_writer), _pipe(to_reader, writer), return_exceptions=True)
                break
        writer.close()

    def _ready(self, service: Object) -> list[str]:
        """Addresses of the pods behind a service."""
        matches = selectors.labels_of_object({"matchLabels": service["spec"].get("selector") or {}})
        unready = bool(service["spec"].get("publishNotReadyAddresses"))
        return [
            pod["status"]["podIP"]
            for pod in self._pods.objects.values()
            if pod["metadata"]["namespace"] == service["metadata"]["namespace"]
            and pod["status"].get("podIP")
            and pod["status"].get("phase") == "Running"
            and (unready or "deletionTimestamp" not in pod["metadata"])
            and matches(pod["metadata"].get("labels") or {})
        ]


def _target(port: Object) -> int:
    target = str(port.get("targetPort"))
    return int(target if target.isdigit() else port["port"])


async def _pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    finally:
        with contextlib.suppress(OSError):
            writer.close()
