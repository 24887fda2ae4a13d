"""Train with as many nodes as there are: start with one, let a second join while it runs, and learn the same.

    dlrover-run --job-id elastic examples/torch/elastic_join.py --checkpoint /tmp/elastic.pt
    dlrover scale elastic worker=2                                  # in another shell, while it runs
    torchrun --nnodes 1:2 --rdzv-backend c10d --rdzv-endpoint HOST:29400 --rdzv-id elastic --max-restarts 3
        examples/torch/elastic_join.py --checkpoint /tmp/elastic.pt # one line, on each host; the second one later

When a node joins, the processes of the smaller world are stopped and those of the larger one begin at the checkpoint. What
stays the same whatever the world size W, so that the curve does:

* The global batch. A step has --batch rows; rank r takes rows r, r + W, r + 2 W, ... Shares may differ by a row.
* The learning rate, because the global batch does not change. (If a share per rank is fixed instead, the batch grows with W, and
  the rate must follow by whatever rule one believes in.)
* The gradient. DDP averages over ranks, so a rank's loss is the sum over its n rows times W / batch: the mean of that over the
  ranks is the mean over the batch, however unevenly it is divided.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

try:
    from dlrover_adapters.torch import step as report_step
except ImportError:  # under plain torchrun

    def report_step(number: int) -> None:
        """Nobody listens."""


HELD_OUT = 2000


def batch_of(step: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of a step, by its number alone: points of the plane, and on which arm of a spiral each lies."""
    chance = torch.Generator().manual_seed(step)
    arm = torch.randint(2, (size,), generator=chance)
    turn = torch.rand(size, generator=chance) * 1.5 * math.pi + 0.5
    angle = turn + arm * math.pi
    points = torch.stack((turn * angle.cos(), turn * angle.sin()), 1) / 5
    return points + 0.02 * torch.randn(size, 2, generator=chance), arm


def save(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Write the checkpoint whole or not at all."""
    part = path.with_suffix(".part")
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, part)
    part.replace(path)


def train(options: argparse.Namespace) -> None:
    """Train; rank 0 says how large the world is, whenever it begins."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    start = 0
    if options.checkpoint.exists():
        saved = torch.load(options.checkpoint, weights_only=True)
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        start = saved["step"]
    if rank == 0:
        share = f"{options.batch} rows a step, {math.ceil(options.batch / world)} on this rank"
        print(f"world of {world} from step {start + 1}: {share}", flush=True)
    step = start
    while step < options.steps or world < options.until_joined:
        step += 1
        points, arms = batch_of(step, options.batch)
        loss = nn.functional.cross_entropy(model(points[rank::world]), arms[rank::world], reduction="sum")
        optimizer.zero_grad()
        (loss * world / options.batch).backward()
        optimizer.step()
        report_step(step)
        if rank == 0 and step % options.save_every == 0:
            save(options.checkpoint, model.module, optimizer, step)
        time.sleep(options.pause)
    if rank == 0:
        points, arms = batch_of(0, HELD_OUT)  # no step has this number
        with torch.no_grad():
            left = nn.functional.cross_entropy(model.module(points), arms).item()
        print(f"done after step {step} in a world of {world}: loss on {HELD_OUT} other points {left:.4f}", flush=True)


def main() -> None:
    """Join the others, train, and leave them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=65, help="rows of a step, in all")
    parser.add_argument("--save-every", type=int, default=5)
    parser.add_argument("--checkpoint", type=Path, required=True, help="on a file system that all nodes share")
    parser.add_argument("--pause", type=float, default=0.02, help="seconds added to every step, to have time to join")
    parser.add_argument("--until-joined", type=int, default=0, help="go on after --steps until the world is this large")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    train(options)
    # After `train`, when the model is gone: one that outlives its group can hang where it ends (torch 2.13: DDP over gloo).
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
