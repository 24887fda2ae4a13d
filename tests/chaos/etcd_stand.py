"""What the stories of an etcd log are played on: candidates that write, followers that read, and proxies in between."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, NamedTuple, TypeVar

from tools.etcd_cluster import Cluster

from dlrover_adapters.etcd import EtcdLog
from dlrover_core.errors import LogFull, LogUnavailable
from dlrover_core.kernel.events import Batch
from dlrover_core.kernel.log import AlreadyAppended, Appended, Fenced, Leadership
from dlrover_core.testing import Proxy
from dlrover_core.testing.log_conformance import CODEC, make_batch

T = TypeVar("T")

JOB = "chaos"
PREFIX = "t"
TTL_S = 2.0
RETRY_S = 0.02
LOOK_S = 0.01
BOUND_S = 20.0
PROGRESS_S = (
    25.0  # etcd may need elections of up to 2 s, several where the machine pauses; who asked the dead asks again
)
ELECTED_S = 2 * TTL_S + 3.0
SHARE_LARGE, LARGE_BYTES = 0.05, 20_000


class Void(Exception):
    """etcd's members differ: its own known fault, and no trial of ours."""


class Written(NamedTuple):
    """A batch that was handed to the log."""

    token: int
    counter: int
    first: int
    last: int
    payload: bytes

    @classmethod
    def of(cls, batch: Batch) -> Written:
        """What identifies a batch and what is in it."""
        return cls(batch.token, batch.counter, batch.first_seq, batch.last_seq, batch.payload)


class Candidate:
    """Leads whenever it can, and writes while it leads."""

    def __init__(self, stand: Stand, name: str, url: str) -> None:
        self.stand, self.name, self.url = stand, name, url
        self.lead: Leadership | None = None
        self.acknowledged: list[Written] = []
        self.unsure: list[Written] = []
        self.fenced: list[Fenced] = []
        self.again = self.full = self.elected = 0
        self.elected_at = 0.0
        self.may_write = asyncio.Event()
        self.may_write.set()
        self._dice = random.Random(f"{stand.seed}.{name}")

    @property
    def token(self) -> int:
        """Of the leadership it has, 0 for none."""
        return self.lead.token if self.lead is not None else 0

    @property
    def valid(self) -> bool:
        """Does it believe that it leads?"""
        return self.lead is not None and self.lead.valid()

    async def run(self) -> None:
        """Until cancelled."""
        log = await open_log(self.url)
        try:
            while True:
                lead = await insist(lambda: log.lead(JOB, self.name, TTL_S))
                self.stand.note_election(self, lead)
                self.lead, self.elected, self.elected_at = lead, self.elected + 1, time.monotonic()
                await self.may_write.wait()
                await self._write(lead, await insist(lambda: log.head(JOB)))
        finally:
            await log.close()

    async def _write(self, lead: Leadership, head: int) -> None:
        counter = 0
        while True:
            counter += 1
            events, size = self._dice.randint(1, 8), self._dice.randint(8, 200)
            if self._dice.random() < SHARE_LARGE:
                events, size = 1, LARGE_BYTES
            batch = make_batch(lead.token, counter, head + 1, events, size)
            self.unsure.append(Written.of(batch))
            outcome = await self._append(lead, batch)
            if isinstance(outcome, Fenced):
                self.fenced.append(outcome)
                return
            assert isinstance(outcome, (Appended, AlreadyAppended)), (
                f"{self.name}: {outcome} for {Written.of(batch)[:4]}"
            )
            assert outcome.seq == batch.last_seq, f"{self.name}: {outcome} for {Written.of(batch)[:4]}"
            self.again += isinstance(outcome, AlreadyAppended)
            self.acknowledged.append(self.unsure.pop())
            head = batch.last_seq

    async def _append(self, lead: Leadership, batch: Batch) -> object:
        while True:
            try:
                return await lead.append(batch)
            except LogFull:
                self.full += 1
            except LogUnavailable:
                pass
            await asyncio.sleep(RETRY_S)


