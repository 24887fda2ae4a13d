"""A state as torch.distributed.checkpoint saves it, torch's own calls and our hooks, for the tests of these hooks.

They import it when they run: it takes a second or two, which whoever only collects tests need not spend.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.state_dict import get_state_dict

from dlrover_adapters.torch.checkpoint.dcp import FlashStager, FlashStorageReader, FlashStorageWriter, step_in

__all__ = [
    "AsyncStager",
    "CheckpointException",
    "FlashStager",
    "FlashStorageReader",
    "FlashStorageWriter",
    "dcp",
    "same",
    "state",
    "step_in",
    "torch",
]


def state(seed: int = 0) -> dict[str, Any]:
    """A trained model's and its Adam's state, a buffer, something that is no tensor, and lists."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.randn(4, 6)).sum().backward()
        optimizer.step()
    weights, moments = get_state_dict(model, optimizer)
    return {
        "model": weights,
        "optimizer": moments,
        "note": {"epoch": 3, "words": ["a", "b"]},
        "rows": [torch.arange(3.0) + seed, torch.tensor(7 + seed)],
        "half": torch.full((3, 2), 0.5 + seed, dtype=torch.bfloat16),
    }


def same(one: Any, other: Any) -> bool:
    """Deep equality, tensors bit for bit."""
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(same(*pair) for pair in zip(one, other, strict=True))
    return bool(one == other)
