"""The agent's Unix socket, on which workers ring for their steps, and the shared memory that holds the exact ones."""

from __future__ import annotations

import asyncio
import mmap
import os
import socket
import struct
from collections.abc import Callable

from dlrover_core.errors import LaunchFailed, MalformedMessage

from . import wire

PACKET_BYTES_MAX = 4096
CONNECTIONS_MAX = 4096
PATH_BYTES_MAX = 107  # sun_path, less its NUL
_SLOT = struct.Struct("=q")

Ring = Callable[[int, int, int, bool], None]
"""Called with generation, rank, step, and whether the step is the script's own number."""


class Doorbell:
    """Listens at ``path`` (mode 0600) and calls ``ring`` for each packet that makes sense; others end their connection."""

    def __init__(self, path: str, ring: Ring) -> None:
        self.path, self._ring = path, ring
        self._listener: socket.socket | None = None
        self._open: set[socket.socket] = set()

    def open(self) -> None:
        """Listen. Raises `LaunchFailed`."""
        if len(os.fsencode(self.path)) > PATH_BYTES_MAX:
            raise LaunchFailed(
                f"{self.path!r} is too long for a Unix socket ({PATH_BYTES_MAX} bytes): choose a shorter run folder"
            )
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.setblocking(False)
        self._listener.bind(self.path)
        os.chmod(self.path, 0o600)
        self._listener.listen(1024)
        asyncio.get_running_loop().add_reader(self._listener, self._accept)

    def catch_up(self) -> None:
        """Hear now all that was rung until now: a worker that died may have rung just before."""
        while self._accept():
            pass
        for caller in list(self._open):
            while caller in self._open and self._hear(caller):
                pass

    def _accept(self) -> bool:
        """Take one connection, if there is one."""
        assert self._listener is not None, "a closed listener has no reader"
        try:
            caller, _ = self._listener.accept()
        except (BlockingIOError, ConnectionError):
            return False
        if len(self._open) >= CONNECTIONS_MAX:
            caller.close()
            return True
        caller.setblocking(False)
        self._open.add(caller)
        asyncio.get_running_loop().add_reader(caller, self._hear, caller)
        return True

    def _hear(self, caller: socket.socket) -> bool:
        """Take one packet; False if there is none."""
        try:
            payload = caller.recv(PACKET_BYTES_MAX)
        except BlockingIOError:
            return False
        except ConnectionError:
            payload = b""
        if not payload or not self._understood(payload):
            self._hang_up(caller)
        return True

    def _understood(self, payload: bytes) -> bool:
        try:
            body = wire.unpack(payload)
        except MalformedMessage:
            return False
        match body:
            case {"generation": int(generation), "rank": int(rank), "step": int(step), "told": bool(told)}:
                self._ring(generation, rank, step, told)
                return True
        return False

    def _hang_up(self, caller: socket.socket) -> None:
        asyncio.get_running_loop().remove_reader(caller)
        self._open.discard(caller)
        caller.close()

    def close(self) -> None:
        """End all connections and remove the socket."""
        for one in list(self._open):
            self._hang_up(one)
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener)
            self._listener.close()
            self._listener = None
            os.unlink(self.path)


class StepSlot:
    """Eight bytes that one worker writes its step into; anonymous memory, so nothing outlives its users."""

    NONE = -1

    def __init__(self) -> None:
        self.fd = os.memfd_create("dlrover-step", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, mmap.PAGESIZE)
        self._memory = mmap.mmap(self.fd, _SLOT.size)
        _SLOT.pack_into(self._memory, 0, self.NONE)

    def read(self) -> int:
        """The last step, `NONE` before the first."""
        return int(_SLOT.unpack_from(self._memory, 0)[0])

    def close(self) -> None:
        """Give the memory back once the worker has, too."""
        if self.fd >= 0:
            self._memory.close()
            os.close(self.fd)
            self.fd = -1
