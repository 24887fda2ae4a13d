"""SQLite logs for tests."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from dlrover_core.logs.sqlite import SqliteLog
from dlrover_core.testing.log_conformance import CODEC


def run(story: Coroutine[object, object, None]) -> None:
    """Tell a story in an event loop of its own."""
    asyncio.run(asyncio.wait_for(story, 60))


def opened(path: Path, reserve_bytes: int = 0) -> AbstractAsyncContextManager[SqliteLog]:
    """A log to be closed."""

    @contextlib.asynccontextmanager
    async def whole() -> AsyncIterator[SqliteLog]:
        log = await SqliteLog.open(path, CODEC, reserve_bytes=reserve_bytes)
        try:
            yield log
        finally:
            await log.close()

    return whole()
