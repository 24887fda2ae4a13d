"""A real master with hostile peers at its door: others are served, the log stays short, memory stays flat."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest
from hostile_house import MEBIBYTE, SCRIPTS, TOKEN, House, Stranger, house, run

from dlrover_adapters.http import HttpDialer, fetch_status
from dlrover_core.errors import TokenRefused


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
