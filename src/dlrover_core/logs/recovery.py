"""What a new leader does before it leads: compare the database with the second copies, and put back what is missing.

Witnesses of what was acknowledged are the database, the tail files (a second copy of every batch since the last complete
checkpoint) and the mark (the last acknowledged number). Whatever the database lost of its end is in the tail files; if it is
not, the mark tells that something is missing, and nobody leads until a person has looked.

A copy is put back only under a token not older than the database's: the WAL loses ends, never middles, so a database that
still knows a token knows everything acknowledged before it was raised, and an older copy beyond it never was.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import NamedTuple

from dlrover_core.errors import LogCorrupt
from dlrover_core.kernel.codec import Codec
from dlrover_core.kernel.events import Batch
from dlrover_core.logs import tables
from dlrover_core.logs.archive import Archive
from dlrover_core.logs.lock import Mark
from dlrover_core.logs.tail import Repair, RepairKind, scan, tail_files


class Copies(NamedTuple):
    """The batches in a job's tail files by their first sequence number, and what was wrong with the files."""

    batches: dict[int, Batch]
    repairs: list[Repair]
    token: int


def read_copies(database: Path, name: str, job: str, codec: Codec) -> Copies:
    """Every whole entry of every tail file; of two for the same place the later one."""
    found: dict[int, Batch] = {}
    repairs: list[Repair] = []
    newest = 0
    for path in tail_files(database, name):
        digits = path.name[: -len(".tail")].rpartition(".")[2]
        newest = max(newest, int(digits) if digits.isdigit() else 0)
        entries = scan(path.read_bytes())
        for damage in entries.damages:
            kind = RepairKind.TORN if damage.torn else RepairKind.DAMAGED
            repairs.append(
                Repair(job, kind, 0, 0, f"{path.name}: {damage.length} bytes at {damage.offset} are no entry")
            )
        for payload in entries.payloads:
            batch = codec.decode(payload)
            found[batch.first_seq] = batch
    return Copies(found, repairs, newest)


class Recovery:
    """Mends one job's log inside the take-over transaction; `run` returns the newest token that anything bears."""

    def __init__(self, db: sqlite3.Connection, job: str, row: tables.JobRow, archive: Archive) -> None:
        self.db, self.job, self.row, self.archive = db, job, row, archive
        self.repairs: list[Repair] = []

    def run(self, copies: Copies, mark: Mark | None, lock_file: Path) -> tuple[int, int]:
        """Mend; then return the head and the newest token. Raises `LogCorrupt` if an acknowledged event is missing."""
        self.repairs.extend(copies.repairs)
        self._mend_end(copies)
        self._mend_rows(copies)
        head = self._restore(copies)
        self._require(head, copies, mark, lock_file)
        tokens = [self.row.token, copies.token, mark.token if mark else 0]
        last = tables.last_row(self.db, self.row.id)
        return head, max(*tokens, last.token if last else 0)

    def _mend_end(self, copies: Copies) -> None:
        """The last row decides where the log ends: it must be whole, or be replaced by its copy."""
        while (row := tables.last_row(self.db, self.row.id)) is not None and not row.sound():
            before = tables.head_before(self.db, self.row.id, row.last_seq)
            copy = copies.batches.get(before + 1) or next(iter(self.archive.page(before)), None)
            if copy is None:
                raise LogCorrupt(self.job, before + 1, "its checksum is wrong and no second copy of it is left")
            tables.remove(self.db, row.place)
            tables.put(self.db, self.row.id, copy)
            self._report(RepairKind.REWRITTEN, copy, "the last row failed its checksum")

    def _mend_rows(self, copies: Copies) -> None:
        head = tables.head(self.db, self.row.id)
        for copy in copies.batches.values():
            row = tables.row_from(self.db, self.row.id, copy.first_seq)
            # Whole, or a row of other bounds: the copy was never committed. Beyond the head: `_restore` decides.
            if copy.last_seq >= head or row is None or (row.sound() and row.first_seq <= copy.last_seq):
                continue
            tables.put(self.db, self.row.id, copy)
            self._report(RepairKind.REWRITTEN, copy, "the row was missing or failed its checksum")

    def _restore(self, copies: Copies) -> int:
        head = tables.head(self.db, self.row.id)
        start = head
        while (copy := copies.batches.get(head + 1)) is not None and copy.token >= self.row.token:
            tables.put(self.db, self.row.id, copy)
            head = copy.last_seq
        if head > start:
            detail = "in the tail file and not in the database: put back"
            self.repairs.append(Repair(self.job, RepairKind.RESTORED, start + 1, head, detail))
        return head

    def _require(self, head: int, copies: Copies, mark: Mark | None, lock_file: Path) -> None:
        beyond = [
            copy.last_seq for copy in copies.batches.values() if copy.first_seq > head and copy.token >= self.row.token
        ]
        known = max([mark.seq if mark else 0, *beyond])
        if known > head:
            raise LogCorrupt(
                self.job,
                head + 1,
                f"events up to {known} were acknowledged but cannot be found; restore a copy of the log, "
                f"or delete {lock_file} and the tail files beside it to go on without them",
            )
        if mark is None and lock_file.stat().st_size:
            self.repairs.append(
                Repair(self.job, RepairKind.DAMAGED, 0, 0, f"the mark in {lock_file.name} is unreadable")
            )

    def _report(self, kind: RepairKind, batch: Batch, detail: str) -> None:
        self.repairs.append(Repair(self.job, kind, batch.first_seq, batch.last_seq, detail))
