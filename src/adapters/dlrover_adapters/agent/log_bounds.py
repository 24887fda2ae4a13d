"""Bounds for workers' output files: what takes too much room loses its middle, and old attempts go.

Workers write into files of their own (`logs`), which nobody can close or rename under them. So room is given back where it
lies: a hole is punched between the beginning, which tells how it started, and the end, which tells how it ended. While the
worker lives the hole reads as zeros; when it is dead the hole is taken out, where the file system can do that.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import threading
from typing import NamedTuple, Protocol

from .process import libc

LOOK_S = 2.0
"""How often sizes are looked at: a file may be above its bound by what is written meanwhile."""

PASSING_BYTES_MAX = 32 * 1024 * 1024
"""Room of a file that is only shown, and whose console does not take it, or that is neither shown nor kept."""

HEAD = 4  # one part in so many is kept of the beginning
BLOCK = 4096

_KEEP_SIZE, _PUNCH_HOLE, _COLLAPSE_RANGE = 0x1, 0x2, 0x8
_ATTEMPT = re.compile(r"attempt_(\d+)")


class Hole(NamedTuple):
    """Bytes of a file that are no more, ``start`` to ``stop``."""

    start: int
    stop: int


class Bounded(Protocol):
    """A file of a worker, as far as its size goes."""

    @property
    def path(self) -> str:
        """Where it is."""
        ...

    @property
    def keep(self) -> bool:
        """Does it outlive its generation?"""
        ...


class LogBounds:
    """Watches the files it is told, in a thread of its own. Methods may be called from any thread."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self._files: dict[str, int] = {}
        self._holes: dict[str, Hole] = {}
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def open(self) -> None:
        """Start the thread."""
        thread = threading.Thread(target=self._run, name="log-bounds", daemon=True)
        thread.start()
        self._thread = thread

    def watch(self, file: Bounded) -> None:
        """Keep ``file`` within its bound, until `finish`."""
        bound = self.bytes_max if file.keep else min(self.bytes_max or PASSING_BYTES_MAX, PASSING_BYTES_MAX)
        if bound and file.path != os.devnull:
            with self._lock:
                self._files[file.path] = bound

    def hole(self, path: str) -> Hole | None:
        """What was taken out of a watched file."""
        return self._holes.get(path)

    def look(self) -> None:
        """Look at every file now."""
        with self._lock:
            for path, bound in self._files.items():
                with contextlib.suppress(OSError):
                    self._bound(path, bound)

    def _bound(self, path: str, bound: int) -> None:
        stat = os.stat(path)
        if stat.st_blocks * 512 <= bound:
            return
        before = self._holes.get(path)
        # One block before the hole says what is missing.
        start = before.start if before is not None else bound // HEAD // BLOCK * BLOCK + BLOCK
        # Half of the room, so that a file that grows without end is cut now and then, not at every look.
        stop = (stat.st_size - bound // 2) // BLOCK * BLOCK
        if stop <= (before.stop if before is not None else start):
            return
        # Told first: who reads meanwhile must not take the zeros for output.
        hole = self._holes[path] = Hole(start, stop)
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            _punch(fd, hole)
        finally:
            os.close(fd)

    def finish(self, file: Bounded) -> None:
        """Its worker is dead, and nobody reads it any more: bound it for the last time, and close the hole."""
        with self._lock, contextlib.suppress(OSError):
            bound = self._files.pop(file.path, 0)
            if bound and file.keep:
                self._bound(file.path, bound)
            hole = self._holes.pop(file.path, None)
            if hole is not None and file.keep:
                _close_up(file.path, hole)

    def close(self) -> None:
        """End the thread."""
        if self._thread is not None:
            self._ended.set()
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        while not self._ended.wait(LOOK_S):
            self.look()


def _allocate(fd: int, mode: int, start: int, size: int) -> bool:
    """``fallocate``; False where the file system cannot."""
    return bool(libc().fallocate(fd, mode, ctypes.c_longlong(start), ctypes.c_longlong(size)) == 0)


def _punch(fd: int, hole: Hole) -> None:
    """Give the room back, and say so. Where it is not supported, room is what it costs."""
    _allocate(fd, _PUNCH_HOLE | _KEEP_SIZE, hole.start, hole.stop - hole.start)
    words = f"\n--- dlrover: {hole.stop - hole.start + BLOCK} bytes left out here (--log-bytes-max) ---\n".encode()
    os.pwrite(fd, words.rjust(BLOCK - 1) + b"\n", hole.start - BLOCK)


def _close_up(path: str, hole: Hole) -> None:
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        _allocate(fd, _COLLAPSE_RANGE, hole.start, hole.stop - hole.start)
    finally:
        os.close(fd)


def prune(folder: str, attempts_max: int) -> None:
    """Remove attempts from ``folder`` but for the first and the newest, ``attempts_max`` in all; 0: none is removed."""
    if attempts_max <= 0:
        return
    with contextlib.suppress(OSError):
        numbers = sorted(int(found[1]) for name in os.listdir(folder) if (found := _ATTEMPT.fullmatch(name)))
        newest = numbers[1:][-(attempts_max - 1) :] if attempts_max > 1 else numbers[-1:]
        kept = {*newest, *(numbers[:1] if attempts_max > 1 else ())}
        for number in numbers:
            if number not in kept:
                shutil.rmtree(os.path.join(folder, f"attempt_{number}"), ignore_errors=True)
