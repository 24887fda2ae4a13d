"""Nodes of the local backend, for its tests: programs that say what becomes of them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

TOKEN = 5
BOUND_S = 30.0


class Lines:
    """What processes write into a pipe with a name, without anybody polling: each line is read once."""

    def __init__(self, path: Path) -> None:
        self.path = path

    async def __aenter__(self) -> asyncio.StreamReader:
        reader = asyncio.StreamReader()
        file = os.fdopen(os.open(self.path, os.O_RDWR | os.O_NONBLOCK), "rb", buffering=0)
        protocol = asyncio.StreamReaderProtocol(reader)
        self._transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, file)
        return reader

    async def __aexit__(self, *_: object) -> None:
        self._transport.close()


class Fifo(Lines):
    """Such a pipe called ``said``, made here."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / "said")
        os.mkfifo(self.path)


def run(story: Callable[[], Awaitable[None]]) -> None:
    """Tell a story in an event loop of its own, within a bound."""

    async def told() -> None:
        await asyncio.wait_for(story(), BOUND_S)

    asyncio.run(told())
