"""The arena: memory in which one rank's saved states lie, shared by the worker, its agent and the saver.

Anonymous memory (a memfd): no name that a kill could leave behind, and no limit of ``/dev/shm``. It outlives the worker, because
the agent holds a descriptor too. One arena holds ``slots`` slots; each has room for one state.

    control page | layout table | slot 0 | slot 1 | ...         a slot: digests | blob | data

The *table* says what lies where in the data of every slot; the *blob* is what is no tensor. Both are opaque here. Everything else
is 64-bit words in the control page, each written by one side only and read by the other, old or new but never in between:
`ctypes` stores an aligned word at once, ``struct.pack_into`` writes byte by byte. In which order another CPU sees
several of them nothing promises: where it matters there is a `fence`.

A slot is whole when its ``state`` word says so, and that word is written last (`Control.publish`). A worker that dies in the
middle leaves it `EMPTY`, and the other slots as they were. A state that is whole may become due on storage while others read it:
that changes one word (`Control.mark_due`), and the state stays the same one (`Stamp.same`).
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from dlrover_core.fence import fence

PAGE = 4096
BLOCK_BYTES = 16 * 1024 * 1024
"""Of a slot's data, what one digest is of."""
SLOTS_MAX = 8
MAGIC = int.from_bytes(b"DLRVCK02", "little")
EMPTY = 0
LOOKS_MAX = 4
"""Reads of a header that give another value each time, after which the slot counts as being overwritten."""
_WORD = 8
_SLOT_AT, _SLOT_BYTES = 1024, 128


