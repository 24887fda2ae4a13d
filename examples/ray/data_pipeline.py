"""A pipeline of Ray Data feeds ranks that `dlrover-run` keeps, and outlives every change of their world.

    dlrover-run --backend ray --nnodes 1:2 --resources CPU=1 examples/ray/data_pipeline.py --folder /shared/points --die-at 20

The pipeline belongs to a detached actor, and not to a rank: what it has prepared is there when ranks die, and when there are more
or fewer of them. Which sample a rank trains next is decided by `ElasticDataset`, whose position is saved with the model: each
sample counts once in every epoch. Ranks read from Ray's object store, a block at a time. Needs ``pip install 'ray[data]'``.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import signal
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from dlrover_adapters.torch import ElasticBatch, ElasticDataset, FlashCheckpoint

SIZE, BLOCK, GLOBAL_BATCH, MICRO_BATCH = 320, 32, 16, 4


def prepare(batch: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What the pipeline does with a block: a real one would read and decode files."""
    x = batch["id"] / SIZE
    return {"id": batch["id"], "x": x.astype(np.float32), "y": np.sin(6 * x).astype(np.float32)}


class Pipeline:
    """Prepares all samples once, and keeps the blocks: their owner is this actor, whose life is not a rank's."""

    def __init__(self) -> None:
        import ray.data

        prepared = ray.data.range(SIZE, override_num_blocks=SIZE // BLOCK).map_batches(prepare, batch_size=BLOCK)
        rows = prepared.sort("id").iter_batches(batch_size=BLOCK, batch_format="numpy")
        self._blocks = [ray.put(block) for block in rows]

    def block(self, number: int) -> list[Any]:
        """A reference to a block, in a list, so that the block itself goes from store to store."""
        return [self._blocks[number]]


def pipeline(name: str) -> Any:
    """The actor of that name, made by whoever comes first. Ranks of later worlds find it."""
    options = {"name": name, "namespace": "examples", "lifetime": "detached", "num_cpus": 0, "get_if_exists": True}
    return ray.remote(Pipeline).options(**options).remote()


def train(options: argparse.Namespace, source: Any) -> None:
    """Train, die once if told to, and say whether each sample counted once."""
    rank, world = dist.get_rank(), dist.get_world_size()

    @functools.lru_cache(maxsize=8)
    def block(number: int) -> Mapping[str, np.ndarray]:
        [reference] = ray.get(source.block.remote(number))
        found: Mapping[str, np.ndarray] = ray.get(reference)
        return found

    def sample(index: int) -> tuple[torch.Tensor, torch.Tensor]:
        rows = block(index // BLOCK)
        return torch.tensor(rows["x"][index % BLOCK]), torch.tensor(rows["y"][index % BLOCK])

    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    data = ElasticDataset("points", size=SIZE, fetch=sample, epochs=options.epochs, seed=7)
    batch = ElasticBatch(model, optimizer, global_batch=GLOBAL_BATCH, micro_batch=MICRO_BATCH)
    url = f"file://{options.folder.absolute()}/ckpts"
    with FlashCheckpoint(url, model=model, optimizer=optimizer, data=data, every=2, store_every=10) as ckpt:
        step = ckpt.restore()
        if rank == 0:
            print(f"begins after step {step}, {world} ranks", flush=True)
        write(options.folder, began=step)
        mine: list[int] = []
        for x, wanted in batch.over(DataLoader(data, batch_size=None)):
            mine += batch.indices
            loss = nn.functional.mse_loss(model(x.unsqueeze(1)).squeeze(1), wanted)
            if not batch.backward(loss):
                continue  # more micro-batches of this global step
            step += 1
            write(options.folder, step=step, samples=mine)
            mine = []
            ckpt.step(step)
            if step == options.die_at and rank == world - 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(options.pause)
    dist.barrier()
    if rank == 0:
        audit(options.folder, options.epochs)


def write(folder: Path, **told: object) -> None:
    """Append to what this rank has to say."""
    with (folder / f"trained-{dist.get_rank()}").open("a") as out:
        out.write(json.dumps(told) + "\n")


def audit(folder: Path, epochs: int) -> None:
    """How often each sample was trained, in the history of the model as it is now."""
    lineage: dict[tuple[int, str], list[int]] = {}
    for path in sorted(folder.glob("trained-*")):
        for one in map(json.loads, path.read_text().splitlines()):
            if "began" in one:  # what was made after the restored step is forgotten
                lineage = {
                    key: value for key, value in lineage.items() if key[1] != path.name or key[0] <= one["began"]
                }
            else:
                lineage[one["step"], path.name] = one["samples"]
    counts = Counter(index for samples in lineage.values() for index in samples)
    right = all(counts[index] == epochs for index in range(SIZE))
    print(f"{SIZE} samples: " + ("each counts once in each epoch" if right else f"WRONG: {counts}"), flush=True)


def main() -> None:
    """Read the command line, join the cluster that the ranks are in, and train."""
    parser = argparse.ArgumentParser(description="A pipeline of Ray Data that outlives the ranks that it feeds.")
    parser.add_argument("--folder", type=Path, required=True, help="a folder that all hosts share")
    parser.add_argument("--epochs", type=int, default=2, help="epochs (default: 2)")
    parser.add_argument(
        "--pause", type=float, default=0.0, help="seconds that a step takes beside its work (default: 0)"
    )
    parser.add_argument(
        "--die-at", type=int, default=0, help="the step after which the last rank kills itself (default: never)"
    )
    options = parser.parse_args()
    options.folder.mkdir(exist_ok=True)
    ray.init(log_to_driver=False)  # RAY_ADDRESS is set by the node that keeps this rank
    dist.init_process_group("gloo")
    train(options, pipeline(f"points of {options.folder.absolute()}"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
