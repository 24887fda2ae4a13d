"""Calls that are given up half-way must not hurt the etcd: before 3.5.5 it panics where a transaction that only reads is."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

from tools.etcd_cluster import Cluster

from dlrover_adapters.etcd import EtcdLog
from dlrover_core.testing.log_conformance import CODEC, JOB, Pen, seqs

BATCHES, READERS = 60, 300


def test_readers_that_stop_early(etcd_server: Cluster, etcd_prefix: str) -> None:
    """Hundreds of readers stop with a page on its way, or are cancelled; the etcd serves on (etcd-io/etcd#14110)."""

    async def story() -> None:
        log = await EtcdLog.open_url(etcd_server.url(etcd_prefix), CODEC)
        try:
            pen = Pen(await log.lead(JOB, "a"))
            for _ in range(BATCHES):
                await pen.write(size=50_000)

            async def read_a_little(number: int) -> None:
                async with aclosing(log._reader.batches(JOB)) as batches:
                    async for batch in batches:
                        if batch.last_seq > number % BATCHES:
                            break

            for first in range(0, READERS, 20):
                readers = [asyncio.ensure_future(read_a_little(first + one)) for one in range(20)]
                await asyncio.wait(readers, return_when=asyncio.FIRST_COMPLETED)
                for reader in readers:
                    reader.cancel()
                await asyncio.gather(*readers, return_exceptions=True)
            assert await seqs(log.read(JOB)) == list(range(1, BATCHES + 1))
        finally:
            await log.close()

    asyncio.run(story())
