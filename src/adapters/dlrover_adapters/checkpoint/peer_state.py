"""One rank's state on its way between two nodes: what is told of it, its bytes, and the memory that they are received into."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from collections.abc import Iterator
from typing import NamedTuple

from dlrover_adapters.checkpoint.hashing import digest, running
from dlrover_adapters.checkpoint.peer_line import Line, Pace, PeerFailed, PeerRefused
from dlrover_adapters.checkpoint.slotview import SlotView
from dlrover_adapters.checkpoint.table import ALIGN_BYTES, Table
from dlrover_adapters.checkpoint.table import light as lightened
from dlrover_core.checkpoint.arena import BLOCK_BYTES, PAGE, ArenaBroken, Control, Geometry, Stamp

STATE_BYTES_MAX = 1 << 42
PIECE_BYTES = 1 << 20
"""Received at a time where memory is fresh: it is hashed and copied while it is in the cache."""
_U64 = (1 << 64) - 1


class Wanted(NamedTuple):
    """One rank's state: of whom, after which step of which generation, in which layout (0: in whichever there is)."""

    rank: int
    generation: int
    step: int
    layout: int

    def fits(self, other: Wanted) -> bool:
        """Is ``other`` what is wanted?"""
        return self[:3] == other[:3] and self.layout in {other.layout, 0}


class Header(NamedTuple):
    """What is told of a state before its bytes: table, blob, then the blocks. Checked as what comes from outside is."""

    rank: int
    world: int
    local_rank: int
    layout: int
    table_bytes: int
    table_digest: int
    blob_room: int
    data_bytes: int
    stamp: Stamp

    @classmethod
    def of(cls, view: SlotView) -> Header:
        """Of a slot."""
        words, sizes = view.control, view.control.geometry
        who = (words.rank, words.world, words.local_rank, words.layout)
        return cls(*who, words.table_used, words.table_digest, sizes.blob_bytes, sizes.data_bytes, view.stamp)

    @classmethod
    def heard(cls, told: object) -> Header:
        """From a frame. Raises `PeerFailed` for what cannot be."""
        flat = list(told) if isinstance(told, list) else []
        stamp = flat.pop() if flat else None
        ints = [*flat, *(stamp if isinstance(stamp, list) else ())]
        if len(flat) != 8 or len(ints) != 8 + len(Stamp._fields) or not all(type(one) is int for one in ints):
            raise PeerFailed("what it says of the state makes no sense")
        if not all(0 <= one <= _U64 for one in ints) or flat[4] + flat[6] + flat[7] > STATE_BYTES_MAX:
            raise PeerFailed("what it says of the state cannot be")
        rank, world, local_rank, layout, table_bytes, table_digest, blob_room, data_bytes = flat
        generation, step, sequence, blob_bytes, blob_digest, due = ints[8:]
        state = Stamp(generation, step, sequence, blob_bytes, blob_digest, bool(due))
        header = cls(rank, world, local_rank, layout, table_bytes, table_digest, blob_room, data_bytes, state)
        if header.stamp.blob_bytes > header.blob_room:
            raise PeerFailed("its blob is larger than the room for it")
        return header

    def told(self) -> list[object]:
        """For a frame."""
        return [*self[:-1], [*map(int, self.stamp)]]

    def geometry(self, slots: int) -> Geometry:
        """Of an arena that such states go into."""
        return Geometry(slots, self.table_bytes, self.blob_room, self.data_bytes)

    @property
    def wanted(self) -> Wanted:
        """Which state it is."""
        return Wanted(self.rank, self.stamp.generation, self.stamp.step, self.layout)

    @property
    def head(self) -> Header:
        """The same state without its data: what comes for it is table and blob."""
        return self._replace(blob_room=self.stamp.blob_bytes, data_bytes=0)

    @property
    def size(self) -> int:
        """Bytes that follow."""
        return self.table_bytes + self.stamp.blob_bytes + self.data_bytes