class Follower:
    """Follows the log, and is given what it is given."""

    def __init__(self, name: str, url: str, after: int) -> None:
        self.name, self.url, self.after = name, url, after
        self.given: list[tuple[int, int, object]] = []

    @property
    def seq(self) -> int:
        """How far it has come."""
        return self.after + len(self.given)

    async def run(self) -> None:
        """Until cancelled."""
        log = await open_log(self.url)
        try:
            async for record in log.follow(JOB, self.after):
                assert record.seq == self.seq + 1, f"follower {self.name} was given {record.seq} after {self.seq}"
                self.given.append((record.seq, record.token, record.event))
        finally:
            await log.close()


class Stand:
    """One etcd, those who use it, and the verdict."""

    def __init__(self, etcd: Cluster, seed: int) -> None:
        self.etcd, self.seed = etcd, seed
        self.dice = random.Random(seed)
        self.candidates: list[Candidate] = []
        self.followers: list[Follower] = []
        self.may_overlap = False
        self.told: dict[str, int] = {}
        self._flaws: list[str] = []
        self._tasks: dict[asyncio.Task[None], str] = {}
        self._stack = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Stand:  # noqa: PYI034  # Self needs 3.11
        """Nobody is there yet."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Everybody leaves."""
        await self._leave(list(self._tasks))
        await self._stack.aclose()

    # ---- who takes part

    async def proxies(self) -> list[Proxy]:
        """A proxy before every member."""
        return [await self._stack.enter_async_context(Proxy(one)) for one in self.etcd.endpoints]

    def candidate(self, name: str = "a", through: list[Proxy] | None = None) -> Candidate:
        """Somebody who wants to lead begins."""
        one = Candidate(self, name, self._url(through))
        self.candidates.append(one)
        self._begin(one.run(), f"candidate {name}")
        return one

    def follower(self, name: str = "f", through: list[Proxy] | None = None, after: int = 0) -> Follower:
        """Somebody who follows begins."""
        one = Follower(name, self._url(through), after)
        self.followers.append(one)
        self._begin(one.run(), f"follower {name}")
        return one

    async def writing(self, through: list[Proxy] | None = None) -> Candidate:
        """A candidate that leads and writes, and two followers of which one joined later."""
        one = self.candidate("a", through)
        self.follower("from the first")
        await self.progress()
        self.follower("from the middle", after=self.dice.randint(1, self._newest))
        await self.progress()
        return one

    def _url(self, through: list[Proxy] | None) -> str:
        return self.etcd.url(PREFIX, endpoints=[one.address for one in through or ()])

    def _begin(self, run: Any, name: str) -> None:
        self._tasks[asyncio.ensure_future(run)] = name

    async def _leave(self, tasks: list[asyncio.Task[None]]) -> None:
        for one in tasks:
            one.cancel()
            self._tasks.pop(one, None)
        await asyncio.gather(*tasks, return_exceptions=True)

    # ---- what is waited for

    async def until(self, holds: Callable[[], object], what: str, bound_s: float = BOUND_S) -> None:
        """Wait until it ``holds``; somebody who broke off meanwhile is an error."""
        end = time.monotonic() + bound_s
        while not holds():
            self._alive()
            trouble = [one.lead.trouble() for one in self.candidates if one.lead is not None]
            assert time.monotonic() < end, f"not within {bound_s} s: {what}; troubles: {trouble}"
            await asyncio.sleep(LOOK_S)

    def _alive(self) -> None:
        for task, name in self._tasks.items():
            if task.done():
                raise AssertionError(f"{name} broke off: {task.exception()!r}") from task.exception()

    async def progress(self, batches: int = 0, by: Candidate | None = None) -> None:
        """Until so many more batches were acknowledged (a seeded number of them by default)."""
        goal = self._count(by) + (batches or self.dice.randint(5, 60))
        await self.until(lambda: self._count(by) >= goal, f"{goal} acknowledged batches", PROGRESS_S)

    def _count(self, by: Candidate | None) -> int:
        return sum(len(one.acknowledged) for one in ([by] if by is not None else self.candidates))

    @property
    def _newest(self) -> int:
        return max((one.acknowledged[-1].last for one in self.candidates if one.acknowledged), default=0)

    async def renewed(self, one: Candidate) -> None:
        """Until what a leader believes in is no longer its first lease."""
        await self.until(lambda: time.monotonic() - one.elected_at > TTL_S and one.valid, "the lease is renewed")

    async def reaches(self, one: Follower, seq: int) -> None:
        """Until a follower was given ``seq``."""
        await self.until(lambda: one.seq >= seq, f"follower {one.name} at {seq}")

    async def healthy(self) -> None:
        """Until all members are well."""
        await asyncio.to_thread(self.etcd.wait_healthy)

    async def leader(self) -> int:
        """The member that leads."""
        return await asyncio.to_thread(self.etcd.leader)

    async def leaderless(self) -> None:
        """Until etcd too has given up the leader."""
        end = time.monotonic() + ELECTED_S
        while await asyncio.to_thread(self.etcd.lease_of, f"{PREFIX}/v1/jobs/{JOB}/leader"):
            assert time.monotonic() < end, f"the leader's lease lives on after {ELECTED_S} s"

    async def start(self, *members: int) -> None:
        """Start members again, and wait until all are well."""
        for one in members:
            await asyncio.to_thread(self.etcd.start, one)
        await self.healthy()

    async def kill(self, *members: int) -> None:
        """SIGKILL."""
        for one in members:
            await asyncio.to_thread(self.etcd.kill, one)

    @contextlib.contextmanager
    def paused(self, *members: int) -> Iterator[None]:
        """Stopped for the time of the block."""
        for one in members:
            self.etcd.pause(one)
        try:
            yield
        finally:
            for one in members:
                self.etcd.resume(one)

    def note_election(self, who: Candidate, lead: Leadership) -> None:
        """Whoever led before must have ceased to believe in it by itself."""
        for other in self.candidates:
            if other.token >= lead.token:
                self._flaws.append(
                    f"{who.name} was elected with token {lead.token} after {other.name} with {other.token}"
                )
            if other is not who and other.valid and not self.may_overlap:
                self._flaws.append(
                    f"{who.name} leads with {lead.token} while {other.name} believes in its {other.token}"
                )

    # ---- the verdict

    async def verdict(self) -> dict[str, int]:
        """Raises AssertionError for every broken promise; else what the story came to."""
        await self.healthy()
        self._alive()
        await self._leave([task for task, name in self._tasks.items() if name.startswith("candidate")])
        log = await open_log(self.etcd.url(PREFIX))
        try:
            batches = [one async for one in log.batches(JOB)]
            self._judge(batches)
            head = await log.head(JOB)
            assert head == (batches[-1].last_seq if batches else 0)
            for one in self.followers:
                await self.reaches(one, head)
        finally:
            await log.close()
        records = [(one.seq, one.token, one.event) for batch in batches for one in batch.records]
        for one in self.followers:
            if one.given != records[one.after :]:
                self._flaws.append(f"follower {one.name} was given something else than the log has")
        assert not self._flaws, "; ".join(self._flaws[:5])
        counts = {
            "batches": len(batches),
            "events": head,
            "elections": sum(one.elected for one in self.candidates),
            "fenced": sum(len(one.fenced) for one in self.candidates),
            "already_appended": sum(one.again for one in self.candidates),
        }
        return counts | self.told

    def _judge(self, batches: list[Batch]) -> None:
        flaws, seq, token = self._flaws, 0, 0
        there: dict[tuple[int, int], Written] = {}
        for batch in batches:
            if batch.first_seq != seq + 1:
                flaws.append(f"{batch.first_seq} follows {seq}")
            if batch.token < token:
                flaws.append(f"token {batch.token} follows {token} at {batch.first_seq}")
            if batch[:2] in there:
                flaws.append(f"batch {batch[:2]} is there twice")
            seq, token = batch.last_seq, batch.token
            there[batch[:2]] = Written.of(batch)
        known = {one[:2]: one for who in self.candidates for one in (*who.acknowledged, *who.unsure)}
        for who in self.candidates:
            for one in who.acknowledged:
                if there.get(one[:2]) != one:
                    flaws.append(
                        f"acknowledged and not there: {one[:4]} of {who.name}, but {there.get(one[:2], ())[:4]}"
                    )
        flaws += [f"nobody wrote {one[:4]}" for key, one in there.items() if known.get(key) != one]


async def open_log(url: str) -> EtcdLog:
    """Open it, however long etcd cannot be reached."""
    return await insist(lambda: EtcdLog.open_url(url, CODEC))


async def insist(call: Callable[[], Awaitable[T]]) -> T:
    """Again and again while etcd cannot be reached or is full."""
    while True:
        try:
            return await call()
        except (LogUnavailable, LogFull):
            await asyncio.sleep(RETRY_S)
