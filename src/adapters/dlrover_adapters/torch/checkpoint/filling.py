"""Saved bytes into live tensors: which chunk of which old rank goes where, and the copying, straight into the tensors' memory.

Two things cost time, and neither is the copying (measured, 1 GiB, 2 busy cores, one thread unless said):

* Pages of the source. A mapping of a memfd faults page by page; ``MAP_POPULATE`` and ``MADV_POPULATE_READ`` make that 190-390 ms,
  with one or two threads. ``preadv`` maps nothing: 150 ms with two threads, and its calls release the interpreter.
* Fresh pages of the target, as a new optimizer's state is made of: 300-900 ms in small pages, 60-200 ms in huge ones, where the
  machine has the memory at hand (it has: the worker before has just died). Memory that a hypervisor has to find first costs
  2 to 5 s either way.

So: huge pages for what has no pages yet, and ``preadv`` from the descriptor, by a few threads. Verification of blocks reads
through a small buffer that stays in the cache, and maps nothing either.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from dlrover_adapters.checkpoint.geometry import fault
from dlrover_adapters.checkpoint.hashing import running
from dlrover_adapters.checkpoint.reader import Chunk, StepReader
from dlrover_adapters.checkpoint.slotview import SlotDamaged, SlotView
from dlrover_adapters.checkpoint.table import Item
from dlrover_core.checkpoint.arena import BLOCK_BYTES, ArenaBroken

from . import devices
from .capture import Target
from .memory import ask_for_huge_pages

PIECE_BYTES = 8 * 1024 * 1024
"""What one thread copies at a time."""
HASH_BYTES = 1024 * 1024
THREADS_MAX = 4
Slices = tuple[slice, ...]


class Uncovered(Exception):
    """What was saved does not hold all that is wanted."""


class ItemLike(Protocol):
    """A chunk of a tensor, in an arena's table or on storage."""

    @property
    def name(self) -> str:
        """The tensor's."""

    @property
    def offsets(self) -> tuple[int, ...]:
        """Where it begins."""

    @property
    def shape(self) -> tuple[int, ...]:
        """How far it goes."""


class Need(NamedTuple):
    """A part of a target: ``there`` in the target's local tensor is what is ``here`` in the chunk ``number`` of its tensor."""

    target: Target
    number: int
    there: Slices
    here: Slices


def needs(target: Target, chunks: Sequence[ItemLike]) -> list[Need]:
    """How chunks, the preferred ones first, fill a target. Raises `Uncovered`."""
    found, boxes = [], []
    for number, chunk in enumerate(chunks):
        box = _overlap(target, chunk)
        if box is None or box in boxes:
            continue
        boxes.append(box)
        offsets, shape = box
        there = tuple(slice(at, at + length) for at, length in zip(offsets, shape, strict=True))
        here = tuple(
            slice(at + begin - first, at + begin - first + length)
            for at, length, begin, first in zip(offsets, shape, target.offsets, chunk.offsets, strict=True)
        )
        found.append(Need(target, number, there, here))
    wrong = fault(tuple(target.tensor.shape), boxes)
    if wrong and target.tensor.numel():
        raise Uncovered(f"{target.name}: {wrong}")
    return found


def _overlap(target: Target, chunk: ItemLike) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """What of a target lies in a chunk, as offsets in the target and a shape."""
    offsets, shape = [], []
    sizes = zip(target.offsets, target.tensor.shape, chunk.offsets, chunk.shape, strict=True)
    for begin, length, other, its in sizes:
        low, high = max(begin, other), min(begin + length, other + its)
        if low >= high:
            return None
        offsets.append(low - begin)
        shape.append(high - low)
    return tuple(offsets), tuple(shape)


# ---- from memory


class Held:
    """A piece that is open: an arena's slot, by a descriptor that is this one's to close. Raises `ArenaBroken`, OSError."""

    def __init__(self, fd: int, slot: int) -> None:
        self.fd = fd
        self._map: mmap.mmap | None = None
        try:
            # Not populated: of the data nothing is read through it, unless a target is not plain memory.
            self._map = mmap.mmap(fd, 0)
            self.view = SlotView(self._map, slot)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Idempotent."""
        if self._map is not None:
            if "view" in self.__dict__:
                self.view.release()
            with contextlib.suppress(BufferError):  # a tensor still looks at it; it goes with that
                self._map.close()
            self._map = None
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    @property
    def data_at(self) -> int:
        """Where the slot's data begin in the memory."""
        return self.view.control.geometry.data_at(self.view.slot)


def verify(held: Held, threads: int) -> bool:
    """Hash every block and compare it with the saver's digests; False: there are none of this publication (yet).

    Raises `SlotDamaged`; where the slot was overwritten meanwhile, too.
    """
    view, begin = held.view, held.data_at
    if not view.hashed:
        return False
    wanted = view.digests()
    size = len(view.data)

    def one(block: int) -> None:
        state, at, end = running(), block * BLOCK_BYTES, min((block + 1) * BLOCK_BYTES, size)
        buffer = memoryview(bytearray(min(HASH_BYTES, end - at)))
        while at < end:
            part = buffer[: min(len(buffer), end - at)]
            _read(held.fd, part, begin + at)
            state.update(part)
            at += len(part)
        if state.intdigest() != wanted[block]:
            raise SlotDamaged(
                f"step {view.stamp.step} of rank {view.table.rank}: block {block} of the data is not as it was written",
                block,
            )

    _beside(threads, [functools.partial(one, block) for block in range(len(wanted))])
    return True


