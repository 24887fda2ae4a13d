"""The SQLite database of a log: its tables, and every statement that touches them. Nothing here knows of threads or locks.

A batch's key is one integer, the job's number in the high bits and the batch's last sequence number in the low 40: that
makes (job, seq) unique, keeps a job's batches together in order, and needs one b-tree where two columns and an index need
two; a commit writes whole pages, so that is a third less to write. The view ``log`` shows it as people think of it.
"""

from __future__ import annotations

import errno
import os
import sqlite3
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, TypeVar
from urllib.parse import quote

from dlrover_core.errors import LogCorrupt, LogFull, LogUnavailable, SchemaTooNew
from dlrover_core.kernel.events import Batch
from dlrover_core.kernel.log import AlreadyAppended, Appended, Conflict, Fenced, LeaderInfo, Outcome, Snapshot
from dlrover_core.logs.place import free_bytes

T = TypeVar("T")

FORMAT = 1
_COLUMNS = struct.Struct("<4q")
SEQ_BITS = 40
SEQ_MAX = (1 << SEQ_BITS) - 1
# What another process may hold the write lock for: one commit, or one checkpoint, on a slow disk.
BUSY_S = 5.0
# Free space below which an I/O error is taken for a full disk: SQLite reports a failed growth of its index as one.
NO_ROOM_BYTES = 256 * 1024
PAGE_BATCHES = 128
PAGE_EVENTS = 8192
PAGE_BYTES = 1024 * 1024

_SCHEMA = """
CREATE TABLE IF NOT EXISTS jobs(
    id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, token INTEGER NOT NULL, holder TEXT NOT NULL, address TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS batches(
    place INTEGER PRIMARY KEY, first_seq INTEGER NOT NULL, token INTEGER NOT NULL, counter INTEGER NOT NULL,
    crc INTEGER NOT NULL, payload BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS snapshots(
    job INTEGER NOT NULL, seq INTEGER NOT NULL, schema TEXT NOT NULL, crc INTEGER NOT NULL, state BLOB NOT NULL,
    PRIMARY KEY (job, seq));
CREATE VIEW IF NOT EXISTS log AS
    SELECT name AS job, first_seq, place & 0xFFFFFFFFFF AS last_seq, batches.token, counter, length(payload) AS bytes
    FROM batches JOIN jobs ON id = place >> 40 ORDER BY place;
PRAGMA user_version = 1;
"""
_LAST = "SELECT place FROM batches WHERE place BETWEEN ? AND ? ORDER BY place DESC LIMIT 1"
_INSERT = """
INSERT INTO batches SELECT ?1, ?2, ?3, ?4, ?5, ?6
WHERE (SELECT token FROM jobs WHERE id = ?7) = ?3
  AND coalesce((SELECT place FROM batches WHERE place BETWEEN ?8 AND ?9 ORDER BY place DESC LIMIT 1), ?8) = ?8 + ?2 - 1
"""
_PUT = "INSERT OR REPLACE INTO batches VALUES (?, ?, ?, ?, ?, ?)"
_PAGE = "SELECT place, first_seq, token, counter, crc, payload FROM batches WHERE place BETWEEN ? AND ? ORDER BY place"


class Row(NamedTuple):
    """A stored batch, as it lies."""

    place: int
    first_seq: int
    token: int
    counter: int
    crc: int
    payload: bytes

    @property
    def last_seq(self) -> int:
        """Sequence number of its last record."""
        return self.place & SEQ_MAX

    def sound(self) -> bool:
        """Do key, columns and bytes match their checksum?"""
        try:
            return _crc(self.place, self.first_seq, self.token, self.counter, self.payload) == self.crc
        except (TypeError, struct.error):  # a column whose very type was changed
            return False


def _crc(place: int, first_seq: int, token: int, counter: int, payload: bytes) -> int:
    """The checksum of a whole row: a changed key or column is found out like a changed payload, without decoding it."""
    return zlib.crc32(payload, zlib.crc32(_COLUMNS.pack(place, first_seq, token, counter)))


