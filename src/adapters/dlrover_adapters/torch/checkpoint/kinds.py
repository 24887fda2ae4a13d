"""Classes of objects that are saved, and the optimizer that holds the state inside a wrapper.

Two kinds of wrappers hold another optimizer. Some are views: accelerate's and Lightning's show groups and state of the optimizer
in them, and have nothing to save of their own. Views are known by the names of their classes, and the optimizer in them is saved.
All others (mixed precision, ZeRO, SAM, Lookahead) may have weights or a state beside it, also where they show the groups and the
state of the one in them. They are refused: what is saved of them would not be all that they need.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from dlrover_core.errors import SpecError

_ZERO_3 = ("ds_id", "ds_tensor", "ds_status")
_SIZES = (
    "in_features",
    "out_features",
    "in_channels",
    "out_channels",
    "num_embeddings",
    "embedding_dim",
    "num_features",
    "num_channels",
)
"""Attributes by which torch's modules say how large their weight is; where one is 0, so is the weight."""
CLASSES = "classes"
"""Name of the object that says of which classes models and optimizers are."""


_VIEWS = {
    "accelerate.optimizer.AcceleratedOptimizer": "optimizer",
    "accelerate.utils.deepspeed.DeepSpeedOptimizerWrapper": "optimizer",
    "lightning.fabric.wrappers._FabricOptimizer": "_optimizer",
    "lightning.pytorch.core.optimizer.LightningOptimizer": "_optimizer",
    "lightning_fabric.wrappers._FabricOptimizer": "_optimizer",
    "pytorch_lightning.core.optimizer.LightningOptimizer": "_optimizer",
}
"""Wrappers that have nothing to save of their own: by class, the attribute with the optimizer that they show."""


def unwrapped(name: str, optimizer: Any) -> Any:
    """The optimizer whose state it is; ``name``: as the user gave it. Raises `SpecError` where that is not this one."""
    while (inner := _shown(optimizer)) is not None:
        optimizer = inner
    kind = type(optimizer).__name__
    for key, _one in _held(optimizer):
        if hasattr(optimizer, "consolidate_state_dict"):
            raise SpecError(
                name,
                f"{kind} has the state in another optimizer (.{key}), of each rank a part that only it can put together; "
                "shard with fully_shard, or give an ordinary optimizer",
            )
        raise SpecError(
            name,
            f"{kind} has another optimizer in it (.{key}), and may have weights or a state beside that one; give the inner one, "
            f"which is its .{key}, as optimizer=, and what {kind} has of its own (a loss scale, weights that .{key} does not "
            "step) as extra= or state=",
        )
    return optimizer


def _shown(optimizer: Any) -> Any:
    """The optimizer that a view shows; None: it is none."""
    # Lightning's views make a class of their own for each object, with theirs as the first base.
    for kind in type(optimizer).__mro__[:2]:
        key = _VIEWS.get(f"{kind.__module__}.{kind.__qualname__}")
        if key is not None and (
            kind is type(optimizer) or kind.__module__.startswith(("lightning", "pytorch_lightning"))
        ):
            return getattr(optimizer, "__dict__", {}).get(key)
    return None


def _held(optimizer: Any) -> Iterator[tuple[str, Any]]:
    """Other optimizers that are its attributes, or in a container that is."""
    for key, value in getattr(optimizer, "__dict__", {}).items():
        if key in {"state", "param_groups"}:
            continue
        if isinstance(value, Mapping):
            several = [(f"{key}[{number!r}]", one) for number, one in value.items()]
        elif isinstance(value, (list, tuple)):
            several = [(f"{key}[{number}]", one) for number, one in enumerate(value)]
        else:
            several = [(key, value)]
        yield from ((at, one) for at, one in several if one is not optimizer and _is_optimizer(one))


def _is_optimizer(one: Any) -> bool:
    """Whether this is an optimizer, by its class or its attributes: Megatron's and DeepSpeed's derive from no class of torch."""
    if isinstance(one, (torch.optim.Optimizer, torch.Tensor, torch.nn.Module, type)):
        return isinstance(one, torch.optim.Optimizer)
    has = {*getattr(one, "__dict__", ()), *dir(type(one))}
    return {"param_groups", "step", "zero_grad"} <= has


def overrides_state_dict(optimizer: Any) -> bool:
    """May its ``state_dict`` say something else than its state and its groups?"""
    mine: Any = getattr(type(optimizer), "state_dict", None)
    return callable(mine) and mine is not torch.optim.Optimizer.state_dict


def foreseeable(optimizer: Any) -> bool:
    """Is it torch's own, so that its class's ``step`` writes nothing but parameters, ``state`` and ``param_groups``?"""
    kind = type(optimizer)
    if not isinstance(optimizer, torch.optim.Optimizer) or not kind.__module__.startswith("torch.optim."):
        return False
    if not getattr(kind.step, "__module__", "").startswith("torch.optim."):
        return False  # replaced by somebody
    return not any(hasattr(kind, one) for one in ("param_groups", "state")) and next(_held(optimizer), None) is None


def refuse_placeholder(
    name: str, parameter: torch.Tensor, owner: object = None, state: Mapping[str, Any] | None = None
) -> None:
    """Raise `SpecError` for a parameter whose values lie elsewhere. ``owner``: its module; ``state``: its own in an optimizer."""
    if any(hasattr(parameter, mark) for mark in _ZERO_3):
        raise SpecError(
            name,
            "is a placeholder of DeepSpeed's ZeRO-3: its values lie in partitions that only DeepSpeed puts together; save with "
            "DeepSpeed's save_checkpoint, or shard with fully_shard instead of ZeRO-3",
        )
    if parameter.numel():
        return
    why = ""
    if name.endswith("weight"):
        sizes = [(key, size) for key in _SIZES if isinstance(size := getattr(owner, key, None), int)]
        if sizes and all(size > 0 for _key, size in sizes):
            why = f"its module has {' and '.join(f'{key}={size}' for key, size in sizes)}"
    for key, one in (state or {}).items():
        if isinstance(one, torch.Tensor) and one.dim() and one.numel():
            why = f"its {key} in the optimizer's state has {one.numel()}"
    if why:
        raise SpecError(
            name,
            f"has no elements, though {why}: its values lie elsewhere, and would be lost; give what holds them with state=..., "
            "or shard with fully_shard",
        )


def class_of(one: Any) -> str:
    """The name of its class, whatever it is wrapped in."""
    while isinstance(one, torch.nn.Module):
        parallel = isinstance(one, (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel))
        inner = one._modules.get("module" if parallel else "_orig_mod")
        if inner is None:
            break
        one = inner
    kind = type(one)
    # Classes that fully_shard and parametrizations make.
    while kind.__name__ in {f"{made}{kind.__bases__[-1].__name__}" for made in ("FSDP", "Parametrized")}:
        kind = kind.__bases__[-1]
    return kind.__name__
