"""What runs inside workers of a group with ``framework = "none"``. A program needs none of it; one in Python may use it.

``step(number)`` tells the agent that a unit of work is done: then a worker that makes none for too long is found hanging, and
reports count what a failure cost. ``with phase("evaluation"):`` announces that no units of work are done for a while. Both cost a
microsecond, never block, and do nothing outside a worker. Nothing of torch is imported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dlrover_adapters.torch.steps import phase
    from dlrover_adapters.torch.steps import tell as step

__all__ = ["phase", "step"]


def __getattr__(name: str) -> Any:
    """Either, when it is first asked for."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from dlrover_adapters.torch import steps  # the part of it that needs no torch

    return steps.tell if name == "step" else steps.phase
