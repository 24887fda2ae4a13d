"""Trains with `FlashCheckpoint`, under our launcher, and notes in a diary what it does; the same lines as `ddp_step.py`.

All ranks hold the same state, of `--mib`, and meet in a collective in each step. ``what`` is one more: restored-TIER (the line's
time is what the restore took, in nanoseconds). With ``--lives N`` rank 0 kills itself with SIGKILL in each of the first
N lives, once its newest state is published and hashed, and notes that: killed. ``--peer KIND`` is something else: a fresh process
that loads the state of ``--checkpoint`` with torch.load, as most scripts do, and prints the seconds.
"""

from __future__ import annotations

import os
import time

BEGAN = time.monotonic_ns()

import argparse  # noqa: E402
import signal  # noqa: E402
import subprocess  # noqa: E402
import sys  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import torch  # noqa: E402
from diary import Diary  # noqa: E402
from saving import Training  # noqa: E402

HASHED_S = 20.0


def load(path: Path, kind: str, mib: int) -> None:
    """What our restore is compared with."""
    training = Training(mib, 0.0, fresh=True)
    began = time.perf_counter()
    found = torch.load(path, weights_only=True, mmap=kind == "mmap")
    training.model.load_state_dict(found["model"])
    training.optimizer.load_state_dict(found["optimizer"])
    print(time.perf_counter() - began)


def until_hashed(checkpoint: Any) -> None:
    """The saver has the digests of the newest state: as after any second of training."""
    control = checkpoint._engine.control
    deadline = time.monotonic() + HASHED_S
    while time.monotonic() < deadline:
        slot, stamp = max(control.stamps(), key=lambda one: one[1].sequence)
        if control.hashed(slot) == stamp.sequence:
            return
        time.sleep(0.01)
    raise SystemExit(f"the saver has not hashed step {stamp.step} within {HASHED_S:g} s")


def main() -> None:
    """Train, or load."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--diary", type=Path)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--step-s", type=float, default=0.05)
    parser.add_argument("--every", type=int, default=2)
    parser.add_argument("--store", default="", help="where states are written, too; memory alone without it")
    parser.add_argument("--lives", type=int, default=0)
    parser.add_argument("--peer", choices=("load", "mmap"))
    options = parser.parse_args()
    if options.peer:
        load(options.checkpoint, options.peer, options.mib)
        return
    train(options)


def train(options: argparse.Namespace) -> None:
    """One rank's life."""
    import torch.distributed as dist

    from dlrover_adapters.torch import FlashCheckpoint

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    life = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    torch.set_num_threads(1)
    diary = Diary(options.diary, rank)
    diary.note("begin", 0, BEGAN)
    if world > 1:
        dist.init_process_group("gloo")
    training = Training(options.mib, options.step_s, fresh=True)
    # Every other life is restored by headers alone.
    verify = "off" if options.lives and life % 2 == 0 else "sample"
    checkpoint = FlashCheckpoint(
        options.store, model=training.model, optimizer=training.optimizer, every=options.every, verify=verify
    )
    began = time.monotonic_ns()
    step = checkpoint.restore()
    took = time.monotonic_ns() - began
    how = "" if not options.lives else "-header" if verify == "off" else "-full"
    diary.note(f"restored-{checkpoint.tier or 'nothing'}{how}", step, took)
    if step == 0:
        training.first()
    training.times = 1
    meet = torch.zeros(1)
    until = step + 6 if options.lives and life < options.lives else options.steps
    while step < until:
        training.step()
        if world > 1:
            dist.all_reduce(meet)
        step += 1
        diary.note("step", step)
        checkpoint.step(step)
        time.sleep(options.step_s)
    if options.lives and life < options.lives and rank == 0:
        checkpoint.wait()
        until_hashed(checkpoint)
        if life == 0:
            torch.save(training.state(), options.checkpoint)
        for kind in ("load", "mmap"):
            peer = [sys.executable, __file__, "--checkpoint", str(options.checkpoint), "--mib", str(options.mib)]
            told = subprocess.run([*peer, "--peer", kind], capture_output=True, text=True, check=True).stdout
            diary.note(f"peer-{kind}", step, int(float(told) * 1e9))
        diary.note("killed", step)
        os.kill(os.getpid(), signal.SIGKILL)
    checkpoint.close()
    diary.note("end", step)


if __name__ == "__main__":
    main()
