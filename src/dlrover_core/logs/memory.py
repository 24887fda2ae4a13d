"""The log in memory, for tests and simulation: same outcomes as any other, and faults that happen when a script says so.

No thread, no clock, no randomness of its own: a delay is `asyncio.sleep` on the running loop, which may be a virtual-time
one. Two masters of one test share one `MemoryLog`; what `expire` does to a leader, a process's death does elsewhere.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Collection, Mapping
from typing import NamedTuple, Union

from dlrover_core.errors import LogCorrupt, LogFull, LogUnavailable, NotLeading
from dlrover_core.kernel.codec import Codec
from dlrover_core.kernel.events import Batch, Record
from dlrover_core.kernel.log import AlreadyAppended, Appended, Conflict, Fenced, LeaderInfo, Outcome, Segment, Snapshot
from dlrover_core.logs.archive import SEGMENT_EVENTS, Archive
from dlrover_core.logs.doorbell import Doorbell
from dlrover_core.logs.stores import Store


class LostAck(NamedTuple):
    """The batch lands, and `LogUnavailable` is raised all the same."""


class SlowAck(NamedTuple):
    """The batch lands; the acknowledgement takes ``delay_s``."""

    delay_s: float


class Unavailable(NamedTuple):
    """Nothing lands, `LogUnavailable` is raised."""


class Full(NamedTuple):
    """Nothing lands, `LogFull` is raised."""


class Deposed(NamedTuple):
    """A rival raises the token first: the append is fenced."""


class Stuck(NamedTuple):
    """The append never returns, having landed or not: the moment to kill a master before or after it."""

    lands: bool


Fault = Union[LostAck, SlowAck, Unavailable, Full, Deposed, Stuck]


class Faults:
    """What goes wrong: by the number of the append (from 1, over all jobs), or for as long as a switch is on.

    ``Faults({3: LostAck()})``; ``faults.unavailable = True`` lets every call fail until it is False again, ``faults.full`` every
    append. While ``unsure`` is True no leader can be sure that it still leads. ``tripped`` lists what has happened so far.
    """

    def __init__(self, script: Mapping[int, Fault] | None = None) -> None:
        self.script: dict[int, Fault] = dict(script or {})
        self.unavailable = False
        self.full = False
        self.unsure = False
        self.appends = 0
        self.tripped: list[tuple[int, Fault]] = []

    def at_next(self, fault: Fault) -> None:
        """Let the next append that has no fault yet suffer ``fault``."""
        number = self.appends + 1
        while number in self.script:
            number += 1
        self.script[number] = fault

    def take(self) -> Fault | None:
        """The fault of the append that begins now. For the log."""
        self.appends += 1
        fault = self.script.pop(self.appends, None)
        if fault is None:
            fault = Unavailable() if self.unavailable else Full() if self.full else None
        if fault is not None:
            self.tripped.append((self.appends, fault))
        return fault


class _Job:
    def __init__(self) -> None:
        self.batches: list[Batch] = []
        self.lasts: list[int] = []
        self.by_identity: dict[tuple[int, int], int] = {}
        self.snapshots: list[tuple[Snapshot, bool]] = []
        self.token = 0
        self.address = ""
        self.taken = False
        self.leader: MemoryLeadership | None = None
        self.queue: deque[asyncio.Future[None]] = deque()

    @property
    def head(self) -> int:
        return self.lasts[-1] if self.lasts else 0


class MemoryLog:
    """An `EventLog` in memory. With a codec every batch read is decoded from its bytes; without, handed out as it came.

    ``archive`` is for the one job that is archived, and needs a codec; the store is called on the loop.
    """

    def __init__(
        self,
        codec: Codec | None = None,
        faults: Faults | None = None,
        archive: Store | None = None,
        segment_events: int = SEGMENT_EVENTS,
    ) -> None:
        self.codec = codec
        self.faults = faults if faults is not None else Faults()
        self.store, self.segment_events = archive, segment_events
        self._archives: dict[str, Archive] = {}
        self._jobs: dict[str, _Job] = {}
        self._bell = Doorbell()
        self._closed = False

    @property
    def shared(self) -> bool:
        """It lives and dies with its process."""
        return False

    @classmethod
    async def open_url(cls, _url: str, codec: Codec) -> MemoryLog:
        """A new log; every ``memory:`` is one of its own."""
        return cls(codec)

    async def lead(
        self,
        job: str,
        holder: str,
        ttl_s: float = 5.0,  # noqa: ARG002  # the port's; nobody dies here unannounced
        *,
        wait: bool = True,
        dead: Collection[str] = (),  # noqa: ARG002  # as above
    ) -> MemoryLeadership:
        """Become the leader, in the order of asking. Raises `NotLeading` without ``wait``."""
        self._check()
        kept = self._jobs.setdefault(job, _Job())
        if kept.taken:
            if not wait:
                leader = kept.leader
                raise NotLeading(job, leader.holder if leader else "", kept.address)
            await self._turn(kept)
        kept.taken = True
        kept.token += 1
        kept.address = ""
        kept.leader = MemoryLeadership(self, job, kept, holder)
        return kept.leader

    async def leader(self, job: str) -> LeaderInfo | None:
        """Who leads now."""
        self._check()
        kept = self._jobs.get(job)
        if kept is None or kept.leader is None:
            return None
        return LeaderInfo(kept.token, kept.leader.holder, kept.address)

    async def head(self, job: str) -> int:
        """The last sequence number; 0 for an empty log."""
        self._check()
        return self._jobs[job].head if job in self._jobs else 0

    async def jobs(self) -> list[str]:
        """The names of all jobs, sorted."""
        self._check()
        return sorted(self._jobs)

    async def batches(self, job: str, after: int = 0) -> AsyncIterator[Batch]:
        """Every batch beyond ``after``, in order."""
        while True:
            self._check()
            kept = self._jobs.get(job)
            index = bisect_right(kept.lasts, after) if kept is not None else 0
            if kept is None or index == len(kept.lasts):
                return
            batch = kept.batches[index]
            if batch.first_seq > after + 1:
                for old in self._archived(job, after, batch.first_seq):
                    yield old
                    after = old.last_seq
                continue
            yield batch if self.codec is None else self.codec.decode(batch.payload)
            after = batch.last_seq

    async def read(self, job: str, after: int = 0) -> AsyncIterator[Record]:
        """Every record beyond ``after``, in order."""
        async for batch in self.batches(job, after):
            for record in batch.records:
                if record.seq > after:
                    yield record

    async def follow(self, job: str, after: int = 0) -> AsyncIterator[Record]:
        """`read`, then whatever is appended, until cancelled."""
        while True:
            rung = self._bell.rung(job)
            async for record in self.read(job, after):
                yield record
                after = record.seq
            await self._bell.wait(job, rung)

    async def latest_snapshot(self, job: str) -> Snapshot | None:
        """The newest snapshot that is whole and not ahead of the log, or None."""
        self._check()
        kept = self._jobs.get(job)
        if kept is None:
            return None
        return next(
            (kept_one for kept_one, whole in reversed(kept.snapshots) if whole and kept_one.seq <= kept.head), None
        )

    async def archive(self, job: str, upto: int | None = None, noted: int | None = None) -> list[Segment]:
        """Copy what fills whole files, up to ``upto``; nothing without an archive."""
        self._check()
        archive = self._archive_of(job)
        if archive is None:
            return []
        new = [one async for one in self.batches(job, archive.last()) if upto is None or one.last_seq <= upto]
        return archive.write(new, noted)

    async def trim(self, job: str, upto: int) -> int:
        """Delete what is archived up to ``upto`` and to the older of two snapshots; returns how many."""
        self._check()
        archive, kept = self._archive_of(job), self._jobs.get(job)
        if archive is None or kept is None or len(kept.snapshots) < 2:
            return 0
        upto = min(upto, kept.snapshots[-2][0].seq)
        old = kept.batches[: min(bisect_right(kept.lasts, upto), len(kept.batches) - 1)]
        archive.require(upto, old)
        del kept.batches[: len(old)], kept.lasts[: len(old)]
        return len(old)

    async def close(self) -> None:
        """Resign everywhere. Idempotent."""
        for kept in self._jobs.values():
            if kept.leader is not None:
                await kept.leader.resign()
        self._closed = True
        self._bell.ring_all()

    def expire(self, job: str) -> None:
        """Let the present leader lose the job as if its process had died: the next in line gets it."""
        kept = self._jobs[job]
        if kept.leader is not None:
            self._end(kept.leader)

    def halve_snapshot(self, job: str, snapshot: Snapshot) -> None:
        """Leave a snapshot whose writer died half-way."""
        self._jobs[job].snapshots.append((snapshot, False))

    def _check(self) -> None:
        if self._closed:
            raise LogUnavailable("the log in memory is closed")
        if self.faults.unavailable:
            raise LogUnavailable("the log in memory is unavailable: its fault script says so")

    def _archive_of(self, job: str) -> Archive | None:
        if self.store is None or self.codec is None:
            return None
        return self._archives.setdefault(job, Archive(self.store, job, self.codec, self.segment_events))

    def _archived(self, job: str, after: int, found: int) -> list[Batch]:
        archive = self._archive_of(job)
        page = archive.page(after) if archive is not None else []
        if not page:
            raise LogCorrupt(job, after + 1, f"the log goes on with {found}, and the archive does not hold it")
        return page

    async def _turn(self, kept: _Job) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        kept.queue.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._pass_on(kept)  # its turn had come: the next one's, then
            elif turn in kept.queue:
                kept.queue.remove(turn)
            raise

    def _end(self, lead: MemoryLeadership) -> None:
        kept = lead.kept
        if kept.leader is lead:
            kept.leader = None
            kept.address = ""
            self._pass_on(kept)
        if not lead.gone.done():
            lead.gone.set_result(None)
        self._bell.ring(lead.job)

    def _pass_on(self, kept: _Job) -> None:
        kept.taken = False
        while kept.queue:
            turn = kept.queue.popleft()
            if not turn.done():
                kept.taken = True  # before the waiter runs: nobody may step in between
                turn.set_result(None)
                return

    def _depose(self, lead: MemoryLeadership) -> None:
        lead.kept.token += 1
        self._end(lead)

    def _land(self, lead: MemoryLeadership, batch: Batch) -> Outcome:
        kept = lead.kept
        if kept.leader is not lead:
            return Fenced(lead.token, kept.token)
        done = kept.by_identity.get((batch.token, batch.counter))
        if done is not None:
            return AlreadyAppended(done)
        if batch.first_seq != kept.head + 1:
            return Conflict(batch.first_seq - 1, kept.head)
        kept.batches.append(batch)
        kept.lasts.append(batch.last_seq)
        kept.by_identity[batch.token, batch.counter] = batch.last_seq
        self._bell.ring(lead.job)
        return Appended(batch.last_seq)


class MemoryLeadership:
    """The right to append to one job of a `MemoryLog`."""

    def __init__(self, log: MemoryLog, job: str, kept: _Job, holder: str) -> None:
        self.job, self.holder, self.kept = job, holder, kept
        self._log, self._token = log, kept.token
        self.gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def token(self) -> int:
        """The fencing number."""
        return self._token

    @property
    def lost(self) -> Awaitable[None]:
        """Done when leadership is over."""
        return asyncio.shield(self.gone)

    def valid(self) -> bool:
        """May orders still be given?"""
        return self.kept.leader is self and not self._log.faults.unsure

    def trouble(self) -> str:
        """What the faults' switches say."""
        faults = self._log.faults
        if faults.unavailable:
            return "LogUnavailable: its fault script says so"
        return "LogFull: its fault script says so" if faults.full else ""

    async def append(self, batch: Batch) -> Outcome:
        """Append whole or not at all, or suffer what the script says."""
        if batch.token != self._token:
            raise ValueError(f"job {self.job!r}: a batch of token {batch.token} cannot be appended under {self._token}")
        fault = self._log.faults.take()
        if isinstance(fault, Unavailable) or self._log._closed:
            raise LogUnavailable(f"job {self.job!r}: batch {batch.first_seq} did not reach the log")
        if isinstance(fault, Full):
            raise LogFull(f"job {self.job!r}: no room for batch {batch.first_seq}")
        if isinstance(fault, Stuck) and not fault.lands:
            await asyncio.get_running_loop().create_future()
        if isinstance(fault, Deposed):
            self._log._depose(self)
        outcome = self._log._land(self, batch)
        if isinstance(fault, LostAck):
            raise LogUnavailable(f"job {self.job!r}: the acknowledgement of batch {batch.first_seq} was lost")
        if isinstance(fault, Stuck):
            await asyncio.get_running_loop().create_future()
        # A real log always gives the loop a turn here, in which commands queue up for the next batch.
        await asyncio.sleep(fault.delay_s if isinstance(fault, SlowAck) else 0)
        return outcome

    async def snapshot(self, snapshot: Snapshot) -> None:
        """Keep a snapshot; the newest two stay. Nothing happens when leadership is over or the log is down."""
        if not self.valid() or self._log.faults.unavailable or self._log.faults.full:
            return
        kept = [one for one in self.kept.snapshots if one[0].seq != snapshot.seq] + [(snapshot, True)]
        kept.sort(key=lambda one: one[0].seq)
        self.kept.snapshots = kept[-2:]

    async def announce(self, address: str) -> None:
        """Publish where this leader can be reached."""
        self._log._check()
        if self.kept.leader is self:
            self.kept.address = address

    async def resign(self) -> None:
        """Hand leadership on at once. Idempotent."""
        self._log._end(self)
