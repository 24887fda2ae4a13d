"""Deleting what is left of a log that was erased. A mark takes the place of its head first: beside it, batches are no log.

So an erase that ends half way leaves nothing that could be taken for a log: readers say that it was erased, and the next leader
deletes the rest before it writes. Batches that lack a head without that mark are a damaged log, and stay.
"""

from __future__ import annotations

from typing import Any

from dlrover_adapters.etcd.client import Etcd
from dlrover_adapters.etcd.keys import Keys, end_of

# Batches deleted by one transaction: etcd applies it whole, and everybody waits for it.
AT_ONCE = 2_000


async def remainder(etcd: Etcd, keys: Keys, conditions: list[Any]) -> bool:
    """Delete what is left of an erased log, while all conditions hold; did they hold to the end? Raises as `Etcd.call` does."""
    if not (await etcd.call("Range", etcd.range(keys.erased, keys_only=True))).kvs:
        return True
    if not await batches(etcd, keys, conditions):
        return False
    return bool((await etcd.call("Txn", etcd.txn(conditions, [etcd.delete_op(keys.erased)]))).succeeded)


async def batches(etcd: Etcd, keys: Keys, conditions: list[Any]) -> bool:
    """Delete all batches of a job, while all conditions hold; did they hold to the end?

    Oldest first: etcd finds the newest of a range only by reading all of it. Raises as `Etcd.call` does.
    """
    end = end_of(keys.log)
    while True:
        page = await etcd.call("Range", etcd.range(keys.log, end=end, limit=AT_ONCE, keys_only=True))
        if not page.kvs:
            return True
        gone = etcd.delete_op(keys.log, page.kvs[-1].key.decode() + "\0")
        done = await etcd.call("Txn", etcd.txn(conditions, [gone]))
        if not done.succeeded:
            return False
        if not page.more:
            return True