def _row(job: int, batch: Batch) -> Row:
    place = base(job) + batch.last_seq
    crc = _crc(place, batch.first_seq, batch.token, batch.counter, batch.payload)
    return Row(place, batch.first_seq, batch.token, batch.counter, crc, batch.payload)


class JobRow(NamedTuple):
    """A job's number, and its leader."""

    id: int
    token: int
    holder: str
    address: str


@contextmanager
def errors_of_ours(job: str = "", seq: int = 0) -> Iterator[None]:
    """SQLite's errors as ours. ``seq`` is the event that could not be read, should the database be damaged."""
    try:
        yield
    except sqlite3.Error as error:
        said = str(error)
        if is_full(error):
            raise LogFull(f"job {job!r}: no room to append: {said}; free space and the job goes on") from error
        if is_damage(error):
            raise LogCorrupt(job, seq, f"the database is damaged: {said}; restore a copy of it") from error
        raise LogUnavailable(f"job {job!r}: the database cannot be used now: {said}") from error


def of_disk(error: OSError, job: str = "") -> LogFull | LogUnavailable:
    """A disk's error as ours."""
    who = f"job {job!r}: " if job else ""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return LogFull(f"{who}no room to append: {error}; free space and the job goes on")
    return LogUnavailable(f"{who}the log cannot be written now: {error}")


def translated(path: Path, job: str, work: Callable[[], T], seq: int) -> T:
    """Do ``work`` on the database at ``path``, its errors as ours; ``seq`` as in `errors_of_ours`."""
    try:
        with errors_of_ours(job, seq):
            return work()
    except OSError as error:
        raise of_disk(error, job) from error
    except LogUnavailable as error:
        if "I/O error" in str(error) and free_bytes(path.parent) < NO_ROOM_BYTES:
            raise LogFull(f"job {job!r}: no room to append: {error}; free space and the job goes on") from error
        raise


def is_full(error: sqlite3.Error) -> bool:
    """No room on the disk. By its words, for Python 3.10 does not give the code."""
    return "full" in str(error)


def is_damage(error: sqlite3.Error) -> bool:
    """The file's structure is broken, rather than busy, unreadable or full."""
    said = str(error)
    damage = (
        "malformed",
        "not a database",
        "no such table",
        "no such column",
        "Could not decode",
        "encrypted",
        "unsupported file",
    )
    return any(word in said for word in damage)


def connect(path: Path, *, create: bool) -> sqlite3.Connection:
    """A connection in autocommit mode that any one thread at a time may use."""
    mode = "rwc" if create else "rw"
    uri = f"file:{quote(os.fsencode(path))}?mode={mode}"
    db = sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False, timeout=BUSY_S)
    try:
        # Checkpoints are ours to time: the tail files are started anew after them (`tail`).
        db.execute("PRAGMA wal_autocheckpoint = 0")
        db.execute("PRAGMA synchronous = FULL")
        if create:
            db.execute("PRAGMA journal_mode = WAL")
            _migrate(db, path)
    except BaseException:
        db.close()
        raise
    return db


def _migrate(db: sqlite3.Connection, path: Path) -> None:
    (version,) = db.execute("PRAGMA user_version").fetchone()
    if version > FORMAT:
        raise SchemaTooNew(f"{path} has format {version}, newer than {FORMAT}; upgrade dlrover-core to use this log")
    if version < FORMAT:
        db.executescript(f"BEGIN IMMEDIATE; {_SCHEMA} COMMIT;")


def is_made(db: sqlite3.Connection) -> bool:
    """Has somebody created the tables? They and the format's number come in one transaction."""
    (version,) = db.execute("PRAGMA user_version").fetchone()
    return bool(version)


def checkpoint(db: sqlite3.Connection) -> bool:
    """Move the WAL into the database, as far as readers allow. Returns whether all of it is there now, and synced."""
    busy, frames, moved = db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
    return (busy, moved) == (0, frames)


def base(job: int) -> int:
    """The key below a job's first batch."""
    return job << SEQ_BITS


