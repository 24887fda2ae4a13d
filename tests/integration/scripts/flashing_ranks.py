"""Trains a DDP or an FSDP2 model under FlashCheckpoint: KIND (ddp, fsdp), STEPS, EVERY, URL, KILLED ("-" or RANK:STEP).

The rank KILLED dies by SIGKILL, in the first generation, after it has asked for the save of that step. Every rank appends to
``$FOLDER/told-RANK`` what it restored, and what it had at its end, as one digest of all that counts.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from dlrover_adapters.torch import FlashCheckpoint


def digest(model: Any, optimizer: Any) -> str:
    """Of this rank's weights, moments and generator."""
    found = hashlib.blake2b(torch.get_rng_state().numpy().tobytes())
    tensors = [*model.state_dict().values()]
    for state in optimizer.state.values():
        tensors += [state[key] for key in sorted(state)]
    for one in tensors:
        here = getattr(one, "_local_tensor", one)
        found.update(here.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def main(kind: str, steps: str, every: str, url: str, killed: str) -> None:
    """Train, die, train on."""
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    again = os.environ["TORCHELASTIC_RESTART_COUNT"] != "0"
    torch.manual_seed(5 if again else rank)
    torch.set_num_threads(1)
    layers = [torch.nn.Linear(6, 64), torch.nn.BatchNorm1d(64), torch.nn.Dropout(0.2), torch.nn.Linear(64, 3)]
    if kind == "fsdp":
        layers.pop(1)
    model: Any = torch.nn.Sequential(*layers)
    if kind == "fsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    else:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    told = Path(os.environ["FOLDER"]) / f"told-{rank}"
    with FlashCheckpoint(
        url, model=model, optimizer=optimizer, scheduler=scheduler, every=int(every), store_every=0
    ) as ckpt:
        step = ckpt.restore()
        with told.open("a") as file:
            file.write(json.dumps({"restored": step, "tier": ckpt.tier, "again": again}) + "\n")
        while step < int(steps):
            optimizer.zero_grad()
            model(torch.randn(8, 6)).square().mean().backward()
            optimizer.step()
            scheduler.step()
            step += 1
            ckpt.step(step)
            if not again and killed == f"{rank}:{step}":
                os.kill(os.getpid(), signal.SIGKILL)
        ckpt.wait()
        stats = ckpt.stats
    with told.open("a") as file:
        file.write(
            json.dumps({"digest": digest(model, optimizer), "saves": stats.saves, "skipped": stats.skipped}) + "\n"
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
    dist.destroy_process_group()  # without a DDP model that would outlive it, and may hang in that (torch 2.13, gloo)
