"""How an `ElasticDataset` fetches samples of a source, and the words that say of which samples its positions are."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from dlrover_adapters.data.source import Source

SOURCE_CHARS_MAX = 32
"""A longer fingerprint of a source is hashed."""


class Ordered(Protocol):
    """The settings of an `ElasticDataset` that, with the source, decide which sample stands at a position."""

    seed: int
    order: str
    chunk: int
    window: int


class SourceFetch:
    """Fetches samples of a source; each epoch has its own samples where the source says so."""

    def __init__(self, source: Source) -> None:
        self.source = source

    def of_epoch(self, epoch: int) -> Callable[[int], Any]:
        """The function that fetches a sample of this epoch by its index."""
        of_epoch = getattr(self.source, "of_epoch", None)
        fetch: Callable[[int], Any] = (of_epoch(epoch) if of_epoch else self.source).__getitem__
        return fetch

    def __call__(self, index: int) -> Any:
        """The sample, of the first epoch."""
        return self.source[index]


def positions_of(of: Ordered, size: int, source: str) -> str:
    """The fingerprint of the data that positions belong to, short enough for a `Place`."""
    if len(source) > SOURCE_CHARS_MAX or not source.isprintable():
        source = hashlib.blake2b(source.encode(errors="surrogateescape"), digest_size=8).hexdigest()
    words: Sequence[str] = [f"size={size}", f"seed={of.seed}", f"order={of.order}"]
    if of.chunk > 1:
        words = [*words, f"chunk={of.chunk}", f"window={of.window}"]
    return " ".join([*words, f"source={source}"] if source else words)
