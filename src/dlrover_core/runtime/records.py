"""A job's records for readers that reach them through a master: pages of batches, byte for byte as they lie in the log.

A master decodes nothing that it hands out; the reader does. A page is ``magic, format, length of the head, checksum of the
head``, the head, and the batches one after the other. The head is an array that may grow at its end: job, ``after`` as
asked for, last number of the page, head of the log, whether there may be more, the leader's token, holder and address, the
lengths of the batches, and the checksum of all batches.

A reader that follows the log waits here for a commit. It is not answered at once: records of the next `GATHER_S`, or of
`SHARE_S` per waiting reader, go into the same answer. So any number of readers gets at most one answer in `SHARE_S` and
costs the leader's event loop a known share; between two answers, `TURN_S` is left for the agents. Readers at the same place
share one page.
"""

from __future__ import annotations

import asyncio
import struct
import zlib
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import NamedTuple, TypeVar

import msgpack

from dlrover_core.errors import LogError, LogUnavailable, MalformedMessage, SchemaTooNew
from dlrover_core.kernel.events import BATCH_BYTES_MAX, Batch
from dlrover_core.kernel.log import EventLog, LeaderInfo, Page, Paging
from dlrover_core.runtime.within import within

T = TypeVar("T")

FORMAT, CONTENT_TYPE = 1, "application/vnd.dlrover.records"
# The most that readers may ask for, and what they do ask for: at 100 bytes an event, 2,500 events, copied in a fraction of
# a millisecond.
PAGE_BYTES_MAX, PAGE_BYTES = 1024 * 1024, 256 * 1024
WAIT_S_MAX = 30.0
# After so long without an answer from the log, the reader is told, and tries another master.
READ_S = 20.0
GATHER_S, SHARE_S, TURN_S = 0.05, 0.02, 0.002
# A follower at most this far behind waits for a gathering, instead of being answered at once.
NEAR_EVENTS = 256
# So much of the newest records is kept for followers.
TAIL_BYTES = 512 * 1024
# A waiting reader looks by itself this often, because a standby that cannot fold announces no record.
LOOK_S = 2.0
# A batch may exceed the engine's bound by its header, as an entry of a tail file may; and the head has a length for each.
PACKED_BYTES_MAX = 2 * PAGE_BYTES_MAX + 2 * BATCH_BYTES_MAX

_MAGIC = b"DLRP"
_FRONT = struct.Struct("<4sIII")
_HEAD_FIELDS = 10


class BeyondHead(LogError):
    """A reader asks for records beyond the end of this log: the log was replaced by an older copy, or is another one.

    ``head``: the log's last number.
    """

    def __init__(self, job: str, after: int, head: int) -> None:
        super().__init__(f"job {job!r}: the log ends with event {head}, but {after} was read before")
        self.after, self.head = after, head


class Elsewhere(LogUnavailable):
    """This master cannot read the log now. The leader at ``address`` may be able to; empty: unknown."""

    def __init__(self, message: str, address: str) -> None:
        super().__init__(message)
        self.address = address


class Told(NamedTuple):
    """A page, decoded for its reader."""

    job: str
    """The job of the records."""
    after: int
    """The number asked for."""
    last: int
    """The last number of the page; ``after`` where it is empty."""
    head: int
    """The last number of the log, as far as the master knew."""
    more: bool
    """There may be more now."""
    leader: LeaderInfo | None
    """The leader, as far as the master knew."""
    payloads: Sequence[bytes]
    """The batches, to be decoded."""


