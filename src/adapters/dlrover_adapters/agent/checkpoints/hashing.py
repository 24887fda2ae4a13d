"""Hashing at publication: the newest published slot of each arena, block by block, while nobody waits for it.

A slot that is overwritten meanwhile is dropped, and an older one than the newest is never begun: so the digests are at most one
publication behind. They are what restores and transfers verify every byte by.
"""

from __future__ import annotations

import ctypes
import threading

from dlrover_adapters.checkpoint.hashing import digest
from dlrover_core.checkpoint.arena import BLOCK_BYTES, ArenaBroken

from .slots import Mapped, Slots


class Hasher:
    """Works through the arenas that it is told of, in a thread."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._wanted: dict[int, None] = {}  # in order, each once
        self._news = threading.Condition()

    def want(self, number: int) -> None:
        """Something was published in this arena."""
        with self._news:
            self._wanted[number] = None
            self._news.notify()

    def forget(self, number: int) -> None:
        """The arena goes."""
        with self._news:
            self._wanted.pop(number, None)

    def work(self) -> None:
        """For ever."""
        while True:
            with self._news:
                while not self._wanted:
                    self._news.wait()
                number = next(iter(self._wanted))
                del self._wanted[number]
            try:
                hash_newest(self._slots.get(number))
            except ArenaBroken:  # it went, or is damaged: whoever reads it is told
                continue


def hash_newest(arena: Mapped) -> bool:
    """Write the digests of the newest slot; False: they are there, or it was overwritten. Raises `ArenaBroken`."""
    with arena.read():
        control = arena.control
        stamps = sorted(control.stamps(), key=lambda one: one[1].sequence)
        if not stamps:
            return False
        slot, stamp = stamps[-1]
        if control.hashed(slot) == stamp.sequence:
            return False
        sizes = control.geometry
        at = sizes.data_at(slot)
        with memoryview(arena.memory) as memory:
            for block in range(sizes.blocks):
                begin = at + block * BLOCK_BYTES
                with memory[begin : min(begin + BLOCK_BYTES, at + sizes.data_bytes)] as piece:
                    found = digest(piece)
                if not stamp.same(control.stamp(slot)):
                    return False
                ctypes.c_uint64.from_buffer(arena.memory, sizes.digests_at(slot) + block * 8).value = found
        # Overwritten since: the number is of a publication that is there no more, and so means nothing.
        control.note_hashed(slot, stamp.sequence)
        return True
