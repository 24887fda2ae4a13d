"""An arena in this process: mapped, populated ahead, with what is needed to write a state into one of its slots."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import math
import mmap
import os
import threading

import torch

from dlrover_adapters.checkpoint.hashing import digest
from dlrover_adapters.checkpoint.table import Item, Table, pack_blob
from dlrover_core.checkpoint.arena import PAGE, ArenaBroken, Control, Geometry, rounded

from . import devices

POPULATE_BYTES = 4 * 1024 * 1024
"""At a time: meanwhile this process can map no other memory."""
WORTH_WAITING_BYTES = 64 * 1024 * 1024
"""Fresh memory that a save may touch itself: 30 ms as a rule, 0.3 s where a hypervisor has to find each page."""
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14
HUGE_BYTES = 2 * 1024 * 1024
BLOB_MIN_BYTES = 1024 * 1024
_log = logging.getLogger("dlrover.torch")


def blob_room(used: int) -> int:
    """For objects that grow by a little from save to save, the same in every generation: a power of two, in bytes."""
    return max(BLOB_MIN_BYTES, 1 << max(0, 2 * used - 1).bit_length())


def ask_for_huge_pages(address: int, size: int) -> None:
    """For what of this memory has no pages yet and is large enough. Where the kernel knows none, nothing happens."""
    begin, end = -(-address // HUGE_BYTES) * HUGE_BYTES, (address + size) // HUGE_BYTES * HUGE_BYTES
    if end > begin:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_HUGEPAGE)


def roomy(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """An empty tensor of this process that begins where a huge page can: filling fresh small pages takes three times as long."""
    count = math.prod(shape)
    size = count * dtype.itemsize
    if size < HUGE_BYTES:
        return torch.empty(shape, dtype=dtype)
    memory = mmap.mmap(-1, size + HUGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    ask_for_huge_pages(address, len(memory))
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=-address % HUGE_BYTES).view(shape)


class Mapped:
    """An arena that this rank writes. ``fresh``: there is nothing in it yet; else older slots are as they were.

    Takes ``fd`` over. Raises `ArenaBroken`, OSError.
    """

    def __init__(self, fd: int, table: Table, geometry: Geometry, *, local_rank: int, fresh: bool) -> None:
        self.table, self.geometry = table, geometry
        try:
            self.memory = mmap.mmap(fd, geometry.total_bytes)
        finally:
            os.close(fd)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        packed = table.packed()
        self.control = Control(self.memory, geometry)
        self.sequence = self._used()
        if fresh or not self._as_agreed(packed):
            for slot in range(geometry.slots):
                self.control.begin(slot)
            self.memory[PAGE : PAGE + len(packed)] = packed
            self.control.make(
                layout=table.layout,
                rank=table.rank,
                world=table.world,
                local_rank=local_rank,
                table_bytes=len(packed),
                table_digest=digest(packed),
            )
        self._stop = False
        self._populating: threading.Thread | None = None
        self.populated = threading.Event()
        self._ready_bytes = 0
        self._pinned: list[int] = []
        self._pin_for: torch.device | None = None
        self._pins_fail = False

    def _used(self) -> int:
        """A number at or above that of every publication there ever was in this memory.

        Digests are known to be of a publication by its number, so none may be used again. A slot that was begun and never
        published does not say its number any more; its digests do, and one that had none was one of the newest.
        """
        slots = range(self.geometry.slots)
        numbers = [*(stamp.sequence for _slot, stamp in self.control.stamps()), *map(self.control.hashed, slots)]
        return max(numbers) + len(slots) if any(numbers) else 0

    def _as_agreed(self, packed: bytes) -> bool:
        try:
            found = Control(self.memory)
        except ArenaBroken:
            return False
        same = found.geometry == self.geometry and found.table_digest == digest(packed)
        same = same and (found.layout, found.rank, found.world) == (
            self.table.layout,
            self.table.rank,
            self.table.world,
        )
        found.release()
        return same

    # ---- populating

    def populate(self, *, pin: torch.device | None = None) -> None:
        """Have all pages there before the first save, in a thread of its own, or at once. ``pin`` them for this CUDA device."""
        self._pin_for = pin
        thread = threading.Thread(target=self._populate, args=(pin,), name="dlrover-checkpoint-memory", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # a limit of processes is reached: training waits for the pages
            self._populate(pin)
        else:
            self._populating = thread

    def _populate(self, pin: torch.device | None) -> None:
        if pin is not None:
            devices.choose(pin)  # a new thread's is the first GPU: it would get a context of this process
        begin = 0
        for slot in range(self.geometry.slots):
            end = self.geometry.digests_at(slot + 1)
            if not self._populate_range(begin, end):
                return
            if pin is not None and not self._pins_fail:
                self._pin(slot)
            self._ready_bytes = begin = end
        self.populated.set()

    def _populate_range(self, begin: int, end: int) -> bool:
        """False: nobody wants it any more."""
        libc = ctypes.CDLL(None, use_errno=True)
        for at in range(begin, end, POPULATE_BYTES):
            if self._stop:
                return False
            size = min(POPULATE_BYTES, end - at)
            if libc.madvise(ctypes.c_void_p(self.address + at), ctypes.c_size_t(size), _POPULATE_WRITE):
                self._touch(at, size)
            if self._pin_for is None or self._pins_fail:
                self._ready_bytes = at + size
        return not self._stop

    def _pin(self, slot: int) -> None:
        """One call a slot, as launches wait for the driver meanwhile; not less, as a copy must lie within one registration."""
        address, size = self.data_at(slot), rounded(self.geometry.data_bytes)
        why = devices.pin(address, size) if size else ""
        if not why:
            self._pinned.append(address)
            return
        self._pins_fail = True
        _log.warning(
            "the memory for states cannot be pinned, so copies from the GPU are slow and training stands for them: %s; "
            "raise the limit of locked memory (ulimit -l) or give the container more memory",
            why,
        )

    @property
    def pinned(self) -> bool:
        """Whether all slots are pinned for CUDA."""
        return self._pin_for is not None and len(self._pinned) == self.geometry.slots

    def costs(self, slot: int) -> bool:
        """Whether writing this slot now would have to find many of its pages, or wait until they are pinned."""
        if self._populating is None or not self._populating.is_alive():
            return False
        begin, end = self.geometry.digests_at(slot), self.geometry.digests_at(slot + 1)
        return end - max(begin, self._ready_bytes) > WORTH_WAITING_BYTES

    def _touch(self, at: int, size: int) -> None:
        """An older kernel: read a byte of each page. That maps them all the same where the file has them, or makes zero pages."""
        for page in range(at, at + size, PAGE):
            if self._stop:
                return
            self.memory[page]

    # ---- a slot

    def data_at(self, slot: int) -> int:
        """The address of a slot's data."""
        return self.address + self.geometry.data_at(slot)

    def place(self, slot: int, item: Item) -> torch.Tensor:
        """Where an item lies in a slot, as a tensor."""
        begin = self.geometry.data_at(slot) + item.at
        raw = torch.frombuffer(self.memory, dtype=torch.uint8, count=item.size, offset=begin)
        return raw.view(getattr(torch, item.dtype)).view(item.shape)

    def write_blob(self, slot: int, objects: dict[str, bytes]) -> tuple[int, int] | None:
        """Size and digest; None: it is larger than there is room for."""
        blob = pack_blob(objects)
        if len(blob) > self.geometry.blob_bytes:
            return None
        at = self.geometry.blob_at(slot)
        self.memory[at : at + len(blob)] = blob
        return len(blob), digest(blob)

    def close(self) -> None:
        """Let the mapping go; whoever holds the memory keeps it. Idempotent."""
        self._stop = True
        if self._populating is not None:
            self._populating.join()
            self._populating = None
        if self._pin_for is not None and self._pinned:
            devices.unpin(self._pin_for, self._pinned)
            self._pinned = []
        self.control.release()
        with contextlib.suppress(BufferError):  # a tensor still looks at it: it goes with that
            self.memory.close()
