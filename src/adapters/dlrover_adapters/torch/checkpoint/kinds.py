"""Of which class what is saved is, and which optimizer it really is that has the state.

Wrappers come in two kinds. Some only show what another optimizer has (accelerate's, Lightning's): that other one is meant. Others
have groups or a state of their own beside it (ZeroRedundancyOptimizer, SAM, Lookahead): what is saved of those is not what they
need, and nobody would notice before a restore; so they are refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from dlrover_core.errors import SpecError

CLASSES = "classes"
"""Name of the object that says of which classes models and optimizers are."""


def unwrapped(name: str, optimizer: Any) -> Any:
    """The optimizer whose state it is; ``name``: as the user gave it. Raises `SpecError` where that is not this one."""
    inner = next((one for _key, one in _held(optimizer) if _shows(optimizer, one)), None)
    if inner is not None:
        optimizer = inner
    for key, _one in _held(optimizer):
        kind = type(optimizer).__name__
        if hasattr(optimizer, "consolidate_state_dict"):
            raise SpecError(
                name,
                f"{kind} has the state in another optimizer (.{key}), of each rank a part that only it can put together; "
                "shard with fully_shard, or give an ordinary optimizer",
            )
        raise SpecError(
            name,
            f"{kind} has the state in another optimizer; give that one, which is its .{key}, and this one's own as extra=",
        )
    return optimizer


def _held(optimizer: Any) -> Iterator[tuple[str, torch.optim.Optimizer]]:
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
        yield from ((at, one) for at, one in several if isinstance(one, torch.optim.Optimizer) and one is not optimizer)


def _shows(optimizer: Any, inner: torch.optim.Optimizer) -> bool:
    """Are groups and state those of the other one, the very same?"""
    groups, state = getattr(optimizer, "param_groups", None), getattr(optimizer, "state", None)
    return groups is inner.param_groups and state is inner.state


def overrides_state_dict(optimizer: Any) -> bool:
    """Does its ``state_dict`` say something else than its state and its groups?"""
    mine: Any = getattr(type(optimizer), "state_dict", None)
    return isinstance(optimizer, torch.optim.Optimizer) and mine is not torch.optim.Optimizer.state_dict


def foreseeable(optimizer: Any) -> bool:
    """Is it torch's own, so that its class's ``step`` writes nothing but parameters, ``state`` and ``param_groups``?"""
    kind = type(optimizer)
    if not isinstance(optimizer, torch.optim.Optimizer) or not kind.__module__.startswith("torch.optim."):
        return False
    if not getattr(kind.step, "__module__", "").startswith("torch.optim."):
        return False  # replaced by somebody
    return not any(hasattr(kind, one) for one in ("param_groups", "state")) and next(_held(optimizer), None) is None


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
