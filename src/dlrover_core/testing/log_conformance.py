"""What every event log must do, as a test class: subclass it, give it your log, run pytest.

```python
class TestMyLog(LogConformance):
    @contextlib.asynccontextmanager
    async def make_log(self):
        async with open_my_log(new_empty_place(), self.codec) as log:
            yield log

    async def depose(self, log, job): ...         # let the present leader lose the job without its doing
    async def halve_snapshot(self, log, job, snapshot): ...   # leave a snapshot whose writer died half-way
```

Tests are plain functions; each runs its story in an event loop of its own (`run`), so no plugin is needed. From the shell:
``dlrover conformance``.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import NamedTuple

from dlrover_core.errors import NotLeading
from dlrover_core.kernel.codec import Codec
from dlrover_core.kernel.events import Batch, Record, Registry, event
from dlrover_core.kernel.log import AlreadyAppended, Appended, Conflict, EventLog, Fenced, Leadership, Snapshot
from dlrover_core.testing.stories import story

JOB = "job/1.a"
OTHER = "other"
# A bound on every story: a log that hangs fails its test by name.
STORY_S = 30.0


@event(1)
class Noted(NamedTuple):
    """The event of these stories."""

    text: str


CODEC = Codec(Registry([Noted]))

Story = Callable[[EventLog], Awaitable[None]]


def make_batch(token: int, counter: int, first: int, events: int = 1, size: int = 8, codec: Codec = CODEC) -> Batch:
    """A batch of ``events`` events of ``size`` bytes each, numbered from ``first``."""
    records = [Record(first + i, 1_000 * first + i, token, 0, Noted(f"{first + i:0{size}d}")) for i in range(events)]
    return codec.batch(token, counter, records)


class Pen:
    """Writes batches under one leadership, one after another."""

    def __init__(self, lead: Leadership, head: int = 0) -> None:
        self.lead, self.head, self.counter = lead, head, 0

    def draft(self, events: int = 1, size: int = 8) -> Batch:
        """The next batch, not yet appended."""
        self.counter += 1
        return make_batch(self.lead.token, self.counter, self.head + 1, events, size)

    async def write(self, events: int = 1, size: int = 8) -> Batch:
        """Append the next batch and insist on `Appended`."""
        batch = self.draft(events, size)
        outcome = await self.lead.append(batch)
        assert outcome == Appended(batch.last_seq), outcome
        self.head = batch.last_seq
        return batch


async def seqs(records: AsyncIterator[Record], upto: int | None = None) -> list[int]:
    """The sequence numbers of a stream, to its end or to ``upto``."""
    found: list[int] = []
    async for record in records:
        found.append(record.seq)
        assert record.event == Noted(record.event[0])  # type: ignore[arg-type]
        if record.seq == upto:
            break
    return found


class LogConformance:
    """The contract of `EventLog`. Every test begins with an empty log."""

    codec = CODEC
    # How long one story may take.
    story_s = STORY_S

    def make_log(self) -> AbstractAsyncContextManager[EventLog]:
        """A new, empty log that decodes with ``self.codec``; closed at the end."""
        raise NotImplementedError

    def second(self, log: EventLog) -> AbstractAsyncContextManager[EventLog]:
        """Another client of the same storage; where there is no such thing, the log itself."""
        return contextlib.nullcontext(log)

    async def depose(self, log: EventLog, job: str) -> None:
        """Let the present leader of ``job`` lose it without its doing: as if its lease ran out, or its lock were taken away."""
        raise NotImplementedError

    async def halve_snapshot(self, log: EventLog, job: str, snapshot: Snapshot) -> None:
        """Leave a snapshot in storage as a writer does that dies half-way through."""
        raise NotImplementedError

    def run(self, story: Story) -> None:
        """Tell a story to a new log, in a new event loop."""

        async def told() -> None:
            async with self.make_log() as log:
                await story(log)

        asyncio.run(asyncio.wait_for(told(), self.story_s))

    # ---- outcomes of an append ----

    @story
    async def test_append_lands(self, log: EventLog) -> None:
        """An appended batch is there, whole, with its last sequence number as the head."""
        lead = await log.lead(JOB, "a", dead=("nobody",))
        batch = make_batch(lead.token, 1, 1, events=3)
        assert await lead.append(batch) == Appended(3)
        assert await log.head(JOB) == 3
        assert [found async for found in log.batches(JOB)] == [batch]
        assert [record async for record in log.read(JOB)] == list(batch.records)

    @story
    async def test_append_again_is_recognised(self, log: EventLog) -> None:
        """The same batch sent again is told from a new one, and is not appended twice."""
        pen = Pen(await log.lead(JOB, "a"))
        batch = await pen.write(events=2)
        assert await pen.lead.append(batch) == AlreadyAppended(2)
        assert await log.head(JOB) == 2
        await pen.write()

    @story
    async def test_append_by_an_older_leader_is_fenced(self, log: EventLog) -> None:
        """Once a newer leader exists, the older one appends nothing and learns the newer token."""
        old = Pen(await log.lead(JOB, "old"))
        await old.write()
        await self.depose(log, JOB)
        async with self.second(log) as other:
            new = Pen(await other.lead(JOB, "new"), head=1)
            assert await old.lead.append(old.draft()) == Fenced(old.lead.token, new.lead.token)
            assert not old.lead.valid()
            assert await log.head(JOB) == 1
            await new.write()
            assert await old.lead.append(old.draft()) == Fenced(old.lead.token, new.lead.token)
            assert await seqs(log.read(JOB)) == [1, 2]

    @story
    async def test_append_beyond_or_below_the_head_conflicts(self, log: EventLog) -> None:
        """A batch that would leave a gap, or overwrite, is a conflict that names both heads; nothing is appended."""
        pen = Pen(await log.lead(JOB, "a"))
        await pen.write(events=2)
        assert await pen.lead.append(make_batch(pen.lead.token, 7, 4)) == Conflict(3, 2)
        assert await pen.lead.append(make_batch(pen.lead.token, 8, 2, events=3)) == Conflict(1, 2)
        assert await pen.lead.append(make_batch(pen.lead.token, 9, 1, events=2)) == Conflict(0, 2)
        assert await log.head(JOB) == 2
        await pen.write()

    @story
    async def test_append_of_another_token_is_a_mistake(self, log: EventLog) -> None:
        """A batch that bears another token than its leadership's is a programming error."""
        lead = await log.lead(JOB, "a")
        foreign = make_batch(lead.token + 1, 1, 1)
        try:
            outcome = await lead.append(foreign)
        except ValueError as mistake:
            if "token" not in str(mistake):
                raise
        else:
            raise AssertionError(f"a batch of a foreign token was taken: {outcome}")
        assert await log.head(JOB) == 0

    @story
    async def test_cancelled_append_is_found_out_by_sending_it_again(self, log: EventLog) -> None:
        """Whether a cancelled append landed is told by the same batch sent again: it lands exactly once."""
        pen = Pen(await log.lead(JOB, "a"))
        batch = pen.draft(events=2)
        task = asyncio.ensure_future(pen.lead.append(batch))
        await asyncio.sleep(0)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        assert await pen.lead.append(batch) in (Appended(2), AlreadyAppended(2))
        assert await seqs(log.read(JOB)) == [1, 2]

    # ---- reading ----

    @story
    async def test_read_begins_after(self, log: EventLog) -> None:
        """Reading begins behind ``after``, also in the middle of a batch; batches come whole."""
        pen = Pen(await log.lead(JOB, "a"))
        for _ in range(3):
            await pen.write(events=3)
        for after in range(11):
            assert await seqs(log.read(JOB, after=after)) == list(range(after + 1, 10))
        assert [batch.first_seq async for batch in log.batches(JOB, after=4)] == [4, 7]

    @story
    async def test_read_pages_over_many_batches(self, log: EventLog) -> None:
        """A log of many batches of all sizes comes back complete and in order."""
        pen = Pen(await log.lead(JOB, "a"))
        for number in range(400):
            await pen.write(events=1 + number % 5, size=8 if number % 50 else 100_000)
        assert await seqs(log.read(JOB)) == list(range(1, pen.head + 1))
        assert len([batch async for batch in log.batches(JOB)]) == 400

    @story
    async def test_unknown_job_is_empty(self, log: EventLog) -> None:
        """A job that never had a leader has no events, no head, no leader and no snapshot."""
        assert await log.head(JOB) == 0
        assert await seqs(log.read(JOB)) == []
        assert await log.leader(JOB) is None
        assert await log.latest_snapshot(JOB) is None
        assert await log.jobs() == []

    @story
    async def test_jobs_do_not_mix(self, log: EventLog) -> None:
        """Jobs of one log are listed by name, sorted, and each has its own numbers, leader and token."""
        second, first = Pen(await log.lead(OTHER, "b")), Pen(await log.lead(JOB, "a"))
        await first.write(events=3)
        await second.write()
        await first.write()
        assert await log.jobs() == sorted([JOB, OTHER])
        assert await seqs(log.read(JOB)) == [1, 2, 3, 4]
        assert await seqs(log.read(OTHER)) == [1]
        assert (await log.head(JOB), await log.head(OTHER)) == (4, 1)

    @story
    async def test_reading_while_appending(self, log: EventLog) -> None:
        """A reader that starts while appends run sees a prefix: contiguous, from the beginning."""
        pen = Pen(await log.lead(JOB, "a"))

        async def write() -> None:
            for _ in range(100):
                await pen.write(events=3)

        writing = asyncio.ensure_future(write())
        while not writing.done():
            found = await seqs(log.read(JOB))
            assert found == list(range(1, len(found) + 1)) and len(found) % 3 == 0
            await asyncio.sleep(0)
        await writing
        assert len(await seqs(log.read(JOB))) == 300

    # ---- following ----

    @story
    async def test_follow_reads_then_tails(self, log: EventLog) -> None:
        """Following gives what is there, then what comes, without gap or duplicate, from the middle of a batch on."""
        pen = Pen(await log.lead(JOB, "a"))
        await pen.write(events=5)
        following = asyncio.ensure_future(seqs(log.follow(JOB, after=2), upto=8))
        await pen.write(events=2)
        await pen.write()
        assert await following == [3, 4, 5, 6, 7, 8]

    @story
    async def test_follow_while_appending(self, log: EventLog) -> None:
        """Followers that start at any moment of a run of appends miss nothing and repeat nothing."""
        pen = Pen(await log.lead(JOB, "a"))
        async with self.second(log) as other:
            followers = []
            for number in range(100):
                if number % 10 == 0:
                    followers.append(asyncio.ensure_future(seqs(log.follow(JOB), upto=200)))
                    followers.append(asyncio.ensure_future(seqs(other.follow(JOB, after=number), upto=200)))
                await pen.write(events=2)
            for index, follower in enumerate(followers):
                after = 0 if index % 2 == 0 else index // 2 * 10
                assert await follower == list(range(after + 1, 201))

    @story
    async def test_follow_waits_for_a_job_that_is_not_there_yet(self, log: EventLog) -> None:
        """A job may be followed before its first event."""
        following = asyncio.ensure_future(seqs(log.follow(JOB), upto=1))
        await asyncio.sleep(0)
        await Pen(await log.lead(JOB, "a")).write()
        assert await following == [1]

    @story
    async def test_follow_ends_when_cancelled(self, log: EventLog) -> None:
        """A cancelled follower ends at once, and the log goes on."""
        pen = Pen(await log.lead(JOB, "a"))
        await pen.write()
        seen = asyncio.Event()

        async def follow() -> None:
            async for _ in log.follow(JOB):
                seen.set()

        following = asyncio.ensure_future(follow())
        await seen.wait()
        following.cancel()
        await asyncio.wait([following])
        assert following.cancelled()
        await pen.write()
        assert await seqs(log.follow(JOB), upto=2) == [1, 2]

    # ---- leadership ----

    @story
    async def test_leadership_is_exclusive(self, log: EventLog) -> None:
        """While a leader exists, asking without waiting raises `NotLeading`, which names the holder and its address."""
        lead = await log.lead(JOB, "a")
        await lead.announce("10.0.0.1:7000")
        async with self.second(log) as other:
            try:
                rival = await other.lead(JOB, "b", wait=False)
            except NotLeading as refused:
                named = (refused.job, refused.holder, refused.address)
                assert named == (JOB, "a", "10.0.0.1:7000")
            else:
                raise AssertionError(f"two lead at once, under the tokens {lead.token} and {rival.token}")
        assert lead.valid()

    @story
    async def test_tokens_rise(self, log: EventLog) -> None:
        """Every leadership has a larger token than all before it, with or without appends between."""
        tokens = []
        for number in range(5):
            async with self.second(log) as other:
                pen = Pen(await other.lead(JOB, f"holder-{number}"), head=await log.head(JOB))
                tokens.append(pen.lead.token)
                if number % 2:
                    await pen.write()
                await pen.lead.resign()
        assert tokens == sorted(set(tokens)) and tokens[0] > 0

    @story
    async def test_waiting_gets_it_when_the_holder_resigns(self, log: EventLog) -> None:
        """A master that waits for leadership gets it when the holder resigns, with a newer token, and can append."""
        first = Pen(await log.lead(JOB, "a"))
        await first.write()
        async with self.second(log) as other:
            waiting = asyncio.ensure_future(other.lead(JOB, "b"))
            await first.write()
            assert not waiting.done()
            await first.lead.resign()
            second = Pen(await waiting, head=2)
            assert second.lead.token > first.lead.token
            await second.write()
            await second.lead.resign()

    @story
    async def test_cancelled_wait_leaves_no_leader_behind(self, log: EventLog) -> None:
        """A wait for leadership that was cancelled does not take it later."""
        first = await log.lead(JOB, "a")
        async with self.second(log) as other:
            waiting = asyncio.ensure_future(other.lead(JOB, "b"))
            await first.announce("x")
            waiting.cancel()
            await asyncio.wait([waiting])
            await first.resign()
            await Pen(await log.lead(JOB, "c")).write()

    @story
    async def test_lost_fires_when_it_is_over(self, log: EventLog) -> None:
        """``lost`` is done after resigning and after a fenced append, and not before; giving up waiting for it is harmless."""
        first = await log.lead(JOB, "a")
        impatient = asyncio.ensure_future(first.lost)
        impatient.cancel()
        lost = asyncio.ensure_future(first.lost)
        await first.announce("x")
        assert not lost.done() and first.valid()
        await first.resign()
        await lost
        await first.resign()
        assert not first.valid()
        second = Pen(await log.lead(JOB, "b"))
        await self.depose(log, JOB)
        async with self.second(log) as other:
            third = await other.lead(JOB, "c")
            assert isinstance(await second.lead.append(second.draft()), Fenced)
            await second.lead.lost
            assert third.valid()

    @story
    async def test_append_after_resigning_is_fenced(self, log: EventLog) -> None:
        """A leader that has resigned appends nothing more, whether or not a newer one exists."""
        pen = Pen(await log.lead(JOB, "a"))
        await pen.write()
        await pen.lead.resign()
        outcome = await pen.lead.append(pen.draft())
        assert isinstance(outcome, Fenced) and outcome.mine == pen.lead.token
        assert await log.head(JOB) == 1

    @story
    async def test_leader_is_known(self, log: EventLog) -> None:
        """The log names the leader, its token and its address; after resigning there is none."""
        lead = await log.lead(JOB, "a")
        async with self.second(log) as other:
            assert await other.leader(JOB) == (lead.token, "a", "")
            await lead.announce("10.0.0.1:7000")
            assert await other.leader(JOB) == (lead.token, "a", "10.0.0.1:7000")
            await lead.resign()
            assert await other.leader(JOB) is None
            again = await other.lead(JOB, "b")
            assert await log.leader(JOB) == (again.token, "b", "")

    # ---- snapshots ----

    @story
    async def test_snapshots_newest_first(self, log: EventLog) -> None:
        """The newest snapshot comes back as it was given; an older one written later does not hide it."""
        pen = Pen(await log.lead(JOB, "a"))
        await pen.write(events=9)
        for seq in (3, 9, 6):
            await pen.lead.snapshot(Snapshot(seq, f"schema-{seq}", bytes([seq]) * 100_000))
        assert await log.latest_snapshot(JOB) == Snapshot(9, "schema-9", bytes([9]) * 100_000)
        assert await log.latest_snapshot(OTHER) is None

    @story
    async def test_half_written_snapshot_is_ignored(self, log: EventLog) -> None:
        """A snapshot whose writer died half-way does not hide the whole one before it."""
        pen = Pen(await log.lead(JOB, "a"))
        await pen.write(events=9)
        whole = Snapshot(5, "schema", b"five")
        await pen.lead.snapshot(whole)
        await self.halve_snapshot(log, JOB, Snapshot(9, "schema", b"nine" * 1000))
        assert await log.latest_snapshot(JOB) == whole

    @story
    async def test_snapshot_of_a_deposed_leader_is_not_kept(self, log: EventLog) -> None:
        """A deposed leader's snapshot is not kept, and its attempt raises nothing."""
        pen = Pen(await log.lead(JOB, "a"))
        await pen.write()
        await self.depose(log, JOB)
        async with self.second(log) as other:
            await other.lead(JOB, "b")
            await pen.lead.snapshot(Snapshot(1, "schema", b"stale"))
            assert await log.latest_snapshot(JOB) is None

    @story
    async def test_snapshot_ahead_of_the_log_is_ignored(self, log: EventLog) -> None:
        """A snapshot of events that the log does not hold is not the state of this log."""
        pen = Pen(await log.lead(JOB, "a"))
        await pen.write(events=2)
        await pen.lead.snapshot(Snapshot(2, "schema", b"two"))
        await pen.lead.snapshot(Snapshot(3, "schema", b"three"))
        assert await log.latest_snapshot(JOB) == Snapshot(2, "schema", b"two")
