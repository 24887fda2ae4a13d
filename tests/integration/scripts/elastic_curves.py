"""Trains the same small model in several worlds, one after the other, and writes what came of it to a file, as JSON.

FOLDER STEPS WORLDS KINDS OPTIMIZERS: ``1 2 4-2-3`` are three runs, the last of which changes its world twice, at a third and at
two thirds of its steps, from a checkpoint in FOLDER. KINDS: ddp, fsdp, measured: DDP with quotas by measured cost, where the last
rank is said to be three times slower. OPTIMIZERS: sgd, adam. Each world's ranks are forked from this process, which has torch
imported and has computed nothing yet.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # what optimizers import with their first step: once here, and not in each rank
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from dlrover_adapters.torch import ElasticBatch, ElasticDataset, FlashCheckpoint
from dlrover_adapters.torch.data import quotas
from dlrover_core.data.balance import Costs

SIZE, BATCH, MICRO = 314, 26, 4
"""No 3 or 4 ranks divide the batch evenly, an epoch ends with a batch of 2 samples, and micro-batches are short."""


def sample(index: int) -> tuple[torch.Tensor, torch.Tensor]:
    """One of a regression's, made from its index."""
    x = torch.sin(torch.arange(1, 7, dtype=torch.float64) * (index + 1))
    return x, torch.cos(x.sum())


def model_of(kind: str, world: int) -> Any:
    """Alike on all ranks."""
    torch.manual_seed(7)
    model: Any = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1)).double()
    if world == 1 and kind != "fsdp":
        return model
    if kind != "fsdp":
        return DistributedDataParallel(model)
    mesh = init_device_mesh("cpu", (world,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


class Slow(Costs):
    """What samples cost a rank, as a test says."""

    def step(self, samples: int, computing_s: float, took_s: float) -> None:
        """As if the last rank was three times slower."""
        slower = 3 if dist.get_rank() == dist.get_world_size() - 1 else 1
        super().step(samples, samples * slower / 1000, took_s)


def train(url: str, kind: str, name: str, first: int, last: int, out: Any) -> None:
    """One rank, from step ``first`` to ``last``; rank 0 tells each step's mean loss."""
    world, rank = dist.get_world_size(), dist.get_rank()
    model = model_of(kind, world)
    made = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[name]
    optimizer = made(model.parameters(), lr={"sgd": 0.1, "adam": 0.01}[name])  # type: ignore[operator]
    data = ElasticDataset("train", size=SIZE, fetch=sample, epochs=0, seed=3)
    batch = ElasticBatch(
        model, optimizer, global_batch=BATCH, micro_batch=MICRO, clip=0.5,
        schedule=lambda samples: 1 / (1 + samples / 2000), quota="measured" if kind == "measured" else "equal",
    )  # fmt: skip
    equal = batch.quota
    with FlashCheckpoint(url, model=model, optimizer=optimizer, data=data, every=1000, store_every=0) as ckpt:
        step, seen = ckpt.restore(), torch.zeros(1, dtype=torch.float64)
        assert step == first, (step, first)
        for x, y in batch.over(DataLoader(data, batch_size=None, num_workers=2 if kind == "measured" else 0)):
            loss = ((model(x).squeeze(1) - y) ** 2).mean()
            seen += loss.detach() * batch.weight / world
            if batch.backward(loss):
                step += 1
                dist.all_reduce(seen)
                if rank == 0:
                    out.append(seen.item())
                seen.zero_()
                if step == last:
                    break
        assert (batch.quota != equal) == (kind == "measured" and world > 1), batch.quota
        if url:
            ckpt.save(step)
            ckpt.wait()
    del model, batch  # a DDP model that outlives its group may hang in its end (torch 2.13, gloo)


def rank_of(rank: int, world: int, folder: str, number: int, cases: list[Any], first: int, last: int) -> None:
    """One rank of one world, for all cases."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world))
    torch.set_num_threads(1)
    quotas.Costs = Slow  # type: ignore[misc]
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet-{number}", rank=rank, world_size=world)
    for kind, name, run, stored in cases:
        losses: list[float] = []
        url = f"file://{folder}/ckpt-{kind}-{name}-{run}" if stored else ""
        train(url, kind, name, first, last, losses)
        if rank == 0:
            with Path(folder, f"{kind}-{name}-{run}").open("a") as out:
                out.writelines(f"{one.hex()}\n" for one in losses)
    dist.destroy_process_group()


def main(folder: str, steps: int, worlds: list[str], kinds: list[str], names: list[str]) -> None:
    """All runs."""
    fork, number = multiprocessing.get_context("fork"), 0
    for run in worlds:
        path = [int(one) for one in run.split("-")]
        cases = [(kind, name, run, len(path) > 1) for kind in kinds for name in names]
        for at, world in enumerate(path):
            first, last = steps * at // len(path), steps * (at + 1) // len(path)
            number += 1
            ranks = [
                fork.Process(target=rank_of, args=(rank, world, folder, number, cases, first, last))
                for rank in range(world)
            ]
            for one in ranks:
                one.start()
            for one in ranks:
                one.join()
            if any(one.exitcode for one in ranks):
                raise SystemExit(f"run {run}, world {world}: exit codes {[one.exitcode for one in ranks]}")
    found = {
        f"{kind}-{name}-{run}": [
            float.fromhex(line) for line in Path(folder, f"{kind}-{name}-{run}").read_text().split()
        ]
        for run in worlds
        for kind in kinds
        for name in names
    }
    Path(folder, "curves.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *(one.split(",") for one in sys.argv[3:6]))
