"""Trains on an `ElasticDataset` in which two samples are poison: URL, POISON ("quarantine" or "fail"), loader processes.

To fetch the sample `RAISES` raises; a step with the sample `KILLS` ends its worker by SIGKILL. Rank 0 appends what it restored,
each rank the samples of every step that it has made, to ``$FOLDER/told-RANK``, as `data_ranks.py` does.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from dlrover_adapters.torch import ElasticBatch, ElasticDataset, FlashCheckpoint

SIZE, BATCH, MICRO, RAISES, KILLS = 48, 16, 4, 13, 29


def sample(index: int) -> torch.Tensor:
    """One of them; one cannot be read."""
    if index == RAISES:
        raise ValueError("a damaged record")
    return torch.full((4,), float(index))


def main(url: str, poison: str, loaders: str) -> None:
    """Train one epoch."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.set_num_threads(1)
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    data = ElasticDataset("train", size=SIZE, fetch=sample, seed=3, poison=poison)
    batch = ElasticBatch(model, optimizer, global_batch=BATCH, micro_batch=MICRO)
    life = [os.urandom(8).hex()]
    dist.broadcast_object_list(life)
    told = os.open(Path(os.environ["FOLDER"]) / f"told-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def tell(**words: Any) -> None:
        os.write(told, f"{json.dumps({'life': life[0], **words})}\n".encode())

    with FlashCheckpoint(url, model=model, optimizer=optimizer, data=data, every=1, store_every=1) as ckpt:
        step, drawn = ckpt.restore(), list[int]()
        tell(restored=step, tier=ckpt.tier)
        for x in batch.over(DataLoader(data, batch_size=None, num_workers=int(loaders))):
            if batch.weight and KILLS in batch.indices:
                os.kill(os.getpid(), signal.SIGKILL)
            drawn += batch.indices if batch.weight else []
            if batch.backward(model(x).square().mean()):
                step += 1
                tell(step=step, samples=drawn)
                drawn = []
                ckpt.step(step)
        ckpt.save(step)
        ckpt.wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
