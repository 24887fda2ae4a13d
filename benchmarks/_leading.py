"""A master that leads, in this process: what the benchmarks without a server have in common."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

from dlrover_core import JobSpec, Master
from dlrover_core.kernel.log import EventLog
from dlrover_core.runtime.transport import Listener


@contextlib.asynccontextmanager
async def leading(spec: JobSpec, event_log: EventLog, listener: Listener) -> AsyncIterator[Master]:
    """A master of ``spec`` that leads when the block begins, and is gone after it. Raises what kept it from leading."""
    master = Master(
        spec,
        event_log=event_log,
        listener=listener,
        backend=None,
        wall=lambda: time.time_ns() // 1000,
        holder="bench",
        run_id="run-1",
    )
    running = asyncio.ensure_future(master.run())
    leads = asyncio.ensure_future(master.led.wait())
    try:
        await asyncio.wait({running, leads}, return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            running.result()
        yield master
    finally:
        running.cancel()
        leads.cancel()
        await asyncio.gather(running, leads, return_exceptions=True)
