"""States that come whole, by name: what a framework hands over to be saved, put into memory that the agent holds.

`FlashCheckpoint` knows whose tensors it copies, and copies beside training. Here somebody else made a state dict and says "save":
Lightning's full dict, or the items that a planner of torch.distributed.checkpoint resolved. They are copied at once; the agent's
saver writes them. Without an agent the memory is this process's own, and who uses a shelf writes from it: `Shelf.view`.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
import mmap
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from dlrover_adapters.checkpoint.hashing import digest
from dlrover_adapters.checkpoint.slotview import SlotView
from dlrover_adapters.checkpoint.table import Item, Table, pack_blob
from dlrover_adapters.torch import steps
from dlrover_core.checkpoint.arena import PAGE, SLOTS_MAX, Control, Geometry, Stamp
from dlrover_core.checkpoint.slots import NOTHING, SlotContent, choose
from dlrover_core.errors import CoreError

from . import staged
from .line import spare_slots
from .vault import Keeping, Vault

SLOTS = 3
"""One that is read, one that is whole, one that is written. Where parts are copied to other nodes, `spare_slots` more."""
ASIDE_S, ASIDE_MAX_S = 0.001, 0.1
"""Pauses while every slot is read: the first, and the longest."""
TOLD_S = 2.0
"""What takes longer is said: to people, where it is waiting, and to whoever looks for hangs."""
WAIT_S = 1700.0
"""How long a save may wait for what others do. Less than an announced phase may take (``hang_phase_s``): the error says more."""
BLOB_MIN_BYTES = 256 * 1024
_ALIGN = 64

log = logging.getLogger("dlrover.torch")

# A process is one rank, and all of its shelves of one layout are one piece of memory at its agent.
_PUTTING = threading.RLock()


class NoSlot(CoreError):
    """Every slot is being read, by the saver or a peer: storage is slower than states come. Nothing was saved."""


class Piece(NamedTuple):
    """One chunk of one tensor: ``tensor`` lies at ``offsets`` of a tensor of ``full_shape``. ``write``: to storage, by us."""

    name: str
    tensor: torch.Tensor
    full_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    write: bool = True


def whole(name: str, tensor: torch.Tensor) -> Piece:
    """All of a tensor."""
    return Piece(name, tensor, tuple(tensor.shape), (0,) * tensor.dim())


def layout_of(described: object) -> int:
    """A number for whatever its text describes, the same in every process."""
    return int.from_bytes(hashlib.blake2b(repr(described).encode(), digest_size=8).digest(), "little") >> 1


class Lasting:
    """What training may be standing for. Once it has taken `TOLD_S` it is announced as a checkpoint, until the end of ``with``.

    Not at once: a short save beside training is no pause of it.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._begun = clock, clock()
        self._told = contextlib.ExitStack()
        self.announced = False

    def __enter__(self) -> Lasting:  # noqa: PYI034  # Self needs 3.11
        return self

    def __exit__(self, *_error: object) -> None:
        self._told.close()

    @property
    def seconds(self) -> float:
        """Since it began."""
        return self._clock() - self._begun

    def look(self, why: str = "", *words: object) -> bool:
        """It is not over. ``why``: logged, once, when it is announced. True: it was, just now."""
        if self.announced or self.seconds < TOLD_S:
            return False
        self.announced = True
        self._told.enter_context(steps.phase("checkpoint"))
        if why:
            log.warning(why, *words)
        return True


class Busy(NamedTuple):
    """A slot that is not overwritten until `Shelf.free`, and what is in it."""

    arena: int
    slot: int
    view: SlotView


