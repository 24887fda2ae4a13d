"""Train a model whose loss curve shows every fault of a restored state: weights, random numbers, and each rank's own sampler.

    stormy.py URL [--every 5] [--store-every 50] [--pause 0.1]     under dlrover-run; it ends when FOLDER/finish exists
    stormy.py --control STEPS --ranks 4                            the undisturbed control: plain torch, nothing of ours

Each rank draws its batches from its own sampler (`extra` of the checkpoint), and its dropout masks from its own generators.
Gradients go through one all-reduce per parameter. DDP would rebuild its buckets after its first step, and so sum in another
order after every restart.

A rank for which there is a file ``FOLDER/eat-PID`` takes all the memory that it can get.

Every life of a rank writes a file of its own, ``FOLDER/curve-RANK-PID-TIME``, as process numbers are used again: a line
``begin`` with what it restored, and for each step the loss as float.hex(), the sampler's position, a digest of random numbers,
and the time. FOLDER is of the environment.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import time
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

BATCH, FEATURES, WIDTH = 8, 8, 64
APART = 1_000_000
"""Between the first positions of two ranks' samplers: no rank ever reads where another one does."""

LOOK_STEPS = 5
EAT_BYTES = 1 << 24


class Sampler:
    """Where a rank is in its own share of the data."""

    def __init__(self, rank: int) -> None:
        self.at, self._stride = APART * (rank + 1), rank + 1

    def batch(self) -> torch.Tensor:
        """The next batch."""
        drawn = torch.Generator().manual_seed(self.at)
        self.at += self._stride
        return torch.randn(BATCH, FEATURES, generator=drawn)

    def state_dict(self) -> dict[str, int]:
        """The position."""
        return {"at": self.at}

    def load_state_dict(self, saved: dict[str, int]) -> None:
        """Go there."""
        self.at = saved["at"]


class Checkpoint(Protocol):
    """What is called after each step."""

    def step(self, step: int) -> None:
        """Step ``step`` is done."""


class Parts:
    """One rank's model, optimizer, sampler and generators, as they are before the first step."""

    def __init__(self, rank: int) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        first, last = (nn.Linear(*shape, bias=False) for shape in ((FEATURES, WIDTH), (WIDTH, FEATURES)))
        self.model = nn.Sequential(first, nn.Tanh(), nn.Dropout(0.2), last)  # two collectives a step are slow enough
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.sampler = Sampler(rank)
        torch.manual_seed(1000 + rank)
        random.seed(2000 + rank)
        np.random.seed(3000 + rank)  # noqa: NPY002 - the global one is what a checkpoint saves


def draws() -> str:
    """A digest of the next numbers of all three global generators."""
    drawn = (torch.rand(2).tolist(), random.random(), float(np.random.rand()))  # noqa: NPY002 - as above
    return hashlib.sha256(repr(drawn).encode()).hexdigest()[:16]


def made(parts: Parts, world: int) -> str:
    """Make one step; its loss, position and digest."""
    parts.optimizer.zero_grad()
    batch = parts.sampler.batch()
    loss = (parts.model(batch) - batch.roll(1, 1)).square().mean()
    loss.backward()
    for one in parts.model.parameters():
        assert one.grad is not None
        dist.all_reduce(one.grad)
        one.grad /= world
    parts.optimizer.step()
    return f"{loss.item().hex()} {parts.sampler.at} {draws()}"


def together(so: bool) -> bool:
    """Is it so on any rank?"""
    ranks = torch.tensor([float(so)])
    dist.all_reduce(ranks)
    return bool(ranks)


def eat() -> None:
    """Take memory until the kernel ends this process: its control group has a limit."""
    eaten = []
    while True:
        eaten.append(b"x" * EAT_BYTES)


def train(parts: Parts, ckpt: Checkpoint | None, step: int, steps: int, pause: float) -> int:
    """Steps from ``step`` on, to ``steps``, or until FOLDER/finish exists where that is 0; the last one."""
    folder, rank, world = Path(os.environ["FOLDER"]), dist.get_rank(), dist.get_world_size()
    told = os.open(folder / f"curve-{rank}-{os.getpid()}-{time.monotonic_ns()}", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    if ckpt is not None:
        tier, stored = getattr(ckpt, "tier", ""), int(os.environ.get("STORED", "0"))
        os.write(told, f"begin {step} {tier or 'nothing'} {stored} {time.monotonic_ns()}\n".encode())
    over = False
    while True:
        if steps:
            over = step >= steps
        elif step % LOOK_STEPS == 0:
            over = together((folder / "finish").exists())
        if over:
            return step
        if (folder / f"eat-{os.getpid()}").exists():
            eat()
        found = made(parts, world)
        step += 1
        os.write(told, f"{step} {found} {time.monotonic_ns()}\n".encode())
        if ckpt is not None:
            ckpt.step(step)
        if pause:
            time.sleep(pause)  # what a step of a real model takes


def newest_stored(url: str) -> int:
    """The newest step that is sealed on storage; 0 where there is none."""
    return max(
        (int(one.parent.name.removeprefix("step-")) for one in Path(url).glob("step-*/manifest.json")), default=0
    )


def job(options: argparse.Namespace) -> None:
    """A rank under `dlrover-run`."""
    from dlrover_adapters.torch import FlashCheckpoint

    os.environ["STORED"] = str(newest_stored(options.url))
    dist.init_process_group("gloo")
    parts = Parts(dist.get_rank())
    with FlashCheckpoint(
        options.url, model=parts.model, optimizer=parts.optimizer, extra=parts.sampler,
        every=options.every, store_every=options.store_every, keep=options.keep,
    ) as ckpt:  # fmt: skip
        step = train(parts, ckpt, ckpt.restore(), options.steps, options.pause)
        ckpt.save(step)
    dist.destroy_process_group()


def control(steps: int, ranks: int) -> None:
    """Be rank 0 of an undisturbed run, and fork the others."""
    meet = Path(os.environ["FOLDER"]) / "meet"
    rank, pids = 0, list[int]()
    while len(pids) < ranks - 1 and not rank:
        pids.append(os.fork())
        rank = len(pids) if not pids[-1] else 0
    dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=ranks)
    train(Parts(rank), None, 0, steps, 0.0)
    dist.barrier()
    os._exit(any(os.waitpid(pid, 0)[1] for pid in pids) if not rank else 0)  # the group's destructor may hang


def main() -> None:
    """As the first lines say."""
    parser = argparse.ArgumentParser()
    parser.add_argument("url", nargs="?", default="")
    parser.add_argument("--every", type=int, default=5)
    parser.add_argument("--store-every", type=int, default=50)
    parser.add_argument("--keep", type=int, default=3)
    parser.add_argument("--pause", type=float, default=0.1, help="seconds after each step")
    parser.add_argument("--steps", type=int, default=0, help="end after so many (default: when FOLDER/finish exists)")
    parser.add_argument("--control", type=int, default=0, help="steps of the undisturbed control")
    parser.add_argument("--ranks", type=int, default=4, help="of the control")
    options = parser.parse_args()
    if options.control:
        control(options.control, options.ranks)
    else:
        job(options)


if __name__ == "__main__":
    main()
