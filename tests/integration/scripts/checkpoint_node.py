"""One node with launcher, vault and saver in real processes, for tests of the agent's half of checkpoints."""

from __future__ import annotations

import asyncio
import contextlib
import os
import textwrap
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from dlrover_adapters.agent.checkpoints.duty import CheckpointDuty
from dlrover_core.data.cut import Place, pack
from dlrover_core.job.orders import Order, Work
from dlrover_core.kernel.wire import Part, find
from dlrover_core.runtime.duties import Desk
from dlrover_core.runtime.keeping import KeptBeat
from dlrover_core.runtime.launcher import WorkersGone

Make = Callable[..., Any]
Gone = Callable[[int], Awaitable[None]]
BOUND_S = 30.0
SCRIPTS = Path(__file__).parent
RUNS = Order(leave=False, reason="", grace_us=5_000_000, work=Work(1, nproc=1, world_size=1, nodes=1))
HEAD = f"""
import sys
sys.path.insert(0, {str(SCRIPTS)!r})
import mmap, os, signal
from vaulting import *
from dlrover_core.data.cut import Place, pack
ranks(NPROC)
vault = Vault.connect()
generation = vault.told.generation
"""


def run(test: Coroutine[Any, Any, None]) -> None:
    """On a loop of its own, within a minute and a half."""
    asyncio.run(asyncio.wait_for(test, 90))


def cut(step: int) -> bytes:
    """The position in the data after a step, packed."""
    return pack((Place("train", 0, 4 * step, ""),))


class Node:
    """A rig with the checkpoint duty, and what it said to the leader."""

    def __init__(self, rig: Any, duty: CheckpointDuty, desk: Desk) -> None:
        self.rig, self.duty, self.desk = rig, duty, desk
        self.sent: list[Any] = []
        self.news = asyncio.Event()

    def say(self, command: Any) -> None:
        """What the duty sends."""
        self.sent.append(command)
        self.news.set()

    def order(self, *parts: Part, generation: int = 1) -> None:
        """The leader's newest word."""
        order = self.desk.order.telling(*parts)
        self.desk.order = order._replace(work=order.work._replace(generation=generation))
        self.duty.ordered(self.desk.order)

    @property
    def kept(self) -> KeptBeat:
        """What the next beat tells."""
        return find(self.desk.told.values(), KeptBeat)

    async def until(self, holds: Callable[[], Any]) -> None:
        """Wait until this is so; looked at whenever the duty says something or hurries, and at every tick of it."""
        async with asyncio.timeout(BOUND_S) if hasattr(asyncio, "timeout") else contextlib.AsyncExitStack():
            while not holds():
                self.news.clear()
                hurried = asyncio.ensure_future(self.desk.hurried.wait())
                news = asyncio.ensure_future(self.news.wait())
                await asyncio.wait([hurried, news], timeout=0.05, return_when=asyncio.FIRST_COMPLETED)
                hurried.cancel()
                news.cancel()
                self.desk.hurried.clear()

    def of(self, kind: type) -> list[Any]:
        """What was sent of this kind."""
        return [one for one in self.sent if isinstance(one, kind)]

    async def ended(self, generation: int) -> None:
        """Its workers are gone, and the duty knows."""
        while not isinstance(notice := await self.next(), WorkersGone) or notice.generation != generation:
            pass

    async def next(self) -> Any:
        """The next notice, which the duty hears, too."""
        notice = await self.rig.next()
        self.duty.noticed(notice)
        return notice


@pytest.fixture
def node(rig: Make) -> Make:
    """A node whose ranks run a script; ``async with`` it."""

    @contextlib.asynccontextmanager
    async def make(script: str, *, nproc: int = 1, **fields: Any) -> AsyncIterator[Node]:
        text = HEAD.replace("NPROC", str(nproc)) + textwrap.dedent(script)
        others = memfds(os.getpid())  # of tests before this one, in the same process
        async with rig(text, nproc=nproc, **fields) as one:
            duty = CheckpointDuty(one.launcher, token=b"secret", host="127.0.0.1", bind="127.0.0.1")
            found = Node(
                one,
                duty,
                Desk(
                    "n-0-0",
                    "run",
                    RUNS._replace(work=RUNS.work._replace(nproc=nproc, world_size=nproc)),
                    lambda _: None,
                ),
            )
            found.desk._send = found.say
            task = asyncio.ensure_future(duty.run(found.desk))
            await asyncio.sleep(0)
            try:
                yield found
            finally:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
                # A memfd of a dead worker's is the agent's, and goes with it.
        assert memfds(os.getpid()) <= others

    return make


def memfds(pid: int) -> int:
    """How many descriptors of arenas a process has."""
    found = 0
    with contextlib.suppress(OSError):
        for one in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                found += "memfd:dlrover" in str(one.readlink())
    return found
