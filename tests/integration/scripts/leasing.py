"""Workers that keep their own pace: each writes down the indices that it has used, one line a batch.

leasing.py SIZE LOADERS MICRO PACES        PACES: seconds that a batch takes, by rank, as 0.01,0.03

Nobody draws before all ranks run: on a busy machine one of them starts many seconds later, and would find little left.

With $POISON two samples are poison: to fetch `RAISES` raises, and a batch with `KILLS` ends its worker by SIGKILL.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader

from dlrover_adapters.torch import ElasticDataset

RAISES, KILLS = 13, 29


def sample(index: int) -> torch.Tensor:
    """A sample is its index."""
    if index == RAISES and "POISON" in os.environ:
        raise ValueError("a damaged record")
    return torch.tensor(index)


def wait_for_all(folder: Path) -> None:
    """Until each rank has a file. A test bounds it, as it bounds the job."""
    ranks = int(os.environ["WORLD_SIZE"])
    while len({path.name.split("-")[1] for path in folder.glob("used-*")}) < ranks:
        time.sleep(0.02)


def main() -> None:
    """Use everything."""
    size, loaders, micro, paces = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4].split(",")
    rank, folder = int(os.environ["RANK"]), Path(os.environ["FOLDER"])
    pace_s = float(paces[rank % len(paces)])
    data = ElasticDataset("eval", size=size, fetch=sample, seed=7, micro_batch=micro, assign="lease", lineage="server")
    loader = DataLoader(data, batch_size=None, num_workers=loaders)
    with (folder / f"used-{rank}-{os.getpid()}").open("a", buffering=1) as out:
        wait_for_all(folder)
        for batch in data.over(loader):
            if KILLS in batch and "POISON" in os.environ:
                os.kill(os.getpid(), signal.SIGKILL)
            out.write(" ".join(str(int(one)) for one in batch) + "\n")
            time.sleep(pace_s)
        out.write("end\n")


if __name__ == "__main__":
    main()
