"""A state that the agents of this job hold in memory, found and read by all ranks together, whatever their number now.

For states of which every rank had a part of its own, as torch.distributed.checkpoint's planner deals them out (`Shelf`).
"""

from __future__ import annotations

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
from .vault import MEMORY, OBJECTS, Holding, Vault, VaultGone

log = logging.getLogger("dlrover.torch")
_TRIES = 4
"""States that are looked at before storage is."""
READ_S = 3600.0
"""How long ranks wait for the slowest to read, compare and fetch; reading and fetching have bounds of their own."""


class State(NamedTuple):
    """One state of one world."""

    generation: int
    step: int
    world: int
    layout: int


class _Held(NamedTuple):
    state: State
    rank: int
    node: str
    address: str


def recalled(
    vault: Vault | None, step: int | None, stored: tuple[int, int] | None, meeting: Meeting | None = None
) -> Remembered | None:
    """The newest state that the nodes hold whole, or that of ``step``; None: storage (``stored``) has a newer one.

    A collective of all ranks of the job; each gives its own line to its agent. A copy that is damaged is passed over by all, and
    a state of which some part is nowhere whole.
    """
    meeting = meeting or Meeting.of_environment()
    holdings: tuple[Holding, ...] = ()
    node, address, why = f"rank {meeting.rank}", "", "" if vault is not None else "it has no agent"
    if vault is not None:
        node = vault.told.node
        try:
            found = vault.inventory()
            # What a rank alone has is no part of such a state.
            holdings, address = tuple(one for one in found.holdings if one.kind != OBJECTS), found.replica
        except VaultGone as error:
            why = f"its agent does not say what it holds: {error}"
    mine = [(one.generation, one.step, one.world, one.layout, one.rank) for one in holdings]
    everybody = [
        msgpack.unpackb(raw) for raw in meeting.all_gather("dcp/held", msgpack.packb((node, address, why, mine)))
    ]
    held = [_Held(State(*one[:4]), one[4], node, address) for node, address, _, its in everybody for one in its]
    reasons = {rank: why for rank, (*_, why, _) in enumerate(everybody) if why}
    if held and reasons:
        # Without a line nothing can be read from others' memory either.
        log.warning("memory is passed over, %s", "; ".join(f"rank {rank} says: {why}" for rank, why in reasons.items()))
    for state in _whole(held, step, stored)[:_TRIES] if not reasons else ():
        remembered = Remembered(vault, node, holdings, held, state)
        if remembered.agreed(meeting):
            return remembered
        remembered.release()
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


