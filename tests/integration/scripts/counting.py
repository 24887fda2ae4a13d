"""Trains on an `ElasticDataset` without end, and writes down every index that enters a step, until ``FOLDER/finish`` is there.
is there.

FOLDER LOADERS. Each rank appends to ``FOLDER/trained-RANK``: where its life began, and of each step its indices, just before the
optimizer makes it. The samples are drawn by LOADERS processes, which are ahead of training. States are kept in memory, and under
``FOLDER/ckpts`` every 10 steps.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from dlrover_adapters.torch import ElasticBatch, ElasticDataset, FlashCheckpoint

SIZE, SEED, BATCH, MICRO = 203, 11, 10, 3
PACE_S = 0.02


def sample(index: int) -> tuple[int, torch.Tensor]:
    """One that says which it is."""
    return index, torch.sin(torch.arange(4.0) * (index + 1))


def train(folder: Path, loaders: int) -> None:
    """One rank's life."""
    rank, world = dist.get_rank(), dist.get_world_size()
    trained = os.open(folder / f"trained-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def tell(**what: object) -> None:
        os.write(trained, f"{json.dumps(what)}\n".encode())

    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = ElasticDataset("train", size=SIZE, fetch=sample, epochs=0, seed=SEED)
    batch = ElasticBatch(model, optimizer, global_batch=BATCH, micro_batch=MICRO)
    life = int(os.environ.get("LIFE", "0")) + int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    ends = torch.zeros(1)
    with FlashCheckpoint(
        f"file://{folder}/ckpts", model=model, optimizer=optimizer, data=data, every=4, store_every=10
    ) as ckpt:
        step = ckpt.restore()
        tell(life=life, world=world, began=step, tier=ckpt.tier, place=data.place[1:3])
        mine: list[int] = []
        for indices, inputs in batch.over(DataLoader(data, batch_size=None, num_workers=loaders)):
            assert batch.indices in ([], indices.tolist()), "what is told is what is drawn"
            mine += batch.indices
            loss = model(inputs).square().mean()
            if not batch.backward(loss):
                continue
            step += 1
            tell(life=life, step=step, indices=mine)
            mine = []
            ckpt.step(step)
            ends[0] = float((folder / "finish").exists())
            dist.all_reduce(ends)
            if ends.item():
                break
            time.sleep(PACE_S)
    tell(life=life, ended=step)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    train(Path(sys.argv[1]), int(sys.argv[2]))
    dist.destroy_process_group()
