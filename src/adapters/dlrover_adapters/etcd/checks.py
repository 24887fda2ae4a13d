"""Can this etcd serve us? Asked before anything depends on it, and said in words that help.

At open, what reading needs: an etcd of 3.4 or newer that answers, and a watch that tells its progress, without which silence and
loss look alike. Before leading, what writing needs: our transaction in its shape, on keys of the moment that hang on a lease.
"""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import Mapping
from typing import Any

import structlog

from dlrover_adapters.etcd import probe
from dlrover_adapters.etcd.client import Denied, Etcd, Status, Unsupported
from dlrover_adapters.etcd.errors import at_start
from dlrover_core.errors import CoreError, LogError, LogUnavailable, SpecError

OPEN_S = 10.0
LOOK_AGAIN_S = 2.0
PROGRESS_S = 2.0
PAUSE_S = 0.1
OLDEST = (3, 4)
# etcd's announcement of 2022: data may differ between members after a crash under load.
CORRUPTING = {(3, 5, 0), (3, 5, 1), (3, 5, 2)}
CHECK_TTL_S = 10
# etcd's default quota is 2 GiB; what a member's own is, it says from 3.6 on.
DB_BYTES_FULL = int(0.8 * 2 * 1024**3)

log = structlog.get_logger("dlrover.etcd")


async def reading(etcd: Etcd) -> None:
    """At open. Raises `SpecError` for what cannot become right by waiting, `LogUnavailable` after `OPEN_S`."""
    await asyncio.to_thread(probe.certificates, etcd.address)
    try:
        statuses = await _answering(etcd)
        for endpoint, status in statuses.items():
            if isinstance(status, Status):
                _require_version(endpoint, status.version)
        await _require_progress(etcd)
    except (Denied, Unsupported) as error:
        raise at_start(error) from error


async def writing(etcd: Etcd) -> None:
    """Before leading. Raises `SpecError` where this user may not write, or this is no etcd; `LogUnavailable`."""
    try:
        await _require_transactions(etcd)
        await _warn(etcd)
    except (Denied, Unsupported) as error:
        raise at_start(error) from error


# ---- does anybody answer?


async def _answering(etcd: Etcd) -> Mapping[str, Status | CoreError]:
    """What the members say, as soon as one does; the majority answers too."""
    loop = asyncio.get_running_loop()
    deadline, again = loop.time() + OPEN_S, loop.time()
    request = etcd.range(_key(etcd, "open"), keys_only=True)
    found: dict[str, probe.Finding] = {}
    while True:
        statuses = await etcd.statuses(timeout_s=2.0)
        for status in statuses.values():
            if isinstance(status, (Denied, Unsupported)):
                raise status
        why: LogError | None = None
        if any(isinstance(one, Status) for one in statuses.values()):
            try:
                await etcd.call("Range", request, timeout_s=max(0.1, deadline - loop.time()))
            except LogUnavailable as error:
                why = error
            else:
                return statuses
        elif loop.time() >= again:
            found = await _findings(etcd)
            again = loop.time() + LOOK_AGAIN_S
            for endpoint, finding in found.items():
                if finding.ours:
                    raise SpecError("log", f"etcd at {endpoint} cannot be spoken to: {finding.reason}")
        if loop.time() >= deadline:
            raise LogUnavailable(_unanswered(etcd, statuses, found, why))
        await asyncio.sleep(PAUSE_S)


async def _findings(etcd: Etcd) -> dict[str, probe.Finding]:
    endpoints = etcd.address.endpoints
    asked = [asyncio.to_thread(probe.find, etcd.address, endpoint) for endpoint in endpoints]
    found = zip(endpoints, await asyncio.gather(*asked), strict=True)
    return {endpoint: finding for endpoint, finding in found if finding is not None}


def _unanswered(
    etcd: Etcd, statuses: Mapping[str, Status | CoreError], found: dict[str, probe.Finding], why: LogError | None
) -> str:
    """Every endpoint and what is the matter with it."""
    told = []
    for endpoint, status in statuses.items():
        if isinstance(status, Status):
            told.append(f"{endpoint} lives, but has not the majority with it")
        else:
            told.append(f"{endpoint}: {found[endpoint].reason}" if endpoint in found else str(status))
    last = f" ({why})" if why is not None else ""
    return f"etcd does not answer at {etcd.address.shown}: {'; '.join(told)}{last}"


# ---- is it one?


