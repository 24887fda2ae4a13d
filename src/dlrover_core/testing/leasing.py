"""Simulated nodes whose workers keep their own pace, with the truth beside: which positions were used, and how often.

A `Node` has the real `NodeLeases` of an agent. Its workers draw shards, take their time, and acknowledge; a worker or a node
that dies has used a part of its shard without a word. `Uses` compares what was used with what the log says.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from random import Random

from dlrover_core.data.ranges import Ranges, Span
from dlrover_core.job.leases import Leased as LeasedState
from dlrover_core.job.leases import Leases, LeaseTold, ReportAcked, ReportRepeated, ReturnLease
from dlrover_core.runtime.leasing import LeaseBeat
from dlrover_core.runtime.node_leases import NodeLeases


@dataclass(slots=True)
class Uses:
    """The truth: how often each position was used by a worker."""

    times: Counter[int] = field(default_factory=Counter)

    def use(self, span: Iterable[int]) -> None:
        """A worker uses these."""
        self.times.update(span)

    def compare(self, leased: LeasedState) -> None:
        """Raises AssertionError where a position was lost, or used again without a word."""
        unused = [at for span in leased.acked for at in range(*span) if not self.times[at]]
        assert not unused, f"acknowledged, and never used: {unused[:8]}"
        told = Ranges(leased.repeated)
        again = [at for at, times in self.times.items() if times > 1 and at not in told]
        assert not again, f"used more than once, and not told: {sorted(again)[:8]}"


@dataclass(slots=True)
class Worker:
    """One worker. ``span``: its shard, used up to ``used``; it is done with it at ``until_s``."""

    session: int
    per_s: float
    span: Span | None = None
    until_s: float = 0.0
    heard_end: bool = False


class Node:
    """One node's agent with its workers, on a clock in the caller's hand."""

    def __init__(
        self, node: str, uses: Uses, random: Random, *, shard: int, rates: Iterable[float], name: str = "train"
    ) -> None:
        self.node, self._uses, self._random, self._shard = node, uses, random, shard
        self.leases = NodeLeases(name)
        self._next = 0
        self.workers: list[Worker] = []
        self._began: dict[int, float] = {}
        for rate in rates:
            self.start_worker(rate)

    def start_worker(self, per_s: float) -> None:
        """A worker opens the dataset."""
        self._next += 1
        self.workers.append(Worker(self._next, per_s))
        self.leases.sessions.add(self._next)
        self.leases.shard = self._shard

    def ordered(self, part: Leases) -> None:
        """The node's newest order has this part."""
        for told in part.known:
            self._told(told)

    def _told(self, told: LeaseTold) -> None:
        if told.name == self.leases.name:
            self.leases.told(told)

    def work(self, now_s: float) -> bool:
        """Let workers finish what is due, and draw; is there news that should not wait for the next heartbeat?"""
        starved = False
        for worker in self.workers:
            if worker.span is not None and worker.until_s <= now_s:
                self._uses.use(range(*worker.span))
                self.leases.ack(worker.span, now_s)
                worker.span = None
            if worker.span is None:
                worker.span = self.leases.draw(worker.session, self._shard, now_s)
                if worker.span is not None:
                    took_s = (worker.span.end - worker.span.start) / worker.per_s
                    self._began[worker.session], worker.until_s = now_s, now_s + took_s
                worker.heard_end = worker.span is None and self.leases.finished
                starved = starved or (worker.span is None and not self.leases.finished)
        return starved

    def beat(self, now_s: float) -> LeaseBeat:
        """The part of its next heartbeat."""
        waiting = any(worker.span is None and not worker.heard_end for worker in self.workers)
        return LeaseBeat((self.leases.ask(now_s, waiting=waiting),))

    def kill_worker(self, report: Callable[[ReportRepeated], object]) -> None:
        """One dies in the middle of its shard, perhaps after its last sample and before its word; another one starts."""
        if not self.workers:
            return
        worker = self.workers.pop(self._random.randrange(len(self.workers)))
        self._use_part(worker)
        had = self.leases.gone(worker.session)
        if had:
            report(ReportRepeated(self.node, self.leases.name, had.pack(), "a worker died"))
        self.start_worker(worker.per_s)

    def _use_part(self, worker: Worker) -> None:
        if worker.span is not None:
            self._uses.use(range(worker.span.start, self._random.randint(worker.span.start, worker.span.end)))

    def leave(self, report: Callable[[ReportRepeated | ReportAcked | ReturnLease], object]) -> None:
        """Its workers are stopped, and its agent says its last words."""
        for worker in self.workers:
            self._use_part(worker)
            had = self.leases.gone(worker.session)
            if had:
                report(ReportRepeated(self.node, self.leases.name, had.pack(), "a worker was stopped"))
        self.workers = []
        report(ReportAcked(self.node, self.leases.name, self.leases.acked.pack()))
        report(ReturnLease(self.node, self.leases.name))

    def die(self) -> None:
        """All of it is gone."""
        for worker in self.workers:
            self._use_part(worker)
        self.workers = []
