"""Damage: whatever happens to the end of the files, no acknowledged event is lost without a word.

A kill is simulated by copying the files aside while the leader holds them, without the shared-memory index, which a new
process rebuilds. Then the copy is damaged, at every interesting place, and led again.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import shutil
import sqlite3
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import NamedTuple

import pytest

from dlrover_core.errors import LogCorrupt, LogUnavailable, SchemaTooNew
from dlrover_core.kernel.events import Batch
from dlrover_core.logs import sqlite, tables, tail
from dlrover_core.logs.lock import read_mark
from dlrover_core.logs.reader import lock_path
from dlrover_core.logs.sqlite import SqliteLog
from dlrover_core.logs.tail import RepairKind, scan, tail_files
from dlrover_core.testing.log_conformance import CODEC, Pen, make_batch, seqs

from .sqlite_logs import opened

JOB = "train"
RESERVE = 0  # these tests are not about full disks


class Outcome(NamedTuple):
    """What a successor found: the sequence numbers it read, or the first one it could not."""

    seqs: list[int]
    lost: LogCorrupt | None
    repairs: list[tail.Repair]


def run(story: Coroutine[object, object, None]) -> None:
    """Tell a story in an event loop of its own."""
    asyncio.run(asyncio.wait_for(story, 60))


async def write(place: Path, appends: int, checkpoint_at: int = 0, size: int = 8) -> Path:
    """Append batches of three events, and return a copy of what a kill would leave."""
    log = await SqliteLog.open(place / "live" / "log.db", CODEC, reserve_bytes=RESERVE)
    pen = Pen(await log.lead(JOB, "a"))
    for number in range(1, appends + 1):
        await pen.write(events=3, size=size)
        if number == checkpoint_at:
            assert log._writer is not None
            await log._writer.call(log.checkpoint)
    copy = place / "killed"
    copy.mkdir()
    for file in log.path.parent.iterdir():
        if file.is_file() and not file.name.endswith("-shm"):
            shutil.copy(file, copy)
    await log.close()
    return copy / "log.db"


async def lead_again(database: Path, appends: int = 1) -> Outcome:
    """What a new leader makes of the files, and that it can go on; afterwards a mere reader must see the same."""
    log = await SqliteLog.open(database, CODEC, reserve_bytes=RESERVE)
    try:
        lead = await log.lead(JOB, "b")
        found = await seqs(log.read(JOB))
        pen = Pen(lead, head=await log.head(JOB))
        assert pen.head == len(found)
        for _ in range(appends):
            await pen.write()
        await lead.resign()
        assert await seqs(log.read(JOB)) == [*found, *range(len(found) + 1, len(found) + appends + 1)]
        return Outcome(found, None, log.repairs)
    except LogCorrupt as lost:
        return Outcome([], lost, log.repairs)
    finally:
        await log.close()


async def read_only(database: Path) -> Outcome:
    """What a mere reader makes of the files."""
    log = await SqliteLog.open(database, CODEC, reserve_bytes=RESERVE)
    found: list[int] = []
    try:
        async for record in log.read(JOB):
            found.append(record.seq)  # noqa: PERF401  # what came before the error counts
        return Outcome(found, None, log.repairs)
    except LogCorrupt as lost:
        return Outcome(found, lost, log.repairs)
    finally:
        await log.close()


def aside(database: Path, name: str) -> Path:
    """A fresh copy of the files, to damage."""
    place = database.parent.parent / name
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(database.parent, place)
    return place / database.name


def wal(database: Path) -> Path:
    """SQLite's write-ahead log."""
    return database.with_name(database.name + "-wal")


def flip(path: Path, offset: int) -> None:
    """Change one byte."""
    content = bytearray(path.read_bytes())
    content[offset] ^= 0x41
    path.write_bytes(content)


