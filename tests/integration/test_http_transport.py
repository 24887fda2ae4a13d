"""The HTTP transport over real sockets: who gets in, what is carried, and that nobody can hold the others up."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import os
import shutil
import socket
import ssl
import struct
import subprocess
import sys
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

import pytest
from structlog.testing import capture_logs

from dlrover_adapters.http import (
    HttpDialer,
    HttpLimits,
    HttpListener,
    HttpTransport,
    adopt,
    bind,
    fetch_status,
)
from dlrover_core.errors import ConnectionLost, TokenRefused
from dlrover_core.runtime.transport import FRAME_BYTES_MAX, Connection

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

TOKEN = "the-token-of-this-job"
BOUND_S = 30.0
LIMITS = HttpLimits(close_s=0.3)


def run(story: Callable[[], Awaitable[None]]) -> None:
    """Tell a story in an event loop of its own, within a bound."""

    async def told() -> None:
        await asyncio.wait_for(story(), BOUND_S)

    asyncio.run(told())


class Master:
    """A listener whose connections are echoed, or kept for the test to do with as it likes."""

    def __init__(
        self, sock: socket.socket | None = None, *, echo: bool = True, limits: HttpLimits = LIMITS, **more: Any
    ) -> None:
        self.listener = HttpListener(sock or bind(), TOKEN, limits=limits, **more)
        self._echo = echo
        self.came: asyncio.Queue[Connection] = asyncio.Queue()
        self.lost: asyncio.Queue[ConnectionLost] = asyncio.Queue()
        self.state: Mapping[str, Any] = {"state": "running", "step": 7}

    @property
    def address(self) -> str:
        """Where it listens."""
        return self.listener.address

    async def accept(self, connection: Connection) -> None:
        """Echo, or keep; note how it ended."""
        self.came.put_nowait(connection)
        try:
            while self._echo:
                await connection.send(await connection.receive())
            await asyncio.Event().wait()
        except ConnectionLost as lost:
            self.lost.put_nowait(lost)

    async def serve(self) -> Master:
        """Begin."""
        await self.listener.serve(self.accept, lambda: self.state)
        return self

    async def __aenter__(self) -> Master:  # noqa: PYI034  # typing.Self is of 3.11
        return await self.serve()

    async def __aexit__(self, *_: object) -> None:
        await self.listener.close()


@asynccontextmanager
async def dialer(token: str = TOKEN, **more: Any) -> AsyncIterator[HttpDialer]:
    """An agent's end, closed at the end."""
    found = HttpDialer(token, **more)
    try:
        yield found
    finally:
        await found.close()


