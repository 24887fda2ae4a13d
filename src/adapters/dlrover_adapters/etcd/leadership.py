"""Leading a job: the append transaction and its four outcomes.

```
if    create_revision(leader) == token and mod_revision(head) == as last seen
then  put log/<last seq> = the batch, put head = <last seq, token, counter>
else  get leader, get head, get log/<last seq>
```
The else-branch tells in the same round trip *why*. The batch's identity comes before the fence: a batch can land and the
lease die after it. What of an earlier attempt still lands later meets another head than it expects, and changes nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any, Protocol

import structlog

from dlrover_adapters.etcd import snapshots
from dlrover_adapters.etcd.client import Denied, Etcd, LeaseGone
from dlrover_adapters.etcd.election import Won, revoke
from dlrover_adapters.etcd.keys import Head, Keys, Leader
from dlrover_adapters.etcd.lease import Lease, Timing
from dlrover_adapters.etcd.looking import look
from dlrover_core.errors import LogError, LogFull, LogUnavailable
from dlrover_core.kernel.codec import Codec
from dlrover_core.kernel.events import Batch
from dlrover_core.kernel.log import AlreadyAppended, Appended, Conflict, Fenced, Outcome, Snapshot

# Two round trips where etcd is well; where it is not, the lease's end does the same a little later.
RESIGN_S = 1.0

log = structlog.get_logger("dlrover.etcd")


class Log(Protocol):
    """What a leadership needs of the log that it leads."""

    @property
    def etcd(self) -> Etcd:
        """The client."""
        ...

    @property
    def codec(self) -> Codec:
        """How batches are written."""
        ...

    def parted(self, lead: EtcdLeadership) -> None:
        """A leadership is over."""
        ...


class EtcdLeadership:
    """The right to append to one job's log, held by a lease. Made by `EtcdLog.lead`."""

    def __init__(self, event_log: Log, keys: Keys, holder: str, won: Won) -> None:
        self.job, self.holder, self.keys = keys.job, holder, keys
        self._log, self._etcd = event_log, event_log.etcd
        self._token = won.token
        self._head, self._head_revision = won.head, won.head_revision
        self._fence = self._etcd.created(keys.leader, won.token)
        self._lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._over = False
        self._trouble = ""
        timing = Timing.of(won.ttl_s).checked()
        self._lease = Lease(self._etcd, keys.leader, won.token, won.lease, timing, won.asked_at, self._end)
        self.keeping: asyncio.Task[None] | None = None
        self._reads = [self._etcd.range(one) for one in (keys.leader, keys.head)]
        self._looks = [self._etcd.get_op(one) for one in self._reads]

    def begin(self) -> None:
        """Keep the lease from now on."""
        self.keeping = asyncio.ensure_future(self._lease.keep())
        self.keeping.add_done_callback(self._kept)

    @property
    def token(self) -> int:
        """The fencing number: the revision that created the leader's key."""
        return self._token

    @property
    def head(self) -> Head:
        """The end of the log, as last seen."""
        return self._head

    @property
    def lost(self) -> Awaitable[None]:
        """Done when leadership is known to be over; while etcd cannot be reached it is not."""
        return asyncio.shield(self._lost)

    def valid(self) -> bool:
        """May orders still be given? By the local clock: true for a little less time than the lease lives."""
        return not self._over and self._lease.valid()

    def trouble(self) -> str:
        """The last error of an append or of a renewal; empty once that succeeds."""
        return self._trouble or self._lease.trouble

    async def append(self, batch: Batch) -> Outcome:
        """Append whole or not at all. Raises `LogUnavailable` (send the same batch again) and `LogFull`."""
        if batch.token != self._token:
            raise ValueError(f"job {self.job!r}: a batch of token {batch.token} cannot be appended under {self._token}")
        try:
            outcome = await self._append(batch)
        except Denied as error:
            # Somebody may be changing a password at this moment. A master that is gone could not go on afterwards.
            self._trouble = f"LogUnavailable: {error}"
            raise LogUnavailable(f"job {self.job!r}: {error}") from error
        except LogError as error:
            self._trouble = f"{type(error).__name__}: {error}"
            raise
        self._trouble = ""
        return outcome

    async def snapshot(self, snapshot: Snapshot) -> None:
        """Keep a snapshot; the newest two stay. A failure is a warning: a snapshot is only a cache."""
        try:
            if not self._over:
                await snapshots.put(self._etcd, self.keys, self._token, snapshot)
        except LogError as error:
            log.warning("no snapshot, the next start reads more", job=self.job, seq=snapshot.seq, reason=str(error))

    async def announce(self, address: str) -> None:
        """Publish where this leader can be reached."""
        put = self._etcd.put_op(self.keys.leader, Leader(self.holder, address).packed(), self._lease.number)
        try:
            if not await self.write([put]):
                self._end()
        except LeaseGone:
            self._end()

    async def write(self, operations: list[Any]) -> bool:
        """Do all of this if nobody newer leads; did it happen?"""
        if self._over:
            return False
        reply = await self._etcd.call("Txn", self._etcd.txn([self._fence], operations))
        return bool(reply.succeeded)

    async def resign(self) -> None:
        """Hand leadership on at once. Idempotent."""
        if self._over:
            return
        self._over = True
        self._lease.end()
        try:
            request = self._etcd.txn([self._fence], [self._etcd.delete_op(self.keys.leader)])
            await self._etcd.call("Txn", request, timeout_s=RESIGN_S)
        except LogFull:
            pass  # before 3.5.5 a full etcd refuses even a transaction that deletes; ending the lease, never
        except LogError as error:
            log.warning("the leader's name stays until its lease is over", job=self.job, reason=str(error))
            return
        finally:
            self._end()
        await revoke(self._etcd, self._lease.number)

    # ---- appending

    async def _append(self, batch: Batch) -> Outcome:
        key = self.keys.batch(batch.last_seq)
        etcd = self._etcd
        there = etcd.range(key)
        looks = [*self._looks, etcd.get_op(there)]
        for _ in range(2):
            head = Head(batch.last_seq, batch.token, batch.counter)
            may = not self._over and batch.first_seq == self._head.seq + 1
            if may:
                conditions = [self._fence, etcd.modified(self.keys.head, self._head_revision)]
                then = [etcd.put_op(key, batch.payload), etcd.put_op(self.keys.head, head.packed())]
                try:
                    reply = await etcd.call("Txn", etcd.txn(conditions, then, looks))
                except LogFull:
                    # etcd says so of the transaction that fills it, too, and that one it has done.
                    _, found = await look(etcd, [*self._reads, there])
                    outcome = self._explain(batch, found)
                    if outcome is None:
                        raise
                    return Appended(batch.last_seq) if isinstance(outcome, AlreadyAppended) else outcome
                if reply.succeeded:
                    self._head, self._head_revision = head, reply.header.revision
                    return Appended(batch.last_seq)
                found = [one.response_range.kvs for one in reply.responses]
            else:
                _, found = await look(etcd, [*self._reads, there])
            outcome = self._explain(batch, found)
            if outcome is not None:
                return outcome
        raise LogUnavailable(f"job {self.job!r}: batch {batch.first_seq} met another head twice; send it again")

    def _explain(self, batch: Batch, found: list[Any]) -> Outcome | None:
        """Why a batch did not land; None: by what was seen now it would."""
        leaders, heads, batches = found
        created = leaders[0].create_revision if leaders else 0
        head = Head.unpacked(heads[0].value) if heads else Head()
        ours = created == self._token
        if not ours:
            self._end()
        if head == (batch.last_seq, batch.token, batch.counter) or (batches and self._same(batch, batches[0].value)):
            self._see(head, heads)
            return AlreadyAppended(batch.last_seq)
        if not ours or self._over:
            return Fenced(self._token, created or max(self._token, head.token))
        self._see(head, heads)
        if batch.first_seq != head.seq + 1:
            return Conflict(batch.first_seq - 1, head.seq)
        return None

    def _see(self, head: Head, heads: Any) -> None:
        self._head, self._head_revision = head, heads[0].mod_revision if heads else 0

    def _same(self, batch: Batch, payload: bytes) -> bool:
        try:
            found = self._log.codec.decode(payload)
        except LogError:
            return False  # a newer leader's, of a version that is newer too
        return (found.token, found.counter) == (batch.token, batch.counter)

    # ---- the end

    def _kept(self, keeping: asyncio.Task[None]) -> None:
        """Who does not renew does not lead for long, and must not go on believing that it might."""
        error = None if keeping.cancelled() else keeping.exception()
        if error is not None:
            log.error("keeping the leader's lease failed: our bug", job=self.job, exc_info=error)
            self._end()

    def _end(self) -> None:
        self._over = True
        self._lease.end()
        if self.keeping is not None and self.keeping is not asyncio.current_task():
            self.keeping.cancel()
        if not self._lost.done():
            self._lost.set_result(None)
            self._log.parted(self)
