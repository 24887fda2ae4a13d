"""Two ranks that compute and reduce over gloo, step by step. From `SLOW_FROM` on rank 1 computes ten times as much, to the end.

Where others work on the same core, behind one cache, the same products take up to twice the CPU time, for seconds: what is to
be noticed stands far out of that. And it begins behind the first baseline, which is a number of steps, however long they take.

Once ``ill`` exists rank 1's loss is NaN, in the first attempt; every rank reports its loss. Ends when ``finish`` exists.
"""

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

from dlrover_adapters.torch import report_loss, step
from dlrover_core.diagnosis.changepoint import BLOCK_STEPS, BLOCKS, HISTORY_LEAST, WARM_UP, WINDOWS

FOLDER = Path(os.environ["FOLDER"])
# Five steps of 10 ms or more are one block.
LEARNT = BLOCK_STEPS * (WARM_UP + BLOCKS * (HISTORY_LEAST + WINDOWS - 1))
SLOW_FROM, TIMES, PRODUCTS, SIDE, PACE_S = LEARNT + 60, 10, 60, 96, 0.01

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, first = dist.get_rank(), os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
matrix, flags = torch.randn(SIDE, SIDE), torch.zeros(2)
number, ill = 0, False
while not flags[0]:
    slow = rank == 1 and first and number >= SLOW_FROM
    for _ in range(PRODUCTS * (TIMES if slow else 1)):
        torch.mm(matrix, matrix)
    time.sleep(PACE_S)  # leaves the cores to others, and is no compute time
    # Rank 0 looks at the folder for both: who waits for the other does so here, at no cost of CPU time.
    flags.zero_()
    if rank == 0 and number % 20 == 0:
        flags[0], flags[1] = (FOLDER / "finish").exists(), first and (FOLDER / "ill").exists()
    dist.all_reduce(flags)
    ill = ill or bool(flags[1])
    number += 1
    report_loss(float("nan") if ill and rank == 1 else 2.0)
    step(number)
dist.destroy_process_group()
