"""What a worker saves through: its agent's vault, or, without an agent, this process itself."""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Sequence
from typing import Any, Protocol

from dlrover_adapters.checkpoint.slotview import read_table
from dlrover_adapters.checkpoint.table import Table
from dlrover_core.checkpoint.arena import SLOTS_MAX, ArenaBroken, Control, Geometry

from .vault import Arena, Inventory, Keeping, VaultGone, spread_of

_OLD_LAYOUTS = 2

SMALL_BYTES = 4 * 1024 * 1024
"""Of a slot: eight of them take 32 MiB at most."""


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

    def borrow(self, holding: int) -> int:
        """A descriptor of what is in memory."""

    def saved(self, arena: int, slot: int, step: int, *, due: bool) -> None:
        """A slot is published."""

    def keeping(self, keeping: Keeping) -> None:
        """How states are kept."""

    def alarm(self, words: str) -> None:
        """A save of this rank was left out because of an error."""

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


def old_tables(line: Line) -> list[Table]:
    """This rank's tables that lie in this node's memory from before, the newest layout first, two at most.

    A copy of this rank's state that this node holds, or fetched for a restore, has one too.
    """
    try:
        holdings = line.inventory().holdings
    except VaultGone:
        return []
    found: dict[int, Table] = {}
    for one in holdings:
        mine = (one.rank, one.world) == (line.rank, line.world)
        if mine and one.layout not in found and len(found) < _OLD_LAYOUTS:
            with contextlib.suppress(ArenaBroken, VaultGone, OSError):
                found[one.layout] = _table(line.borrow(one.id))
    return list(found.values())


def _table(fd: int) -> Table:
    """The table of an arena; closes ``fd``. Raises `ArenaBroken`, OSError."""
    try:
        memory = mmap.mmap(fd, 0, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    finally:
        os.close(fd)
    try:
        control = Control(memory)
        try:
            return read_table(memory, control)
        finally:
            control.release()
    finally:
        with contextlib.suppress(BufferError):
            memory.close()


def slots_of(line: Line, holders: Sequence[Sequence[int]], asked: int, data_bytes: int) -> int:
    """How many slots an arena gets, where ``asked`` are needed for saves; ``data_bytes``: of one slot.

    Small states of which other nodes take copies get as many as there can be. Such states are often saved faster than copies
    travel; a lost node would leave no step that its partner has a copy of and that all others still have in memory.
    """
    small = data_bytes <= SMALL_BYTES and copied_elsewhere(line)
    return SLOTS_MAX if small else min(SLOTS_MAX, asked + spare_slots(line, holders))
