"""The workers of the current generation, and what may be looked at of them."""

from __future__ import annotations

import asyncio
import time

from dlrover_core.runtime.launcher import WorkersLaunch

from . import looks
from .children import Child
from .doorbell import Asked, Doorbell
from .logs import RankFiles
from .slot import StepSlot


class Worker:
    """One worker of the current generation."""

    def __init__(self, child: Child, launch: WorkersLaunch, local_rank: int, files: RankFiles, slot: StepSlot) -> None:
        self.child, self.launch, self.local_rank, self.files, self.slot = child, launch, local_rank, files, slot
        self.begun_us = time.monotonic_ns() // 1000
        self.asked = False
        self.stepped = False
        self.note = ""
        self.grace_until = 0.0
        self.lingering: asyncio.Future[None] | None = None
        self.buried: asyncio.Task[None] | None = None

    @property
    def rank(self) -> int:
        """Its rank in the world."""
        return self.launch.first_rank + self.local_rank

    @property
    def ended_well(self) -> bool:
        """By itself, and with 0: what it left running may be meant to."""
        return not self.child.alive and self.child.dead.result() == 0 and not self.asked


class Rank:
    """A worker to be looked at: ``stacks`` is the file into which it writes them when told to `show`."""

    def __init__(self, worker: Worker, stacks: str, bell: Doorbell) -> None:
        self.rank, self.pid, self.stacks = worker.rank, worker.child.pid, stacks
        self._worker, self._bell = worker, bell

    def idle_us(self) -> int:
        """Since its last step; -1: it has ended."""
        worker = self._worker
        return worker.slot.pulse(worker.begun_us, time.monotonic_ns() // 1000).idle_us if worker.slot.fd >= 0 else -1

    async def show(self) -> bool:
        """Have it write its stacks on a signal, if it has said that it does; False: it was not signalled.

        Nor is one that would die of it: another program by now (`os.execv`), or its handlers were reset.
        """
        number = self._worker.slot.shows_on if self._worker.slot.fd >= 0 else 0
        if not number or not await asyncio.to_thread(looks.catches, self.pid, number) or not self._worker.child.alive:
            return False
        self._worker.child.signal(number)
        return True

    def ask(self, probe: int, path: str) -> Asked | None:
        """As `Doorbell.ask`."""
        return self._bell.ask(self._worker.launch.generation, self.rank, probe, path)