async def raw(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A TCP connection that says what the test says."""
    host, _, port = address.rpartition(":")
    return await asyncio.open_connection(host, int(port))


async def upgraded(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A WebSocket of which the test writes every byte."""
    reader, writer = await raw(address)
    key = base64.b64encode(os.urandom(16)).decode()
    lines = ["GET /v1/agent HTTP/1.1", f"Host: {address}", "Upgrade: websocket", "Connection: Upgrade"]
    lines += [f"Sec-WebSocket-Key: {key}", "Sec-WebSocket-Version: 13", f"Authorization: Bearer {TOKEN}", "", ""]
    writer.write("\r\n".join(lines).encode())
    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 101 ")
    return reader, writer


async def ended(reader: asyncio.StreamReader) -> None:
    """Read until the other end ends it, politely or not."""
    with suppress(ConnectionResetError):
        while await reader.read(65536):
            pass


# ---- frames


def test_frames() -> None:
    """Whole frames arrive, in order, from none to the largest byte, both ways."""

    async def story() -> None:
        async with Master() as master, dialer() as here:
            connection = await here.connect(master.address)
            frames = [b"", b"a", os.urandom(125), os.urandom(126), os.urandom(65536), os.urandom(FRAME_BYTES_MAX)]
            for frame in frames:
                await connection.send(frame)
                assert await connection.receive() == frame
            sending = asyncio.gather(*(connection.send(str(number).encode()) for number in range(500)))
            assert [int(await connection.receive()) for _ in range(500)] == list(range(500))
            await sending
            assert connection.peer == master.address
            assert (await master.came.get()).peer.startswith("127.0.0.1:")
            await connection.close()

    run(story)


def test_no_compression_and_no_delay() -> None:
    """Frames are sent as they are and at once: compression is not agreed on, and TCP does not wait for more."""

    async def story() -> None:
        async with Master(echo=False) as master, dialer() as here:
            connection = await here.connect(master.address)
            for ws in (connection._ws, (await master.came.get())._ws):  # type: ignore[attr-defined]
                assert not ws.compress
                assert ws.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            await connection.close()

    run(story)


def test_many_connections() -> None:
    """Sixty-four agents talk at once, each hears its own words."""

    async def story() -> None:
        async with Master() as master, dialer() as here:

            async def talk(number: int) -> None:
                connection = await here.connect(master.address)
                for word in range(20):
                    await connection.send(f"{number}/{word}".encode())
                    assert await connection.receive() == f"{number}/{word}".encode()
                await connection.close()

            await asyncio.gather(*(talk(number) for number in range(64)))

    run(story)


# ---- who gets in


@pytest.mark.parametrize(("token", "says"), [("", "is missing"), ("the-token-of-an-older-run", "is not this job's")])
def test_token(token: str, says: str) -> None:
    """Without the job's token, or with another's, nobody gets in: the agent is told what to do, the master logs one line."""

    async def story() -> None:
        async with Master() as master, dialer(token) as here:
            with capture_logs() as logs:
                with pytest.raises(TokenRefused, match=f"{says}.*Set DLROVER_TOKEN, or --token-file"):
                    await here.connect(master.address)
                assert [line["event"] for line in logs] == ["token refused"]
                assert not any(secret in str(logs) for secret in (TOKEN, token or TOKEN))
                with pytest.raises(TokenRefused):
                    await fetch_status(master.address, token)
            assert master.came.empty()

    run(story)


def test_status() -> None:
    """The master's state is answered as JSON to whoever has the token; a failing one is an error, and the master goes on."""

    async def story() -> None:
        async with Master() as master:
            assert await fetch_status(master.address, TOKEN) == {"state": "running", "step": 7}
            master.state = {"broken": object()}
            with capture_logs() as logs, pytest.raises(ConnectionLost, match="HTTP status 500"):
                await fetch_status(master.address, TOKEN)
            assert [line["event"] for line in logs] == ["request failed"]
            master.state = {}
            assert await fetch_status(master.address, TOKEN) == {}

    run(story)


@pytest.mark.parametrize(
    ("request_line", "status"),
    [
        ("GET /v1/healthz", b"200"),
        ("GET /v1/status", b"401"),
        ("GET /v1/agent", b"401"),
        ("GET /", b"404"),
        ("POST /v1/healthz", b"405"),
    ],
)
def test_rest(request_line: str, status: bytes) -> None:
    """Health needs no token, everything else does; every answer ends its connection."""

    async def story() -> None:
        async with Master() as master:
            reader, writer = await raw(master.address)
            writer.write(f"{request_line} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            assert (await reader.read()).split()[1] == status
            writer.close()

    run(story)


def test_nobody_there() -> None:
    """An address where nobody listens, or something else does, is a lost connection that says so."""

    async def story() -> None:
        with bind() as closed:
            address = f"127.0.0.1:{closed.getsockname()[1]}"
        async with dialer() as here:
            with pytest.raises(ConnectionLost, match=r"cannot be reached: Connection refused$"):
                await here.connect(address)
            with pytest.raises(ConnectionLost, match=r"cannot be asked: Connection refused$"):
                await fetch_status(address, TOKEN)
            with pytest.raises(ConnectionLost):
                await here.connect("not an address")

    run(story)


def test_waiting_for_a_master() -> None:
    """Connections made before anybody serves wait, and are served; too long a wait is a lost connection."""

    async def story() -> None:
        sock = bind()
        master = Master(sock)
        async with dialer() as here, dialer(limits=LIMITS._replace(handshake_s=0.05)) as impatient:
            with pytest.raises(ConnectionLost, match="nobody answered"):
                await impatient.connect(master.address)
            dialing = asyncio.ensure_future(here.connect(master.address))
            await asyncio.sleep(0)
            async with master:
                connection = await dialing
                await connection.send(b"hello")
                assert await connection.receive() == b"hello"
                await connection.close()

    run(story)


def test_masters_change() -> None:
    """Two masters share one socket: when the leader closes, its agents are told at once and the next one serves the same
    address.
    """

    async def story() -> None:
        sock = bind()
        first, second = Master(adopt(os.dup(sock.fileno()))), Master(sock)
        assert first.address == second.address
        async with dialer() as here:
            async with first:
                connection = await here.connect(first.address)
                await connection.send(b"one")
                assert await connection.receive() == b"one"
            with pytest.raises(ConnectionLost, match="closed"):
                await connection.receive()
            await connection.close()
            async with second:
                again = await here.connect(second.address)
                await again.send(b"two")
                assert await again.receive() == b"two"
                await again.close()

    run(story)


def test_listener_that_never_served() -> None:
    """A standby that was never needed closes its copy of the socket and nothing else."""

    async def story() -> None:
        sock = bind()
        standby = Master(adopt(os.dup(sock.fileno())))
        await standby.listener.close()
        await standby.listener.close()
        async with Master(sock) as master:
            assert await fetch_status(master.address, TOKEN) == master.state

    run(story)


@pytest.mark.parametrize(
    ("host", "advertise", "expected"),
    [
        ("127.0.0.1", "", "127.0.0.1:{port}"),
        ("::1", "", "[::1]:{port}"),
        ("0.0.0.0", "", "{name}:{port}"),
        ("0.0.0.0", "node7", "node7:{port}"),
        ("0.0.0.0", "node7:99", "node7:99"),
        ("127.0.0.1", "[fe80::7]", "[fe80::7]:{port}"),
    ],
)
def test_address(host: str, advertise: str, expected: str) -> None:
    """The address is one that agents can use: a wildcard becomes this host's name, and another may be advertised."""
    try:
        sock = bind(host)
    except OSError:
        pytest.skip(f"no address {host} here")
    with sock:
        found = HttpListener(sock, TOKEN, advertise=advertise).address
        assert found == expected.format(port=sock.getsockname()[1], name=socket.gethostname())


def test_a_token_is_needed() -> None:
    """A listener without a token would take anybody; it is refused."""
    with bind() as sock, pytest.raises(ValueError, match="make_token"):
        HttpListener(sock, "")


# ---- peers that misbehave


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
        b"SSH-2.0-OpenSSH_9.6\r\n\r\n",
        bytes(range(251, 187, -1)) + b"\r\n\r\n",
    ],
)
def test_garbage(garbage: bytes) -> None:
    """Bytes that are not HTTP get one 400 and one line in the log, and nobody waits for them."""

    async def story() -> None:
        async with Master() as master, dialer() as here:
            connection = await here.connect(master.address)
            with capture_logs() as logs:
                reader, writer = await raw(master.address)
                writer.write(garbage)
                assert (await reader.read()).split()[1] == b"400"
                writer.close()
                assert [line["event"] for line in logs] == ["not a request"]
            await connection.send(b"still here")
            assert await connection.receive() == b"still here"
            await connection.close()

    run(story)


