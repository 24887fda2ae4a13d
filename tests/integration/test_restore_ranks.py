"""Real ranks restore what a world of another size saved."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from running import SCRIPTS

BOUND_S = 100


def same(one: Any, other: Any) -> bool:
    """Bit for bit, however deep."""
    import torch

    if isinstance(one, torch.Tensor):
        return torch.equal(one, other) and one.dtype == other.dtype
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


DDP = pytest.mark.nightly(reason="the same with FSDP2, where states are taken apart, stands for it in make test")


@pytest.mark.parametrize(("kind", "before", "after"), [("fsdp", 4, 2), pytest.param("ddp", 2, 1, marks=DDP)])
def test_another_world_restores_from_storage(tmp_path: Path, kind: str, before: int, after: int) -> None:
    """FSDP2 and DDP: what one world saved to storage another one restores, model, Adam and data position, bit for bit."""
    import torch

    url, stores = f"file://{tmp_path}/run", [str(tmp_path / f"store-{one}") for one in (1, 2)]
    line = [sys.executable, str(SCRIPTS / "forked.py"), str(SCRIPTS / "restoring.py")]
    line += [str(before), kind, "save", url, stores[0], "--", str(after), kind, "restore", url, stores[1]]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(line, env=env, capture_output=True, text=True, timeout=BOUND_S, check=False)
    assert done.returncode == 0, done.stderr
    was, found = (torch.load(f"{one}.found", weights_only=True) for one in stores)
    assert was["at"] == found["at"] == 24
    assert was["optimizer"]["state"]
    assert same(was, found)
