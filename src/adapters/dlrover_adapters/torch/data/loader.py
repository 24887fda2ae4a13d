"""`ElasticLoader`: a loader for trainers that iterate once for each epoch, and that count its length.

    loader = ElasticLoader(data, num_workers=4)

An iteration begins at the dataset's position and ends with its epoch. Loader processes go on from one epoch to the next, so that
they are started once.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from dlrover_core.errors import SpecError

from .dataset import ElasticDataset


class ElasticLoader:
    """Iterates over this rank's micro-batches of one epoch, from the dataset's position on.

    ``data``: with ``global_batch``, so that all steps are alike. ``options``: as of torch's DataLoader (``num_workers``,
    ``prefetch_factor``, ``pin_memory``, ``multiprocessing_context``...), but for those of batches, samplers and order.

    Raises `SpecError` for what cannot be right.
    """

    def __init__(self, data: ElasticDataset, **options: Any) -> None:
        if not isinstance(data, ElasticDataset):
            raise SpecError("data", f"an ElasticDataset, got {type(data).__name__}")
        for field in ("batch_size", "shuffle", "sampler", "batch_sampler", "drop_last", "collate_fn", "in_order"):
            if field in options:
                raise SpecError(
                    field, f"{options[field]!r}: leave it out, dataset {data.name!r} makes the micro-batches"
                )
        self.dataset = data
        # Of its own, since every new iteration draws from it: the script's random numbers are those of the model's steps.
        self._loader = DataLoader(data, batch_size=None, generator=torch.Generator(), **options)
        self._drawn: Generator[tuple[tuple[int, int], Any], None, None] | None = None
        self._at, self._within = (-1, 0), False
        """The position behind what was drawn, and whether more micro-batches of its step are to come."""

    @property
    def rounds(self) -> int:
        """Micro-batches of this rank in a global step."""
        found = self.dataset.division
        return -(-max(found.quota) // found.micro_batch)

    def __len__(self) -> int:
        """Micro-batches of this rank in a whole epoch. Raises `TypeError` for a stream, which has no end."""
        if self.dataset.waits:
            raise TypeError(f"dataset {self.dataset.name!r} is a stream: it has no length")
        return self.dataset.steps_per_epoch * self.rounds

    def __iter__(self) -> Iterator[Any]:
        here = self.dataset.place[1:3]
        if self._drawn is None or self._within or self._at != here:
            # Another position than was drawn up to: a restore, or a loop that was left within an epoch, or within a step.
            self.close()
            self._drawn, self._at, self._within = self._all(), here, False
        epoch = self._at[0]
        for at, content in self._drawn:
            self._at, self._within = at, at == self._at
            yield content
            if self._at[0] != epoch:
                return
        self._drawn = None

    def close(self) -> None:
        """End the loader processes. The next iteration starts others. Trainers of ours call it when training ends."""
        if self._drawn is not None:
            self._drawn.close()
            self._drawn = None

    def _all(self) -> Generator[tuple[tuple[int, int], Any], None, None]:
        """Every micro-batch to the end of the data; with the last of a step, the position after the step."""
        contents = iter(self._loader)
        for step in self.dataset.steps():
            before, after = step.batch[:2], self.dataset.after(step.batch)
            self.dataset.note(step)
            for number, _ in enumerate(step.micros, 1):
                yield (after if number == len(step.micros) else before), next(contents)
