"""What `dlrover-run --help` says at its end: examples, what to do afterwards, exit statuses, Ctrl-C."""

from __future__ import annotations

EPILOG = """\
examples:
  dlrover-run --nproc-per-node=2 train.py --lr 0.1      two workers; a killed one is restarted in a fraction of a second
  dlrover-run --nproc-per-node=8 -m my.package.train    a module instead of a script
  dlrover-run --local-nodes 2 --nproc-per-node=2 train.py
                                                        two nodes on this host, to try the death of a whole node
  dlrover-run --preload transformers,datasets train.py  import these once, not at every restart
  dlrover-run -r 3 -t 0:3 --log-dir logs train.py       every rank's output into files, rank 0's also here
  dlrover-run --detach --local-nodes 2 train.py         the job belongs to no terminal: this command returns, the job goes on
  dlrover-run --show-config train.py                    what would be done: every setting and where it came from
  dlrover-run --job job.toml                            groups of nodes, each with its own program: trainers, rollouts
  dlrover-run --role-groups trainer:2,rollout:6 rl.py   groups of nodes that run one script

on every one of several hosts, with the same DLROVER_TOKEN:
  dlrover-run --nnodes 2:4 --nproc-per-node=8 --rdzv-backend c10d --rdzv-endpoint HOST:29400 --rdzv-id NAME train.py

where a scheduler of yours starts the nodes (docs/backends.md):
  dlrover-run --backend mypackage.slurm:Slurm --nnodes 4 --nproc-per-node=8 train.py
                                                        it starts each node as this command with DLROVER_NODE=NODE set

afterwards:
  dlrover attach JOB      the output of a detached job and its live line again, until it ends; Ctrl-C detaches
  dlrover-run --resume JOB
                          go on with a detached job after a reboot, from its newest checkpoint
  dlrover suspend JOB     give its nodes back for a while; dlrover resume JOB goes on
  dlrover status JOB      what it is doing, or how it ended
  dlrover report JOB      what failed, what was done about it, where the time went
  dlrover explain JOB     why, down to the first evidence

exit status: 0 the job succeeded; 1 it failed (the root cause is printed first), or its last checkpoint that was due
  is not on storage; 2 wrong usage; 70 no master could run;
  75 nothing was started, and it may be later: the log's servers do not answer, or a limit of processes is reached;
  93 it failed for want of progress, cycle after cycle; 130 stopped by Ctrl-C; 143 by SIGTERM;
  128 + N by signal N

Ctrl-C: once, and the workers get SIGINT and stop_grace_s (30 s) to end; twice, and they are killed.
Flags of torchrun's are also read from PET_<FLAG>, for instance PET_NNODES, as torchrun does it.
"""
