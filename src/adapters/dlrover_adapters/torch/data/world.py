"""Which rank this process is among those that divide the data."""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist

from dlrover_core.errors import SpecError


def of_process() -> tuple[int, int]:
    """Rank and world size: torch.distributed's where it is initialized, else the launcher's, else of one process alone."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def of_group(group: Any) -> tuple[int, int]:
    """Rank and world size in a process group; None: of all ranks.

    Raises: SpecError where there are other ranks, and torch.distributed is not initialized.
    """
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(group), dist.get_world_size(group)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        raise SpecError(
            "group",
            f"torch.distributed is not initialized, and WORLD_SIZE is {world}: each rank would train on all samples; call "
            "torch.distributed.init_process_group() before",
        )
    return 0, 1


def gathered(mine: Any, world: int, group: Any) -> list[Any]:
    """What each rank of the group gives, by rank. A collective where there are several."""
    found = [mine] * world
    if world > 1:
        dist.all_gather_object(found, mine, group=group)
    return found
