"""A DDP script whose last rank is slower than the others by a factor; `bench_data_jobs.py` times its epoch.

    slow_rank.py QUOTA STEPS BATCH PACE_S SLOW FILE

A sample takes PACE_S seconds of a rank's forward, SLOW times as much on the last rank. Rank 0 writes to FILE how long the epoch
of STEPS global batches took it, and the quotas of its last step: ``{"s": T, "quota": [...]}``.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dlrover_adapters.torch import ElasticBatch, ElasticDataset

MICRO = 32


class Slow(nn.Module):
    """A small model that takes its time."""

    def __init__(self, pace_s: float) -> None:
        super().__init__()
        self.inner, self.pace_s = nn.Linear(4, 1), pace_s

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.pace_s * len(x))
        found: torch.Tensor = self.inner(x)
        return found


def sample(index: int) -> torch.Tensor:
    """One of them."""
    return torch.full((4,), float(index))


def main(quota: str, steps: int, size: int, pace_s: float, slow: float, told: Path) -> None:
    """One epoch."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(Slow(pace_s * (slow if rank == world - 1 else 1)))
    batch = ElasticBatch(
        model, torch.optim.SGD(model.parameters(), lr=1e-9), global_batch=size, micro_batch=MICRO, quota=quota
    )
    dist.barrier()
    began = time.perf_counter()
    for x in batch.over(ElasticDataset("train", size=steps * size, fetch=sample)):
        batch.backward(model(x).square().mean())
    if rank == 0:
        told.write_text(json.dumps({"s": time.perf_counter() - began, "quota": batch.quota}))
    del model, batch
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]), float(sys.argv[5]), Path(sys.argv[6]))
