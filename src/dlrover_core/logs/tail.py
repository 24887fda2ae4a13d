"""The tail file: a second copy of what the write-ahead log holds and the database does not yet.

SQLite drops, without a word, every WAL frame behind a damaged one: acknowledged batches would vanish and the log would
look whole. So each batch is appended here before it is committed there, and the file is started anew once a checkpoint has
moved everything into the database. It is never synced: `synchronous=FULL` carries a power cut, this file carries damage.

An entry is ``magic, length, crc of the payload, crc of these three`` and the payload. The header has a checksum of its
own, so that a torn end (the write that a kill interrupted; never acknowledged) is told from damage in the middle, behind
which the scan finds its feet again.
"""

from __future__ import annotations

import enum
import os
import struct
import zlib
from pathlib import Path
from typing import NamedTuple

from dlrover_core.kernel.events import BATCH_BYTES_MAX
from dlrover_core.logs.place import private_file

_HEAD = struct.Struct("<4sII")
_CRC = struct.Struct("<I")
_MAGIC = b"DLT1"
HEAD_BYTES = _HEAD.size + _CRC.size
# A batch may exceed the engine's bound by its header; anything far beyond is a damaged length.
_LENGTH_MAX = 2 * BATCH_BYTES_MAX


class RepairKind(enum.Enum):
    """What was found, and mended."""

    RESTORED = "restored"  # batches that the database had lost were put back
    REWRITTEN = "rewritten"  # a row whose checksum failed was written again from its copy
    HEALED = "healed"  # a reader served a copy in place of an unreadable row; the row is as it was
    TORN = "torn"  # an unfinished write at the end was cut off
    DAMAGED = "damaged"  # part of the second copy, or the mark, is unreadable; nothing was lost by it


class Repair(NamedTuple):
    """One thing found wrong in the storage and mended. ``first`` and ``last`` are sequence numbers, 0 where none apply."""

    job: str
    kind: RepairKind
    first: int
    last: int
    detail: str


class Damage(NamedTuple):
    """A stretch of a tail file that is no entry. ``torn``: nothing whole follows it."""

    offset: int
    length: int
    torn: bool


class Scan(NamedTuple):
    """What a tail file holds."""

    payloads: tuple[bytes, ...]
    damages: tuple[Damage, ...]


def pack(payload: bytes) -> bytes:
    """One entry."""
    head = _HEAD.pack(_MAGIC, len(payload), zlib.crc32(payload))
    return head + _CRC.pack(zlib.crc32(head)) + payload


def scan(data: bytes) -> Scan:
    """Every whole entry, in order, and every stretch that is none."""
    payloads: list[bytes] = []
    damages: list[Damage] = []
    at = 0
    while at < len(data):
        payload = _entry(data, at)
        if payload is not None:
            payloads.append(payload)
            at += HEAD_BYTES + len(payload)
            continue
        after = _next_entry(data, at + 1)
        damages.append(Damage(at, after - at, torn=after == len(data)))
        at = after
    return Scan(tuple(payloads), tuple(damages))


def _entry(data: bytes, at: int) -> bytes | None:
    if data[at : at + 4] != _MAGIC or at + HEAD_BYTES > len(data):
        return None
    if _CRC.unpack_from(data, at + _HEAD.size)[0] != zlib.crc32(data[at : at + _HEAD.size]):
        return None
    _, length, crc = _HEAD.unpack_from(data, at)
    if length > _LENGTH_MAX:
        return None
    payload = data[at + HEAD_BYTES : at + HEAD_BYTES + length]
    return payload if len(payload) == length and zlib.crc32(payload) == crc else None


def _next_entry(data: bytes, start: int) -> int:
    at = data.find(_MAGIC, start)
    while at >= 0:
        if _entry(data, at) is not None:
            return at
        at = data.find(_MAGIC, at + 1)
    return len(data)


class TailFile:
    """The tail file of one leadership: its name bears the token, so that a leader deposed unawares writes to its own."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = private_file(path, os.O_RDWR | os.O_TRUNC)
        self.size = 0

    def append(self, payload: bytes) -> None:
        """Add one entry, whole or not at all. Raises `OSError`."""
        entry = pack(payload)
        try:
            written = os.pwrite(self._fd, entry, self.size)
            while written < len(entry):
                written += os.pwrite(self._fd, entry[written:], self.size + written)
        except OSError:
            self.cut(self.size)
            raise
        self.size += len(entry)

    def cut(self, size: int) -> None:
        """Go back to an earlier size: what came after was not committed, or is in the database for good."""
        os.ftruncate(self._fd, size)
        self.size = size

    def close(self) -> None:
        """Close the file. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def tail_path(database: Path, name: str, token: int) -> Path:
    """The tail file of a job (by its file name) and a token."""
    return database.with_name(f"{database.name}-{name}.{token:020d}.tail")


def tail_files(database: Path, name: str) -> list[Path]:
    """A job's tail files, by rising token."""
    start = f"{database.name}-{name}."
    try:
        found = [entry.name for entry in os.scandir(database.parent) if entry.name.startswith(start)]
    except FileNotFoundError:
        return []
    # The job's own name has no dot (`file_name`), so that no other job's file begins like this one's.
    return [database.with_name(each) for each in sorted(found) if each.endswith(".tail")]
