"""Simulated agents: the real protocol over real sockets, without the agent's own logic; many in one process.

What one costs is part of what is measured, so it is kept as light as is honest. Each has a TCP connection of its own, shows
the token in an HTTP upgrade, and speaks WebSocket frames that are masked (with a key of zeros: the server unmasks all the
same). Every message is encoded by msgpack as it is sent, every frame that comes is parsed, unpacked and looked at. What it
spares itself is asyncio, aiohttp and the checks of field types on what a master says.
"""

from __future__ import annotations

import base64
import os
import resource
import select
import socket
import struct
from collections.abc import Callable, Sequence
from typing import Any

import msgpack

from dlrover_core.job import nodes, world
from dlrover_core.runtime import messages
from dlrover_core.runtime.messages import Hello, numbered

WELCOME, GOODBYE, NUMBERED, ANSWER, AGAIN, LEVEL, BEAT, BEAT_SEEN = 2, 3, 4, 5, 6, 7, 8, 9
REFUSED_MARK = b"HTTP/1.1 101 "
HEAD_MAX = 4096
RECEIVE_BYTES = 65536
WAIT_S = 60.0

pack = msgpack.Packer().pack


class Broken(Exception):
    """A master did not answer as it should: there is nothing to measure."""


def framed(payload: bytes) -> bytes:
    """A binary frame, as a client sends it."""
    size = len(payload)
    if size < 126:
        return b"\x82" + bytes((0x80 | size,)) + b"\0\0\0\0" + payload
    return b"\x82\xfe" + struct.pack(">H", size) + b"\0\0\0\0" + payload


def node(number: int) -> str:
    """The name of an agent's node."""
    return f"worker-{number}-0"


class SimAgent:
    """One agent: a connection, and what it has heard."""

    __slots__ = ("_rest", "generation", "name", "next_number", "number", "sock", "started", "token")

    def __init__(self, number: int) -> None:
        self.number, self.name = number, node(number)
        self._rest = b""
        self.generation = self.token = self.started = 0
        self.next_number = 1
        self.sock: socket.socket

    def dial(self, address: str) -> None:
        """Begin to connect."""
        host, _, port = address.rpartition(":")
        self.sock = socket.socket()
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock.connect((host, int(port)))

    def ask(self, address: str, token: str) -> None:
        """Ask for the WebSocket."""
        key = base64.b64encode(os.urandom(16)).decode()
        lines = ["GET /v1/agent HTTP/1.1", f"Host: {address}", "Upgrade: websocket", "Connection: Upgrade"]
        lines += [f"Sec-WebSocket-Key: {key}", "Sec-WebSocket-Version: 13", f"Authorization: Bearer {token}", "", ""]
        self.sock.sendall("\r\n".join(lines).encode())

    def upgraded(self) -> None:
        """Read the answer to `ask`."""
        head = b""
        while b"\r\n\r\n" not in head:
            more = self.sock.recv(HEAD_MAX)
            if not more:
                raise Broken(f"the master hung up on {self.name}")
            head += more
        head, _, self._rest = head.partition(b"\r\n\r\n")
        if not head.startswith(REFUSED_MARK):
            raise Broken(f"{self.name} was answered {head[:80]!r}")
        self.sock.setblocking(False)

    def say(self, *parts: tuple[Any, ...]) -> None:
        """Send messages ``(kind, fields)`` in one write."""
        data = b"".join([framed(pack(part)) for part in parts])
        if self.sock.send(data) != len(data):
            raise Broken(f"the master does not read what {self.name} says")

    def command(self, command: tuple[Any, ...]) -> tuple[Any, ...]:
        """The next numbered command, as a part for `say`."""
        part = (NUMBERED, numbered(self.next_number, command))
        self.next_number += 1
        return part

    def hello(self) -> tuple[Any, ...]:
        """The first message."""
        return (1, Hello(messages.VERSION, "run-1", self.name, 7, 0, 0))

    def frames(self) -> list[Any]:
        """Every whole message that has come, ``[kind, fields]``."""
        try:
            data = self.sock.recv(RECEIVE_BYTES)
        except BlockingIOError:
            return []
        if not data:
            raise Broken(f"the master closed the connection of {self.name}")
        if self._rest:
            data = self._rest + data
        found, at, end = [], 0, len(data)
        while end - at >= 2:
            opcode, size, head = data[at] & 15, data[at + 1], 2
            if size == 126:
                if end - at < 4:
                    break
                size, head = (data[at + 2] << 8) | data[at + 3], 4
            if end - at < head + size:
                break
            body = data[at + head : at + head + size]
            at += head + size
            if opcode == 2:
                found.append(msgpack.unpackb(body, use_list=False))
            elif opcode == 9:
                self.sock.send(b"\x8a" + bytes((0x80 | size,)) + b"\0\0\0\0" + body)
            else:
                raise Broken(f"the master sent a frame of kind {opcode}")
        self._rest = data[at:]
        return found


