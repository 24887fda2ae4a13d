"""The archive: immutable, chained, complete; and archive and log as one stream."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Coroutine, Iterator
from pathlib import Path

import pytest

from dlrover_core.errors import LogCorrupt, LogError, LogUnavailable
from dlrover_core.kernel.events import Batch
from dlrover_core.logs import tables
from dlrover_core.logs.archive import Archive, LocalStore, Segment
from dlrover_core.logs.sqlite import SqliteLog
from dlrover_core.logs.tail import RepairKind
from dlrover_core.testing.log_conformance import CODEC, Pen, make_batch, seqs

JOB = "train"


def run(story: Coroutine[object, object, None]) -> None:
    """Tell a story in an event loop of its own."""
    asyncio.run(asyncio.wait_for(story, 60))


def history(first: int = 1, events: int = 3) -> Iterator[Batch]:
    """Batches of three events without end."""
    for counter in itertools.count(1):
        yield make_batch(1, counter, first, events)
        first += events


def archive_in(directory: Path, segment_events: int = 10) -> Archive:
    """The archive in a directory."""
    return Archive(LocalStore(directory), JOB, CODEC, segment_events)


def test_files_hold_whole_batches_of_enough_events(tmp_path: Path) -> None:
    """A file is closed at the first batch that fills it; what fills none waits; names tell first and last."""
    archive = archive_in(tmp_path / "cold")
    segments = archive.write(itertools.islice(history(), 9))
    assert [(segment.first, segment.last) for segment in segments] == [(1, 12), (13, 24)]
    assert archive.spans() == [(1, 12), (13, 24)]
    assert archive.last() == 24
    assert sorted(archive.store.names()) == [segment.name for segment in segments]
    assert segments[0].name == "00000000000000000001-00000000000000000012.seg"


def test_stream_equals_what_was_written(tmp_path: Path) -> None:
    """Reading gives every archived batch beyond a number, also from the middle of a batch or a file."""
    archive = archive_in(tmp_path)
    batches = list(itertools.islice(history(), 40))
    archive.write(batches)
    assert list(archive.batches()) == batches
    for after in range(0, 121, 7):
        assert list(archive.batches(after)) == [batch for batch in batches if batch.last_seq > after]


def test_writing_goes_on_where_it_ended(tmp_path: Path) -> None:
    """A later writer, knowing only the directory, continues the chain."""
    archive_in(tmp_path).write(itertools.islice(history(), 5))
    assert archive_in(tmp_path).write(itertools.islice(history(13), 8)) == archive_in(tmp_path).verify()[1:]
    assert [segment.last for segment in archive_in(tmp_path).verify()] == [12, 24, 36]


def test_a_gap_is_refused(tmp_path: Path) -> None:
    """Batches that do not follow the last archived one are a mistake, and are not written."""
    archive = archive_in(tmp_path)
    with pytest.raises(ValueError, match="does not follow event 0"):
        archive.write(itertools.islice(history(4), 9))
    assert archive.spans() == []


def test_any_change_is_found(tmp_path: Path) -> None:
    """A byte changed anywhere in any file but the last breaks a checksum or the chain; in the last, its own or its digest."""
    segments = archive_in(tmp_path).write(itertools.islice(history(), 12))
    for segment in segments:
        path = tmp_path / segment.name
        whole = path.read_bytes()
        for offset in range(0, len(whole), 3):
            changed = bytearray(whole)
            changed[offset] ^= 0x41
            path.write_bytes(changed)
            try:
                assert archive_in(tmp_path).verify()[-1].digest != segments[-1].digest
            except LogCorrupt as damage:
                assert segment.first <= damage.seq <= segment.last + 1  # noqa: PT017  # either way of finding it is right
            path.write_bytes(whole)
    assert archive_in(tmp_path).verify() == segments


def test_a_lost_file_is_named(tmp_path: Path) -> None:
    """A missing file is named by the first event that is missing."""
    segments = archive_in(tmp_path).write(itertools.islice(history(), 12))
    (tmp_path / segments[1].name).unlink()
    with pytest.raises(LogCorrupt) as found:
        archive_in(tmp_path).verify()
    assert found.value.seq == 13


def test_an_exchanged_file_breaks_the_chain(tmp_path: Path) -> None:
    """A file that is whole in itself but not the one that followed is found by the chain."""
    segments = archive_in(tmp_path / "a").write(itertools.islice(history(), 12))
    other = make_batch(1, 99, 1, 12, size=9)
    archive_in(tmp_path / "b").write([other])
    (tmp_path / "a" / segments[0].name).write_bytes((tmp_path / "b" / segments[0].name).read_bytes())
    with pytest.raises(LogCorrupt, match="does not follow"):
        archive_in(tmp_path / "a").verify()


def test_a_reader_notices_an_exchanged_file(tmp_path: Path) -> None:
    """Reading on, without verifying anything, the file behind an exchanged one tells that the chain is broken."""
    segments = archive_in(tmp_path / "a").write(itertools.islice(history(), 12))
    archive_in(tmp_path / "b").write([make_batch(1, 99, 1, 12, size=9)])
    (tmp_path / "a" / segments[0].name).write_bytes((tmp_path / "b" / segments[0].name).read_bytes())
    with pytest.raises(LogCorrupt, match="does not follow") as found:
        list(archive_in(tmp_path / "a").batches())
    assert found.value.seq == 13
    assert len(list(archive_in(tmp_path / "a").batches(after=12))) == 8


def test_a_file_of_another_log_does_not_begin_an_archive(tmp_path: Path) -> None:
    """The first file follows nothing; one that follows something, under its name, is a foreign one."""
    other = archive_in(tmp_path)
    other._write([make_batch(1, 1, 1, 12)], b"x" * 32)
    with pytest.raises(LogCorrupt, match="does not follow"):
        other.page(0)


def test_what_was_written_and_not_told_comes_first(tmp_path: Path) -> None:
    """A writer that knows what stands in the log gets every file beyond: those first that a dead one left, each checked."""
    archive_in(tmp_path).write(itertools.islice(history(), 9))
    segments = archive_in(tmp_path).verify()
    assert archive_in(tmp_path).write(itertools.islice(history(25), 5), noted=12)[0] == segments[1]
    assert archive_in(tmp_path).write([], noted=12) == archive_in(tmp_path).verify()[1:]
    assert archive_in(tmp_path).write([], noted=36) == []
    (tmp_path / segments[1].name).write_bytes(b"torn")
    with pytest.raises(LogCorrupt) as found:
        archive_in(tmp_path).write(itertools.islice(history(37), 9), noted=12)
    assert found.value.seq == 13
    assert archive_in(tmp_path).last() == 36


def test_what_may_be_deleted(tmp_path: Path) -> None:
    """Only what the archive holds byte for byte, and in an unbroken chain, from wherever the log still begins."""
    batches = list(itertools.islice(history(), 12))
    segments = archive_in(tmp_path).write(batches)
    for first in range(12):
        archive_in(tmp_path).require(36, batches[first:])
        archive_in(tmp_path).require(batches[first].last_seq, batches[: first + 1])
    archive_in(tmp_path).require(36, [])
    with pytest.raises(LogError, match="37-39 are not archived"):
        archive_in(tmp_path).require(39, [])
    other = [*batches[:7], make_batch(1, 8, 22, 3, size=9), *batches[8:]]
    with pytest.raises(LogCorrupt, match="something else") as found:
        archive_in(tmp_path).require(36, other)
    assert found.value.seq == 22
    (tmp_path / segments[1].name).unlink()
    with pytest.raises(LogCorrupt) as found:
        archive_in(tmp_path).require(36, batches[6:])
    assert found.value.seq == 13
    archive_in(tmp_path).require(12, batches[:4])


def test_verify_of_the_end_only(tmp_path: Path) -> None:
    """Verification can begin behind what was verified before, and still checks the link."""
    segments = archive_in(tmp_path).write(itertools.islice(history(), 12))
    assert archive_in(tmp_path).verify(after=12) == segments[1:]
    first = tmp_path / segments[0].name
    first.write_bytes(first.read_bytes() + b"x")
    with pytest.raises(LogCorrupt):
        archive_in(tmp_path).verify(after=12)


def test_a_file_is_never_written_over(tmp_path: Path) -> None:
    """Writing the same file again is fine, another under its name is refused; drafts never look like files."""
    store = LocalStore(tmp_path)
    store.write("a.seg", b"one")
    store.write("a.seg", b"one")
    with pytest.raises(FileExistsError):
        store.write("a.seg", b"two")
    assert store.read("a.seg") == b"one"
    assert store.names() == ["a.seg"]


def test_a_store_that_fails(tmp_path: Path) -> None:
    """A store that cannot be written or read is `LogUnavailable`, not damage."""
    (tmp_path / "file").touch()
    with pytest.raises(LogUnavailable):
        archive_in(tmp_path / "file" / "below").write(itertools.islice(history(), 12))
    segments = archive_in(tmp_path).write(itertools.islice(history(), 12))
    (tmp_path / segments[0].name).unlink()
    (tmp_path / segments[0].name).mkdir()
    with pytest.raises(LogUnavailable):
        archive_in(tmp_path).verify()


# ---- archive and log as one stream


@contextlib.asynccontextmanager
async def led(place: Path, appends: int = 20) -> AsyncIterator[tuple[SqliteLog, Pen]]:
    """A log with batches of three events, and its leader."""
    log = await SqliteLog.open(place / "log.db", CODEC, reserve_bytes=0, segment_events=10)
    pen = Pen(await log.lead(JOB, "a"))
    for _ in range(appends):
        await pen.write(events=3)
    yield log, pen
    await log.close()


def test_archive_then_truncate(tmp_path: Path) -> None:
    """After truncation every event is still read, from any number on; appending and following go on."""

    async def story() -> None:
        async with led(tmp_path) as (log, pen):
            segments = await log.archive(JOB)
            assert [(segment.first, segment.last) for segment in segments] == [
                (1, 12),
                (13, 24),
                (25, 36),
                (37, 48),
                (49, 60),
            ]
            assert await log.truncate(JOB, 36) == 12
            for after in range(61):
                assert await seqs(log.read(JOB, after=after)) == list(range(after + 1, 61))
            await pen.write()
            assert await seqs(log.follow(JOB, after=30), upto=61) == list(range(31, 62))
            assert [batch.first_seq async for batch in log.batches(JOB, after=33)][:2] == [34, 37]
            assert await log.archive(JOB) == []

    run(story())


def test_only_up_to(tmp_path: Path) -> None:
    """Archiving can end early: at the last file that is full by then."""

    async def story() -> None:
        async with led(tmp_path) as (log, _):
            assert [segment.last for segment in await log.archive(JOB, upto=30)] == [12, 24]
            assert [segment.last for segment in await log.archive(JOB)] == [36, 48, 60]

    run(story())


def test_nothing_unarchived_is_deleted(tmp_path: Path) -> None:
    """Truncating beyond the archive is refused, and deletes nothing."""

    async def story() -> None:
        async with led(tmp_path) as (log, _):
            await log.archive(JOB, upto=30)
            with pytest.raises(LogError, match="25-26 are not archived"):
                await log.truncate(JOB, 26)
            assert rows(log) == 20

    run(story())


def test_nothing_is_deleted_whose_archive_is_damaged(tmp_path: Path) -> None:
    """Before deleting, the archive is read and checked: a damaged one is no reason to delete the good copy."""

    async def story() -> None:
        async with led(tmp_path) as (log, _):
            segments = await log.archive(JOB)
            path = tmp_path / "log.db-archive" / JOB / segments[1].name
            content = bytearray(path.read_bytes())
            content[-1] ^= 1
            path.write_bytes(content)
            with pytest.raises(LogCorrupt):
                await log.truncate(JOB, 36)
            assert rows(log) == 20

    run(story())


def test_the_last_batch_stays(tmp_path: Path) -> None:
    """However far is truncated, the last batch stays: the next leader finds the head, and appends behind it."""

    async def story() -> None:
        async with led(tmp_path) as (log, _):
            await log.archive(JOB)
            await log.truncate(JOB, 60)
            assert rows(log) == 1
        log = await SqliteLog.open(tmp_path / "log.db", CODEC, reserve_bytes=0)
        pen = Pen(await log.lead(JOB, "b"), head=await log.head(JOB))
        await pen.write()
        assert await seqs(log.read(JOB)) == list(range(1, 62))
        await log.close()

    run(story())


def test_a_corrupt_row_is_read_from_the_archive(tmp_path: Path) -> None:
    """A row whose checksum fails is served from the archive, if it is there, and reported."""

    async def story() -> None:
        async with led(tmp_path) as (log, _):
            await log.archive(JOB)
        db = tables.connect(tmp_path / "log.db", create=False)
        db.execute("UPDATE batches SET counter = counter + 1 WHERE first_seq = 16")
        db.close()
        log = await SqliteLog.open(tmp_path / "log.db", CODEC, reserve_bytes=0)
        assert await seqs(log.read(JOB)) == list(range(1, 61))
        assert [(repair.kind, repair.first) for repair in log.repairs] == [(RepairKind.HEALED, 16)]
        await log.close()

    run(story())


def test_a_corrupt_last_row_is_mended_from_the_archive(tmp_path: Path) -> None:
    """A new leader whose last row is damaged, and that has no tail file, takes it from the archive and goes on behind it."""

    async def story() -> None:
        async with led(tmp_path) as (log, _):
            await log.archive(JOB)
        db = tables.connect(tmp_path / "log.db", create=False)
        db.execute("UPDATE batches SET counter = counter + 1 WHERE first_seq = 58")
        db.close()
        log = await SqliteLog.open(tmp_path / "log.db", CODEC, reserve_bytes=0)
        await Pen(await log.lead(JOB, "b"), head=60).write()
        assert await seqs(log.read(JOB)) == list(range(1, 62))
        assert [(repair.kind, repair.first) for repair in log.repairs] == [(RepairKind.REWRITTEN, 58)]
        await log.close()

    run(story())


def test_truncated_and_the_archive_gone(tmp_path: Path) -> None:
    """When the archive of truncated events is gone, the first event that is missing is named."""

    async def story() -> None:
        async with led(tmp_path) as (log, _):
            segments = await log.archive(JOB)
            await log.truncate(JOB, 36)
        (tmp_path / "log.db-archive" / JOB / segments[1].name).unlink()
        log = await SqliteLog.open(tmp_path / "log.db", CODEC)
        with pytest.raises(LogCorrupt) as found:
            await seqs(log.read(JOB))
        assert found.value.seq == 13
        assert await seqs(log.read(JOB, after=24)) == list(range(25, 61))
        await log.close()

    run(story())


def rows(log: SqliteLog) -> int:
    """How many batches the database holds."""
    db = tables.connect(log.path, create=False)
    (count,) = db.execute("SELECT count(*) FROM batches").fetchone()
    db.close()
    return int(count)


def test_segment_is_named_after_its_events() -> None:
    """A segment tells its file's name."""
    assert Segment(1, 12, "").name == "00000000000000000001-00000000000000000012.seg"