class Load:
    """The part of a slot that is sent: all of it by default.

    ``light``: without the tensors that are the same on every node. ``whole`` False: table and objects only.
    """

    def __init__(self, view: SlotView, *, light: bool = False, whole: bool = True) -> None:
        self.view, self.header = view, Header.of(view)
        self._light, self._whole = light and bool(view.table.own), whole
        if self._light:
            table, self._kept = lightened(view.table)
            self._table = table.packed()
            size = sum(-(-one.size // ALIGN_BYTES) * ALIGN_BYTES for one in self._kept)
            self.header = self.header._replace(
                table_bytes=len(self._table), table_digest=digest(self._table), data_bytes=size
            )
        else:
            self._table = bytes(memoryview(view.memory)[PAGE : PAGE + view.control.table_used])
        if not whole:
            self.header = self.header.head

    def give(self, line: Line, pace: Pace) -> None:
        """Send it as it lies in its slot; only of a light one anything is copied, a block at a time."""
        view = self.view
        line.allow(self.header.data_bytes + len(view.blob))
        line.send(self._table, pace)
        line.send(view.blob, pace)
        seal = line.seal(self._table, view.blob)
        known = view.digests() if view.hashed and self._whole and not self._light else None
        own: list[int] = []
        for block in self._data():
            if known is None:
                own.append(digest(block))
            line.send(block, pace)
        if not view.unchanged():
            line.say({"error": f"step {view.stamp.step} was overwritten while it was sent"})
            raise PeerFailed(f"step {view.stamp.step} was overwritten while it was sent; pin its slot")
        line.say({"digests": list(known if known is not None else own), "objects": seal})

    def _data(self) -> Iterator[memoryview]:
        if not self._whole:
            return iter(())
        return self._gathered() if self._light else self._blocks()

    def _blocks(self) -> Iterator[memoryview]:
        data = self.view.data
        for begin in range(0, len(data), BLOCK_BYTES):
            yield data[begin : begin + BLOCK_BYTES]

    def _gathered(self) -> Iterator[memoryview]:
        """The items that are kept, one after the other, each from where `light` says that it begins."""
        block = bytearray()
        for one in self._kept:
            for piece in (self.view.raw(one), memoryview(bytes(-one.size % ALIGN_BYTES))):
                at = 0
                while at < len(piece):
                    room = BLOCK_BYTES - len(block)
                    block += piece[at : at + room]
                    at += room
                    if len(block) == BLOCK_BYTES:
                        yield memoryview(block)
                        block = bytearray()
        if block:
            yield memoryview(block)


class Memory:
    """One arena in a memfd of this process. Raises `PeerRefused` where there is no memory for it.

    ``populated``: all of its pages are there, and mapped, for many states one after the other. Else, for one state that is waited
    for, they come with its data, by ``pwrite``: no page is cleared first, none is mapped, and the peer sends meanwhile.
    """

    def __init__(self, name: str, geometry: Geometry, *, populated: bool = True) -> None:
        self.geometry = geometry
        self._piece = None if populated else bytearray(PIECE_BYTES)
        self.fd = os.memfd_create(name, os.MFD_CLOEXEC)
        try:
            # No memory is an error here, and not a SIGBUS later: what is written through the mapping has its pages.
            os.posix_fallocate(self.fd, 0, geometry.total_bytes if populated else geometry.data_at(0))
            os.ftruncate(self.fd, geometry.total_bytes)
            flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if populated else 0)
            self.map = mmap.mmap(self.fd, geometry.total_bytes, flags=flags)
        except OSError as error:
            os.close(self.fd)
            raise self._no_room(error) from error
        self.control = Control(self.map, geometry)

    @classmethod
    def of(cls, fd: int) -> Memory:
        """That of another process, by a descriptor of its own. Raises OSError, ValueError, `ArenaBroken`."""
        memory = cls.__new__(cls)
        memory._piece = None
        memory.fd = os.dup(fd)
        try:
            memory.map = mmap.mmap(memory.fd, 0, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
            memory.control = Control(memory.map)
            memory.geometry = memory.control.geometry
        except BaseException:
            os.close(memory.fd)
            raise
        if memory.geometry.total_bytes > len(memory.map):
            memory.close()
            raise ArenaBroken("less memory than its control page says")
        return memory

    def _no_room(self, error: OSError) -> PeerRefused:
        return PeerRefused(f"there is no memory for {self.geometry.total_bytes:,} bytes: {error.strerror}")

    def _received(self, line: Line, memory: memoryview, begin: int, end: int) -> int:
        """A block, into its place; its digest."""
        if self._piece is None:
            block = memory[begin:end]
            line.receive_into(block)
            return digest(block)
        state = running()
        with memoryview(self._piece) as buffer:
            for at in range(begin, end, PIECE_BYTES):
                piece = buffer[: min(PIECE_BYTES, end - at)]
                line.receive_into(piece)
                state.update(piece)
                try:
                    done = 0
                    while done < len(piece):
                        done += os.pwrite(self.fd, piece[done:], at + done)
                except OSError as error:
                    raise self._no_room(error) from error
        return int(state.intdigest())

    def close(self, *, keep_fd: bool = False) -> None:
        """The mapping, and the descriptor, unless somebody else has it now."""
        self.control.release()
        with contextlib.suppress(BufferError):
            self.map.close()
        if not keep_fd:
            os.close(self.fd)

    def take(self, line: Line, header: Header, slot: int, *, fresh: bool) -> None:
        """Receive a state into a slot, verify every byte, publish it. Raises `PeerFailed`: then the slot is empty."""
        control, sizes, stamp = self.control, self.geometry, header.stamp
        control.begin(slot)
        line.allow(header.size)
        with memoryview(self.map) as memory:
            table = bytearray(header.table_bytes)
            line.receive_into(table)
            blob = memory[sizes.blob_at(slot) : sizes.blob_at(slot) + stamp.blob_bytes]
            line.receive_into(blob)
            at, end = sizes.data_at(slot), sizes.data_at(slot) + sizes.data_bytes
            found = [
                self._received(line, memory, begin, min(begin + BLOCK_BYTES, end))
                for begin in range(at, end, BLOCK_BYTES)
            ]
            ended = line.hear()
            if not line.sealed(ended.get("objects"), table, blob):
                raise PeerFailed(
                    f"step {stamp.step} of rank {header.rank}: its table or its objects were changed on the way, so nothing "
                    "of it is used; if the network is not faulty, somebody in between forges them: encrypt the job by TLS"
                )
            self._compare(header, bytes(table), blob, found, ended.get("digests"))
            if fresh:
                memory[PAGE : PAGE + len(table)] = table
        if fresh:
            control.make(
                layout=header.layout,
                rank=header.rank,
                world=header.world,
                local_rank=header.local_rank,
                table_bytes=header.table_bytes,
                table_digest=header.table_digest,
            )
        words = (ctypes.c_uint64 * sizes.blocks).from_buffer(self.map, sizes.digests_at(slot))
        for number, one in enumerate(found):
            words[number] = one
        del words
        control.note_hashed(slot, stamp.sequence)
        control.publish(slot, stamp._replace(due=False))

    @staticmethod
    def _compare(header: Header, table: bytes, blob: memoryview, found: list[int], wanted: object) -> None:
        """Raises `PeerFailed`."""
        what = f"step {header.stamp.step} of rank {header.rank}"
        if digest(table) != header.table_digest:
            raise PeerFailed(f"{what}: its table was damaged before it was sent")
        try:
            Table.unpacked(table)
        except ArenaBroken as error:
            raise PeerFailed(f"{what}: {error}") from error
        if digest(blob) != header.stamp.blob_digest:
            raise PeerFailed(f"{what}: its objects were damaged before they were sent")
        if not isinstance(wanted, list) or len(wanted) != len(found):
            raise PeerFailed(f"{what}: {len(found)} blocks came, with digests that are not of them")
        bad = next(
            (number for number, (one, right) in enumerate(zip(found, wanted, strict=True)) if one != right), None
        )
        if bad is not None:
            raise PeerFailed(f"{what}: block {bad} was damaged on the way, or before")
