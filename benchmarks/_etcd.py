"""What the benchmarks on etcd have in common: a cluster on loopback, the raw client, and events as a job makes them."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

from _bench import say
from bench_replay import Historian
from tools.etcd_cluster import Cluster, EtcdError

from dlrover_adapters.etcd.address import parse
from dlrover_adapters.etcd.client import Etcd
from dlrover_core.job.state import CODEC
from dlrover_core.kernel.events import Batch, Record
from dlrover_core.kernel.log import Appended, Leadership, Outcome, Snapshot

__all__ = ["Cluster", "Etcd", "EtcdError"]  # what others take from here

BATCH_EVENTS = 64
TEMPLATE_EVENTS = 20_000


class NotMeasurable(Exception):
    """A step of the benchmark failed: there is nothing to measure."""


class _Recorder:
    """A leadership that keeps what is appended."""

    token = 1

    def __init__(self) -> None:
        self.records: list[Record] = []

    async def append(self, batch: Batch) -> Outcome:
        self.records += batch.records
        return Appended(batch.last_seq)

    async def snapshot(self, snapshot: Snapshot) -> None:
        """Ignore the snapshot."""


def _template() -> Sequence[Record]:
    """The records of a history that `bench_replay` makes through the real engine."""
    recorder: Any = _Recorder()
    lead: Leadership = recorder
    asyncio.run(Historian(lead, 1, TEMPLATE_EVENTS).write())
    return tuple(recorder.records)


_made: list[Sequence[Record]] = []


def prepare() -> None:
    """Make what `batches` is made of: outside of any event loop, before anything is measured."""
    if not _made:
        _made.append(_template())


def batches(token: int, events: int, size: int = BATCH_EVENTS, after: int = 0) -> Iterator[Batch]:
    """Batches of ``size`` events of a real history, one after another; where it is used up it begins anew."""
    template, counter = _made[0], after // size
    for first in range(after, after + events, size):
        counter += 1
        records = []
        for seq in range(first + 1, min(first + size, after + events) + 1):
            one = template[(seq - 1) % len(template)]
            cause = one.cause + (seq - one.seq) if one.cause else 0
            records.append(one._replace(seq=seq, token=token, cause=cause))
        yield CODEC.batch(token, counter, records)


async def appended(lead: Leadership, those: Sequence[Batch]) -> float:
    """Append one after another; the seconds it took."""
    began = time.perf_counter()
    for batch in those:
        outcome = await lead.append(batch)
        if type(outcome) is not Appended:
            raise NotMeasurable(f"a batch was not appended: {outcome}")
    return time.perf_counter() - began


@contextlib.asynccontextmanager
async def raw(url: str) -> AsyncIterator[Etcd]:
    """The client that the log uses, alone."""
    etcd = Etcd(parse(url))
    try:
        yield etcd
    finally:
        await etcd.close()


@contextlib.contextmanager
def cluster(members: int, *extra: str) -> Iterator[Cluster]:
    """Start an etcd, and stop it after the block."""
    with Cluster(members, extra=extra) as etcd:
        say(f"etcd {etcd.version}, {members} member{'s' if members > 1 else ''} on loopback")
        yield etcd
