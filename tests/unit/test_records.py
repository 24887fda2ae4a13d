"""Pages of records: how they are packed, what spoils them, and who gets which when."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import cast

import msgpack
import pytest

from dlrover_core.errors import LogUnavailable, MalformedMessage, SchemaTooNew
from dlrover_core.kernel.log import EventLog, LeaderInfo, Page, Paging
from dlrover_core.logs.memory import MemoryLog
from dlrover_core.runtime import records
from dlrover_core.runtime.records import BeyondHead, Elsewhere, Records, Told, page_of, unpack
from dlrover_core.testing.log_conformance import CODEC, JOB, Pen

LEADER = LeaderInfo(3, "host/1", "host:29400")


def run(story: Callable[[], Awaitable[None]]) -> None:
    """Tell a story in an event loop of its own, within a bound."""

    async def told() -> None:
        await asyncio.wait_for(story(), 30)

    asyncio.run(told())


class Counting(MemoryLog):
    """A log that counts who asks it for a page, and may be kept from answering."""

    def __init__(self) -> None:
        super().__init__(CODEC)
        self.asked = 0
        self.answered: asyncio.Queue[None] = asyncio.Queue()
        self.stuck = False

    async def page(self, job: str, after: int, bytes_max: int) -> Page:
        """As `Paging` says."""
        self.asked += 1
        if self.stuck:
            await asyncio.get_running_loop().create_future()
        payloads = [one.payload async for one in self.batches(job, after)]
        last = after + len(payloads)
        self.answered.put_nowait(None)
        return Page(payloads, last, more=False)


async def handed(desk: Records, after: int, wait_s: float = 0.0, bytes_max: int = 1 << 20) -> Told:
    """What a reader has after unpacking."""
    return unpack(await desk.hand_out(after, bytes_max, wait_s))


def test_a_page_is_what_was_packed() -> None:
    """Whatever a head says and however many batches there are, the reader has the same; a newer master's head may be longer."""
    for payloads in ([], [b"one"], [b"a" * 1000, b"", b"b"]):
        body = b"".join(payloads)
        lengths = [len(one) for one in payloads]
        row = ("j", 4, 9, 12, True, *LEADER, lengths, records.zlib.crc32(body))
        told = unpack(records.pack(row, body))
        assert told == Told("j", 4, 9, 12, True, LEADER, payloads)
        assert unpack(records.pack((*row, "news", 7), body)) == told
    nobody = records.pack(("j", 4, 4, 4, False, 0, "", "", (), 0), b"")
    assert unpack(nobody).leader is None


