"""A TCP proxy that misbehaves when told to: partitions, resets and lost acknowledgements for any client and server.

Put one between a master and its etcd, or between an agent and its master, and break the network for that pair alone::

    async with Proxy("127.0.0.1:2379") as proxy:
        log = EtcdLog.open_url(f"etcd://{proxy.address}/test", codec)
        proxy.block()  # a partition
        ...
        proxy.heal()

What real networks do and this does not: a connection made while blocked is accepted, for that is the kernel's doing; nothing
ever comes of it before `Proxy.heal`. What was held arrives then, late, as what TCP sends again does.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from types import TracebackType

CHUNK_BYTES = 64 * 1024
BACKLOG = 128
LINGER_S = 0.1
ANSWER_S = 1.0
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: a close is a reset


class Proxy:
    """Forwards every connection to ``target`` (``host:port``), from a free port of ``host`` that it keeps.

    Use it with ``async with``, from one event loop. ``accepted``, ``cuts``, ``bytes_up`` and ``bytes_down`` count connections
    made, connections ended by us, and bytes delivered to and from the target.
    """

    def __init__(self, target: str, *, host: str = "127.0.0.1") -> None:
        self.target = _split(target)
        self.accepted = self.cuts = self.bytes_up = self.bytes_down = 0
        self._host = host
        self._family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._port = 0
        self._reserved: socket.socket | None = None
        self._listening: socket.socket | None = None
        self._connections: dict[asyncio.Task[None], _Connection] = {}
        self._up, self._down = asyncio.Event(), asyncio.Event()
        self._requests = self._at_least_bytes = 0
        self._linger_s = LINGER_S
        self._lost: asyncio.Future[None] | None = None

    @property
    def address(self) -> str:
        """``host:port`` where it listens, the same all its life."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"{host}:{self._port}"

    @property
    def connections(self) -> int:
        """How many are open now."""
        return len(self._connections)

    async def __aenter__(self) -> Proxy:  # noqa: PYI034  # Self needs 3.11
        """Listen."""
        # Bound and never listening: while connections are refused, it keeps the port from others.
        self._reserved = self._bound()
        self._port = self._reserved.getsockname()[1]
        self.heal()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Cut all connections and give the port back."""
        tasks = list(self._connections)
        self.refuse()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._reserved is not None:
            self._reserved.close()
        self._forgive()

    # ---- faults

    def heal(self) -> None:
        """End `refuse` and `block`, and no acknowledgement gets lost any more; what was held goes on its way."""
        self._forgive()
        self._up.set()
        self._down.set()
        if self._listening is None:
            self._listening = self._bound()
            self._listening.listen(BACKLOG)
            asyncio.get_running_loop().add_reader(self._listening, self._accept)

    def refuse(self) -> None:
        """Reset all connections, and refuse new ones until `heal`: the server is down."""
        if self._listening is not None:
            asyncio.get_running_loop().remove_reader(self._listening)
            self._listening.close()
            self._listening = None
        self.cut()

    def cut(self) -> None:
        """Reset all connections; new ones are welcome."""
        for task in list(self._connections):
            task.cancel()

    def block(self, *, up: bool = True, down: bool = True) -> None:
        """Hold what clients send (``up``) and what the target answers (``down``), silently, until `heal`: a partition.

        It says which ways are blocked now: ``block(up=False)`` opens the way up where it was shut.
        """
        _set(self._up, not up)
        _set(self._down, not down)

    def cut_after_request(
        self, n: int = 1, *, at_least_bytes: int = 1, linger_s: float = LINGER_S
    ) -> asyncio.Future[None]:
        """Lose an acknowledgement: the ``n``-th burst from now on reaches the target, its answer reaches nobody, and its
        connection is reset. The future is done when that has happened.

        A burst is what one read yields, and a protocol's own pings are bursts too: ``at_least_bytes`` passes over small ones.
        The connection is reset once the target has answered and been quiet for ``linger_s``, so that the request was carried
        out; after a second at the latest.
        """
        if n < 1:
            raise ValueError(f"the {n}-th request is none: say 1 for the next one")
        self._forgive()
        self._requests, self._at_least_bytes, self._linger_s = n, at_least_bytes, linger_s
        self._lost = asyncio.get_running_loop().create_future()
        return self._lost

    def _forgive(self) -> None:
        self._requests = 0
        if self._lost is not None:
            self._lost.cancel()

    # ---- connections

    def _bound(self) -> socket.socket:
        one = socket.socket(self._family, socket.SOCK_STREAM)
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        one.setblocking(False)
        one.bind((self._host, self._port))
        return one

    def _accept(self) -> None:
        assert self._listening is not None
        with contextlib.suppress(BlockingIOError, ConnectionAbortedError):
            client, _ = self._listening.accept()
            client.setblocking(False)
            self.accepted += 1
            connection = _Connection(self, client)
            task = asyncio.get_running_loop().create_task(connection.run())
            self._connections[task] = connection
            task.add_done_callback(lambda task: self._connections.pop(task).close())

    def _is_last_request(self, burst_bytes: int) -> bool:
        """Count a burst; is it the one whose answer gets lost?"""
        if self._requests == 0 or burst_bytes < self._at_least_bytes:
            return False
        self._requests -= 1
        return self._requests == 0


class _Connection:
    """One client, and the connection to the target on its behalf."""

    def __init__(self, proxy: Proxy, client: socket.socket) -> None:
        self._proxy, self._client = proxy, client
        self._server = socket.socket(socket.AF_INET6 if ":" in proxy.target[0] else socket.AF_INET, socket.SOCK_STREAM)
        self._server.setblocking(False)
        self._tasks: list[asyncio.Task[None]] = []
        self._losing: asyncio.Task[None] | None = None
        self._answered = asyncio.Event()
        self._whole = False

    async def run(self) -> None:
        """Carry bytes both ways until both sides have ended; a reset of one, or being cancelled, resets both."""
        try:
            for one in (self._client, self._server):
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await asyncio.get_running_loop().sock_connect(self._server, self._proxy.target)
            self._tasks = [asyncio.ensure_future(self._pump_up()), asyncio.ensure_future(self._pump_down())]
            await asyncio.gather(*self._tasks)
            self._whole = self._losing is None
        except asyncio.CancelledError:
            self._proxy.cuts += 1
        except OSError:
            pass  # one side is gone, and `close` tells the other
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def close(self) -> None:
        """Close both ends. For a task that was cancelled before its first step, this is all that happens."""
        for one in (self._client, self._server):
            if not self._whole:
                one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            one.close()
        lost = self._proxy._lost
        if self._losing is not None and lost is not None and not lost.done():
            lost.set_result(None)

    async def _pump_up(self) -> None:
        loop, proxy = asyncio.get_running_loop(), self._proxy
        while data := await loop.sock_recv(self._client, CHUNK_BYTES):
            await proxy._up.wait()
            if proxy._is_last_request(len(data)):
                self._losing = asyncio.ensure_future(self._lose(self._tasks[0]))
                self._tasks.append(self._losing)
            await loop.sock_sendall(self._server, data)
            proxy.bytes_up += len(data)
        await proxy._up.wait()
        self._server.shutdown(socket.SHUT_WR)

    async def _lose(self, pump: asyncio.Task[None]) -> None:
        """Cut once the target has answered and is quiet; what the client sends until then still arrives."""
        loop = asyncio.get_running_loop()
        end, quiet_s = loop.time() + ANSWER_S, ANSWER_S
        with contextlib.suppress(asyncio.TimeoutError):
            while loop.time() < end:
                await asyncio.wait_for(self._answered.wait(), quiet_s)
                self._answered.clear()
                quiet_s = self._proxy._linger_s
        pump.cancel()

    async def _pump_down(self) -> None:
        loop, proxy = asyncio.get_running_loop(), self._proxy
        while data := await loop.sock_recv(self._server, CHUNK_BYTES):
            if self._losing is None:
                await proxy._down.wait()
            if self._losing is not None:
                self._answered.set()
                continue
            await loop.sock_sendall(self._client, data)
            proxy.bytes_down += len(data)
        await proxy._down.wait()
        self._client.shutdown(socket.SHUT_WR)


def _set(event: asyncio.Event, value: bool) -> None:
    if value:
        event.set()
    else:
        event.clear()


def _split(target: str) -> tuple[str, int]:
    """``host:port``, an IPv6 host in brackets."""
    host, _, port = target.rpartition(":")
    if not host or not port.isdecimal():
        raise ValueError(f"{target!r} is not HOST:PORT")
    return host.strip("[]"), int(port)
