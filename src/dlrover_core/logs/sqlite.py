"""The embedded log: one SQLite file on one host, led under a kernel lock.

An append is: the batch into the tail file (`tail`), one conditional INSERT that commits with a sync, the mark into the lock
file (`lock`). It runs in one writer thread per log; reading runs in reader threads, a page at a time (`reader`). Safety is the
token in the INSERT's condition; the lock only decides who may raise it.

Files, all beside the database and named after it: ``-<job>.lock``, ``-<job>.<token>.tail``, ``.reserve``, and the directory
``-archive``. Do not use a log in a forked child: the lock is closed there, and SQLite forbids sharing connections.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import parse_qs, unquote, urlsplit

from dlrover_core.errors import LogCorrupt, LogError, LogFull, LogUnavailable, NotLeading, SpecError
from dlrover_core.kernel.codec import Codec
from dlrover_core.kernel.events import Batch, Record
from dlrover_core.kernel.log import AlreadyAppended, Appended, Fenced, LeaderInfo, Outcome, Page, Segment, Snapshot
from dlrover_core.logs import tables
from dlrover_core.logs.archive import SEGMENT_EVENTS, Archive, open_store
from dlrover_core.logs.doorbell import Doorbell
from dlrover_core.logs.lock import JobLock, Mark, read_mark, take_now, wait_take
from dlrover_core.logs.place import (
    NO_INODE,
    Reserve,
    Seen,
    default_state_dir,
    file_name,
    host_local,
    inode_of,
    make_dirs,
    private_file,
)
from dlrover_core.logs.put_back import NotOurTurn, put_back
from dlrover_core.logs.reader import Reader, lock_path
from dlrover_core.logs.recovery import Recovery, read_copies
from dlrover_core.logs.tail import Repair, TailFile, tail_files, tail_path
from dlrover_core.logs.writer import Writer

T = TypeVar("T")

RESERVE_BYTES = 16 * 1024 * 1024
# A checkpoint costs two syncs and writes what came since; below a few MiB the syncs dominate, above it the pause is felt.
CHECKPOINT_BYTES = 4 * 1024 * 1024
# What a commit writes besides the payload: the leaf, the first page and the last overflow page, in frames of the WAL.
_COMMIT_BYTES = 3 * 4096
# A follower in the leader's process is woken by the append. Across processes SQLite has no doorbell, and inotify would be
# Linux alone: so others look again this often. One indexed query of about 0.1 ms; only `dlrover events --follow` waits for it.
FOLLOW_S = 0.1

_logger = logging.getLogger(__name__)


class SqliteLog:
    """An `EventLog` in one SQLite file. Use `open`. ``repairs`` tells what was found damaged and mended, oldest first."""

    def __init__(
        self, path: Path, codec: Codec, archive: str | None, reserve_bytes: int, segment_events: int = SEGMENT_EVENTS
    ) -> None:
        self.path, self.codec = path, codec
        self.repairs: list[Repair] = []
        self.begins = True  # who stands by for a leader makes nothing that is missing: the leader puts it back
        self.reserve = Reserve(path.with_name(path.name + ".reserve"), reserve_bytes)
        self._archive_url, self._segment_events = archive, segment_events
        self._archives: dict[str, Archive] = {}
        self._bell = Doorbell()
        self._reader = Reader(path, codec, self.archive_of, self._note)
        self._readers = ThreadPoolExecutor(2, thread_name_prefix="dlrover-log-read")
        self._writer: Writer | None = None
        self._db: sqlite3.Connection | None = None
        self.seen = Seen(self.path)
        self._leading: dict[str, SqliteLeadership] = {}
        self._unmoved_bytes = 0
        self._closing: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def shared(self) -> bool:
        """One host leads here: the lock is its kernel's."""
        return False

    @classmethod
    async def open(
        cls,
        path: str | Path,
        codec: Codec,
        *,
        archive: str | Path | None = None,
        reserve_bytes: int = RESERVE_BYTES,
        segment_events: int = SEGMENT_EVENTS,
    ) -> SqliteLog:
        """Open a log; the file is made by the first leader. ``archive``: as `open_store` takes it; else beside the database.

        Raises `SpecError` on a network or FUSE file system, and for an archive that no store understands.
        """
        if archive:  # in a thread: it may import a package that takes its time
            await asyncio.get_running_loop().run_in_executor(None, open_store, str(archive), "any")
        return cls(host_local(path), codec, str(archive) if archive else None, reserve_bytes, segment_events)

    @classmethod
    async def open_url(cls, url: str, codec: Codec) -> SqliteLog:
        """The log at a ``sqlite:`` URL, as `open_log` describes it."""
        parts = urlsplit(url)
        options = parse_qs(parts.query)
        if parts.netloc or set(options) - {"archive"}:
            known = "sqlite:///absolute/path, sqlite:relative/path or sqlite:, with ?archive=URL if need be"
            raise SpecError("log", f"{url!r} is not {known}")
        path = unquote(parts.path, errors="surrogateescape") or default_state_dir() / "log.db"
        return await cls.open(path, codec, archive=options.get("archive", [None])[0])

    async def lead(
        self,
        job: str,
        holder: str,
        ttl_s: float = 5.0,  # noqa: ARG002  # the port's; here the kernel knows who lives
        *,
        wait: bool = True,
        dead: Collection[str] = (),  # noqa: ARG002  # as above
    ) -> SqliteLeadership:
        """Take the job's lock, mend what needs mending, raise the token.

        Raises `NotLeading`, `LogCorrupt` where an acknowledged event is missing, `LogFull`, `LogUnavailable`.
        """
        try:
            return await self._lead(job, holder, wait=wait)
        except LogCorrupt as damage:
            if damage.seq:
                raise
            # SQLite does not say which event lies on the broken page: reading finds the first one.
            last = 0
            async for batch in self.batches(job):
                last = batch.last_seq
            raise LogCorrupt(job, last + 1, f"cannot be appended, though all before can be read: {damage}") from damage

    async def _lead(self, job: str, holder: str, *, wait: bool) -> SqliteLeadership:
        writer = await self._ready(job)
        if self._archive_url is not None:
            await self._read(self._check_archive, job)
        path = lock_path(self.path, job)
        lock = take_now(path, make=self.begins)
        if lock is None:
            if not wait:
                now = await self.leader(job)
                raise NotLeading(job, now.holder if now else "", now.address if now else "")
            lock = await self._stand_by(path)
            # The leader before us may have put a deleted file back. If it could not, ours has all of it, and we do.
            if inode_of(self.path) not in (NO_INODE, self.seen.inode):
                await self._ready(job)
        lead = SqliteLeadership(self, writer, job, lock)
        try:
            await writer.call(functools.partial(lead.take_over, holder))
        except BaseException:
            # In the writer's thread, for a cancelled take-over may be at work there.
            writer.post(lead.let_go)
            raise
        return lead

    async def _stand_by(self, path: Path) -> JobLock:
        """The lock, when it is free; `LogUnavailable` if the log is closed before."""
        wait = asyncio.ensure_future(wait_take(path, make=self.begins))
        either: set[asyncio.Future[Any]] = {wait, self._closing}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            if wait.done() and wait.exception() is None:
                wait.result().release()
            raise
        finally:
            wait.cancel()
        if not wait.done():
            self._require_open()
        return wait.result()

    async def leader(self, job: str) -> LeaderInfo | None:
        """Who leads; after a death without a word, who led last, until the next one takes over."""
        row = await self._read(self._reader.of_job, job, lambda _, row: row, None)
        return LeaderInfo(row.token, row.holder, row.address) if row is not None and row.holder else None

    async def head(self, job: str) -> int:
        """The last durable sequence number; 0 for an empty log."""
        return await self._read(self._reader.head, job)

    async def jobs(self) -> list[str]:
        """The names of all jobs, sorted. Raises `LogCorrupt` where the database has lost them."""
        return await self._read(self._reader.jobs)

    async def batches(self, job: str, after: int = 0) -> AsyncIterator[Batch]:
        """Every batch beyond ``after``, from archive and database as one stream. Raises `LogCorrupt`."""
        while page := await self._read(self._reader.page, job, after):
            for found in page:
                yield self._reader.batch(found)
            after = page[-1].last_seq

    async def page(self, job: str, after: int, bytes_max: int) -> Page:
        """The next batches beyond ``after`` as they lie, read in a reader thread."""
        return await self._read(self._reader.payloads, job, after, bytes_max)

    async def read(self, job: str, after: int = 0) -> AsyncIterator[Record]:
        """Every record beyond ``after``, in order."""
        async for batch in self.batches(job, after):
            for record in batch.records:
                if record.seq > after:
                    yield record

    async def follow(self, job: str, after: int = 0) -> AsyncIterator[Record]:
        """`read`, then whatever is appended here or by another process, until cancelled."""
        while True:
            rung = self._bell.rung(job)
            async for record in self.read(job, after):
                yield record
                after = record.seq
            await self._bell.wait(job, rung, None if job in self._leading else FOLLOW_S)

    async def latest_snapshot(self, job: str) -> Snapshot | None:
        """The newest snapshot that is whole, or None."""
        return await self._read(self._reader.of_job, job, lambda db, row: tables.newest_snapshot(db, row.id), None)

    async def archive(self, job: str, upto: int | None = None, noted: int | None = None) -> list[Segment]:
        """Copy to the archive what fills whole files, up to ``upto``. The leader then appends an event for each segment."""
        return await self._read(self._write_archive, job, upto, noted)

    async def truncate(self, job: str, upto: int) -> int:
        """Delete the batches up to ``upto`` from the database, but for the last one; reading finds them in the archive.

        Returns how many. Raises `LogError` for what the archive does not hold whole.
        """
        await self._read(self._require_archived, job, upto)
        writer = await self._ready(job)

        def delete() -> int:
            row = tables.find_job(self.connection, job)
            return tables.truncate(self.connection, row.id, upto) if row is not None else 0

        return await writer.call(lambda: self.with_room(job, delete))

    async def trim(self, job: str, upto: int) -> int:  # noqa: ARG002  # the port's
        """Nothing: a file of one's own is kept whole. `truncate` is for who needs the room."""
        return 0

    async def close(self) -> None:
        """Resign everywhere, end the threads, close the files. Idempotent."""
        if self._closing.done():
            return
        self._closing.set_result(None)
        for lead in list(self._leading.values()):
            await lead.resign()
        self._bell.ring_all()
        if self._writer is not None:
            await self._writer.call(self._close_db)
            await self._writer.stop()
        await asyncio.get_running_loop().run_in_executor(None, self._readers.shutdown)
        self._reader.close()

    # ---- below: for this package alone; what runs in the writer's thread says so ----

    @property
    def connection(self) -> sqlite3.Connection:
        """The writer's connection. Writer's thread."""
        if self._db is None:
            raise LogUnavailable(f"the log {self.path} is closed")
        return self._db

    def archive_of(self, job: str) -> Archive:
        """The archive of a job."""
        if job not in self._archives:
            store = open_store(self._archive_url or f"{self.path}-archive", job)
            self._archives.setdefault(job, Archive(store, job, self.codec, self._segment_events))
        return self._archives[job]

    def in_place(self, opened: sqlite3.Connection | None) -> bool:
        """Is the file that ``opened`` has open still the one at the path? Writer's thread."""
        return opened is self._db and not self.seen.is_gone()

    def put_back(self, job: str, token: int) -> None:
        """Make the database anew that was deleted under the leader of ``job``. Writer's thread. Raises `LogUnavailable`."""
        old, self._db = self.connection, put_back(self.connection, self.path, job, token, self.seen.inode)
        old.close()
        self.seen.opened()
        self._unmoved_bytes = 0

    def with_room(self, job: str, work: Callable[[], T], seq: int = 0) -> T:
        """Do ``work``; if the disk is full give up the reserve and do it once more. Writer's thread.

        ``seq`` is the event to name, should the database turn out to be damaged.
        """
        try:
            return tables.translated(self.path, job, work, seq)
        except LogFull:
            if not self.reserve.drop():
                raise
            _logger.warning("job %r: the disk is full; the reserve %s is given up", job, self.reserve.path)
        return tables.translated(self.path, job, work, seq)

    def committed(self, batch: Batch) -> None:
        """A batch was committed: see to the reserve and to the length of the WAL. Writer's thread."""
        self._unmoved_bytes += len(batch.payload) + _COMMIT_BYTES
        if self._unmoved_bytes >= CHECKPOINT_BYTES and self._writer is not None:
            self._unmoved_bytes = CHECKPOINT_BYTES // 2  # readers may hold it back; then again after half as much
            self._writer.post(self.checkpoint)

    def checkpoint(self) -> None:
        """Move the WAL into the database; if all of it is there, start the tail files anew. Writer's thread."""
        try:
            complete = tables.checkpoint(self.connection)
        except (sqlite3.Error, LogError) as error:
            _logger.warning("%s: no checkpoint now, the next append tries again: %s", self.path, error)
            return
        if complete:
            self._unmoved_bytes = 0
            for lead in list(self._leading.values()):
                lead.restart_tail()
        self.reserve.keep()

    def joined(self, lead: SqliteLeadership) -> None:
        """A leadership began. Writer's thread."""
        self._leading[lead.job] = lead

    def parted(self, lead: SqliteLeadership) -> None:
        """A leadership is over. Writer's thread."""
        if self._leading.get(lead.job) is lead:
            del self._leading[lead.job]

    def ring(self, job: str) -> None:
        """Wake the followers of a job in this process. On the loop."""
        self._bell.ring(job)

    async def _ready(self, job: str) -> Writer:
        """The writer, with the database open."""
        self._require_open()
        if self._writer is None:
            self._writer = Writer(f"dlrover-log {self.path.name}")
            self._writer.start()
        await self._writer.call(functools.partial(self._open_db, job))
        return self._writer

    def _require_open(self) -> None:
        if self._closing.done():
            raise LogUnavailable(f"the log {self.path} is closed")

    def _open_db(self, job: str) -> None:
        if self._db is None or not self.in_place(self._db):
            self._close_db()

            def make() -> sqlite3.Connection:
                if self.begins:
                    # By us, so that it and what SQLite puts beside it are 0600. Never opened if it is there: closing any
                    # descriptor of it would drop the locks that SQLite holds on it for the whole process.
                    make_dirs(self.path.parent)
                    with contextlib.suppress(FileExistsError):
                        os.close(private_file(self.path, os.O_RDWR | os.O_EXCL))
                return tables.connect(self.path, create=self.begins)

            self._db = self.with_room(job, make)
            self.seen.opened()
            self.reserve.keep()

    def _close_db(self) -> None:
        db, self._db = self._db, None
        if db is not None:
            db.close()

    def _note(self, repair: Repair) -> None:
        if repair not in self.repairs:  # a reader may come by the same damage many times
            self.repairs.append(repair)

    async def _read(self, question: Callable[..., T], *what: object) -> T:
        self._require_open()
        return await asyncio.get_running_loop().run_in_executor(self._readers, functools.partial(question, *what))

    def _write_archive(self, job: str, upto: int | None, noted: int | None) -> list[Segment]:
        archive = self.archive_of(job)
        return archive.write(self._stored(job, archive.last(), upto), noted)

    def _check_archive(self, job: str) -> None:
        if not self._reader.of_job(job, lambda db, row: tables.head(db, row.id), 0):
            self.archive_of(job).check()

    def _stored(self, job: str, after: int, upto: int | None) -> Iterator[Batch]:
        while page := self._reader.page(job, after):
            for found in page:
                if upto is not None and found.last_seq > upto:
                    return
                yield self._reader.batch(found)
            after = page[-1].last_seq

    def _require_archived(self, job: str, upto: int) -> None:
        first = self._reader.of_job(job, lambda db, row: tables.row_from(db, row.id, 1), None)
        stored = self._stored(job, first.first_seq - 1, upto) if first is not None else ()
        self.archive_of(job).require(upto, stored)


