"""The read side of the etcd log: archive and etcd as one stream of checked batches, and following it for ever.

A page is the head and a range of batches at one revision, read through the majority (`looking`): what the head
acknowledges and the range does not hold is missing, and no append or truncation between two calls can make it look so. Pages
need no common revision, and so fear no compaction: batches are never rewritten, and that the next one follows the last is
seen from its sequence numbers.

A watch is a doorbell and nothing else. etcd has lost, doubled, reordered and withheld watch events; here an event, or silence,
leads to a range read from the sequence number after the last one read, which alone decides what comes next.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any, NamedTuple

import structlog

from dlrover_adapters.etcd.client import CALL_S, Etcd
from dlrover_adapters.etcd.errors import Compacted, TooLarge
from dlrover_adapters.etcd.keys import Head, Keys, Leader, end_of, job_of, names_prefix
from dlrover_adapters.etcd.looking import look
from dlrover_core.errors import LogCorrupt, LogError, LogUnavailable, SchemaTooNew
from dlrover_core.kernel.codec import Codec
from dlrover_core.kernel.events import Batch, Record
from dlrover_core.kernel.log import LeaderInfo
from dlrover_core.logs.archive import Archive

# What a page should weigh: large enough that the round trip does not count, small enough to be parsed between two heartbeats.
PAGE_BYTES = 1024 * 1024
# How many batches are asked for at first, not knowing their size, and at most: the largest have a mebibyte each.
LIMIT_FIRST, LIMIT_MAX = 4, 1024
LIMIT_GROWTH = 8
# A reader that has more to decode lets others have the loop this often.
TURN_S = 0.002
# A follower that has heard nothing for so long looks by itself: what a lost watch event can cost.
SILENCE_S = 2.0
PAUSE_FIRST_S, PAUSE_MAX_S = 0.05, 2.0
STALE_PAUSE_S = 0.05

log = structlog.get_logger("dlrover.etcd")


class Reader:
    """Reads the jobs of one etcd. ``archive_of`` gives a job's archive, or None where none is configured."""

    def __init__(self, etcd: Etcd, codec: Codec, archive_of: Callable[[str], Archive | None]) -> None:
        self.etcd, self.codec, self.archive_of = etcd, codec, archive_of

    def keys(self, job: str) -> Keys:
        """The keys of a job."""
        return Keys(self.etcd.address.prefix, job)

    async def head(self, job: str) -> Head:
        """The end of a job's log; `Head()` where there is none. Raises `LogUnavailable`."""
        reply = await self.etcd.call("Range", self.etcd.range(self.keys(job).head))
        return Head.unpacked(reply.kvs[0].value) if reply.kvs else Head()

    async def jobs(self) -> list[str]:
        """The names of all jobs, sorted."""
        prefix = self.etcd.address.prefix
        reply = await self.etcd.call("Range", self.etcd.under(names_prefix(prefix), keys_only=True))
        return sorted(job_of(prefix, kv.key.decode()) for kv in reply.kvs)

    async def leader(self, job: str) -> LeaderInfo | None:
        """Who leads a job, as far as its lease says."""
        reply = await self.etcd.call("Range", self.etcd.range(self.keys(job).leader))
        if not reply.kvs:
            return None
        found = Leader.unpacked(reply.kvs[0].value)
        return LeaderInfo(reply.kvs[0].create_revision, found.holder, found.address)

    def batches(self, job: str, after: int = 0) -> AsyncGenerator[Batch, None]:
        """Every batch whose last record is beyond ``after``, in order.

        Raises `LogCorrupt` for what is missing or cannot be decoded, `SchemaTooNew`, `LogUnavailable`.
        """
        return _Pass(self, job, after).batches()

    async def read(self, job: str, after: int = 0) -> AsyncGenerator[Record, None]:
        """Every record beyond ``after``, in order. Raises as `batches` does."""
        async with aclosing(self.batches(job, after)) as batches:
            async for batch in batches:
                for record in batch.records:
                    if record.seq > after:
                        yield record

    async def follow(self, job: str, after: int = 0) -> AsyncGenerator[Record, None]:
        """`read`, then whatever is appended, without gap or duplicate, until cancelled.

        Where etcd cannot be reached it is tried for ever. Raises `LogCorrupt`, `SchemaTooNew` and `Denied`, and `LogUnavailable`
        only once the log is closed.
        """
        place, trouble = _Pass(self, job, after), _Trouble(job)
        while True:
            try:
                async with aclosing(self._rings(place, trouble)) as rings:
                    async for _ in rings:
                        async with aclosing(place.batches()) as batches:
                            async for batch in batches:
                                for record in batch.records:
                                    if record.seq > after:
                                        yield record
                                        after = record.seq
            except (LogUnavailable, Compacted) as error:
                if self.etcd.closed:
                    raise
                await trouble.pause(error, after)

    async def _rings(self, place: _Pass, trouble: _Trouble) -> AsyncGenerator[None, None]:
        """Something whenever there may be more to read: at once, once a watch stands, and whenever it says so or says nothing.

        The head is watched and not the batches: one small event per append, however many follow. The watch begins wherever its
        member is when it is made; what was appended before that is read then.
        """
        yield
        async with aclosing(self.etcd.watch(place.keys.head, 0, SILENCE_S)) as responses:
            async for response in responses:
                if not response.created:
                    trouble.over()
                if not response.events or any(_is_beyond(event, place.after) for event in response.events):
                    yield


