"""A training loop of Ray Train, carried over: what had to change is marked with ``# was:``.

    dlrover-run --backend ray --nnodes 2 --resources CPU=1 examples/ray/torch_trainer.py --checkpoint /shared/points --die-at 30

What Ray Train does is done elsewhere now: `dlrover-run` places the workers (``ScalingConfig``), restarts them
(``FailureConfig``) and sets torch's own variables; the model's state lies in memory every few steps and is stored on the way.
Rank 1 kills itself after step ``--die-at``, once, and training goes on from the newest step.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel  # was: from ray.train.torch import TorchTrainer, prepare_model

from dlrover_adapters.torch import (
    FlashCheckpoint,  # was: from ray.train import Checkpoint, get_checkpoint, get_context, report
)

POINTS, BATCH = 512, 16


def points() -> tuple[torch.Tensor, torch.Tensor]:
    """What is to be learnt."""
    x = torch.linspace(0.0, 1.0, POINTS).unsqueeze(1)
    return x, torch.sin(6 * x)


def train_loop(config: dict[str, Any]) -> None:
    """What every worker runs; ``config`` is as Ray Train hands it over."""
    rank, world = dist.get_rank(), dist.get_world_size()  # was: get_context().get_world_rank(), .get_world_size()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 1))
    model = DistributedDataParallel(net)  # was: prepare_model(net)
    optimizer = torch.optim.Adam(model.parameters(), lr=config["lr"])
    # was: with get_checkpoint().as_directory() as folder: torch.load(...), and load_state_dict of both
    ckpt = FlashCheckpoint(config["checkpoint"], model=model, optimizer=optimizer, every=5, store_every=20)
    start = ckpt.restore()
    x, wanted = points()
    for step in range(start + 1, config["steps"] + 1):
        order = torch.randperm(POINTS, generator=torch.Generator().manual_seed(step))
        batch = order[rank::world][:BATCH]
        loss = nn.functional.mse_loss(model(x[batch]), wanted[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        # was: torch.save(...) into a temporary folder, and report({"loss": ...}, checkpoint=Checkpoint.from_directory(folder))
        ckpt.step(step)
        if step == config["die_at"] and rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(config["pause"])
    if rank == 0:
        print(f"{world} ranks, {config['steps']} steps: loss {loss.item():.4f}; restored from step {start}", flush=True)


def main() -> None:
    """Read the command line, and train."""
    parser = argparse.ArgumentParser(description="A training loop of Ray Train, carried over.")
    parser.add_argument("--checkpoint", type=Path, required=True, help="a folder that all hosts share")
    parser.add_argument("--steps", type=int, default=60, help="steps in all (default: 60)")
    parser.add_argument("--lr", type=float, default=1e-2, help="learning rate (default: 0.01)")
    parser.add_argument(
        "--pause", type=float, default=0.0, help="seconds that a step takes beside its work (default: 0)"
    )
    parser.add_argument(
        "--die-at", type=int, default=0, help="the step after which rank 1 kills itself (default: never)"
    )
    config = vars(parser.parse_args())
    dist.init_process_group("gloo")
    train_loop(
        config
    )  # was: TorchTrainer(train_loop, train_loop_config=config, scaling_config=..., run_config=...).fit()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
