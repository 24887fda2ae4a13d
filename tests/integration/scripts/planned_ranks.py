"""Trains a small model on one fixed batch, of which every rank has all: the losses are the same whatever the world's size is.

KIND (ddp, fsdp), FOLDER, STEPS (0: until ``FOLDER/finish`` is there). Every rank appends to ``FOLDER/told-RANK`` where its life
began and each step as it is made. KIND "alone" trains STEPS in one process, with nothing of ours, and prints the losses.

A fourth word says what is done once rank 0 has chosen the next step for a boundary: "leave": training ends with this one;
"hold": the last rank comes to it, but does not call ``ckpt.step`` as long as ``FOLDER/hold`` is there. "deaf": nothing, but
SIGTERM is not heeded. States go to where ``STATES_URL`` says; without it they stay in memory.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

PACE_S = 0.02


def made() -> tuple[Any, torch.Tensor, torch.Tensor]:
    """The model before its first step, and the batch."""
    torch.manual_seed(7)
    torch.set_num_threads(1)
    model = torch.nn.Sequential(torch.nn.Linear(6, 64), torch.nn.Tanh(), torch.nn.Linear(64, 4))
    return model, torch.randn(32, 6), torch.randn(32, 4)


def losses(model: Any, optimizer: Any, inputs: torch.Tensor, targets: torch.Tensor) -> Iterator[str]:
    """One step each: the loss before it, to the last bit."""
    while True:
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        yield loss.item().hex()


def alone(steps: int) -> None:
    """What the losses must be."""
    model, inputs, targets = made()
    found = losses(model, torch.optim.AdamW(model.parameters(), lr=0.001), inputs, targets)
    for _ in range(steps):
        sys.stdout.write(f"{next(found)}\n")


def train(kind: str, folder: Path, steps: int, at_boundary: str = "") -> None:
    """One rank's life."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    from dlrover_adapters.torch import FlashCheckpoint

    if at_boundary == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    told = os.open(folder / f"told-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def tell(**what: object) -> None:
        os.write(told, f"{json.dumps(what)}\n".encode())

    model, inputs, targets = made()
    if kind == "fsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    else:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
    life, heard = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), torch.zeros(2)
    with FlashCheckpoint(os.environ.get("STATES_URL", ""), model=model, optimizer=optimizer, every=5) as ckpt:
        step = ckpt.restore()
        tell(life=life, world=world, began=step, tier=ckpt.tier)
        found = losses(model, optimizer, inputs, targets)
        while not heard[0].item() and (step < steps or not steps):
            loss = next(found)
            step += 1
            tell(life=life, step=step, loss=loss, at=time.monotonic())
            while at_boundary == "hold" and heard[1].item() and rank == world - 1 and (folder / "hold").exists():
                time.sleep(PACE_S)
            ckpt.step(step)
            # All end with the same step, and know alike what rank 0 has chosen.
            chosen = rank == 0 and ckpt._boundary._at == ckpt._call + 1
            ends = (folder / "finish").exists() or (at_boundary == "leave" and chosen)
            heard[0], heard[1] = float(ends), float(chosen)
            dist.all_reduce(heard)
            time.sleep(PACE_S)
    tell(life=life, ended=step)


if __name__ == "__main__":
    if sys.argv[1] == "alone":
        alone(int(sys.argv[2]))
    else:
        train(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
        dist.destroy_process_group()  # without a DDP model that would outlive it, and may hang in that (torch 2.13, gloo)
