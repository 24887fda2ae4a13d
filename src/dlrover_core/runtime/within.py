"""A bound on waiting that loses no cancellation."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


async def within(seconds: float, work: Awaitable[T]) -> T:
    """What ``work`` yields, if it does in time; else it is cancelled. Raises `asyncio.TimeoutError`."""
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
