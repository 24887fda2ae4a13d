"""The log on etcd: shared by the masters of several hosts, of which one leads each job.

What leads is in `leadership`, what is read in `reading`, how a leader is found in `election`. Nothing is ever compacted or
defragmented here: that belongs to whoever runs the etcd.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import aclosing

import structlog

from dlrover_adapters.etcd import address, checks, election, protocol, snapshots
from dlrover_adapters.etcd.client import Closed, Etcd
from dlrover_adapters.etcd.keys import Keys
from dlrover_adapters.etcd.leadership import EtcdLeadership
from dlrover_adapters.etcd.lease import Timing
from dlrover_adapters.etcd.reading import Reader
from dlrover_core.errors import LogError, LogFull, LogUnavailable
from dlrover_core.kernel.codec import Codec
from dlrover_core.kernel.events import Batch, Record
from dlrover_core.kernel.log import LeaderInfo, Segment, Snapshot
from dlrover_core.logs import archive as archives

# What a job may grow to without an archive before we say so: at 150 bytes an event a good part of etcd's default quota.
UNARCHIVED_EVENTS = 2_000_000
# Batches deleted by one transaction: etcd applies it whole, and everybody waits for it.
TRIM_BATCHES = 2_000
# How often an etcd that cannot be written yet is tried, by who has the time to wait.
WRITABLE_S = 1.0

log = structlog.get_logger("dlrover.etcd")


class EtcdLog:
    """An `EventLog` in an etcd. Use `open_url`."""

    def __init__(self, etcd: Etcd, codec: Codec, segment_events: int = archives.SEGMENT_EVENTS) -> None:
        self.etcd, self.codec, self.segment_events = etcd, codec, segment_events
        self._reader = Reader(etcd, codec, self._archive_of)
        self._archives: dict[str, archives.Archive] = {}
        self._leading: dict[str, EtcdLeadership] = {}
        self._campaigns: set[asyncio.Task[election.Won]] = set()
        self._ending: set[asyncio.Task[None]] = set()
        self._closing = False
        self._may_write = False
        self._warned: set[str] = set()

    @classmethod
    async def open_url(cls, url: str, codec: Codec) -> EtcdLog:
        """The log at an ``etcd:`` URL, as `address` describes it.

        Raises `SpecError` for a URL, a certificate, a password or an etcd that cannot be right; `LogUnavailable` where nobody
        answers.
        """
        where = address.parse(url)
        # Importing grpc and building the messages takes longer than a loop should stand still.
        await asyncio.to_thread(protocol.load)
        if where.archive:
            await asyncio.to_thread(archives.open_store, where.archive, "any")
        etcd = Etcd(where)
        try:
            await checks.reading(etcd)
        except BaseException:
            await etcd.close()
            raise
        return cls(etcd, codec)

    @property
    def shared(self) -> bool:
        """Masters of several hosts may lead here."""
        return True

    def keys(self, job: str) -> Keys:
        """Where a job lies."""
        return Keys(self.etcd.address.prefix, job)

    async def lead(
        self, job: str, holder: str, ttl_s: float = 5.0, *, wait: bool = True, dead: Collection[str] = ()
    ) -> EtcdLeadership:
        """Win the election, when the present leader is gone or among the ``dead``. The URL's ``ttl`` goes first.

        Raises `SpecError` where this user or this etcd cannot lead, `NotLeading`, `LogError` where the token does not rise.
        """
        keys = self.keys(job)
        ttl_s = self.etcd.address.ttl_s or ttl_s
        Timing.of(ttl_s).checked()
        campaign = asyncio.ensure_future(self._campaign(keys, holder, ttl_s, wait=wait, dead=dead))
        self._campaigns.add(campaign)
        try:
            won = await campaign
        except asyncio.CancelledError:
            if campaign.done() and not campaign.cancelled() and campaign.exception() is None:
                # Won at the moment of giving up.
                await election.revoke(self.etcd, campaign.result().lease)
            if self._closing:
                raise Closed(f"the log {self.etcd.address.shown} is closed") from None
            raise
        finally:
            self._campaigns.discard(campaign)
        lead = EtcdLeadership(self, keys, holder, won)
        lead.begin()
        self._leading[job] = lead
        return lead

    async def _campaign(
        self, keys: Keys, holder: str, ttl_s: float, *, wait: bool, dead: Collection[str]
    ) -> election.Won:
        said = False
        while not self._may_write:
            try:
                await checks.writing(self.etcd)
                self._may_write = True
            except Closed:
                raise
            except (LogUnavailable, LogFull) as error:
                if not wait:
                    raise
                if not said:
                    log.warning("cannot stand by yet", job=keys.job, reason=str(error))
                said = True
                await asyncio.sleep(WRITABLE_S)
        archive = await self._archive(keys.job)
        if archive is not None and not await self.head(keys.job):
            await asyncio.to_thread(archive.check)
        return await election.campaign(self.etcd, keys, holder, ttl_s, wait=wait, dead=dead)

    def parted(self, lead: EtcdLeadership) -> None:
        """A leadership is over."""
        if self._leading.get(lead.job) is lead:
            del self._leading[lead.job]
        if lead.keeping is not None:
            self._ending.add(lead.keeping)
            lead.keeping.add_done_callback(self._ending.discard)

    # ---- reading

    async def leader(self, job: str) -> LeaderInfo | None:
        """Who leads; after a death without a word, who led last, until its lease is over."""
        return await self._reader.leader(job)

    async def head(self, job: str) -> int:
        """The last durable sequence number; 0 for an empty log."""
        return (await self._reader.head(job)).seq

    async def jobs(self) -> list[str]:
        """The names of all jobs, sorted."""
        return await self._reader.jobs()

    def batches(self, job: str, after: int = 0) -> AsyncIterator[Batch]:
        """Every batch beyond ``after``, from archive and etcd as one stream. Raises `LogCorrupt`."""
        return self._reader.batches(job, after)

    def read(self, job: str, after: int = 0) -> AsyncIterator[Record]:
        """Every record beyond ``after``, in order."""
        return self._reader.read(job, after)

    def follow(self, job: str, after: int = 0) -> AsyncIterator[Record]:
        """`read`, then whatever is appended by anybody, through whatever etcd does, until cancelled."""
        return self._reader.follow(job, after)

    async def latest_snapshot(self, job: str) -> Snapshot | None:
        """The newest snapshot that is whole, or None."""
        return await snapshots.latest(self.etcd, self.keys(job), await self.head(job))

    # ---- archive

    async def archive(self, job: str, upto: int | None = None, noted: int | None = None) -> Sequence[Segment]:
        """Copy to the archive what fills whole files, up to ``upto``. The leader then appends an event for each segment."""
        archive = await self._archive(job)
        if archive is None:
            self._warn_of_growth(job)
            return ()
        after = await asyncio.to_thread(archive.last)
        found = await asyncio.to_thread(archive.write, (), noted)
        held: list[Batch] = []
        async with aclosing(self._reader.batches(job, after)) as batches:
            async for batch in batches:
                if upto is not None and batch.last_seq > upto:
                    break
                held.append(batch)
                if batch.last_seq - held[0].first_seq + 1 >= archive.segment_events:
                    known = None if noted is None else max(noted, held[0].first_seq - 1)
                    found += await asyncio.to_thread(archive.write, held, known)
                    held = []
        return found

    async def trim(self, job: str, upto: int) -> int:
        """Delete what the archive holds whole, up to ``upto`` and to the older of the two snapshots; returns how many batches.

        Raises `LogCorrupt` where the archive is damaged, `LogError` where it lacks something or this process does not lead.
        """
        archive = await self._archive(job)
        if archive is None:
            return 0
        lead = self._leading.get(job)
        if lead is None:
            raise LogError(f"job {job!r}: only its leader may delete what is archived")
        kept = await self._snapshot_seqs(lead.keys)
        if len(kept) < 2:
            return 0
        upto = min(upto, kept[-2])
        first = await self.etcd.call("Range", self.etcd.under(lead.keys.log, limit=1))
        after = self.codec.decode(first.kvs[0].value).first_seq - 1 if first.kvs else upto
        deleted, held = 0, list[Batch]()
        # A file's worth at a time: compared with the archive byte for byte, then deleted.
        async with aclosing(self._reader.batches(job, after)) as batches:
            async for batch in batches:
                if batch.last_seq <= upto:
                    held.append(batch)
                if held and (batch.last_seq >= upto or batch.last_seq - held[0].first_seq >= archive.segment_events):
                    await asyncio.to_thread(archive.require, held[-1].last_seq, held)
                    deleted += await self._delete(lead, held[-1].last_seq)
                    held = []
                if batch.last_seq >= upto:
                    break
        return deleted

    async def _delete(self, lead: EtcdLeadership, upto: int) -> int:
        """Delete the batches that end at ``upto`` or before, oldest first."""
        start, end, deleted = lead.keys.log, lead.keys.batch(upto + 1), 0
        while True:
            page = await self.etcd.call("Range", self.etcd.range(start, end=end, limit=TRIM_BATCHES, keys_only=True))
            if not page.kvs:
                return deleted
            behind = page.kvs[-1].key.decode() + "\0"
            if not await lead.write([self.etcd.delete_op(start, behind)]):
                return deleted
            deleted += len(page.kvs)
            if not page.more:
                return deleted
            start = behind

    async def _snapshot_seqs(self, keys: Keys) -> list[int]:
        reply = await self.etcd.call("Range", self.etcd.under(keys.snap, keys_only=True))
        found = (one.key.decode()[len(keys.snap) :].partition("/") for one in reply.kvs)
        return sorted(int(seq) for seq, _, part in found if part == "manifest")

    def _archive_of(self, job: str) -> archives.Archive | None:
        """The archive of a job, where one is configured."""
        where = self.etcd.address.archive
        if where and job not in self._archives:
            store = archives.open_store(where, job)
            self._archives.setdefault(job, archives.Archive(store, job, self.codec, self.segment_events))
        return self._archives.get(job)

    async def _archive(self, job: str) -> archives.Archive | None:
        # In a thread: it may import a package that takes its time.
        return await asyncio.to_thread(self._archive_of, job)

    def _warn_of_growth(self, job: str) -> None:
        lead = self._leading.get(job)
        if lead is not None and lead.head.seq >= UNARCHIVED_EVENTS and job not in self._warned:
            self._warned.add(job)
            log.warning(
                "the job's log grows and nothing is ever deleted",
                job=job,
                events=lead.head.seq,
                remedy="give the log an archive: ?archive=DIRECTORY or an fsspec URL; what is archived is deleted from etcd",
            )

    async def close(self) -> None:
        """Resign everywhere, end all waiting for leadership, close all connections. Idempotent."""
        self._closing = True
        for campaign in list(self._campaigns):
            campaign.cancel()
        await asyncio.gather(*self._campaigns, return_exceptions=True)
        for lead in list(self._leading.values()):
            await lead.resign()
        await asyncio.gather(*self._ending, return_exceptions=True)
        await self.etcd.close()
