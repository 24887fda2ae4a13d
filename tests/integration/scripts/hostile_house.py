"""A house for tests of hostile peers: a real master, two witnesses inside, and strangers.

Every story runs a master in a process of its own, over real sockets, with two well-behaved agents that train in one world. The
stranger does its worst; then the agents' beats must have been answered in time all along, their world must be the same one,
the master must not have grown, and what it logged must be few and clear lines.
"""

from __future__ import annotations

import asyncio
import base64
import os
import re
import signal
import struct
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

from dlrover_adapters.http import HttpDialer, fetch_status
from dlrover_core.job import nodes, world
from dlrover_core.runtime import messages
from dlrover_core.runtime.levels import Beat, BeatSeen
from dlrover_core.runtime.messages import Answer, Hello, Level, Message, Welcome, numbered
from dlrover_core.runtime.transport import Connection

SCRIPTS = Path(__file__).parent
TOKEN = "the-token-of-this-run"
BOUND_S = 90.0
BEAT_S = 0.1
STALL_S = 4.0  # a little less than the silence that is suspicious: the machine may be busy with other things
BUSY_S = 1.0  # what the master may compute while a beat waits: one that is held up by a stranger computes all the while
GROWTH_MIB = 32
MEBIBYTE = 1024 * 1024


class Witness:
    """A well-behaved agent: it joins, starts, beats, and notes the longest that a beat waited for its answer.

    And the most CPU time (``used_s`` tells it so far) that the master took meanwhile: what the machine is late is none of that.
    """

    def __init__(self, node: str, connection: Connection, used_s: Callable[[], float]) -> None:
        self.node, self._connection, self._used_s = node, connection, used_s
        self.generations: set[int] = set()
        self.started = asyncio.Event()
        self.worst_s = self.busiest_s = 0.0
        self.beats = 0
        self._seen = asyncio.Event()
        self._over = asyncio.Event()

    async def live(self) -> None:
        """Until told to end."""
        await self._say(Hello(messages.VERSION, "run-1", self.node, 7, 0, 0))
        hearing, beating = asyncio.ensure_future(self._hear()), asyncio.ensure_future(self._beat())
        await asyncio.wait({hearing, beating}, return_when=asyncio.FIRST_COMPLETED)
        if beating.done():
            hearing.cancel()
        beating.cancel()
        results = await asyncio.gather(hearing, beating, return_exceptions=True)
        for result in results:
            if isinstance(result, Exception):
                raise result

    def end(self) -> None:
        """Enough."""
        self._over.set()

    async def _say(self, message: Message) -> None:
        await self._connection.send(messages.encode(message))

    async def _hear(self) -> None:
        while True:
            message = messages.decode(await self._connection.receive())
            if isinstance(message, Welcome):
                await self._say(numbered(1, nodes.ReportJoined(self.node, "host", "10.0.0.1", 1)))
                await self._say(numbered(2, world.OfferStore(self.node, f"10.0.0.1:{self.node}")))
            elif isinstance(message, Level):
                generation = messages.order_of(message).generation
                if generation and generation not in self.generations:
                    self.generations.add(generation)
                    await self._say(numbered(3, world.ReportStarted(self.node, generation)))
            elif isinstance(message, BeatSeen):
                self._seen.set()
            else:
                assert isinstance(message, Answer), f"{self.node} was told {message}"
                assert message.reason == ""
                if message.number == 3:
                    self.started.set()

    async def _beat(self) -> None:
        loop = asyncio.get_running_loop()
        while not self._over.is_set():
            self._seen.clear()
            began, used_s = loop.time(), self._used_s()
            await self._say(Beat(1, self.beats, 0))
            await asyncio.wait_for(self._seen.wait(), BOUND_S)
            self.worst_s = max(self.worst_s, loop.time() - began)
            self.busiest_s = max(self.busiest_s, self._used_s() - used_s)
            self.beats += 1
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._over.wait(), BEAT_S)


class House:
    """A master that leads, its agents, and what can be seen of them from outside."""

    def __init__(self, process: asyncio.subprocess.Process, address: str, folder: Path) -> None:
        self.process, self.address, self._folder = process, address, folder
        self.witnesses: list[Witness] = []

    def memory_mib(self) -> float:
        """The most memory that the master has had."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.findall(r"VmHWM:\s+(\d+) kB", status)[0]) / 1024

    def used_s(self) -> float:
        """The CPU time that the master has taken so far, in seconds."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_bytes().rpartition(b")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def lines(self, event: str = "") -> list[str]:
        """The master's log; with an ``event``, its lines only."""
        lines = (self._folder / "control.log").read_text().splitlines()
        return [line for line in lines if f'event="{event}"' in line or f"event={event} " in line or not event]

    async def until_logged(self, pattern: str) -> str:
        """A line of the master's log that says so."""
        while True:
            found = [line for line in self.lines() if re.search(pattern, line)]
            if found:
                return found[-1]
            # Every beat of a witness is a moment at which the log may have grown.
            beats = self.witnesses[0].beats
            while self.witnesses[0].beats == beats:
                await asyncio.wait({asyncio.ensure_future(asyncio.Event().wait())}, timeout=BEAT_S)

    def suppressed(self, event: str) -> int:
        """How many more of these lines there would have been, once the master has ended."""
        return sum(int(found) for line in self.lines(event) for found in re.findall(r" suppressed=(\d+)", line))


