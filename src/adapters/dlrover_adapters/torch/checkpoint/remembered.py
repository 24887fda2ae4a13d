"""A state that the agents of this job hold in memory, found and read by all ranks together, whatever their number now.

For states of which every rank had a part of its own, as torch.distributed.checkpoint's planner deals them out (`Shelf`).
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
from collections.abc import Iterable
from typing import Any, NamedTuple, cast

import msgpack
import torch

from dlrover_adapters.checkpoint.manifests import StoredItem
from dlrover_adapters.checkpoint.seal import Placed, metadata
from dlrover_adapters.checkpoint.slotview import SlotView
from dlrover_adapters.checkpoint.table import Item, Table
from dlrover_core.checkpoint.arena import ArenaBroken

from .meeting import Meeting
from .vault import Holding, Vault, VaultGone

log = logging.getLogger("dlrover.torch")
_TRIES = 4
"""States that are looked at before storage is."""


class State(NamedTuple):
    """One state of one world."""

    generation: int
    step: int
    world: int
    layout: int


class _Held(NamedTuple):
    state: State
    rank: int
    address: str
    node: int


def recalled(vault: Vault | None, step: int | None, stored: tuple[int, int] | None) -> Remembered | None:
    """The newest state that the nodes hold whole, or that of ``step``; None: storage (``stored``) has a newer one.

    A collective of all ranks of the job; each gives its own line to its agent. What is damaged on any rank is passed over by all.
    """
    meeting = Meeting.of_environment()
    holdings: tuple[Holding, ...] = ()
    address = ""
    if vault is not None:
        with contextlib.suppress(VaultGone):
            found = vault.inventory()
            holdings, address = found.holdings, found.replica
    mine = [(one.generation, one.step, one.world, one.layout, one.rank, address) for one in holdings]
    everybody = meeting.all_gather("dcp/held", msgpack.packb(mine))
    held = [
        _Held(State(*one[:4]), one[4], one[5], node)
        for node, raw in enumerate(everybody)
        for one in msgpack.unpackb(raw)
    ]
    for state in _whole(held, step, stored)[:_TRIES]:
        remembered = Remembered(vault, holdings, held, state)
        if _agreed(meeting, remembered):
            return remembered
        remembered.close()
    if vault is not None:
        vault.close()
    return None


def _whole(held: Iterable[_Held], step: int | None, stored: tuple[int, int] | None) -> list[State]:
    """Those of which every rank's part is somewhere, newest first."""
    ranks: dict[State, set[int]] = {}
    for one in held:
        ranks.setdefault(one.state, set()).add(one.rank)
    found = [state for state, there in ranks.items() if len(there) == state.world]
    if step is not None:
        found = [state for state in found if state.step == step]
    elif stored is not None:
        found = [state for state in found if state.step >= stored[1] or state.generation > stored[0]]
    return sorted(found, reverse=True)


def _agreed(meeting: Meeting, remembered: Remembered) -> bool:
    """Every rank looks at what its own node has; all go on, or none does."""
    try:
        tables, why = remembered.look(meeting.local_rank), ""
    except (ArenaBroken, VaultGone, OSError) as error:
        tables, why = {}, f"{type(error).__name__}: {error}"
    told = [
        msgpack.unpackb(raw, strict_map_key=False)
        for raw in meeting.all_gather("dcp/seen", msgpack.packb((why, tables)))
    ]
    for rank, (reason, _) in enumerate(told):
        if reason:
            log.warning("step %d in memory is passed over, rank %d says: %s", remembered.state.step, rank, reason)
    found: dict[int, bytes] = {}
    for _, one in told:
        found.update(one)
    if any(reason for reason, _ in told) or len(found) != remembered.state.world:
        return False
    remembered.tables = {rank: Table.unpacked(raw) for rank, raw in found.items()}
    return True


class Remembered:
    """One state, read from this node's memory or its peers'. ``tables``: of each old rank what it had."""

    def __init__(self, vault: Vault | None, holdings: Iterable[Holding], held: Iterable[_Held], state: State) -> None:
        self.state, self.tables = state, dict[int, Table]()
        self._vault = vault
        self._here = {
            one.rank: one for one in holdings if State(one.generation, one.step, one.world, one.layout) == state
        }
        self._elsewhere: dict[int, list[str]] = {}
        for one in held:
            if one.state == state and one.address:
                self._elsewhere.setdefault(one.rank, []).append(one.address)
        self._views: dict[int, SlotView] = {}
        self._places: dict[tuple[str, tuple[int, ...]], tuple[int, Item]] = {}

    @property
    def step(self) -> int:
        """Its step."""
        return self.state.step

    def look(self, local_rank: int) -> dict[int, bytes]:
        """Verify what is here, the ranks of a node a part of it each; the tables of all that is here."""
        tables = {}
        for number, rank in enumerate(sorted(self._here)):
            view = self._view(rank)
            tables[rank] = view.table.packed()
            if self._vault is not None and number % self._vault.nproc == local_rank:
                view.verify()
        return tables

    def metadata(self) -> Any:
        """As torch has it, made from the tables."""
        items: list[tuple[StoredItem, Placed]] = []
        objects: dict[str, Placed] = {}
        paths: dict[str, tuple[Any, ...]] = {}
        nowhere = Placed("", 0, 0)
        for rank, table in sorted(self.tables.items()):
            for one in table.items:
                stored = StoredItem(one.name, one.dtype, one.full_shape, one.offsets, one.shape, 0, 0, 0, 0, one.size)
                items.append((stored, nowhere))
                self._places.setdefault((one.name, tuple(one.offsets)), (rank, one))
            for name in table.objects:
                objects.setdefault(name, nowhere)
                self._places.setdefault((name, ()), (rank, Item(name, "", (), (), (), 0, 0)))
            paths.update(table.paths)
        return metadata(items, objects, paths)

    def chunk(self, name: str, offsets: tuple[int, ...]) -> torch.Tensor:
        """One chunk, for reading, until `close`."""
        rank, item = self._places[name, offsets]
        return self._view(rank).tensor(item)

    def object(self, name: str) -> bytes:
        """What is no tensor, serialised."""
        rank, _ = self._places[name, ()]
        return self._view(rank).objects()[name]

    def check(self) -> None:
        """Raise `ArenaBroken` if anything was overwritten while it was read."""
        for rank, view in self._views.items():
            if not view.unchanged():
                raise ArenaBroken(f"step {self.step} of rank {rank} was overwritten while it was read; load again")

    def _view(self, rank: int) -> SlotView:
        if rank not in self._views:
            vault = cast(Vault, self._vault)
            if rank in self._here:
                self._views[rank] = _mapped(vault.borrow(self._here[rank].id), self._here[rank].slot)
            else:
                self._views[rank] = self._fetched(vault, rank)
        return self._views[rank]

    def _fetched(self, vault: Vault, rank: int) -> SlotView:
        state, last = self.state, VaultGone(f"nobody serves step {self.step} of rank {rank}")
        for address in dict.fromkeys(self._elsewhere.get(rank, ())):
            try:
                got = vault.fetch(address, rank, state.generation, state.step, state.layout)
                return _mapped(got.fd, 0)
            except VaultGone as error:
                last = error
        raise last

    def close(self) -> None:
        """Let the memory go."""
        for view in self._views.values():
            view.release()
        self._views = {}
        if self._vault is not None:
            self._vault.close()


def _mapped(fd: int, slot: int) -> SlotView:
    try:
        memory = mmap.mmap(fd, os.fstat(fd).st_size)
    finally:
        os.close(fd)
    return SlotView(memory, slot)
