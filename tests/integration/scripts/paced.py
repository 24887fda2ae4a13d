"""Steps that all ranks make together, each of which hangs on all before it: ``paced.py [STEPS [EVERY]]``.

Rank 0 appends ``step digest`` to ``curve`` in the working directory and keeps in ``checkpoint``, whole or not at all, every
EVERY-th one of its steps; after a restart all go on from there. Without STEPS, or with 0, it ends when everything that was to
strike has. What a job makes of its state shows in the curve, at a hundredth of a model's price.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from pathlib import Path

PAUSE_S = 0.02


def link(before: str, step: int, world: int) -> str:
    """The digest of a step."""
    return hashlib.sha256(f"{before} {step} {world}".encode()).hexdigest()[:16]


def undisturbed(steps: int, world: int) -> list[tuple[int, str]]:
    """The curve of a run that nobody disturbed."""
    made, digest = [], ""
    for step in range(1, steps + 1):
        digest = link(digest, step, world)
        made.append((step, digest))
    return made


def main(steps: int = 0, every: int = 1) -> None:
    """Train."""
    import torch
    import torch.distributed as dist

    from dlrover_adapters.torch import step as tell_step

    dist.init_process_group("gloo")
    checkpoint, part, struck = Path("checkpoint"), Path("part"), Path(".chaos/struck")
    curve = os.open("curve", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    done, digest = checkpoint.read_text().split() if checkpoint.exists() else ("0", "")
    step, last = int(done), False
    while not last:
        step += 1
        ones = torch.ones(2)
        ones[1] = step == steps or (not steps and struck.exists())
        dist.all_reduce(ones)
        digest, last = link(digest, step, int(ones[0])), bool(ones[1])
        if dist.get_rank() == 0:
            os.write(curve, f"{step} {digest}\n".encode())
            if step % every == 0:
                part.write_text(f"{step} {digest}")
                part.replace(checkpoint)
        tell_step(step)
        time.sleep(PAUSE_S)
    os._exit(0)  # as in curve.py: the group's destructor may hang


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
