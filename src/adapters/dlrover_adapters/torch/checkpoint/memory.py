"""An arena in this process: mapped, populated ahead, with what is needed to write a state into one of its slots."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import mmap
import os
import threading
from pathlib import Path
from typing import Any

import torch

from dlrover_adapters.checkpoint.hashing import digest
from dlrover_adapters.checkpoint.table import Item, Table, pack_blob
from dlrover_core.checkpoint.arena import PAGE, ArenaBroken, Control, Geometry

POPULATE_BYTES = 4 * 1024 * 1024
"""At a time: meanwhile this process can map no other memory."""
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14
HUGE_BYTES = 2 * 1024 * 1024
_BALLOON, _REPORTING = "0x0005", 5  # virtio 1.2: 5.5, VIRTIO_BALLOON_F_PAGE_REPORTING
BLOB_MIN_BYTES = 1024 * 1024


def blob_room(used: int) -> int:
    """For objects that grow by a little from save to save, the same in every generation: a power of two, in bytes."""
    return max(BLOB_MIN_BYTES, 1 << max(0, 2 * used - 1).bit_length())


@functools.cache
def huge_pays() -> bool:
    """Are fresh huge pages cheaper here than small ones?

    Not where a hypervisor takes free blocks of 2 MiB back (virtio-balloon's free page reporting): each then costs 4.5 ms to have
    again, 2.3 s of system time per GiB, where small pages are mostly found in blocks that were never given back, 0.8 s.
    """
    for device in Path("/sys/bus/virtio/devices").glob("*"):
        with contextlib.suppress(OSError):
            kind, features = (device / "device").read_text(), (device / "features").read_text()
            if kind.strip() == _BALLOON and features[_REPORTING] == "1":
                return False
    return True


def roomy(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """An empty tensor of this process, in huge pages where it is large: filling fresh small pages takes three times as long."""
    count = math.prod(shape)
    size = count * dtype.itemsize
    if size < HUGE_BYTES:
        return torch.empty(shape, dtype=dtype)
    memory = mmap.mmap(-1, size + HUGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if huge_pays():
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    offset = -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % HUGE_BYTES
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=offset).view(shape)


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
        self.sequence = max((stamp.sequence for _slot, stamp in self.control.stamps()), default=0)
        self._stop = False
        self._populating: threading.Thread | None = None
        self.populated = threading.Event()
        self.pinned = False

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

    def populate(self, *, pin: bool = False) -> None:
        """Have all pages there before the first save, in a thread of its own. ``pin`` them for CUDA."""
        self._populating = threading.Thread(
            target=self._populate, args=(pin,), name="dlrover-checkpoint-memory", daemon=True
        )
        self._populating.start()

    def _populate(self, pin: bool) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        total = self.geometry.total_bytes
        for at in range(0, total, POPULATE_BYTES):
            if self._stop:
                return
            size = min(POPULATE_BYTES, total - at)
            if libc.madvise(ctypes.c_void_p(self.address + at), ctypes.c_size_t(size), _POPULATE_WRITE):
                self._touch(at, size)
        if pin and not self._stop:
            runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            failed = runtime.cudaHostRegister(self.address, total, 0)
            self.pinned = int(failed) == 0
        self.populated.set()

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
        if self.pinned:
            runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            runtime.cudaHostUnregister(self.address)
            self.pinned = False
        self.control.release()
        with contextlib.suppress(BufferError):  # a tensor still looks at it: it goes with that
            self.memory.close()
