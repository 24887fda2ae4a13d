"""Reading and following on a real etcd: pages, gaps, the archive, and followers through all that etcd is known to do."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from contextlib import aclosing
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import pytest
import structlog
from tools.etcd_cluster import Cluster

from dlrover_adapters.etcd import members, reading
from dlrover_adapters.etcd.address import Address, parse
from dlrover_adapters.etcd.client import Etcd
from dlrover_adapters.etcd.errors import Closed, Compacted, Denied
from dlrover_adapters.etcd.keys import Head, Keys, Leader, end_of
from dlrover_adapters.etcd.protocol import load
from dlrover_adapters.etcd.reading import Reader
from dlrover_core.errors import LogCorrupt, LogUnavailable, SchemaTooNew
from dlrover_core.kernel.codec import Codec
from dlrover_core.kernel.events import Batch, Record, Registry, event
from dlrover_core.kernel.log import LeaderInfo
from dlrover_core.logs.archive import Archive, LocalStore
from dlrover_core.testing.log_conformance import CODEC, make_batch
from dlrover_core.testing.proxy import Proxy

JOB = "job/1.a"
STORY_S = 60.0
E = TypeVar("E", bound=Exception)


@event(99)
class FromTheFuture(NamedTuple):
    """An event that our codec does not know."""

    text: str


FUTURE = Codec(Registry([FromTheFuture]))


class Pen:
    """Writes batches as a leader does, but for the fence."""

    def __init__(self, etcd: Etcd, job: str = JOB) -> None:
        self.etcd, self.keys = etcd, Keys(etcd.address.prefix, job)
        self.seq = self.counter = 0

    def draft(self, events: int = 1, size: int = 8) -> Batch:
        """The next batch, not yet written."""
        self.counter += 1
        batch = make_batch(1, self.counter, self.seq + 1, events, size)
        self.seq = batch.last_seq
        return batch

    async def write(self, events: int = 1, size: int = 8, count: int = 1) -> None:
        """Append so many batches."""
        while count > 0:
            fitting = min(count, 64, 1024 // events, 2**20 // (events * (size + 16)))
            batches = [self.draft(events, size) for _ in range(max(1, fitting))]
            await self.put({self.keys.batch(batch.last_seq): batch.payload for batch in batches})
            count -= len(batches)

    async def put(self, values: dict[str, bytes]) -> None:
        """Put what lies there, and the head."""
        values = values | {self.keys.head: Head(self.seq, 1, self.counter).packed()}
        await self.etcd.call("Txn", self.etcd.txn([], [self.etcd.put_op(*each) for each in values.items()]))

    async def delete(self, first: int, last: int) -> None:
        """Delete the batches that end from ``first`` to ``last``."""
        operation = self.etcd.delete_op(self.keys.batch(first), self.keys.batch(last + 1))
        await self.etcd.call("Txn", self.etcd.txn([], [operation]))


Story = Callable[[Pen, Reader], Coroutine[Any, Any, None]]
Tell = Callable[..., None]


@pytest.fixture(autouse=True, scope="module")
def _loaded() -> None:
    """The messages are built before any loop runs: that takes longer than a callback may, and `EtcdLog` does it in a thread."""
    load()


@pytest.fixture
def tell(etcd_server: Cluster, etcd_prefix: str) -> Tell:
    """Tells a story to a log of its own: a writer, and a reader over a client of class ``kind``, with an archive or none."""

    def told(story: Story, archive: Path | None = None, kind: type[Etcd] = Etcd) -> None:
        async def run() -> None:
            address = parse(etcd_server.url(etcd_prefix))
            writing, etcd = Etcd(address), kind(address)
            archive_of = lambda job: Archive(LocalStore(archive), job, CODEC, 1) if archive else None  # noqa: E731
            try:
                await story(Pen(writing), Reader(etcd, CODEC, archive_of))
            finally:
                await etcd.close()
                await writing.close()

        asyncio.run(asyncio.wait_for(run(), STORY_S))

    return told


async def seqs(records: AsyncIterator[Record], upto: int | None = None) -> list[int]:
    """The sequence numbers of a stream, to its end or to ``upto``."""
    found = []
    async for record in records:
        found.append(record.seq)
        if record.seq == upto:
            break
    return found


def counting(first: int, last: int) -> list[int]:
    """The numbers from ``first`` to ``last``, both included."""
    return list(range(first, last + 1))


async def before(records: AsyncIterator[Record], error: type[E]) -> tuple[list[int], E]:
    """What a stream gives before it ends with an error, and the error."""
    found: list[int] = []
    try:
        async for record in records:
            found.append(record.seq)  # noqa: PERF401  # what came before the error counts
    except error as caught:
        return found, caught
    pytest.fail(f"no {error.__name__} after {found[-1:]}")


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


# ---- following


class Follower:
    """Follows a job in a task, and insists that each number comes after the one before it."""

    def __init__(self, reader: Reader, after: int) -> None:
        self.last = after
        self._more = asyncio.Event()
        self.task = asyncio.ensure_future(self._follow(reader))

    async def _follow(self, reader: Reader) -> None:
        async with aclosing(reader.follow(JOB, self.last)) as records:
            async for record in records:
                assert record.seq == self.last + 1, f"{record.seq} after {self.last}"
                self.last = record.seq
                self._more.set()

    async def until(self, seq: int) -> None:
        """Wait until it has come by that number. Raises what ends it."""
        while self.last < seq:
            self._more.clear()
            news = asyncio.ensure_future(self._more.wait())
            await asyncio.wait({news, self.task}, return_when=asyncio.FIRST_COMPLETED)
            news.cancel()
            if self.task.done():
                await self.task


@contextlib.asynccontextmanager
async def following(reader: Reader, after: int = 0) -> AsyncIterator[Follower]:
    """A follower that is at work now."""
    follower = Follower(reader, after)
    try:
        yield follower
    finally:
        follower.task.cancel()
        await asyncio.wait([follower.task])
        if not follower.task.cancelled():
            follower.task.exception()


def test_followers_leave_nothing_behind(tell: Tell) -> None:
    """A follower that is closed ends its watch: no task of it is left."""

    async def story(pen: Pen, reader: Reader) -> None:
        await pen.write()
        running = asyncio.all_tasks()
        async with following(reader) as follower:
            await follower.until(1)
            await pen.write()
            await follower.until(2)
        await until(lambda: asyncio.all_tasks() == running)  # grpc's own end a moment later

    tell(story)


def test_closing_the_log_ends_followers(tell: Tell) -> None:
    """A follower of a log that is closed is told so at once, and is not left trying for ever."""

    async def story(pen: Pen, reader: Reader) -> None:
        await pen.write()
        async with following(reader) as follower:
            await follower.until(1)
            await pen.write()
            await follower.until(2)
            await reader.etcd.close()
            with pytest.raises(Closed):
                await follower.until(3)

    tell(story)


def test_compaction_under_a_follower(tell: Tell, etcd_server: Cluster) -> None:
    """Old versions of keys may be forgotten as often as etcd likes; batches have but one."""

    async def story(pen: Pen, reader: Reader) -> None:
        async with following(reader) as follower:
            for number in range(1, 20):
                await pen.write()
                await asyncio.to_thread(etcd_server.compact)
                if number % 5 == 0:
                    await follower.until(number)
            await follower.until(19)

    tell(story)


def test_truncation_under_a_follower(tell: Tell, tmp_path: Path) -> None:
    """A follower that was away while the log was truncated goes on from the archive."""

    async def story(pen: Pen, reader: Reader) -> None:
        archive = reader.archive_of(JOB)
        assert archive is not None
        await pen.write(events=3, count=2)
        async with aclosing(reader.follow(JOB)) as records:
            assert (await anext(records)).seq == 1
            await pen.write(events=3, count=50)
            await asyncio.to_thread(archive.write, [batch async for batch in reader.batches(JOB)])
            await pen.write(events=3, count=2)
            await pen.delete(1, 156)
            assert await seqs(records, upto=162) == counting(2, 162)

    tell(story, tmp_path)


def test_a_job_that_is_deleted_ends_its_followers(tell: Tell) -> None:
    """A log that ends before what was read of it is another one: nothing more of it can follow."""

    async def story(pen: Pen, reader: Reader) -> None:
        await pen.write(events=3, count=2)
        async with following(reader) as follower:
            await follower.until(6)
            etcd, base = pen.etcd, pen.keys.base
            await etcd.call("Txn", etcd.txn([], [etcd.delete_op(base, end_of(base))]))
            with pytest.raises(LogCorrupt, match="ends with 0, but 6 was read before"):
                await follower.until(7)

    tell(story)


class Liar(Etcd):
    """Its watch does all that etcd's has been seen to do (#15271, #17247, #17529, #18089, #20221), and breaks besides."""

    dice = random.Random(4)
    done: set[str]

    async def watch(self, prefix: str, start_revision: int, silence_s: float = 1.0) -> AsyncGenerator[Any, None]:
        """The true watch's responses, some lost, doubled, late, out of order; or none of them."""
        held: list[Any] = []
        self.done = getattr(self, "done", set())
        async with aclosing(super().watch(prefix, start_revision, silence_s)) as responses:
            async for response in responses:
                fate = self.dice.choice(["pass", "lose", "double", "hold", "shuffle", "break", "compact", "past"])
                self.done.add(fate)
                if fate == "break":
                    raise LogUnavailable("the watch broke")
                if fate == "compact":
                    raise Compacted("the watch was compacted away", 7)
                if response.created or fate in {"pass", "double", "past"}:
                    yield response
                if fate in {"double", "past"}:
                    yield held[0] if held and fate == "past" else response
                if fate in {"hold", "shuffle"}:
                    held.append(response)
                if fate == "shuffle":
                    self.dice.shuffle(held)
                    for one in held:
                        yield one


