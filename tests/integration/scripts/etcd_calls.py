"""A connection to etcd, for tests that call it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine

import pytest

from dlrover_adapters.etcd.address import parse
from dlrover_adapters.etcd.client import Etcd
from dlrover_adapters.etcd.log import EtcdLog
from dlrover_adapters.etcd.protocol import load
from dlrover_core.errors import SpecError
from dlrover_core.testing.log_conformance import CODEC

STORY_S = 60.0
RPC = load().rpc


def run(story: Coroutine[object, object, None]) -> None:
    """Tell a story in an event loop of its own; it leaves no task behind."""

    async def told() -> None:
        await asyncio.wait_for(story, STORY_S)
        left = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.wait(left, timeout=1) if left else None
        assert not [one for one in left if not one.done()]

    asyncio.run(told())


@contextlib.asynccontextmanager
async def connected(url: str) -> AsyncIterator[Etcd]:
    """A client to be closed."""
    etcd = Etcd(parse(url))
    try:
        yield etcd
    finally:
        await etcd.close()


async def refusal(url: str) -> str:
    """What opening a log says that cannot be opened."""
    with pytest.raises(SpecError) as refused:
        await (await EtcdLog.open_url(url, CODEC)).close()
    return str(refused.value)
