"""One client that observes nodes over the wire."""

from __future__ import annotations

import asyncio
from collections import deque

from dlrover_backends.shared import wire
from dlrover_core.runtime.backend import Observation

UNREAD_MAX = 10_000


class Observer:
    """One client that observes. It may lag by `UNREAD_MAX` changes, then it is cut off and begins anew."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._unread: deque[Observation] = deque()
        self._wake = asyncio.Event()

    def tell(self, seen: Observation) -> None:
        """Queue one change."""
        if len(self._unread) >= UNREAD_MAX:
            self._writer.transport.abort()
            return
        self._unread.append(seen)
        self._wake.set()

    async def serve(self, reader: asyncio.StreamReader) -> None:
        """Send what is queued until the client goes away. Raises `ConnectionLost`."""
        draining, ending = asyncio.ensure_future(self._drain()), asyncio.ensure_future(reader.read(1))
        try:
            await asyncio.wait({draining, ending}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            draining.cancel()
            ending.cancel()
            await asyncio.gather(draining, ending, return_exceptions=True)

    async def _drain(self) -> None:
        while True:
            while self._unread:
                await wire.write(self._writer, "changed", self._unread.popleft())
            self._wake.clear()
            await self._wake.wait()