def _is_beyond(event: Any, after: int) -> bool:
    """Does a watched head say that there is more? One that cannot be read, or is deleted, is worth a look."""
    try:
        return Head.unpacked(event.kv.value).seq > after
    except LogError:
        return True


class _Page(NamedTuple):
    """Key-values of batches, and the head, at one revision."""

    kvs: Any
    last: int
    head: Head


class _Gap(NamedTuple):
    """The events from the next one to ``last`` cannot be had from etcd. ``damage``: nor were they deleted as archived."""

    last: int
    why: str
    damage: bool


class _Pass:
    """One pass through a job's log. ``after`` is the last sequence number it has handed out, or was given."""

    def __init__(self, reader: Reader, job: str, after: int) -> None:
        self.job, self.after = job, after
        self.keys = reader.keys(job)
        self._etcd, self._codec, self._archive_of = reader.etcd, reader.codec, reader.archive_of
        self._given = after
        self._revision = 0
        self._limit, self._span = LIMIT_FIRST, 0

    async def batches(self) -> AsyncGenerator[Batch, None]:
        """Every batch beyond ``after``, to the end of the log. May be called again, for what has come since."""
        loop = asyncio.get_running_loop()
        turn = loop.time()
        fetching: asyncio.Task[_Page] | None = None
        try:
            while True:
                page = await (fetching or self._fetch(self.after))
                # The next page travels while this one is decoded.
                fetching = loop.create_task(self._fetch(page.last)) if self._is_more(page) else None
                gap: _Gap | None = None
                for kv in page.kvs:
                    batch = self._batch(kv)
                    if isinstance(batch, _Gap):
                        gap = batch
                        break
                    self.after = batch.last_seq
                    yield batch
                    # One by one: a page of decoded events is many objects that live together, and the garbage collector
                    # would look at them again and again.
                    if loop.time() - turn > TURN_S:
                        await asyncio.sleep(0)
                        turn = loop.time()
                if gap is None and self.after >= page.head.seq:
                    return
                if gap is None and not page.kvs:
                    gap = _Gap(page.head.seq, "acknowledged, but not in etcd", damage=True)
                if gap is not None:
                    await _drop(fetching)
                    fetching = None
                    async with aclosing(self._archived(gap)) as batches:
                        async for batch in batches:
                            self.after = batch.last_seq
                            yield batch
        finally:
            await _drop(fetching)

    async def _archived(self, gap: _Gap) -> AsyncGenerator[Batch, None]:
        """The batches beyond ``after`` from the archive, as far as it goes. Raises `LogCorrupt` if it has not one."""
        # In a thread: both may have to ask another host.
        archive = await asyncio.to_thread(self._archive_of, self.job)
        found = await asyncio.to_thread(archive.page, self.after) if archive is not None else []
        first = self.after + 1
        if archive is None or not found:
            which = f"events {first}-{gap.last}: {gap.why}" if gap.last > first else gap.why
            remedy = (
                "if they were archived, ?archive=PLACE in the log's URL says where"
                if archive is None
                else "the archive does not hold them either; restore a copy of the log"
            )
            raise LogCorrupt(self.job, first, f"{which}; {remedy}")
        if gap.damage:
            log.error("damage in etcd, the archive's copy is read", job=self.job, seq=first, damage=gap.why)
        while found:
            for batch in found:
                yield batch
            found = await asyncio.to_thread(archive.page, self.after)

    def _is_more(self, page: _Page) -> bool:
        return bool(page.kvs) and page.last < page.head.seq

    def _batch(self, kv: Any) -> Batch | _Gap:
        """One batch, decoded and checked against its key and the one before; or what is wrong with it."""
        last = self._last_seq(kv)
        try:
            batch = self._codec.decode(kv.value)
        except SchemaTooNew:
            raise
        except LogError as error:
            return _Gap(last, f"the batch under {self.keys.batch(last)} cannot be decoded: {error}", damage=True)
        first = batch.first_seq if batch.records else 0
        if first == self.after + 1 or (0 < first <= self.after == self._given):
            if batch.last_seq == last:
                return batch
        elif first > self.after:
            return _Gap(first - 1, f"not in etcd, which goes on with {first}", damage=False)
        return _Gap(last, f"the batch under {self.keys.batch(last)} is another one", damage=True)

    def _last_seq(self, kv: Any) -> int:
        digits = kv.key[len(self.keys.log.encode()) :]
        if not digits.isdigit():
            raise LogCorrupt(self.job, self.after + 1, f"{kv.key!r} in etcd is not ours; delete it")
        return int(digits)

    async def _fetch(self, after: int) -> _Page:
        """The next page beyond ``after``, and the head. Raises `LogUnavailable`, `LogCorrupt`."""
        etcd, keys = self._etcd, self.keys
        deadline = asyncio.get_running_loop().time() + CALL_S
        # A range without an end makes etcd count everything that follows, page by page.
        span = self._span
        while True:
            end = keys.batch(after + 1 + span) if span else end_of(keys.log)
            try:
                batches = etcd.range(keys.batch(after + 1), end=end, limit=self._limit)
                revision, (heads, kvs) = await look(etcd, (etcd.range(keys.head), batches))
            except TooLarge:
                if self._limit == 1:
                    raise
                self._limit = max(1, self._limit // LIMIT_GROWTH)
                continue
            if revision < self._revision:
                # etcd has been seen to answer with the past, after a pause of its process; a restored copy does so too.
                if asyncio.get_running_loop().time() > deadline:
                    raise LogUnavailable(
                        f"job {self.job!r}: etcd answers at revision {revision}, {self._revision} was seen: "
                        "a member is behind, or an older copy was restored"
                    )
                await asyncio.sleep(STALE_PAUSE_S)
                continue
            self._revision = revision
            if kvs and not heads and (await etcd.call("Range", etcd.range(keys.erased, keys_only=True))).kvs:
                raise LogUnavailable(
                    f"job {self.job!r}: its log was erased, and a part of it is still there; whoever erases it tries on, and "
                    "a new job of the name begins without it"
                )
            head = Head.unpacked(heads[0].value) if heads else Head()
            if after != self._given and head.seq < after:
                raise LogCorrupt(
                    self.job,
                    head.seq + 1,
                    f"the log ends with {head.seq}, but {after} was read before: it was deleted, or replaced by a copy",
                )
            if kvs or not span or head.seq <= after:
                last = self._last_seq(kvs[-1]) if kvs else after
                self._adapt(kvs, last - after)
                return _Page(kvs, last, head)
            span = 0

    def _adapt(self, kvs: Any, events: int) -> None:
        """Choose the size of the next page by this one's."""
        if not kvs:
            return
        size = sum(len(kv.value) for kv in kvs)
        fitting = PAGE_BYTES * len(kvs) // max(1, size)
        self._limit = max(1, min(LIMIT_MAX, self._limit * LIMIT_GROWTH, fitting))
        self._span = 2 * self._limit * -(-events // len(kvs))


async def _drop(task: asyncio.Task[_Page] | None) -> None:
    """Nobody wants this page any more."""
    if task is not None:
        task.cancel()
        await asyncio.wait([task])
        if not task.cancelled():
            task.exception()


class _Trouble:
    """What keeps a follower from following: said once, and once more when it is over."""

    def __init__(self, job: str) -> None:
        self._job = job
        self._since_s: float | None = None
        self._pause_s = PAUSE_FIRST_S

    async def pause(self, error: LogError, after: int) -> None:
        """Wait a while, longer each time; not in step with others who lost the same member."""
        if self._since_s is None:
            self._since_s = asyncio.get_running_loop().time()
            log.warning("the log cannot be followed now, trying on", job=self._job, after=after, error=str(error))
        await asyncio.sleep(self._pause_s * (0.5 + random.random()))
        self._pause_s = min(PAUSE_MAX_S, 2 * self._pause_s)

    def over(self) -> None:
        """A watch works again."""
        if self._since_s is not None:
            lasted_s = asyncio.get_running_loop().time() - self._since_s
            log.info("the log is followed again", job=self._job, after_s=round(lasted_s, 1))
        self._since_s, self._pause_s = None, PAUSE_FIRST_S