@pytest.mark.parametrize(
    "beginning", [b"", b"GET /v1/agent HT", b"POST /v1/status HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n1"]
)
def test_no_handshake(beginning: bytes) -> None:
    """Who connects and does not finish asking is cut off after the handshake time; agents stay."""

    async def story() -> None:
        async with Master(limits=LIMITS._replace(handshake_s=1.0)) as master, dialer() as here:
            connection = await here.connect(master.address)
            reader, writer = await raw(master.address)
            writer.write(beginning)
            await ended(reader)
            writer.close()
            await connection.send(b"still here")
            assert await connection.receive() == b"still here"
            await connection.close()

    run(story)


def test_oversized_frame_to_the_master() -> None:
    """A frame over the limit ends its connection before it is read, with one line that says why; others go on."""

    async def story() -> None:
        async with Master() as master, dialer() as here:
            connection = await here.connect(master.address)
            reader, writer = await upgraded(master.address)
            with capture_logs() as logs:
                writer.write(struct.pack(">BBQ4s", 0x82, 0x80 | 127, FRAME_BYTES_MAX + 1, b"mask"))
                await ended(reader)
                assert "exceeds limit" in str(await master.lost.get())
                assert [line["event"] for line in logs] == ["connection closed"]
            writer.close()
            await connection.send(b"still here")
            assert await connection.receive() == b"still here"
            await connection.close()

    run(story)


