"""Two ranks with DDP train a model that has a layer with a collective in its forward: FOLDER KINDS.

KINDS, with commas: option (a layer of one's own, and ``equal_rounds=True``), syncbn (a stand-in for SyncBatchNorm, which needs
CUDA). Rank r writes its number of forwards, its warnings and the weights after the last step to FOLDER/KIND-r, as JSON.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # what optimizers import with their first step: once here, and not in each rank
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dlrover_adapters.torch import ElasticBatch, ElasticDataset

SIZE, BATCH, MICRO = 12, 5, 2


def sample(index: int) -> tuple[torch.Tensor, torch.Tensor]:
    """One of a regression's."""
    x = torch.sin(torch.arange(1, 4, dtype=torch.float64) * (index + 1))
    return x, x.sum().cos()


class Counting(nn.Module):
    """All ranks add up how many samples they have; the samples stay as they are."""

    forwards = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Raises where ranks do not meet."""
        self.forwards += 1
        number = torch.tensor([1, 7], dtype=torch.int64)
        dist.all_reduce(number)
        assert number.tolist() == [2, 14], number
        return x


class StandIn(nn.SyncBatchNorm, Counting):  # type: ignore[misc]  # forward is the other's
    """Taken for a SyncBatchNorm."""

    forward = Counting.forward


def train(kind: str, rank: int, folder: str) -> None:
    """One epoch: two whole batches and a short one."""
    layer: Any = Counting() if kind == "option" else StandIn(3, affine=False, track_running_stats=False)
    torch.manual_seed(1)
    linear = nn.Linear(3, 1, dtype=torch.float64)
    model = DistributedDataParallel(nn.Sequential(layer, linear))
    said: list[str] = []
    logger = logging.getLogger("dlrover.torch")
    logger.filters = [lambda record: bool(said.append(record.getMessage()))]
    data = ElasticDataset("train", size=SIZE, fetch=sample, seed=5)
    batch = ElasticBatch(
        model, torch.optim.SGD(model.parameters(), lr=0.1), global_batch=BATCH, micro_batch=MICRO,
        equal_rounds=kind == "option",
    )  # fmt: skip
    for x, y in batch.over(data):
        batch.backward(((model(x).squeeze(1) - y) ** 2).mean())
    told = {"forwards": layer.forwards, "said": said, "weights": linear.weight[0].tolist()}
    Path(folder, f"{kind}-{rank}").write_text(json.dumps(told))
    del model, batch


def rank_of(rank: int, kinds: str, folder: str) -> None:
    """One rank."""
    os.environ.update(RANK=str(rank), WORLD_SIZE="2")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2, timeout=timedelta(seconds=20)
    )
    # DDP refuses a SyncBatchNorm on CPU, and the stand-in is none.
    DistributedDataParallel._passing_sync_batchnorm_handle = lambda *_: None  # type: ignore[method-assign]
    for kind in kinds.split(","):
        train(kind, rank, folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=rank_of, args=(rank, sys.argv[2], sys.argv[1])) for rank in range(2)]
    for one in ranks:
        one.start()
    for one in ranks:
        one.join()
    sys.exit(any(one.exitcode for one in ranks))
