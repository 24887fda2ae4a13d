"""Nodes with a saver each, for tests of what savers send one another."""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from dlrover_adapters.checkpoint.hashing import digest
from dlrover_adapters.checkpoint.hashing import digests as digests_of
from dlrover_adapters.checkpoint.peers import (
    Copy,
    Credentials,
    Server,
    Wanted,
    fetch,
)
from dlrover_adapters.checkpoint.slotview import SlotView
from dlrover_adapters.checkpoint.table import Item, Table, pack_blob
from dlrover_core.checkpoint.arena import BLOCK_BYTES, PAGE, Control, Geometry, Stamp

OURS = Credentials("run-1", b"the token of this job")
LAYOUT = 7
DATA_BYTES = BLOCK_BYTES + 12_345
IDLE_S = 5.0


class Home:
    """An arena of one rank, as its node has it."""

    def __init__(
        self,
        rank: int = 0,
        *,
        data_bytes: int = DATA_BYTES,
        layout: int = LAYOUT,
        world: int = 2,
        own: int = 0,
        live: int = 0,
        blob_room: int = 4096,
    ) -> None:
        """``own``: so many of its bytes are a tensor that only this rank has; ``live``: and so many one that others write."""
        rest = data_bytes - own
        items = (
            Item("w", "uint8", (rest,), (0,), (rest,), 0, rest),
            *([Item(f"rank.{rank}.extra.t", "uint8", (own,), (0,), (own,), rest, own)] if own else []),
            *([Item("buffer", "uint8", (live,), (0,), (live,), 64, live, live=True)] if live else []),
        )
        table = Table(layout, world, rank, ((0,), (1,)), items, own=(0, 1)).packed()
        self.sizes = Geometry(2, len(table), blob_room, data_bytes)
        self.memory = mmap.mmap(-1, self.sizes.total_bytes)
        self.memory[PAGE : PAGE + len(table)] = table
        self.control = Control(self.memory, self.sizes)
        self.control.make(
            layout=layout, rank=rank, world=world, local_rank=0, table_bytes=len(table), table_digest=digest(table)
        )
        self.sequence = 0

    def save(self, step: int, *, generation: int = 1, slot: int = 0, hashed: bool = True) -> SlotView:
        """A state of its own for each step; the view of its slot."""
        self.sequence += 1
        self.control.begin(slot)
        at, size = self.sizes.data_at(slot), self.sizes.data_bytes
        self.memory[at : at + size] = (bytes([step % 251, generation]) + os.urandom(62)) * (size // 64) + bytes(
            size % 64
        )
        blob = pack_blob({"step": b"%d" % step})
        at = self.sizes.blob_at(slot)
        self.memory[at : at + len(blob)] = blob
        self.control.publish(slot, Stamp(generation, step, self.sequence, len(blob), digest(blob)))
        view = SlotView(self.memory, slot)
        if hashed:
            for number, one in enumerate(digests_of(view.data)):
                at = self.sizes.digests_at(slot) + 8 * number
                self.memory[at : at + 8] = one.to_bytes(8, "little")
            self.control.note_hashed(slot, self.sequence)
        return view


class Node:
    """A server, what it has at home, and what it told."""

    def __init__(self, credentials: Credentials = OURS, **more: Any) -> None:
        self.home: dict[tuple[int, int, int, int], SlotView] = {}
        self.made: list[Copy] = []
        self.gone: list[Copy] = []
        self.complaints: list[str] = []
        self.at = 0
        self.room = ""
        self.server = Server(
            credentials,
            lookup=self.lookup,
            allow=lambda _size: self.room,
            made=self.made.append,
            gone=self.gone.append,
            generation=lambda: self.at,
            refused=lambda _address, why: self.complaints.append(why),
            **{"idle_s": IDLE_S, **more},
        )
        self.address = f"127.0.0.1:{self.server.start('127.0.0.1')}"

    @contextlib.contextmanager
    def lookup(self, wanted: Wanted) -> Iterator[SlotView | None]:
        """The server's."""
        yield self.home.get(tuple(wanted))

    def has(self, view: SlotView) -> Wanted:
        """From now on; what to ask for."""
        words = view.control
        wanted = Wanted(words.rank, view.stamp.generation, view.stamp.step, words.layout)
        self.home[tuple(wanted)] = view
        return wanted


@pytest.fixture
def node() -> Iterator[Callable[..., Node]]:
    """Nodes that are stopped in the end."""
    made: list[Node] = []

    def one(*args: Any, **more: Any) -> Node:
        made.append(Node(*args, **more))
        return made[-1]

    yield one
    for each in made:
        each.server.stop()
    assert not [thread for thread in threading.enumerate() if thread.name in {"peers", "peer"} and thread.is_alive()]


def opened(fd: int, slot: int = 0, *, close: bool = True) -> SlotView:
    """What lies in received memory, every byte compared."""
    memory = mmap.mmap(fd, 0)
    if close:
        os.close(fd)
    view = SlotView(memory, slot)
    assert view.hashed
    assert view.verify()
    return view


def fetched(node: Node, wanted: Wanted, credentials: Credentials = OURS, **more: Any) -> SlotView:
    """What comes from a node."""
    return opened(fetch(node.address, wanted, credentials, generation=1, **more).fd)


def same(one: SlotView, other: SlotView) -> bool:
    """Bit for bit."""
    return bytes(one.data) == bytes(other.data) and bytes(one.blob) == bytes(other.blob) and one.table == other.table


def until(there: Callable[[], bool]) -> None:
    """Until another thread has got there."""
    waiting = threading.Event()
    for _ in range(2000):
        if there():
            return
        waiting.wait(0.005)
    raise AssertionError("it did not happen")


class Between:
    """A proxy that changes what passes."""

    def __init__(
        self,
        address: str,
        change: Callable[[bytearray, int], bytes | None],
        back: Callable[[bytearray, int], bytes | None] = lambda piece, _: piece,
    ) -> None:
        """``change``: a piece from the server, and how much passed before; None cuts the line. ``back``: one to the server."""
        host, _, port = address.rpartition(":")
        self.to, self.change, self.back = (host, int(port)), change, back
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"
        self.threads = [threading.Thread(target=self.run)]
        self.threads[0].start()

    def run(self) -> None:
        """One connection after the other."""
        with contextlib.suppress(OSError):
            while True:
                self.one(self.listener.accept()[0])

    def one(self, dialled: socket.socket) -> None:
        """A connection, to its end."""
        with dialled as near, socket.create_connection(self.to) as far:
            back = threading.Thread(target=self.copy, args=(near, far, self.back))
            back.start()
            self.copy(far, near, self.change)
            back.join(IDLE_S)

    @staticmethod
    def copy(source: socket.socket, sink: socket.socket, change: Callable[[bytearray, int], bytes | None]) -> None:
        """Until either end."""
        passed = 0
        with contextlib.suppress(OSError):
            while piece := bytearray(source.recv(1 << 16)):
                changed = change(piece, passed)
                if changed is None:
                    break
                passed += len(piece)
                sink.sendall(changed)
        for one in (source, sink):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> Between:  # noqa: PYI034  # not in Python 3.10
        return self

    def __exit__(self, *_: object) -> None:
        self.listener.shutdown(socket.SHUT_RDWR)  # wakes accept
        self.listener.close()
        self.threads[0].join(IDLE_S)
