"""A Unix socket of the agent's, for packets, that listens again where its name was removed."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
from collections.abc import Callable

import structlog

from dlrover_core.errors import LaunchFailed

PATH_BYTES_MAX = 107  # sun_path, less its NUL
BACKLOG = 1024
EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS})
"""Errors with which a connection goes on waiting: the loop would be told of it again at once."""

RETRY_S = 0.2

log = structlog.get_logger("dlrover.agent")


class PacketListener:
    """Listens at ``path`` (mode 0600); ``ready`` is called on the loop when there is a connection to `accept`."""

    def __init__(self, path: str, ready: Callable[[], object]) -> None:
        self.path, self._ready = path, ready
        self._socket: socket.socket | None = None
        self._inode = (0, 0)
        self._retry: asyncio.TimerHandle | None = None
        self._complained = False

    @property
    def listens(self) -> bool:
        """Is it open?"""
        return self._socket is not None

    def open(self) -> None:
        """Listen. Raises `LaunchFailed`."""
        if len(os.fsencode(self.path)) > PATH_BYTES_MAX:
            raise LaunchFailed(
                f"{self.path!r} is too long for a Unix socket ({PATH_BYTES_MAX} bytes): choose a shorter run folder"
            )
        try:
            self._bind()
        except OSError as error:
            raise LaunchFailed(f"cannot listen at {self.path}: {error.strerror or error}") from error

    def restore(self) -> bool:
        """Listen at the path again if the socket was removed or replaced there; was it? Raises `OSError`.

        Connections that there are stay, and so do those that wait to be accepted.
        """
        if self._socket is None or self._there() == self._inode:
            return False
        while self._ready():
            pass
        before = self._socket
        self._resume()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)
        self._bind()
        asyncio.get_running_loop().remove_reader(before)
        before.close()
        return True

    def accept(self) -> socket.socket | None:
        """One connection, without blocking; None: there is none, or none can be had now (the listener then pauses)."""
        assert self._socket is not None, "a closed listener has no connections"
        try:
            caller, _ = self._socket.accept()
        except (BlockingIOError, ConnectionError):
            return None
        except OSError as error:
            if error.errno not in EXHAUSTED:
                raise
            self._pause(self._socket, error)
            return None
        return caller

    def _pause(self, listening: socket.socket, error: OSError) -> None:
        """Look again in a while: a connection waits for which there is no descriptor or memory."""
        if not self._complained:
            self._complained = True
            log.warning("connections wait", path=self.path, reason=error.strerror, remedy="raise `ulimit -n`")
        if self._retry is None:
            loop = asyncio.get_running_loop()
            loop.remove_reader(listening)
            self._retry = loop.call_later(RETRY_S, self._resume)

    def _resume(self) -> None:
        timer, self._retry = self._retry, None
        if timer is not None and self._socket is not None:
            timer.cancel()
            asyncio.get_running_loop().add_reader(self._socket, self._ready)

    def close(self) -> None:
        """Listen no more. Idempotent."""
        if self._socket is None:
            return
        self._resume()
        asyncio.get_running_loop().remove_reader(self._socket)
        self._socket.close()
        self._socket = None
        if self._there() == self._inode:
            with contextlib.suppress(OSError):  # its folder may be read-only by now
                os.unlink(self.path)

    def _bind(self) -> None:
        made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            made.setblocking(False)
            made.bind(self.path)
            os.chmod(self.path, 0o600)
            made.listen(BACKLOG)
        except BaseException:
            made.close()
            raise
        self._socket, self._inode = made, self._there()
        asyncio.get_running_loop().add_reader(made, self._ready)

    def _there(self) -> tuple[int, int]:
        try:
            found = os.lstat(self.path)
        except OSError:
            return (0, 0)
        return (found.st_dev, found.st_ino)