def test_oversized_frame_from_us() -> None:
    """A frame over the limit is never sent: the connection ends here, with a line that says why."""

    async def story() -> None:
        async with Master() as master, dialer() as here:
            connection = await here.connect(master.address)
            with capture_logs() as logs, pytest.raises(ConnectionLost, match="the limit is"):
                await connection.send(bytes(FRAME_BYTES_MAX + 1))
            assert [line["event"] for line in logs] == ["connection closed"]
            with pytest.raises(ConnectionLost, match="the limit is"):
                await connection.receive()
            await connection.close()

    run(story)


@pytest.mark.parametrize("opening", [b"\x81\x84", b"\xf2\x84", b"\x80\x84"])
def test_frames_of_no_peer_of_ours(opening: bytes) -> None:
    """Text, reserved bits and fragments of nothing end the connection."""

    async def story() -> None:
        async with Master() as master:
            reader, writer = await upgraded(master.address)
            writer.write(opening + b"maskbody")
            assert await master.lost.get()
            await ended(reader)
            writer.close()

    run(story)


def test_half_open_reader() -> None:
    """A peer that never reads is closed after the send time, while another is served all along."""

    async def story() -> None:
        limits = LIMITS._replace(send_s=0.3, close_s=0.1)
        async with Master(echo=False, limits=limits) as master, dialer() as here:
            good = await here.connect(master.address)
            good_end = await master.came.get()
            _, writer = await upgraded(master.address)
            writer.transport.pause_reading()
            stuck = await master.came.get()

            async def pour() -> None:
                while True:
                    await stuck.send(bytes(FRAME_BYTES_MAX))

            pouring = asyncio.ensure_future(pour())
            words = 0
            while not pouring.done():
                await good_end.send(b"word")
                assert await asyncio.wait_for(good.receive(), 5.0) == b"word"
                words += 1
            with pytest.raises(ConnectionLost, match=r"read nothing for \d\.\d s"):
                await pouring
            assert words > 10
            writer.transport.abort()
            await good.close()

    run(story)


def test_unsent_bytes_are_bounded() -> None:
    """What waits for one slow reader is bounded in bytes, however many tasks send to it."""

    async def story() -> None:
        limits = LIMITS._replace(unsent_bytes_max=3 * FRAME_BYTES_MAX, close_s=0.1)
        async with Master(echo=False, limits=limits) as master:
            _, writer = await upgraded(master.address)
            writer.transport.pause_reading()
            stuck = await master.came.get()
            sends = [asyncio.ensure_future(stuck.send(bytes(FRAME_BYTES_MAX))) for _ in range(40)]
            outcomes = await asyncio.gather(*sends, return_exceptions=True)
            lost = [str(outcome) for outcome in outcomes if isinstance(outcome, ConnectionLost)]
            assert any("bytes unread" in reason for reason in lost)
            writer.transport.abort()

    run(story)


def test_slow_reader_is_waited_for() -> None:
    """A peer that reads slowly, but reads, keeps its connection however long it takes."""

    async def story() -> None:
        limits, frames = LIMITS._replace(send_s=2.0), 28
        async with Master(echo=False, limits=limits) as master:
            reader, writer = await upgraded(master.address)
            end = await master.came.get()

            async def pour() -> None:
                for _ in range(frames):
                    await end.send(bytes(FRAME_BYTES_MAX))

            began, pouring = asyncio.get_running_loop().time(), asyncio.ensure_future(pour())
            for _ in range(frames):
                await asyncio.wait({pouring}, timeout=0.2)
                await reader.readexactly(FRAME_BYTES_MAX + 10)
            await pouring
            assert asyncio.get_running_loop().time() - began > 2 * limits.send_s
            writer.transport.abort()

    run(story)


def test_silent_death_of_the_agent() -> None:
    """A peer that is gone without a word is found out by a ping that nobody answers."""

    async def story() -> None:
        async with Master(limits=LIMITS._replace(ping_s=0.2, close_s=0.1)) as master:
            _, writer = await upgraded(master.address)
            # The socket stays open and nothing answers any more, as when a host loses power.
            writer.transport.pause_reading()
            lost = await asyncio.wait_for(master.lost.get(), 5.0)
            assert not lost.ended, "our own time-out is no word of its kernel"
            writer.transport.abort()

    run(story)


