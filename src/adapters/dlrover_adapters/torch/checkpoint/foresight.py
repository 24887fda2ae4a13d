"""What an optimizer's state will be after its first step: found out with a copy of it on the meta device, where nothing is.

So that the memory for it can be populated while the first steps are made. Of torch's own optimizers alone: the ``step`` of
another may do anything, a wrapper's for one makes a step of the optimizer in it, and that one is no copy. For those the memory
is made with the first save.
"""

from __future__ import annotations

import copy
import logging
from typing import Any

import torch

from .kinds import foreseeable
from .nested import local

_log = logging.getLogger(__name__)


def foreseen(optimizer: Any) -> dict[torch.Tensor, dict[str, torch.Tensor]] | None:
    """Of each parameter with a gradient to come, its state by key, as meta tensors or small ones; None: nobody knows."""
    if not foreseeable(optimizer):
        return None
    try:
        return _stepped(optimizer)
    except Exception as error:  # noqa: BLE001  # any optimizer may do anything here; it costs one slow first save
        _log.debug("what %s keeps is not known before its first step: %r", type(optimizer).__name__, error)
        return None


def _stepped(optimizer: torch.optim.Optimizer) -> dict[torch.Tensor, dict[str, torch.Tensor]]:
    ghost = copy.copy(optimizer)
    ghost.__dict__ = {**optimizer.__dict__}
    of: dict[torch.Tensor, torch.Tensor] = {}
    groups: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        ghosts = []
        for one in group["params"]:
            here = local(one)
            meta = torch.nn.Parameter(torch.empty_like(here.detach(), device="meta"), requires_grad=one.requires_grad)
            if one.requires_grad:
                meta.grad = torch.empty_like(meta)
            of[meta] = one
            ghosts.append(meta)
        groups.append(
            {**group, "params": ghosts, "fused": None, "foreach": False}
            if "foreach" in group
            else {**group, "params": ghosts}
        )
    ghost.param_groups = groups
    ghost.state = type(optimizer.state)(dict)
    # Neither hooks nor what a scheduler has put over it: the step alone.
    step: Any = type(optimizer).step
    with torch.no_grad():
        getattr(step, "__wrapped__", step)(ghost)
    found: dict[torch.Tensor, dict[str, torch.Tensor]] = {}
    for ghostly, state in ghost.state.items():
        if any(isinstance(value, (list, dict)) for value in state.values()):
            raise TypeError("a nested state")
        found[of[ghostly]] = {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}
    return found