def test_a_lying_watch_makes_no_gap(tell: Tell, monkeypatch: pytest.MonkeyPatch) -> None:
    """Events lost, doubled, reordered, from the past, and watches cancelled: followers miss nothing and repeat nothing."""
    monkeypatch.setattr(reading, "SILENCE_S", 0.05)
    monkeypatch.setattr(reading, "PAUSE_MAX_S", 0.05)

    async def story(pen: Pen, reader: Reader) -> None:
        async with following(reader) as first, following(reader, 31) as second:
            for number in range(300):
                await pen.write(events=1 + number % 3)
                if number % 50 == 0:
                    await first.until(pen.seq)
            await first.until(pen.seq)
            await second.until(pen.seq)
        assert isinstance(reader.etcd, Liar)
        assert len(reader.etcd.done) == 8

    tell(story, kind=Liar)


def test_an_append_rings(tell: Tell, monkeypatch: pytest.MonkeyPatch) -> None:
    """Followers do not wait for the time at which they look by themselves."""
    monkeypatch.setattr(reading, "SILENCE_S", 2 * STORY_S)

    async def story(pen: Pen, reader: Reader) -> None:
        async with following(reader) as follower:
            for _ in range(10):
                await pen.write()
                await follower.until(pen.seq)

    tell(story)


