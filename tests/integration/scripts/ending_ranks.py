"""Trains two ranks under FlashCheckpoint, whose last state is due as they close: CASE, URL.

``late``: rank 1 comes to ``close()`` while rank 0's part of the last state is being written. ``damaged``: rank 1's last state
is damaged in memory before it is due. ``alone``: at step `WAITS` all wait for the file ``go``, while somebody kills the process
that keeps their store. Each rank writes what it has seen to ``$FOLDER/told-RANK``.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dlrover_adapters.torch import FlashCheckpoint

BOUND_S = 60.0
WAITS, STEPS = 6, {"late": 4, "damaged": 4, "alone": 20}
LARGE = {"late": 32 * 2**20, "damaged": 2**10, "alone": 2**10}
FOLDER = Path(os.environ["FOLDER"])


class Own:
    """What each rank has of its own: so each has a part to write."""

    def __init__(self, size: int) -> None:
        self.state = {"own": torch.arange(size, dtype=torch.float32)}

    def state_dict(self) -> dict[str, Any]:
        """As it is."""
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """As it was."""
        self.state = state


def until(seen: Callable[[], object], what: str) -> None:
    """Other processes' doings ring no bell here."""
    limit = time.monotonic() + BOUND_S
    while not seen():
        assert time.monotonic() < limit, what
        threading.Event().wait(0.001)


def damage(ckpt: FlashCheckpoint, step: int) -> None:
    """Change a byte of what is in memory of this step."""
    ckpt.wait()
    memory: Any = ckpt._engine_now().memory
    slot = next(slot for slot, stamp in memory.control.stamps() if stamp.step == step)
    memory.memory[memory.geometry.blob_at(slot)] ^= 1


def main(case: str, url: str) -> None:
    """Train, and close."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.set_num_threads(1)
    torch.manual_seed(0)  # the ranks' models are replicas
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    ckpt = FlashCheckpoint(url, model=model, optimizer=optimizer, extra=Own(LARGE[case]), every=2, store_every=1000)
    step = ckpt.restore()
    until(lambda: ckpt.stats.populated, "there is no memory")  # no save is left out for want of it
    dist.barrier()
    while step < STEPS[case]:
        optimizer.zero_grad()
        model(torch.ones(4, 8)).sum().backward()
        for one in model.parameters():
            dist.all_reduce(one.grad)
        optimizer.step()
        step += 1
        ckpt.step(step)
        if case == "alone" and step == WAITS:
            ckpt.wait()
            (FOLDER / f"ready-{rank}").touch()
            until((FOLDER / "go").exists, "nobody says go")
    if case == "damaged" and rank == 1:
        damage(ckpt, step)
    if case == "late":
        ckpt.wait()
        dist.barrier()
        if rank == 1:
            until(lambda: list(Path(url).glob("*/*")), "rank 0's part is not being written")
    (FOLDER / f"told-{rank}").write_text(
        json.dumps({"step": step, "saves": ckpt.stats.saves, "failed": ckpt.stats.failed})
    )
    ckpt.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