class Piece(NamedTuple):
    """A chunk in an open slot."""

    held: Held
    item: Item


def fill(needed: Iterable[tuple[Need, Piece]], threads: int) -> None:
    """Copy. Raises `ArenaBroken` where a slot changed meanwhile: then the targets are torn."""
    work: list[Callable[[], None]] = []
    views: dict[int, SlotView] = {}
    needed = list(needed)
    for need, (held, item) in needed:
        views[id(held)] = held.view
        tensor = need.target.tensor[need.there]
        run = _run(item, need.here)
        if run is None or not devices.is_plain(tensor):
            work.append(functools.partial(_copy, tensor, held.view, item, need.here))
            continue
        memory, at = _memory(tensor), held.data_at + item.at + run
        ask_for_huge_pages(tensor.data_ptr(), len(memory))
        for begin in range(0, len(memory), PIECE_BYTES):
            part = memory[begin : begin + PIECE_BYTES]
            work.append(functools.partial(_read, held.fd, part, at + begin))
    _beside(threads, work, devices.used_by(need.target.tensor for need, _piece in needed))
    for view in views.values():
        if not view.unchanged():
            raise ArenaBroken(f"step {view.stamp.step} of rank {view.table.rank} was overwritten while it was read")


def _run(item: Item, here: Slices) -> int | None:
    """Where in a chunk's bytes this part of it begins, if it is in one piece."""
    part = torch.empty(item.shape, device="meta", dtype=getattr(torch, item.dtype))[here]
    return int(part.storage_offset()) * part.element_size() if part.is_contiguous() else None


def _copy(tensor: torch.Tensor, view: SlotView, item: Item, here: Slices) -> None:
    with torch.no_grad():
        tensor.copy_(view.tensor(item)[here])


def _memory(tensor: torch.Tensor) -> memoryview:
    """A plain tensor's bytes; good as long as the tensor."""
    if not tensor.nbytes:
        return memoryview(b"")
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def _read(fd: int, into: memoryview, at: int) -> None:
    done = 0
    while done < len(into):
        count = os.preadv(fd, [into[done:]], at + done)
        if not count:
            raise ArenaBroken("the memory ends before the slot does")
        done += count


def threads_for(local_world: int) -> int:
    """How many of this machine's cores are one rank's, at most `THREADS_MAX`."""
    return max(1, min(THREADS_MAX, len(os.sched_getaffinity(0)) // max(1, local_world)))


def _beside(threads: int, work: Sequence[Callable[[], None]], used: Sequence[torch.device] = ()) -> None:
    """All of it, by so many threads, on the first of the CUDA devices ``used``: a new thread's would be another rank's GPU.

    Raises the first error, and leaves out what is not begun then.
    """
    if threads == 1 or len(work) < 2:
        for one in work:
            one()
        return
    rest, taking, errors = iter(work), threading.Lock(), list[BaseException]()

    def take() -> None:
        try:
            if used:
                devices.choose(used[0])
            while not errors:
                with taking:
                    one = next(rest, None)
                if one is None:
                    return
                one()
        except BaseException as error:  # noqa: BLE001  # raised below, in the thread that wants it all
            errors.append(error)

    started = []
    for number in range(threads):
        thread = threading.Thread(target=take, name=f"restore_{number}", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # a limit of processes is reached: those that there are do it all
            break
        started.append(thread)
    try:
        if not started:
            take()
        for thread in started:
            thread.join()
    except BaseException as error:
        errors.append(error)
        for thread in started:
            thread.join()
        raise
    if errors:
        try:
            raise errors[0]
        finally:
            errors.clear()  # its traceback holds who holds the list, and so tensors


# ---- from storage


def read(reader: StepReader, targets: Sequence[Target], threads: int) -> None:
    """Fill targets from a stored step, every block verified. Raises what `StepReader.read` does, and `Uncovered`."""
    direct: dict[tuple[int, int], list[tuple[Chunk, Any]]] = {}
    parted: dict[tuple[int, int], list[tuple[torch.Tensor, Chunk, Slices]]] = {}
    for target in targets:
        chunks = reader.items.get(target.name, ())
        for need in needs(target, [chunk.item for chunk in chunks]):
            chunk, tensor = chunks[need.number], target.tensor[need.there]
            file = (chunk.rank, chunk.item.file)
            if devices.is_plain(tensor) and tuple(tensor.shape) == tuple(chunk.item.shape):
                direct.setdefault(file, []).append((chunk, _memory(tensor)))
            elif tensor.numel():
                parted.setdefault(file, []).append((tensor, chunk, need.here))
    _beside(
        threads,
        [
            functools.partial(_read_file, reader, direct.get(file, []), parted.get(file, []))
            for file in {**direct, **parted}
        ],
        devices.used_by(target.tensor for target in targets),
    )


def _read_file(
    reader: StepReader, direct: list[tuple[Chunk, Any]], parted: list[tuple[torch.Tensor, Chunk, Slices]]
) -> None:
    """What is wanted of one file. Chunks of which only a part is wanted pass through memory of their own."""
    wholes = [torch.empty(chunk.item.shape, dtype=getattr(torch, chunk.item.dtype)) for _tensor, chunk, _here in parted]
    through = [(chunk, _memory(whole)) for (_tensor, chunk, _here), whole in zip(parted, wholes, strict=True)]
    reader.read([*direct, *through])
    with torch.no_grad():
        for (tensor, _chunk, here), whole in zip(parted, wholes, strict=True):
            tensor.copy_(whole[here])
