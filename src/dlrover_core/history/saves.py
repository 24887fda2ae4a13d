"""Checkpoints of a run, summed up: how many, how often storage was down, and from where generations went on."""

from __future__ import annotations

from typing import NamedTuple

from dlrover_core.job import checkpoints, names, nodes
from dlrover_core.kernel.events import Record


class Restores(NamedTuple):
    """How many generations went on from one tier: ``total_us`` that took in sum, ``longest_us`` at most."""

    tier: str
    count: int  # type: ignore[assignment]  # hides tuple.count, which nobody calls on it
    total_us: int
    longest_us: int


class Saves(NamedTuple):
    """A run's checkpoints. ``ordered``: of the ``committed`` those written because a generation had ended.

    ``outages`` of storage lasted ``outage_us`` in all, seen from whichever nodes saw them; ``down``: nodes that cannot write now.
    ``fell``: how often a tier was tried that was not good.
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
        """Is there something to tell?"""
        return bool(self.committed or self.outages or self.restores)


class SavesBuilder:
    """Feed it every record of a run in order."""

    def __init__(self) -> None:
        self._committed: list[checkpoints.CheckpointCommitted] = []
        self._down: dict[str, int] = {}
        # Outages of several nodes at once are one.
        self._down_since = self._outages = self._outage_us = self._last = 0
        # Of every group and generation the slowest restore.
        self._restores: dict[tuple[str, int], checkpoints.Restored] = {}
        self._fell = 0

    def feed(self, record: Record) -> None:
        """Take in the next record."""
        fact, self._last = record.event, record.at
        if isinstance(fact, checkpoints.CheckpointCommitted):
            self._committed.append(fact)
        elif isinstance(fact, checkpoints.StorageFailed):
            if not self._down:
                self._down_since, self._outages = record.at, self._outages + 1
            self._down[fact.node] = record.at
        elif isinstance(fact, (checkpoints.StorageBack, *_ENDED)):
            self._back(fact.node, record.at)
        elif isinstance(fact, checkpoints.Restored):
            key = (names.group_of(fact.node), fact.generation)
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
