"""Reading on a real etcd: pages, gaps, what does not decode, and the archive."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import structlog
from etcd_pen import JOB, Pen, Tell, before, counting, seqs
from etcd_pen import _loaded as _loaded  # noqa: PLC0414 - the fixture is taken over
from etcd_pen import tell as tell  # noqa: PLC0414 - the fixture is taken over

from dlrover_adapters.etcd import members, reading
from dlrover_adapters.etcd.client import Etcd
from dlrover_adapters.etcd.keys import Head, Keys, Leader
from dlrover_adapters.etcd.reading import Reader
from dlrover_core.errors import LogCorrupt, SchemaTooNew
from dlrover_core.kernel.codec import Codec
from dlrover_core.kernel.events import Record, Registry, event
from dlrover_core.kernel.log import LeaderInfo
from dlrover_core.testing.log_conformance import CODEC, make_batch


@event(99)
class FromTheFuture(NamedTuple):
    """An event that our codec does not know."""

    text: str


FUTURE = Codec(Registry([FromTheFuture]))


# ---- pages


def test_pages_of_all_sizes(tell: Tell) -> None:
    """Tiny and large batches in turn come back whole and in order, from wherever one begins."""

    async def story(pen: Pen, reader: Reader) -> None:
        for events, size, count in ((1, 8, 300), (3, 20_000, 40), (64, 24, 300), (1, 600_000, 3), (2, 8, 300)):
            await pen.write(events, size, count)
        assert await seqs(reader.read(JOB)) == counting(1, pen.seq)
        for after in (299, 300, 301, 420, 10_001, pen.seq - 1, pen.seq, pen.seq + 5):
            assert await seqs(reader.read(JOB, after)) == counting(after + 1, pen.seq)
        batches = [batch async for batch in reader.batches(JOB, 301)]
        assert (batches[0].first_seq, batches[-1].last_seq) == (301, pen.seq)

    tell(story)


def test_pages_too_large_to_receive_are_halved(tell: Tell, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where tiny batches are followed by large ones, what cannot be received is asked for in smaller pieces."""
    options = [one for one in members._OPTIONS if one[0] != "grpc.max_receive_message_length"]
    monkeypatch.setattr(members, "_OPTIONS", [*options, ("grpc.max_receive_message_length", 300_000)])

    async def story(pen: Pen, reader: Reader) -> None:
        await pen.write(count=300)
        await pen.write(size=100_000, count=30)
        await pen.write(count=300)
        assert await seqs(reader.read(JOB)) == counting(1, 630)

    tell(story)


