"""The `Transport` port: frames between agents and masters.

A connection carries whole frames of at most `FRAME_BYTES_MAX`, in order, until it is lost. Authentication is the
transport's: a connection that reaches `accept` has shown the job's token. The agent copes with lost, repeated and reordered
connections; a transport retries nothing by itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

from dlrover_core.errors import ConnectionLost
from dlrover_core.runtime.within import within

FRAME_BYTES_MAX = 1024 * 1024


class Connection(Protocol):
    """One live connection, at either end."""

    @property
    def peer(self) -> str:
        """The other end, for logs."""
        ...

    async def send(self, frame: bytes) -> None:
        """Send one frame. Raises `ConnectionLost`. Waits while the peer reads slowly, within a bound of the transport's own."""
        ...

    async def receive(self) -> bytes:
        """The next frame. Raises `ConnectionLost`."""
        ...

    async def close(self) -> None:
        """End the connection. Idempotent, never raises."""
        ...


async def receive_within(connection: Connection, seconds: float) -> bytes:
    """The next frame. Raises `ConnectionLost` if none comes in time: a stopped process accepts connections, and is silent."""
    try:
        return await within(seconds, connection.receive())
    except asyncio.TimeoutError as error:
        raise ConnectionLost(f"{connection.peer} said nothing within {seconds:g} s") from error


Accept = Callable[[Connection], Awaitable[None]]
Status = Callable[[], Mapping[str, Any]]
# From a person's command, as plain values, to its record. Raises `MalformedMessage`, `Refused`, `NotLeading`.
Obey = Callable[[object], Awaitable[int]]
# A packed page of records (`records`): after a number, of at most so many bytes, waiting for at most so many seconds.
HandOut = Callable[[int, int, float], Awaitable[bytes]]


class Dialer(Protocol):
    """The agent's end."""

    async def connect(self, address: str) -> Connection:
        """A connection to the master at ``address``. Raises `ConnectionLost` (try again) and `TokenRefused` (do not)."""
        ...

    async def close(self) -> None:
        """Release everything."""
        ...


class Listener(Protocol):
    """The master's end. It may be opened long before it serves: connections wait meanwhile."""

    @property
    def address(self) -> str:
        """Where agents reach it, ``host:port``."""
        ...

    async def serve(
        self, accept: Accept, status: Status, obey: Obey | None = None, hand_out: HandOut | None = None
    ) -> None:
        """Accept connections, each in a task of its own that runs ``accept``; answer status queries from ``status``.

        ``obey`` carries out commands of people, where the transport takes any. ``hand_out`` serves readers of the log.
        """
        ...

    async def close(self) -> None:
        """Close every connection and stop. Idempotent."""
        ...
