"""A real master with hostile peers at its door and inside: others are served, the log stays short, memory stays flat.

Every story runs a master in a process of its own, over real sockets, with two well-behaved agents that train in one world. The
stranger does its worst; then the agents' beats must have been answered in time all along, their world must be the same one,
the master must not have grown, and what it logged must be few and clear lines.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import os
import re
import signal
import struct
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any, get_origin, get_type_hints

import msgpack
import pytest

from dlrover_adapters.http import HttpDialer, fetch_status
from dlrover_core.errors import ConnectionLost, TokenRefused
from dlrover_core.job import nodes, world
from dlrover_core.kernel.wire import COMMANDS
from dlrover_core.runtime import messages
from dlrover_core.runtime.levels import Beat, BeatSeen
from dlrover_core.runtime.messages import Answer, Goodbye, Hello, Level, Message, Welcome, numbered
from dlrover_core.runtime.transport import FRAME_BYTES_MAX, Connection

SCRIPTS = Path(__file__).parent / "scripts"
TOKEN = "the-token-of-this-run"
BOUND_S = 90.0
BEAT_S = 0.1
STALL_S = 4.0  # a little less than the silence that is suspicious: the machine may be busy with other things
BUSY_S = 1.0  # what the master may compute while a beat waits: one that is held up by a stranger computes all the while
GROWTH_MIB = 32
MEBIBYTE = 1024 * 1024


# ---- the house


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


# ---- strangers


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


# ---- outside: without the token


def test_token(tmp_path: Path) -> None:
    """Without this run's token nobody comes near the master: one line each, which shows no token."""

    async def story() -> None:
        async with house(tmp_path) as here:
            before = 0
            for token in ("", "the-token-of-an-older-run", TOKEN + "x", "\u00fc" * 40):
                await refused(here, token)
                lines = here.lines("token refused")[before:]
                before += len(lines)
                assert len(lines) == (3 if token.isascii() else 1)
                assert all(("token=wrong" if token else "token=missing") in line for line in lines)
                assert not any(secret in line for line in here.lines() for secret in (TOKEN, token or TOKEN))

    async def refused(here: House, token: str) -> None:
        if token.isascii():
            dialer = HttpDialer(token)
            for _ in range(3):
                with pytest.raises(TokenRefused, match="Set DLROVER_TOKEN"):
                    await dialer.connect(here.address)
            await dialer.close()
        else:
            stranger = await Stranger.dial(here.address)
            stranger.writer.write(
                f"GET /v1/status HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\n\r\n".encode()
            )
            assert b" 401 " in await stranger.ended()

    run(story)


def test_ten_thousand_wrong_tokens(tmp_path: Path) -> None:
    """A thousand connections that try a wrong token again and again cost ten lines and a count, not a line each."""

    async def story() -> None:
        async with house(tmp_path) as here:
            host, _, port = here.address.rpartition(":")
            flood = await asyncio.create_subprocess_exec(
                sys.executable, str(SCRIPTS / "flood.py"), host, port, "10000", "1000", stdout=asyncio.subprocess.PIPE
            )
            said, _ = await flood.communicate()
            answered = int(said)
            assert len(here.lines("token refused")) == 10
        assert len(here.lines("token refused")) == 11
        assert answered == 10 + here.suppressed("token refused") == 10_000

    run(story)


def test_a_thousand_idle_connections(tmp_path: Path) -> None:
    """A thousand connections that say nothing are cut after the handshake's time; agents come and go meanwhile."""

    async def story() -> None:
        async with house(tmp_path) as here:
            strangers = [await Stranger.dial(here.address) for _ in range(1000)]
            dialer = HttpDialer(TOKEN)
            await (await dialer.connect(here.address)).close()
            await dialer.close()
            for stranger in strangers:
                assert await stranger.ended() == b""
            assert len(here.lines("connection cut: no handshake")) == 10
        assert here.suppressed("connection cut: no handshake") == 990

    run(story)


