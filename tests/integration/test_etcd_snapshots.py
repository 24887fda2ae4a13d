"""Snapshots on a real etcd: larger than a request, kept under the fence, half-written, damaged, and read while they change."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import structlog
from tools.etcd_cluster import Cluster

from dlrover_adapters.etcd import snapshots
from dlrover_adapters.etcd.address import parse
from dlrover_adapters.etcd.client import Etcd
from dlrover_adapters.etcd.keys import PART_BYTES, Keys, Leader
from dlrover_adapters.etcd.protocol import load
from dlrover_core.errors import LogError, LogUnavailable
from dlrover_core.kernel.log import Snapshot

STORY_S = 60.0


class Place:
    """A job with a leader."""

    def __init__(self, etcd: Etcd) -> None:
        self.etcd, self.keys, self.token = etcd, Keys(etcd.address.prefix, "job"), 0

    async def do(self, *operations: Any) -> int:
        """One transaction; its revision."""
        return int((await self.etcd.call("Txn", self.etcd.txn([], list(operations)))).header.revision)

    async def elect(self) -> int:
        """Somebody new leads; the new token."""
        await self.do(self.etcd.delete_op(self.keys.leader))
        self.token = await self.do(self.etcd.put_op(self.keys.leader, Leader("a").packed()))
        return self.token

    async def put(self, snapshot: Snapshot) -> bool:
        """Keep a snapshot as the present leader."""
        return await snapshots.put(self.etcd, self.keys, self.token, snapshot)

    async def latest(self, head: int = 10**6) -> Snapshot | None:
        """The newest one."""
        return await snapshots.latest(self.etcd, self.keys, head)

    async def lying(self) -> list[str]:
        """The keys of all snapshots, without what they begin with."""
        reply = await self.etcd.call("Range", self.etcd.under(self.keys.snap, keys_only=True))
        return [kv.key.decode()[len(self.keys.snap) :].lstrip("0") for kv in reply.kvs]


Story = Callable[[Place], Coroutine[Any, Any, None]]
Tell = Callable[..., None]


@pytest.fixture(autouse=True, scope="module")
def _loaded() -> None:
    """The messages are built before any loop runs: that takes longer than a callback may, and `EtcdLog` does it in a thread."""
    load()


@pytest.fixture
def tell(etcd_server: Cluster, etcd_prefix: str) -> Tell:
    """Tells a story to a job of its own, over a client of class ``kind``."""

    def told(story: Story, kind: type[Etcd] = Etcd) -> None:
        async def run() -> None:
            etcd = kind(parse(etcd_server.url(etcd_prefix)))
            try:
                place = Place(etcd)
                await place.elect()
                await story(place)
            finally:
                await etcd.close()

        asyncio.run(asyncio.wait_for(run(), STORY_S))

    return told


def state(size: int, seed: int = 1) -> bytes:
    """Bytes of which no part is like another."""
    return hashlib.shake_128(bytes([seed])).digest(size)


@pytest.mark.parametrize("size", [0, 1, PART_BYTES - 1, PART_BYTES, PART_BYTES + 1, 7 * PART_BYTES // 2])
def test_any_size_comes_back(tell: Tell, size: int) -> None:
    """A snapshot comes back as it was given, however many requests it takes."""

    async def story(place: Place) -> None:
        snapshot = Snapshot(7, "schema-ä", state(size))
        assert await place.put(snapshot)
        assert await place.latest() == snapshot
        assert len(await place.lying()) == -(-size // PART_BYTES) + 1

    tell(story)


def test_two_are_kept(tell: Tell) -> None:
    """The newest two stay, whole; of older ones nothing is left."""

    async def story(place: Place) -> None:
        assert await place.latest() is None
        for seq in (10, 20, 30, 40):
            assert await place.put(Snapshot(seq, "s", state(PART_BYTES + 1, seq)))
        assert await place.lying() == ["30/0000", "30/0001", "30/manifest", "40/0000", "40/0001", "40/manifest"]
        for head, seq in ((40, 40), (39, 30), (30, 30)):
            assert await place.latest(head) == Snapshot(seq, "s", state(PART_BYTES + 1, seq))
        assert await place.latest(29) is None

    tell(story)


def test_half_written_ones_are_ignored_and_removed(tell: Tell) -> None:
    """Parts without a manifest are nobody's snapshot, and the next writer removes them, however many there are."""

    async def story(place: Place) -> None:
        whole = Snapshot(5, "s", b"five")
        assert await place.put(whole)
        for seq in (6, 9, 12):
            await place.do(*(place.etcd.put_op(place.keys.part(seq, part), b"x") for part in range(60)))
        assert await place.latest() == whole
        assert await place.put(Snapshot(9, "s", b"nine"))
        assert await place.lying() == ["5/0000", "5/manifest", "9/0000", "9/manifest"]
        await place.do(*(place.etcd.put_op(place.keys.part(seq, 0), b"x") for seq in range(20, 140)))
        assert await place.put(Snapshot(200, "s", b"x"))
        assert await place.put(Snapshot(300, "s", b"x"))
        assert await place.lying() == ["200/0000", "200/manifest", "300/0000", "300/manifest"]

    tell(story)