def wal_offsets(path: Path) -> list[int]:
    """Around the header and around every frame's header, middle and end."""
    size = path.stat().st_size
    page = int.from_bytes(path.read_bytes()[8:12], "big")
    offsets = {0, 1, 16, 31, 32, size - 1}
    for frame in range(32, size, 24 + page):
        offsets |= {frame - 1, frame, frame + 4, frame + 16, frame + 24, frame + 24 + page // 2}
    return sorted(offset for offset in offsets if 0 <= offset < size)


Damage = Callable[[Path, int], None]


def cut(path: Path, offset: int) -> None:
    """End the file early."""
    with path.open("r+b") as file:
        file.truncate(offset)


@pytest.mark.parametrize("damage", [cut, flip])
@pytest.mark.parametrize("checkpoint_at", [0, 4])
def test_wal_damaged_anywhere(tmp_path: Path, damage: Damage, checkpoint_at: int) -> None:
    """Cut the write-ahead log, or flip a byte in it, at any frame: every acknowledged event is there, for leader and reader."""

    async def story() -> None:
        killed = await write(tmp_path, appends=8, checkpoint_at=checkpoint_at)
        everything = list(range(1, 25))
        restored = 0
        for offset in wal_offsets(wal(killed)):
            case = aside(killed, "case")
            damage(wal(case), offset)
            read = await read_only(case)
            assert (read.seqs, read.lost) == (everything, None), offset
            case = aside(killed, "case")
            damage(wal(case), offset)
            led = await lead_again(case)
            assert (led.seqs, led.lost) == (everything, None), offset
            restored += any(repair.kind is RepairKind.RESTORED for repair in led.repairs)
        # Otherwise the damage did nothing, and this test proves nothing.
        assert restored > 5

    run(story())


def test_wal_deleted(tmp_path: Path) -> None:
    """Without any write-ahead log at all, what it held comes back from the tail file, and the report says so."""

    async def story() -> None:
        killed = await write(tmp_path, appends=8, checkpoint_at=4)
        wal(killed).unlink()
        led = await lead_again(killed)
        assert led.seqs == list(range(1, 25))
        assert [(repair.kind, repair.first, repair.last) for repair in led.repairs] == [(RepairKind.RESTORED, 13, 24)]

    run(story())


@pytest.mark.parametrize("damage", [cut, flip])
def test_tail_file_damaged_anywhere(tmp_path: Path, damage: Damage) -> None:
    """The second copy cut or changed at any byte costs nothing while the first is whole; a torn end is reported."""

    async def story() -> None:
        killed = await write(tmp_path, appends=3)
        size = tail_files(killed, JOB)[0].stat().st_size
        for offset in range(0, size, 7):
            case = aside(killed, "case")
            damage(tail_files(case, JOB)[0], offset)
            led = await lead_again(case)
            assert (led.seqs, led.lost) == (list(range(1, 10)), None)
            if damage is flip:
                assert {repair.kind for repair in led.repairs} <= {RepairKind.TORN, RepairKind.DAMAGED}
                assert len(led.repairs) == 1

    run(story())


@pytest.mark.parametrize("damage", [cut, flip])
def test_both_copies_damaged(tmp_path: Path, damage: Damage) -> None:
    """With both copies damaged the first lost event is named, nobody leads, and a reader says the same; never silence."""

    async def story() -> None:
        killed = await write(tmp_path, appends=6, checkpoint_at=3)
        said = set()
        size = tail_files(killed, JOB)[0].stat().st_size
        for offset in range(0, size, 11):
            case = aside(killed, "case")
            wal(case).unlink()
            damage(tail_files(case, JOB)[0], offset)
            read, led = await read_only(aside(case, "reading")), await lead_again(case)
            assert led.lost is not None
            assert read.lost is not None
            assert led.lost.seq == read.lost.seq
            assert str(led.lost.seq) in str(led.lost)
            assert read.seqs == list(range(1, led.lost.seq))
            said.add(led.lost.seq)
        assert said == {10, 13, 16}

    run(story())


def test_both_copies_gone(tmp_path: Path) -> None:
    """With the write-ahead log and the tail file gone the mark still knows what was acknowledged."""

    async def story() -> None:
        killed = await write(tmp_path, appends=6, checkpoint_at=3)
        wal(killed).unlink()
        tail_files(killed, JOB)[0].unlink()
        led = await lead_again(killed)
        assert led.lost is not None
        assert led.lost.seq == 10

    run(story())


def test_database_gone_entirely(tmp_path: Path) -> None:
    """A deleted database is not mistaken for a new job, unless all that belongs to it is deleted."""

    async def story() -> None:
        killed = await write(tmp_path, appends=6, checkpoint_at=3)
        killed.unlink()
        wal(killed).unlink()
        led = await lead_again(killed)
        assert led.lost is not None
        assert led.lost.seq == 1
        for file in killed.parent.iterdir():
            file.unlink()
        led = await lead_again(killed)
        assert (led.seqs, led.lost) == ([], None)

    run(story())


def test_database_changed_anywhere(tmp_path: Path) -> None:
    """A byte changed anywhere in the database leaves every event as it was, or names one; none is lost or altered silently."""

    async def story() -> None:
        killed = await write(tmp_path, appends=12, checkpoint_at=12, size=40)
        wal(killed).unlink()  # all of it is in the database by now
        named = 0
        for offset in range(0, killed.stat().st_size, 149):
            case = aside(killed, "case")
            flip(case, offset)
            outcomes = [await read_only(case)]
            # Damaged format numbers look like a newer format, ours or SQLite's: refused just as loudly.
            with contextlib.suppress(SchemaTooNew, LogUnavailable):
                outcomes.append(await lead_again(case))
            for outcome in outcomes:
                if outcome.lost is None:
                    assert outcome.seqs == list(range(1, 37)), offset
                else:
                    assert 0 < outcome.lost.seq <= 37, (offset, outcome.lost)
                    named += 1
        assert named > 10

    run(story())


@pytest.mark.parametrize("victim", [2, 5, 6])
def test_corrupt_row_is_written_again_from_its_copy(tmp_path: Path, victim: int) -> None:
    """A row whose checksum fails is read from the tail file's copy, and written again by the next leader."""

    async def story() -> None:
        killed = await write(tmp_path, appends=6)
        spoil(killed, last_seq=victim * 3)
        read = await read_only(killed)
        assert read.seqs == list(range(1, 19))
        assert {repair.kind for repair in read.repairs} == {RepairKind.HEALED}
        led = await lead_again(killed)
        assert led.seqs == list(range(1, 19))
        expected = (RepairKind.REWRITTEN, victim * 3 - 2, victim * 3)
        assert [(repair.kind, repair.first, repair.last) for repair in led.repairs] == [expected]
        assert (await read_only(killed)).repairs == []

    run(story())


@pytest.mark.parametrize("victim", [1, 2, 6])
def test_corrupt_row_without_a_copy_is_named(tmp_path: Path, victim: int) -> None:
    """A row whose checksum fails and that has no copy is named; everything before it can be read."""

    async def story() -> None:
        killed = await write(tmp_path, appends=6, checkpoint_at=6)
        spoil(killed, last_seq=victim * 3)
        read = await read_only(killed)
        assert read.lost is not None
        assert read.lost.seq == victim * 3 - 2
        assert read.seqs == list(range(1, victim * 3 - 2))

    run(story())


def spoil(database: Path, last_seq: int) -> None:
    """Change a payload in place, as a bad disk would."""
    db = sqlite3.connect(database, isolation_level=None)
    row = tables.find_job(db, JOB)
    assert row is not None
    place = tables.base(row.id) + last_seq
    db.execute("PRAGMA synchronous = OFF")
    db.execute("UPDATE batches SET payload = CAST(substr(payload, 1, 9) || x'00' AS BLOB) WHERE place = ?", (place,))
    db.close()


def test_damaged_mark_is_reported_and_harmless(tmp_path: Path) -> None:
    """A mark that cannot be read costs nothing while the log is whole, and is reported."""

    async def story() -> None:
        killed = await write(tmp_path, appends=2)
        flip(lock_path(killed, JOB), 9)
        assert read_mark(lock_path(killed, JOB)) is None
        led = await lead_again(killed)
        assert led.seqs == list(range(1, 7))
        assert [repair.kind for repair in led.repairs] == [RepairKind.DAMAGED]

    run(story())


def test_unacknowledged_batch_in_the_tail_file_is_appended(tmp_path: Path) -> None:
    """Killed between the second copy and the commit, the batch counts as appended: its outcome was unknown until now."""

    async def story() -> None:
        killed = await write(tmp_path, appends=2)
        with tail_files(killed, JOB)[0].open("ab") as file:
            file.write(tail.pack(make_batch(1, 3, 7, events=2).payload))
        led = await lead_again(killed)
        assert led.seqs == list(range(1, 9))

    run(story())


def test_copy_of_an_older_leader_is_not_put_back(tmp_path: Path) -> None:
    """What a deposed leader wrote to its tail file after a newer token was raised was never acknowledged, and stays out."""

    async def story() -> None:
        killed = await write(tmp_path, appends=2)
        assert (await lead_again(killed, appends=0)).seqs == list(range(1, 7))
        stale = tail.tail_path(killed, JOB, 1)
        stale.write_bytes(tail.pack(make_batch(1, 3, 7).payload))
        assert (await lead_again(killed)).seqs == list(range(1, 7))

    run(story())


def test_checkpoint_starts_the_tail_file_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second copy stays small: after each checkpoint it begins anew, and earlier leaders' files go."""
    monkeypatch.setattr(sqlite, "CHECKPOINT_BYTES", 256 * 1024)

    async def story() -> None:
        killed = await write(tmp_path, appends=200, size=1000)
        assert sum(file.stat().st_size for file in tail_files(killed, JOB)) < 256 * 1024
        assert len(tail_files(killed, JOB)) == 1
        assert (await lead_again(killed)).seqs == list(range(1, 601))
        # Whoever resigns leaves a log that needs no second copy.
        assert tail_files(killed, JOB) == []

    run(story())


def test_wal_cut_after_many_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the write-ahead log was reused many times over, its loss still loses nothing."""
    monkeypatch.setattr(sqlite, "CHECKPOINT_BYTES", 128 * 1024)

    async def story() -> None:
        killed = await write(tmp_path, appends=100, size=1000)
        for size in range(0, wal(killed).stat().st_size, 9973):
            case = aside(killed, "case")
            cut(wal(case), size)
            assert (await lead_again(case)).seqs == list(range(1, 301))

    run(story())


# ---- the file itself


def entries(count: int) -> list[bytes]:
    """Payloads of one event each."""
    batches: list[Batch] = [make_batch(1, number, number) for number in range(1, count + 1)]
    return [batch.payload for batch in batches]


def test_scan_finds_what_was_packed() -> None:
    """What was appended is read back, in order."""
    payloads = entries(5)
    assert scan(b"".join(map(tail.pack, payloads))) == (tuple(payloads), ())


def test_scan_of_a_torn_end() -> None:
    """Cut anywhere, a tail file yields every whole entry, and one torn end."""
    payloads = entries(3)
    content = b"".join(map(tail.pack, payloads))
    length = len(content) // 3
    for size in range(len(content)):
        found = scan(content[:size])
        assert found.payloads == tuple(payloads[: size // length])
        torn = size % length
        assert found.damages == ((tail.Damage(size - torn, torn, torn=True),) if torn else ())


def test_scan_behind_damage() -> None:
    """A byte changed anywhere costs one entry; those behind it are found."""
    payloads = entries(3)
    content = b"".join(map(tail.pack, payloads))
    length = len(content) // 3
    for offset in range(len(content)):
        changed = bytearray(content)
        changed[offset] ^= 0x41
        found = scan(bytes(changed))
        victim = offset // length
        assert found.payloads == tuple(payloads[:victim] + payloads[victim + 1 :])
        assert found.damages == (tail.Damage(victim * length, length, torn=victim == 2),)


def test_an_entry_is_there_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that takes half of an entry and then no more leaves the file as long as it was, and the next one is whole."""
    file = tail.TailFile(tmp_path / "it.tail")
    file.append(b"first")
    size, calls, pwrite = file.size, iter((5,)), os.pwrite

    def failing(fd: int, data: bytes, at: int) -> int:
        count = next(calls, None)
        if count is None:
            raise OSError(errno.ENOSPC, "no space left on device")
        return pwrite(fd, data[:count], at)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", failing)
        with pytest.raises(OSError, match="no space"):
            file.append(b"second")
    assert file.path.stat().st_size == file.size == size
    file.append(b"third")
    file.close()
    assert scan(file.path.read_bytes()) == ((b"first", b"third"), ())


def test_the_last_batch_is_never_deleted(tmp_path: Path) -> None:
    """It holds the head: a log that was truncated to its very end goes on with the number that follows."""

    async def story() -> None:
        async with opened(tmp_path / "log.db") as log:
            pen = Pen(await log.lead(JOB, "a"))
            for _ in range(3):
                await pen.write()
            row = tables.find_job(log.connection, JOB)
            assert row is not None
            assert tables.truncate(log.connection, row.id, 3) == 2
            assert tables.head(log.connection, row.id) == 3

    run(story())
