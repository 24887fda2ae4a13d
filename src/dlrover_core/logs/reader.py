"""The read side of the SQLite log: archive and database as one stream of checked batches, page by page.

Every page is a transaction of its own. A row that fails its checksum, a gap, or an end short of what was acknowledged is
served from the archive or a tail file if a copy is there, and reported; otherwise `LogCorrupt` names the first event that
could not be read. Calls block: they are made in a reader thread.
"""

from __future__ import annotations

import contextlib
import glob
import queue
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar, Union

from dlrover_core.errors import LogCorrupt
from dlrover_core.kernel import log
from dlrover_core.kernel.codec import Codec
from dlrover_core.kernel.events import Batch
from dlrover_core.logs import tables
from dlrover_core.logs.archive import Archive
from dlrover_core.logs.lock import Mark, read_mark
from dlrover_core.logs.place import NO_INODE, Inode, file_name, inode_of
from dlrover_core.logs.recovery import read_copies
from dlrover_core.logs.tail import Repair, RepairKind

T = TypeVar("T")

# Rows are decoded one by one where they are used: a page of decoded events is 50,000 objects that live together, and the
# garbage collector would look at them again and again (1.7 s against 0.5 s for a million events).
Page = Sequence[Union[tables.Row, Batch]]


def lock_path(database: Path, job: str) -> Path:
    """The lock file of a job."""
    return database.with_name(f"{database.name}-{file_name(job)}.lock")


