"""Copies states beside training: a thread of its own, without the GIL; on CUDA a stream of its own for each device.

Whoever has to wait for a copy helps to make it: `Copier.settle` does the batches that nobody has begun. A copy is *torn* when
what was copied is not what was there at its begin. Version counters do not tell (BatchNorm, fused optimizers and ``.data`` do not
move them), so random blocks are hashed at the begin and compared with what lies in the slot at the end. `looks` does that for
tensors on a CUDA device. Tensors on other devices are not looked at: a look would have the host wait for them.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import queue
import random
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from dlrover_adapters.checkpoint.hashing import digest
from dlrover_adapters.checkpoint.table import Item

from . import devices, streaming
from .chunks import Chunk
from .looks import Look, Looks
from .memory import Mapped

BLOCK_BYTES = 4096
EVERY_BYTES = 8 * 1024 * 1024
"""One block is looked at of so many bytes, and at least one of each tensor of the `TENSORS` largest."""
TENSORS = 64
_log = logging.getLogger(__name__)
_chance = (
    random.SystemRandom()
)  # not the script's generator, which is part of the state; nor one that forks would share


class Pair(NamedTuple):
    """An item of the slot that is written, and the chunk that goes there."""

    item: Item
    chunk: Chunk


class Moves:
    """How given tensors get into a slot: prepared once, used until a tensor or the arena is another one."""

    def __init__(self, memory: Mapped, slot: int, pairs: Sequence[Pair]) -> None:
        self.pairs = [one for one in pairs if one.item.size]
        begin = memory.data_at(slot)
        plain = [one for one in self.pairs if devices.is_plain(one.chunk.tensor)]
        self.batches = streaming.batches(
            streaming.Copy(begin + item.at, chunk.tensor.data_ptr(), item.size, memory.place(slot, item), chunk.tensor)
            for item, chunk in plain
        )
        self._begin = begin
        others = [one for one in self.pairs if not devices.is_plain(one.chunk.tensor)]
        placed = [(memory.place(slot, item), chunk.tensor) for item, chunk in others]
        self.cuda = [one for one in placed if devices.on_cuda(one[1])]
        self.strided = [one for one in placed if not devices.on_cuda(one[1])]
        self._looked_at = sorted(
            (one for one in self.pairs if devices.on_host(one.chunk.tensor)), key=lambda one: -one.item.size
        )
        self._looks = Looks(self.cuda, _chance)
        self.size = sum(one.item.size for one in self.pairs)

    def strides(self) -> None:
        """What is not contiguous, or on a device without streams of ours."""
        for place, tensor in self.strided:
            place.copy_(tensor)

    def all_now(self, aside: Aside | None = None) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Everything, in this thread; but for what is put ``aside`` on its device, which is yet to be copied."""
        later, now = aside.put(self.cuda) if aside is not None else ([], self.cuda)
        for place, tensor in now:
            devices.copy(devices.of(tensor), place, tensor)
        for batch in self.batches:
            batch.run()
        self.strides()
        devices.wait_for(devices.used_by(tensor for _place, tensor in now))
        return later

    def differs(self) -> str:
        """The name of a tensor of which another value would be copied now than is in the slot. Empty: none, byte by byte."""
        compare = ctypes.CDLL(None).memcmp
        compare.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
        for item, chunk in self.pairs:
            tensor = chunk.tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
            if compare(self._begin + item.at, tensor.data_ptr(), item.size):
                return item.name
        return ""

    def looks(self, verify: str) -> list[Look] | None:
        """Looks at the present values of tensors on CUDA devices; None: a device has no memory left for that."""
        try:
            return self._looks.take(verify, tensors=TENSORS, block_bytes=BLOCK_BYTES, every_bytes=EVERY_BYTES)
        except devices.OutOfMemory as error:
            _log.warning(
                "training stands for this save: a device has no memory to look whether its copy is torn: %s", error
            )
            return None

    def samples(self, verify: str) -> list[tuple[int, int, int]]:
        """(address in the slot, bytes, hash of what is to be there); of tensors in the host's memory, of whatever strides."""
        if verify == "off":
            return []
        found: list[tuple[int, int, int]] = []
        for number, (item, chunk) in enumerate(self._looked_at):
            tensor, to = chunk.tensor, self._begin + item.at
            if verify == "full":
                found.append((to, item.size, _hash_of(tensor, 0, item.size)))
                continue
            if number >= TENSORS and item.size < EVERY_BYTES:
                break
            for _ in range(max(1, item.size // EVERY_BYTES)):
                size = min(BLOCK_BYTES, item.size)
                at = _chance.randrange(item.size - size + 1) // tensor.element_size() * tensor.element_size()
                found.append((to + at, size, _hash_of(tensor, at, size)))
        return found


def _hash(address: int, size: int) -> int:
    return digest((ctypes.c_char * size).from_address(address))


def _hash_of(tensor: torch.Tensor, at: int, size: int) -> int:
    """Of ``size`` bytes from ``at`` on, as they lie in the slot: one element after the other, whatever the strides are here."""
    if devices.is_plain(tensor):
        return _hash(tensor.data_ptr() + at, size)
    if size < tensor.numel() * tensor.element_size():
        first = at // tensor.element_size()
        numbers = torch.arange(first, first + size // tensor.element_size())
        tensor = tensor[torch.unravel_index(numbers, tensor.shape)]
    copied = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return _hash(copied.data_ptr(), size)


class Aside:
    """Copies of live tensors on their own devices, up to ``room`` bytes a device, for a moment: who saves does not wait for them.

    A device that has no memory for that has none for training either: from then on nothing is put there.
    """

    def __init__(self, room: int) -> None:
        self._room = room

    def put(self, copies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> tuple[list[Any], Sequence[Any]]:
        """Clone tensors on their device, as far as there is room.

        Returns the clones with their places in the slot, and the other pairs, which are to be copied while training stands.
        """
        later, now = [], []
        left: dict[torch.device, int] = defaultdict(lambda: self._room)
        try:
            for place, tensor in copies if self._room else ():
                device = devices.of(tensor)
                if tensor.nbytes > left[device]:
                    now.append((place, tensor))
                    continue
                left[device] -= tensor.nbytes
                later.append((place, devices.clone(tensor)))
        except devices.OutOfMemory as error:
            self._room = 0
            _log.warning(
                "the device has no memory to put %d live tensors aside, so from now on training stands while they are copied: %s",
                len(copies),
                error,
            )
        return (later, now) if self._room else ([], copies)


@dataclass
class Flight:
    """One copy under way. ``landed`` is called once by the copier, with whether everything arrived as it was."""

    step: int
    moves: Moves
    samples: list[tuple[int, int, int]]
    landed: Callable[[Flight], None]
    due: bool = False
    """It is to go to storage."""
    aside: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    """Live tensors of a device, set aside there."""
    looks: list[Look] = field(default_factory=list)
    """Like ``samples``, for tensors on CUDA devices."""
    marks: list[devices.Mark] = field(default_factory=list)
    """For each CUDA device the end of its copies."""
    began: float = field(default_factory=time.perf_counter)
    torn: bool = False
    error: BaseException | None = None
    done: threading.Event = field(default_factory=threading.Event)
    read: threading.Event = field(default_factory=threading.Event)
    """What lies in the host's memory is copied: it may be overwritten."""
    _next: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _open: int = 0
    _empty: threading.Condition = field(default_factory=threading.Condition)

    def _take(self) -> streaming.Batch | None:
        with self._lock:
            if self._next >= len(self.moves.batches):
                return None
            self._next += 1
            self._open += 1
            return self.moves.batches[self._next - 1]

    def work(self) -> None:
        """Batches that nobody has begun, until there is none."""
        while (batch := self._take()) is not None:
            try:
                batch.run()
            finally:
                with self._lock:
                    self._open -= 1
                    last = not self._open and self._next >= len(self.moves.batches)
                if last:
                    with self._empty:
                        self._empty.notify_all()

    def finish(self) -> None:
        """By the copier: the rest, then the comparison, then `landed`."""
        try:
            self.work()
            self.moves.strides()
            with self._empty:
                self._empty.wait_for(lambda: not self._open)
            self.read.set()
            if self.marks:
                devices.choose(self.marks[0].device)  # this thread's would be the first GPU, which is another rank's
            for mark in self.marks:
                mark.wait()
            self.aside = []
            self.torn = any(_hash(address, size) != before for address, size, before in self.samples)
            self.torn = self.torn or any(look.differs() for look in self.looks)
        except BaseException as error:  # noqa: BLE001  # told to the training thread, which waits for it
            self.error = error
        try:
            self.landed(self)
        except BaseException as error:  # noqa: BLE001  # as above
            self.error = self.error or error
        finally:
            self.read.set()
            self.done.set()


class Copier:
    """The thread; started with the first flight. One flight at a time."""

    def __init__(self) -> None:
        self.flight: Flight | None = None
        self._queue: queue.SimpleQueue[Flight | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._beside = devices.SideStreams()

    def start(self, flight: Flight) -> None:
        """Begin to copy beside what comes next. The one before is settled."""
        assert self.flight is None, "settle it first"
        if flight.moves.cuda or flight.aside:
            copies = devices.grouped([*flight.moves.cuda, *flight.aside])
            for look in flight.looks:
                copies[look.device].append((look.arrived, look.seen))
            flight.marks = self._beside.copy(copies)
        if self._thread is None:
            # It knows the queue alone: a copier that nobody closed and nobody has any more ends it.
            thread = threading.Thread(target=_run, args=(self._queue,), name="dlrover-checkpoint-copy", daemon=True)
            thread.start()  # the system may have no thread for it now; the next save tries again
            self._thread = thread
            weakref.finalize(self, self._queue.put, None).atexit = False
        self.flight = flight
        self._queue.put(flight)

    def before_overwriting(self) -> float:
        """What is being copied is about to be written: wait. For what lies on CUDA the device does, not the host. Seconds."""
        flight = self.flight
        if flight is None or flight.done.is_set():
            return 0.0
        began = time.perf_counter()
        if flight.marks:
            for mark in flight.marks:
                mark.hold()
            if flight.moves.batches or flight.moves.strided:  # Adam's step counters, for example
                flight.work()
                flight.read.wait()
        else:
            self._finish(flight)
        return time.perf_counter() - began

    def settle(self) -> Flight | None:
        """Wait until the flight has landed, helping; it, if there was one. Raises what went wrong in it."""
        flight = self.flight
        if flight is None:
            return None
        if not flight.done.is_set():
            self._finish(flight)
        self.flight = None
        if flight.error is not None:
            raise flight.error
        return flight

    def _finish(self, flight: Flight) -> None:
        flight.work()
        flight.done.wait()

    def close(self) -> None:
        """End the thread. Idempotent; what is in flight lands first."""
        try:
            with contextlib.suppress(Exception):  # whoever settles before hears of it
                self.settle()
        finally:
            if self._thread is not None:
                self._queue.put(None)
                self._thread.join()
                self._thread = None


def _run(flights: queue.SimpleQueue[Flight | None]) -> None:
    while (flight := flights.get()) is not None:
        flight.finish()
        del flight
