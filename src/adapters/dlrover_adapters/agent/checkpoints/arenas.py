"""The memory that ranks' states lie in, and who holds what in it: this node's own arenas, and copies of other nodes'.

Of an arena the agent maps the control page and nothing else. An arena of an older world or layout is kept for reading until a
step of a newer generation is whole on all nodes (`Arenas.superseded`).
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from dlrover_adapters.checkpoint.table import cut_in
from dlrover_core.checkpoint.arena import PAGE, ArenaBroken, Control, Geometry, Stamp
from dlrover_core.job.lineage import readable

from . import budget

MEMORY, REPLICA, OBJECTS = "memory", "replica", "objects"
"""A node's own; copies of another node's, all of it, or only what its ranks have alone, because each node has all else."""
ARENAS_MAX = 256
"""Arenas and copies together; a host of 16 ranks that changed its world 3 times has 64."""
COPIES_MAX = 128
HEADS_MAX = 64
"""Tables and objects of other nodes' states that are kept for ranks of this node that ask later; the newest."""
NUMBER_MAX = 2**53
CUT_LOOK_BYTES = 64 * 1024
"""Of a slot's blob, what is read for the cut, which stands first in it."""
_NAME = "dlrover-arena"


class NoRoom(Exception):
    """There is no memory for this arena; the words are for people."""


class Owner(NamedTuple):
    """Whose states an arena holds: ``rank`` of ``world``, in the ``layout`` of this number. 0: it says these two itself."""

    rank: int
    world: int
    layout: int


class State(NamedTuple):
    """The state after ``step`` of ``generation``; the greater, the newer."""

    generation: int
    step: int