class SqliteLeadership:
    """The right to append to one job's log, held by a kernel lock. Made by `SqliteLog.lead`."""

    def __init__(self, log: SqliteLog, writer: Writer, job: str, lock: JobLock) -> None:
        self.job = job
        self._log, self._writer, self._lock = log, writer, lock
        self._lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._token = self._id = 0
        self._tail: TailFile | None = None
        self._older: list[Path] = []
        self._db: sqlite3.Connection | None = None
        self._marked = 0
        self._over = False

    @property
    def token(self) -> int:
        """The fencing number."""
        return self._token

    @property
    def lost(self) -> Awaitable[None]:
        """Done when leadership is known to be over."""
        return asyncio.shield(self._lost)

    def valid(self) -> bool:
        """May orders still be given? The lock is held until the process dies or says otherwise."""
        return not self._over

    def trouble(self) -> str:
        """Nothing between appends: what is wrong, an append finds out; a file that was deleted is put back now."""
        if not self._over and self._log.seen.is_gone():
            self._writer.post(self._look)
        return ""

    async def append(self, batch: Batch) -> Outcome:
        """Append whole or not at all. Raises `LogUnavailable` (send the same batch again) and `LogFull`."""
        if batch.token != self._token:
            raise ValueError(f"job {self.job!r}: a batch of token {batch.token} cannot be appended under {self._token}")
        return await self._writer.call(functools.partial(self._append, batch), self._settled)

    async def snapshot(self, snapshot: Snapshot) -> None:
        """Keep a snapshot; the newest two stay. A failure is a warning: a snapshot is only a cache."""
        try:
            await self._writer.call(functools.partial(self._snapshot, snapshot))
        except LogError as error:
            _logger.warning(
                "job %r: no snapshot at event %d, the next start reads more: %s", self.job, snapshot.seq, error
            )

    async def announce(self, address: str) -> None:
        """Publish where this leader can be reached."""

        def write() -> None:
            tables.set_address(self._log.connection, self._id, self._token, address)

        await self._writer.call(lambda: self._log.with_room(self.job, write))

    async def resign(self) -> None:
        """Hand leadership on at once. Idempotent."""
        if not self._over:
            await self._writer.call(self._resign, self._settled)

    # ---- all below runs in the writer's thread, but for `_settled` ----

    def take_over(self, holder: str) -> None:
        """Mend the log, raise the token, begin a tail file."""
        head = self._log.with_room(self.job, functools.partial(self._raise_token, holder))
        name = file_name(self.job)
        self._older = tail_files(self._log.path, name)
        self._tail = self._log.with_room(self.job, lambda: TailFile(tail_path(self._log.path, name, self._token)))
        self._log.with_room(self.job, lambda: self._lock.write_mark(Mark(head, self._token)))
        self._log.joined(self)
        self._log.checkpoint()

    def restart_tail(self) -> None:
        """Everything is in the database: no second copy is needed, neither ours nor our predecessors'."""
        if self._tail is not None:
            self._tail.cut(0)
        for path in self._older:
            path.unlink(missing_ok=True)
        self._older = []

    def let_go(self) -> None:
        """Leadership is over: free the lock. Idempotent."""
        self._over = True
        self._log.parted(self)
        if self._tail is not None:
            self._tail.close()
            self._tail = None
        self._lock.release()

    def _raise_token(self, holder: str) -> int:
        db, path = self._log.connection, lock_path(self._log.path, self.job)
        copies = read_copies(self._log.path, file_name(self.job), self.job, self._log.codec)
        db.execute("BEGIN IMMEDIATE")
        try:
            if not self._log.begins and tables.find_job(db, self.job) is None:
                raise LogUnavailable(f"{path} was deleted, and the job's leader has yet to put it back")  # noqa: TRY301
            row = tables.ensure_job(db, self.job)
            recovery = Recovery(db, self.job, row, self._log.archive_of(self.job))
            head, newest = recovery.run(copies, read_mark(path), path)
            tables.set_leader(db, row.id, LeaderInfo(newest + 1, holder, ""))
            db.execute("COMMIT")
        except BaseException:
            tables.rollback(db)
            raise
        self._log.repairs.extend(recovery.repairs)
        self._id, self._token, self._marked = row.id, newest + 1, head
        self._db = db
        return head

    def _append(self, batch: Batch) -> Outcome:
        if self._over or self._tail is None:
            return self._fenced()
        if not self._log.in_place(self._db):
            self._put_back()
        if not self._lock.intact():
            # A folder is removed file by file. False: somebody else has made the lock anew, and leads.
            if not self._log.with_room(self.job, self._lock.renew):
                self.let_go()
                return self._fenced()
            self._lock.write_mark(Mark(self._marked, self._token))
        outcome = self._log.with_room(self.job, functools.partial(self._write, self._tail, batch), batch.first_seq)
        if isinstance(outcome, Fenced):
            self.let_go()
        return outcome

    def _look(self) -> None:
        with contextlib.suppress(LogError, OSError):  # the next append says what is wrong
            if not self._over and not self._log.in_place(self._db):
                self._put_back()

    def _put_back(self) -> None:
        """Make the deleted files anew. Raises `LogUnavailable`; where they were replaced this leads no longer."""
        if not self._log.with_room(self.job, lambda: self._db is self._log.connection and self._lock.renew()):
            self.let_go()
            raise LogUnavailable(
                f"job {self.job!r}: {self._log.path} was replaced under its leader; put the old one back"
            )
        try:
            self._log.with_room(self.job, functools.partial(self._log.put_back, self.job, self._token))
        except LogUnavailable as error:
            # A file is there all the same: somebody's who knows nothing of us.
            if not isinstance(error, NotOurTurn) and inode_of(self._log.path) != NO_INODE:
                self.let_go()
            raise
        self._db = self._log.connection
        self._lock.write_mark(Mark(self._marked, self._token))
        name = file_name(self.job)
        tail = self._log.with_room(self.job, lambda: TailFile(tail_path(self._log.path, name, self._token)))
        if self._tail is not None:
            self._tail.close()
        self._tail = tail
        _logger.warning("job %r: %s was deleted while the job runs; it was made anew, whole", self.job, self._log.path)

    def _write(self, tail: TailFile, batch: Batch) -> Outcome:
        before = tail.size
        tail.append(batch.payload)
        try:
            outcome = tables.append(self._log.connection, self._id, batch)
        except BaseException:
            tail.cut(before)
            raise
        if isinstance(outcome, (Appended, AlreadyAppended)):
            self._marked = max(self._marked, outcome.seq)
            self._lock.write_mark(Mark(self._marked, self._token))
            self._log.committed(batch)
        else:
            tail.cut(before)
        return outcome

    def _fenced(self) -> Fenced:
        def newest() -> int:
            row = tables.find_job(self._log.connection, self.job)
            return row.token if row is not None else 0

        return Fenced(self._token, self._log.with_room(self.job, newest))

    def _snapshot(self, snapshot: Snapshot) -> None:
        with tables.errors_of_ours(self.job):
            tables.put_snapshot(self._log.connection, self._id, self._token, snapshot)

    def _resign(self) -> None:
        if self._over:
            return
        try:
            with tables.errors_of_ours(self.job):
                tables.clear_leader(self._log.connection, self._id, self._token)
            self._log.checkpoint()
            if self._tail is not None and self._tail.size == 0:
                self._tail.path.unlink(missing_ok=True)
        except (LogError, OSError) as error:
            _logger.warning("job %r: the leader's name stays in the log: %s", self.job, error)
        finally:
            self.let_go()

    def _settled(self) -> None:
        self._log.ring(self.job)
        if self._over and not self._lost.done():
            self._lost.set_result(None)
