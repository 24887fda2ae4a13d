"""What memory alone costs on this machine: the least that a restore and a lost node's transfer must do, in the same run.

Only bytes are moved here: no process starts and nothing is agreed on. What a figure of ours is above its floor is ours; the floor
is the machine's. Fresh memory costs many times more where a hypervisor has to find it first.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import socket
import threading
import time
from collections.abc import Callable

from dlrover_adapters.checkpoint.hashing import running
from dlrover_adapters.torch.checkpoint.memory import ask_for_huge_pages

PIECE = 8 * 1024 * 1024
SMALL = 1024 * 1024
MIB = 1024 * 1024


class Source:
    """Warm memory in a memfd, as an arena is."""

    def __init__(self, mib: int) -> None:
        self.size = mib * MIB
        self.fd = os.memfd_create("floor", os.MFD_CLOEXEC)
        content = os.urandom(SMALL)
        for at in range(0, self.size, SMALL):
            os.pwrite(self.fd, content, at)

    def close(self) -> None:
        """Release the memory."""
        os.close(self.fd)


def restore_s(source: Source, threads: int, *, verified: bool) -> float:
    """Hash all of it, where it is ``verified``, then read it into fresh memory of huge pages: by so many threads."""
    began = time.perf_counter()
    if verified:
        _all(threads, source.size, lambda at, end: _hash(source.fd, at, end))
    fresh = mmap.mmap(-1, source.size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    ask_for_huge_pages(ctypes.addressof(ctypes.c_char.from_buffer(fresh)), source.size)
    with memoryview(fresh) as into:
        _all(threads, source.size, lambda at, end: _read(source.fd, into[at:end], at))
    took = time.perf_counter() - began
    fresh.close()
    return took


def transfer_s(source: Source, threads: int) -> float:
    """Over a local connection into a fresh memfd, hashed on arrival, then read into fresh memory."""
    began = time.perf_counter()
    ours, theirs = socket.socketpair()
    arrived = os.memfd_create("floor", os.MFD_CLOEXEC)
    giver = threading.Thread(target=_give, args=(source, theirs))
    giver.start()
    buffer, state = bytearray(SMALL), running()
    with memoryview(buffer) as whole:
        for at in range(0, source.size, SMALL):
            ours.recv_into(whole, SMALL, socket.MSG_WAITALL)
            state.update(whole)
            os.pwrite(arrived, whole, at)
    giver.join()
    ours.close()
    took = time.perf_counter() - began
    there = Source.__new__(Source)
    there.size, there.fd = source.size, arrived
    took += restore_s(there, threads, verified=False)
    there.close()
    return took


def _give(source: Source, line: socket.socket) -> None:
    with line, mmap.mmap(source.fd, source.size) as memory, memoryview(memory) as view:
        line.sendall(view)


def _hash(fd: int, at: int, end: int) -> None:
    state = running()
    with memoryview(bytearray(SMALL)) as buffer:
        while at < end:
            part = buffer[: min(SMALL, end - at)]
            _read(fd, part, at)
            state.update(part)
            at += len(part)


def _read(fd: int, into: memoryview, at: int) -> None:
    done = 0
    while done < len(into):
        done += os.preadv(fd, [into[done:]], at + done)


def _all(threads: int, size: int, one: Callable[[int, int], None]) -> None:
    def run(number: int) -> None:
        for at in range(number * PIECE, size, threads * PIECE):
            one(at, min(at + PIECE, size))

    several = [threading.Thread(target=run, args=(number,)) for number in range(threads)]
    for thread in several:
        thread.start()
    for thread in several:
        thread.join()
