"""Trains on an `ElasticDataset` under FlashCheckpoint: STEPS, URL, KILLED ("-" or RANK:STEP).

The rank KILLED dies by SIGKILL in the first generation, once it has made that step and asked for its save. Every rank appends to
``$FOLDER/told-RANK`` what it restored, and the samples of every step that it has made: one JSON line each, with the ``life`` of
its world, a number that all of its ranks agree on. A step takes ``PACE_S`` seconds more.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from dlrover_adapters.torch import ElasticBatch, ElasticDataset, FlashCheckpoint

SIZE, BATCH, MICRO = 61, 8, 2


def sample(index: int) -> torch.Tensor:
    """One of them."""
    return torch.full((4,), float(index))


def main(steps: str, url: str, killed: str) -> None:
    """Train, die, train on."""
    dist.init_process_group("gloo")
    rank, again = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    pace_s = float(os.environ.get("PACE_S", "0"))
    torch.set_num_threads(1)
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    data = ElasticDataset("train", size=SIZE, fetch=sample, epochs=0, seed=3)
    batch = ElasticBatch(model, optimizer, global_batch=BATCH, micro_batch=MICRO)
    life = [os.urandom(8).hex()]
    dist.broadcast_object_list(life)
    told = os.open(Path(os.environ["FOLDER"]) / f"told-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def tell(**words: Any) -> None:
        os.write(told, f"{json.dumps({'life': life[0], **words})}\n".encode())

    with FlashCheckpoint(url, model=model, optimizer=optimizer, data=data, every=2, store_every=6) as ckpt:
        step, drawn = ckpt.restore(), list[int]()
        tell(restored=step, tier=ckpt.tier)
        for x in batch.over(DataLoader(data, batch_size=None)):
            drawn += batch.indices
            if batch.backward(model(x).square().mean()):
                step += 1
                tell(step=step, samples=drawn)
                drawn = []
                time.sleep(pace_s)
                ckpt.step(step)
                if not again and killed == f"{rank}:{step}":
                    os.kill(os.getpid(), signal.SIGKILL)
                if step == int(steps):
                    break
        ckpt.save(step)
        ckpt.wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