AGENT = """
import asyncio, sys
from dlrover_adapters.http import HttpDialer
async def main():
    connection = await HttpDialer(sys.argv[2]).connect(sys.argv[1])
    await connection.send(b"here")
    await connection.receive()
    if sys.argv[3] == "politely":
        await connection.close()
        return
    await asyncio.Event().wait()
asyncio.run(main())
"""


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "sending"])
def test_killed_agent(busy: bool) -> None:
    """A peer whose process is killed: its kernel says so at once, and the loss says that it was the kernel."""

    async def story() -> None:
        async with Master(echo=False) as master:
            process = await asyncio.create_subprocess_exec(sys.executable, "-c", AGENT, master.address, TOKEN, "")
            connection = await master.came.get()
            assert await connection.receive() == b"here"
            await connection.send(b"go on")

            async def flood() -> None:
                while True:
                    await connection.send(b"x" * 1000)
                    await asyncio.sleep(0)

            process.kill()
            with pytest.raises(ConnectionLost) as lost:
                await asyncio.wait_for(flood() if busy else connection.receive(), 5.0)
            assert lost.value.ended
            with pytest.raises(ConnectionLost) as again:
                await connection.receive()
            assert again.value.ended
            await process.wait()
            await connection.close()

    run(story)


def test_polite_agent() -> None:
    """A peer that says goodbye is not dead."""

    async def story() -> None:
        async with Master(echo=False) as master:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-c", AGENT, master.address, TOKEN, "politely"
            )
            connection = await master.came.get()
            assert await connection.receive() == b"here"
            await connection.send(b"bye")
            with pytest.raises(ConnectionLost) as lost:
                await asyncio.wait_for(connection.receive(), 5.0)
            assert not lost.value.ended
            await process.wait()
            await connection.close()

    run(story)


def test_cut_by_ourselves() -> None:
    """What we cut ourselves was not ended by the peer's kernel, though the socket's end looks the same."""

    async def story() -> None:
        async with Master(echo=False) as master, dialer() as here:
            theirs = await here.connect(master.address)
            connection = await master.came.get()
            with pytest.raises(ConnectionLost):
                await connection.send(b"x" * (FRAME_BYTES_MAX + 1))
            with pytest.raises(ConnectionLost) as lost:
                await connection.receive()
            assert not lost.value.ended
            with pytest.raises(ConnectionLost) as cut:
                await theirs.receive()
            assert cut.value.ended
            await connection.close()
            await theirs.close()

    run(story)


