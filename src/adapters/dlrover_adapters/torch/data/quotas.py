"""The quotas of an `ElasticBatch` whose ranks take samples by measured cost. `dlrover_core.data.balance` plans them.

What a rank measures is the time from the moment at which the loop has a micro-batch to the moment at which it calls ``backward``:
the forward, in which DistributedDataParallel's ranks do not wait for each other. Of the backward, the last one of a step does.
"""

from __future__ import annotations

import logging
import time
from typing import Any

import torch

from dlrover_core.data.balance import FIRST_STEPS, Costs, Told, balanced, steps_until_next

from . import world
from .plan import Division

_log = logging.getLogger("dlrover.torch")
EQUAL, MEASURED = "equal", "measured"
PREFETCH = 2
"""What a DataLoader with processes prefetches for each, if it does not say."""
_NEVER = 2**62


class QuotaTable:
    """The present quota of a loop and the next one, in memory that loader processes share. Steps count from the loop's first, 0.

    Loader processes plan steps ahead of the loop, at most as many as `lead_of` says, and a slow one may be as many steps behind.
    A quota begins that many steps after it was planned. The next one is planned that many steps later still, so no process needs
    the row that it overwrites.
    """

    def __init__(self, quota: tuple[int, ...]) -> None:
        self._rows = torch.tensor([[0, *quota], [_NEVER, *quota]], dtype=torch.int64)
        self._rows.share_memory_()  # type: ignore[no-untyped-call]

    def at(self, step: int) -> tuple[int, ...]:
        """The quota that a step goes by: the newest that has begun."""
        begun = [row for row in self._rows.tolist() if row[0] <= step]
        return tuple(max(begun)[1:])

    def follow(self, first: int, quota: tuple[int, ...]) -> None:
        """The next quota, from step ``first`` on. The one before it has begun."""
        row = min(self._rows, key=lambda one: (int(one[0]) != _NEVER, int(one[0])))
        row[0] = _NEVER
        row[1:] = torch.tensor(quota)
        row[0] = first


class Stopwatch:
    """Seconds of this rank's forwards in one step: of the processor, or of the accelerator where the loss is on one."""

    def __init__(self) -> None:
        self._began = 0.0
        self._taken: list[float | tuple[Any, Any]] = []
        self._event: Any = None

    def begin(self, *, accelerator: bool) -> None:
        """The loop gets a micro-batch."""
        self._event = _event() if accelerator else None
        self._began = time.perf_counter()

    def end(self, *, counts: bool) -> None:
        """It calls ``backward``; ``counts``: the micro-batch is no padding."""
        took: float | tuple[Any, Any] = time.perf_counter() - self._began
        if self._event is not None:
            took = (self._event, _event())
        if counts:
            self._taken.append(took)

    def step_s(self) -> float:
        """All of the step's, which is over."""
        taken, self._taken = self._taken, []
        return sum(one if isinstance(one, float) else _between(*one) for one in taken)


def _event() -> Any:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def _between(begin: Any, end: Any) -> float:
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


class Balance:
    """Measures, and plans with the other ranks. ``lead``: as `lead_of` says."""

    def __init__(self, division: Division, table: QuotaTable, group: Any, lead: int) -> None:
        self._division, self._table, self._group, self._lead = division, table, group, lead
        self._costs, self._watch = Costs(), Stopwatch()
        self._accelerator = False
        self._made, self._due, self._first, self._settled = 0, FIRST_STEPS, 0, 0
        self._began = time.perf_counter()
        self._samples = 0

    @property
    def quota(self) -> tuple[int, ...]:
        """Of the present step."""
        return self._table.at(self._made)

    def drawn(self) -> None:
        """The loop gets a micro-batch."""
        self._watch.begin(accelerator=self._accelerator)

    def forwarded(self, loss: torch.Tensor, samples: int) -> None:
        """The loop calls ``backward``; ``samples``: that count."""
        self._watch.end(counts=samples > 0)
        self._samples += samples
        self._accelerator = loss.is_cuda

    def stepped(self) -> None:
        """The step is made. Plans where it is time: then a collective, after the same step on all ranks."""
        now = time.perf_counter()
        self._costs.step(self._samples, self._watch.step_s(), now - self._began)
        self._made, self._samples, self._began = self._made + 1, 0, now
        if self._made == self._first:  # what was measured is of the quota before
            self._costs.forget()
        elif self._made >= max(self._due, self._settled):
            told = world.gathered(tuple(self._costs.told(self._lead)), self._division.world, self._group)
            self._plan([Told(*one) for one in told])

    def _plan(self, told: list[Told]) -> None:
        """By numbers that all ranks have alike, so that all come to the same."""
        self._due = self._made + steps_until_next(told[0].step_s)
        present = self._table.at(self._made)
        better = balanced(present, [one.cost_s for one in told])
        if better == present:
            return
        lead = max(one.lead for one in told)
        self._first = self._made + lead
        self._settled = self._first + lead  # a slow loader process may be that far behind
        self._table.follow(self._first, better)
        if self._division.rank == 0:
            _log.info(
                "global batches are divided as %s samples in %d steps, as %s until then: a sample costs the ranks %s ms",
                "/".join(map(str, better)), self._first - self._made, "/".join(map(str, present)),
                "/".join(f"{1000 * one.cost_s:.3g}" for one in told),
            )  # fmt: skip


def lead_of(loader: Any, ahead_steps: int) -> int:
    """So many steps after the one that is trained comes the first that a loader has not planned.

    A loader process has made no micro-batch beyond those that it was asked for, and each step has one at least.
    """
    workers = int(getattr(loader, "num_workers", 0))
    return workers * (getattr(loader, "prefetch_factor", None) or PREFETCH) + ahead_steps
