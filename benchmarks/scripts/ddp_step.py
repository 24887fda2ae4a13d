"""A plain torchrun script, the same under every launcher: DDP over gloo, a checkpoint file, and a line for all that it does.

Each line is ``what attempt rank pid step nanoseconds``, by CLOCK_MONOTONIC, which all processes of a host share; every rank
appends to the same file. ``what``: begin (the script's first line), imported (torch is there), grouped (the process group is
up), ready (model, optimizer and checkpoint are), step (the optimizer has made it), end.
"""

import os
import time

BEGAN = time.monotonic_ns()

import argparse  # noqa: E402
import signal  # noqa: E402
from pathlib import Path  # noqa: E402
from types import FrameType  # noqa: E402

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from diary import Diary  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

IMPORTED = time.monotonic_ns()


def on_sigterm(number: int, _: FrameType | None) -> None:
    """What a careful script does: leave by an exception, so that its ``finally`` blocks run."""
    raise SystemExit(128 + number)


def save(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Write the checkpoint whole or not at all."""
    part = path.with_suffix(".part")
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, part)
    part.replace(path)


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--diary", type=Path, required=True)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--save-every", type=int, default=5)
    parser.add_argument("--pause", type=float, default=0.005, help="seconds added to every step")
    parser.add_argument("--sigterm", action="store_true", help="install a SIGTERM handler")
    options = parser.parse_args()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    diary = Diary(options.diary, rank)
    diary.note("begin", 0, BEGAN)
    diary.note("imported", 0, IMPORTED)
    if options.sigterm:
        signal.signal(signal.SIGTERM, on_sigterm)
    dist.init_process_group("gloo")
    diary.note("grouped", 0)
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    start = 0
    if options.checkpoint.exists():
        saved = torch.load(options.checkpoint, weights_only=True)
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        start = saved["step"]
    diary.note("ready", start)
    for step in range(start + 1, options.steps + 1):
        chance = torch.Generator().manual_seed(step * world + rank)
        loss = model(torch.randn(64, 64, generator=chance)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        diary.note("step", step)
        if rank == 0 and step % options.save_every == 0:
            save(options.checkpoint, model.module, optimizer, step)
        time.sleep(options.pause)
    del model  # one that outlives its group may hang in that (torch 2.13, gloo)
    dist.destroy_process_group()
    diary.note("end", options.steps)


if __name__ == "__main__":
    main()
