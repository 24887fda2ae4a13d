"""The in-memory transport: frames with a delay, and links that can be cut, or be bad in one way or another.

A cut is told to both ends, as a reset is, unless it is ``silent``: then frames vanish and nobody is told, as behind a
broken switch. A reset, and a death, is the kernel's word and sets `ConnectionLost.ended`; a goodbye does not.

The port promises frames in order or a lost connection, so a `Link` never makes a hole in a stream that goes on. Where one
frame vanished nothing more arrives in that direction of that connection, and silence is all that tells; a frame that is lost
loudly takes its connection with it. Doubled and overtaken are only beats and numbered commands: those are what a peer may say
again and what the engine's numbers sort out, while no transport greets twice.
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextvars import Context, copy_context
from dataclasses import dataclass
from typing import cast

from dlrover_core.errors import ConnectionLost
from dlrover_core.runtime import messages
from dlrover_core.runtime.levels import Beat
from dlrover_core.runtime.messages import Hello, Numbered
from dlrover_core.runtime.transport import FRAME_BYTES_MAX, Accept, HandOut, Obey, Status

DELAY_S = 0.0005


@dataclass(slots=True)
class Link:
    """The way between a host and all masters. What it does to frames from now on, whichever connection they are of.

    ``late_s`` is added to the delay, each way. ``mute``, ``deaf``: how many reasons there are for which what the host sends, or
    is sent, vanishes. Of the next commands to masters so many are to ``lose`` (with the connection), ``double`` and ``reorder``.
    """

    late_s: float = 0.0
    mute: int = 0
    deaf: int = 0
    lose: int = 0
    double: int = 0
    reorder: int = 0


class MemoryConnection:
    """One end of a connection. ``host``: the agent's, whose frames go to a master."""

    def __init__(self, peer: str, delay_s: float, link: Link | None = None, *, host: bool = False) -> None:
        self.peer = peer
        self._delay_s = delay_s
        self._link, self._host = link if link is not None else Link(), host
        self._inbox: deque[bytes] = deque()
        self._wake = asyncio.Event()
        self._other: MemoryConnection | None = None
        self._due = 0.0
        self._overtaken: bytes | None = None
        self.closed = False
        self.ended = False
        self.deaf = False
        self.served_by: MemoryListener | None = None

    def pair(self, other: MemoryConnection) -> None:
        """Connect two ends."""
        self._other, other._other = other, self

    async def send(self, frame: bytes) -> None:
        """Deliver after the delay, in order."""
        other, link = self._other, self._link
        if self.closed or other is None or other.closed or len(frame) > FRAME_BYTES_MAX:
            raise ConnectionLost(f"connection to {self.peer} is closed", ended=self.ended)
        if self._vanishes:
            other.deaf = True
        elif self._host and link.lose and messages.type_of(frame) is Numbered:
            link.lose -= 1
            self.drop()
        elif self._host and (self._overtaken is not None or link.double or link.reorder):
            self._disturb(frame)
        else:
            self._carry(other._arrive, frame)

    @property
    def _vanishes(self) -> bool:
        return bool(self._link.mute if self._host else self._link.deaf)

    def _disturb(self, frame: bytes) -> None:
        assert self._other is not None
        arrive, link, before = self._other._arrive, self._link, self._overtaken
        said = messages.type_of(frame)
        numbered, again = said is Numbered, said in (Beat, Numbered)
        if link.reorder and numbered and before is None:
            link.reorder -= 1
            self._overtaken = frame
            return
        self._overtaken = None
        # Only what may be said at any moment overtakes; everything else waits its turn.
        for one in (frame, before) if again else (before, frame):
            if one is not None:
                self._carry(arrive, one)
        if link.double and numbered:
            link.double -= 1
            self._carry(arrive, frame)

    def _carry(self, *call: object) -> None:
        # Nobody's: what is on its way arrives whether or not its sender has been stopped since, and by the true clock.
        Context().run(self._on_its_way, *call)

    def _on_its_way(self, *call: object) -> None:
        loop = asyncio.get_running_loop()
        self._due = max(self._due, loop.time() + self._delay_s + self._link.late_s)
        loop.call_at(self._due, *call)  # type: ignore[arg-type]

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
        """Close this end, and the other once it has what was sent; a deaf one is not told."""
        other = self._other
        if not self.closed and other is not None and not other.deaf:
            if self._vanishes:
                other.deaf = True
            else:
                if self._overtaken is not None:
                    self._carry(other._arrive, self._overtaken)
                self._carry(other._end)
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
        """Close both ends at once, as the death of this one's process does; a peer that is deaf is not told."""
        for end in (self, self._other):
            if end is None or end.closed:
                continue
            if end is not self and (end.deaf or self._vanishes):
                end.deaf = True
                continue
            end.closed = end.ended = True
            end._inbox.clear()
            end._wake.set()


class Network:
    """Addresses, who listens on them, which hosts are cut off, and how bad the `link` of each is."""

    def __init__(self, delay_s: float = DELAY_S) -> None:
        self._delay_s = delay_s
        self._serving: dict[str, MemoryListener] = {}
        self._links: list[tuple[str, str, MemoryConnection]] = []
        self._cut: set[str] = set()
        self._bad: dict[str, Link] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def listener(self, address: str) -> MemoryListener:
        """A master's end at an address; several may exist, the one that serves last is reached."""
        return MemoryListener(self, address)

    def dialer(self, host: str, *, version: int = messages.VERSION) -> MemoryDialer:
        """An agent's end on a host; an agent that speaks protocol ``version``."""
        return MemoryDialer(self, host, version)

    def link(self, host: str) -> Link:
        """The link of a host, to be made bad or good again."""
        return self._bad.setdefault(host, Link())

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
        link = self.link(host)
        here = MemoryConnection(address, self._delay_s, link, host=True)
        there = MemoryConnection(host, self._delay_s, link)
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
        self.hand_out: HandOut | None = None

    async def serve(
        self, accept: Accept, status: Status, obey: Obey | None = None, hand_out: HandOut | None = None
    ) -> None:
        """Begin to take connections."""
        self._accept, self.status, self.obey, self.context = accept, status, obey, copy_context()
        self.hand_out = hand_out
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

    def __init__(self, network: Network, host: str, version: int = messages.VERSION) -> None:
        self._network, self._host, self._version = network, host, version

    async def connect(self, address: str) -> MemoryConnection | OldConnection:
        """Connect, or raise `ConnectionLost`; where frames vanish, nobody ever answers."""
        link = self._network.link(self._host)
        if link.mute or link.deaf:
            await asyncio.get_running_loop().create_future()
        if link.late_s:
            await asyncio.sleep(2 * link.late_s)
        connection = self._network.connect(self._host, address)
        return connection if self._version == messages.VERSION else OldConnection(connection, self._version)

    async def close(self) -> None:
        """Nothing is held."""


class OldConnection:
    """The end of an agent of an older version: it greets as one, and speaks what it is greeted in."""

    def __init__(self, connection: MemoryConnection, version: int) -> None:
        self._connection, self._version = connection, version
        self.peer = connection.peer

    async def send(self, frame: bytes) -> None:
        """Send it as the older version would have."""
        if messages.type_of(frame) is Hello:
            hello = cast(Hello, messages.decode(frame))
            frame = messages.encode(hello._replace(version=self._version))
        await self._connection.send(frame)

    async def receive(self) -> bytes:
        """The next frame."""
        return await self._connection.receive()

    async def close(self) -> None:
        """End it."""
        await self._connection.close()
