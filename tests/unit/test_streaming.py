"""Copies of memory: in pieces that the C library copies past the caches."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from dlrover_adapters.torch.checkpoint.streaming import BATCH_BYTES, SMALL_BYTES, Blocks, Copy, batches  # noqa: E402
from dlrover_adapters.torch.environment import NON_TEMPORAL_BYTES  # noqa: E402

MIB = 1024 * 1024


@pytest.mark.parametrize(
    "size", [SMALL_BYTES, 16 * MIB, 20 * MIB + 12, BATCH_BYTES, BATCH_BYTES + 1, 2 * BATCH_BYTES + 100, 1000 * MIB + 8]
)
def test_what_is_large_is_copied_in_large_pieces(size: int) -> None:
    """Pieces cover all, are bounded, and none of a tensor of 16 MiB and more is below the launcher's threshold."""
    nothing = torch.empty(0)
    found = batches([Copy(1 << 40, 1 << 41, size, nothing, nothing)])
    pieces = [piece for batch in found if isinstance(batch, Blocks) for piece in batch.blocks]
    at = 0
    for to, of, length in pieces:
        assert (to, of) == ((1 << 40) + at, (1 << 41) + at)
        assert min(size, NON_TEMPORAL_BYTES) <= length <= BATCH_BYTES
        at += length
    assert at == size
