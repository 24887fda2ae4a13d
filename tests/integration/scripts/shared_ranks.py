"""Trains an FSDP2 model, one rank on each node, under FlashCheckpoint, until ``$FOLDER/finish`` is there.

Every rank appends to ``$FOLDER/told-RANK``: what it restored and from where, the digest of all that counts at every step that it
saves, and of which steps its node has another node's share.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from flashing_ranks import digest
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from dlrover_adapters.torch import FlashCheckpoint
from dlrover_adapters.torch.checkpoint.vault import Vault

STEP_S = 0.05


def main() -> None:
    """Train, lose a node, train on."""
    dist.init_process_group("gloo")
    rank, world, folder = dist.get_rank(), dist.get_world_size(), Path(os.environ["FOLDER"])
    torch.manual_seed(rank)
    torch.set_num_threads(1)
    model: Any = torch.nn.Sequential(torch.nn.Linear(6, 64), torch.nn.Dropout(0.2), torch.nn.Linear(64, 3))
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    vault = Vault.connect()
    generation = vault.told.generation
    with (
        (folder / f"told-{rank}").open("a", buffering=1) as file,
        FlashCheckpoint("", model=model, optimizer=optimizer, every=2, store_every=0) as ckpt,
    ):

        def tell(**told: Any) -> None:
            file.write(json.dumps({"generation": generation, **told}) + "\n")

        step = ckpt.restore()
        tell(restored=step, tier=ckpt.tier, digest=digest(model, optimizer))
        go_on = torch.ones(1)
        while go_on:
            optimizer.zero_grad()
            model(torch.randn(8, 6)).square().mean().backward()
            optimizer.step()
            step += 1
            ckpt.step(step)
            if step % 2 == 0:
                tell(step=step, digest=digest(model, optimizer))
            if step % 10 == 0:
                held = vault.inventory().holdings
                tell(copies=[one.step for one in held if one.kind == "replica" and one.generation == generation])
            time.sleep(STEP_S)  # what a step of a real model takes
            go_on[0] = not (folder / "finish").exists()
            dist.broadcast(go_on, 0)
        tell(ended=step, skipped=ckpt.stats.skipped)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
