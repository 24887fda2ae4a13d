"""Real ranks restore what a world of another size saved."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

SCRIPT = Path(__file__).parent / "scripts" / "restoring.py"


def ranks(world: int, *words: str) -> dict[str, Any]:
    """Run a world; what its rank 0 found."""
    running = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), *words],
            env={
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(world),
                "OMP_NUM_THREADS": "1",
            },
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        said = [one.communicate(timeout=140)[1] for one in running]
    finally:
        for one in running:
            one.kill()
            one.wait()
    assert [one.returncode for one in running] == [0] * world, "\n".join(said)
    found = torch.load(f"{words[-1]}.found", weights_only=True)
    assert isinstance(found, dict)
    return found


def same(one: Any, other: Any) -> bool:
    """Bit for bit, however deep."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other) and one.dtype == other.dtype
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("kind", "before", "after"), [("fsdp", 4, 2), ("ddp", 2, 1)])
def test_another_world_restores_from_storage(tmp_path: Path, kind: str, before: int, after: int) -> None:
    """FSDP2 and DDP: what one world saved to storage another one restores, model, Adam and data position, bit for bit."""
    url = f"file://{tmp_path}/run"
    was = ranks(before, kind, "save", url, str(tmp_path / "store-1"))
    found = ranks(after, kind, "restore", url, str(tmp_path / "store-2"))
    assert was["at"] == found["at"] == 24
    assert was["optimizer"]["state"]
    assert same(was, found)
