"""What people ask of a master, and a server that is none or means harm: whatever it answers, a bounded amount is taken."""

from __future__ import annotations

import asyncio
import gzip
import json
import resource
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from dlrover_adapters.http import client
from dlrover_adapters.http.client import NotAMaster, Unanswered, fetch_status, send_command
from dlrover_core.errors import MalformedMessage, Refused

TOKEN = "the-token-of-this-job"
BOUND_S = 30.0
KIB = 1024

Answer = Callable[[asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def server(answer: Answer, status: str = "200 OK", **headers: str) -> AsyncIterator[str]:
    """Whoever asks gets this."""

    async def one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            told = {"content_type": "application/json", "connection": "close", **headers}
            lines = [f"HTTP/1.1 {status}", *(f"{name.replace('_', '-')}: {value}" for name, value in told.items())]
            writer.write("\r\n".join([*lines, "", ""]).encode())
            await answer(writer)
        writer.close()

    async with await asyncio.start_server(one, "127.0.0.1", 0) as listener:
        host, port = listener.sockets[0].getsockname()[:2]
        yield f"{host}:{port}"


def told(story: Callable[[], Awaitable[None]]) -> None:
    """In an event loop of its own, within a bound."""
    asyncio.run(asyncio.wait_for(story(), BOUND_S))


def says(*pieces: bytes) -> Answer:
    """In so many segments."""

    async def answer(writer: asyncio.StreamWriter) -> None:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)

    return answer


def test_a_status_without_end_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that goes on and on is left at the bound, and no more than that is in memory."""
    monkeypatch.setattr(client, "STATUS_BYTES_MAX", 256 * KIB)
    sent = [0]

    async def endless(writer: asyncio.StreamWriter) -> None:
        while True:
            writer.write(b" " * 64 * KIB)
            sent[0] += 64 * KIB
            await writer.drain()

    async def story() -> None:
        async with server(endless) as address:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            with pytest.raises(NotAMaster, match="is no dlrover master: it answers more than 262,144 bytes"):
                await fetch_status(address, TOKEN, timeout_s=BOUND_S)
            assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * KIB
        assert sent[0] < 64 * KIB * KIB

    told(story)


@pytest.mark.parametrize(
    ("body", "headers", "says_what"),
    [
        (b"[" * 200_000, {}, "its answer is no JSON"),
        (b"[]", {}, "it answers list, not a map"),
        (b"{", {}, "its answer is no JSON"),
        (b"\xff\xfe{}", {}, "its answer is no JSON"),
        (b"<html>", {"content_type": "text/html"}, "it answers with text/html"),
        (gzip.compress(b" " * 10_000_000), {"content_encoding": "gzip"}, "its answer is no JSON"),
    ],
    ids=["deep", "a list", "cut off", "no UTF-8", "HTML", "compressed"],
)
def test_what_is_no_status(body: bytes, headers: dict[str, str], says_what: str) -> None:
    """Whatever comes in place of a status is an error in words."""

    async def story() -> None:
        async with server(says(body), **headers) as address:
            with pytest.raises(NotAMaster, match=says_what):
                await fetch_status(address, TOKEN)

    told(story)


def test_an_answer_in_several_segments() -> None:
    """A long reason reaches the user whole, however the network cuts it."""
    reason = "no node of this job is called " + "x" * 5000
    raw = json.dumps({"reason": reason}).encode()
    pieces = [raw[at : at + 100] for at in range(0, len(raw), 100)]

    async def story() -> None:
        for status, kind in (("409 Conflict", Refused), ("400 Bad Request", MalformedMessage)):
            async with server(says(*pieces), status) as address:
                with pytest.raises(kind, match=reason):
                    await send_command(address, TOKEN, {"command": "stop"})
        async with server(says(b'{"seq"', b": 1", b"2}")) as address:
            assert await send_command(address, TOKEN, {"command": "stop"}) == 12

    told(story)


@pytest.mark.parametrize("answer", [{}, {"seq": "1"}, {"seq": None}, ["seq"], {"seq": 1, "more": "x" * 100_000}])
def test_what_is_no_answer_to_a_command(answer: Any) -> None:
    """The command was sent: that nobody knows what became of it is said."""

    async def story() -> None:
        async with server(says(json.dumps(answer).encode())) as address:
            with pytest.raises(Unanswered, match="gave no answer"):
                await send_command(address, TOKEN, {"command": "stop"})

    told(story)
