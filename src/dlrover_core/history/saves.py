"""Checkpoints of a run, summed up: how many there were, storage outages, and where generations resumed from."""

from __future__ import annotations

from typing import NamedTuple

from dlrover_core.job import checkpoints, job, nodes
from dlrover_core.job.sets import NO_SETS, sets_of
from dlrover_core.kernel.events import Record


class Restores(NamedTuple):
    """How many generations resumed from one tier; ``total_us``: time that took in sum; ``longest_us``: at most."""

    tier: str
    count: int  # type: ignore[assignment]  # hides tuple.count, which nobody calls on it
    total_us: int
    longest_us: int


class Saves(NamedTuple):
    """A run's checkpoints.

    committed:          number of checkpoints
    ordered:            number of those written because a generation had ended
    newest:             step of the newest; -1: none
    written_bytes:      their size
    outages, outage_us: storage outages of at least one node, and their time in all
    down:               nodes that cannot write now
    restores:           where generations resumed from
    fell:               how often a tier was tried and failed
    """

    committed: int = 0
    ordered: int = 0
    newest: int = -1
    written_bytes: int = 0
    outages: int = 0
    outage_us: int = 0
    down: tuple[str, ...] = ()
    restores: tuple[Restores, ...] = ()
    fell: int = 0

    @property
    def any(self) -> bool:
        """Is there something to report?"""
        return bool(self.committed or self.outages or self.restores)


class SavesBuilder:
    """Feed it every record of a run in order."""

    def __init__(self) -> None:
        self._sets = NO_SETS
        self._committed: list[checkpoints.CheckpointCommitted] = []
        self._down: dict[str, int] = {}
        # Outages of several nodes at once count as one.
        self._down_since = self._outages = self._outage_us = self._last = 0
        # The slowest restore of every set and generation.
        self._restores: dict[tuple[str, int], checkpoints.Restored] = {}
        self._fell = 0

    def feed(self, record: Record) -> None:
        """Take in the next record."""
        fact, self._last = record.event, record.at
        if isinstance(fact, job.JobCreated):
            self._sets = sets_of(fact.spec)
        elif isinstance(fact, checkpoints.CheckpointCommitted):
            self._committed.append(fact)
        elif isinstance(fact, checkpoints.StorageFailed):
            if not self._down:
                self._down_since, self._outages = record.at, self._outages + 1
            self._down[fact.node] = record.at
        elif isinstance(fact, (checkpoints.StorageBack, *_ENDED)):
            self._back(fact.node, record.at)
        elif isinstance(fact, checkpoints.Restored):
            key = (self._sets.of(fact.node), fact.generation)
            self._restores[key] = max(self._restores.get(key, fact), fact, key=_slowness)
            self._fell += len(fact.fell)

    def _back(self, node: str, at: int) -> None:
        if self._down.pop(node, None) is not None and not self._down:
            self._outage_us += at - self._down_since

    def saves(self, now: int | None = None) -> Saves:
        """What is known so far; an outage that lasts does so until ``now``."""
        lasting = max(now or 0, self._last) - self._down_since if self._down else 0
        tiers = {tier: [one for one in self._restores.values() if one.tier == tier] for tier in checkpoints.TIERS}
        return Saves(
            committed=len(self._committed),
            ordered=sum(one.why != checkpoints.DUE for one in self._committed),
            newest=self._committed[-1].step if self._committed else -1,
            written_bytes=sum(one.size for one in self._committed),
            outages=self._outages,
            outage_us=self._outage_us + lasting,
            down=tuple(sorted(self._down)),
            restores=tuple(
                Restores(tier, len(found), sum(one.took_us for one in found), max(one.took_us for one in found))
                for tier, found in tiers.items()
                if found and tier != checkpoints.NOTHING
            ),
            fell=self._fell,
        )


_ENDED = (
    nodes.NodeFailed, nodes.NodeGone, nodes.NodeLost, nodes.NodeReleased, nodes.NodeLeft, nodes.NodeSucceeded,
)  # fmt: skip


def _slowness(one: checkpoints.Restored) -> tuple[int, int]:
    return checkpoints.TIERS.index(one.tier), one.took_us