class Records:
    """Hands out the records of one ``job``. ``leader`` returns its leader.

    New records are announced by `committed` while this master leads, and by `ring` while it stands by.
    """

    def __init__(self, event_log: EventLog, job: str, leader: Callable[[], LeaderInfo | None]) -> None:
        self._log, self._job, self._leader = event_log, job, leader
        self._head = 0
        self._waiting: set[asyncio.Future[None]] = set()
        self._followers = self._upto = 0
        self._tail: deque[_Kept] = deque()
        self._tail_bytes = 0
        self._gathering: asyncio.TimerHandle | None = None
        self._turn, self._free_at = asyncio.Lock(), 0.0
        self._shared: tuple[int, int, _Packed] | None = None
        self._over = False

    def committed(self, batch: Batch) -> None:
        """A batch is durable. The newest batches stay here, so that readers that follow need no look into the log."""
        if self._tail and batch.first_seq != self._tail[-1].last + 1:
            self._tail.clear()  # another master has led meanwhile
            self._tail_bytes = 0
        self._tail.append(_Kept(batch.first_seq, batch.last_seq, batch.payload))
        self._tail_bytes += len(batch.payload)
        while self._tail_bytes > TAIL_BYTES and len(self._tail) > 1:
            self._tail_bytes -= len(self._tail.popleft().payload)
        self.ring(batch.last_seq)

    def ring(self, seq: int) -> None:
        """The log now ends at ``seq``."""
        self._head = max(self._head, seq)
        if self._waiting and self._gathering is None:
            # One timer wakes all readers, however many wait and however many commits come meanwhile.
            gather_s = max(GATHER_S, SHARE_S * max(self._followers, len(self._waiting)))
            self._gathering = asyncio.get_running_loop().call_later(gather_s, self._wake)

    def close(self) -> None:
        """The master ends: waiting readers get what there is, at once."""
        self._over = True
        self._wake()

    def _wake(self) -> None:
        if self._gathering is not None:
            self._gathering.cancel()
            self._gathering = None
        self._shared, self._upto = None, self._head
        waiting, self._waiting = self._waiting, set()
        # Readers come back one by one, and the first is not the only one.
        self._followers = len(waiting)
        for one in waiting:
            _settle(one)

    async def hand_out(self, after: int, bytes_max: int, wait_s: float) -> bytes:
        """The next page beyond ``after``, packed; an empty one where nothing has come within ``wait_s``.

        ``bytes_max`` 0 asks only for the head of the log, and who leads. Raises `BeyondHead`, `LogCorrupt`, `Elsewhere`.
        """
        if bytes_max <= 0:
            head = await self._bounded(self._log.head(self._job))
            self._head = max(self._head, head)
            return self._pack(after, _EMPTY._replace(last=after), head)
        if after > self._head:
            head = await self._bounded(self._log.head(self._job))
            if after > head:
                raise BeyondHead(self._job, after, head)
            self._head = max(self._head, head)
        near = wait_s > 0 and 0 < self._head - after <= NEAR_EVENTS
        page = None if near else await self._page(after, bytes_max)
        loop = asyncio.get_running_loop()
        until = loop.time() + min(wait_s, WAIT_S_MAX)
        while page is None and not self._over and (left := until - loop.time()) > 0:
            await self._news(after, min(left, LOOK_S))
            page = await self._page(after, bytes_max)
        if page is None and self._over:
            page = await self._page(after, bytes_max)  # the last commit may be younger than the last look
        return self._pack(after, page or _EMPTY._replace(last=after), self._head)

    async def _news(self, after: int, timeout_s: float) -> None:
        """Wait until a record beyond ``after`` is appended and gathered, or until the time is over."""
        loop = asyncio.get_running_loop()
        woken: asyncio.Future[None] = loop.create_future()
        self._waiting.add(woken)
        if self._head > after:  # since the last look
            self.ring(self._head)
        timer = loop.call_later(timeout_s, _settle, woken)
        try:
            await woken
        finally:
            timer.cancel()
            self._waiting.discard(woken)

    async def _page(self, after: int, bytes_max: int) -> _Packed | None:
        """The next page, when it is this reader's turn; None: nothing yet."""
        loop = asyncio.get_running_loop()
        async with self._turn:
            if self._free_at > loop.time():
                await asyncio.sleep(self._free_at - loop.time())
            self._free_at = loop.time() + TURN_S
            shared = self._shared
            if shared is not None and shared[:2] == (after, bytes_max):
                return shared[2]
            page = self._newest(after, bytes_max)
            if page is None:
                page = await self._bounded(page_of(self._log, self._job, after, bytes_max))
            if not page.payloads:
                return None
            found = _Packed.of(page)
            self._head = max(self._head, page.last)
            self._shared = (after, bytes_max, found)
            return found

    def _newest(self, after: int, bytes_max: int) -> Page | None:
        """A page of what is kept here, to where the last gathering went: all who follow are at the same place afterwards.

        None where the next one is not among it.
        """
        if not self._tail or self._tail[0].first > after + 1 or self._upto <= after:
            return None
        payloads, last, size = deque[bytes](), after, 0
        for kept in reversed(self._tail):
            if kept.last <= after:
                break
            if kept.last <= self._upto:
                payloads.appendleft(kept.payload)
                last, size = max(last, kept.last), size + len(kept.payload)
        return Page(list(payloads), last, more=False) if payloads and size <= bytes_max else None

    async def _bounded(self, call: Awaitable[T]) -> T:
        try:
            return await within(READ_S, call)
        except asyncio.TimeoutError as error:
            raise self._elsewhere(f"job {self._job!r}: the log did not answer within {READ_S:g} s") from error
        except LogUnavailable as error:
            raise self._elsewhere(str(error)) from error

    def _elsewhere(self, why: str) -> Elsewhere:
        leader = self._leader()
        return Elsewhere(why, leader.address if leader is not None else "")

    def _pack(self, after: int, page: _Packed, head: int) -> bytes:
        leader = self._leader() or LeaderInfo(0, "", "")
        row = (self._job, after, page.last, head, page.more or head > page.last, *leader, page.lengths, page.crc)
        return pack(row, page.body)


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class _Kept(NamedTuple):
    """A batch that was committed by this master."""

    first: int
    last: int
    payload: bytes