def test_more_strangers_than_may_wait(tmp_path: Path) -> None:
    """Where too many wait the oldest makes room at once: whoever has something to say gets in."""

    async def story() -> None:
        # Few: they are to be there before the first one's time for a handshake is over.
        async with house(tmp_path, strangers_max=100) as here:
            strangers = [await Stranger.dial(here.address) for _ in range(200)]
            assert (await fetch_status(here.address, TOKEN))["state"] == "running"
            assert await strangers[0].ended() == b""
            assert "too many others wait" in here.lines("connection cut: no handshake")[0]
            for stranger in strangers:
                stranger.hang_up()

    run(story)


GARBAGE = {
    "zeros": bytes(MEBIBYTE),
    "noise": os.urandom(MEBIBYTE),
    "tls": bytes.fromhex("16030100a5010000a10303") + os.urandom(160),
    "http2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "pickle": b"\x80\x04cos\nsystem\n(S'true'\ntR.",
    "control characters": b"GET /\x1b[31m\x07 HTTP/1.1\r\nHost: x\r\n\r\n",
    "an endless line": b"GET /" + b"a" * MEBIBYTE,
}


def test_garbage(tmp_path: Path) -> None:
    """What is no request is answered with 400, or cut; one line says so, and shows nothing that a terminal would obey."""

    async def story() -> None:
        async with house(tmp_path) as here:
            for name, garbage in GARBAGE.items():
                stranger = await Stranger.dial(here.address)
                await stranger.pour(garbage, 1)
                said = await stranger.ended()
                assert said == b"" or said.split()[1] in (b"400", b"404", b"505"), (name, said[:100])
            complaints = [line for line in here.lines() if "level=warning" in line]
            assert 1 <= len(complaints) <= len(GARBAGE)
            assert all(line.isprintable() and len(line) < 1000 for line in complaints)

    run(story)


HOST = "HTTP/1.1\r\nHost: x\r\n"
KNOWN = f"Authorization: Bearer {TOKEN}\r\n"
INNER = f"GET /v1/status {HOST}{KNOWN}\r\n"
ASK = f"POST /v1/nothing {HOST}{KNOWN}"
SMUGGLED = {
    "length and chunks": f"{ASK}Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n{INNER}",
    "two lengths": f"{ASK}Content-Length: 0\r\nContent-Length: {len(INNER)}\r\n\r\n{INNER}",
    "a negative length": f"{ASK}Content-Length: -1\r\n\r\n{INNER}",
    "a signed length": f"{ASK}Content-Length: +0\r\n\r\n{INNER}",
    "chunks of a chunk": f"{ASK}Transfer-Encoding: chunked, chunked\r\n\r\n0\r\n\r\n{INNER}",
    "chunks of another kind": f"{ASK}Transfer-Encoding: xchunked\r\n\r\n{INNER}",
    "an overflowing chunk": f"{ASK}Transfer-Encoding: chunked\r\n\r\nfffffffffffffffff\r\n{INNER}",
    "a space before the colon": f"{ASK}Content-Length : 0\r\n\r\n{INNER}",
    "a folded header": f"{ASK}X: y\r\n Content-Length: 0\r\n\r\n{INNER}",
    "a null in a header": f"{ASK}X: \0\r\n\r\n{INNER}",
    "a second request": f"GET /v1/healthz {HOST}\r\n{INNER}",
    "a second request in a body": f"{ASK}Content-Length: {len(INNER)}\r\n\r\n{INNER}{INNER}",
    "two tokens": f"GET /v1/status {HOST}Authorization: Bearer wrong\r\n{KNOWN}\r\n",
    "two tokens, the right one first": f"GET /v1/status {HOST}{KNOWN}Authorization: Bearer wrong\r\n\r\n",
    "a tunnel": f"CONNECT /v1/status {HOST}{KNOWN}\r\n{INNER}",
    "an upgrade to something else": f"GET /v1/agent {HOST}{KNOWN}Upgrade: h2c\r\nConnection: Upgrade\r\n\r\n{INNER}",
}


def test_smuggling(tmp_path: Path) -> None:
    """However a request is cut, one connection gets one answer, and what hides behind it gets none."""

    async def story() -> None:
        async with house(tmp_path) as here:
            for name, request in SMUGGLED.items():
                stranger = await Stranger.dial(here.address)
                stranger.writer.write(request.encode())
                said = await stranger.ended()
                assert said.count(b"HTTP/1.") == 1, (name, said)
                assert b'"state"' not in said, (name, said)
                assert said.split()[1] in (b"200", b"400", b"401", b"404", b"405"), (name, said)

    run(story)


def test_slowloris(tmp_path: Path) -> None:
    """Two hundred that dribble headers, a byte at a time, are cut after the handshake's time like those that are silent."""

    async def story() -> None:
        async with house(tmp_path) as here:
            strangers = [await Stranger.dial(here.address) for _ in range(200)]

            async def dribble(stranger: Stranger) -> None:
                ended = asyncio.ensure_future(stranger.ended())
                for byte in b"GET /v1/agent HTTP/1.1\r\nHost: x\r\nX-Slow: " + b"a" * 1000:
                    stranger.writer.write(bytes((byte,)))
                    await asyncio.wait({ended}, timeout=0.2)
                    if ended.done():
                        return
                raise AssertionError("nobody cut it off")

            await asyncio.gather(*(dribble(stranger) for stranger in strangers))
            assert len(here.lines("connection cut: no handshake")) == 10

    run(story)


ENDLESS = {
    "headers": "GET /v1/agent HTTP/1.1\r\n",
    "a body": f"POST /v1/status {HOST}Content-Length: 104857600\r\n\r\n",
    "a command": f"POST /v1/command {HOST}{KNOWN}Content-Length: 104857600\r\n\r\n",
    "a command in chunks": f"POST /v1/command {HOST}{KNOWN}Transfer-Encoding: chunked\r\n\r\n",
}


def test_a_hundred_megabytes_of_request(tmp_path: Path) -> None:
    """Headers without end and bodies that nobody asked for are not taken in: the connection ends."""

    async def story() -> None:
        async with house(tmp_path) as here:
            for beginning in ENDLESS.values():
                stranger = await Stranger.dial(here.address)
                stranger.writer.write(beginning.encode())
                ended = asyncio.ensure_future(stranger.ended())
                chunked = "chunked" in beginning
                chunk = b"10000\r\n" + bytes(65536) + b"\r\n" if chunked else b"X: " + b"a" * 4000 + b"\r\n"
                await stranger.pour(chunk, 100 * MEBIBYTE // len(chunk))
                await ended

    run(story)


# ---- inside: with the token, and no good


def test_a_frame_of_a_hundred_megabytes(tmp_path: Path) -> None:
    """A frame over the limit ends its connection with the first bytes, announced or sent, whole or in pieces."""

    async def story() -> None:
        async with house(tmp_path) as here:
            frames = (
                (struct.pack(">BBQ4x", 0x82, 0x80 | 127, 100 * MEBIBYTE), bytes(MEBIBYTE)),
                (
                    struct.pack(">BBH4x", 0x02, 0x80 | 126, 4),
                    struct.pack(">BBH4x", 0x00, 0x80 | 126, 60000) + bytes(60000),
                ),
                (b"", struct.pack(">BBQ4x", 0x82, 0x80 | 127, MEBIBYTE) + bytes(MEBIBYTE)),
            )
            for make, (opening, chunk) in itertools.product((Stranger.inside, Stranger.guest), frames):
                stranger = await make(here.address)
                ended = asyncio.ensure_future(stranger.ended())
                stranger.writer.write(opening + bytes(4) * (opening[:1] == b"\x02"))
                await stranger.pour(chunk, 100 * MEBIBYTE // len(chunk))
                await ended
            complaints = [line for line in here.lines() if "level=warning" in line]
            assert len(complaints) == 6
            assert all("limit" in line or "msgpack" in line for line in complaints)

    run(story)


def test_half_open_frames(tmp_path: Path) -> None:
    """A hundred, half of them greeted, announce a mebibyte, send ten bytes, stall; a ping they cannot answer finds them out."""

    async def story() -> None:
        async with house(tmp_path) as here:
            strangers = [await make(here.address) for make in (Stranger.inside, Stranger.guest) for _ in range(50)]
            for stranger in strangers:
                stranger.frame(bytes(10), announced=FRAME_BYTES_MAX)
            for stranger in strangers:
                await stranger.ended()
            await here.until_logged("agent connection lost")
            assert len(here.lines("agent connection lost")) <= 11

    run(story)


def test_slow_reader(tmp_path: Path) -> None:
    """An agent that talks and never reads the answers loses its connection; what waits for it is bounded."""

    async def story() -> None:
        async with house(tmp_path, decided=1) as here:
            stranger = await Stranger.guest(here.address)
            stranger.writer.transport.pause_reading()  # type: ignore[attr-defined]  # of the reading half
            # Said again and again it is decided once, and answered each time, with the address.
            command = messages.encode(numbered(1, world.WithdrawStore("guest-0-0", "x" * 3000)))
            stranger.frame(command)
            for _ in range(100):
                if await stranger.pour((struct.pack(">BBH4x", 0x82, 0x80 | 126, len(command)) + command) * 100, 1) == 0:
                    break
            await here.until_logged(r"connection (closed|lost).*(unread|read nothing)")
            stranger.hang_up()

    run(story)


def test_speaking_for_others(tmp_path: Path) -> None:
    """An agent that reports about another's node is shown the door, whatever it reports; nothing of it is believed."""

    async def story() -> None:
        async with house(tmp_path) as here:
            kinds = [kind for kind, cls in COMMANDS.items() if "node" in cls._fields]  # type: ignore[attr-defined]
            for kind in kinds:
                stranger = await Stranger.guest(here.address)
                cls: Any = COMMANDS[kind]
                plain = {int: 1, str: "x", bool: False, bytes: b""}
                blank = [() if get_origin(hint) is tuple else plain[hint] for hint in get_type_hints(cls).values()]
                blank[cls._fields.index("node")] = "worker-0-0"
                stranger.frame(messages.encode(messages.Numbered(1, kind, tuple(blank))))
                await stranger.ended()
            assert len(kinds) >= 9
        told = here.lines("agent connection closed")
        assert len(told) == len(kinds) if len(kinds) <= 10 else 11
        assert min(len(told), 10) + here.suppressed("agent connection closed") == len(kinds)
        assert all("guest-0-0 speaks for worker-0-0" in line for line in told)

    run(story)


def test_taking_the_place_of_others(tmp_path: Path) -> None:
    """Who says Hello as a node that has an agent already is turned away, and so is who names none of this run."""

    async def story() -> None:
        async with house(tmp_path) as here:
            dialer = HttpDialer(TOKEN)
            for node, says in (("worker-0-0", "has an agent already"), ("worker-9-0", "not a node of this run")):
                connection = await dialer.connect(here.address)
                await connection.send(messages.encode(Hello(messages.VERSION, "run-1", node, 8, 0, 0)))
                goodbye = messages.decode(await connection.receive())
                assert isinstance(goodbye, Goodbye)
                assert goodbye.leave
                assert says in goodbye.reason
                with pytest.raises(ConnectionLost):
                    await connection.receive()
                await connection.close()
            await dialer.close()
            assert len(here.lines("agent turned away")) == 2

    run(story)


def test_a_thousand_bad_hellos(tmp_path: Path) -> None:
    """Who has the token and comes back a thousand times with the wrong name costs a few lines, however long the name is."""

    async def story() -> None:
        async with house(tmp_path) as here:
            dialer = HttpDialer(TOKEN)
            for number in range(1000):
                name = "\x1b[2J" + "n" * (500_000 if number < 20 else 10)
                connection = await dialer.connect(here.address)
                await connection.send(messages.encode(Hello(messages.VERSION, "run-1", name, 8, 0, 0)))
                assert isinstance(messages.decode(await connection.receive()), Goodbye)
                await connection.close()
            await dialer.close()
            told = here.lines("agent turned away")
            assert len(told) == 10
            assert all(line.isprintable() and len(line) < 2000 for line in told)

    run(story)


NESTED = b"".join(b"\xdd" + (FRAME_BYTES_MAX - 10 - level * 5).to_bytes(4, "big") for level in range(1000))
BOMBS = {
    "depth": b"\x91" * FRAME_BYTES_MAX,
    "a map of four milliards": b"\xdf\xff\xff\xff\xff" + bytes(100_000),
    "an array of four milliards": b"\xdd\xff\xff\xff\xff" + bytes(100_000),
    "arrays of a million in one another": NESTED + bytes(FRAME_BYTES_MAX - len(NESTED)),
    "a string of four gigabytes": b"\xdb\xff\xff\xff\xff" + bytes(100_000),
    "a million empty maps": b"\xdd\x00\x0f\xff\x00" + b"\x80" * 0xFFF00,
    "extensions": b"\xdd\x00\x04\x00\x00" + b"\xd4\x05a" * 0x40000,
    "a map where a tuple should be": msgpack.packb([1, {"version": 2}]),
    "a number without bounds": msgpack.packb([1, [2**64 - 1, "run-1", "guest-0-0", 9, 0, 0]]),
    "nothing": b"",
}


def test_bombs(tmp_path: Path) -> None:
    """What is small on the wire and huge when unpacked is never unpacked: a line, and the end of the connection."""

    async def story() -> None:
        async with house(tmp_path) as here:
            for bomb in BOMBS.values():
                for make in (Stranger.inside, Stranger.guest):
                    stranger = await make(here.address)
                    stranger.frame(bomb[:FRAME_BYTES_MAX])
                    await stranger.ended()
        told = here.lines("agent connection closed")
        assert len(told) == 11
        assert 10 + here.suppressed("agent connection closed") == 2 * len(BOMBS)
        assert all(line.isprintable() and len(line) < 1000 for line in told)

    run(story)


def test_the_newest_and_the_last_version_are_served(tmp_path: Path) -> None:
    """A version too old or too new is refused with one line that says what to install; the one before ours is served."""

    async def story() -> None:
        async with house(tmp_path) as here:
            dialer = HttpDialer(TOKEN)
            answers: dict[int, Message] = {}
            oldest = messages.OLDEST_VERSION
            for version in (0, oldest - 1, messages.VERSION + 1, oldest):
                connection = await dialer.connect(here.address)
                # As long as the first version's was.
                await connection.send(msgpack.packb((1, (version, "run-1", "guest-0-0", 9, 0, 0))))
                answers[version] = messages.decode(await connection.receive())
                await connection.close()
            await dialer.close()
            for version in (0, oldest - 1, messages.VERSION + 1):
                goodbye = answers[version]
                assert isinstance(goodbye, Goodbye)
                assert f"protocol {version} is not served here: {oldest} to {messages.VERSION} are" in goodbye.reason
                assert "install dlrover-core" in goodbye.reason
            welcome = answers[oldest]
            assert isinstance(welcome, Welcome)
            assert welcome.version == oldest
            told = [line for line in here.lines("agent turned away") if "level=warning" in line]
            assert len(told) == 3

    run(story)


def test_a_flood_of_beats(tmp_path: Path) -> None:
    """An agent that beats as fast as it can, and reads, is served, and keeps nobody else from being served."""

    async def story() -> None:
        async with house(tmp_path) as here:
            stranger = await Stranger.guest(here.address)
            beat = messages.encode(Beat(0, -1, 0))
            chunk = (struct.pack(">BB4x", 0x82, 0x80 | len(beat)) + beat) * 1000
            ended = asyncio.ensure_future(stranger.ended())
            assert await stranger.pour(chunk, 50) == 50
            assert not ended.done()
            stranger.hang_up()
            await ended

    run(story)
