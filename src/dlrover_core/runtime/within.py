"""Waiting with a time-out that loses no cancellation."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


async def within(seconds: float, work: Awaitable[T]) -> T:
    """The result of ``work``, if it comes in time; else ``work`` is cancelled. Raises `asyncio.TimeoutError`."""
    # Not wait_for: before Python 3.12 it loses a cancellation that comes together with the result (bpo-37658).
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task}, timeout=seconds)
        if not task.done():
            raise asyncio.TimeoutError
        return task.result()
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task})
        if not task.cancelled():
            task.exception()


async def any_within(seconds: float, *events: asyncio.Event) -> None:
    """Wait until one of these is set, at most so long."""
    waits = [asyncio.ensure_future(one.wait()) for one in events]
    try:
        await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for one in waits:
            one.cancel()
