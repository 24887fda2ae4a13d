"""The lock of one job: an exclusive `flock` held for life, and the mark of what was acknowledged.

The kernel frees a flock at any death of its holder and wakes a blocked waiter within a millisecond; so there is no time to
live, no polling, and no way to hold it dead. The lock file also bears a *mark*: the last acknowledged sequence number,
rewritten after every commit without a sync. It is the witness that lets a later reader say that something is missing: a
kill cannot lose it, and a power cut can only leave an older one, never one beyond what the database had synced.

flock belongs to the open file, which a fork shares: a child that neither executes nor closes would keep a dead master's
lock. So the descriptors are close-on-exec, and closed in every forked child.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import struct
import threading
import zlib
from pathlib import Path
from typing import NamedTuple

from dlrover_core.errors import LogUnavailable
from dlrover_core.logs.place import make_dirs, private_file

_MARK = struct.Struct("<4sQQ")
_CRC = struct.Struct("<I")
_MAGIC = b"DLM1"

# Descriptors that a forked child must close. Global, because a fork is the process's affair, not an object's.
_open: set[int] = set()
_guard = threading.Lock()
_registered: list[bool] = []


class Mark(NamedTuple):
    """What the last leader acknowledged, and under which token."""

    seq: int
    token: int


class JobLock:
    """A held lock. Made by `try_take` or `wait_take` only."""

    def __init__(self, path: Path, fd: int) -> None:
        self.path, self._fd = path, fd
        own = os.fstat(fd)
        self._inode = (own.st_dev, own.st_ino)

    def intact(self) -> bool:
        """Is the file at the path still the one that is locked? A deleted one excludes nobody.

        Raises `OSError` where the disk does not say: nothing may be written then, but leadership is not lost.
        """
        try:
            found = os.stat(self.path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return (found.st_dev, found.st_ino) == self._inode

    def renew(self) -> bool:
        """Lock anew where the file was deleted; False: there is another one, which is somebody else's. Raises `OSError`.

        Nobody leads in between: who waits for the deleted file's lock finds the new one locked.
        """
        if self.intact():
            return True
        make_dirs(self.path.parent)
        try:
            fd = _register(private_file(self.path, os.O_RDWR | os.O_EXCL))
        except FileExistsError:
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # somebody was quicker
            _close(fd)
            return False
        except OSError:
            self.path.unlink(missing_ok=True)  # or it would be taken for somebody else's at the next try
            _close(fd)
            raise
        old, self._fd = self._fd, fd
        own = os.fstat(fd)
        self._inode = (own.st_dev, own.st_ino)
        _close(old)
        return self.intact()

    def write_mark(self, mark: Mark) -> None:
        """Note what has been acknowledged."""
        body = _MARK.pack(_MAGIC, *mark)
        os.pwrite(self._fd, body + _CRC.pack(zlib.crc32(body)), 0)

    def release(self) -> None:
        """Let go. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            _close(fd)


def read_mark(path: Path) -> Mark | None:
    """The mark in a lock file; None where there is none or it cannot be read."""
    try:
        data = path.read_bytes()[: _MARK.size + _CRC.size]
    except OSError:
        return None
    if len(data) < _MARK.size + _CRC.size or data[:4] != _MAGIC:
        return None
    if _CRC.unpack_from(data, _MARK.size)[0] != zlib.crc32(data[: _MARK.size]):
        return None
    _, seq, token = _MARK.unpack_from(data)
    return Mark(seq, token)


def try_take(path: Path, *, make: bool = True) -> JobLock | None:
    """The lock, if it is free now. ``make``: a lock file that is missing; else it raises `FileNotFoundError`."""
    return _take(path, fcntl.LOCK_EX | fcntl.LOCK_NB, _Wanted(make))


def take_now(path: Path, *, make: bool = True) -> JobLock | None:
    """As `try_take`. Raises `LogUnavailable` where there is no lock file, or can be none."""
    try:
        return try_take(path, make=make)
    except OSError as error:
        raise _unusable(path, error) from error


def _unusable(path: Path, error: OSError) -> LogUnavailable:
    return LogUnavailable(f"the lock file {path} cannot be used: {error}")


async def wait_take(path: Path, *, make: bool = True) -> JobLock:
    """The lock, as soon as its holder lets go or dies. Raises `LogUnavailable` where there is no lock file, or can be none.

    ``make``: a lock file that is missing. One that is removed during the wait is made in any case.

    The wait blocks a daemon thread, for flock has no other doorbell. A cancelled wait leaves the thread behind, for nothing
    can wake it; it lets go as soon as it gets the lock, and makes no file any more.
    """
    loop = asyncio.get_running_loop()
    granted: asyncio.Future[JobLock] = loop.create_future()
    wanted = _Wanted(make)

    def block() -> None:
        try:
            lock = _take(path, fcntl.LOCK_EX, wanted)
        except OSError as error:
            outcome: JobLock | OSError = error
        else:
            if lock is None:
                return
            outcome = lock
        try:
            loop.call_soon_threadsafe(deliver, outcome)
        except RuntimeError:  # the loop has closed: nobody waits any more
            if isinstance(outcome, JobLock):
                outcome.release()

    def deliver(outcome: JobLock | OSError) -> None:
        if isinstance(outcome, OSError):
            if not granted.done():
                granted.set_exception(_unusable(path, outcome))
        elif granted.done():
            outcome.release()
        else:
            granted.set_result(outcome)

    threading.Thread(target=block, name=f"dlrover-lock {path.name}", daemon=True).start()
    try:
        return await granted
    except asyncio.CancelledError:
        wanted.end()
        # Granted and cancelled in the same turn of the loop: nobody else would ever release it.
        if granted.done() and not granted.cancelled() and granted.exception() is None:
            granted.result().release()
        raise


class _Wanted:
    """Does anybody still wait for the lock? Once `end` has returned, the waiting thread makes no directory and no file."""

    def __init__(self, make: bool) -> None:
        self._guard = threading.Lock()
        self._wanted, self._make = True, make

    def end(self) -> None:
        """Nobody waits any more."""
        with self._guard:
            self._wanted = False

    def open(self, path: Path) -> int | None:
        """The lock file, made where it was removed while we waited; None where nobody waits."""
        with self._guard:
            if not self._wanted:
                return None
            if self._make:
                make_dirs(path.parent)
                return _register(private_file(path, os.O_RDWR))
            self._make = True
            return _register(os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW))


def _take(path: Path, how: int, wanted: _Wanted) -> JobLock | None:
    while True:
        fd = wanted.open(path)
        if fd is None:
            return None
        try:
            fcntl.flock(fd, how)
        except BlockingIOError:
            _close(fd)
            return None
        except OSError:
            _close(fd)
            raise
        try:
            lock = JobLock(path, fd)
            # While we waited the file may have been replaced; the lock on a file that has no name excludes nobody.
            if lock.intact():
                return lock
        except OSError:
            _close(fd)
            raise
        lock.release()


def _register(fd: int) -> int:
    with _guard:
        if not _registered:
            os.register_at_fork(before=_guard.acquire, after_in_parent=_guard.release, after_in_child=_close_in_child)
            _registered.append(True)
        _open.add(fd)
    return fd


def _close(fd: int) -> None:
    with _guard:
        _open.discard(fd)
        os.close(fd)


def _close_in_child() -> None:
    # Closing does not unlock what the parent still holds.
    for fd in _open:
        os.close(fd)
    _open.clear()
    _guard.release()
