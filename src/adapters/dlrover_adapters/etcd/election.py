"""How a leader is elected: the one key ``leader``, bound to a lease, created when it does not exist.

The revision that creates it is the fencing token: etcd's revisions never fall and none is given twice. Who stands by holds
no lease; it watches the key, looks again whenever the watch says anything or nothing for too long, and campaigns when the key
is gone. A campaign that is cancelled or lost revokes its lease: what of it is still on its way then finds no lease to lean on.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
from collections.abc import Collection
from typing import Any, NamedTuple

import structlog

from dlrover_adapters.etcd import deleting
from dlrover_adapters.etcd.client import Closed, Compacted, Denied, Etcd, LeaseGone
from dlrover_adapters.etcd.keys import Head, Keys, Leader
from dlrover_core.errors import LogError, LogFull, LogUnavailable, NotLeading

# Revoking is a courtesy: a lease that is left behind expires.
REVOKE_S = 1.0
PAUSE_FIRST_S, PAUSE_MAX_S = 0.05, 1.0
DELETED = 1  # mvccpb.Event.DELETE

log = structlog.get_logger("dlrover.etcd")


class Won(NamedTuple):
    """An election won: the token, the lease with its seconds, when it was asked for, and the log's head as it then was."""

    token: int
    lease: int
    ttl_s: float
    asked_at: float
    head: Head
    head_revision: int


class _Held(NamedTuple):
    """Who leads at ``revision``; ``created`` is 0 where nobody does."""

    created: int
    leader: Leader
    revision: int


async def campaign(etcd: Etcd, keys: Keys, holder: str, ttl_s: float, *, wait: bool, dead: Collection[str] = ()) -> Won:
    """Win the leadership of a job; with ``wait`` whenever it becomes free, however long etcd cannot be reached meanwhile.

    ``holder`` is unique per process: a campaign sent twice recognises its own key by it and by the lease. ``dead`` are holders
    known to be so. Raises `NotLeading`; `LogError` where the token does not rise; without ``wait`` `LogUnavailable`.
    """
    pause, said = PAUSE_FIRST_S, ""
    while True:
        try:
            held = await _look(etcd, keys)
            if held.created and held.leader.holder in dead:
                await _depose(etcd, keys, held.created)
                held = held._replace(created=0)
            if not held.created:
                won = await _try(etcd, keys, holder, ttl_s)
                if isinstance(won, Won):
                    return won
                held = won
            if not wait:
                raise NotLeading(keys.job, held.leader.holder, held.leader.address)
            if held.created:
                await _until_touched(etcd, keys, held.revision)
            pause, said = PAUSE_FIRST_S, ""
        except Closed:
            raise
        except (LogUnavailable, LogFull, Compacted, LeaseGone, Denied) as error:
            if not wait:
                raise error if isinstance(error, (LogUnavailable, LogFull)) else LogUnavailable(str(error)) from error
            if not said:
                said = str(error)
                log.warning("standing by without etcd", job=keys.job, reason=said)
            await asyncio.sleep(pause * (0.5 + random.random()))
            pause = min(PAUSE_MAX_S, pause * 2)


async def revoke(etcd: Etcd, lease: int, timeout_s: float = REVOKE_S) -> None:
    """Give a lease back, and with it all keys bound to it. What etcd does not hear of expires by itself."""
    with contextlib.suppress(LogError):
        await etcd.call("LeaseRevoke", etcd.rpc.LeaseRevokeRequest(ID=lease), timeout_s=timeout_s)


async def _look(etcd: Etcd, keys: Keys) -> _Held:
    reply = await etcd.call("Range", etcd.range(keys.leader))
    return _held(reply.kvs, reply.header.revision)


def _held(kvs: Any, revision: int) -> _Held:
    if not kvs:
        return _Held(0, Leader(""), revision)
    return _Held(kvs[0].create_revision, Leader.unpacked(kvs[0].value), revision)


async def _depose(etcd: Etcd, keys: Keys, created: int) -> None:
    """Delete the key of this very leadership, not of one that came after it."""
    await etcd.call("Txn", etcd.txn([etcd.created(keys.leader, created)], [etcd.delete_op(keys.leader)]))


async def _try(etcd: Etcd, keys: Keys, holder: str, ttl_s: float) -> Won | _Held:
    """One campaign: `Won`, or who was faster. What is left of an erased log of the name is deleted before it is won."""
    asked_at = asyncio.get_running_loop().time()
    granted = await etcd.call("LeaseGrant", etcd.rpc.LeaseGrantRequest(TTL=math.ceil(ttl_s)))
    won: Won | _Held | None = None
    try:
        claimed = await _claim(etcd, keys, holder, granted, asked_at)
        if isinstance(claimed, Won) and not claimed.head_revision:
            ours = [etcd.created(keys.leader, claimed.token)]
            if not await deleting.remainder(
                etcd, keys, ours
            ):  # it took longer than the lease: the next campaign goes on
                return await _look(etcd, keys)
        won = claimed
        return won
    finally:
        if not isinstance(won, Won):
            await asyncio.shield(revoke(etcd, granted.ID))


async def _claim(etcd: Etcd, keys: Keys, holder: str, granted: Any, asked_at: float) -> Won | _Held:
    put = etcd.put_op(keys.leader, Leader(holder).packed(), granted.ID)
    look = [etcd.get_op(etcd.range(keys.leader)), etcd.get_op(etcd.range(keys.head))]
    request = etcd.txn([etcd.created(keys.leader, 0)], [put, etcd.put_op(keys.name, b""), *look], look)
    reply = await etcd.call("Txn", request)
    leader, head = (response.response_range for response in reply.responses[-2:])
    if not leader.kvs or leader.kvs[0].lease != granted.ID:
        return _held(leader.kvs, reply.header.revision)
    token = leader.kvs[0].create_revision
    found = Head.unpacked(head.kvs[0].value) if head.kvs else Head()
    if found.token >= token:
        raise LogError(
            f"job {keys.job!r}: the log's last batch bears token {found.token}, etcd's revision is only {token}: it was "
            "restored from an older backup or by other means than its snapshots; use another --job-id, or another prefix"
        )
    revision = head.kvs[0].mod_revision if head.kvs else 0
    return Won(token, granted.ID, float(granted.TTL), asked_at, found, revision)


async def _until_touched(etcd: Etcd, keys: Keys, revision: int) -> None:
    """Until something happens to the leader's key after ``revision``, or nothing for so long that it is better to look."""
    responses = etcd.watch(keys.leader, revision + 1)
    try:
        async for response in responses:
            if not response.created and (not response.events or any(one.type == DELETED for one in response.events)):
                return
    finally:
        await responses.aclose()
