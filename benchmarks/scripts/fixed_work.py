"""The same work at every step, and how long the steps took: DDP over gloo, and matrix products that keep a core busy.

Rank 0 writes the nanoseconds at which each step ended, by CLOCK_MONOTONIC, into ``--diary``, one a line, at the very end: while
it is measured it writes nothing.
"""

import argparse
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

SIDE = 96


def work(count: int, matrix: torch.Tensor) -> None:
    """Keep this core busy."""
    for _ in range(count):
        torch.mm(matrix, matrix)


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--diary", type=Path, required=True)
    parser.add_argument("--checkpoint", type=Path, help="not used")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--work", type=int, required=True, help="matrix products a step")
    parser.add_argument("--lines", type=int, default=0, help="lines printed a step")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    model = DistributedDataParallel(nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    rows, matrix, ends = torch.randn(16, 64), torch.randn(SIDE, SIDE), list[int]()
    for step in range(options.steps):
        for line in range(options.lines):
            print(f"[rank{dist.get_rank()}] step {step} loss {1 / (step + 1):.6f} lr 1.0e-03 line {line}")
        work(options.work, matrix)
        optimizer.zero_grad()
        model(rows).square().mean().backward()
        optimizer.step()
        ends.append(time.monotonic_ns())
    if dist.get_rank() == 0:
        options.diary.write_text("\n".join(map(str, ends)))
    dist.barrier()
    del model  # one that outlives its group may hang in that (torch 2.13, gloo)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
