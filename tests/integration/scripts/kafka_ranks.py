"""Trains on a topic under FlashCheckpoint: STEPS, URL of checkpoints, URL of the topic, whose messages are numbers.

Every rank appends to ``$FOLDER/told-RANK`` what it restored, and the messages of every step that it has made, as `data_ranks.py`
does. A step takes ``PACE_S`` seconds more.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from dlrover_adapters.torch import ElasticBatch, ElasticStream, FlashCheckpoint

BATCH, MICRO = 8, 3


def main(steps: str, url: str, topic: str) -> None:
    """Train, die, train on."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.set_num_threads(1)
    model = DistributedDataParallel(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    data = ElasticStream(topic, parse=int)
    batch = ElasticBatch(model, optimizer, global_batch=BATCH, micro_batch=MICRO)
    life = [os.urandom(8).hex()]
    dist.broadcast_object_list(life)
    told = os.open(Path(os.environ["FOLDER"]) / f"told-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def tell(**words: Any) -> None:
        os.write(told, f"{json.dumps({'life': life[0], **words})}\n".encode())

    with FlashCheckpoint(url, model=model, optimizer=optimizer, data=data, every=2, store_every=6) as ckpt:
        step, drawn = ckpt.restore(), list[int]()
        tell(restored=step, tier=ckpt.tier)
        if step < int(steps):
            for x in batch.over(DataLoader(data, batch_size=None)):
                drawn += x.tolist() if batch.weight else []
                if batch.backward(model(x.float().unsqueeze(1)).square().mean()):
                    step += 1
                    tell(step=step, samples=drawn)
                    drawn = []
                    time.sleep(float(os.environ["PACE_S"]))
                    ckpt.step(step)
                    if step == int(steps):
                        break
        ckpt.save(step)
        ckpt.wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
