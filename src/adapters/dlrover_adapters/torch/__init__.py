"""What runs inside torch workers. A training script needs none of it; it may call `step`."""

from __future__ import annotations


def step(number: int) -> None:
    """Tell the agent that training step ``number`` is done; from the first call on, optimizer calls are no longer counted.

    For loops whose steps are not optimizer calls. Cheap (about a microsecond), never blocks, does nothing outside a worker.
    """
    from .steps import tell

    tell(number)
