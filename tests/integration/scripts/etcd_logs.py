"""How stories of the etcd log are told."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine
from contextlib import AbstractAsyncContextManager

from dlrover_adapters.etcd.log import EtcdLog
from dlrover_core.testing.log_conformance import CODEC

STORY_S = 60.0


def run(story: Coroutine[object, object, None]) -> None:
    """Tell a story in an event loop of its own."""
    asyncio.run(asyncio.wait_for(story, STORY_S))


def opened(url: str) -> AbstractAsyncContextManager[EtcdLog]:
    """A log to be closed."""

    @contextlib.asynccontextmanager
    async def whole() -> AsyncIterator[EtcdLog]:
        log = await EtcdLog.open_url(url, CODEC)
        try:
            yield log
        finally:
            await log.close()

    return whole()
