"""Two ranks that lease samples and save once. The next generation says of that state another position less than it has.

leasing_forgets.py URL

Each rank trains on two batches, saves, and waits for its end. Whoever resumes then has a `Leased` that forgets a position, as
rank 0 of a script with a fault would: to go on would train that sample twice.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch

from dlrover_adapters.torch import ElasticDataset, FlashCheckpoint
from dlrover_adapters.torch.data.leased import Leased
from dlrover_core.data.ranges import Ranges

SIZE = 40
_said = Leased.go_on


def _forgets(self: Leased, state: tuple[int, int], spans: Ranges, *, first: bool) -> None:
    _said(self, state, Ranges(spans.take(spans.count - 1)[0]) if spans else spans, first=first)


def main(url: str) -> None:
    """Train on two batches, save, and wait."""
    Leased.go_on = _forgets  # type: ignore[method-assign]
    torch.manual_seed(0)
    data = ElasticDataset("train", size=SIZE, fetch=torch.tensor, seed=7, micro_batch=2, assign="lease")
    ckpt = FlashCheckpoint(url, model=torch.nn.Linear(1, 1), data=data, every=1, store_every=1)
    step = ckpt.restore()
    (Path(os.environ["FOLDER"]) / f"began-{os.environ['RANK']}-{step}").touch()
    batches: Any = iter(data)
    next(batches)
    next(batches)
    data.step()
    ckpt.step(step + 1)
    signal.pause()


if __name__ == "__main__":
    main(*sys.argv[1:])
