"""Following on a real etcd: watches that lie or say nothing, partitions, and members that die."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
import structlog
from etcd_pen import JOB, STORY_S, Pen, Tell, counting, seqs
from etcd_pen import _loaded as _loaded  # noqa: PLC0414 - the fixture is taken over
from etcd_pen import tell as tell  # noqa: PLC0414 - the fixture is taken over
from tools.etcd_cluster import Cluster

from dlrover_adapters.etcd import reading
from dlrover_adapters.etcd.address import Address, parse
from dlrover_adapters.etcd.client import Etcd
from dlrover_adapters.etcd.errors import Closed, Compacted, Denied
from dlrover_adapters.etcd.keys import Head, end_of
from dlrover_adapters.etcd.reading import Reader
from dlrover_core.errors import LogCorrupt, LogUnavailable
from dlrover_core.testing.log_conformance import CODEC
from dlrover_core.testing.proxy import Proxy


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
