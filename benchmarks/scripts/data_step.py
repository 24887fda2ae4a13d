"""A DDP script under FlashCheckpoint, with an ElasticDataset or without; `bench_data_jobs.py` kills its workers.

    data_step.py --diary FILE --checkpoint FILE KIND LOADERS

KIND: ``elastic``, over an ElasticDataset, with ElasticBatch; ``plain``: over a DataLoader with a DistributedSampler, or, with no
LOADERS, over rows that are made in the loop. The diary is that of `ddp_step.py`. A step takes 5 ms more; there is no end.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ddp_step import BEGAN, IMPORTED
from diary import Diary
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from dlrover_adapters.torch import FlashCheckpoint

ROWS, MICRO, PAUSE_S = 1_000_000, 64, 0.005


class Rows(Dataset[torch.Tensor]):
    """Made of their index."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((64,), index / ROWS)


def steps(kind: str, loaders: int, url: str, model: Any, optimizer: Any, diary: Diary) -> Iterator[None]:
    """Restore, and make one step after the other. Each is over when it is written down."""
    data, batch = None, None
    if kind == "elastic":
        from dlrover_adapters.torch import ElasticBatch, ElasticDataset

        data = ElasticDataset("train", size=ROWS, fetch=Rows().__getitem__, epochs=0, seed=7)
        batch = ElasticBatch(model, optimizer, global_batch=MICRO * dist.get_world_size(), micro_batch=MICRO)
    with FlashCheckpoint(url, model=model, optimizer=optimizer, data=data, every=5, store_every=0) as ckpt:
        step = ckpt.restore()
        diary.note("ready", step)
        contents = (
            plain(loaders) if batch is None else batch.over(DataLoader(data, batch_size=None, num_workers=loaders))
        )
        for x in contents:
            loss = model(x).square().mean()
            if batch is None:
                loss.backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            else:
                batch.backward(loss)
            step += 1
            diary.note("step", step)
            ckpt.step(step)
            yield


def plain(loaders: int) -> Iterator[torch.Tensor]:
    """This rank's rows, without us."""
    if not loaders:
        while True:
            yield torch.randn(MICRO, 64)
    rows = Rows()
    yield from DataLoader(rows, batch_size=MICRO, sampler=DistributedSampler(rows, seed=7), num_workers=loaders)


def main() -> None:
    """Train until killed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--diary", type=Path, required=True)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("kind", choices=("elastic", "plain"))
    parser.add_argument("loaders", type=int)
    options = parser.parse_args()
    diary = Diary(options.diary, int(os.environ["RANK"]))
    diary.note("begin", 0, BEGAN)
    diary.note("imported", 0, IMPORTED)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    diary.note("grouped", 0)
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    url = f"file://{options.checkpoint.parent}/states"
    for _ in steps(options.kind, options.loaders, url, model, optimizer, diary):
        time.sleep(PAUSE_S)


if __name__ == "__main__":
    main()
