"""Connections of local processes at a Unix socket: one msgpack map per packet, until one makes no sense or the process ends."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Collection
from typing import Any, Generic, TypeVar

from dlrover_core.errors import MalformedMessage
from dlrover_core.runtime.launcher import WorkersLaunch

from . import wire
from .listener import PacketListener

Caller = TypeVar("Caller")


class Nonsense(Exception):
    """A packet that no process of ours sends."""


class PacketServer(Generic[Caller]):
    """Listens at ``path``, mode 0600, and tells its subclass what comes. A connection has a caller once it has said who it is.

    At most ``connections_max`` connections are kept, and packets of more than ``packet_bytes_max`` bytes end theirs.
    """

    def __init__(self, path: str, *, connections_max: int, packet_bytes_max: int) -> None:
        self.path = path
        self.launch: WorkersLaunch | None = None
        """The workers that run, or ran last."""
        self._connections_max, self._bytes_max = connections_max, packet_bytes_max
        self._listener = PacketListener(path, self._accept)
        self._open: dict[socket.socket, Caller | None] = {}
        # Connections that are not listened to now.
        self._deaf: Collection[socket.socket] = ()

    def open(self) -> None:
        """Listen. Raises `LaunchFailed`."""
        self._listener.open()

    def restore(self) -> bool:
        """Listen again where the socket was removed; was it? Raises `OSError`."""
        return self._listener.restore()

    def begin(self, launch: WorkersLaunch) -> None:
        """These workers run from now on; others are not served."""
        self.launch = launch

    def catch_up(self) -> None:
        """Hear now all that was said until now: a process that ended may have spoken just before."""
        while self._listener.listens and self._accept():
            pass
        for line in list(self._open):
            while line in self._open and line not in self._deaf and self._hear(line):
                pass

    # ---- for the subclass

    def _understood(self, line: socket.socket, body: dict[str, Any]) -> None:
        """Do what a packet says. Raises `Nonsense`, `MalformedMessage`."""
        raise NotImplementedError

    def _gone(self, line: socket.socket, caller: Caller | None, why: str, /) -> None:
        """A connection was closed; ``why`` in words."""
        raise NotImplementedError

    def _hang_up(self, line: socket.socket, why: str = "it was hung up on") -> None:
        """Close a connection, if it is open."""
        if line in self._open:
            asyncio.get_running_loop().remove_reader(line)
            caller = self._open.pop(line)
            line.close()
            self._gone(line, caller, why)

    # ---- packets

    def _accept(self) -> bool:
        """Take one connection, if there is one."""
        line = self._listener.accept()
        if line is None:
            return False
        if len(self._open) >= self._connections_max:
            line.close()
            return True
        line.setblocking(False)
        self._open[line] = None
        asyncio.get_running_loop().add_reader(line, self._hear, line)
        return True

    def _hear(self, line: socket.socket) -> bool:
        """Take one packet; False if there is none. Descriptors with it are closed by the kernel: there is no room for them."""
        try:
            packet = line.recv(self._bytes_max + 1)
        except BlockingIOError:
            return False
        except ConnectionError:
            packet = b""
        if not packet or len(packet) > self._bytes_max:
            self._hang_up(line, "its process ended")
            return True
        try:
            self._understood(line, wire.unpack(packet))
        except (MalformedMessage, Nonsense):
            self._hang_up(line, "it sent nonsense")
        return True
