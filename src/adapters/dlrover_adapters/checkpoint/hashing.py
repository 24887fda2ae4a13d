"""The digests that every tier is verified by: XXH3, 64 bits, at about the speed of memory. Against damage, not against malice."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import xxhash

from dlrover_core.checkpoint.arena import BLOCK_BYTES


def digest(content: Any) -> int:
    """Of a buffer. Lets other threads run meanwhile."""
    return int(xxhash.xxh3_64_intdigest(content))


def digests(content: Any) -> Iterator[int]:
    """Of each block of `BLOCK_BYTES` of a buffer, the last one as short as it is."""
    view = memoryview(content).cast("B")
    for at in range(0, len(view), BLOCK_BYTES):
        yield digest(view[at : at + BLOCK_BYTES])


def running() -> Any:
    """A digest in the making: ``update`` with what follows, ``intdigest`` in the end."""
    return xxhash.xxh3_64()