def test_who_does_not_lead_keeps_nothing(tell: Tell) -> None:
    """A deposed leader's snapshot is refused without an error, and removes nothing."""

    async def story(place: Place) -> None:
        assert await place.put(Snapshot(5, "s", b"five"))
        old, lying = place.token, await place.lying()
        await place.elect()
        for seq in (5, 6):
            assert not await snapshots.put(place.etcd, place.keys, old, Snapshot(seq, "s", b"mine"))
        await place.do(place.etcd.delete_op(place.keys.leader))
        assert not await snapshots.put(place.etcd, place.keys, old, Snapshot(6, "s", b"mine"))
        assert await place.lying() == lying
        assert await place.latest() == Snapshot(5, "s", b"five")

    tell(story)


class Interrupted(Etcd):
    """Before its ``at``-th write something else happens."""

    at = 0
    meanwhile: Callable[[], Coroutine[Any, Any, Any]]

    async def call(self, method: str, request: Any, **more: Any) -> Any:
        """Count conditional writes."""
        if method == "Txn" and request.compare and self.at:
            self.at -= 1
            if not self.at:
                await self.meanwhile()
        return await super().call(method, request, **more)


@pytest.mark.parametrize("at", [1, 2, 3, 4])
def test_deposed_half_way(tell: Tell, at: int) -> None:
    """Every part is under the fence: whoever is deposed between two of them leaves no snapshot, and the next leader cleans up."""

    async def story(place: Place) -> None:
        assert isinstance(place.etcd, Interrupted)
        whole = Snapshot(5, "s", b"five")
        assert await place.put(whole)
        place.etcd.at, place.etcd.meanwhile = at, place.elect
        assert not await place.put(Snapshot(9, "s", state(2 * PART_BYTES + 1)))
        assert await place.latest() == whole
        assert len(await place.lying()) == 2 + at - 1
        assert await place.put(Snapshot(9, "s", b"nine"))
        assert await place.latest() == Snapshot(9, "s", b"nine")
        assert len(await place.lying()) == 4

    tell(story, Interrupted)


def test_the_same_event_again(tell: Tell) -> None:
    """A snapshot taken anew of the same event, by another version and of another size, replaces the first whole."""

    async def story(place: Place) -> None:
        for size, schema in ((3 * PART_BYTES, "a"), (PART_BYTES, "b"), (2 * PART_BYTES + 5, "c")):
            snapshot = Snapshot(9, schema, state(size))
            assert await place.put(snapshot)
            assert await place.latest() == snapshot
        assert await place.lying() == ["9/0000", "9/0001", "9/0002", "9/manifest"]

    tell(story)


