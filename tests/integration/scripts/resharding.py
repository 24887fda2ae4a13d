"""Loads a checkpoint with plain torch into DTensors and an FSDP2 model: FOLDER STORE; RANK and WORLD_SIZE in the environment."""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor


def main(folder: str, store: str) -> None:
    """Load; rank 0 writes what it found beside the store."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,))
    model = torch.nn.Linear(4, 10)
    fully_shard(model, mesh=mesh)
    moment = distribute_tensor(torch.zeros(10, 4, dtype=torch.float64), mesh, [Shard(1)])
    target = {"model": model.state_dict(), "optimizer": {"state": {"weight": {"exp_avg": moment}}}}
    dcp.load(target, checkpoint_id=folder)
    weight = target["model"]["weight"]
    assert isinstance(weight, DTensor)
    assert weight.to_local().shape[0] <= -(-10 // world)
    found = {"weight": weight.full_tensor(), "moment": moment.full_tensor()}
    if rank == 0:
        torch.save(found, f"{store}.found")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
