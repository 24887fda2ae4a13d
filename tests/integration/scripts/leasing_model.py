"""Ranks that draw leases at their own paces, and meet in rounds to average and save their model (local SGD).

leasing_model.py SIZE URL LOADERS PACES DIES    PACES: seconds that a batch takes, by rank; DIES: "-" or RANK:ROUND

The rank of DIES is killed by SIGKILL in the first generation, in the middle of that round. The models note on which indices they
were trained; averaging adds them up. At the end rank 0 writes down the notes, and each rank those with which it began.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from dlrover_adapters.torch import ElasticDataset, FlashCheckpoint

MICRO, ROUND_S, EPOCHS = 2, 0.1, 2


def sample(index: int) -> torch.Tensor:
    """A sample is its index."""
    return torch.tensor(index)


class Trainer:
    """A model of which the buffer counts how often it was trained on each index."""

    def __init__(self, size: int, pace_s: float) -> None:
        torch.manual_seed(0)  # ranks begin alike
        self.model = torch.nn.Linear(1, 1)
        self.model.register_buffer("times", torch.zeros(size, dtype=torch.int64))
        self.since = torch.zeros(size, dtype=torch.int64)
        self.pace_s = pace_s

    def train(self, batch: torch.Tensor) -> None:
        """One batch."""
        time.sleep(self.pace_s)
        self.since[batch] += 1

    def average(self) -> None:
        """All ranks get what each has learnt since they met before."""
        dist.all_reduce(self.since)
        self.model.times += self.since  # type: ignore[operator]
        self.since.zero_()


def main(size: str, url: str, loaders: str, paces: str, dies: str) -> None:
    """Train on everything."""
    rank, folder = int(os.environ["RANK"]), Path(os.environ["FOLDER"])
    first_life = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    dist.init_process_group("gloo")
    pace = paces.split(",")
    trainer = Trainer(int(size), float(pace[rank % len(pace)]))
    data = ElasticDataset(
        "train", size=int(size), epochs=EPOCHS, fetch=sample, seed=7, micro_batch=MICRO, assign="lease", lineage="model"
    )
    ckpt = FlashCheckpoint(url, model=trainer.model, data=data, every=1, store_every=2)
    step = ckpt.restore()
    (folder / f"began-{rank}-{os.getpid()}").write_text(f"{step} {ckpt.tier} {int(trainer.model.times.sum())}\n")  # type: ignore[operator]
    batches: Any = data.over(DataLoader(data, batch_size=None, num_workers=int(loaders)), pauses=True)
    nothing, more = object(), torch.ones(1)
    while more:
        step, until, batch = step + 1, time.monotonic() + ROUND_S, None
        while time.monotonic() < until and (batch := next(batches, nothing)) is not None and batch is not nothing:
            trainer.train(batch)
            if first_life and dies == f"{rank}:{step}":
                os.kill(os.getpid(), signal.SIGKILL)
        data.step()
        trainer.average()
        ckpt.step(step)
        if rank == 0:
            (folder / "round").write_text(str(step))
        more = torch.tensor([float(batch is not nothing)])
        dist.all_reduce(more, dist.ReduceOp.MAX)
    if rank == 0:
        (folder / "trained").write_text(" ".join(map(str, trainer.model.times.tolist())))  # type: ignore[operator, union-attr]
    ckpt.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