def test_a_long_log_is_read_in_turns(tell: Tell, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long log does not hold the loop: others have it whenever a turn's time is over, here after every batch."""
    monkeypatch.setattr(reading, "TURN_S", 0.0)

    async def story(pen: Pen, reader: Reader) -> None:
        await pen.write(events=64, count=1600)
        turns = since = changes = 0

        async def others() -> None:
            nonlocal turns
            while True:
                await asyncio.sleep(0)
                turns += 1

        busy = asyncio.ensure_future(others())
        async for _ in reader.batches(JOB):
            changes, since = changes + (turns > since), turns
        busy.cancel()
        assert changes > 1500

    tell(story)


def test_names_and_leaders(tell: Tell) -> None:
    """Jobs are listed by the names they were given, and who leads is known by its key's birth."""
    names = ["a/b", "a%2Fb", "ä b", "z"]

    async def story(pen: Pen, reader: Reader) -> None:
        etcd = pen.etcd
        assert (await reader.jobs(), await reader.leader("z"), await reader.head("z")) == ([], None, Head())
        for name in names:
            await etcd.call("Txn", etcd.txn([], [etcd.put_op(Keys(etcd.address.prefix, name).name, b"")]))
        assert await reader.jobs() == sorted(names)
        put = etcd.txn([], [etcd.put_op(pen.keys.leader, Leader("host:1", "10.0.0.1:7000").packed())])
        token = (await etcd.call("Txn", put)).header.revision
        await etcd.call("Txn", put)
        assert await reader.leader(JOB) == LeaderInfo(token, "host:1", "10.0.0.1:7000")
        await pen.write(events=3)
        assert await reader.head(JOB) == Head(3, 1, 1)

    tell(story)


# ---- what cannot be read


def test_a_batch_that_does_not_decode_is_named(tell: Tell) -> None:
    """All that is before it is read; then the first event that cannot be is named."""

    async def story(pen: Pen, reader: Reader) -> None:
        await pen.write(events=4, count=5)
        await pen.put({pen.keys.batch(12): b"\xc1 not a batch"})
        found, error = await before(reader.read(JOB), LogCorrupt)
        assert (found, error.job, error.seq) == (counting(1, 8), JOB, 9)
        assert "events 9-12" in str(error)
        assert "cannot be decoded" in str(error)
        assert await seqs(reader.read(JOB, 12)) == counting(13, 20)

    tell(story)


def test_newer_schema_is_not_corruption(tell: Tell) -> None:
    """A batch of a newer version rises as that, also from a follower."""

    async def story(pen: Pen, reader: Reader) -> None:
        await pen.write(events=4)
        batch = FUTURE.batch(1, 2, [Record(5, 5, 1, 0, FromTheFuture("x"))])
        pen.seq = 5
        await pen.put({pen.keys.batch(5): batch.payload})
        for stream in (reader.read(JOB), reader.follow(JOB)):
            found, error = await before(stream, SchemaTooNew)
            assert found == counting(1, 4)
            assert "kind 99" in str(error)

    tell(story)


@pytest.mark.parametrize("first", [3, 5, 9])
def test_a_missing_batch_is_no_silence(tell: Tell, first: int) -> None:
    """A batch that is gone is named: in the middle, and at the end, where only the head knows of it."""

    async def story(pen: Pen, reader: Reader) -> None:
        await pen.write(events=2, count=5)
        await pen.delete(first, first + 1)
        for stream in (reader.read(JOB), reader.follow(JOB)):
            found, error = await before(stream, LogCorrupt)
            assert (found, error.seq) == (counting(1, first - 1), first)
            assert f"events {first}-{first + 1}: " in str(error)
            assert "?archive=PLACE" in str(error)

    tell(story)


def test_a_batch_in_anothers_place(tell: Tell) -> None:
    """A batch under another's key, or one that was there before, is not taken for the one that belongs there."""

    async def story(pen: Pen, reader: Reader) -> None:
        await pen.write(events=2, count=5)
        for wrong in (make_batch(1, 2, 3, 2), make_batch(1, 2, 4, 3), make_batch(1, 2, 5, 3)):
            await pen.put({pen.keys.batch(6): wrong.payload})
            found, error = await before(reader.read(JOB), LogCorrupt)
            assert (found, error.seq) == (counting(1, 4), 5)
            assert "is another one" in str(error)

    tell(story)


def test_a_foreign_key_is_named(tell: Tell) -> None:
    """What somebody else put among the batches is named, so that it can be looked at."""

    async def story(pen: Pen, reader: Reader) -> None:
        await pen.write(events=2, count=2)
        await pen.put({f"{pen.keys.log}00000000000000000003x": b"hello"})
        _, error = await before(reader.read(JOB), LogCorrupt)
        assert "00000000000000000003x" in str(error)

    tell(story)


def test_an_unlimited_range_is_not_asked_for(tell: Tell) -> None:
    """Pages have an end: etcd counts all keys of a range, and without an end reading a log would cost their number squared."""
    asked: list[tuple[bytes, bytes]] = []

    class Watched(Etcd):
        async def call(self, method: str, request: Any, **more: Any) -> Any:
            if method == "Range" and request.range_end:
                asked.append((request.key[-20:], request.range_end[-20:]))
            return await super().call(method, request, **more)

    async def story(pen: Pen, reader: Reader) -> None:
        await pen.write(events=3, count=3000)
        assert len(await seqs(reader.read(JOB))) == 9000
        assert len(asked) > 3
        for key, end in asked[1:]:
            assert int(end) - int(key) <= 2 * 3 * reading.LIMIT_MAX

    tell(story, kind=Watched)


def test_a_member_that_lives_in_the_past_is_asked_again(tell: Tell) -> None:
    """An answer older than one that was seen is no answer (etcd #20418): the log does not end there."""

    class Forgetful(Etcd):
        first: Any = None
        lies = told = 0

        async def call(self, method: str, request: Any, **more: Any) -> Any:
            reply = await super().call(method, request, **more)
            if self.lies:
                self.lies, self.told = self.lies - 1, self.told + 1
                return self.first
            self.first = self.first or reply
            return reply

    async def story(pen: Pen, reader: Reader) -> None:
        assert isinstance(reader.etcd, Forgetful)
        await pen.write(count=3)
        place = reading._Pass(reader, JOB, 0)
        for first, last in ((1, 3), (4, 6), (7, 9)):
            assert [batch.last_seq async for batch in place.batches()] == counting(first, last)
            await pen.write(count=3)
            reader.etcd.lies = 3 if last == 6 else 0
        assert reader.etcd.told == 3

    tell(story, kind=Forgetful)


# ---- the archive


def test_archive_and_etcd_are_one_stream(tell: Tell, tmp_path: Path) -> None:
    """What was truncated comes from the archive, wherever one begins; without one it is named, and how to name the archive."""

    async def story(pen: Pen, reader: Reader) -> None:
        await pen.write(events=3, count=20)
        archive = reader.archive_of(JOB)
        assert archive is not None
        batches = [batch async for batch in reader.batches(JOB)]
        await asyncio.to_thread(archive.write, batches[:15])
        await pen.delete(1, 36)
        for after in range(61):
            assert await seqs(reader.read(JOB, after)) == counting(after + 1, 60)
        assert await seqs(reader.follow(JOB), upto=60) == counting(1, 60)
        bare = Reader(reader.etcd, CODEC, lambda _: None)
        found, error = await before(bare.read(JOB, 4), LogCorrupt)
        assert (found, error.seq) == ([], 5)
        assert "events 5-36: not in etcd, which goes on with 37; if they were archived, ?archive=PLACE" in str(error)
        await pen.delete(37, 60)
        found, error = await before(reader.read(JOB), LogCorrupt)
        assert (found, error.seq) == (counting(1, 45), 46)
        assert "events 46-60: acknowledged, but not in etcd; the archive does not hold them either" in str(error)

    tell(story, tmp_path)


def test_damage_is_read_from_the_archive(tell: Tell, tmp_path: Path) -> None:
    """A batch that cannot be decoded, or is gone from the middle, is read from the archive, and there is a line about it."""

    async def story(pen: Pen, reader: Reader) -> None:
        await pen.write(events=3, count=20)
        archive = reader.archive_of(JOB)
        assert archive is not None
        batches = [batch async for batch in reader.batches(JOB)]
        await asyncio.to_thread(archive.write, batches[:10])
        await pen.delete(6, 6)
        await pen.put({pen.keys.batch(30): b""})
        with structlog.testing.capture_logs() as lines:
            assert await seqs(reader.read(JOB, 20)) == counting(21, 60)
        assert [(line["log_level"], line["seq"]) for line in lines] == [("error", 28)]
        assert await seqs(reader.read(JOB)) == counting(1, 60)

    tell(story, tmp_path)


@pytest.mark.parametrize("at", [1, 40, 400])
def test_truncation_under_a_reader(tell: Tell, tmp_path: Path, at: int) -> None:
    """Whoever is in the middle of reading when the log is truncated goes on in the archive, and then again in etcd."""

    async def story(pen: Pen, reader: Reader) -> None:
        await pen.write(events=3, size=2_000, count=400)
        archive = reader.archive_of(JOB)
        assert archive is not None
        batches = [batch async for batch in reader.batches(JOB)]
        await asyncio.to_thread(archive.write, batches[:300])
        found = []
        async for batch in reader.batches(JOB):
            found += [record.seq for record in batch.records]
            if batch.last_seq == 3 * at:
                await pen.delete(1, 600)
                await pen.write(count=2)
        assert found[:1200] == counting(1, 1200)
        assert found in (counting(1, 1200), counting(1, 1202))

    tell(story, tmp_path)
