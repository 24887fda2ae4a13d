"""Waiting with a bound."""

from __future__ import annotations

import asyncio

import pytest

from dlrover_core.runtime.within import within
from dlrover_core.testing import virtual_loop


def test_what_comes_in_time_comes() -> None:
    """The result of work that ends in time is handed on."""
    assert virtual_loop.run(within(2, asyncio.sleep(1, "done"))) == "done"


def test_what_is_late_is_cancelled() -> None:
    """Work that is late is cancelled before the error rises."""

    async def story() -> None:
        work = asyncio.ensure_future(asyncio.sleep(3))
        with pytest.raises(asyncio.TimeoutError):
            await within(2, work)
        assert work.cancelled()

    virtual_loop.run(story())


def test_cancellation_is_not_lost() -> None:
    """A call that is cancelled in the moment its answer comes is cancelled: whoever stops a loop of calls, stops it."""

    async def story() -> None:
        answer = asyncio.get_running_loop().create_future()
        call = asyncio.ensure_future(within(60, answer))
        await asyncio.sleep(0)
        answer.set_result("too late")
        await asyncio.sleep(0)
        call.cancel()
        await asyncio.wait({call})
        assert call.cancelled()

    virtual_loop.run(story())
