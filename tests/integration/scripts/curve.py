"""Train a small model whose every loss depends on all steps before it; whatever goes wrong with its state shows in the curve.

Weights, momentum, position and the state of a random generator are saved at every step, whole or not at all. Rank 0 appends
``step loss generation pid nanoseconds`` to FOLDER/curve and prints it; a script that was disturbed must write the same losses
as one that was not. Every rank notes where it is in FOLDER/told-RANK, and waits there while FOLDER/hold-WHERE-RANK exists:
``begin`` (its first line), ``formed`` (the process group is up), ``done`` (all steps are made), ``left`` (the group is gone).

It ends after ``--steps``, or when FOLDER/finish exists. ``--loader``: batches come from a child process.
"""

from __future__ import annotations

import argparse
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from dlrover_adapters.torch import step as tell_step

FOLDER, RANK = Path(os.environ["FOLDER"]), int(os.environ["RANK"])
GENERATION = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
BATCH, FEATURES = 8, 16
PADDING = "." * 1000  # so that a disk without room is felt within a few steps


class Numbers(Dataset[torch.Tensor]):
    """The batch of each step, which is its index."""

    def __getitem__(self, index: int) -> torch.Tensor:
        """All ranks' rows."""
        return torch.randn(2 * BATCH, FEATURES, generator=torch.Generator().manual_seed(index))


def tell(*words: object) -> None:
    """Write a line for the test."""
    with (FOLDER / f"told-{RANK}").open("a") as file:
        file.write(" ".join(map(str, words)) + "\n")


def pass_by(where: str) -> None:
    """Note this place, and wait here as long as the test says so."""
    tell(where, os.getpid(), GENERATION, time.monotonic_ns())
    while (FOLDER / f"hold-{where}-{RANK}").exists():
        time.sleep(0.005)


def leave_when_told() -> None:
    """Upon SIGTERM a careful script ends by itself; where the test says so, not at once.

    By a thread: a rank whose partner has left already waits for it in a collective, and no handler of Python's runs there.
    """
    ear, mouth = os.pipe()
    os.set_blocking(mouth, False)
    signal.set_wakeup_fd(mouth, warn_on_full_buffer=False)
    signal.signal(signal.SIGTERM, lambda *_: None)
    threading.Thread(target=leave, args=(ear,), daemon=True).start()


def leave(ear: int) -> None:
    """Once SIGTERM is heard."""
    while os.read(ear, 1)[0] != signal.SIGTERM:
        pass
    tell("terminated", os.getpid(), signal.SIGTERM.name)
    while (FOLDER / f"hold-terminated-{RANK}").exists():
        time.sleep(0.005)
    os._exit(0)


def save(state: dict[str, Any]) -> None:
    """Write the checkpoint whole or not at all."""
    part = FOLDER / "state.part"
    torch.save(state, part)
    part.replace(FOLDER / "state.pt")


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds added to every step")
    parser.add_argument("--loader", action="store_true")
    options = parser.parse_args()
    leave_when_told()
    pass_by("begin")
    dist.init_process_group("gloo")
    pass_by("formed")
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    noise, start = torch.Generator().manual_seed(7), 0
    if (FOLDER / "state.pt").exists():
        saved = torch.load(FOLDER / "state.pt", weights_only=True)
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        noise.set_state(saved["noise"])
        start = saved["step"]
    numbers = Numbers()
    indices = range(start + 1, options.steps + 1)
    batches = (
        iter(DataLoader(numbers, batch_size=None, sampler=indices, num_workers=1))
        if options.loader
        else map(numbers.__getitem__, indices)
    )
    curve = os.open(FOLDER / "curve", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    over = torch.zeros(1)
    for step, batch in zip(indices, batches, strict=False):
        rows = (batch + 0.1 * torch.randn(batch.shape, generator=noise))[RANK * BATCH : (RANK + 1) * BATCH]
        loss = (model(rows) - rows.sum(1, keepdim=True).sin()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if RANK == 0:
            line = f"{step} {mean.item().hex()} {GENERATION} {os.getpid()} {time.monotonic_ns()}"
            os.write(curve, f"{line}\n".encode())
            print("loss", line, PADDING, flush=True)  # noqa: T201  # output is what a disk must have room for
            save(
                {
                    "model": model.module.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "noise": noise.get_state(),
                    "step": step,
                }
            )
        tell_step(step)
        over[0] = (FOLDER / "finish").exists()
        dist.all_reduce(over)  # all ranks end at the same step
        if over:
            break
        time.sleep(options.pause)
    pass_by("done")
    dist.destroy_process_group()
    pass_by("left")
    # torch 2.13: the group's destructor takes its mutex with the interpreter's lock in hand, its thread the other way round.
    # Who ends just after a collective may hang for ever, under any launcher; so nothing is destroyed here.
    os._exit(0)


if __name__ == "__main__":
    main()
