"""A job whose ranks hang by a plan: ``hangs.py PLAN STEPS``, where the plan is ``KIND:RANK:STEP,...``, a hang for each life.

A life goes on after the last step of the one before, as with a checkpoint, in a file ``step`` in the working directory. When a
rank is about to hang it says so, with the time: ``hangs: NUMBER KIND RANK TIME``.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from dlrover_adapters.torch import phase
from dlrover_adapters.torch import step as tell

KINDS = ("collective", "lock", "gil", "stop")
STEP_S = 0.02


class Hang(NamedTuple):
    """Who hangs, how, at which step, and in which life; a pause (``pause3``, ``phase3``) ends none."""

    kind: str
    rank: int
    step: int
    life: int

    @property
    def passes(self) -> bool:
        """Is it none?"""
        return self.kind.startswith(("pause", "phase"))


def say(words: str) -> None:
    """A line at once."""
    sys.stdout.write(f"{words}\n")
    sys.stdout.flush()


def plan_of(text: str) -> list[Hang]:
    """A plan as the command line has it."""
    found: list[Hang] = []
    for kind, rank, step in (one.split(":") for one in text.split(",") if one):
        found.append(Hang(kind, int(rank), int(step), sum(not one.passes for one in found)))
    return found


def hang(kind: str) -> None:
    """Come back never; after a while, if it is a pause."""
    if kind.startswith("phase"):
        with phase("evaluation"):
            time.sleep(float(kind[5:]))
    elif kind.startswith("pause"):
        time.sleep(float(kind[5:]))
    elif kind in ("sleep", "own"):
        time.sleep(1e6)
    elif kind == "lock":
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()  # waits for itself
    elif kind == "gil":
        # A C library that waits and does not release the interpreter's lock.
        library, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
        library.pthread_mutex_lock(mutex)
        library.pthread_mutex_lock(mutex)
    elif kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(1e6)
    elif kind == "collective":
        dist.recv(torch.ones(1), src=(dist.get_rank() + 1) % dist.get_world_size())


def train(plan: list[Hang], steps: int) -> None:
    """Steps that all ranks make together."""
    dist.init_process_group("gloo")
    rank, life, kept = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"]), Path("step")
    mine = {one.step: one for one in plan if one.rank == rank and one.life == life}
    done = torch.tensor([int(kept.read_text()) if rank == 0 and kept.exists() else 0])
    dist.broadcast(done, src=0)
    if mine and next(iter(mine.values())).kind == "own":
        signal.signal(signal.SIGUSR1, lambda *_: say("mine"))
    for number in range(int(done.item()) + 1, steps + 1):
        time.sleep(STEP_S)
        if number in mine:
            say(f"hangs: {life} {mine[number].kind} {rank} {time.time():.3f}")
            hang(mine[number].kind)
        dist.all_reduce(torch.ones(1))
        tell(number)
        if rank == 0:
            kept.with_suffix(".new").write_text(str(number))
            kept.with_suffix(".new").rename(kept)
    if rank == 0:
        say(f"done: {steps}")
    dist.destroy_process_group()


if __name__ == "__main__":
    train(plan_of(sys.argv[1]), int(sys.argv[2]))
