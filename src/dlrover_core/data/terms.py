"""The terms by which ranks use a dataset, as they are registered. Workers import this module at each start, so it is light."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from dlrover_core.data.cut import same_source
from dlrover_core.data.quota import DROP, KEEP
from dlrover_core.data.ranges import POSITION_MAX
from dlrover_core.data.streams import ENDLESS

CURSOR, LEASE, MODEL_LEASE = "cursor", "lease", "lease-model"
"""By arithmetic; by leases, where acknowledgements count; by leases, where what a restored model was trained on counts."""
LEASES = (LEASE, MODEL_LEASE)
ASSIGNMENTS = (CURSOR, *LEASES)
NUMBER_MAX = POSITION_MAX
SEED_MASK = 2**62 - 1
"""Of a larger seed these bits are registered: a message has no room for more. The fingerprint tells all of it."""


class Terms(NamedTuple):
    """One dataset, with the fields of `dlrover_core.job.shards.DatasetRegistered`."""

    name: str
    size: int
    seed: int
    order: str
    fingerprint: str
    epochs: int
    global_batch: int
    assignment: str
    last: str = KEEP

    @property
    def counted(self) -> int:
        """Samples of an epoch that are trained: without a remainder that is left out, once the global batch is known."""
        left_out = self.size % self.global_batch if self.last == DROP and 0 < self.global_batch <= self.size else 0
        return self.size - left_out

    def same(self, other: Terms) -> bool:
        """Is it the same dataset, whatever the terms of its use?"""
        return self[:5] == other[:5]

    def completed(self, known: Terms | None) -> Terms:
        """With what ``known`` says of the same dataset where this one does not know it yet: the global batch."""
        unknown = known is not None and self.name == known.name and not self.global_batch
        return self._replace(global_batch=known.global_batch) if known is not None and unknown else self

    def grew_to(self, other: Terms) -> bool:
        """Is the other one the same dataset with more samples? Its ranks have looked whether the first ones are the same."""
        grown = self.size < other.size and self.fingerprint != other.fingerprint
        return (
            grown
            and self.same(other._replace(size=self.size, fingerprint=self.fingerprint))
            and (same_source(self.fingerprint, other.fingerprint))
        )

    def clash(self, known: Iterable[Terms]) -> str:
        """Why this dataset cannot be beside ``known`` ones by their names, and what to do; empty: it can.

        In cuts, and of quarantined samples, the partitions of stream ``clicks`` are called ``clicks/0``, ``clicks/1`` and so on.
        """
        for other in known:
            for stream, named in ((other, self), (self, other)):
                if stream.size >= ENDLESS and named.name.startswith(f"{stream.name}/"):
                    return (
                        f"{self.name!r}, beside dataset {other.name!r}: {named.name!r} would be taken for a partition of stream "
                        f"{stream.name!r}; give one of them a name so that none begins with {stream.name + '/'!r}"
                    )
        return ""

    def __str__(self) -> str:
        return f"{self.size} samples, seed {self.seed}, order {self.order!r}, fingerprint {self.fingerprint!r}"
