"""The arenas as the saver has them: mapped, and their slots pinned for as long as anybody here reads them.

Pins are words in the arena that only the saver writes, so its threads count them here. A saver that was killed leaves its pins
behind; its successor takes them back when it is handed the arena (`Slots.add`).
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
from collections.abc import Iterator
from typing import Any

from dlrover_adapters.checkpoint.slotview import SlotGone, SlotView
from dlrover_core.checkpoint.arena import SLOTS_MAX, ArenaBroken, Control, Stamp


class Mapped:
    """One arena of this node's. ``rank`` and ``layout`` as its control page says; ``place``: its node's in that world."""

    def __init__(self, number: int, fd: int, place: int, lock: threading.Lock) -> None:
        self.id, self.place = number, place
        self.memory = mmap.mmap(fd, os.fstat(fd).st_size)
        try:
            self.control = Control(self.memory)
        except ValueError:
            self.memory.close()
            raise
        self._lock = lock
        self._pins = [0] * SLOTS_MAX
        self._held: frozenset[int] = frozenset()
        self._readers, self._over = 0, False
        for slot in range(self.control.geometry.slots):
            self.control.unpin(slot)  # whoever read it is dead

    @property
    def rank(self) -> int:
        """Whose states these are."""
        return self.control.rank

    def find(self, generation: int, step: int) -> int:
        """The slot with this state. Raises `SlotGone`."""
        for slot, stamp in self.control.stamps():
            if (stamp.generation, stamp.step) == (generation, step):
                return slot
        raise SlotGone(f"step {step} of generation {generation} of rank {self.rank} is not in memory any more")

    def hold(self, slots: frozenset[int]) -> None:
        """Pin these, and none of those that were held before; those who read go on."""
        with self._lock:
            for slot in range(self.control.geometry.slots):
                if not self._pins[slot] and (slot in slots) != (slot in self._held):
                    (self.control.pin if slot in slots else self.control.unpin)(slot)
            self._held = slots

    @contextlib.contextmanager
    def pinned(self, slot: int, stamp: Stamp | None = None) -> Iterator[None]:
        """Keep a slot from being overwritten. Raises `SlotGone` where its state is not that of ``stamp`` once it is pinned."""
        with self._lock:
            if self._over:
                raise SlotGone(f"arena {self.id} is not there any more")
            self._readers += 1
            self._pins[slot] += 1
            if self._pins[slot] == 1 and slot not in self._held:
                self.control.pin(slot)
        try:
            if stamp is not None and not stamp.same(self.control.stamp(slot)):
                raise SlotGone(f"step {stamp.step} of rank {self.rank} was overwritten before it could be read")
            yield
        finally:
            with self._lock:
                self._pins[slot] -= 1
                if not self._pins[slot] and slot not in self._held:
                    self.control.unpin(slot)
                self._readers -= 1
                self._end()

    @contextlib.contextmanager
    def view(self, generation: int, step: int) -> Iterator[SlotView]:
        """A state, pinned inside. Raises `ArenaBroken`, among them `SlotGone`."""
        slot = self.find(generation, step)
        stamp = self.control.stamp(slot)
        if stamp is None:
            raise SlotGone(f"step {step} of rank {self.rank} was overwritten before it could be read")
        with self.pinned(slot, stamp):
            view = SlotView(self.memory, slot)
            try:
                yield view
            finally:
                view.release()

    @contextlib.contextmanager
    def read(self) -> Iterator[None]:
        """Keep the mapping, but no slot."""
        with self._lock:
            if self._over:
                raise SlotGone(f"arena {self.id} is not there any more")
            self._readers += 1
        try:
            yield
        finally:
            with self._lock:
                self._readers -= 1
                self._end()

    def close(self) -> None:
        """No more of it, once the last reader is done."""
        with self._lock:
            self._over = True
            self._end()

    def _end(self) -> None:
        if self._over and not self._readers:
            with contextlib.suppress(AttributeError):  # that was done before
                self.control.release()
            with contextlib.suppress(BufferError):  # somebody keeps a view: the memory goes with it
                self.memory.close()


class Slots:
    """All arenas that the agent has handed over."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._all: dict[int, Mapped] = {}
        self._fds: dict[int, int] = {}

    def add(self, number: int, fd: int, place: int) -> None:
        """An arena whose control page is written; ``fd`` is ours now. Handed again: it serves another world."""
        known = self._all.get(number)
        if known is not None:
            known.place = place
            os.close(fd)
            return
        try:
            self._all[number] = Mapped(number, fd, place, threading.Lock())
        except (OSError, ValueError) as error:
            os.close(fd)
            raise ArenaBroken(f"arena {number}: {error}") from error
        self._fds[number] = fd

    def forget(self, number: int) -> None:
        """The agent has no use for it any more."""
        found = self._all.pop(number, None)
        if found is not None:
            found.close()
            os.close(self._fds.pop(number))

    def fds(self) -> list[int]:
        """Of all arenas."""
        return list(self._fds.values())

    def get(self, number: int) -> Mapped:
        """One of them. Raises `SlotGone`."""
        found = self._all.get(number)
        if found is None:
            raise SlotGone(f"arena {number} is not there any more")
        return found

    def hold(self, slots: list[Any]) -> None:
        """Keep these, ``[arena, slot, generation, step]``, from being overwritten until the next call."""
        for number, one in list(self._all.items()):
            held = frozenset(slot for arena, slot, *_ in slots if arena == number)
            one.hold(held)

    def of(self, rank: int, generation: int, step: int, layout: int) -> Mapped | None:
        """The arena that has this state; ``layout`` 0: whichever it is in."""
        for one in list(self._all.values()):
            if one.rank == rank and layout in {0, one.control.layout}:
                with contextlib.suppress(SlotGone):
                    one.find(generation, step)
                    return one
        return None