DAMAGES: dict[str, Callable[[Place], Any]] = {
    "a changed part": lambda place: place.etcd.put_op(place.keys.part(9, 1), state(PART_BYTES, 3)),
    "a cut part": lambda place: place.etcd.put_op(place.keys.part(9, 2), b""),
    "a missing part": lambda place: place.etcd.delete_op(place.keys.part(9, 0)),
    "a manifest that is none": lambda place: place.etcd.put_op(place.keys.manifest(9), b"\xc1"),
    "an empty manifest": lambda place: place.etcd.put_op(place.keys.manifest(9), b""),
    "another manifest's form": lambda place: place.etcd.put_op(place.keys.manifest(9), b"\x96\xa2s2\1\xa0\1\1\xc4\0"),
    "a manifest of other types": lambda place: place.etcd.put_op(
        place.keys.manifest(9), b"\x96\xa2s1\1\xa0\1\xa0\xc4\0"
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_ones_are_passed_over(tell: Tell, damage: str) -> None:
    """A snapshot is a cache: of one that does not match its sum the log says so in a line, and takes the one before."""

    async def story(place: Place) -> None:
        older = Snapshot(5, "s", b"five")
        assert await place.put(older)
        assert await place.put(Snapshot(9, "s", state(3 * PART_BYTES)))
        await place.do(DAMAGES[damage](place))
        with structlog.testing.capture_logs() as lines:
            assert await place.latest() == older
        assert [(line["log_level"], line["seq"]) for line in lines] == [("warning", 9)]

    tell(story)


class Slow(Etcd):
    """Something happens before each value that is read at a revision."""

    meanwhile: Callable[[], Coroutine[Any, Any, Any]] | None = None
    times = 0

    async def call(self, method: str, request: Any, **more: Any) -> Any:
        """Let it happen."""
        if method == "Range" and request.revision and self.meanwhile and self.times:
            self.times -= 1
            await self.meanwhile()
        return await super().call(method, request, **more)


def test_reading_while_it_is_replaced(tell: Tell) -> None:
    """Whoever reads a snapshot while two newer ones push it out still gets it whole."""

    async def story(place: Place) -> None:
        assert isinstance(place.etcd, Slow)
        snapshot = Snapshot(5, "s", state(2 * PART_BYTES))
        assert await place.put(snapshot)
        newer = iter(range(6, 20))

        async def put() -> None:
            await place.put(Snapshot(next(newer), "s", b"newer"))

        place.etcd.meanwhile, place.etcd.times = put, 3
        assert await place.latest() == snapshot
        assert await place.latest() == Snapshot(8, "s", b"newer")

    tell(story, Slow)


def test_reading_while_etcd_compacts(tell: Tell, etcd_server: Cluster) -> None:
    """What was replaced and compacted away under a reader is looked for again; that does not go on for ever."""

    async def story(place: Place) -> None:
        assert isinstance(place.etcd, Slow)
        assert await place.put(Snapshot(5, "s", state(PART_BYTES)))
        newer = iter(range(6, 20))

        async def replace() -> None:
            for _ in range(2):
                await place.put(Snapshot(next(newer), "s", b"newer"))
            await asyncio.to_thread(etcd_server.compact)

        place.etcd.meanwhile, place.etcd.times = replace, 2
        assert await place.latest() == Snapshot(9, "s", b"newer")
        place.etcd.times = 10
        with pytest.raises(LogUnavailable, match="compacts faster"):
            await place.latest()

    tell(story, Slow)


def test_one_too_large_is_refused(tell: Tell, monkeypatch: pytest.MonkeyPatch) -> None:
    """A snapshot of more parts than keys have digits for is refused before anything is written."""
    monkeypatch.setattr(snapshots, "PARTS_MAX", 2)

    async def story(place: Place) -> None:
        with pytest.raises(LogError, match="more than 2 parts"):
            await place.put(Snapshot(5, "s", state(2 * PART_BYTES + 1)))
        assert await place.lying() == []

    tell(story)
