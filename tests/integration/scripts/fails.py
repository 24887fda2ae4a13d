"""A DDP-like script in which rank 1 raises ValueError and rank 0 dies of the broken connection: the cascade."""

import os
import signal
import sys

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
dist.barrier()
if os.environ["RANK"] == "1":
    sys.stderr.write("about to read batch 17\n")
    raise ValueError("bad batch 17")
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # rank 0 dies of the broken connection and of nothing else
one = torch.ones(1)
for _ in range(1000):
    dist.all_reduce(one)