@asynccontextmanager
async def house(folder: Path, *, decided: int = 0, strangers_max: int = 1500) -> AsyncIterator[House]:
    """A master with two agents in one world; afterwards nobody must have noticed the stranger, of whom the log holds so much."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(SCRIPTS / "lone_master.py"),
        str(folder),
        str(strangers_max),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "DLROVER_TOKEN": TOKEN},
    )
    async with AsyncExitStack() as stack:
        stack.push_async_callback(_killed, process)
        assert process.stdout is not None
        address = (await process.stdout.readline()).decode().strip()
        here = House(process, address, folder)
        dialer = HttpDialer(TOKEN)
        stack.push_async_callback(dialer.close)
        tasks = []
        for number in range(2):
            connection = await dialer.connect(address)
            stack.push_async_callback(connection.close)
            here.witnesses.append(Witness(f"worker-{number}-0", connection, here.used_s))
            tasks.append(asyncio.ensure_future(here.witnesses[-1].live()))
            stack.push_async_callback(_ended, tasks[-1])
        for witness in here.witnesses:
            await witness.started.wait()
        before, seq = here.memory_mib(), (await fetch_status(address, TOKEN))["seq"] + decided
        yield here
        status = await fetch_status(address, TOKEN)
        for witness in here.witnesses:
            witness.end()
        await asyncio.gather(*tasks)
        grown = here.memory_mib() - before
        beats = [(round(one.worst_s, 3), round(one.busiest_s, 3)) for one in here.witnesses]
        told = f"grown by {grown:.0f} MiB, worst beats {beats}"
        assert [one.generations for one in here.witnesses] == [{1}, {1}]
        # Where the machine stood still, the master has noted that, and may just be about to.
        paused = len(here.lines("master was paused"))
        assert (status["generation"], status["alarms"]) == (1, 0), "the world was disturbed"
        assert seq <= status["seq"] <= seq + paused, "the world was disturbed"
        assert all(
            status["nodes"][one.node] == {"state": "running", "host": "host", "joined": True} for one in here.witnesses
        )
        assert max(one.worst_s for one in here.witnesses) < STALL_S, told
        assert max(one.busiest_s for one in here.witnesses) < BUSY_S, told
        assert grown < GROWTH_MIB, told
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0


async def _ended(task: asyncio.Future[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def _killed(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.kill()
        await process.wait()


def run(story: Callable[[], Awaitable[None]]) -> None:
    """Tell a story in an event loop of its own, within a bound."""

    async def told() -> None:
        await asyncio.wait_for(story(), BOUND_S)

    asyncio.run(told())


class Stranger:
    """A TCP connection that says what the test says."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def dial(cls, address: str) -> Stranger:
        """Connect, and say nothing."""
        host, _, port = address.rpartition(":")
        return cls(*await asyncio.open_connection(host, int(port)))

    @classmethod
    async def inside(cls, address: str, token: str = TOKEN) -> Stranger:
        """Somebody who has the token, and writes every byte of its WebSocket itself."""
        one = await cls.dial(address)
        key = base64.b64encode(os.urandom(16)).decode()
        lines = ["GET /v1/agent HTTP/1.1", f"Host: {address}", "Upgrade: websocket", "Connection: Upgrade"]
        lines += [f"Sec-WebSocket-Key: {key}", "Sec-WebSocket-Version: 13", f"Authorization: Bearer {token}", "", ""]
        one.writer.write("\r\n".join(lines).encode())
        assert (await one.reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 101 ")
        return one

    @classmethod
    async def guest(cls, address: str) -> Stranger:
        """Somebody whom the master takes for the agent of ``guest-0-0``."""
        one = await cls.inside(address)
        one.frame(messages.encode(Hello(messages.VERSION, "run-1", "guest-0-0", 9, 0, 0)))
        await one.reader.readexactly(2)
        return one

    def frame(self, payload: bytes, opcode: int = 0x82, announced: int | None = None) -> None:
        """A frame, or its beginning."""
        size = len(payload) if announced is None else announced
        if size < 126:
            head = struct.pack(">BB", opcode, 0x80 | size)
        elif size < 65536:
            head = struct.pack(">BBH", opcode, 0x80 | 126, size)
        else:
            head = struct.pack(">BBQ", opcode, 0x80 | 127, size)
        self.writer.write(head + b"\0\0\0\0" + payload)

    async def ended(self) -> bytes:
        """All that is said to it until the other end hangs up, politely or not."""
        said = b""
        with suppress(ConnectionError):
            while more := await self.reader.read(65536):
                said += more
        self.writer.transport.abort()
        return said

    async def pour(self, chunk: bytes, times: int) -> int:
        """Write until it is done or cut off; how many chunks went out."""
        for written in range(times):
            try:
                self.writer.write(chunk)
                await self.writer.drain()
            except ConnectionError:
                return written
        return times

    def hang_up(self) -> None:
        """Gone."""
        self.writer.transport.abort()