def find_job(db: sqlite3.Connection, name: str) -> JobRow | None:
    """A job by its name."""
    found = db.execute("SELECT id, token, holder, address FROM jobs WHERE name = ?", (name,)).fetchone()
    if found is None:
        return None
    row = JobRow._make(found)
    if [type(field) for field in row] != [int, int, str, str]:
        raise sqlite3.DatabaseError(f"malformed row of job {name!r}")
    return row


def job_names(db: sqlite3.Connection) -> list[str]:
    """All jobs, sorted."""
    return sorted(name for (name,) in db.execute("SELECT name FROM jobs"))


def ensure_job(db: sqlite3.Connection, name: str) -> JobRow:
    """A job by its name, made if need be."""
    found = find_job(db, name)
    if found is None:
        db.execute("INSERT INTO jobs(name, token, holder, address) VALUES (?, 0, '', '')", (name,))
        found = find_job(db, name)
    assert found is not None
    return found


def set_leader(db: sqlite3.Connection, job: int, leader: LeaderInfo) -> None:
    """Raise the token: from here on every older leader is fenced."""
    db.execute("UPDATE jobs SET token = ?, holder = ?, address = ? WHERE id = ?", (*leader, job))


def set_address(db: sqlite3.Connection, job: int, token: int, address: str) -> None:
    """Where the leader can be reached, if it still is the leader."""
    db.execute("UPDATE jobs SET address = ? WHERE id = ? AND token = ?", (address, job, token))


def clear_leader(db: sqlite3.Connection, job: int, token: int) -> None:
    """Nobody leads; the token stays, for it never goes back."""
    db.execute("UPDATE jobs SET holder = '', address = '' WHERE id = ? AND token = ?", (job, token))


def head(db: sqlite3.Connection, job: int) -> int:
    """The last sequence number; 0 for none."""
    row = db.execute(_LAST, (base(job), base(job) | SEQ_MAX)).fetchone()
    return row[0] & SEQ_MAX if row else 0


def head_before(db: sqlite3.Connection, job: int, seq: int) -> int:
    """The last sequence number of the batch before the one that ends at ``seq``; 0 for none."""
    row = db.execute(_LAST, (base(job), base(job) + seq - 1)).fetchone()
    return row[0] & SEQ_MAX if row else 0


def last_row(db: sqlite3.Connection, job: int) -> Row | None:
    """A job's last batch."""
    found = db.execute(_PAGE + " DESC LIMIT 1", (base(job), base(job) | SEQ_MAX)).fetchone()
    return Row(*found) if found else None


def remove(db: sqlite3.Connection, place: int) -> None:
    """Delete a row that cannot be read, to make place for its copy."""
    db.execute("DELETE FROM batches WHERE place = ?", (place,))


def append(db: sqlite3.Connection, job: int, batch: Batch) -> Outcome:
    """One statement, one transaction: insert if the token is the newest and the head is where the batch begins."""
    low = base(job)
    row = (*_row(job, batch), job, low, low | SEQ_MAX)
    try:
        if db.execute(_INSERT, row).rowcount == 1:
            return Appended(batch.last_seq)
    except sqlite3.IntegrityError:
        pass  # its key is taken: the log is longer than this leader believes, which is found out below
    return _why_not(db, job, batch)


def _why_not(db: sqlite3.Connection, job: int, batch: Batch) -> Outcome:
    found = db.execute("SELECT token FROM jobs WHERE id = ?", (job,)).fetchone()
    if found is None or found[0] != batch.token:
        return Fenced(batch.token, found[0] if found else 0)
    low = base(job)
    same = db.execute(_PAGE + " LIMIT 1", (low + batch.first_seq, low | SEQ_MAX)).fetchone()
    if same is not None and Row(*same)[1:4] == (batch.first_seq, batch.token, batch.counter):
        return AlreadyAppended(Row(*same).last_seq)
    return Conflict(batch.first_seq - 1, head(db, job))


def put(db: sqlite3.Connection, job: int, batch: Batch) -> None:
    """Write a batch whatever is there: for repairs, inside their own transaction."""
    db.execute(_PUT, _row(job, batch))


