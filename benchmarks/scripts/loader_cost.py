"""What `bench_data.py` times: a training loop over an ElasticDataset, and over a plain DistributedSampler loader, in turn.

    loader_cost.py PAIRS STEPS LOADERS

Both train the same small model on the same 100,000 rows, 32 a step, and each step takes 20 ms more of one core. The two loops go
forward in turn, step by step, so that what else the machine does hits both. Prints milliseconds a step, by pairs of STEPS steps:
``{"ours": [...], "peer": [...]}``.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Iterator

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from dlrover_adapters.torch import ElasticBatch, ElasticDataset

ROWS, BATCH, STEP_S = 100_000, 32, 0.020
WARM = 3
"""Steps before the clock runs."""


class Rows(Dataset[torch.Tensor]):
    """Rows in memory."""

    def __init__(self) -> None:
        self.rows = torch.randn(ROWS, 64, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.rows[index]


def spin() -> None:
    """The rest of a step: one core's work."""
    until = time.perf_counter() + STEP_S
    while time.perf_counter() < until:
        pass


def plain(rows: Rows, loaders: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """One step after the other."""
    sampler: DistributedSampler[torch.Tensor] = DistributedSampler(rows, num_replicas=1, rank=0, seed=7)
    for x in DataLoader(rows, batch_size=BATCH, sampler=sampler, num_workers=loaders):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        yield


def elastic(rows: Rows, loaders: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """The same."""
    data = ElasticDataset("train", size=ROWS, fetch=rows.__getitem__, seed=7)
    batch = ElasticBatch(model, optimizer, global_batch=BATCH, micro_batch=BATCH)
    for x in batch.over(DataLoader(data, batch_size=None, num_workers=loaders)):
        batch.backward(model(x).square().mean())
        yield


def main(pairs: int, steps: int, loaders: int) -> None:
    """Measure in turn."""
    logging.disable()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows, model = Rows(), nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    loops = {"ours": elastic(rows, loaders, model, optimizer), "peer": plain(rows, loaders, model, optimizer)}
    found: dict[str, list[float]] = {"ours": [], "peer": []}
    for one in loops.values():
        for _ in range(WARM):
            next(one)
    for _ in range(pairs):
        took = dict.fromkeys(loops, 0.0)
        for number in range(steps):
            for name, loop in list(loops.items())[:: 1 if number % 2 else -1]:
                began = time.perf_counter()
                next(loop)
                spin()
                took[name] += time.perf_counter() - began
        for name, each in took.items():
            found[name].append(each / steps * 1e3)
    print(json.dumps(found))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
