"""Trains one kind of the matrix under FlashCheckpoint and strikes; or trains its control, without FlashCheckpoint.

``ranks.py cell KIND DISTURBANCE NODES STEPS`` is one rank under dlrover-run. ``ranks.py control STEPS KIND ...`` forks all
ranks of one kind after the other, each kind in a folder of its name. Each rank appends lines of JSON to ``$FOLDER/rank-R``:
first what it restored, then for every step its loss, its sampler's position, the numbers it drew, and digests of all full
tensors of model and optimizer. The script itself kills, after step `KILL` of the first life, always between the same two steps.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from kinds import KINDS, Kind

EVERY, SURE, KILL, BOUND_S = 2, 4, 7, 20.0
"""Steps between saves; the step that ``ckpt.save`` promises; the step of the kill; the longest wait for a copy, in seconds."""


class Notes:
    """The file of a rank. Each line is one write, so a kill cannot tear it."""

    def __init__(self, folder: Path, rank: int, life: int) -> None:
        self._file = os.open(folder / f"rank-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._life = life

    def tell(self, **told: Any) -> None:
        """Append a line."""
        os.write(self._file, f"{json.dumps({'life': self._life, **told})}\n".encode())


def made(kind: str, life: int) -> Kind:
    """Make the training. Each life begins with other weights and random numbers, so that whatever is not restored shows."""
    torch.set_num_threads(1)
    return KINDS[kind](dist.get_rank(), dist.get_world_size(), 7 + life)


def one_step(training: Kind, step: int, notes: Notes) -> None:
    """Train one step and write down its results."""
    loss = training.step()
    sampler = training.sampler
    notes.tell(step=step, loss=loss, extra=[sampler.rank, sampler.at], drawn=training.drawn(), whole=training.whole())


# ---- with a checkpoint


def cell(kind: str, disturbance: str, nodes: int, steps: int) -> None:
    """Train one rank from the restored step to the end or to the kill."""
    from dlrover_adapters.torch import FlashCheckpoint

    dist.init_process_group("gloo")
    folder, rank, world = Path(os.environ["FOLDER"]), dist.get_rank(), dist.get_world_size()
    life = 10 * int(os.environ.get("MATRIX_RUN", "0")) + int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    training, notes = made(kind, life), Notes(folder, rank, life)
    # What a lost node held has to come from its partner's memory, so there is no storage where it has a partner.
    url = "" if loses_partner(disturbance, nodes) else str(folder / "stored")
    with FlashCheckpoint(url, every=EVERY, store_every=4 if url else 0, **training.given) as ckpt:
        step = ckpt.restore()
        notes.tell(restored=step, tier=ckpt.tier, world=world, whole=training.whole())
        while step < steps:
            step += 1
            if step == steps and url:
                # Steps here take milliseconds: storage gets the time that it has between two due steps of a real training.
                until(lambda: sealed(folder, steps - 4))
            one_step(training, step, notes)
            if disturbance == "evaluation":
                training.evaluate()
            ckpt.step(step)
            if step == SURE and life == 0:
                assert ckpt.save(step), "the step that was asked for was not saved"
            if step == KILL and life == 0:
                strike(disturbance, nodes, rank == victim(kind, disturbance, nodes, world), folder)
    notes.tell(ended=step)


def loses_partner(disturbance: str, nodes: int) -> bool:
    """Is one of two nodes lost? It is replaced, or in "other_world" it is not."""
    return nodes > 1 and disturbance in {"node", "other_world"}


def victim(kind: str, disturbance: str, nodes: int, world: int) -> int:
    """The rank that kills: rank 0 where the launcher is killed; else rank 0 or, for every other kind, the last one."""
    launcher = disturbance in {"storage", "other_world"} and not loses_partner(disturbance, nodes)
    return 0 if launcher or list(KINDS).index(kind) % 2 else world - 1


def strike(disturbance: str, nodes: int, mine: bool, folder: Path) -> None:
    """Kill this rank, its node's agent or the launcher, once there is a state to go back to."""
    if loses_partner(disturbance, nodes):
        until(lambda: copied(dist.get_world_size() // nodes))
        dist.barrier()
    if not mine:
        return
    if disturbance in {"restart", "evaluation"}:
        os.kill(os.getpid(), signal.SIGKILL)
    if not loses_partner(disturbance, nodes):
        until(lambda: sealed(folder, SURE))
    if disturbance == "node" or loses_partner(disturbance, nodes):
        os.kill(ancestor("dlrover-agent"), signal.SIGKILL)
    else:
        os.kill(int((folder / "launcher").read_text()), signal.SIGKILL)
    threading.Event().wait()  # until this rank dies too


def until(is_so: Callable[[], bool]) -> None:
    """Wait for a condition, for `BOUND_S` at most. If it never holds, the check reports what was not restored."""
    deadline = time.monotonic() + BOUND_S
    while not is_so() and time.monotonic() < deadline:
        threading.Event().wait(0.02)


def sealed(folder: Path, least: int) -> bool:
    """Is step ``least``, or a newer one, complete on storage?"""
    return any(int(one.parent.name[5:]) >= least for one in (folder / "stored").glob("step-*/manifest.json"))


def copied(ranks: int) -> bool:
    """Does this node hold copies of all ``ranks`` of another node, of one step that is `SURE` or newer?"""
    from dlrover_adapters.torch.checkpoint.vault import Vault

    with_us = Vault.connect()
    try:
        found: dict[int, set[int]] = {}
        for one in with_us.inventory().holdings:
            if one.kind in {"replica", "objects"} and one.step >= SURE:
                found.setdefault(one.step, set()).add(one.rank)
        return any(len(theirs) >= ranks for theirs in found.values())
    finally:
        with_us.close()


def ancestor(name: str) -> int:
    """The pid of the nearest ancestor process of that name."""
    pid = os.getpid()
    while pid > 1:
        if Path(f"/proc/{pid}/comm").read_text().strip() == name:
            return pid
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    raise LookupError(name)


# ---- without


def control(kind: str, world: int, steps: int, folder: Path) -> int:
    """Train all ranks of one kind without a checkpoint. Returns 0 if all of them ended well."""
    folder.mkdir(parents=True)
    pids = []
    for rank in range(world):
        pid = os.fork()
        if pid == 0:
            dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
            training, notes = made(kind, 0), Notes(folder, rank, 0)
            notes.tell(restored=0, tier="nothing", world=world, whole=training.whole())
            for step in range(1, steps + 1):
                one_step(training, step, notes)
            notes.tell(ended=steps)
            dist.barrier()
            os._exit(0)
        pids.append(pid)
    return max(os.waitpid(pid, 0)[1] for pid in pids)


if __name__ == "__main__":
    verb, of, *words = sys.argv[1:]
    if verb == "control":
        import torch._dynamo  # optimizers do, once for all ranks here

        failed = [one for one in words if control(one, KINDS[one].world, int(of), Path(os.environ["FOLDER"], one))]
        sys.exit(f"controls that failed: {failed}" if failed else 0)
    cell(of, words[0], int(words[1]), int(words[2]))
    dist.destroy_process_group()  # without a DDP model that would outlive it, and may hang in that (torch 2.13, gloo)
