"""Train on all ranks together, step by step, until the file ``finish`` is in the folder that is named: allreducing.py FOLDER."""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

FOLDER, RANK = Path(sys.argv[1]), os.environ["RANK"]
dist.init_process_group("gloo")
with (FOLDER / f"told-{RANK}").open("a") as file:
    file.write(f"born {os.getpid()} of {dist.get_world_size()}\n")
weight = torch.nn.Parameter(torch.zeros(4))
optimizer = torch.optim.SGD([weight], lr=0.1)
over = torch.zeros(1)
while not over.item():
    optimizer.zero_grad()
    (weight * (int(RANK) + 1.0)).sum().backward()
    dist.all_reduce(weight.grad)
    optimizer.step()
    over.fill_(float((FOLDER / "finish").exists()))
    dist.all_reduce(over)
    time.sleep(0.02)
sys.stdout.write(f"rank {RANK} ends\n")
sys.stdout.flush()
dist.destroy_process_group()
