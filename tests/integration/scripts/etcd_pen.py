"""A job's log on a real etcd, for tests that read it: a pen that writes batches, and a reader."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import pytest
from tools.etcd_cluster import Cluster

from dlrover_adapters.etcd.address import parse
from dlrover_adapters.etcd.client import Etcd
from dlrover_adapters.etcd.keys import Head, Keys
from dlrover_adapters.etcd.protocol import load
from dlrover_adapters.etcd.reading import Reader
from dlrover_core.kernel.events import Batch, Record
from dlrover_core.logs.archive import Archive, LocalStore
from dlrover_core.testing.log_conformance import CODEC, make_batch

JOB = "job/1.a"
STORY_S = 60.0
E = TypeVar("E", bound=Exception)


class Pen:
    """Writes batches as a leader does, but for the fence."""

    def __init__(self, etcd: Etcd, job: str = JOB) -> None:
        self.etcd, self.keys = etcd, Keys(etcd.address.prefix, job)
        self.seq = self.counter = 0

    def draft(self, events: int = 1, size: int = 8) -> Batch:
        """The next batch, not yet written."""
        self.counter += 1
        batch = make_batch(1, self.counter, self.seq + 1, events, size)
        self.seq = batch.last_seq
        return batch

    async def write(self, events: int = 1, size: int = 8, count: int = 1) -> None:
        """Append so many batches."""
        while count > 0:
            fitting = min(count, 64, 1024 // events, 2**20 // (events * (size + 16)))
            batches = [self.draft(events, size) for _ in range(max(1, fitting))]
            await self.put({self.keys.batch(batch.last_seq): batch.payload for batch in batches})
            count -= len(batches)

    async def put(self, values: dict[str, bytes]) -> None:
        """Put what lies there, and the head."""
        values = values | {self.keys.head: Head(self.seq, 1, self.counter).packed()}
        await self.etcd.call("Txn", self.etcd.txn([], [self.etcd.put_op(*each) for each in values.items()]))

    async def delete(self, first: int, last: int) -> None:
        """Delete the batches that end from ``first`` to ``last``."""
        operation = self.etcd.delete_op(self.keys.batch(first), self.keys.batch(last + 1))
        await self.etcd.call("Txn", self.etcd.txn([], [operation]))


Story = Callable[[Pen, Reader], Coroutine[Any, Any, None]]
Tell = Callable[..., None]


@pytest.fixture(autouse=True, scope="module")
def _loaded() -> None:
    """The messages are built before any loop runs: that takes longer than a callback may, and `EtcdLog` does it in a thread."""
    load()


@pytest.fixture
def tell(etcd_server: Cluster, etcd_prefix: str) -> Tell:
    """Tells a story to a log of its own: a writer, and a reader over a client of class ``kind``, with an archive or none."""

    def told(story: Story, archive: Path | None = None, kind: type[Etcd] = Etcd) -> None:
        async def run() -> None:
            address = parse(etcd_server.url(etcd_prefix))
            writing, etcd = Etcd(address), kind(address)
            archive_of = lambda job: Archive(LocalStore(archive), job, CODEC, 1) if archive else None  # noqa: E731
            try:
                await story(Pen(writing), Reader(etcd, CODEC, archive_of))
            finally:
                await etcd.close()
                await writing.close()

        asyncio.run(asyncio.wait_for(run(), STORY_S))

    return told


async def seqs(records: AsyncIterator[Record], upto: int | None = None) -> list[int]:
    """The sequence numbers of a stream, to its end or to ``upto``."""
    found = []
    async for record in records:
        found.append(record.seq)
        if record.seq == upto:
            break
    return found


def counting(first: int, last: int) -> list[int]:
    """The numbers from ``first`` to ``last``, both included."""
    return list(range(first, last + 1))


async def before(records: AsyncIterator[Record], error: type[E]) -> tuple[list[int], E]:
    """What a stream gives before it ends with an error, and the error."""
    found: list[int] = []
    try:
        async for record in records:
            found.append(record.seq)  # noqa: PERF401  # what came before the error counts
    except error as caught:
        return found, caught
    pytest.fail(f"no {error.__name__} after {found[-1:]}")
