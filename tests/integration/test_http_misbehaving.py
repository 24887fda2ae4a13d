"""Peers of the transport that misbehave: garbage, floods, half-open connections, and deaths without a word."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import struct
import sys
from types import SimpleNamespace
from typing import Any, cast

import pytest
from http_ends import LIMITS, TOKEN, Master, dialer, ended, raw, run, upgraded
from structlog.testing import capture_logs

from dlrover_adapters.http import HttpConnection, HttpLimits
from dlrover_core.errors import ConnectionLost
from dlrover_core.runtime.transport import FRAME_BYTES_MAX


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


@pytest.mark.parametrize(("cause", "ended"), [(ConnectionResetError(), True), (OSError(110, "timed out"), False)])
def test_who_waits_for_a_peer_to_read_is_told_who_ended_it(cause: OSError, ended: bool) -> None:
    """The transport (aiohttp) tells it as the cause of a plain `ConnectionError`."""

    async def send_bytes(_: bytes) -> None:
        raise ConnectionError("Connection lost") from cause

    async def story() -> None:
        socket_ = SimpleNamespace(send_bytes=send_bytes, close_code=None, exception=lambda: None)
        connection = HttpConnection(cast("Any", socket_), "peer", HttpLimits(), cast("Any", None))
        with pytest.raises(ConnectionLost) as lost:
            await connection.send(b"x")
        assert lost.value.ended is ended

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
