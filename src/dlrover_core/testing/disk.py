"""What disks do to a log in a file: no room, half a write, a flipped bit.

The latter two are done while nobody has it open.
"""

from __future__ import annotations

import contextlib
import os
import re
import struct
from pathlib import Path

from dlrover_core.errors import PlanError
from dlrover_core.logs import tables
from dlrover_core.logs.place import file_name
from dlrover_core.logs.tail import pack, scan, tail_files

BALLAST = "ballast"
NEEDLE_BYTES = 16
_WAL_HEAD = struct.Struct(">8I")
_WAL_FRAME = struct.Struct(">6I")


def fill(disk: Path) -> Path:
    """Take all room of a file system, to the last byte; returns the file to remove so that there is room again."""
    ballast = disk / BALLAST
    with ballast.open("ab", buffering=0) as file:
        for size in (1 << 20, 4096, 1):
            with contextlib.suppress(OSError):
                while file.write(b"x" * size) == size:
                    pass
    return ballast


def empty(disk: Path) -> None:
    """Give the room back."""
    (disk / BALLAST).unlink(missing_ok=True)


def tear(database: Path, job: str) -> str:
    """Leave the log as a kill in the middle of an append does; returns what was done.

    The last frame of the write-ahead log is cut in its middle, so that the last batch is only in the second copy; and behind
    that stands half an entry of a batch that nobody was told of.
    """
    done = []
    for tail in tail_files(database, file_name(job))[-1:]:
        payloads = scan(tail.read_bytes()).payloads
        if payloads:
            entry = pack(payloads[-1])
            with tail.open("ab") as file:
                file.write(entry[: len(entry) // 2])
            done.append(f"{tail.name} ends with {len(entry) // 2} of {len(entry)} bytes")
    wal = database.with_name(f"{database.name}-wal")
    size = frames_bytes(wal)
    if done and size:
        with wal.open("r+b") as file:
            file.truncate(size)
        done.append(f"{wal.name} ends after {size} bytes, inside its last frame")
    return "; ".join(done) or "there was nothing to tear"


def frames_bytes(wal: Path) -> int:
    """Where the middle of a write-ahead log's last frame is; 0 if it has none."""
    try:
        data = wal.read_bytes()
    except FileNotFoundError:
        return 0
    if len(data) < _WAL_HEAD.size:
        return 0
    _, _, page, _, *salts, _, _ = _WAL_HEAD.unpack_from(data)
    length, end = _WAL_FRAME.size + page, _WAL_HEAD.size
    # Frames of an earlier round bear other salts.
    while end + length <= len(data) and list(_WAL_FRAME.unpack_from(data, end)[2:4]) == salts:
        end += length
    return end - length // 2 if end > _WAL_HEAD.size else 0


def flip(database: Path, job: str, seq: int = 0, *, copies: int = 1) -> str:
    """Flip one bit in the batch that holds record ``seq`` (0: the middle one); returns what was done.

    With 2 ``copies`` the second one, in the tail files, is hit too. Raises `PlanError` where there is no older batch.
    """
    db = tables.connect(database, create=False)
    try:
        known = tables.find_job(db, job)
        head = tables.head(db, known.id) if known is not None else 0
        row = tables.row_from(db, known.id, seq or max(1, head // 2)) if known is not None else None
        if row is None or row.last_seq == head:
            raise PlanError(
                f"bit_flip: {database} holds {head} records of {job!r}, and no older batch with record {seq}"
            )
        # Into the file itself, where nothing but the row's own checksum watches over it.
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    finally:
        db.close()
    files = [database, *(tail_files(database, file_name(job)) if copies > 1 else ())]
    hit = [path.name for path in files if _flip_in(path, row.payload)]
    if database.name not in hit:
        raise PlanError(f"bit_flip: records {row.first_seq} to {row.last_seq} are not found in {database}")
    return f"a bit of records {row.first_seq} to {row.last_seq} is flipped in {', '.join(hit)}"


def _flip_in(path: Path, payload: bytes) -> bool:
    """Flip a bit of a payload wherever it lies in a file; whether it lies there."""
    data = path.read_bytes()
    ats = _places(data, payload)
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        for at in ats:
            os.pwrite(fd, bytes([data[at] ^ 0x10]), at)
    finally:
        os.close(fd)
    return bool(ats)


def _places(data: bytes, payload: bytes) -> list[int]:
    """Where a byte is that is this payload's alone; else where its middle is, in each copy of the whole.

    A long one lies in several pages of a database, a short one has few bytes that no other batch has, and a page that was split
    keeps what it held.
    """
    middle = len(payload) // 2
    for start in (*range(middle, len(payload) - NEEDLE_BYTES), *range(middle)):
        needle = payload[start : start + NEEDLE_BYTES]
        if data.count(needle) == 1:
            return [data.index(needle) + len(needle) // 2]
    return [found.start() + middle for found in re.finditer(re.escape(payload), data)]
