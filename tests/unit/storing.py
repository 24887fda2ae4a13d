"""Agents that bring states to storage, for the tests of that duty."""

from __future__ import annotations

import asyncio
import contextlib
import mmap
from collections.abc import Callable, Iterator
from typing import Any

from dlrover_adapters.agent.checkpoints.arenas import Arena, Arenas, Owner
from dlrover_core.checkpoint.arena import Control, Geometry, Stamp
from dlrover_core.job.orders import Order

ORDER = Order(leave=False, reason="", grace_us=30_000_000)
SIZES = Geometry(2, 4096, 4096, 1 << 20)


@contextlib.contextmanager
def mapped(arenas: Arenas, layout: int, *steps: int, generation: int = 1) -> Iterator[tuple[Arena, Control]]:
    """Rank 0's arena of this layout, as the rank sees it."""
    arena, _, _ = arenas.open(Owner(0, 1, layout), SIZES, generation, 0)
    memory = mmap.mmap(arena.fd, arena.total_bytes)
    control = Control(memory, SIZES)
    control.make(layout=layout, rank=0, world=1, local_rank=0, table_bytes=0, table_digest=0)
    arena.look()
    for slot, step in enumerate(steps):
        control.publish(slot, Stamp(generation, step, slot + 1, 0, 0))
    try:
        yield arena, control
    finally:
        control.release()
        memory.close()
        arenas.forget(arena)


async def until(holds: Callable[[], Any]) -> None:
    """Wait until this is so."""
    async with asyncio.timeout(10) if hasattr(asyncio, "timeout") else contextlib.AsyncExitStack():
        while not holds():  # noqa: ASYNC110  # the end of a process rings no bell here
            await asyncio.sleep(0.005)