class _Packed(NamedTuple):
    """A page's batches in one piece, as all readers at this place get them."""

    last: int
    more: bool
    lengths: Sequence[int]
    crc: int
    body: bytes

    @classmethod
    def of(cls, page: Page) -> _Packed:
        body = b"".join(page.payloads)
        return cls(page.last, page.more, list(map(len, page.payloads)), zlib.crc32(body), body)


_EMPTY = _Packed(0, False, (), 0, b"")  # no more


async def page_of(event_log: EventLog, job: str, after: int, bytes_max: int) -> Page:
    """The next batches of any log. A log that hands out only decoded batches decodes them on the way."""
    if isinstance(event_log, Paging):
        return await event_log.page(job, after, bytes_max)
    payloads, last, size = list[bytes](), after, 0
    async with aclosing(event_log.batches(job, after)) as batches:  # type: ignore[type-var]  # a generator in all logs
        async for batch in batches:
            size += len(batch.payload)
            if payloads and size > bytes_max:
                return Page(payloads, last, more=True)
            payloads.append(batch.payload)
            last = batch.last_seq
    return Page(payloads, last, more=False)


def pack(row: Sequence[object], body: bytes) -> bytes:
    """A page from the fields of its head and its batches."""
    head = msgpack.packb(row)
    return b"".join((_FRONT.pack(_MAGIC, FORMAT, len(head), zlib.crc32(head)), head, body))


def unpack(data: bytes) -> Told:
    """A page from its bytes.

    Raises `MalformedMessage` for bytes that are none, `SchemaTooNew` for those of a newer version, and `LogUnavailable` for a
    page that was cut or changed on its way: it can be asked for again.
    """
    if len(data) < _FRONT.size or data[:4] != _MAGIC:
        raise MalformedMessage(f"{len(data)} bytes are no page of records")
    _, form, length, crc = _FRONT.unpack_from(data)
    if form != FORMAT:
        raise SchemaTooNew(
            f"pages of records have format {form}, newer than {FORMAT}; upgrade dlrover-core to read them"
        )
    raw = data[_FRONT.size : _FRONT.size + length]
    if len(raw) != length or zlib.crc32(raw) != crc:
        raise LogUnavailable("a page of records was cut or changed on its way")
    try:
        row = msgpack.unpackb(raw, use_list=False)
        job, after, last, head, more, token, holder, address, lengths, sums = row[:_HEAD_FIELDS]
        ends = sum(lengths)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise MalformedMessage(f"the head of a page of records cannot be read: {error}") from error
    body = memoryview(data)[_FRONT.size + length :]
    if len(body) != ends or zlib.crc32(body) != sums:
        raise LogUnavailable("a page of records was cut or changed on its way")
    payloads, at = list[bytes](), 0
    for one in lengths:
        payloads.append(bytes(body[at : at + one]))
        at += one
    leader = LeaderInfo(token, holder, address) if holder else None
    return Told(job, after, last, head, more, leader, payloads)
