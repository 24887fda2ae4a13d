"""Many ranks agree on a layout over one real store."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
msgpack = pytest.importorskip("msgpack")

SCRIPT = Path(__file__).parent / "scripts" / "layout_ranks.py"
RANKS, SHARDS, PER_NODE = 64, 16, 8
LIMIT_S = 120


@pytest.mark.nightly(
    reason="test_agreement.py and test_division.py, with the ranks in one process, stand for it in make test"
)
def test_64_ranks_of_a_large_model(tmp_path: Path) -> None:
    """HSDP, 4 replicas of 16 shards, 2,892 chunks a rank: each node keeps what its ranks have, and each chunk is written once."""
    line = [sys.executable, str(SCRIPT), str(tmp_path), str(RANKS), str(SHARDS)]
    ended = subprocess.run(line, check=False, capture_output=True, text=True, timeout=LIMIT_S)
    assert ended.returncode == 0, ended.stderr[-3000:]
    told: list[Any] = [msgpack.unpackb((tmp_path / str(rank)).read_bytes()) for rank in range(RANKS)]
    assert len({one[0] for one in told}) == 1, "one number"
    assert all(again for *_, again in told), "the same table, recognised by its number"
    assert told[0][1] == [list(range(shard, RANKS, SHARDS)) for shard in range(SHARDS)]
    assert told[0][2] == [rank for rank in range(RANKS) if any(told[rank][3].values())]
    written, bytes_of = Counter[Any](), Counter[int]()
    for rank, (_, _, _, kept, _) in enumerate(told):
        for name, write in kept.items():
            key = name if name.endswith("step") else (name, rank % SHARDS)
            written[key] += write
            bytes_of[rank // PER_NODE] += write * (not name.endswith("step"))
        assert sum(not name.endswith("step") for name in kept) == 3 * 723
    for node in range(RANKS // PER_NODE):
        here = [name for rank in range(node * PER_NODE, (node + 1) * PER_NODE) for name in told[rank][3]]
        assert len([name for name in here if name.endswith("step")]) == 723, "each step once on each node"
    assert set(written.values()) == {1}
    assert len(written) == 723 + 3 * 723 * SHARDS
    assert max(bytes_of.values()) <= 1.1 * sum(bytes_of.values()) / len(bytes_of)
