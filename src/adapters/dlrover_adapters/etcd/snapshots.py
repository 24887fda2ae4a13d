"""Snapshots in etcd: parts that fit into a request, and a manifest written last that makes them one.

Every write is conditional on the leader's key, part by part: whoever was deposed half-way leaves parts without a manifest, which
nobody reads and the next writer removes. A snapshot is a cache: one that does not match its sum is passed over for the one
before it.
"""

from __future__ import annotations

import hashlib
from typing import Any, NamedTuple

import msgpack
import structlog

from dlrover_adapters.etcd.client import Etcd
from dlrover_adapters.etcd.errors import Compacted
from dlrover_adapters.etcd.keys import PART_BYTES, SEQ_DIGITS, Keys, end_of
from dlrover_core.errors import LogError, LogUnavailable
from dlrover_core.kernel.log import Snapshot

KEPT = 2
SUM_BYTES = 16
PARTS_MAX = 10_000  # what the key has digits for
# etcd takes 128 operations in one transaction; what is left over is removed with the next snapshot.
REMOVED_MAX = 100
TRIES = 3
_FORM = "s1"
_MANIFEST = "manifest"

log = structlog.get_logger("dlrover.etcd")


class _Manifest(NamedTuple):
    """What a whole snapshot consists of. ``sum`` is over schema and state."""

    seq: int
    schema: str
    size: int
    parts: int
    sum: bytes


class _Listing(NamedTuple):
    """Which snapshots have keys, which of them a manifest, as of one revision."""

    seqs: set[int]
    whole: set[int]
    revision: int


async def put(etcd: Etcd, keys: Keys, token: int, snapshot: Snapshot) -> bool:
    """Keep a snapshot, and of all of them the newest two. False: leadership is over.

    Raises `LogFull`, `LogUnavailable`, and `LogError` for a snapshot of more than `PARTS_MAX` parts.
    """
    size = len(snapshot.state)
    parts = -(-size // PART_BYTES)
    if parts > PARTS_MAX:
        raise LogError(f"job {keys.job!r}: a snapshot of {size} bytes is more than {PARTS_MAX} parts")
    fence = etcd.created(keys.leader, token)

    async def write(*operations: Any) -> bool:
        reply = await etcd.call("Txn", etcd.txn([fence], list(operations)))
        return bool(reply.succeeded)

    found = await _listed(etcd, keys)
    # One of the same event may lie there, whole or not: of it, nothing may be mixed with this one.
    if snapshot.seq in found.seqs and not await write(_removed(etcd, keys, snapshot.seq)):
        return False
    total = _begun(snapshot.schema)
    for number in range(parts):
        part = snapshot.state[number * PART_BYTES : (number + 1) * PART_BYTES]
        total.update(part)
        if not await write(etcd.put_op(keys.part(snapshot.seq, number), part)):
            return False
    manifest = _Manifest(snapshot.seq, snapshot.schema, size, parts, total.digest())
    kept = set(sorted(found.whole | {snapshot.seq})[-KEPT:]) | {snapshot.seq}
    old = sorted(found.seqs - kept)[:REMOVED_MAX]
    return await write(
        etcd.put_op(keys.manifest(snapshot.seq), bytes(msgpack.packb((_FORM, *manifest)))),
        *(_removed(etcd, keys, seq) for seq in old),
    )


async def latest(etcd: Etcd, keys: Keys, head_seq: int) -> Snapshot | None:
    """The newest whole snapshot that is not ahead of the log. Raises `LogUnavailable`."""
    for _ in range(TRIES):
        found = await _listed(etcd, keys)
        try:
            for seq in sorted((one for one in found.whole if one <= head_seq), reverse=True):
                try:
                    return await _read(etcd, keys, seq, found.revision)
                except _Damaged as damage:
                    log.warning(
                        "a snapshot is damaged, the one before it is taken", job=keys.job, seq=seq, error=str(damage)
                    )
        except Compacted:
            continue  # all is read at one revision, and that is gone meanwhile
        return None
    raise LogUnavailable(f"job {keys.job!r}: etcd compacts faster than a snapshot can be read")


class _Damaged(LogError):
    """Not what its manifest says."""


def _begun(schema: str) -> Any:
    return hashlib.blake2b(schema.encode() + b"\0", digest_size=SUM_BYTES)


def _removed(etcd: Etcd, keys: Keys, seq: int) -> Any:
    """The deletion of all of a snapshot."""
    base = f"{keys.snap}{seq:0{SEQ_DIGITS}d}/"
    return etcd.delete_op(base, end_of(base))


async def _listed(etcd: Etcd, keys: Keys) -> _Listing:
    reply = await etcd.call("Range", etcd.under(keys.snap, keys_only=True))
    seqs, whole = set[int](), set[int]()
    for kv in reply.kvs:
        digits, _, piece = kv.key.decode()[len(keys.snap) :].partition("/")
        if digits.isdecimal():
            seqs.add(int(digits))
            if piece == _MANIFEST:
                whole.add(int(digits))
    return _Listing(seqs, whole, reply.header.revision)


async def _read(etcd: Etcd, keys: Keys, seq: int, revision: int) -> Snapshot:
    """A snapshot as it was at ``revision``. Raises `_Damaged`, `Compacted`."""
    manifest = _manifest(await _value(etcd, keys.manifest(seq), revision))
    total, parts = _begun(manifest.schema), []
    for number in range(manifest.parts):
        part = await _value(etcd, keys.part(seq, number), revision)
        total.update(part)
        parts.append(part)
    state = b"".join(parts)
    if (manifest.seq, manifest.size, manifest.sum) != (seq, len(state), total.digest()):
        raise _Damaged("its bytes do not match their sum")
    return Snapshot(seq, manifest.schema, state)


async def _value(etcd: Etcd, key: str, revision: int) -> bytes:
    reply = await etcd.call("Range", etcd.range(key, revision=revision))
    if not reply.kvs:
        raise _Damaged(f"{key} is missing")
    return bytes(reply.kvs[0].value)


def _manifest(raw: bytes) -> _Manifest:
    try:
        form, *fields = msgpack.unpackb(raw)
        found = _Manifest(*fields)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise _Damaged(f"its manifest cannot be read: {error}") from error
    if form != _FORM or [type(one) for one in found] != [int, str, int, int, bytes]:
        raise _Damaged("its manifest is of another form")
    return found
