"""Trains an FSDP2 or DDP model for three steps and saves it, or restores it: KIND (fsdp, ddp), VERB (save, restore), URL, STORE.

RANK and WORLD_SIZE in the environment. Rank 0 writes all tensors of model and optimizer, and the data position, beside the store.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from dlrover_adapters.torch import FlashCheckpoint

STEPS = 3


class Position:
    """Where in its data a run is."""

    def __init__(self) -> None:
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        """As it is."""
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """As it was."""
        self.at = state["at"]


def main(kind: str, verb: str, url: str, store: str) -> None:
    """Train and save, or restore."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    torch.manual_seed(0 if verb == "save" else 1)
    # Rows that divide by neither world's size.
    model: Any = torch.nn.Sequential(
        torch.nn.Linear(6, 11), torch.nn.BatchNorm1d(11, track_running_stats=kind == "ddp"), torch.nn.Linear(11, 7)
    )
    if kind == "fsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    else:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    position = Position()
    checkpoint = FlashCheckpoint(url, model=model, optimizer=optimizer, extra=position, every=2)
    step = checkpoint.restore()
    assert step == (0 if verb == "save" else STEPS), step
    if verb == "save":
        for number in range(1, STEPS + 1):
            optimizer.zero_grad()
            model(torch.randn(8, 6, generator=torch.Generator().manual_seed(number))).square().mean().backward()
            optimizer.step()
            position.at += 8
        assert checkpoint.save(STEPS)
        checkpoint.wait()
    whole = StateDictOptions(full_state_dict=True)
    weights, state = get_state_dict(model, optimizer, options=whole)
    if rank == 0:
        torch.save({"model": weights, "optimizer": state, "at": position.at}, f"{store}.found")
    checkpoint.close()
    dist.barrier()


if __name__ == "__main__":
    main(*sys.argv[1:])
    dist.destroy_process_group()  # without a DDP model that would outlive it, and may hang in that (torch 2.13, gloo)