def test_a_spoilt_page_is_never_taken_for_a_whole_one() -> None:
    """Cut anywhere it cannot be read; a changed byte is found; what is none, and what is newer, is said to be."""
    body = b"first" + b"second"
    row = ("j", 0, 2, 2, False, *LEADER, [5, 6], records.zlib.crc32(body))
    whole = records.pack(row, body)
    for length in range(len(whole)):
        with pytest.raises((LogUnavailable, MalformedMessage)):
            unpack(whole[:length])
    with pytest.raises(LogUnavailable, match="cut or changed"):
        unpack(whole + b"x")
    for at in range(16, len(whole)):
        with pytest.raises((LogUnavailable, MalformedMessage)):
            unpack(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    with pytest.raises(MalformedMessage, match="no page of records"):
        unpack(b"<html>this is a login page</html>")
    with pytest.raises(SchemaTooNew, match="format 2, newer than 1; upgrade"):
        unpack(whole[:4] + (2).to_bytes(4, "little") + whole[8:])
    short = msgpack.packb(("j", 0))
    front = records._FRONT.pack(b"DLRP", 1, len(short), records.zlib.crc32(short))
    with pytest.raises(MalformedMessage, match="the head of a page"):
        unpack(front + short)


def test_pages_are_bounded_and_follow_each_other() -> None:
    """As many batches as fit, at least one; together they are the log, byte for byte, whether or not the log pages by itself."""

    async def story() -> None:
        log = MemoryLog(CODEC)
        pen = Pen(await log.lead(JOB, "a"))
        written = [(await pen.write(events=count, size=60)).payload for count in (1, 3, 40, 1, 1)]
        desk = Records(log, JOB, lambda: LEADER)
        for bytes_max in (1, 200, 5000, 1 << 20):
            after, found, sizes = 0, list[bytes](), list[int]()
            while True:
                told = await handed(desk, after, bytes_max=bytes_max)
                assert (told.job, told.after, told.leader) == (JOB, after, LEADER)
                found += told.payloads
                sizes += [sum(map(len, told.payloads))] if len(told.payloads) > 1 else []
                after = told.last
                if not told.more:
                    break
            assert found == written
            assert after == 46
            assert all(size <= bytes_max for size in sizes)
        # One that begins in the middle of a batch gets all of it.
        assert list((await handed(desk, 3, bytes_max=1)).payloads) == written[1:2]
        assert not isinstance(log, Paging)
        assert isinstance(cast(EventLog, Counting()), Paging)

    run(story)


def test_the_head_alone() -> None:
    """Who asks for no bytes learns how far the log goes, and who leads."""

    async def story() -> None:
        log = MemoryLog(CODEC)
        await Pen(await log.lead(JOB, "a")).write(events=5)
        told = await handed(Records(log, JOB, lambda: None), 0, bytes_max=0)
        assert (told.head, told.leader, told.payloads, told.more) == (5, None, [], True)

    run(story)


def test_who_has_read_more_than_there_is_is_told() -> None:
    """Another log, or an older copy: nothing comes of waiting for it to catch up."""

    async def story() -> None:
        log = MemoryLog(CODEC)
        await Pen(await log.lead(JOB, "a")).write(events=5)
        with pytest.raises(BeyondHead, match="ends with event 5, but 7 was read before") as caught:
            await Records(log, JOB, lambda: None).hand_out(7, 1000, 1.0)
        assert caught.value.head == 5

    run(story)


def test_a_log_that_cannot_be_read_names_the_leader(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that fails and one that hangs: whoever leads may be better off."""
    monkeypatch.setattr(records, "READ_S", 0.05)

    async def story() -> None:
        log = Counting()
        desk = Records(log, JOB, lambda: LEADER)
        log.stuck = True
        with pytest.raises(Elsewhere, match="did not answer within") as caught:
            await desk.hand_out(0, 1000, 0.0)
        assert caught.value.address == "host:29400"
        log.stuck, log.faults.unavailable = False, True
        with pytest.raises(Elsewhere, match="unavailable"):
            await desk.hand_out(0, 1000, 0.0)

    run(story)


def test_followers_share_what_a_commit_brings() -> None:
    """Twenty wait; commits that come in a moment are one page, read from the log once, and the same for all."""

    async def story() -> None:
        log = Counting()
        pen = Pen(await log.lead(JOB, "a"))
        await pen.write()
        desk = Records(log, JOB, lambda: LEADER)
        desk.ring(1)
        waiting = [asyncio.ensure_future(handed(desk, 1, 20.0)) for _ in range(20)]
        for _ in waiting:  # each looks, and waits
            await log.answered.get()
        for _ in range(5):
            await pen.write()
            desk.ring(pen.head)
        found = await asyncio.gather(*waiting)
        assert [one.last for one in found] == [6] * 20
        assert log.asked == 21

    run(story)


def test_a_leader_serves_followers_from_what_it_has_committed() -> None:
    """The newest batches, to where the last gathering went, so that all are at one place; who is further behind is read for."""

    async def story() -> None:
        log = Counting()
        pen = Pen(await log.lead(JOB, "a"))
        first = await pen.write()
        desk = Records(log, JOB, lambda: LEADER)
        desk.committed(first)
        waiting = [asyncio.ensure_future(handed(desk, 1, 20.0)) for _ in range(3)]
        for _ in waiting:
            await log.answered.get()
        written = [await pen.write(events=2), await pen.write(), await pen.write()]
        for batch in written:
            desk.committed(batch)
        for told in await asyncio.gather(*waiting):
            assert told.payloads == [one.payload for one in written]
            assert (told.last, told.head) == (5, 5)
        assert log.asked == 3, "nobody looked into the log again"
        # From the middle of a batch; and what does not fit, or has gone from here, is read from the log.
        assert (await handed(desk, 2)).payloads == [one.payload for one in written]
        assert log.asked == 3
        await handed(desk, 1, bytes_max=1)
        assert log.asked == 4

    run(story)


def test_what_is_kept_for_followers_is_bounded_and_of_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest go; where another one has led in between, nothing of before is left."""
    monkeypatch.setattr(records, "TAIL_BYTES", 300)

    async def story() -> None:
        log = MemoryLog(CODEC)
        pen = Pen(await log.lead(JOB, "a"))
        desk = Records(log, JOB, lambda: LEADER)
        for _ in range(20):
            desk.committed(await pen.write(size=50))
        kept = [one.last for one in desk._tail]
        assert kept == list(range(kept[0], 21))
        assert sum(len(one.payload) for one in desk._tail) == desk._tail_bytes <= 300
        await pen.write()
        desk.committed(await pen.write())
        assert [one.last for one in desk._tail] == [22]

    run(story)


def test_waiting_ends() -> None:
    """With an empty page when the time is over; at once, with what there is, when the master ends."""

    async def story() -> None:
        log = Counting()
        pen = Pen(await log.lead(JOB, "a"))
        await pen.write()
        desk = Records(log, JOB, lambda: LEADER)
        told = await handed(desk, 1, 0.05)
        assert (told.payloads, told.last, told.more) == ([], 1, False)
        began = time.monotonic()
        await log.answered.get()
        await log.answered.get()
        waiting = asyncio.ensure_future(handed(desk, 1, 30.0))
        await log.answered.get()
        await pen.write()
        desk.close()
        assert (await waiting).last == 2
        assert (await handed(desk, 2, 30.0)).payloads == []
        assert time.monotonic() - began < 10

    run(story)


def test_a_log_that_does_not_ring_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """A standby that cannot fold hears of no record: it looks now and then."""
    monkeypatch.setattr(records, "LOOK_S", 0.02)

    async def story() -> None:
        log = Counting()
        pen = Pen(await log.lead(JOB, "a"))
        waiting = asyncio.ensure_future(handed(Records(log, JOB, lambda: LEADER), 0, 20.0))
        await log.answered.get()
        await pen.write()
        assert (await waiting).last == 1

    run(story)


def test_any_log_has_pages() -> None:
    """One that hands out nothing undecoded is read batch by batch, within the same bound."""

    async def story() -> None:
        log = MemoryLog(CODEC)
        pen = Pen(await log.lead(JOB, "a"))
        sizes = [len((await pen.write(events=10)).payload) for _ in range(3)]
        page = await page_of(log, JOB, 0, sizes[0] + sizes[1])
        assert (len(page.payloads), page.last, page.more) == (2, 20, True)
        page = await page_of(log, JOB, 20, 1)
        assert (len(page.payloads), page.last, page.more) == (1, 30, False)

    run(story)