def rounded(size: int) -> int:
    """To whole pages."""
    return -(-size // PAGE) * PAGE


class ArenaBroken(ValueError):
    """This memory is no arena, or not one of this version, or its words make no sense."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """The sizes of an arena, in bytes: the table's, and of each of its ``slots`` the blob's and the data's."""

    slots: int
    table_bytes: int
    blob_bytes: int
    data_bytes: int

    def __post_init__(self) -> None:
        """Refuse what no arena can be."""
        if not 1 <= self.slots <= SLOTS_MAX or min(self.table_bytes, self.blob_bytes, self.data_bytes) < 0:
            raise ArenaBroken(f"no arena is like this: {self}")

    @property
    def blocks(self) -> int:
        """How many digests a slot has."""
        return -(-self.data_bytes // BLOCK_BYTES)

    @property
    def slot_bytes(self) -> int:
        """Of one slot, whole pages."""
        return rounded(self.blocks * _WORD) + rounded(self.blob_bytes) + rounded(self.data_bytes)

    @property
    def total_bytes(self) -> int:
        """Of the whole arena, whole pages."""
        return PAGE + rounded(self.table_bytes) + self.slots * self.slot_bytes

    def digests_at(self, slot: int) -> int:
        """Where a slot's digests begin: one word for each block of the data."""
        return PAGE + rounded(self.table_bytes) + slot * self.slot_bytes

    def blob_at(self, slot: int) -> int:
        """Where a slot's blob begins."""
        return self.digests_at(slot) + rounded(self.blocks * _WORD)

    def data_at(self, slot: int) -> int:
        """Where a slot's data begin, on a page's boundary."""
        return self.blob_at(slot) + rounded(self.blob_bytes)


class Stamp(NamedTuple):
    """What a slot holds: the state after ``step`` of ``generation``; ``sequence`` counts publications in this arena.

    ``blob_digest`` is of the blob's ``blob_bytes`` bytes. ``due``: it is to go to storage; this may change while a slot is read.
    """

    generation: int
    step: int
    sequence: int
    blob_bytes: int
    blob_digest: int
    due: bool = False

    def same(self, other: Stamp | None) -> bool:
        """Whether the other stamp is of the same state. Being due on storage is no part of a state."""
        return other is not None and self[:5] == other[:5]


# The control page; what is not here is a `Word` of `Control`.
_MAGIC, _SLOTS, _TABLE, _BLOB, _DATA = 0, 8, 16, 24, 32
_PINNED = 248
# Words of one slot, from its own place on.
_STATE, _GENERATION, _STEP, _SEQUENCE, _BLOB_USED, _BLOB_DIGEST, _DUE, _SEAL, _HASHED = range(0, 72, 8)
_HEADER = _GENERATION, _STEP, _SEQUENCE, _BLOB_USED, _BLOB_DIGEST, _SEAL, _DUE


class Word:
    """A level in the control page: one side writes it, the other looks at it when it likes."""

    def __init__(self, at: int) -> None:
        self._at = at

    def __get__(self, control: Control | None, owner: object) -> int:
        return control._get(self._at) if control is not None else self._at

    def __set__(self, control: Control, value: int) -> None:
        control._set(self._at, value)


class Control:
    """The words of one arena, in ``memory``: a writable buffer of at least a page that is not released while this lives."""

    # By the agent, for the worker.
    armed = Word(256)
    """The planned change that ranks are to get ready for; 0: none."""
    go = Word(264)
    """The planned change whose boundary rank 0 may choose now; 0: none."""
    whole = Word(272)
    """One more than the newest step that is whole on all ranks, as far as is known; 0: none."""
    mtbf_s = Word(280)
    """Seconds to be expected between failures of this job; 0: unknown."""
    committed = Word(288)
    """One more than the newest step that is whole on storage; 0: none."""
    # By the worker, for the agent.
    acked = Word(512)
    """The newest `armed` that it has seen between two steps."""
    boundary = Word(520)
    """One more than the step of the planned boundary that it has saved, and at which it waits; 0: it does not wait."""
    saves = Word(528)
    """States published."""
    skipped = Word(536)
    """Saves left out: every slot was in use, or not populated yet."""
    torn = Word(544)
    """Copies thrown away because the state changed meanwhile."""
    every = Word(552)
    """Steps between saves into memory."""
    store_every = Word(560)
    """Steps between saves to storage; 0: none are due by themselves."""
    stall_us = Word(568)
    """What the newest save cost the training thread."""
    copy_us = Word(576)
    """How long the newest copy took, beside training or not."""
    live_us = Word(584)
    """What of the stall copied those things that others than the optimizer write."""

    # Written when the arena is made.
    layout = Word(40)
    """The number of the layout that the table describes."""
    rank = Word(48)
    """The global rank whose states these are."""
    world = Word(56)
    """The world's size when they were saved."""
    local_rank = Word(64)
    """The rank on its node."""
    table_used = Word(72)
    """Bytes of the table."""
    table_digest = Word(80)
    """Of these bytes."""

    def __init__(self, memory: object, geometry: Geometry | None = None) -> None:
        self._words = (ctypes.c_uint64 * (PAGE // _WORD)).from_buffer(memory)  # type: ignore[arg-type]  # any buffer
        if geometry is None:
            if self._get(_MAGIC) != MAGIC:
                raise ArenaBroken("this memory is no arena of this version")
            fence()  # `make` wrote the rest before
            geometry = Geometry(self._get(_SLOTS), self._get(_TABLE), self._get(_BLOB), self._get(_DATA))
        self.geometry = geometry

    def _get(self, at: int) -> int:
        return int(self._words[at // _WORD])

    def _set(self, at: int, value: int) -> None:
        self._words[at // _WORD] = value

    def release(self) -> None:
        """Let the buffer go: a mapping with an exported buffer cannot be closed."""
        del self._words

    # ---- made once

    def make(self, *, layout: int, rank: int, world: int, local_rank: int, table_bytes: int, table_digest: int) -> None:
        """Write the arena's own words, the magic last; the table lies there already."""
        sizes = self.geometry
        for at, value in (
            (_SLOTS, sizes.slots),
            (_TABLE, sizes.table_bytes),
            (_BLOB, sizes.blob_bytes),
            (_DATA, sizes.data_bytes),
        ):
            self._set(at, value)
        self.layout, self.rank, self.world, self.local_rank = layout, rank, world, local_rank
        self.table_used, self.table_digest = table_bytes, table_digest
        fence()
        self._set(_MAGIC, MAGIC)

    # ---- slots: the worker's side

    def _slot(self, slot: int) -> int:
        if not 0 <= slot < self.geometry.slots:
            raise ArenaBroken(f"slot {slot} of {self.geometry.slots}")
        return _SLOT_AT + slot * _SLOT_BYTES

    def begin(self, slot: int) -> None:
        """The slot is about to be overwritten: what was in it is there no more."""
        self._set(self._slot(slot) + _STATE, EMPTY)
        fence()  # before anything is overwritten, and before `pinned` is looked at

    def publish(self, slot: int, stamp: Stamp) -> None:
        """Everything is there: say so, by one store."""
        at = self._slot(slot)
        if self._get(at + _STATE) != EMPTY:
            self.begin(slot)  # or a reader would see words of both states
        for offset, value in zip(_HEADER, self._header(slot, stamp), strict=True):
            self._set(at + offset, value)
        fence()  # the state itself, too
        self._set(at + _STATE, stamp.step + 1)
        fence()  # before any word that says more of it, as `boundary` does

    def mark_due(self, slot: int, stamp: Stamp) -> bool:
        """Mark the state in this slot as due on storage, by one store. False: the slot has another state by now."""
        if not stamp.same(self.stamp(slot)):
            return False
        self._set(self._slot(slot) + _DUE, self._seal(slot, stamp._replace(due=True)))
        fence()  # before the agent is told
        return True

    def _header(self, slot: int, stamp: Stamp) -> tuple[int, ...]:
        """The words of `_HEADER`. The seal is of all but ``due``, which is a seal itself: each changes without the other."""
        due = self._seal(slot, stamp) if stamp.due else 0
        return (*map(int, stamp[:5]), self._seal(slot, stamp._replace(due=False)), due)

    def _seal(self, slot: int, stamp: Stamp) -> int:
        """A digest of the header itself: a word that was changed by whatever is found."""
        sizes = self.geometry
        arena = (sizes.slots, sizes.table_bytes, sizes.blob_bytes, sizes.data_bytes, self.layout, self.rank, self.world)
        told = ",".join(map(str, (slot, *map(int, stamp), *arena, self.table_used, self.table_digest)))
        return int.from_bytes(hashlib.blake2b(told.encode(), digest_size=8).digest(), "little")

    # ---- slots: everybody's

    def stamp(self, slot: int) -> Stamp | None:
        """What a slot holds; None: nothing whole. Raises `ArenaBroken` for a header that is not as it was written."""
        at = self._slot(slot)
        before: tuple[int, ...] = ()
        for _ in range(LOOKS_MAX):
            fence()  # what was read of the slot, or pinned, before
            state = self._get(at + _STATE)
            if state == EMPTY:
                return None
            fence()
            words = tuple(self._get(at + offset) for offset in _HEADER)
            fence()
            if self._get(at + _STATE) != state:
                return None  # overwritten meanwhile
            generation, step, sequence, used, digest, _, due = words
            stamp = Stamp(generation, step, sequence, used, digest, bool(due))
            if state == stamp.step + 1 and words == self._header(slot, stamp):
                return stamp
            if words == before:
                raise ArenaBroken(f"slot {slot}: its header is damaged")
            # The same step may have been published anew between two loads. What is damaged is so the next time, too.
            before = words
        return None

    def stamps(self) -> Iterator[tuple[int, Stamp]]:
        """The slots that hold something whole; damaged ones are left out."""
        for slot in range(self.geometry.slots):
            try:
                found = self.stamp(slot)
            except ArenaBroken:
                continue
            if found is not None:
                yield slot, found

    def hashed(self, slot: int) -> int:
        """The sequence of the publication that the slot's digests are of; 0: of none yet."""
        found = self._get(self._slot(slot) + _HASHED)
        fence()  # before the digests are read
        return found

    def note_hashed(self, slot: int, sequence: int) -> None:
        """The saver has written all digests of this publication."""
        fence()
        self._set(self._slot(slot) + _HASHED, sequence)

    # ---- levels, by the agent or the saver for the worker

    def pin(self, slot: int) -> None:
        """Keep the worker from overwriting a slot. Look at its `stamp` again afterwards: it may just have begun."""
        self._set(_PINNED, self._get(_PINNED) | 1 << slot)
        fence()  # as `begin` has it: one of the two sees the other

    def unpin(self, slot: int) -> None:
        """The slot may be overwritten."""
        fence()  # all that was wanted of it has been read
        self._set(_PINNED, self._get(_PINNED) & ~(1 << slot))

    def pinned(self, slot: int) -> bool:
        """Is somebody reading it?"""
        return bool(self._get(_PINNED) >> slot & 1)
