"""The leader's lease by its arithmetic: how long it is believed in, and who is asked before it is renewed."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from dlrover_adapters.etcd.errors import LeaseGone
from dlrover_adapters.etcd.lease import Lease, Timing
from dlrover_core.errors import LogUnavailable

TOKEN = 7
TIMING = Timing(ttl_s=8.0, period_s=2.0, timeout_s=2.0, margin_s=1.0)


class _Etcd:
    """Answers as told, and remembers what it was asked."""

    def __init__(self, *, ttl: int = 8, created: int = TOKEN, cut: bool = False) -> None:
        self.ttl, self.created, self.cut = ttl, created, cut
        self.asked: list[str] = []

    def range(self, key: str, **_: Any) -> str:
        return key

    async def call(self, method: str, *_: Any, **__: Any) -> Any:
        self.asked.append(method)
        if self.cut:
            raise LogUnavailable("no answer arrives")
        return SimpleNamespace(kvs=[SimpleNamespace(create_revision=self.created)] if self.created else [])

    async def keep_alive(self, *_: Any, **__: Any) -> int:
        self.asked.append("keep_alive")
        return self.ttl


def made(etcd: _Etcd, asked_at: float) -> Lease:
    """A lease that was granted when asked for at ``asked_at``."""
    lease: Any = Lease  # not really an etcd
    return lease(etcd, "leader", TOKEN, 1, TIMING, asked_at, lambda: None)  # type: ignore[no-any-return]


@pytest.mark.parametrize(("granted", "lived"), [(8, 8.0), (5, 5.0), (60, 8.0)])
def test_it_is_believed_in_from_before_it_was_asked_for(granted: int, lived: float) -> None:
    """Less a margin; for what etcd granted where that is less than was asked."""

    async def story() -> None:
        now = asyncio.get_running_loop().time()
        lease = made(_Etcd(ttl=granted), now - 1.5)
        assert lease._until == now - 1.5 + TIMING.ttl_s - TIMING.margin_s
        await lease._renew(now - 0.5)
        assert lease._until == now - 0.5 + lived - TIMING.margin_s

    asyncio.run(story())


def test_one_that_may_be_over_is_asked_for_before_it_is_renewed() -> None:
    """Where our words arrive and no answer does, renewing would keep everybody from leading."""

    async def story() -> None:
        now = asyncio.get_running_loop().time()
        cut = _Etcd(cut=True)
        with pytest.raises(LogUnavailable):
            await made(cut, now - 60.0)._renew(now)
        assert cut.asked == ["Range"]
        back = _Etcd()
        lease = made(back, now - 60.0)
        await lease._renew(now)
        assert back.asked == ["Range", "keep_alive", "Range"]
        assert lease.valid()

    asyncio.run(story())


@pytest.mark.parametrize("etcd", [_Etcd(ttl=0), _Etcd(created=0), _Etcd(created=TOKEN + 1)])
def test_what_etcd_says_is_over_is_over(etcd: _Etcd) -> None:
    """No seconds left, no key, or another leader's key."""

    async def story() -> None:
        now = asyncio.get_running_loop().time()
        with pytest.raises(LeaseGone):
            await made(etcd, now)._renew(now)

    asyncio.run(story())
