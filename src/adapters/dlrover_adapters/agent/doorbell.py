"""The agent's Unix socket, on which workers ring for their steps, and on which they can be asked what they are at."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import NamedTuple

import msgpack

from dlrover_core.errors import MalformedMessage

from . import wire
from .listener import PacketListener

PACKET_BYTES_MAX = 4096
STEP_MAX = 2**53
CONNECTIONS_MAX = 4096

Ring = Callable[[int, int, int, bool, int], None]
"""Called with generation, rank, step, whether the step is the script's own number, and microseconds that imports took, or 0."""


class Asked(NamedTuple):
    """What a worker's witness was asked for: done when it ``answered`` at all, and when its recorder is ``recorded``."""

    answered: asyncio.Future[None]
    recorded: asyncio.Future[None]


class Doorbell:
    """Listens at ``path`` (mode 0600) and calls ``ring`` for each packet that makes sense; others end their connection."""

    def __init__(self, path: str, ring: Ring) -> None:
        self.path, self._ring = path, ring
        self._listener = PacketListener(path, self._accept)
        self._open: set[socket.socket] = set()
        self._listening: dict[tuple[int, int], socket.socket] = {}
        self._asked: dict[socket.socket, Asked] = {}

    def open(self) -> None:
        """Listen. Raises `LaunchFailed`."""
        self._listener.open()

    def restore(self) -> bool:
        """Listen again where the socket was removed; was it? Raises `OSError`."""
        return self._listener.restore()

    def catch_up(self) -> None:
        """Hear now all that was rung until now: a worker that died may have rung just before."""
        while self._accept():
            pass
        for caller in list(self._open):
            while caller in self._open and self._hear(caller):
                pass

    def _accept(self) -> bool:
        """Take one connection, if there is one."""
        caller = self._listener.accept()
        if caller is None:
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
        if not payload or not self._understood(caller, payload):
            self._hang_up(caller)
        return True

    def _understood(self, caller: socket.socket, payload: bytes) -> bool:
        try:
            body = wire.unpack(payload)
        except MalformedMessage:
            return False
        match body:
            case {"generation": int(generation), "rank": int(rank), "step": int(step), "told": bool(told)}:
                imports_us = body.get("imports_us", 0)
                imports_us = min(max(0, imports_us), STEP_MAX) if isinstance(imports_us, int) else 0
                self._ring(generation, rank, min(step, STEP_MAX), told, imports_us)
                return True
            case {"listens": int(generation), "rank": int(rank)}:
                self._listening[generation, rank] = caller
                return True
            case {"answers": int()} | {"recorded": int()}:
                self._heard_from(caller, recorded="recorded" in body)
                return True
        return False

    def ask(self, generation: int, rank: int, probe: int, path: str) -> Asked | None:
        """Ask a worker's witness for its stacks, or with a ``path`` for its flight recorder, there; None: it cannot be asked.

        Either way it answers, the stacks being in their file by then.
        """
        caller = self._listening.get((generation, rank))
        if caller is None:
            return None
        try:
            caller.send(msgpack.packb({"probe": probe, "path": path}))
        except OSError:
            return None
        loop = asyncio.get_running_loop()
        self._asked[caller] = Asked(loop.create_future(), loop.create_future())
        return self._asked[caller]

    def _heard_from(self, caller: socket.socket, *, recorded: bool) -> None:
        asked = self._asked.get(caller)
        if asked is not None:
            done = asked.recorded if recorded else asked.answered
            if not done.done():
                done.set_result(None)

    def _hang_up(self, caller: socket.socket) -> None:
        asyncio.get_running_loop().remove_reader(caller)
        self._open.discard(caller)
        self._asked.pop(caller, None)
        for who in [who for who, one in self._listening.items() if one is caller]:
            del self._listening[who]
        caller.close()

    def close(self) -> None:
        """End all connections and remove the socket."""
        for one in list(self._open):
            self._hang_up(one)
        self._listener.close()