class Shelf:
    """This rank's memory for such states. ``world`` and ``rank`` as the states have them; ``url`` and ``keep`` of the storage.

    ``vault``: the line to the agent, None without one. ``kind``: ``"dcp"`` or ``"torch"``, how it lies on storage. An empty
    ``url``: whoever puts states here writes them by himself. For several threads: states are put one after the other.
    """

    def __init__(
        self,
        url: str,
        *,
        rank: int,
        world: int,
        kind: str,
        keep: int = 0,
        vault: Vault | None = None,
        writes: bool = True,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self.url, self.rank, self.world, self.kind, self.keep = url, rank, world, kind, keep
        self.vault, self._writes = vault, writes
        self._clock, self._pause = clock, pause
        self.generation = vault.told.generation if vault is not None else 0
        self._memory: mmap.mmap | None = None
        self._control: Control | None = None
        self._table: Table | None = None
        self._id, self._calls = 0, 0
        self._begun: dict[int, int] = {}
        # By arena, since others' come between: whoever reads one of ours does so though the next state is of another layout.
        self._busy: set[tuple[int, int]] = set()

    # ---- saving

    def put(
        self,
        step: int,
        pieces: Sequence[Piece],
        objects: Mapping[str, bytes],
        *,
        layout: int,
        holders: tuple[tuple[int, ...], ...],
        paths: tuple[tuple[str, tuple[Any, ...]], ...] = (),
        wait_s: float = 0.0,
    ) -> int:
        """Copy a state into a slot and publish it; the slot. It goes to storage where there is a ``url``. No collective.

        ``pieces`` of the same layout, in the same order, reuse the memory of the time before. While all slots are read, it waits,
        for ``wait_s`` seconds at most. Raises `NoSlot`, `VaultRefused`.
        """
        table = Table(layout, self.world, self.rank, holders, _items(pieces), tuple(sorted(objects)), paths)
        blob = pack_blob(objects)
        # One that is being copied is in no slot yet: another one beside it would take the same.
        with _PUTTING, Lasting(self._clock) as lasting:
            control = self._opened(table, len(blob))
            self._calls += 1
            slot = self._begin(control, step, wait_s, lasting)
            self._copy(slot, table.items, pieces, lasting)
            at = control.geometry.blob_at(slot)
            self._mapped[at : at + len(blob)] = blob
            control.saves += 1
            stamp = Stamp(self.generation, step, control.saves, len(blob), digest(blob), due=bool(self.url))
            control.publish(slot, stamp)
            self._begun[slot] = self._calls
            if self.vault is not None:
                self.vault.saved(self._id, slot, step, due=bool(self.url))
            return slot

    def put_busy(self, step: int, pieces: Sequence[Piece], objects: Mapping[str, bytes], **how: Any) -> Busy:
        """`put`, for whoever writes it by himself: nothing comes over it until `free`. Release its ``view``, too."""
        with _PUTTING:
            slot = self.put(step, pieces, objects, **how)
            busy = Busy(self._id, slot, SlotView(self._mapped, slot, table=self._table))
            self._busy.add(busy[:2])
            return busy

    def free(self, busy: Busy) -> None:
        """It may be overwritten. From any thread, also while another one waits for it in `put`."""
        self._busy.discard(busy[:2])

    def _begin(self, control: Control, step: int, wait_s: float, lasting: Lasting) -> int:
        """A slot that nobody reads, begun: waited for, because whoever reads comes to an end."""
        begun, pause = lasting.seconds, ASIDE_S
        while True:
            slot = self._free(control)
            if slot is not None:
                control.begin(slot)
                if not control.pinned(slot):
                    return slot
                # Somebody has come to read it just now, and finds it empty.
            waited = lasting.seconds - begun
            if waited >= wait_s:
                control.skipped += 1
                raise NoSlot(
                    f"step {step}: all {control.geometry.slots} slots of rank {self.rank} were needed for {waited:.0f} s: states "
                    "come faster than storage or the partner node takes them; save less often, or look why they are slow"
                )
            lasting.look(
                "step %s waits for memory: states come faster than storage or the partner node takes them", step
            )
            self._pause(min(pause, wait_s - waited))
            pause = min(ASIDE_MAX_S, 2 * pause)

    def _free(self, control: Control) -> int | None:
        stamps = dict(control.stamps())
        # A step may lie in several slots: saved under two names, or made once more after a restart. The newest save counts.
        saves = sorted((stamp[:2], self._begun.get(one, 0), stamp.sequence, one) for one, stamp in stamps.items())
        place = {save[-1]: number for number, save in enumerate(saves)}
        kept = [
            SlotContent(
                place.get(one, NOTHING),
                self._begun.get(one, 0),
                pinned=control.pinned(one) or (self._id, one) in self._busy,
            )
            for one in range(control.geometry.slots)
        ]
        # Whoever saves so has met all others since the save before: what was begun then is published everywhere.
        return choose(kept, call=self._calls, lag=1, alone=self.world == 1 or not self.vault)

    def _copy(self, slot: int, items: Sequence[Item], pieces: Sequence[Piece], lasting: Lasting) -> None:
        begin = self._control.geometry.data_at(slot) if self._control is not None else 0
        for item, piece in zip(items, pieces, strict=True):
            if item.size:
                raw = torch.frombuffer(self._mapped, dtype=torch.uint8, count=item.size, offset=begin + item.at)
                raw.view(piece.tensor.dtype).view(piece.tensor.shape).copy_(piece.tensor.detach())
                lasting.look()

    # ---- memory

    @property
    def _mapped(self) -> mmap.mmap:
        assert self._memory is not None, "opened before anything is copied"
        return self._memory

    def _opened(self, table: Table, blob_bytes: int) -> Control:
        """Memory for this layout; that of the state before, where it fits."""
        control, before = self._control, self._table
        if control is not None and before == table and blob_bytes <= control.geometry.blob_bytes:
            return control
        self.close_memory()
        packed = table.packed()
        size = max((one.at + one.size for one in table.items), default=0)
        slots = SLOTS + (spare_slots(self.vault, table.holders) if self.vault is not None else 0)
        # Objects grow by a little from save to save.
        geometry = Geometry(min(SLOTS_MAX, slots), len(packed), max(BLOB_MIN_BYTES, _power(2 * blob_bytes)), size)
        fresh = True
        if self.vault is None:
            # Numbered as an agent's arenas are, but below 0: what is read of the memory before is none of this one's.
            self._memory, self._id = mmap.mmap(-1, geometry.total_bytes), self._id - 1
        else:
            # Of all ranks of this node, which ask one after the other.
            arena = self.vault.arena(table.layout, geometry, beside=staged.beside().to_come * self.vault.nproc)
            try:
                self._memory, self._id, fresh = mmap.mmap(arena.fd, geometry.total_bytes), arena.id, arena.fresh
            finally:
                os.close(arena.fd)
        control = self._control = Control(self._memory, geometry)
        if fresh or control.table_digest != digest(packed):
            for slot in range(geometry.slots):
                control.begin(slot)
            self._memory[PAGE : PAGE + len(packed)] = packed
            control.make(
                layout=table.layout,
                rank=self.rank,
                world=self.world,
                local_rank=self.vault.local_rank if self.vault is not None else 0,
                table_bytes=len(packed),
                table_digest=digest(packed),
            )
        self._table, self._begun = table, {}
        if self.vault is not None:
            self.vault.ready(self._id, table.holders)
            if self.url:
                self.vault.keeping(self._keeping(geometry))
        return control

    def _keeping(self, geometry: Geometry) -> Keeping:
        return Keeping(
            url=self.url,
            every=0,
            store_every=0,
            keep=self.keep,
            format=self.kind,
            planned=False,
            node_bytes=(geometry.total_bytes + staged.beside().total)
            * (self.vault.nproc if self.vault is not None else 1),
            writes=self._writes,
        )

    def close_memory(self) -> None:
        """Let this process's mapping go; the agent keeps what it holds."""
        if self._control is not None:
            self._control.release()
            self._control = None
        if self._memory is not None:
            with contextlib.suppress(BufferError):  # a tensor of ours still looks at it: it goes with that
                self._memory.close()
            self._memory = None

    def close(self) -> None:
        """Idempotent."""
        self.close_memory()


def _items(pieces: Sequence[Piece]) -> tuple[Item, ...]:
    items, at = [], 0
    for one in pieces:
        size = math.prod(one.tensor.shape) * one.tensor.dtype.itemsize
        dtype = str(one.tensor.dtype).removeprefix("torch.")
        items.append(
            Item(
                one.name,
                dtype,
                one.full_shape,
                one.offsets,
                tuple(one.tensor.shape),
                at,
                size,
                live=True,
                write=one.write,
            )
        )
        at += -(-size // _ALIGN) * _ALIGN
    return tuple(items)


def _power(size: int) -> int:
    return 1 << max(0, size - 1).bit_length()