class Arena:
    """One memfd. ``generation``: the newest that used it; of a copy, the one whose state it is. Not `ready`: nobody reads it."""

    def __init__(self, number: int, kind: str, owner: Owner, sizes: Geometry | None, fd: int, total: int) -> None:
        self.id, self.kind, self.owner, self.total_bytes, self.fd = number, kind, owner, total, fd
        self.geometry, self.generation, self.local_rank = sizes, 0, 0
        self.opened = 0
        """Of one rank's arenas, the one that it asked for last has the highest: that one it saves into."""
        self.members: frozenset[int] | None = None
        """Of a node's own: the local ranks that must hold a state for it to be whole here; None: all."""
        self.spread = 0
        """Over how many nodes the state is spread, as `ReportKeeping` has it."""
        self.fetched: tuple[int, ...] | None = None
        """Of what our saver brought for our ranks: the rank, generation, step and layout."""
        self._page: mmap.mmap | None = None
        self.control: Control | None = None

    @property
    def ready(self) -> bool:
        """Is the control page written, and read here?"""
        return self.control is not None

    def brought(self, slot: tuple[int, ...]) -> bool:
        """Is it what our saver would bring for this?"""
        return self.fetched is not None and self.fetched[:3] == slot[:3] and slot[3] in {0, self.fetched[3]}

    def look(self) -> None:
        """The control page is written: map it. Raises `ArenaBroken` where it is not what was agreed on; idempotent."""
        if self.control is not None:
            return
        try:
            page = mmap.mmap(self.fd, PAGE)
            control = Control(page)
        except (OSError, ValueError) as error:
            raise ArenaBroken(f"arena {self.id} of rank {self.owner.rank}: {error}") from error
        try:
            self._check(control)
        except ArenaBroken as error:
            control.release()
            page.close()
            raise ArenaBroken(f"arena {self.id} of rank {self.owner.rank}: {error}") from error
        self._page, self.control, self.geometry = page, control, control.geometry

    def _check(self, control: Control) -> None:
        rank, world, layout = self.owner
        self.owner = Owner(rank, world or control.world, layout or control.layout)
        said = Owner(control.rank, control.world, control.layout)
        if said != self.owner:
            raise ArenaBroken(f"it says {said}, {self.owner} was agreed on")
        if self.geometry is not None and control.geometry != self.geometry:
            raise ArenaBroken(f"it says {control.geometry}, {self.geometry} was agreed on")
        if control.geometry.total_bytes > self.total_bytes:
            raise ArenaBroken(f"{control.geometry.total_bytes} bytes do not fit into {self.total_bytes}")

    def stamps(self) -> list[tuple[int, Stamp]]:
        """What its slots hold now; numbers that nobody could tell the leader are none."""
        found = self.control.stamps() if self.control is not None else ()
        return [one for one in found if max(one[1].generation, one[1].step) < NUMBER_MAX]

    def cut(self, slot: int) -> bytes:
        """What the state in a slot has consumed of each dataset, packed; empty: it says nothing, or cannot be read."""
        stamp = self.control.stamp(slot) if self.control is not None else None
        if stamp is None or self.geometry is None:
            return b""
        try:
            found = cut_in(os.pread(self.fd, min(stamp.blob_bytes, CUT_LOOK_BYTES), self.geometry.blob_at(slot)))
        except (OSError, ArenaBroken):
            return b""
        return found if readable(found) else b""

    def close(self) -> None:
        """Let the memory go; others may still have it."""
        if self.control is not None and self._page is not None:
            self.control.release()
            self.control = None
            self._page.close()
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class Arenas:
    """All of this node's. ``root``: where limits of memory are read, another folder in tests."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._all: dict[int, Arena] = {}
        self._heads: list[Arena] = []
        self._numbers, self._openings = itertools.count(1), itertools.count(1)

    def __iter__(self) -> Iterator[Arena]:
        return iter(list(self._all.values()))

    def get(self, number: int) -> Arena | None:
        """One of them."""
        return self._all.get(number)

    def own(self, generation: int) -> list[Arena]:
        """Those that the ranks of a generation save into, by local rank."""
        found = [one for one in self._all.values() if one.kind == MEMORY and one.generation == generation]
        newest = {one.local_rank: one for one in sorted(found, key=lambda one: one.opened)}
        return [newest[local_rank] for local_rank in sorted(newest)]

    def left(self) -> budget.Room:
        """What one more may take."""
        return budget.left(self._root, [one.fd for one in self._all.values()])

    @property
    def held_bytes(self) -> int:
        """What all of them take, once they are populated."""
        return sum(one.total_bytes for one in self._all.values())

    def _add(self, kind: str, owner: Owner, sizes: Geometry | None, fd: int, total: int) -> Arena:
        found = Arena(next(self._numbers), kind, owner, sizes, fd, total)
        self._all[found.id] = found
        return found

    def _make(self, owner: Owner, sizes: Geometry, beside: int) -> Arena:
        total = sizes.total_bytes
        refusal = budget.refusal(total, self.left(), self.held_bytes, beside)
        if refusal:
            raise NoRoom(refusal)
        if len(self._all) >= ARENAS_MAX:
            raise NoRoom(f"this node has {ARENAS_MAX} arenas already, which is as many as it may have")
        try:
            fd = os.memfd_create(_NAME, os.MFD_CLOEXEC)
        except OSError as error:
            raise NoRoom(f"no memory for checkpoints: memfd_create: {error}") from error
        try:
            os.ftruncate(fd, total)
        except OSError as error:
            os.close(fd)
            raise NoRoom(f"no memory for checkpoints: an arena of {total:,} bytes cannot be made: {error}") from error
        return self._add(MEMORY, owner, sizes, fd, total)

    # ---- this node's own

    def open(
        self, owner: Owner, sizes: Geometry, generation: int, local_rank: int, beside: int = 0
    ) -> tuple[Arena, bool, list[Arena]]:
        """The arena for a rank: its predecessor's where that is the same in everything, else a new one; whether it is new.

        ``beside``: bytes that ranks are yet to take themselves, which a new one has to leave.
        And those that nobody needs any more: what the same rank of the same generation asked for before. Raises `NoRoom`.
        """
        fits = [one for one in self._all.values() if (one.kind, one.owner, one.geometry) == (MEMORY, owner, sizes)]
        idle = [one for one in self._all.values() if self._is_idle(one, generation, local_rank, fits)]
        found = fits[0] if fits else self._make(owner, sizes, beside)
        found.generation, found.local_rank, found.opened = generation, local_rank, next(self._openings)
        return found, not found.ready, idle

    @staticmethod
    def _is_idle(one: Arena, generation: int, local_rank: int, fits: list[Arena]) -> bool:
        mine = one.kind == MEMORY and one.local_rank == local_rank and one not in fits
        return mine and (one.generation == generation or not one.ready) and not one.stamps()

    def forget(self, arena: Arena) -> None:
        """Let it go."""
        self._all.pop(arena.id, None)
        arena.close()

    def superseded(self, generation: int, whole: int = -1) -> list[Arena]:
        """Those that nobody needs any more, now that step ``whole`` of this generation is whole everywhere.

        That only older generations used; and of this one those of an older layout that hold nothing as new.
        """
        current, newest = self.own(generation), State(generation, whole)
        return [
            one
            for one in self._all.values()
            if one.kind == MEMORY and one.generation <= generation and one not in current
            and (one.generation < generation or all((stamp.generation, stamp.step) < newest for _, stamp in one.stamps()))
        ]  # fmt: skip

    # ---- copies

    def adopt(self, owner: Owner, fd: int, kind: str = REPLICA) -> Arena:
        """A copy of another node's state, in ``fd``, which is ours now. Raises `NoRoom`, `ArenaBroken`."""
        copies = sum(one.kind != MEMORY for one in self._all.values())
        if copies >= COPIES_MAX:
            os.close(fd)
            raise NoRoom(f"this node keeps {copies} copies already, which is as many as it may keep")
        found = self._add(kind, owner, None, fd, os.fstat(fd).st_size)
        try:
            found.look()
        except ArenaBroken:
            self.forget(found)
            raise
        return found

    def fetched(self, slot: tuple[int, ...], fd: int, *, whole: bool = True) -> Arena:
        """Take over memory that the saver fetched. ``slot`` as `Arena.fetched`, layout 0: any. Raises `NoRoom`, `ArenaBroken`.

        Not ``whole``: it has no data, and is no copy that anybody may count on; the last `HEADS_MAX` are kept.
        """
        rank, _, _, layout = slot
        found = self.adopt(Owner(rank, 0, layout), fd) if whole else self._head(Owner(rank, 0, layout), fd)
        found.fetched = (*slot[:3], found.owner.layout)
        return found

    def brought(self, slot: tuple[int, ...], *, whole: bool) -> Arena | None:
        """The arena that this node's saver has fetched for this slot already; None: none."""
        return next((one for one in (self if whole else self._heads) if one.brought(slot)), None)

    def _head(self, owner: Owner, fd: int) -> Arena:
        found = Arena(0, REPLICA, owner, None, fd, os.fstat(fd).st_size)
        try:
            found.look()
        except ArenaBroken:
            found.close()
            raise
        self._heads.append(found)
        self.forget_heads(HEADS_MAX)
        return found

    def forget_heads(self, keep: int = 0) -> None:
        """Let tables and objects go that were brought without data, but for the last ``keep``."""
        while len(self._heads) > keep:
            self._heads.pop(0).close()

    # ---- what is where

    def held(self) -> dict[State, dict[int, tuple[Arena, int]]]:
        """Of each state that some local rank holds whole: by local rank, the arena and the slot."""
        found: dict[State, dict[int, tuple[Arena, int]]] = {}
        for one in sorted(self._all.values(), key=lambda one: one.opened):
            if one.kind == MEMORY:
                for slot, stamp in one.stamps():
                    found.setdefault(State(stamp.generation, stamp.step), {})[one.local_rank] = (one, slot)
        return found

    def whole(self, nproc: int) -> list[State]:
        """The states that all of the ``nproc`` local ranks hold whole that have parts of it, ascending."""
        return sorted(state for state, ranks in self.held().items() if nproc and _needed(ranks, nproc) <= set(ranks))


def _needed(ranks: Mapping[int, tuple[Arena, int]], nproc: int) -> set[int]:
    needed: set[int] = set()
    for arena, _ in ranks.values():
        needed |= set(range(nproc)) if arena.members is None else arena.members
    return needed


def word(arena: Arena, name: str, value: int) -> None:
    """Set a word of the worker's level, if it is another: a page that is not written stays clean in everybody's cache."""
    if arena.control is not None and getattr(arena.control, name) != ctypes.c_uint64(value).value:
        setattr(arena.control, name, value)