class Remembered:
    """One state, read from this node's memory or its peers'. ``tables``: of each old rank what it had."""

    def __init__(
        self, vault: Vault | None, node: str, holdings: Iterable[Holding], held: Iterable[_Held], state: State
    ) -> None:
        self.state, self.tables = state, dict[int, Table]()
        self._vault, self._node = vault, node
        # One's own before a copy: it was there first.
        self._here = {
            one.rank: one
            for one in sorted(holdings, key=lambda one: one.kind == MEMORY)
            if State(one.generation, one.step, one.world, one.layout) == state
        }
        self._elsewhere = [one for one in held if one.state == state and one.address]
        self._views: dict[int, SlotView] = {}
        self._places: dict[tuple[str, tuple[int, ...]], tuple[int, Item]] = {}

    @property
    def step(self) -> int:
        """Its step."""
        return self.state.step

    def agreed(self, meeting: Meeting) -> bool:
        """Every rank looks at what its own node has; what is damaged is used by nobody. Is all of the state left?"""
        told = _said(meeting, "dcp/seen", (self._node, *self._look(meeting.local_rank), self._gone))
        if lost := {rank: gone for rank, (*_, gone) in enumerate(told) if gone}:
            log.warning("step %d in memory is passed over, without a line to the agents of ranks %s", self.step, lost)
            return False
        broken = {(node, rank): why for node, _, its, _ in told for rank, why in its.items()}
        for (node, rank), why in broken.items():
            log.warning("step %d of rank %d in the memory of %s is passed over: %s", self.step, rank, node, why)
        whole = {rank for node, its, *_ in told for rank in its if (node, rank) not in broken}
        if len(whole) != self.state.world:
            log.warning(
                "step %d in memory is passed over: %d of %d parts are whole", self.step, len(whole), self.state.world
            )
            return False
        self._here = {rank: one for rank, one in self._here.items() if (self._node, rank) not in broken}
        self._elsewhere = [one for one in self._elsewhere if (one.node, one.rank) not in broken]
        for rank in self._views.keys() - self._here.keys():
            self._views.pop(rank).release()
        return self._all_bring(meeting, whole)

    def _all_bring(self, meeting: Meeting, ranks: set[int]) -> bool:
        """Each rank gets the tables of all parts; of as many ranks as had saved it each the part of its number, too: that one it
        needs. Those whose nodes have it not get it while all can still take something else.
        """
        same = meeting.world == self.state.world
        why = (self._bring((meeting.rank,)) if same else "") or self._read_tables(ranks, meeting.rank)
        lost = {rank: why for rank, why in enumerate(_said(meeting, "dcp/brought", why)) if why}
        for rank, reason in lost.items():
            log.warning("step %d in memory is passed over, rank %d says: %s", self.step, rank, reason)
        return not lost

    def _read_tables(self, ranks: set[int], first: int) -> str:
        """From what is here, else from the other nodes by the agent: not through the store, which takes what anybody writes."""
        for rank in sorted(ranks, key=lambda rank: (rank - first) % self.state.world):
            try:
                if rank in self._here or rank in self._views:
                    self.tables[rank] = self._view(rank).table
                else:
                    head = self._fetched(cast(Vault, self._vault), rank, whole=False)
                    self.tables[rank] = head.table
                    head.release()
            except (ArenaBroken, VaultGone, OSError) as error:
                return f"the table of rank {rank}: {type(error).__name__}: {error}"
        return ""

    def bring(self, chunks: Iterable[tuple[str, tuple[int, ...]]]) -> str:
        """Have the parts here that these chunks and objects (without offsets) are in; why not, empty: they are."""
        return self._bring(dict.fromkeys(self._places[one][0] for one in chunks))

    def _bring(self, ranks: Iterable[int]) -> str:
        for rank in ranks:
            try:
                self._view(rank)
            except (ArenaBroken, VaultGone, OSError) as error:
                return f"the part of rank {rank}: {type(error).__name__}: {error}"
        return ""

    @property
    def _gone(self) -> str:
        """Why this rank can read nothing from others; empty: it can."""
        return self._vault.gone if self._vault is not None else "there is no agent"

    def _look(self, local_rank: int) -> tuple[list[int], dict[int, str]]:
        """Verify what is here, the ranks of a node a part of it each; the ranks whose parts are here, and what is damaged."""
        there, broken = [], {}
        for number, rank in enumerate(sorted(self._here)):
            try:
                view = self._view(rank)
                there.append(rank)
                if self._vault is not None and number % self._vault.nproc == local_rank:
                    view.verify()
            except (ArenaBroken, VaultGone, OSError) as error:
                broken[rank] = f"{type(error).__name__}: {error}"
        return there, broken

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

    def shape(self, chunk: tuple[str, tuple[int, ...]]) -> tuple[int, ...]:
        """Of a chunk; of an object: ()."""
        return self._places[chunk][1].shape

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

    def _fetched(self, vault: Vault, rank: int, *, whole: bool = True) -> SlotView:
        state, ask = self.state, vault.fetch if whole else vault.head
        last: Exception = VaultGone(f"nobody serves step {self.step} of rank {rank}")
        for address in dict.fromkeys(one.address for one in self._elsewhere if one.rank == rank):
            try:
                got = ask(address, rank, state.generation, state.step, state.layout)
                return _mapped(got.fd, 0)
            except (ArenaBroken, VaultGone, OSError) as error:
                last = error
        raise last

    def release(self) -> None:
        """Let the memory go."""
        for view in self._views.values():
            view.release()
        self._views = {}

    def close(self) -> None:
        """The same, and the line to the agent."""
        self.release()
        if self._vault is not None:
            self._vault.close()


def _said(meeting: Meeting, name: str, mine: object) -> list[Any]:
    """What every rank says, by rank."""
    told = meeting.decide(name, msgpack.packb(mine), msgpack.packb, limit_s=READ_S)
    return [msgpack.unpackb(one, strict_map_key=False) for one in msgpack.unpackb(told)]


def _mapped(fd: int, slot: int) -> SlotView:
    try:
        memory = mmap.mmap(fd, os.fstat(fd).st_size)
    finally:
        os.close(fd)
    return SlotView(memory, slot)
