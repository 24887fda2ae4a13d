"""Where training is about to overwrite what may still be copied: optimizers' steps, and states that are loaded.

The functions that modules and optimizers hold on to are this module's own: models are copied and pickled with their hooks.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import torch

_undisturbed: Any = getattr(torch, "_disable_dynamo", lambda function: function)
_watched: weakref.WeakSet[Any] = weakref.WeakSet()


class Waits(Protocol):
    """Who has copies in flight."""

    def before_optimizer(self, optimizer: Any) -> None:
        """An optimizer is about to step."""

    def before_load(self) -> None:
        """A state is about to be loaded."""


class Hooks:
    """Those of one checkpoint; `remove` takes them away."""

    def __init__(self, waits: Waits, optimizers: Iterable[Any], models: Iterable[torch.nn.Module]) -> None:
        self._handles: list[Any] = []
        self._owners: list[Any] = []
        mine = weakref.ref(waits)
        _watched.add(waits)
        self._waits = mine
        for optimizer in optimizers:
            self._handles += [
                optimizer.register_step_pre_hook(_before_step(mine)),
                optimizer.register_load_state_dict_pre_hook(_before_load),
            ]
        for model in models:
            for module in model.modules():
                self._handles.append(module._register_load_state_dict_pre_hook(_before_module_load))  # type: ignore[no-untyped-call]

    def remove(self) -> None:
        """Nobody waits any more."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        waits = self._waits()
        if waits is not None:
            _watched.discard(waits)


def _before_step(mine: weakref.ref[Waits]) -> Any:
    # Not traced into compiled optimizers, which would copy nothing at all; nothing is loaded by it before it is called.
    def wait(optimizer: Any, _args: tuple[Any, ...], _kwargs: Mapping[str, Any]) -> None:
        waits = mine()
        if waits is not None:
            waits.before_optimizer(optimizer)

    return _undisturbed(wait)


def _before_load(_optimizer: Any, _state: Any) -> None:
    for one in list(_watched):
        one.before_load()


def _before_module_load(*_args: Any) -> None:
    for one in list(_watched):
        one.before_load()


def why_blocking(optimizers: Iterable[Any]) -> str:
    """What makes copies beside training impossible with these optimizers; empty: nothing that is known beforehand."""
    for optimizer in optimizers:
        name = type(optimizer).__name__
        if not isinstance(optimizer, torch.optim.Optimizer):
            return f"{name} is no torch.optim.Optimizer, so nobody knows when it steps"
        if not hasattr(optimizer, "_optimizer_step_pre_hooks"):
            return f"{name} was made without Optimizer.__init__ and takes no hooks, so nobody knows when it steps"
        for group in optimizer.param_groups:
            if group.get("capturable"):
                return f"{name} is capturable: a CUDA graph runs no hook"
            for one in group["params"]:
                if getattr(one, "_in_backward_optimizers", None):
                    return f"{name} steps within backward"
    return ""
