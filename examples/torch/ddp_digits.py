"""Train a small network on real handwritten digits with DDP over gloo, with an ordinary checkpoint file.

    dlrover-run --nproc-per-node 2 --preload sklearn.datasets examples/torch/ddp_digits.py --checkpoint /tmp/digits.pt
    torchrun    --nproc-per-node 2                            examples/torch/ddp_digits.py --checkpoint /tmp/digits.pt

Nothing here knows who launched it; `dlrover_adapters.torch.step` only tells the step's own number, so that it survives a
restart in the reports too, and is left out where the package is not there. Run again with the same checkpoint, it goes on
from there. Needs scikit-learn.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel

try:
    from dlrover_adapters.torch import step as report_step
except ImportError:  # under plain torchrun

    def report_step(number: int) -> None:
        """Nobody listens."""


def data() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The digits, 1,797 images of 8 x 8, every fifth held out: training and held-out images and labels."""
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16.0
    labels = torch.tensor(digits.target)
    held_out = torch.arange(len(labels)) % 5 == 0
    return images[~held_out], labels[~held_out], images[held_out], labels[held_out]


def save(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Write the checkpoint whole or not at all: a killed process leaves the one before."""
    part = path.with_suffix(".part")
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, part)
    part.replace(path)


def train(options: argparse.Namespace) -> None:
    """Train, and print the accuracy on the held-out digits."""
    rank, world = dist.get_rank(), dist.get_world_size()
    images, labels, test_images, test_labels = data()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    start = 0
    if options.checkpoint.exists():
        saved = torch.load(options.checkpoint, weights_only=True)
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        start = saved["step"]
    for step in range(start + 1, options.steps + 1):
        # Which images a step sees depends on its number alone: a step made again is the same step.
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(step))
        batch = order[rank::world][: options.batch]
        loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        report_step(step)
        if rank == 0 and options.curve is not None:
            with options.curve.open("a") as curve:
                curve.write(f"{step} {loss.item().hex()}\n")
        if rank == 0 and step % options.save_every == 0:
            save(options.checkpoint, model.module, optimizer, step)
        time.sleep(options.pause)
    if rank == 0:
        with torch.no_grad():
            accuracy = (model.module(test_images).argmax(1) == test_labels).float().mean().item()
        print(f"accuracy on {len(test_labels)} held-out digits: {accuracy:.4f} after {options.steps} steps", flush=True)


def main() -> None:
    """Join the others, train, and leave them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds added to every step, to have time to watch")
    parser.add_argument("--curve", type=Path, help="rank 0 appends each step and its loss, exactly, to this file")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    train(options)
    # After `train`, when the model is gone: one that outlives its group can hang where it ends (torch 2.13: DDP over gloo).
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
