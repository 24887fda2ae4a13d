"""Train on each of 600 samples exactly once in an epoch, with one worker killed on the way.

    dlrover-run --local-nodes 2 --nproc-per-node 1 examples/torch/elastic_data.py --folder /tmp/elastic --die-at 25
    torchrun --nproc-per-node 2 --max-restarts 1   examples/torch/elastic_data.py --folder /tmp/elastic --die-at 25

Rank 1 kills itself after the given step, once. Training goes on from the newest step that is saved, and the data with it: their
position is one publication with the model. Steps after it are made again, with the same samples as the first time. Start it once
more with a larger --epochs and another number of workers: it goes on with the next sample, and its losses are those of one
worker alone.

Every rank writes down which samples its steps had. In the end rank 0 looks whether each was trained once in every epoch.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from dlrover_adapters.torch import ElasticBatch, ElasticDataset, FlashCheckpoint

SIZE, GLOBAL_BATCH, MICRO_BATCH = 600, 16, 4


def sample(index: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A point, and what is to be learnt of it. A real one would read a file."""
    point = torch.tensor([index / SIZE, (index * 37 % SIZE) / SIZE])
    return point, torch.sin(6 * point.sum())


def train(options: argparse.Namespace) -> None:
    """Train, die once if told to, and say whether each sample counted once."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 1))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    data = ElasticDataset("points", size=SIZE, fetch=sample, epochs=options.epochs, seed=7)
    loader = DataLoader(data, batch_size=None, num_workers=options.loaders)
    batch = ElasticBatch(model, optimizer, global_batch=GLOBAL_BATCH, micro_batch=MICRO_BATCH, clip=1.0)
    url = f"file://{options.folder.absolute()}/ckpts"
    with FlashCheckpoint(url, model=model, optimizer=optimizer, data=data, every=2, store_every=10) as ckpt:
        step = ckpt.restore()
        if rank == 0:
            told = f"begins after step {step}, with {data.samples} samples trained" if step else "begins anew"
            print(f"{told}, {world} workers", flush=True)
        write(options.folder, began=step, world=world)
        mine, loss_sum = [], torch.zeros(1)
        for points, wanted in batch.over(loader):
            mine += batch.indices
            loss = nn.functional.mse_loss(model(points).squeeze(1), wanted)
            loss_sum += loss.detach() * batch.weight / world
            if not batch.backward(loss):
                continue  # more micro-batches of this global step
            step += 1
            write(options.folder, step=step, samples=mine)
            dist.all_reduce(loss_sum)
            if rank == 0 and data.place.position == 0:
                print(f"epoch {data.place.epoch}: loss {loss_sum.item():.4f} in its last step", flush=True)
            mine, loss_sum = [], torch.zeros(1)
            ckpt.step(step)
            if step == options.die_at and rank == 1 and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(options.pause)
    dist.barrier()
    if rank == 0:
        audit(options.folder, options.epochs)


def write(folder: Path, **told: object) -> None:
    """Append to what this rank has to say, by its life."""
    with (folder / f"trained-{dist.get_rank()}").open("a") as out:
        out.write(json.dumps(told) + "\n")


def audit(folder: Path, epochs: int) -> None:
    """How often each sample was trained, in the history of the model as it is now."""
    ranks: list[dict[int, list[int]]] = []
    made = 0
    for path in sorted(folder.glob("trained-*")):
        steps: dict[int, list[int]] = {}
        for one in map(json.loads, path.read_text().splitlines()):
            if "began" in one:  # what was made after the restored step is forgotten
                steps = {step: samples for step, samples in steps.items() if step <= one["began"]}
            else:
                steps[one["step"]] = one["samples"]
                made += path.name == "trained-0"
        ranks.append(steps)
    lineage = {step: [one for steps in ranks for one in steps.get(step, ())] for steps in ranks for step in steps}
    counts = Counter(index for samples in lineage.values() for index in samples)
    right = all(counts[index] == epochs for index in range(SIZE))
    print(
        f"{SIZE} samples, {epochs} epochs, {len(lineage)} steps, of which {made - len(lineage)} were made again: "
        + (
            "each sample counts once in each epoch"
            if right
            else f"WRONG, samples count {sorted(set(counts.values()))} times"
        ),
        flush=True,
    )


def main() -> None:
    """Join the others, train, and leave them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="for checkpoints, and for what was trained")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--loaders", type=int, default=1, help="loader processes of each worker")
    parser.add_argument("--die-at", type=int, default=0, help="rank 1 kills itself after this step, once")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds added to every step, to have time to watch")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    dist.init_process_group("gloo")
    train(options)
    # After `train`, when the model is gone: one that outlives its group can hang where it ends (torch 2.13: DDP over gloo).
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
