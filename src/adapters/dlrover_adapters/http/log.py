"""A job's log, read through its masters: an `EventLog` that reads, over ``GET /v1/records``.

Any master of the job answers, whether it leads or stands by. The reader keeps to one while that answers; when it does not, the
next one of the URL is asked, or one that was named as leader on the way, from the record after the last one read: nothing is
lost, nothing comes twice. What is read is checked like what is read from a file: pages bear checksums, and records must follow
each other.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Collection
from contextlib import aclosing
from typing import NoReturn

import structlog

from dlrover_adapters.http import log_address, tls
from dlrover_adapters.http.asking_records import Asking
from dlrover_core.errors import LogCorrupt, LogError, LogUnavailable, SpecError
from dlrover_core.kernel.codec import Codec
from dlrover_core.kernel.events import Batch, Record
from dlrover_core.kernel.log import LeaderInfo, Leadership, Snapshot
from dlrover_core.runtime.records import PAGE_BYTES, WAIT_S_MAX, Told

# How long `read` asks all masters again once some were read: longer than a change of leaders takes.
PATIENCE_S = 15.0
PAUSE_FIRST_S, PAUSE_MAX_S = 0.05, 2.0
# A reader that has more to decode lets the next page come in this often.
TURN_S = 0.002

log = structlog.get_logger("dlrover.http")


class HttpLog:
    """An `EventLog` of one job, which can be read alone. Use `open_url`."""

    def __init__(self, address: log_address.Address, codec: Codec) -> None:
        self.address, self.codec = address, codec
        secure = tls.trusting(address.cacert) if address.cacert else None
        self._asking = Asking(address, secure)

    @classmethod
    async def open_url(cls, url: str, codec: Codec) -> HttpLog:
        """The log at an ``http:`` or ``https:`` URL, as `log_address` describes it. Nobody is asked yet. Raises `SpecError`."""
        return cls(log_address.parse(url), codec)

    @property
    def shared(self) -> bool:
        """Nobody leads here."""
        return False

    async def lead(
        self, job: str, holder: str, ttl_s: float = 5.0, *, wait: bool = True, dead: Collection[str] = ()
    ) -> Leadership:
        """Refused: what masters hand out can be read, not appended to. Raises `SpecError`."""
        del holder, ttl_s, wait, dead
        return self._refuse(job)

    def _refuse(self, job: str) -> NoReturn:
        raise SpecError(
            "log",
            f"{self.address.shown} is for reading: nobody can lead job {job!r} there; give --log the log itself, sqlite or etcd",
        )

    async def leader(self, job: str) -> LeaderInfo | None:
        """Who leads, as far as the master knows that answers."""
        return (await self._told(job)).leader

    async def head(self, job: str) -> int:
        """The last durable sequence number."""
        return (await self._told(job)).head

    async def _told(self, job: str) -> Told:
        """What is known of a job without reading its records."""
        return await self._asking.page(job, 0, bytes_max=0)

    async def jobs(self) -> list[str]:
        """The job that the masters lead."""
        return [(await self._told("")).job]

    async def latest_snapshot(self, job: str) -> Snapshot | None:
        """None: who reads folds from the beginning."""
        del job
        return None

    async def batches(self, job: str, after: int = 0) -> AsyncGenerator[Batch, None]:
        """Every batch whose last record is beyond ``after``, in order.

        Raises `LogCorrupt` for what is damaged or does not follow, `SchemaTooNew`, `LogUnavailable` where no master answers any
        more, and `TokenRefused`.
        """
        async with aclosing(self._pages(job, after, _Trouble(job, PATIENCE_S), 0.0)) as pages:
            async for told in pages:
                async with aclosing(self._decoded(job, told)) as batches:
                    async for batch in batches:
                        yield batch
                if not told.more:
                    return

    async def read(self, job: str, after: int = 0) -> AsyncGenerator[Record, None]:
        """Every record beyond ``after``, in order. Raises as `batches` does."""
        async with aclosing(self.batches(job, after)) as batches:
            async for batch in batches:
                for record in batch.records:
                    if record.seq > after:
                        yield record

    async def follow(self, job: str, after: int = 0) -> AsyncGenerator[Record, None]:
        """`read`, then whatever is appended under whatever leader, without gap or duplicate, until cancelled.

        Where no master answers they are asked for ever. Raises `LogCorrupt`, `SchemaTooNew` and `TokenRefused`.
        """
        async with aclosing(self._pages(job, after, _Trouble(job, None), WAIT_S_MAX)) as pages:
            async for told in pages:
                async with aclosing(self._decoded(job, told)) as batches:
                    async for batch in batches:
                        for record in batch.records:
                            if record.seq > after:
                                yield record

    async def _pages(self, job: str, after: int, trouble: _Trouble, wait_s: float) -> AsyncGenerator[Told, None]:
        """Page after page, for ever; whoever reads only what is there stops where there is no more."""

        def ask() -> asyncio.Task[Told]:
            return asyncio.ensure_future(self._asking.page(job, after, bytes_max=PAGE_BYTES, wait_s=wait_s))

        asked = ask()
        try:
            while True:
                try:
                    told = await asked
                except LogUnavailable as error:
                    await trouble.pause(error, after)
                    asked = ask()
                    continue
                trouble.over()
                after = told.last
                if told.more or wait_s:
                    # The next page travels while this one is decoded.
                    asked = ask()
                yield told
        finally:
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)

    async def _decoded(self, job: str, told: Told) -> AsyncGenerator[Batch, None]:
        """The batches of a page, decoded; they must follow what was asked for."""
        loop = asyncio.get_running_loop()
        turn, begun, after = loop.time(), False, told.after
        for payload in told.payloads:
            batch = self._batch(job, after, payload)
            if batch.first_seq > after + 1 or batch.last_seq <= after or (begun and batch.first_seq != after + 1):
                raise LogCorrupt(
                    job,
                    after + 1,
                    f"the master at {self._asking.current} goes on with {batch.first_seq}-{batch.last_seq}",
                )
            yield batch
            after, begun = batch.last_seq, True
            if loop.time() - turn > TURN_S:
                await asyncio.sleep(0)
                turn = loop.time()
        if after != told.last:
            raise LogCorrupt(job, after + 1, f"the master at {self._asking.current} promised events up to {told.last}")

    def _batch(self, job: str, after: int, payload: bytes) -> Batch:
        try:
            batch = self.codec.decode(payload)
        except LogError as error:
            if type(error) is LogError:
                raise LogCorrupt(job, after + 1, str(error)) from error
            raise
        if not batch.records:
            raise LogCorrupt(job, after + 1, f"the master at {self._asking.current} sends a batch of nothing")
        return batch

    async def close(self) -> None:
        """Close all connections. Idempotent."""
        await self._asking.close()


class _Trouble:
    """What keeps a reader from reading: waited for, ``patience_s`` long or for ever, if anything was read before; told once."""

    def __init__(self, job: str, patience_s: float | None) -> None:
        self._job, self._patience_s = job, patience_s
        self._worked = patience_s is None
        self._since: float | None = None
        self._pause_s = PAUSE_FIRST_S

    async def pause(self, error: LogUnavailable, after: int) -> None:
        """Wait a while, longer each time; raises the error where patience is over."""
        now = asyncio.get_running_loop().time()
        if self._since is None:
            self._since = now
            if self._worked:
                log.warning("no master hands out records now, trying on", job=self._job, after=after, error=str(error))
        if not self._worked or (self._patience_s is not None and now - self._since > self._patience_s):
            raise error
        await asyncio.sleep(self._pause_s * (0.5 + random.random()))
        self._pause_s = min(PAUSE_MAX_S, 2 * self._pause_s)

    def over(self) -> None:
        """A master answers again."""
        if self._since is not None:
            lasted_s = asyncio.get_running_loop().time() - self._since
            log.info("records are handed out again", job=self._job, after_s=round(lasted_s, 1))
        self._since, self._pause_s, self._worked = None, PAUSE_FIRST_S, True