def dialled(numbers: Sequence[int], address: str, token: str) -> list[SimAgent]:
    """Agents that are connected and have said nothing yet."""
    agents = [SimAgent(number) for number in numbers]
    for agent in agents:
        agent.dial(address)
        agent.ask(address, token)
    for agent in agents:
        agent.upgraded()
    return agents


class Swarm:
    """The loop over all agents of a process."""

    def __init__(self, agents: Sequence[SimAgent]) -> None:
        self._poll = select.epoll()
        self._by_fd = {agent.sock.fileno(): agent for agent in agents}
        for fd in self._by_fd:
            self._poll.register(fd, select.EPOLLIN)

    def run(self, heard: Callable[[SimAgent, Any], bool], until: Callable[[], bool] = lambda: False) -> None:
        """Hand every message to ``heard``, until it returns True for one or ``until`` is true."""
        over: bool | None = False
        while not over and not until():
            over = self.look(heard, WAIT_S)
            if over is None:
                raise Broken(f"no master said anything for {WAIT_S:g} s")

    def look(self, heard: Callable[[SimAgent, Any], bool], wait_s: float) -> bool | None:
        """The messages that are there, or the first to come in time; None if none is. True: ``heard`` was for one."""
        ready = self._poll.poll(wait_s)
        over = False
        for fd, _ in ready:
            agent = self._by_fd[fd]
            for message in agent.frames():
                over = heard(agent, message) or over
        return over if ready else None

    def close(self) -> None:
        """End every connection."""
        self._poll.close()
        for agent in self._by_fd.values():
            agent.sock.close()


class Joining:
    """How agents come into a world: Hello, joined, a store offered, the order heard, started; and how many are there."""

    def __init__(self, agents: Sequence[SimAgent]) -> None:
        self.agents = agents
        self.started = 0

    def greet(self) -> None:
        """Everybody's first word."""
        for agent in self.agents:
            agent.say(agent.hello())

    def heard(self, agent: SimAgent, message: Any) -> bool:
        """One message; True once everybody's start is acknowledged."""
        kind, fields = message
        if kind == WELCOME:
            agent.token = fields[2]
            here = f"10.0.{agent.number >> 8}.{agent.number & 255}"
            joined = nodes.ReportJoined(agent.name, f"host-{agent.number}", here, 1)
            agent.say(agent.command(joined), agent.command(world.OfferStore(agent.name, f"{here}:1")))
        elif kind == LEVEL and fields[1][1] and fields[1][1][0] > agent.generation:
            agent.generation = fields[1][1][0]
            agent.started = agent.next_number
            agent.say(agent.command(world.ReportStarted(agent.name, agent.generation)))
        elif kind == ANSWER:
            if fields[2]:
                raise Broken(f"command {fields[0]} of {agent.name} was refused: {fields[2]}")
            self.started += fields[0] == agent.started
        elif kind in (GOODBYE, AGAIN):
            raise Broken(f"{agent.name} was told {message}")
        return self.started == len(self.agents)


def room_for(agents: int) -> None:
    """Raise this process's limit of descriptors, as far as it may be. The master does so for itself."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, agents + 256)), hard))
