"""Several reads at one revision, without a transaction.

Before 3.5.5 a member panics when its client gives up on a transaction that only reads, by cancelling it or by its deadline
(etcd-io/etcd#14110): a reader that stops early would end the etcd. And before 3.4.20 and 3.5.2 one without space refuses
every transaction, also such. Ranges may be given up, and are always answered. A transaction that may write goes through
etcd's log whoever waits for it: there neither can happen.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dlrover_adapters.etcd.client import Etcd
from dlrover_adapters.etcd.errors import Compacted
from dlrover_core.errors import LogUnavailable

ATTEMPTS = 3


async def look(etcd: Etcd, ranges: Sequence[Any]) -> tuple[int, list[Any]]:
    """A revision, and the key-values of every range as they then were. Raises as `Etcd.call` does, but for `Compacted`."""
    first, *others = ranges
    attempt = 0
    while True:
        reply = await etcd.call("Range", first)
        found = [reply.kvs]
        try:
            for other in others:
                request = type(other)()
                request.CopyFrom(other)
                request.revision = reply.header.revision
                found.append((await etcd.call("Range", request)).kvs)
        except Compacted as error:
            # Somebody compacts up to the newest revision, and was faster.
            attempt += 1
            if attempt == ATTEMPTS:
                raise LogUnavailable(f"{etcd.address.shown}: compacted between two reads, again and again") from error
        else:
            return reply.header.revision, found