def _require_version(endpoint: str, version: str) -> None:
    found = _version(version)
    if not found:
        raise SpecError("log", f"what answers at {endpoint} tells no version: it only imitates etcd; an etcd is needed")
    if found[:2] < OLDEST:
        raise SpecError("log", f"etcd at {endpoint} is {version}: 3.4 is the oldest that can serve, upgrade it")


def _version(text: str) -> tuple[int, ...]:
    found = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", text)
    return tuple(int(one or 0) for one in found.groups()) if found else ()


async def _require_progress(etcd: Etcd) -> None:
    """A watch that is asked for its progress answers. What withholds that would hide lost events from followers."""
    for _ in range(2):
        if await etcd.progress(_key(etcd, "watch"), PROGRESS_S):
            return
        # Or is it merely slow? Then this fails, and not the check.
        await etcd.call("Range", etcd.range(_key(etcd, "open"), keys_only=True))
    raise SpecError(
        "log",
        f"what answers at {etcd.address.shown} does not tell a watch's progress, as etcd's grpc-proxy does not: "
        "name the members of the cluster themselves",
    )


async def _require_transactions(etcd: Etcd) -> None:
    """Our append in its shape, twice: it must land, and then not land and say why; and go with its lease."""
    one, two = (_key(etcd, f"{uuid.uuid4().hex}/{name}") for name in ("leader", "head"))
    granted = await etcd.call("LeaseGrant", etcd.rpc.LeaseGrantRequest(TTL=CHECK_TTL_S))
    looks = [etcd.get_op(etcd.range(key)) for key in (one, two, one + "-")]
    request = etcd.txn(
        [etcd.created(one, 0), etcd.modified(two, 0)],
        [etcd.put_op(one, b"1", granted.ID), etcd.put_op(two, b"2", granted.ID), looks[0]],
        looks,
    )
    try:
        first = await etcd.call("Txn", request)
        again = await etcd.call("Txn", request)
        _require(
            first.succeeded or _values(again) == [b"1", b"2", None],
            "a condition that holds is taken for one that fails",
        )
        _require(not again.succeeded, "a transaction lands though its condition fails")
        _require(_values(again) == [b"1", b"2", None], "the else-branch of a transaction does not tell what lies there")
        created = again.responses[0].response_range.kvs[0].create_revision
        _require(
            not first.succeeded or created == first.header.revision,
            "keys are not created at their transaction's revision",
        )
        ours = etcd.txn([etcd.created(one, created), etcd.modified(two, created)], [etcd.delete_op(two)], looks)
        _require((await etcd.call("Txn", ours)).succeeded or (await _gone(etcd, two)), "revisions cannot be compared")
        _require(await etcd.keep_alive(granted.ID, timeout_s=CHECK_TTL_S / 2) > 0, "a lease cannot be renewed")
    finally:
        await _revoke(etcd, granted.ID)
    _require(await _gone(etcd, one), "a key outlives its lease")


async def _revoke(etcd: Etcd, lease: int) -> None:
    try:
        await etcd.call("LeaseRevoke", etcd.rpc.LeaseRevokeRequest(ID=lease))
    except LogUnavailable as error:
        log.info("a lease is left to expire", reason=str(error))


async def _gone(etcd: Etcd, key: str) -> bool:
    return not (await etcd.call("Range", etcd.range(key))).kvs


def _values(reply: Any) -> list[bytes | None]:
    return [one.response_range.kvs[0].value if one.response_range.kvs else None for one in reply.responses]


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise SpecError("log", f"what answers is no etcd, or does only imitate its transactions: {otherwise}")


# ---- is it well?


async def _warn(etcd: Etcd) -> None:
    """What a leader should know, and its operator do something about."""
    for endpoint, status in (await etcd.statuses()).items():
        if not isinstance(status, Status):
            continue
        if _version(status.version) in CORRUPTING:
            log.warning(
                "this etcd can lose data when it is killed under load",
                endpoint=endpoint,
                version=status.version,
                remedy="upgrade to 3.5.3 or newer",
            )
        full = int(0.8 * status.quota_bytes) or DB_BYTES_FULL
        if status.db_bytes > full:
            log.warning(
                "etcd is nearly full",
                endpoint=endpoint,
                db_bytes=status.db_bytes,
                quota_bytes=status.quota_bytes or "its default is 2 GiB",
                remedy="have it compact by itself (--auto-compaction-retention), defragment it, or raise its quota",
            )


def _key(etcd: Etcd, name: str) -> str:
    return f"{etcd.address.prefix}/v1/check/{name}"
