"""Runs a script in one world of ranks after another: SCRIPT, then WORLD and the script's words, ``--`` before each further world.

The ranks are forked from this process, which has imported what takes each of them seconds otherwise. RANK, LOCAL_RANK and
WORLD_SIZE are in their environment. It ends with the first rank that fails, and ends the others.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys

import torch._dynamo
import torch.distributed.checkpoint
import torch.distributed.fsdp  # noqa: F401


def rank_of(script: str, world: int, rank: int, words: list[str]) -> None:
    """One rank's life."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
    sys.argv = [script, *words]
    runpy.run_path(script, run_name="__main__")


def main(script: str, *words: str) -> None:
    """The worlds, one after the other."""
    left = list(words)
    while left:
        end = left.index("--") if "--" in left else len(left)
        (world, *its), left = left[:end], left[end + 1 :]
        running = set()
        for rank in range(int(world)):
            pid = os.fork()
            if pid == 0:
                rank_of(script, int(world), rank, its)
                sys.exit()
            running.add(pid)
        while running:
            pid, status = os.wait()
            running.remove(pid)
            if status:
                for one in running:
                    os.kill(one, signal.SIGKILL)
                    os.waitpid(one, 0)
                sys.exit(f"a rank of a world of {world} ended with {os.waitstatus_to_exitcode(status)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
