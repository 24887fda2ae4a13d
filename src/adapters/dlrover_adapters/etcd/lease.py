"""A leader's lease: renewed by a task of its own, and believed in for a little less time than etcd does.

A lease is liveness, never safety: etcd may forget one early, or keep one that should be over. So the local clock decides how
long orders may be given, counted from before the last renewal was *asked for*; and the transaction's fence decides what lands.

While etcd cannot be reached nobody else can take over, so nothing is lost: `valid` turns false by itself, and true again under
the same token if lease and key are still there afterwards. Only etcd's own word ends a leadership.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import NamedTuple

import structlog

from dlrover_adapters.etcd.client import Closed, Etcd, LeaseGone
from dlrover_core.errors import LogError, SpecError

PAUSE_S = 0.2

log = structlog.get_logger("dlrover.etcd")


class Timing(NamedTuple):
    """How a lease of ``ttl_s`` is kept: a renewal every ``period_s``, each given ``timeout_s``; ``margin_s`` for the clocks."""

    ttl_s: float
    period_s: float
    timeout_s: float
    margin_s: float

    @classmethod
    def of(cls, ttl_s: float) -> Timing:
        """Quarters, and an eighth of margin."""
        return cls(ttl_s, ttl_s / 4, ttl_s / 4, ttl_s / 8)

    def checked(self) -> Timing:
        """Itself. Raises `SpecError` unless one renewal may fail and the next one still comes in time."""
        if self.ttl_s <= 0 or self.period_s + 2 * self.timeout_s > self.ttl_s - self.margin_s:
            raise SpecError(
                "ttl",
                f"a lease of {self.ttl_s:g} s cannot be kept: a renewal every {self.period_s:g} s and two time-outs of "
                f"{self.timeout_s:g} s must fit into it with {self.margin_s:g} s to spare",
            )
        return self


class Lease:
    """The lease ``number`` behind the key ``leader``, created at ``token``. ``gone`` is called when etcd says that it is over."""

    def __init__(
        self,
        etcd: Etcd,
        leader: str,
        token: int,
        number: int,
        timing: Timing,
        asked_at: float,
        gone: Callable[[], None],
    ) -> None:
        self.number, self.timing = number, timing
        self.trouble = ""
        self._etcd, self._token, self._gone = etcd, token, gone
        self._look = etcd.range(leader, keys_only=True)
        self._until = asked_at + timing.ttl_s - timing.margin_s

    def valid(self) -> bool:
        """Is it surely not over yet?"""
        return asyncio.get_running_loop().time() < self._until

    def end(self) -> None:
        """Believe in it no longer."""
        self._until = 0.0

    async def keep(self) -> None:
        """Renew it until it is gone."""
        loop = asyncio.get_running_loop()
        pause = self.timing.period_s
        while True:
            await asyncio.sleep(pause)
            asked_at = loop.time()
            try:
                await self._renew(asked_at)
            except (LeaseGone, Closed):
                self._gone()
                return
            except LogError as error:
                if not self.trouble:
                    log.warning("the leader's lease could not be renewed", reason=str(error))
                self.trouble = f"{type(error).__name__}: {error}"
                pause = min(self.timing.period_s, PAUSE_S) * (0.5 + random.random())
                continue
            if self.trouble:
                log.warning("the leader's lease is renewed again")
            self.trouble = ""
            pause = max(0.0, asked_at + self.timing.period_s - loop.time())

    async def _renew(self, asked_at: float) -> None:
        """Renewed is what etcd's leader says is renewed while the majority says that the key is still ours."""
        timing, loop = self.timing, asyncio.get_running_loop()
        if not self.valid():
            # Where our words arrive and no answer does, renewing would keep everybody from leading, us included.
            await self._still_ours(timing.timeout_s)
        ttl = await self._etcd.keep_alive(self.number, timeout_s=timing.timeout_s)
        if ttl <= 0:
            raise LeaseGone("the leader's lease is over")
        await self._still_ours(max(timing.timeout_s / 2, asked_at + timing.timeout_s - loop.time()))
        self._until = asked_at + min(ttl, timing.ttl_s) - timing.margin_s

    async def _still_ours(self, timeout_s: float) -> None:
        """Ask the majority. Raises `LeaseGone`."""
        reply = await self._etcd.call("Range", self._look, timeout_s=timeout_s, attempt_s=timeout_s / 2)
        if not reply.kvs or reply.kvs[0].create_revision != self._token:
            raise LeaseGone("the leader's key is not ours any more")