class Deaf(Etcd):
    """Its watch tells of nothing but that it is there, and of its progress when asked."""

    async def watch(self, prefix: str, start_revision: int, silence_s: float = 1.0) -> AsyncGenerator[Any, None]:
        """A watch on a key that nobody writes."""
        async with aclosing(super().watch(f"{prefix}/nothing", start_revision, silence_s)) as responses:
            async for response in responses:
                yield response


def test_a_silent_watch_is_not_believed(tell: Tell, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no event ever comes, a follower looks by itself before long."""
    monkeypatch.setattr(reading, "SILENCE_S", 0.1)

    async def story(pen: Pen, reader: Reader) -> None:
        async with following(reader) as follower:
            for _ in range(5):
                await pen.write()
                await follower.until(pen.seq)

    tell(story, kind=Deaf)


def test_events_that_say_nothing_new_do_not_ring(tell: Tell) -> None:
    """A watch that tells of what was read already costs no read: a busy job is read once per page, not once per append."""

    class Heard(Etcd):
        newest = 0

        async def watch(self, prefix: str, start_revision: int, silence_s: float = 1.0) -> AsyncGenerator[Any, None]:
            async with aclosing(super().watch(prefix, start_revision, silence_s)) as responses:
                async for response in responses:
                    for each in response.events:
                        self.newest = Head.unpacked(each.kv.value).seq
                    yield response

    async def story(pen: Pen, reader: Reader) -> None:
        assert isinstance(reader.etcd, Heard)
        place = reading._Pass(reader, JOB, 50)
        async with aclosing(reader._rings(place, reading._Trouble(JOB))) as rings:
            await anext(rings)
            await anext(rings)  # the watch stands
            for _ in range(51):
                await pen.write()
            await anext(rings)
        assert reader.etcd.newest == 51

    tell(story, kind=Heard)


BREAKS: dict[str, Callable[[Proxy], None]] = {
    "both ways": lambda proxy: proxy.block(),
    "no answers": lambda proxy: proxy.block(up=False),
    "no requests": lambda proxy: proxy.block(down=False),
    "refused": lambda proxy: proxy.refuse(),
    "cut": lambda proxy: proxy.cut(),
}


@pytest.mark.parametrize("way", BREAKS)
def test_a_partition_is_outlived(tell: Tell, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """What is appended while etcd cannot be reached is read when it can; there is a line about it, and one when it is over."""
    monkeypatch.setattr(reading, "SILENCE_S", 0.2)

    async def story(pen: Pen, reader: Reader) -> None:
        address = pen.etcd.address
        async with Proxy(address.endpoints[0]) as proxy:
            etcd = Etcd(dataclasses.replace(address, endpoints=(proxy.address,)))
            away = Reader(etcd, CODEC, lambda _: None)
            try:
                with structlog.testing.capture_logs() as lines:
                    async with following(away) as follower:
                        for _ in range(2):
                            await pen.write(events=3)
                            await follower.until(pen.seq)
                        await until(lambda: not lines)
                        BREAKS[way](proxy)
                        await until(lambda: [line["log_level"] for line in lines] == ["warning"])
                        await pen.write(events=3, count=100)
                        proxy.heal()
                        await follower.until(pen.seq)
                        await until(lambda: [line["log_level"] for line in lines] == ["warning", "info"])
                assert lines[0]["after"] == 6
                assert lines[0]["job"] == JOB
            finally:
                await etcd.close()

    tell(story)


async def until(holds: Callable[[], bool], bound_s: float = 20.0) -> None:
    """Look until it holds."""
    deadline = asyncio.get_running_loop().time() + bound_s
    while not holds():
        assert asyncio.get_running_loop().time() < deadline
        await asyncio.sleep(0.01)


def test_followers_outlive_members() -> None:
    """With three members, each stopped, killed and restarted in turn, a follower misses nothing and is not long behind."""

    async def story(cluster: Cluster) -> None:
        address = parse(cluster.url())
        etcd, writing = Etcd(address), Etcd(address)
        pen, reader = Pen(writing), Reader(etcd, CODEC, lambda _: None)
        try:
            async with following(reader) as follower:
                for member in range(3):
                    for stop, start in ((cluster.pause, cluster.resume), (cluster.kill, cluster.start)):
                        await pen.write(events=3)
                        await follower.until(pen.seq)
                        await asyncio.to_thread(stop, member)
                        await pen.write(events=3, count=5)
                        await asyncio.wait_for(follower.until(pen.seq), 15)
                        await asyncio.to_thread(start, member)
                        await asyncio.to_thread(cluster.wait_healthy)
                assert follower.last == pen.seq == 3 * 6 * 6
        finally:
            await etcd.close()
            await writing.close()

    with Cluster(3) as cluster:
        asyncio.run(asyncio.wait_for(story(cluster), 100))


def test_followers_are_refused_at_once() -> None:
    """A wrong password is no trouble that passes."""

    async def story(address: Address) -> None:
        etcd = Etcd(dataclasses.replace(address, password="wrong"))
        try:
            async with following(Reader(etcd, CODEC, lambda _: None)) as follower:
                with pytest.raises(Denied, match="user or password is wrong"):
                    await follower.until(1)
        finally:
            await etcd.close()

    with Cluster(user="root", password="right") as cluster:
        asyncio.run(asyncio.wait_for(story(parse(cluster.url())), STORY_S))
