"""Evaluate 2,000 samples by workers that keep their own pace: each takes the next shard when it is ready for it.

    dlrover-run --local-nodes 2 --nproc-per-node 1 --max-restarts 1 examples/torch/evaluate.py --folder /tmp/evaluate --die-at 10
    dlrover data JOB                     # meanwhile or afterwards: who holds what, and what may have been used twice

Rank 0 is three times faster than the others, and takes more. Rank 1 kills itself after the given number of batches, once. What
it had not said to be used is evaluated again: so results are kept by index, and each worker looks in the end whether all are
there. Files are named after the run, so that one folder may serve several runs; with `--rdzv-id`, give each run one of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader

from dlrover_adapters.torch import ElasticDataset

SIZE, BATCH = 2_000, 20


def sample(index: int) -> tuple[int, torch.Tensor]:
    """An index and its sample. A real one would read a file."""
    return index, torch.tensor([index / SIZE, index % 7 / 7])


def evaluate(options: argparse.Namespace) -> int:
    """Use shards until all are used, by whichever worker; how many samples were this one's."""
    rank, run = int(os.environ["RANK"]), os.environ["TORCHELASTIC_RUN_ID"]
    died = options.folder / f"died-{run}"
    data = ElasticDataset("points", size=SIZE, fetch=sample, micro_batch=BATCH, assign="lease", lineage="server")
    loader = DataLoader(data, batch_size=None, num_workers=options.loaders)
    mine = 0
    with (options.folder / f"results-{run}-{rank}-{os.getpid()}").open("w", buffering=1) as out:
        for number, (indices, points) in enumerate(data.over(loader), 1):
            scores = points.square().sum(1)
            time.sleep(0.01 if rank == 0 else 0.03)  # a real model takes its time
            out.write(json.dumps(dict(zip(indices.tolist(), scores.tolist(), strict=True))) + "\n")
            mine += len(indices)
            if rank == 1 and number == options.die_at and not died.exists():
                died.touch()
                os.kill(os.getpid(), signal.SIGKILL)
    return mine


def results(folder: Path) -> dict[int, float]:
    """The scores of this run's ranks by index; a sample that was scored twice is there once."""
    found: dict[int, float] = {}
    for path in sorted(folder.glob(f"results-{os.environ['TORCHELASTIC_RUN_ID']}-*")):
        for line in path.read_text().splitlines():
            with contextlib.suppress(ValueError):  # a worker was killed while it wrote; its samples are scored again
                found |= {int(index): score for index, score in json.loads(line).items()}
    return found


def main() -> None:
    """Parse the arguments, evaluate, and look whether all results are there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="where results are written")
    parser.add_argument("--loaders", type=int, default=0, help="loader processes of each worker")
    parser.add_argument("--die-at", type=int, default=0, help="rank 1 kills itself after so many batches, once")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    mine = evaluate(options)
    there = len(results(options.folder))
    print(f"rank {os.environ['RANK']}: {mine} samples were mine, {there} of {SIZE} are there", flush=True)


if __name__ == "__main__":
    main()
