"""A rank that saves without torch: an arena by the vault's client, slots filled with one byte value each."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence

from dlrover_adapters.checkpoint.hashing import digest
from dlrover_adapters.checkpoint.table import CUT, Item, Table, pack_blob
from dlrover_adapters.torch.checkpoint.vault import Keeping, Vault, VaultRefused  # noqa: F401  # for scripts
from dlrover_core.checkpoint.arena import PAGE, Control, Geometry, Stamp

MIB = 1 << 20


def ranks(nproc: int = 1) -> None:
    """What the bare framework does not set: a world of one node."""
    os.environ.setdefault("WORLD_SIZE", str(nproc))
    os.environ.setdefault("LOCAL_WORLD_SIZE", str(nproc))


class Shelf:
    """One rank's arena of ``size`` bytes of data."""

    def __init__(self, vault: Vault, size: int = MIB, slots: int = 2, layout: int = 7) -> None:
        self.vault, self.size = vault, size
        holders = tuple((one,) for one in range(vault.world))
        item = Item(f"model.w{vault.rank}", "uint8", (size,), (0,), (size,), 0, size)
        table = Table(layout, vault.world, vault.rank, holders, (item,), (f"rank.{vault.rank}",)).packed()
        self.geometry = Geometry(slots, len(table), 4096, size)
        self.arena = vault.arena(layout, self.geometry)
        self.memory = mmap.mmap(self.arena.fd, self.geometry.total_bytes)
        os.close(self.arena.fd)
        self.control = Control(self.memory, self.geometry)
        if self.arena.fresh:
            self.memory[PAGE : PAGE + len(table)] = table
            self.control.make(
                layout=layout,
                rank=vault.rank,
                world=vault.world,
                local_rank=vault.local_rank,
                table_bytes=len(table),
                table_digest=digest(table),
            )
        vault.ready(self.arena.id, holders)
        self.sequence = max((stamp.sequence for _, stamp in self.control.stamps()), default=0)

    def keeps(self, url: str, **fields: object) -> None:
        """Say how."""
        told = Keeping(url, 1, 1, 0, "dcp", True, self.geometry.total_bytes, True)
        self.vault.keeping(told._replace(**fields))  # type: ignore[arg-type]

    def save(self, step: int, *, due: bool = False, slot: int = -1, cut: bytes = b"") -> None:
        """Fill a slot and publish it, unless somebody reads it. ``cut``: the position in the data, packed."""
        at = slot if slot >= 0 else step % self.geometry.slots
        if self.control.pinned(at):
            return
        self.control.begin(at)
        begin = self.geometry.data_at(at)
        self.memory[begin : begin + self.size] = bytes([step % 256]) * self.size
        blob = pack_blob({f"rank.{self.vault.rank}": b"object %d" % step, **({CUT: cut} if cut else {})})
        self.memory[self.geometry.blob_at(at) : self.geometry.blob_at(at) + len(blob)] = blob
        self.sequence += 1
        self.control.publish(at, Stamp(self.vault.told.generation, step, self.sequence, len(blob), digest(blob), due))
        self.vault.saved(self.arena.id, at, step, due=due)


def held(vault: Vault) -> list[tuple[int, int, int]]:
    """What the node has: rank, generation and step."""
    return sorted((one.rank, one.generation, one.step) for one in vault.inventory().holdings)


def bytes_of(memory: mmap.mmap, slot: int) -> Sequence[int]:
    """The values in a slot's data, each once."""
    geometry = Control(memory).geometry
    at = geometry.data_at(slot)
    return sorted(set(memory[at : at + geometry.data_bytes]))
