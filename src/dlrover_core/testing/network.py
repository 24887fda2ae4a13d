"""The in-memory transport: frames with a delay, and links that can be cut.

A cut is told to both ends, as a reset is, unless it is ``silent``: then frames vanish and nobody is told, as behind a
broken switch. A reset, and a death, is the kernel's word and sets `ConnectionLost.ended`; a goodbye does not.
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextvars import Context, copy_context

from dlrover_core.errors import ConnectionLost
from dlrover_core.runtime.transport import FRAME_BYTES_MAX, Accept, Obey, Status

DELAY_S = 0.0005


class MemoryConnection:
    """One end of a connection."""

    def __init__(self, peer: str, delay_s: float) -> None:
        self.peer = peer
        self._delay_s = delay_s
        self._inbox: deque[bytes] = deque()
        self._wake = asyncio.Event()
        self._other: MemoryConnection | None = None
        self.closed = False
        self.ended = False
        self.deaf = False
        self.served_by: MemoryListener | None = None

    def pair(self, other: MemoryConnection) -> None:
        """Connect two ends."""
        self._other, other._other = other, self

    async def send(self, frame: bytes) -> None:
        """Deliver after the delay, in order."""
        other = self._other
        if self.closed or other is None or other.closed or len(frame) > FRAME_BYTES_MAX:
            raise ConnectionLost(f"connection to {self.peer} is closed", ended=self.ended)
        asyncio.get_running_loop().call_later(self._delay_s, other._arrive, frame)

    def _arrive(self, frame: bytes) -> None:
        if not self.closed and not self.deaf:
            self._inbox.append(frame)
            self._wake.set()

    async def receive(self) -> bytes:
        """The next frame."""
        while not self._inbox:
            if self.closed:
                raise ConnectionLost(f"connection to {self.peer} is closed", ended=self.ended)
            self._wake.clear()
            await self._wake.wait()
        return self._inbox.popleft()

    async def close(self) -> None:
        """Close this end, and the other once it has what was sent; a deaf one's peer is not told."""
        if not self.closed and not self.deaf and self._other is not None:
            asyncio.get_running_loop().call_later(self._delay_s, self._other._end)
        self._end()

    def _end(self) -> None:
        self.closed = True
        self._wake.set()

    def deafen(self) -> None:
        """From now on nothing arrives at either end, and neither is told."""
        for end in (self, self._other):
            if end is not None:
                end.deaf = True

    def drop(self) -> None:
        """Close both ends at once, as the death of this one's process does; the peer of a deaf one is not told."""
        for end in (self, self._other):
            if end is not None and not end.closed and not (end is not self and end.deaf):
                end.closed = end.ended = True
                end._inbox.clear()
                end._wake.set()


class Network:
    """Addresses, who listens on them, and which hosts are cut off."""

    def __init__(self, delay_s: float = DELAY_S) -> None:
        self._delay_s = delay_s
        self._serving: dict[str, MemoryListener] = {}
        self._links: list[tuple[str, str, MemoryConnection]] = []
        self._cut: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    def listener(self, address: str) -> MemoryListener:
        """A master's end at an address; several may exist, the one that serves last is reached."""
        return MemoryListener(self, address)

    def dialer(self, host: str) -> MemoryDialer:
        """An agent's end on a host."""
        return MemoryDialer(self, host)

    def cut(self, *hosts: str, silent: bool = False) -> None:
        """Lose every connection of these hosts and refuse new ones; ``silent``: frames vanish, and nobody is told."""
        self._cut.update(hosts)
        for host, _, end in self._links:
            if host in hosts and silent:
                end.deafen()
            elif host in hosts:
                end.drop()

    def die(self, host: str) -> None:
        """A host's process is killed: its kernel ends its connections, as far as anybody can hear it."""
        for where, _, end in self._links:
            if where == host and end._other is not None:
                end._other.drop()

    def heal(self, *hosts: str) -> None:
        """Let these hosts connect again; without any, all."""
        self._cut.difference_update(hosts or set(self._cut))

    def serve(self, address: str, listener: MemoryListener) -> None:
        """Be reached at an address."""
        self._serving[address] = listener

    def withdraw(self, address: str, listener: MemoryListener) -> None:
        """Stop being reached there; connections end."""
        if self._serving.get(address) is listener:
            del self._serving[address]
        for _, where, end in self._links:
            if where == address and end.served_by is listener:
                end.drop()

    def connect(self, host: str, address: str) -> MemoryConnection:
        """A new connection from a host."""
        listener = self._serving.get(address)
        if listener is None or host in self._cut:
            raise ConnectionLost(f"nobody answers at {address}")
        here, there = MemoryConnection(address, self._delay_s), MemoryConnection(host, self._delay_s)
        here.pair(there)
        there.served_by = listener
        self._links = [link for link in self._links if not link[2].closed]
        self._links.append((host, address, there))
        # In the listener's own context: what a master does belongs to the master, whoever connects.
        task = listener.context.copy().run(asyncio.ensure_future, listener.accept(there))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return here


class MemoryListener:
    """A master's end."""

    def __init__(self, network: Network, address: str) -> None:
        self._network, self.address = network, address
        self._accept: Accept | None = None
        self.context: Context = copy_context()
        self.status: Status | None = None
        self.obey: Obey | None = None

    async def serve(self, accept: Accept, status: Status, obey: Obey | None = None) -> None:
        """Begin to take connections."""
        self._accept, self.status, self.obey, self.context = accept, status, obey, copy_context()
        self._network.serve(self.address, self)

    async def accept(self, connection: MemoryConnection) -> None:
        """Hand a connection to the master."""
        assert self._accept is not None
        await self._accept(connection)

    async def close(self) -> None:
        """Stop, and drop what is connected."""
        self.drop()

    def drop(self) -> None:
        """The same without a word, as a death does."""
        self._network.withdraw(self.address, self)


class MemoryDialer:
    """An agent's end."""

    def __init__(self, network: Network, host: str) -> None:
        self._network, self._host = network, host

    async def connect(self, address: str) -> MemoryConnection:
        """Connect, or raise `ConnectionLost`."""
        return self._network.connect(self._host, address)

    async def close(self) -> None:
        """Nothing is held."""
