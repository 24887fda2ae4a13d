"""What scripts share that train on an `ElasticDataset` under FlashCheckpoint and write down the samples of every step.

Every rank appends to ``$FOLDER/told-RANK`` what it restored, and the samples of every step that it has made: one JSON line each,
with the ``life`` of its world, a number that all of its ranks agree on.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from dlrover_adapters.torch import ElasticBatch, ElasticDataset, FlashCheckpoint


class Training:
    """This rank. Its model has ``inputs`` features; a step has ``batch`` samples, in micro-batches of ``micro``."""

    def __init__(self, inputs: int, lr: float, *, batch: int, micro: int) -> None:
        dist.init_process_group("gloo")
        torch.set_num_threads(1)
        self.rank = dist.get_rank()
        self.model = DistributedDataParallel(torch.nn.Linear(inputs, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=lr)
        self.batch = ElasticBatch(self.model, self.optimizer, global_batch=batch, micro_batch=micro)
        life = [os.urandom(8).hex()]
        dist.broadcast_object_list(life)
        self._life = life[0]
        self._told = os.open(
            Path(os.environ["FOLDER"]) / f"told-{self.rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644
        )

    def _tell(self, **words: Any) -> None:
        os.write(self._told, f"{json.dumps({'life': self._life, **words})}\n".encode())

    def train(
        self,
        data: ElasticDataset,
        url: str,
        *,
        saves: tuple[int, int],
        steps: float = float("inf"),
        loaders: int = 0,
        drawn: Callable[[Any], Sequence[int]] | None = None,
        loss_of: Callable[[Any], torch.Tensor] | None = None,
        before: Callable[[Sequence[int]], None] = lambda _: None,
        made: Callable[[int], None] = lambda _: None,
        saved: Callable[[int], None] = lambda _: None,
    ) -> None:
        """Up to ``steps``, or the end. ``saves``: ``every`` and ``store_every`` of FlashCheckpoint.

        ``drawn``: the samples of a micro-batch, by default its indices; ``loss_of`` one. ``before`` is called with the indices of
        each micro-batch, ``made`` with each step before it is counted, ``saved`` after.
        """
        batch, every, store_every = self.batch, *saves
        loss_of = loss_of or (lambda x: self.model(x).square().mean())
        keep = {"model": self.model, "optimizer": self.optimizer, "data": data}
        with FlashCheckpoint(url, **keep, every=every, store_every=store_every) as ckpt:
            step, found = ckpt.restore(), list[int]()
            self._tell(restored=step, tier=ckpt.tier)
            for x in batch.over(DataLoader(data, batch_size=None, num_workers=loaders)) if step < steps else ():
                if batch.weight:
                    before(batch.indices)
                    found += drawn(x) if drawn else batch.indices
                if not batch.backward(loss_of(x)):
                    continue
                step += 1
                self._tell(step=step, samples=found)
                found = []
                made(step)
                ckpt.step(step)
                saved(step)
                if step >= steps:
                    break
            ckpt.save(step)
            ckpt.wait()