def put_rows(db: sqlite3.Connection, rows: Iterable[Row]) -> None:
    """Write rows of another database as they are, all or none."""
    db.execute("BEGIN IMMEDIATE")
    try:
        db.executemany(_PUT, rows)
        db.execute("COMMIT")
    except BaseException:
        rollback(db)
        raise


def row_from(db: sqlite3.Connection, job: int, seq: int) -> Row | None:
    """The first batch that ends at or beyond ``seq``."""
    found = db.execute(_PAGE + " LIMIT 1", (base(job) + seq, base(job) | SEQ_MAX)).fetchone()
    return Row(*found) if found else None


def page(db: sqlite3.Connection, job: int, after: int) -> tuple[list[Row], sqlite3.Error | None]:
    """The next rows beyond ``after``, bounded in number, events and bytes; and the error that ended them early, if one did.

    The read transaction ends with this call: a long-lived one would keep the WAL from being reused.
    """
    rows: list[Row] = []
    events = size = 0
    cursor = db.cursor()
    try:
        for found in cursor.execute(_PAGE, (base(job) + after + 1, base(job) | SEQ_MAX)):
            row = Row._make(found)
            rows.append(row)
            events += row.last_seq - row.first_seq + 1
            size += len(row.payload)
            if len(rows) == PAGE_BATCHES or events >= PAGE_EVENTS or size >= PAGE_BYTES:
                break
    except (sqlite3.Error, TypeError) as error:
        if isinstance(error, sqlite3.Error) and not is_damage(error):
            raise
        return rows, error if isinstance(error, sqlite3.Error) else sqlite3.DatabaseError(
            f"a column is damaged: {error}"
        )
    finally:
        cursor.close()
    return rows, None


def truncate(db: sqlite3.Connection, job: int, upto: int) -> int:
    """Delete the batches that end at or before ``upto``, but never the last one: it holds the head. Returns how many."""
    upto = min(upto, head(db, job) - 1)
    return db.execute("DELETE FROM batches WHERE place > ? AND place <= ?", (base(job), base(job) + upto)).rowcount


def put_snapshot(db: sqlite3.Connection, job: int, token: int, snapshot: Snapshot) -> bool:
    """Keep a snapshot and the one before it, unless a newer leader exists. Returns whether it was kept."""
    db.execute("BEGIN IMMEDIATE")
    try:
        kept = db.execute(
            "INSERT OR REPLACE INTO snapshots SELECT ?1, ?2, ?3, ?4, ?5 WHERE (SELECT token FROM jobs WHERE id = ?1) = ?6",
            (job, snapshot.seq, snapshot.schema, _snapshot_crc(snapshot), snapshot.state, token),
        ).rowcount
        db.execute(
            "DELETE FROM snapshots WHERE job = ?1 AND seq NOT IN"
            " (SELECT seq FROM snapshots WHERE job = ?1 ORDER BY seq DESC LIMIT 2)",
            (job,),
        )
        db.execute("COMMIT")
    except BaseException:
        rollback(db)
        raise
    return kept == 1


def newest_snapshot(db: sqlite3.Connection, job: int) -> Snapshot | None:
    """The newest snapshot that is whole and not ahead of the log."""
    stored = db.execute(
        "SELECT seq, schema, state, crc FROM snapshots WHERE job = ? AND seq <= ? ORDER BY seq DESC",
        (job, head(db, job)),
    )
    for seq, schema, state, crc in stored:
        if isinstance(schema, str) and isinstance(state, bytes):
            snapshot = Snapshot(seq, schema, state)
            if _snapshot_crc(snapshot) == crc:
                return snapshot
    return None


def _snapshot_crc(snapshot: Snapshot) -> int:
    return zlib.crc32(snapshot.state, zlib.crc32(f"{snapshot.seq} {snapshot.schema}".encode()))


def rollback(db: sqlite3.Connection) -> None:
    """End a transaction that failed; SQLite may have ended it itself."""
    if db.in_transaction:
        db.execute("ROLLBACK")
