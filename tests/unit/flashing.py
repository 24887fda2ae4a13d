"""What the tests of saving have in common: a small training whose every bit is compared, and a restore by hand."""

from __future__ import annotations

import copy
import io
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from dlrover_adapters.checkpoint.slotview import SlotView
from dlrover_adapters.torch.checkpoint.capture import Capture
from dlrover_adapters.torch.checkpoint.flash import FlashCheckpoint


def newest(ckpt: FlashCheckpoint) -> int:
    """The slot of the newest state in memory."""
    assert ckpt._engine is not None
    assert ckpt._engine.control is not None
    return max(ckpt._engine.control.stamps(), key=lambda one: one[1].sequence)[0]


def saved(ckpt: FlashCheckpoint, slot: int | None = None) -> tuple[int, dict[str, torch.Tensor], dict[str, bytes]]:
    """Step, tensors (copies) and objects of a slot; all is verified."""
    assert ckpt._engine is not None
    assert ckpt._engine.memory is not None
    view = SlotView(ckpt._engine.memory.memory, newest(ckpt) if slot is None else slot)
    view.verify()
    tensors = {item.name: view.tensor(item).clone() for item in view.table.items}
    step, objects = view.stamp.step, view.objects()
    view.release()
    return step, tensors, objects


def give_back(capture: Capture, tensors: Mapping[str, torch.Tensor], objects: Mapping[str, bytes]) -> None:
    """What restoring does, of one rank's state."""
    shapes = {name: (str(one.dtype)[6:], tuple(one.shape)) for name, one in tensors.items()}
    for target in capture.targets(shapes):
        target.tensor.copy_(tensors[target.name])
    capture.load({name: torch.load(io.BytesIO(one), weights_only=False) for name, one in objects.items()})


class Training:
    """Dropout, Adam, data in a random order; everything else is a test's. ``parts``: what is saved."""

    def __init__(self, build: Callable[[], dict[str, Any]], seed: int = 0) -> None:
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002  # the one that is saved
        self.data = torch.randn(64, 8)
        self.parts = build()
        self.step_ = self.parts.pop("step")

    def train(self, first: int, last: int, after: Callable[[int], object] = lambda _step: None) -> Iterator[Any]:
        """Steps from ``first`` to ``last``; what each leaves."""
        for step in range(first, last + 1):
            order = torch.randperm(64)[:16]
            order[0] = random.randrange(64) + 0 * int(np.random.randint(3))  # noqa: NPY002  # as above
            self.step_(self.data[order], step)
            after(step)
            yield fingerprint(self.parts)


def fingerprint(parts: Mapping[str, Any]) -> dict[str, Any]:
    """All states, copied."""
    found: dict[str, Any] = {}
    for name, part in parts.items():
        if name in {"frozen", "live"}:
            continue
        several = part if isinstance(part, dict) else dict(enumerate(part)) if isinstance(part, list) else {"": part}
        for key, one in several.items():
            found[f"{name}{key}"] = copy.deepcopy(one.state_dict() if hasattr(one, "state_dict") else one)
    return found


def same(one: Any, other: Any) -> bool:
    """Bit for bit."""
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)