class Reader:
    """Reads one database through a few connections of its own."""

    def __init__(
        self, path: Path, codec: Codec, archive: Callable[[str], Archive], report: Callable[[Repair], None]
    ) -> None:
        self.path, self.codec, self._archive, self._report = path, codec, archive, report
        self._idle: queue.SimpleQueue[tuple[Inode, sqlite3.Connection]] = queue.SimpleQueue()

    def ask(self, question: Callable[[sqlite3.Connection], T], empty: T, job: str = "") -> T:
        """What ``question`` finds in the database; ``empty`` where there is none yet."""
        with tables.errors_of_ours(job), self._connection() as db:
            return empty if db is None else question(db)

    def of_job(self, job: str, question: Callable[[sqlite3.Connection, tables.JobRow], T], empty: T) -> T:
        """What ``question`` finds about one job; ``empty`` where nobody knows it."""

        def about(db: sqlite3.Connection) -> T:
            row = tables.find_job(db, job)
            return empty if row is None else question(db, row)

        return self.ask(about, empty, job)

    def jobs(self) -> list[str]:
        """The names of all jobs, sorted. Raises `LogCorrupt` where there are none, though events of one were acknowledged."""
        nothing: list[str] = []
        found = self.ask(tables.job_names, nothing)
        if not found and inode_of(self.path) != NO_INODE:
            for lock in sorted(self.path.parent.glob(f"{glob.escape(self.path.name)}-*.lock")):
                mark = read_mark(lock)
                if mark is not None and mark.seq:
                    name = lock.name[len(self.path.name) + 1 : -len(".lock")]
                    why = f"{mark.seq} events were acknowledged, but {self.path} lists no job: it is damaged"
                    raise LogCorrupt(name, 1, f"{why}; restore a copy of the log")
        return found

    def head(self, job: str) -> int:
        """The last durable sequence number. Raises `LogCorrupt` where more was acknowledged than can be found."""
        mark = read_mark(lock_path(self.path, job))
        head = self.of_job(job, lambda db, row: tables.head(db, row.id), 0)
        while mark is not None and head < mark.seq:
            head = self._elsewhere(job, head, mark, "acknowledged, but not in the database")[-1].last_seq
        return head

    def page(self, job: str, after: int) -> Page:
        """The next batches beyond ``after``, checked; none at the end. Raises `LogCorrupt`."""
        # The mark first: whatever it says was committed before the read begins.
        mark = read_mark(lock_path(self.path, job))
        rows, error = self._rows(job, after)
        last = after
        for count, row in enumerate(rows):
            sound = row.sound()
            if not sound or row.first_seq > last + 1 or (count and row.first_seq != last + 1):
                # What is whole goes out first; the next page begins with what is not.
                if count:
                    return rows[:count]
                if sound and (truncated := self._archive(job).page(after)):
                    return truncated
                why = f"the database goes on with {row.first_seq}" if sound else "its checksum is wrong"
                return self._elsewhere(job, after, mark, why)
            last = row.last_seq
        if rows:
            return rows
        if error is not None:
            return self._elsewhere(job, after, mark, f"the database is damaged: {error}")
        if mark is not None and mark.seq > after:
            return self._elsewhere(
                job, after, mark, f"events up to {mark.seq} were acknowledged, but are not in the database"
            )
        return []

    def payloads(self, job: str, after: int, bytes_max: int) -> log.Page:
        """The same undecoded: as many batches as have ``bytes_max`` together, or one. Raises `LogCorrupt`."""
        payloads, last, size = list[bytes](), after, 0
        while size < bytes_max or not payloads:
            found = self.page(job, last)
            if not found:
                return log.Page(payloads, last, more=False)
            for one in found:
                size += len(one.payload)
                if payloads and size > bytes_max:
                    return log.Page(payloads, last, more=True)
                payloads.append(one.payload)
                last = one.last_seq
        return log.Page(payloads, last, more=True)

    def batch(self, found: tables.Row | Batch) -> Batch:
        """What a page holds, decoded. Raises `SchemaTooNew`."""
        return self.codec.decode(found.payload) if isinstance(found, tables.Row) else found

    def close(self) -> None:
        """Close every idle connection."""
        while True:
            try:
                self._idle.get_nowait()[1].close()
            except queue.Empty:
                return

    def _rows(self, job: str, after: int) -> tuple[list[tables.Row], sqlite3.Error | None]:
        nothing: tuple[list[tables.Row], sqlite3.Error | None] = ([], None)
        try:
            return self.of_job(job, lambda db, row: tables.page(db, row.id, after), nothing)
        except LogCorrupt as damage:
            return [], sqlite3.DatabaseError(str(damage.__cause__))

    def _elsewhere(self, job: str, after: int, mark: Mark | None, why: str) -> list[Batch]:
        """The batches that follow ``after`` from the archive or the tail files."""
        archived = self._archive(job).page(after)
        if archived:
            self._report(
                Repair(job, RepairKind.HEALED, archived[0].first_seq, archived[0].last_seq, f"{why}: archived")
            )
            return archived
        copies = read_copies(self.path, file_name(job), job, self.codec).batches
        found: list[Batch] = []
        last = after
        while (copy := copies.get(last + 1)) is not None and mark is not None and copy.last_seq <= mark.seq:
            found.append(copy)
            last = copy.last_seq
        if not found:
            # A copy that begins before ``after`` is found by its end, not by its start.
            found = [copy for copy in copies.values() if copy.first_seq <= after < copy.last_seq][:1]
        if not found:
            raise LogCorrupt(job, after + 1, f"{why}, and no second copy of it is left; restore a copy of the log")
        self._report(Repair(job, RepairKind.HEALED, found[0].first_seq, found[-1].last_seq, why))
        return found

    @contextlib.contextmanager
    def _connection(self) -> Iterator[sqlite3.Connection | None]:
        inode = inode_of(self.path)
        if inode == NO_INODE:
            yield None
            return
        db = self._reuse(inode) or tables.connect(self.path, create=False)
        try:
            # A file without tables is one that is just being created; what was acknowledged is the lock file's to say.
            yield db if tables.is_made(db) else None
        except BaseException:
            db.close()
            raise
        self._idle.put((inode, db))

    def _reuse(self, inode: Inode) -> sqlite3.Connection | None:
        with contextlib.suppress(queue.Empty):
            while True:
                opened, db = self._idle.get_nowait()
                if opened == inode:
                    return db
                db.close()  # to a file that has been replaced since
        return None
