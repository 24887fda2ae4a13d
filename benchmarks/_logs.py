"""A large job's logs, made up: a file per rank, of which nearly all lines mean nothing, and one rank that fails first."""

from __future__ import annotations

import random
from pathlib import Path

RANKS, NPROC, GUILTY = 512, 8, 311
LINES = (
    "2026-01-04 10:{m:02}:{s:02},{k:03} INFO [rank {rank}] step {n:7} | loss {l:.4f} | grad norm {g:.3f} | 1.83 s\n",
    "node{node}:{pid}:{tid} [{loc}] NCCL INFO Channel {c:02}/16 : {rank} -> {p} [send] via NET/IB/{loc}/GDRDMA\n",
    (
        "[rank{rank}]: /opt/venv/lib/python3.11/site-packages/torch/utils/checkpoint.py:87: UserWarning: None of the inputs have "
        "requires_grad=True. Gradients will be None\n"
    ),
    "2026-01-04 10:{m:02}:{s:02},{k:03} DEBUG [rank {rank}] data: shard {n} read in {g:.3f} s, queue {c}\n",
)
TIMED_OUT = (
    "[rank{rank}]:[E1104 10:59:11.004 ProcessGroupNCCL.cpp:616] [Rank {rank}] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum=88120, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600043 "
    "milliseconds before timing out.\n"
)
FAILED = (
    'Traceback (most recent call last):\n  File "/w/train.py", line 7, in step\n    x\n'
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
)


def write(folder: Path, total_bytes: int, seed: int = 1) -> list[Path]:
    """Logs of `RANKS` ranks, together of at least so many bytes: rank `GUILTY` has no memory left, all others wait for it."""
    chance = random.Random(seed)
    made = []
    for rank in range(RANKS):
        path = folder / f"rank_{rank}.log"
        with path.open("w", encoding="utf-8") as file:
            size, number = 0, 0
            while size < total_bytes // RANKS:
                number += 1
                line = _line(chance, rank, number)
                size += len(line)
                file.write(line)
            file.write(FAILED if rank == GUILTY else TIMED_OUT.format(rank=rank))
        made.append(path)
    return made


def _line(chance: random.Random, rank: int, number: int) -> str:
    node, local = divmod(rank, NPROC)
    return LINES[0 if number % 4 == 0 else chance.randrange(len(LINES))].format(
        m=number // 600 % 60,
        s=number // 10 % 60,
        k=number % 1000,
        rank=rank,
        n=number,
        l=chance.uniform(1, 4),
        g=chance.uniform(0, 2),
        node=node,
        pid=4000 + local,
        tid=5000 + local,
        loc=local,
        c=number % 16,
        p=(rank + 1) % RANKS,
    )
