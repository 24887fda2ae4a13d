"""What a worker saves through: its agent's vault, or, without an agent, this process itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from dlrover_core.checkpoint.arena import Geometry

from .vault import Arena, Inventory, Keeping, spread_of


class Line(Protocol):
    """The calls of `Vault` that saving needs."""

    rank: int
    local_rank: int
    world: int
    nproc: int

    @property
    def told(self) -> Any:
        """Of `Told` the generation, how many nodes, this one's number, and whether copies go between nodes and plans are made."""

    def arena(self, layout: int, geometry: Geometry) -> Arena:
        """Memory for this rank's states."""

    def ready(self, arena: int, holders: Sequence[Sequence[int]] | None = None, own: Sequence[int] = ()) -> None:
        """Its control page and table are written."""

    def inventory(self) -> Inventory:
        """What is in memory, and the address by now: it is waited for."""

    def saved(self, arena: int, slot: int, step: int, *, due: bool) -> None:
        """A slot is published."""

    def keeping(self, keeping: Keeping) -> None:
        """How states are kept."""

    def acked(self, plan: int) -> None:
        """This rank looks for the boundary of a plan."""

    def boundary(self, plan: int, step: int) -> None:
        """The boundary's state is published."""

    def close(self) -> None:
        """No more calls."""


def copied_elsewhere(line: Line) -> bool:
    """Do other nodes take copies of this one's states?"""
    return line.told.nodes > 1 and bool(line.told.copies)


def spare_slots(line: Line, holders: Sequence[Sequence[int]]) -> int:
    """Slots more, where no node has all of the state: the step that all have copied stays, and the one that they copy now."""
    nodes = int(line.told.nodes)
    alone = nodes < 2 or spread_of(holders, line.nproc, nodes) == 1
    return 2 if not alone and copied_elsewhere(line) else 0
