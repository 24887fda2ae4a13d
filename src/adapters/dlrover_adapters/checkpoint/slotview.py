"""One slot of an arena, looked at: what it holds, its tensors without a copy, and whether every byte is as it was written."""

from __future__ import annotations

import contextlib
import ctypes
from typing import TYPE_CHECKING, Any

from dlrover_adapters.checkpoint.hashing import digest, digests
from dlrover_adapters.checkpoint.table import CUT, TRAINED, Item, Table, cut_in, trained_in, unpack_blob
from dlrover_core.checkpoint.arena import BLOCK_BYTES, PAGE, ArenaBroken, Control, Stamp

if TYPE_CHECKING:
    import torch


class SlotGone(ArenaBroken):
    """The slot holds nothing whole, or something else than when it was first looked at: it was overwritten meanwhile."""


class SlotDamaged(ArenaBroken):
    """Bytes of a slot are not as they were written. ``block`` is the block of the data, -1: the blob, the table or a header."""

    def __init__(self, message: str, block: int = -1) -> None:
        super().__init__(message)
        self.block = block


class SlotView:
    """What lies in ``slot`` of the arena in ``memory``: a writable mapping of all of it, which nobody closes while this lives.

    ``table``: that of this arena, if the caller has unpacked it before. The header, and the table where it is unpacked here, are
    verified at once; the blob and the data by `verify`. The worker may overwrite the slot at any time unless it is pinned: what
    was read is good only if `unchanged` says so afterwards. Raises `SlotGone` for a slot that holds nothing, `ArenaBroken`.
    """

    def __init__(self, memory: Any, slot: int, *, table: Table | None = None) -> None:
        self.memory, self.slot = memory, slot
        self._bytes = memoryview(memory).cast("B")
        try:
            self.control = Control(memory)
        except ValueError as error:
            self._bytes.release()
            raise error if isinstance(error, ArenaBroken) else ArenaBroken(str(error)) from error
        try:
            self._open(slot, table)
        except BaseException:
            self.release()
            raise

    def _open(self, slot: int, table: Table | None) -> None:
        sizes = self.control.geometry
        if sizes.total_bytes > len(self._bytes):
            raise ArenaBroken(f"an arena of {sizes.total_bytes:,} bytes in {len(self._bytes):,} bytes of memory")
        stamp = self.control.stamp(slot)
        if stamp is None:
            raise SlotGone(f"slot {slot} holds nothing whole")
        if stamp.blob_bytes > sizes.blob_bytes:
            raise SlotDamaged(f"slot {slot}: a blob of {stamp.blob_bytes:,} bytes where {sizes.blob_bytes:,} fit")
        self.stamp: Stamp = stamp
        self.table: Table = read_table(self._bytes, self.control) if table is None else table
        at = sizes.data_at(slot)
        self.data: memoryview = self._bytes[at : at + sizes.data_bytes]
        """All of the slot's data, as they lie there."""
        at = sizes.blob_at(slot)
        self.blob: memoryview = self._bytes[at : at + stamp.blob_bytes]
        """The slot's blob, packed."""

    # ---- what is there

    @property
    def hashed(self) -> bool:
        """Has the saver written the digests of exactly this publication?"""
        return self.control.hashed(self.slot) == self.stamp.sequence

    def raw(self, item: Item) -> memoryview:
        """One item's bytes, no copy."""
        if item.at < 0 or item.size < 0 or item.at + item.size > len(self.data):
            raise SlotDamaged(f"slot {self.slot}: item {item.name} lies outside of the data")
        return self.data[item.at : item.at + item.size]

    def tensor(self, item: Item) -> torch.Tensor:
        """One item as a tensor of its ``shape``, no copy: for reading only, and no longer than the mapping."""
        import torch

        dtype = getattr(torch, item.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise ArenaBroken(f"item {item.name}: this torch has no {item.dtype!r}")
        count = 1
        for length in item.shape:
            count *= length
        if count * dtype.itemsize != item.size:
            raise ArenaBroken(f"item {item.name}: {item.size} bytes are no {item.dtype} of shape {list(item.shape)}")
        if count == 0:
            return torch.empty(item.shape, dtype=dtype)
        return torch.frombuffer(self.raw(item), dtype=dtype, count=count).view(item.shape)

    def objects(self) -> dict[str, bytes]:
        """What is no tensor, by name, serialised; without what is said of data. Raises `SlotDamaged` for a damaged blob."""
        self._verify_blob()
        found = unpack_blob(self.blob)
        found.pop(CUT, None)
        found.pop(TRAINED, None)
        return found

    def trained(self) -> bytes:
        """What the rank was trained on by leases, as `dlrover_core.data.trained.unpack_counted` reads it; empty: it says nothing.

        Raises `SlotDamaged` where the blob is not as it was written.
        """
        self._verify_blob()
        return trained_in(self.blob)

    def cut(self) -> bytes:
        """How far each dataset is consumed in this state, as `dlrover_core.data.cut.unpack` reads it; empty: it has no position.

        Every rank's slot of a step has the same. Raises `SlotDamaged` where the blob is not as it was written.
        """
        self._verify_blob()
        return cut_in(self.blob)

    def digests(self) -> tuple[int, ...]:
        """The digest words, one for each block of the data; they are good only if `hashed`."""
        sizes = self.control.geometry
        return tuple((ctypes.c_uint64 * sizes.blocks).from_buffer(self.memory, sizes.digests_at(self.slot)))

    # ---- is it good

    def unchanged(self) -> bool:
        """Does the slot still hold the state that it held when this view was made? Ask after reading; it may have become due."""
        try:
            return self.stamp.same(self.control.stamp(self.slot))
        except ArenaBroken:
            return False

    def verify(self, *, full: bool = True) -> bool:
        """Compare header, blob and, if ``full`` and there are digests, every block of the data with what was written.

        True: every byte was compared; False: the data were not, for want of digests or of ``full``. Raises `SlotDamaged`, which
        says where, and `SlotGone` if the slot was overwritten meanwhile.
        """
        if not self.stamp.same(self.control.stamp(self.slot)):
            raise SlotGone(f"slot {self.slot} was overwritten")
        self._verify_blob()
        compared = full and self.hashed
        if compared:
            wanted = self.digests()
            for block, found in enumerate(digests(self.data)):
                if found != wanted[block]:
                    self._still_here()
                    raise SlotDamaged(
                        f"slot {self.slot}, step {self.stamp.step}: bytes {block * BLOCK_BYTES:,} to "
                        f"{min((block + 1) * BLOCK_BYTES, len(self.data)):,} of the data are not as they were written "
                        f"({self._whose(block)})",
                        block,
                    )
        self._still_here()
        return compared

    def _verify_blob(self) -> None:
        if digest(self.blob) != self.stamp.blob_digest:
            self._still_here()
            raise SlotDamaged(f"slot {self.slot}, step {self.stamp.step}: the blob is not as it was written")

    def _still_here(self) -> None:
        if not self.unchanged():
            raise SlotGone(f"slot {self.slot} was overwritten while it was read")

    def _whose(self, block: int) -> str:
        begin, end = block * BLOCK_BYTES, (block + 1) * BLOCK_BYTES
        names = [item.name for item in self.table.items if item.at < end and item.at + item.size > begin]
        return f"{', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''}" or "no item's"

    # ---- the end

    def release(self) -> None:
        """Let the memory go, so that the mapping can be closed; tensors that are still in use keep it."""
        for name in ("data", "blob", "_bytes"):
            view = self.__dict__.pop(name, None)
            if view is not None:
                with contextlib.suppress(BufferError):  # somebody still reads through it
                    view.release()
        if "control" in self.__dict__:
            self.control.release()


def read_table(memory: Any, control: Control) -> Table:
    """The layout table of an arena, verified. Raises `ArenaBroken`."""
    size = control.table_used
    if size > control.geometry.table_bytes:
        raise SlotDamaged(f"a table of {size:,} bytes where {control.geometry.table_bytes:,} fit")
    raw = bytes(memoryview(memory)[PAGE : PAGE + size])
    if digest(raw) != control.table_digest:
        raise SlotDamaged("the layout table is not as it was written")
    return Table.unpacked(raw)
