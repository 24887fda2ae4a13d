"""What the tests of saving have in common: a small training whose every bit is compared, and a restore by hand."""

from __future__ import annotations

import copy
import io
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

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


def net(*layers: nn.Module) -> nn.Module:
    """A small model with dropout."""
    return nn.Sequential(nn.Linear(8, 32), *layers, nn.Dropout(0.3), nn.Linear(32, 1))


def plain() -> dict[str, Any]:
    """Adam and dropout."""
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def step(batch: torch.Tensor, _number: int) -> None:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    return {"model": model, "optimizer": optimizer, "step": step}


def batch_norm() -> dict[str, Any]:
    """Statistics that forward writes."""
    found = plain()
    model = net(nn.BatchNorm1d(32))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step(batch: torch.Tensor, _number: int) -> None:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    return {**found, "model": model, "optimizer": optimizer, "step": step}


def averaged_as_extra() -> dict[str, Any]:
    """The same, given as a thing with a state dict."""
    model = nn.Sequential(nn.Linear(8, 400), nn.Linear(400, 400), nn.Dropout(0.2), nn.Linear(400, 1))
    optimizer = torch.optim.Adam(model.parameters())
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))

    def step(batch: torch.Tensor, _number: int) -> None:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        ema.update_parameters(model)

    return {"model": model, "optimizer": optimizer, "extra": {"ema": ema}, "step": step}


def scheduled() -> dict[str, Any]:
    """Two schedulers."""
    found = plain()
    first = torch.optim.lr_scheduler.OneCycleLR(found["optimizer"], max_lr=0.1, total_steps=40)
    second = torch.optim.lr_scheduler.MultiStepLR(found["optimizer"], milestones=[3, 6])
    inner = found["step"]

    def step(batch: torch.Tensor, number: int) -> None:
        inner(batch, number)
        first.step()
        second.step()

    return {**found, "scheduler": [first, second], "step": step}