def test_silent_death_of_the_master() -> None:
    """An agent finds out as well that its master is gone without a word."""

    async def story() -> None:
        async def mute(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            request = (await reader.readuntil(b"\r\n\r\n")).decode()
            key = next(line.split()[1] for line in request.splitlines() if line.startswith("Sec-WebSocket-Key"))
            digest = hashlib.sha1(f"{key}258EAFA5-E914-47DA-95CA-C5AB0DC85B11".encode()).digest()  # noqa: S324  # RFC 6455
            lines = ["HTTP/1.1 101 x", "Upgrade: websocket", "Connection: upgrade"]
            lines += [f"Sec-WebSocket-Accept: {base64.b64encode(digest).decode()}", "", ""]
            writer.write("\r\n".join(lines).encode())
            assert await reader.read(1)  # the ping, which nobody answers
            await over.wait()
            writer.close()

        over = asyncio.Event()
        server = await asyncio.start_server(mute, "127.0.0.1", 0)
        address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with dialer(limits=LIMITS._replace(ping_s=0.2, close_s=0.1)) as here:
            connection = await here.connect(address)
            with pytest.raises(ConnectionLost):
                await asyncio.wait_for(connection.receive(), 5.0)
            await connection.close()
        over.set()
        server.close()
        await server.wait_closed()

    run(story)


def test_too_many_connections() -> None:
    """Beyond the bound new connections are cut off with one line in the log; a place that is freed is taken again."""

    async def story() -> None:
        async with Master(limits=LIMITS._replace(connections_max=2)) as master, dialer() as here:
            kept = [await here.connect(master.address) for _ in range(2)]
            with capture_logs() as logs:
                for _ in range(3):
                    with pytest.raises(ConnectionLost):
                        await here.connect(master.address)
                assert [line["event"] for line in logs] == ["too many connections, new ones are cut off"]
            await kept[0].close()
            await master.lost.get()
            await (again := await here.connect(master.address)).send(b"in")
            assert await again.receive() == b"in"
            for connection in (again, kept[1]):
                await connection.close()

    run(story)


# ---- ends


def test_close_says_goodbye() -> None:
    """Whoever closes, the other end learns it at once; closing again, and using what is closed, is safe."""

    async def story() -> None:
        async with Master(echo=False) as master, dialer() as here:
            connection = await here.connect(master.address)
            end = await master.came.get()
            hearing = asyncio.ensure_future(end.receive())
            await connection.close()
            await connection.close()
            with pytest.raises(ConnectionLost):
                await hearing
            for act in (connection.receive(), connection.send(b""), end.send(b"")):
                with pytest.raises(ConnectionLost):
                    await act

    run(story)


def test_close_does_not_wait_for_the_deaf() -> None:
    """A listener closes within the goodbye's time though one peer never answers and one handler does not end."""

    async def story() -> None:
        limits = LIMITS._replace(close_s=0.2)
        master = await Master(echo=False, limits=limits).serve()
        async with dialer() as here:
            connection = await here.connect(master.address)
            _, writer = await upgraded(master.address)
            writer.transport.pause_reading()
            for _ in range(2):
                await master.came.get()
            await asyncio.wait_for(asyncio.gather(master.listener.close(), master.listener.close()), 5.0)
            with pytest.raises(ConnectionLost):
                await connection.receive()
            writer.transport.abort()
            await connection.close()

    run(story)


def test_cancelled_receive_loses_nothing() -> None:
    """A receive that is cancelled takes no frame with it."""

    async def story() -> None:
        async with Master(echo=False) as master, dialer() as here:
            connection = await here.connect(master.address)
            end = await master.came.get()
            for number in range(50):
                receiving = asyncio.ensure_future(connection.receive())
                await asyncio.sleep(0)
                receiving.cancel()
                await asyncio.gather(receiving, return_exceptions=True)
                await end.send(str(number).encode())
                assert await connection.receive() == str(number).encode()
            await connection.close()

    run(story)


def test_one_name_for_both_ends() -> None:
    """The entry point's class makes both ends of one job."""

    async def story() -> None:
        transport = HttpTransport(TOKEN)
        listener, here = transport.listener(bind()), transport.dialer()

        async def accept(connection: Connection) -> None:
            await connection.send(b"welcome")

        await listener.serve(accept, dict)
        connection = await here.connect(listener.address)
        assert await connection.receive() == b"welcome"
        with pytest.raises(ConnectionLost):
            await connection.receive()
        await connection.close()
        await here.close()
        await listener.close()

    run(story)


def test_tls(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Given certificates everything is encrypted, and who does not trust the certificate does not connect."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not here to make a certificate")
    folder = tmp_path_factory.mktemp("tls")
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
        "-days",
        "2",
    ]
    command += [
        "-keyout",
        str(key),
        "-out",
        str(certificate),
        "-subj",
        "/CN=localhost",
        "-addext",
        "subjectAltName=IP:127.0.0.1",
    ]
    subprocess.run(command, check=True, capture_output=True)
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    server.load_cert_chain(certificate, key)
    trusting = ssl.create_default_context(cafile=str(certificate))
    others = ssl.create_default_context()  # reads the system's certificates, which takes its time

    async def story() -> None:
        async with Master(tls=server) as master:
            async with dialer(tls=trusting) as here:
                connection = await here.connect(master.address)
                await connection.send(bytes(FRAME_BYTES_MAX))
                assert len(await connection.receive()) == FRAME_BYTES_MAX
                assert await fetch_status(master.address, TOKEN, tls=trusting) == master.state
                await connection.close()
            for stranger in (others, None):
                async with dialer(tls=stranger) as here:
                    with pytest.raises(ConnectionLost):
                        await here.connect(master.address)

    run(story)


def test_status_is_json() -> None:
    """What is answered is JSON to any client."""

    async def story() -> None:
        async with Master() as master:
            reader, writer = await raw(master.address)
            writer.write(f"GET /v1/status HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode())
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")
            assert b"content-type: application/json" in head.lower()
            assert json.loads(body) == {"state": "running", "step": 7}
            writer.close()

    run(story)
