"""Trains on an `ElasticDataset` in file order; no sample of one global batch can be fetched. URL."""

from __future__ import annotations

import sys

import torch
from told_steps import Training

from dlrover_adapters.torch import ElasticDataset

SIZE, BATCH, POISON = 20, 2, (12, 13)


def sample(index: int) -> torch.Tensor:
    """One of them; two cannot be read."""
    if index in POISON:
        raise ValueError("a damaged record")
    return torch.full((4,), float(index))


def main(url: str) -> None:
    """Train one epoch."""
    training = Training(4, 1e-6, batch=BATCH, micro=1)
    data = ElasticDataset("train", size=SIZE, fetch=sample, order="file")
    training.train(data, url, saves=(1, 1), loaders=0)


if __name__ == "__main__":
    main(*sys.argv[1:])
