"""The duty of keeping pace: reads what workers note of their costs and losses, and has the agent's beats tell what stands.

Once per `LOOK_S` it looks into each worker's slot: memory, no message and no system call. What a rank wrote since the last look
goes through its `NodePace`; there is nothing to send, for whatever stands is repeated with every beat.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from dlrover_core.diagnosis.slots import (
    BLOCKS_MAX,
    COST,
    FINITE,
    LOSS,
    LOSS_AT,
    NEVER,
    PACE,
    PACE_AT,
    RING_AT,
    SLOT_BYTES,
)
from dlrover_core.job.orders import Order
from dlrover_core.runtime.duties import Desk
from dlrover_core.runtime.launcher import Notice
from dlrover_core.runtime.paces import LOSSES_MAX, LossBeat, NodePace, PaceBeat, RankLoss

LOOK_S = 1.0


class WorkerSlot(NamedTuple):
    """Where a running worker's slot is."""

    generation: int
    local_rank: int
    rank: int
    fd: int


class _Open:
    """One worker's slot, mapped; ``blocks`` of it have been read."""

    def __init__(self, slot: WorkerSlot) -> None:
        self.slot, self.blocks = slot, 0
        self.memory = mmap.mmap(slot.fd, SLOT_BYTES, access=mmap.ACCESS_READ)

    def costs(self) -> tuple[int, list[float]]:
        """The measure, and the costs that are new; a reader who is late loses the oldest."""
        blocks, measure = PACE.unpack_from(self.memory, PACE_AT)
        # The oldest of a full ring may be overwritten as we read it.
        begin = min(blocks, max(self.blocks, blocks - BLOCKS_MAX + 1))
        costs = [
            float(COST.unpack_from(self.memory, RING_AT + at % BLOCKS_MAX * COST.size)[0])
            for at in range(begin, blocks)
        ]
        self.blocks = blocks
        return int(measure), costs

    def loss(self) -> tuple[int, RankLoss]:
        """How many losses it has reported, and what they do."""
        reported, broken, how, jumped, times = map(int, LOSS.unpack_from(self.memory, LOSS_AT))
        if not reported:
            return 0, RankLoss(self.slot.rank, NEVER, FINITE, NEVER, 0)
        return reported, RankLoss(self.slot.rank, broken, how, jumped, times)

    def step(self) -> int:
        return int.from_bytes(self.memory[:8], "little", signed=True)


class PaceWatch:
    """The duty. ``slots``: the workers that run now."""

    def __init__(self, slots: Callable[[], Sequence[WorkerSlot]]) -> None:
        self._slots = slots
        self._pace = NodePace()
        self._open: dict[int, _Open] = {}
        self._generation = 0

    async def run(self, desk: Desk) -> None:
        """Look, again and again."""
        try:
            while True:
                await asyncio.sleep(LOOK_S)
                self.look(desk, time.monotonic())
        finally:
            self._close()

    def ordered(self, order: Order) -> None:
        """Nothing follows."""

    def noticed(self, notice: Notice) -> None:
        """Nothing follows."""

    def look(self, desk: Desk, now_s: float) -> None:
        """What is in the slots now, for the next beat to tell."""
        slots = self._slots()
        generation = slots[0].generation if slots else 0
        if generation != self._generation:
            self._close()
            self._generation = generation
            self._pace.restarted()
        for slot in slots:
            if slot.local_rank not in self._open:
                with contextlib.suppress(OSError, ValueError):  # its worker has just ended
                    self._open[slot.local_rank] = _Open(slot)
        for local_rank, one in self._open.items():
            measure, costs = one.costs()
            if costs:
                self._pace.read(local_rank, measure, costs, one.step(), now_s)
        desk.tell(self._pace.beat(slots[0].rank - slots[0].local_rank) if slots else PaceBeat())
        desk.tell(self._losses())

    def _losses(self) -> LossBeat:
        seen = [one.loss() for _, one in sorted(self._open.items())]
        ranks = tuple(loss for _, loss in seen if loss.how != FINITE or loss.jumped != NEVER)
        # The broken ones first: a beat has room for so many.
        ordered = sorted(ranks, key=lambda loss: (loss.how == FINITE, loss.rank))
        return LossBeat(sum(1 for reported, _ in seen if reported), tuple(ordered[:LOSSES_MAX]))

    def _close(self) -> None:
        for one in self._open.values():
            one.memory.close()
        self._open.clear()
