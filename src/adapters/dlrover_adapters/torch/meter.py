"""What this rank computes by itself, step by step: synchronous steps are equally long everywhere, their parts are not.

Unless told otherwise it is the CPU time of the thread that makes the steps: waiting for others (gloo blocks in the kernel), for
data or for a lock costs none, and autograd's CPU backward runs on that same thread. Where CUDA is in use that says nothing (the
thread spins while the GPU works), so that nothing is measured, unless the script marks its own part::

    with compute():
        loss = model(batch)     # whatever waits for no other rank

Marked regions count by the wall clock, or by CUDA events that are read once they are done: nothing is ever synchronised.
``report_tokens(n, squares)`` tells how much work the step was, so that long sequences are not taken for a slow machine.

A step costs well under two microseconds here: one reading of the clock, and every fifth step one median and one write.
"""

from __future__ import annotations

import mmap
import sys
import time
from collections import deque
from types import TracebackType
from typing import Any

from dlrover_core.diagnosis.changepoint import BLOCK_STEPS
from dlrover_core.diagnosis.slots import BLOCKS_MAX, COST, PACE, PACE_AT, RING_AT
from dlrover_core.diagnosis.workload import Workload

CPU, WALL, CUDA = 1, 2, 3
WITH_TOKENS = 4
PENDING_MAX = 64
BLOCK_S, STEPS_MAX = 0.05, 512
"""A block lasts so long at least, and holds so many steps at most: agents see no more than twenty of them a second."""

Events = tuple[Any, Any]


class Meter:
    """Writes this rank's costs into the memory that it shares with its agent."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory: mmap.mmap | None = memory
        self._measure = CPU
        self._last = time.thread_time()
        self._costs: list[float] = []
        self._blocks, self._next = 0, 0.0
        self._marked = 0.0
        self._events: list[Events] = []
        self._pending: deque[tuple[list[Events], float, float]] = deque()
        self._tokens = self._squares = 0.0
        self._workload: Workload | None = None

    def step_done(self) -> None:
        """A step is complete."""
        if self._measure != CPU or self._workload is not None:
            self._told()
            return
        now = time.thread_time()
        self._costs.append(now - self._last)
        self._last = now
        if len(self._costs) >= BLOCK_STEPS:
            self._write()

    def marked(self, seconds: float) -> None:
        """A marked region took so long."""
        self._measured_by(WALL)
        self._marked += seconds

    def marked_by(self, events: Events) -> None:
        """A marked region lies between two CUDA events."""
        self._measured_by(CUDA)
        self._events.append(events)

    def tokens(self, count: float, squares: float) -> None:
        """The step in the making computes so many more; micro-batches add up."""
        if self._workload is None:
            self._workload = Workload()
            self._costs.clear()
        self._tokens += count
        self._squares += squares

    def silence(self) -> None:
        """Write no more."""
        self._memory = None

    def _measured_by(self, measure: int) -> None:
        if self._measure != measure:
            self._measure = measure
            self._costs.clear()
            self._pending.clear()
            if self._workload is not None:
                self._workload = Workload()

    def _told(self) -> None:
        """A step whose part or work the script tells."""
        if self._measure == CUDA:
            self._pending.append((self._events, self._tokens, self._squares))
            self._events = []
            while self._pending and all(end.query() for _, end in self._pending[0][0]):
                events, tokens, squares = self._pending.popleft()
                # Milliseconds, says torch.
                self._took(sum(start.elapsed_time(end) for start, end in events) / 1e3, tokens, squares)
            if len(self._pending) > PENDING_MAX:
                self._pending.popleft()
        else:
            now = time.thread_time()
            self._took(now - self._last if self._measure == CPU else self._marked, self._tokens, self._squares)
            self._last = now
        self._marked = self._tokens = self._squares = 0.0

    def _took(self, seconds: float, tokens: float, squares: float) -> None:
        cost: float | None = seconds if seconds > 0 else None
        if self._workload is not None and cost is not None:
            cost = self._workload.explained(cost, tokens, squares) if tokens > 0 else None
        if cost is not None:
            self._costs.append(cost)
            if len(self._costs) >= BLOCK_STEPS:
                self._write()

    def _write(self) -> None:
        """The block first, then that it is there; unless steps are so short that more of them make one."""
        costs, now = self._costs, time.monotonic()
        if now < self._next and len(costs) < STEPS_MAX:
            return
        self._next = now + BLOCK_S
        costs.sort()
        if self._memory is not None and not (self._measure == CPU and _cuda_in_use()):
            COST.pack_into(self._memory, RING_AT + self._blocks % BLOCKS_MAX * COST.size, costs[len(costs) // 2])
            self._blocks += 1
            measure = self._measure + (WITH_TOKENS if self._workload is not None else 0)
            PACE.pack_into(self._memory, PACE_AT, self._blocks, measure)
        costs.clear()


class Compute:
    """A marked region. Without an agent that listens it does nothing."""

    __slots__ = ("_began", "_start")

    def __init__(self) -> None:
        self._began = 0.0
        self._start: Any = None

    def __enter__(self) -> None:
        if _meter is None:
            return
        if _cuda_in_use():
            self._start = _event()
        self._began = time.perf_counter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if _meter is None or kind is not None:
            return
        if self._start is not None:
            _meter.marked_by((self._start, _event()))
        else:
            _meter.marked(time.perf_counter() - self._began)


def compute() -> Compute:
    """What `dlrover_adapters.torch.compute` does."""
    return Compute()


def _cuda_in_use() -> bool:
    cuda = sys.modules.get("torch.cuda")
    return cuda is not None and bool(getattr(cuda, "_initialized", False))


def _event() -> Any:
    import torch

    cuda: Any = torch.cuda  # torch leaves its events untyped
    event = cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream())
    return event


_meter: Meter | None = None


def begin(memory: mmap.mmap) -> Meter:
    """Measure every step of this process from now on."""
    global _meter  # noqa: PLW0603 - a process is one rank
    _meter = Meter(memory)
    return _meter


def end() -> None:
    """Measure no more: this is a forked child, or nobody wants to know."""
    global _meter  # noqa: PLW0603 - as above
    if _meter is not None:
        _meter.silence()
    _meter = None


def report_tokens(count: float, squares: float = 0.0) -> None:
    """The step in the making computes ``count`` more tokens, whose sequences' squared lengths sum up to ``squares``."""
    if _meter is not None:
        _meter.tokens(count, squares)
