"""Train a small network on real handwritten digits, saved in memory every few steps, with one worker killed on the way.

    dlrover-run --nproc-per-node 2 examples/torch/flash_checkpoint.py --checkpoint /tmp/digits --die-at 60
    torchrun    --nproc-per-node 2 --max-restarts 1 examples/torch/flash_checkpoint.py --checkpoint /tmp/digits --die-at 60

Rank 1 kills itself after the given step, once. Under dlrover-run the memory outlives it, and training goes on from the newest
step that both ranks hold, a step or two before; under torchrun there is nobody to keep it, and training goes on from storage.
With dropout, batch norm and a scheduler in it the losses are those of an undisturbed run all the same. Needs scikit-learn.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dlrover_adapters.torch import FlashCheckpoint


def train(options: argparse.Namespace) -> None:
    """Train, die once if told to, and print the accuracy on the held-out digits."""
    rank, world = dist.get_rank(), dist.get_world_size()
    digits = load_digits()
    images, labels = torch.tensor(digits.data, dtype=torch.float32) / 16.0, torch.tensor(digits.target)
    held_out = torch.arange(len(labels)) % 5 == 0
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 10))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 50, 0.7)
    torch.manual_seed(rank)  # dropout differs from rank to rank, and is restored with the rest

    ckpt = FlashCheckpoint(
        options.checkpoint,
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        every=options.every,
        store_every=options.store_every,
        keep=2,
    )
    start = ckpt.restore()
    if rank == 0:
        print(f"begins after step {start}, restored from {ckpt.tier}" if start else "begins anew", flush=True)
    for step in range(start + 1, options.steps + 1):
        # Which images a step sees depends on its number alone: a step made again is the same step.
        order = torch.randperm(int((~held_out).sum()), generator=torch.Generator().manual_seed(step))
        batch = order[rank::world][:64]
        loss = nn.functional.cross_entropy(model(images[~held_out][batch]), labels[~held_out][batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        if rank == 0 and options.curve is not None:
            with options.curve.open("a") as curve:
                curve.write(f"{step} {loss.item().hex()}\n")
        ckpt.step(step)
        time.sleep(options.pause)
        if step == options.die_at and rank == 1 and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
            os.kill(os.getpid(), signal.SIGKILL)
    ckpt.close()
    if rank == 0:
        net.eval()
        with torch.no_grad():
            accuracy = (net(images[held_out]).argmax(1) == labels[held_out]).float().mean().item()
        print(
            f"accuracy on {int(held_out.sum())} held-out digits: {accuracy:.4f} after {options.steps} steps", flush=True
        )


def main() -> None:
    """Join the others, train, and leave them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--checkpoint", required=True, help="where: a URL or a folder")
    parser.add_argument("--every", type=int, default=2, help="steps between saves into memory")
    parser.add_argument("--store-every", type=int, default=50, help="steps between saves to storage")
    parser.add_argument("--die-at", type=int, default=0, help="rank 1 kills itself after this step, once")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds added to every step, to have time to watch")
    parser.add_argument("--curve", type=Path, help="rank 0 appends each step and its loss, exactly, to this file")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    train(options)
    # After `train`, when the model is gone: one that outlives its group can hang where it ends (torch 2.13: DDP over gloo).
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
