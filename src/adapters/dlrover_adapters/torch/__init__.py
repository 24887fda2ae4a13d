"""What runs inside torch workers. A training script needs none of it; it may call `step`.

``step(number)`` tells the agent that training step ``number`` is done: for loops whose steps are not optimizer calls, and so
that reports count lost steps in the script's own numbers. Cheap (about a microsecond), never blocks, does nothing outside a
worker. A script that imports it is believed to call it: its optimizer calls are counted only when it does not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .steps import tell as step

__all__ = ["step"]


def __getattr__(name: str) -> Any:
    """`step`, when it is first asked for: that is how we know that the script will tell."""
    if name != "step":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .steps import expect, tell

    expect()
    return tell
