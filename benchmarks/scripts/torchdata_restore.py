"""The peer of `bench_data.py`: torchdata's StatefulDataLoader at 90 % of a shuffled epoch; prints its milliseconds to a batch."""

from __future__ import annotations

import sys
from typing import Any

from restoring import print_ms
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import RandomSampler


class Numbers(Dataset[int]):
    """Each sample is its index."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        return index


def collated(samples: list[int]) -> list[int]:
    return samples


def loader(size: int, batch: int) -> Any:
    data = Numbers(size)
    return StatefulDataLoader(data, batch, sampler=RandomSampler(data), num_workers=0, collate_fn=collated)


def main() -> int:
    size, batch, trials = map(int, sys.argv[1:4])
    first = loader(size, batch)
    for number, _ in enumerate(first, 1):
        if number >= size * 9 // 10 // batch:
            break
    state = first.state_dict()

    def restored() -> Any:
        again = loader(size, batch)
        again.load_state_dict(state)
        return again

    return print_ms(restored, batch, trials)


if __name__ == "__main__":
    sys.exit(main())
