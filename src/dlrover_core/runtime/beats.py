"""An agent's heartbeats: when they are sent, and what they report."""

from __future__ import annotations

import asyncio

from dlrover_core.diagnosis.stall import Pulse
from dlrover_core.runtime.duties import Desk
from dlrover_core.runtime.levels import Beat

LEAST_S = 0.05
"""Seconds between two heartbeats at least, however urgent: a master hears many agents."""
SECOND_US = 1_000_000


class Beats:
    """The clock of one agent's heartbeats. ``lag_us``: how late its loop was at the newest one."""

    def __init__(self) -> None:
        self.lag_us = 0

    async def due(self, every_s: float, desk: Desk | None) -> None:
        """Wait until the next heartbeat: at most ``every_s``, and less where a duty is in a hurry."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        due = began + every_s
        if desk is None:
            await asyncio.sleep(every_s)
        else:
            # One timer and no task: many agents may share a loop, with thousands of heartbeats.
            timer = loop.call_at(due, desk.hurried.set)
            try:
                await desk.hurried.wait()
            finally:
                timer.cancel()
            hurried_at = loop.time()
            if hurried_at < min(due, began + LEAST_S):
                await asyncio.sleep(min(due, began + LEAST_S) - hurried_at)
            due = min(due, loop.time())
            desk.hurried.clear()
        self.lag_us = max(0, int((loop.time() - due) * SECOND_US))


def beat_of(generation: int, step: int, lag_us: int, pulse: Pulse | None, desk: Desk | None) -> Beat:
    """The contents of one heartbeat."""
    parts = tuple(desk.told.values()) if desk is not None else ()
    if pulse is None:
        return Beat(generation, step, lag_us, parts)
    step = max(step, pulse.step)
    return Beat(generation, step, lag_us, (pulse._replace(step=step), *parts))
