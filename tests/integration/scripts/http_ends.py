"""The two ends of the transport, for its tests."""

from __future__ import annotations

import asyncio
import base64
import os
import socket
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

from dlrover_adapters.http import (
    HttpDialer,
    HttpLimits,
    HttpListener,
    bind,
)
from dlrover_core.errors import ConnectionLost
from dlrover_core.runtime.transport import Connection

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

TOKEN = "the-token-of-this-job"
BOUND_S = 30.0
LIMITS = HttpLimits(close_s=0.3)


def run(story: Callable[[], Awaitable[None]]) -> None:
    """Tell a story in an event loop of its own, within a bound."""

    async def told() -> None:
        await asyncio.wait_for(story(), BOUND_S)

    asyncio.run(told())


class Master:
    """A listener whose connections are echoed, or kept for the test to do with as it likes."""

    def __init__(
        self, sock: socket.socket | None = None, *, echo: bool = True, limits: HttpLimits = LIMITS, **more: Any
    ) -> None:
        self.listener = HttpListener(sock or bind(), TOKEN, limits=limits, **more)
        self._echo = echo
        self.came: asyncio.Queue[Connection] = asyncio.Queue()
        self.lost: asyncio.Queue[ConnectionLost] = asyncio.Queue()
        self.state: Mapping[str, Any] = {"state": "running", "step": 7}

    @property
    def address(self) -> str:
        """Where it listens."""
        return self.listener.address

    async def accept(self, connection: Connection) -> None:
        """Echo, or keep; note how it ended."""
        self.came.put_nowait(connection)
        try:
            while self._echo:
                await connection.send(await connection.receive())
            await asyncio.Event().wait()
        except ConnectionLost as lost:
            self.lost.put_nowait(lost)

    async def serve(self) -> Master:
        """Begin."""
        await self.listener.serve(self.accept, lambda: self.state)
        return self

    async def __aenter__(self) -> Master:  # noqa: PYI034  # typing.Self is of 3.11
        return await self.serve()

    async def __aexit__(self, *_: object) -> None:
        await self.listener.close()


@asynccontextmanager
async def dialer(token: str = TOKEN, **more: Any) -> AsyncIterator[HttpDialer]:
    """An agent's end, closed at the end."""
    found = HttpDialer(token, **more)
    try:
        yield found
    finally:
        await found.close()


async def raw(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A TCP connection that says what the test says."""
    host, _, port = address.rpartition(":")
    return await asyncio.open_connection(host, int(port))


async def upgraded(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A WebSocket of which the test writes every byte."""
    reader, writer = await raw(address)
    key = base64.b64encode(os.urandom(16)).decode()
    lines = ["GET /v1/agent HTTP/1.1", f"Host: {address}", "Upgrade: websocket", "Connection: Upgrade"]
    lines += [f"Sec-WebSocket-Key: {key}", "Sec-WebSocket-Version: 13", f"Authorization: Bearer {TOKEN}", "", ""]
    writer.write("\r\n".join(lines).encode())
    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 101 ")
    return reader, writer


async def ended(reader: asyncio.StreamReader) -> None:
    """Read until the other end ends it, politely or not."""
    with suppress(ConnectionResetError):
        while await reader.read(65536):
            pass
