"""Trains on an `ElasticDataset` in file order; no sample of one global batch can be fetched. URL BATCH."""

from __future__ import annotations

import sys

import torch
from told_steps import Training

from dlrover_adapters.torch import ElasticDataset

SIZE, FIRST = 24, 12


def main(url: str, batch: int) -> None:
    """Train one epoch, of which the batch that begins at `FIRST` is damaged."""

    def sample(index: int) -> torch.Tensor:
        if FIRST <= index < FIRST + batch:
            raise ValueError("a damaged record")
        return torch.full((4,), float(index))

    training = Training(4, 1e-6, batch=batch, micro=1)
    data = ElasticDataset("train", size=SIZE, fetch=sample, order="file")
    training.train(data, url, saves=(1, 1), loaders=0)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
