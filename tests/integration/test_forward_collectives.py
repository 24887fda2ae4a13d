"""`ElasticBatch` under DDP with layers that call collectives in their forward, as SyncBatchNorm does: ranks run equal rounds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from running import SCRIPTS  # noqa: E402
from torch import nn  # noqa: E402

from dlrover_core.data.permutation import Order  # noqa: E402


def sample(index: int) -> tuple[torch.Tensor, torch.Tensor]:
    """As the script has it."""
    x = torch.sin(torch.arange(1, 4, dtype=torch.float64) * (index + 1))
    return x, x.sum().cos()


def alone() -> list[float]:
    """The weights that one process has after steps of the whole global batches."""
    order = list(Order(12, 5, 0).indices(0, 12))
    torch.manual_seed(1)
    model = nn.Linear(3, 1, dtype=torch.float64)
    for at in range(0, 12, 5):
        x, y = map(torch.stack, zip(*map(sample, order[at : at + 5]), strict=True))
        made = torch.autograd.grad(((model(x).squeeze(1) - y) ** 2).mean(), list(model.parameters()))
        with torch.no_grad():
            for one, gradient in zip(model.parameters(), made, strict=True):
                one -= 0.1 * gradient
    found: list[float] = model.weight[0].tolist()
    return found


@pytest.mark.timeout(300)
def test_ranks_with_fewer_micro_batches_run_as_many_forwards(tmp_path: Path) -> None:
    """Of 5 samples 2 ranks have 2 micro-batches and 1: the second repeats one at weight zero, and the steps are those of one."""
    line = [sys.executable, str(SCRIPTS / "forward_collectives.py"), str(tmp_path), "syncbn,option"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    wanted = pytest.approx(alone(), rel=1e-12, abs=0)
    for kind, warnings in (("syncbn", [0, 1]), ("option", [0, 0])):
        ranks = [json.loads((tmp_path / f"{kind}-{rank}").read_text()) for rank in range(2)]
        assert [one["forwards"] for one in ranks] == [5, 5]
        assert [one["weights"] for one in ranks] == [wanted, wanted]
        assert [sum("at weight zero" in line for line in one["said"]) for one in ranks] == warnings
