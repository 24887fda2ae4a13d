"""`ElasticBatch` makes the same steps at every world size: loss curves of real processes agree to 1e-12, in double precision."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from running import SCRIPTS

CURVES = str(SCRIPTS / "elastic_curves.py")
WORLDS = ("1", "2", "3", "4", "4-2-3")
RELATIVE = 1e-12


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("kind", "steps", "worlds"),
    [
        pytest.param(
            "ddp",
            200,
            WORLDS,
            marks=pytest.mark.nightly(reason="fewer steps and worlds, with measured costs, stand for it by day"),
        ),
        pytest.param(
            "fsdp",
            200,
            WORLDS,
            marks=pytest.mark.nightly(reason="fewer steps and worlds, with measured costs, stand for it by day"),
        ),
        pytest.param(
            *("ddp", 42, ("1", "3", "4-2-3")),
            marks=pytest.mark.nightly(
                reason="the same with quotas by measured cost, below, stands for it in make test"
            ),
        ),
        ("measured", 24, ("1", "3-2")),
        pytest.param(
            "fsdp",
            30,
            ("1", "2-3"),
            marks=pytest.mark.nightly(
                reason="DDP with measured costs, and the FSDP ranks of test_planned_changes.py, stand for it by day"
            ),
        ),
    ],
)
def test_loss_curves_are_the_same_in_every_world(
    tmp_path: Path, kind: str, steps: int, worlds: tuple[str, ...]
) -> None:
    """SGD and Adam, clipped, with a schedule, over epochs with short last batches; worlds that change go on from a checkpoint.

    Quotas by measured cost change nothing of that, while loader processes read ahead.
    """
    line = [sys.executable, CURVES, str(tmp_path), str(steps), ",".join(worlds), kind, "sgd,adam"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-6000:]
    curves = json.loads((tmp_path / "curves.json").read_text())
    for name in ("sgd", "adam"):
        alone = curves[f"{kind}-{name}-1"]
        assert len(alone) == steps
        assert alone[-1] < alone[0]
        for world in worlds[1:]:
            other = curves[f"{kind}-{name}-{world}"]
            assert other == pytest.approx(alone, rel=RELATIVE, abs=0), f"{name}, {world} ranks"
