"""Trains replicas with dropout, each rank on data of its own, under FlashCheckpoint: URL, EVERY, STORE_EVERY, PAUSE_S, STEPS.

STEPS 0: until ``$FOLDER/finish`` is there. Every rank appends to ``$FOLDER/told-RANK`` the loss of each step, and what it
restored. DDP broadcasts the buffers only. Gradients are summed parameter by parameter: DDP rebuilds its buckets after its first
step, and sums in another order from then on.
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

from dlrover_adapters.torch import FlashCheckpoint


class Sampler:
    """Where a rank is in its own part of the data."""

    def __init__(self, rank: int) -> None:
        self.rank, self.at = rank, 0

    def state_dict(self) -> dict[str, int]:
        """To be saved."""
        return {"rank": self.rank, "at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """As it was saved."""
        self.rank, self.at = state["rank"], state["at"]

    def batch(self) -> torch.Tensor:
        """The next one."""
        self.at += 1
        return torch.sin(torch.arange(48.0).reshape(8, 6) * (self.rank + 1) + self.at)


def resolved(tensor: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    """What a communication hook returns that leaves gradients as they are."""
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(tensor)
    return done


def main(url: str, every: str, store_every: str, pause_s: str, steps: str) -> None:
    """Train, die, train on."""
    dist.init_process_group("gloo")
    rank, folder = dist.get_rank(), Path(os.environ["FOLDER"])
    torch.manual_seed(7)
    torch.set_num_threads(1)
    model = torch.nn.Sequential(torch.nn.Linear(6, 64), torch.nn.Dropout(0.2), torch.nn.Linear(64, 3))
    model.register_buffer("mean", torch.zeros(3))
    ranks = DistributedDataParallel(model)
    ranks.register_comm_hook(None, lambda _state, bucket: resolved(bucket.buffer()))
    torch.manual_seed(rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    sampler = Sampler(rank)
    with (
        (folder / f"told-{rank}").open("a", buffering=1) as file,
        FlashCheckpoint(
            url,
            model=ranks,
            optimizer=optimizer,
            extra=sampler,
            every=int(every),
            store_every=int(store_every),
            keep=500,
        ) as ckpt,
    ):

        def tell(**told: Any) -> None:
            file.write(json.dumps(told) + "\n")

        step = ckpt.restore()
        tell(restored=step, tier=ckpt.tier, sampler=[sampler.rank, sampler.at])
        go_on = torch.ones(1)
        while go_on:
            optimizer.zero_grad()
            loss = (ranks(sampler.batch()) - model.mean).square().mean()
            loss.backward()
            for one in model.parameters():
                dist.all_reduce(one.grad)
            optimizer.step()
            model.mean += 0.01 * sampler.batch().mean()  # differs from rank to rank, as a BatchNorm's does
            step += 1
            ckpt.step(step)
            tell(step=step, loss=loss.item())
            time.sleep(float(pause_s))  # what a step of a real model takes
            go_on[0] = step != int(steps) if int(steps) else not (folder / "finish").exists()
            dist.broadcast(go_on, 0)
        tell(ended=step, skipped=ckpt.stats.skipped)
    del ranks, model
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
