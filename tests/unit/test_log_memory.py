"""The log in memory: the conformance suite, and its faults."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from dlrover_core.errors import LogFull, LogUnavailable
from dlrover_core.kernel.log import AlreadyAppended, Appended, EventLog, Fenced, Snapshot
from dlrover_core.logs import memory, open_log
from dlrover_core.logs.memory import Faults, MemoryLog
from dlrover_core.testing.log_conformance import CODEC, JOB, LogConformance, Pen, make_batch, seqs


class TestMemoryConformance(LogConformance):
    """The memory log keeps the contract."""

    @contextlib.asynccontextmanager
    async def make_log(self) -> AsyncIterator[EventLog]:
        """A log of its own."""
        async with open_log("memory:", self.codec) as log:
            yield log

    async def depose(self, log: EventLog, job: str) -> None:
        """As if the leader's process had died."""
        assert isinstance(log, MemoryLog)
        log.expire(job)

    async def halve_snapshot(self, log: EventLog, job: str, snapshot: Snapshot) -> None:
        """As if its writer had died."""
        assert isinstance(log, MemoryLog)
        log.halve_snapshot(job, snapshot)


def tell(faults: Faults, story: Callable[[MemoryLog, Pen], Awaitable[None]]) -> None:
    """Tell a story to a log with these faults, and to its leader."""

    async def told() -> None:
        log = MemoryLog(CODEC, faults)
        await story(log, Pen(await log.lead(JOB, "a")))
        await log.close()

    asyncio.run(asyncio.wait_for(told(), 10))


def test_lost_ack() -> None:
    """A lost acknowledgement looks like an unreachable log; the same batch again is recognised."""

    async def story(log: MemoryLog, pen: Pen) -> None:
        await pen.write()
        batch = pen.draft()
        with pytest.raises(LogUnavailable):
            await pen.lead.append(batch)
        assert await pen.lead.append(batch) == AlreadyAppended(2)
        assert log.faults.tripped == [(2, memory.LostAck())]

    tell(Faults({2: memory.LostAck()}), story)


@pytest.mark.parametrize(("fault", "error"), [(memory.Unavailable(), LogUnavailable), (memory.Full(), LogFull)])
def test_refused_append_appends_nothing(fault: memory.Fault, error: type[Exception]) -> None:
    """An unreachable or full log appends nothing, can be read, and takes the same batch afterwards."""

    async def story(log: MemoryLog, pen: Pen) -> None:
        batch = pen.draft()
        with pytest.raises(error):
            await pen.lead.append(batch)
        assert await log.head(JOB) == 0
        assert await pen.lead.append(batch) == Appended(1)

    tell(Faults({1: fault}), story)


def test_slow_ack_lands_first() -> None:
    """A slow acknowledgement is slow on the loop's own clock, and others can already read the batch."""

    async def story(log: MemoryLog, pen: Pen) -> None:
        log.faults.at_next(memory.SlowAck(3600))
        appending = asyncio.ensure_future(pen.lead.append(pen.draft()))
        assert await seqs(log.follow(JOB), upto=1) == [1]
        assert not appending.done()
        appending.cancel()

    tell(Faults(), story)


def test_deposed_by_a_rival() -> None:
    """A scripted rival raises the token first: the append is fenced, leadership lost, and the next leader newer still."""

    async def story(log: MemoryLog, pen: Pen) -> None:
        assert await pen.lead.append(pen.draft()) == Fenced(1, 2)
        await pen.lead.lost
        assert (await log.lead(JOB, "b")).token == 3

    tell(Faults({1: memory.Deposed()}), story)


@pytest.mark.parametrize("lands", [False, True])
def test_stuck_append_is_where_a_master_is_killed(lands: bool) -> None:
    """An append that never returns has landed or not, as scripted; a successor finds exactly that."""

    async def story(log: MemoryLog, pen: Pen) -> None:
        appending = asyncio.ensure_future(pen.lead.append(pen.draft()))
        await asyncio.sleep(0)
        appending.cancel()
        log.expire(JOB)
        await log.lead(JOB, "successor")
        assert await log.head(JOB) == int(lands)

    tell(Faults({1: memory.Stuck(lands)}), story)


def test_unavailable_switch() -> None:
    """While the switch is on every call fails; afterwards all is as before."""

    async def story(log: MemoryLog, pen: Pen) -> None:
        await pen.write()
        log.faults.unavailable = True
        with pytest.raises(LogUnavailable):
            await log.head(JOB)
        with pytest.raises(LogUnavailable):
            await seqs(log.read(JOB))
        with pytest.raises(LogUnavailable):
            await log.lead("other", "a")
        await pen.lead.snapshot(Snapshot(1, "", b""))
        log.faults.unavailable = False
        assert await log.latest_snapshot(JOB) is None
        assert await log.head(JOB) == 1

    tell(Faults(), story)


def test_waiters_are_served_in_order() -> None:
    """Several standbys get leadership in the order of asking, also when one of them gives up at the very turn."""

    async def story(log: MemoryLog, pen: Pen) -> None:
        waiting = [asyncio.ensure_future(log.lead(JOB, name)) for name in "bcd"]
        await asyncio.sleep(0)
        log.expire(JOB)
        waiting[0].cancel()
        assert (await waiting[1]).holder == "c"
        log.expire(JOB)
        assert (await waiting[2]).holder == "d"

    tell(Faults(), story)


def test_without_codec_batches_are_handed_out_as_they_came() -> None:
    """Simulation pays no decoding: without a codec the very batch object comes back."""

    async def told() -> None:
        log = MemoryLog()
        lead = await log.lead(JOB, "a")
        batch = make_batch(lead.token, 1, 1)
        await lead.append(batch)
        assert await anext(log.batches(JOB)) is batch

    asyncio.run(told())
