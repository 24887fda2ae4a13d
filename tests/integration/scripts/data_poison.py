"""Trains on an `ElasticDataset` in which two samples are poison: URL, POISON ("quarantine" or "fail"), loader processes.

To fetch the sample `RAISES` raises; a step with the sample `KILLS` ends its worker by SIGKILL. `told_steps` tells the steps.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

import torch
from told_steps import Training

from dlrover_adapters.torch import ElasticDataset

SIZE, BATCH, MICRO, RAISES, KILLS = 48, 16, 4, 13, 29


def sample(index: int) -> torch.Tensor:
    """One of them; one cannot be read."""
    if index == RAISES:
        raise ValueError("a damaged record")
    return torch.full((4,), float(index))


def die(indices: Sequence[int]) -> None:
    """A step with one sample ends its worker."""
    if KILLS in indices:
        os.kill(os.getpid(), signal.SIGKILL)


def main(url: str, poison: str, loaders: str) -> None:
    """Train one epoch."""
    training = Training(4, 1e-6, batch=BATCH, micro=MICRO)
    data = ElasticDataset("train", size=SIZE, fetch=sample, seed=3, poison=poison)
    training.train(data, url, saves=(1, 1), loaders=int(loaders), before=die)


if __name__ == "__main__":
    main(*sys.argv[1:])
