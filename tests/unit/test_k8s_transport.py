"""The transport over real sockets: credentials from a kubeconfig, answers of every kind, watches that are cut or frozen."""

from __future__ import annotations

import asyncio
import contextlib
import json
import urllib.parse
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from dlrover_backends.k8s.errors import Busy, Expired, Forbidden, Unauthorized, Unreachable
from dlrover_backends.k8s.transport import Transport
from dlrover_core.errors import SpecError

pytestmark = pytest.mark.slow_loop(reason="the client library reads certificates and YAML where it is called")
PODS = "/api/v1/namespaces/ml/pods"
BOUND_S = 60.0


def answer(status: int, body: Any, *headers: str) -> bytes:
    """An HTTP answer."""
    raw = body.encode() if isinstance(body, str) else json.dumps(body).encode()
    lines = (f"HTTP/1.1 {status} X", f"Content-Length: {len(raw)}", "Connection: close", *headers)
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + raw


def stream(*chunks: bytes, whole: bool) -> bytes:
    """An answer in chunks, to its end or cut off."""
    body = b"".join(b"%x\r\n%s\r\n" % (len(one), one) for one in chunks)
    return b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + body + (b"0\r\n\r\n" if whole else b"")


class Server:
    """Answers in order; an empty one is none at all. ``asked``: the heads of requests."""

    def __init__(self, *answers: bytes, hold: bool = False) -> None:
        self.answers, self.asked, self.hold = list(answers), list[str](), hold
        self.over = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, one answer."""
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            self.asked.append((await reader.readuntil(b"\r\n\r\n")).decode())
            writer.write(self.answers.pop(0))
            await writer.drain()
            if self.hold:
                await self.over.wait()
        writer.close()


@contextlib.asynccontextmanager
async def serving(server: Server, folder: Path) -> AsyncIterator[Transport]:
    """A transport that reaches the server by a kubeconfig."""
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    write_config(folder, port, "t1")
    transport = Transport(str(folder / "config"))
    try:
        yield transport
    finally:
        await transport.close()
        server.over.set()
        listening.close()


def write_config(folder: Path, port: int, token: str) -> None:
    """A kubeconfig with one context."""
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "c",
        "clusters": [{"name": "k", "cluster": {"server": f"http://127.0.0.1:{port}"}}],
        "users": [{"name": "u", "user": {"token": token}}],
        "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u", "namespace": "ml"}}],
    }
    (folder / "config").write_text(json.dumps(config), encoding="utf-8")


def tell(story: Callable[[], Awaitable[None]]) -> None:
    """Run a story within a bound."""
    asyncio.run(asyncio.wait_for(story(), BOUND_S))


def test_a_request(tmp_path: Path) -> None:
    """The token and namespace are the kubeconfig's, the query is encoded, and the answer is raw JSON."""

    async def story() -> None:
        server = Server(answer(200, {"items": [{"a": 1}]}))
        async with serving(server, tmp_path) as api:
            assert await api.ask("GET", PODS, query={"labelSelector": "a=b,c=d"}) == {"items": [{"a": 1}]}
            assert api.namespace == "ml"
        head = urllib.parse.unquote(server.asked[0])
        assert head.startswith(f"GET {PODS}?labelSelector=a=b,c=d HTTP/1.1")
        assert "authorization: bearer t1" in head.lower()

    tell(story)


def test_a_token_that_has_run_out_is_read_anew(tmp_path: Path) -> None:
    """After 401 the credentials are read again, once: a plugin or another process may have made new ones."""

    async def story() -> None:
        refused = answer(401, {"reason": "Unauthorized", "message": "Unauthorized"})
        server = Server(answer(200, {}), refused, answer(200, {"n": 2}), refused, refused)
        async with serving(server, tmp_path) as api:
            await api.ask("GET", PODS)
            text = (tmp_path / "config").read_text(encoding="utf-8")
            (tmp_path / "config").write_text(text.replace('"t1"', '"t2"'), encoding="utf-8")
            assert await api.ask("GET", PODS) == {"n": 2}
            with pytest.raises(Unauthorized):
                await api.ask("GET", PODS)
        assert ["t2" in one for one in server.asked] == [False, False, True, True, True]

    tell(story)


@pytest.mark.parametrize(
    ("raw", "error"),
    [
        (answer(429, "Too many requests, please try again later.\n", "Retry-After: 1"), Busy),
        (answer(403, {"reason": "Forbidden", "message": "no"}), Forbidden),
        (answer(410, {"reason": "Expired", "message": "old"}), Expired),
        (answer(200, "<html>a proxy</html>"), Unreachable),
        (answer(200, {"a": "b"})[:-3], Unreachable),
        (b"", Unreachable),
    ],
)
def test_what_is_no_good_answer(tmp_path: Path, raw: bytes, error: type[Exception]) -> None:
    """A refusal, plain text, a page of a proxy, half an answer and none at all are errors of ours."""

    async def story() -> None:
        async with serving(Server(*[raw] * 3), tmp_path) as api:
            with pytest.raises(error):
                await api.ask("GET", PODS)

    tell(story)


def events(*numbers: int) -> bytes:
    """Lines of a watch."""
    return b"".join(
        json.dumps({"type": "ADDED", "object": {"n": one, "x": "y" * 100}}).encode() + b"\n" for one in numbers
    )


@pytest.mark.parametrize("whole", [True, False])
def test_a_watch_however_it_is_cut_into_chunks(tmp_path: Path, whole: bool) -> None:
    """Events arrive whole; a clean end is an end, and a stream that is cut is an error, after the events before it."""

    async def story() -> None:
        raw, seen = events(1, 2, 3), list[int]()
        half = raw if whole else raw[:-9]
        server = Server(stream(half[:50], half[50:160], half[160:], whole=whole))
        async with serving(server, tmp_path) as api:
            with contextlib.nullcontext() if whole else pytest.raises(Unreachable):
                async for event in api.watch(PODS, {"resourceVersion": "7"}, 30.0):
                    seen.append(event["object"]["n"])
        assert seen == ([1, 2, 3] if whole else [1, 2])
        assert "resourceVersion=7&watch=1" in server.asked[0]

    tell(story)


def test_a_frozen_watch_is_noticed(tmp_path: Path) -> None:
    """A connection that stays open and says nothing is an error after the read time-out."""

    async def story() -> None:
        async with serving(Server(stream(events(1), whole=False), hold=True), tmp_path) as api:
            with pytest.raises(Unreachable, match="Timeout"):
                async for _ in api.watch(PODS, {}, 0.2):
                    pass

    tell(story)


def test_closing_ends_open_watches(tmp_path: Path) -> None:
    """Who reads from a watch when the transport is closed gets an error, and is not left to wait for ever."""

    async def story() -> None:
        async with serving(Server(stream(events(1), whole=False), hold=True), tmp_path) as api:
            watch = api.watch(PODS, {}, BOUND_S)
            await anext(watch)
            reading = asyncio.ensure_future(anext(watch))
            await asyncio.sleep(0)
            await api.close()
            with pytest.raises(Unreachable, match="closed on this side"):
                await asyncio.wait_for(reading, BOUND_S / 4)

    tell(story)


def test_a_watch_outlives_requests_that_are_refused_together(tmp_path: Path) -> None:
    """Credentials that have run out are renewed once, however many requests meet that, and the open watch goes on."""

    async def story() -> None:
        go_on = asyncio.Event()
        refusals, renewed = 0, 0

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal refusals, renewed
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                if "watch=1" in head:
                    writer.write(stream(events(1), whole=False))
                    await go_on.wait()
                    writer.write(stream(events(2), whole=True).partition(b"\r\n\r\n")[2])
                else:
                    old = "bearer t1" in head.lower()
                    refusals, renewed = refusals + old, renewed + (not old)
                    writer.write(answer(401, {"reason": "Unauthorized"}) if old else answer(200, {}))
                await writer.drain()
            writer.close()

        server = Server()
        server.serve = serve  # type: ignore[method-assign]
        async with serving(server, tmp_path) as api:
            watch = api.watch(PODS, {}, BOUND_S)
            await anext(watch)
            text = (tmp_path / "config").read_text(encoding="utf-8")
            (tmp_path / "config").write_text(text.replace('"t1"', '"t2"'), encoding="utf-8")
            await asyncio.gather(*(api.ask("GET", PODS) for _ in range(4)))
            assert (refusals, renewed) == (4, 4)
            reading = asyncio.ensure_future(anext(watch))
            await asyncio.sleep(0)
            go_on.set()
            assert (await asyncio.wait_for(reading, BOUND_S / 4))["object"]["n"] == 2
            await watch.aclose()

    tell(story)


def test_a_refused_watch(tmp_path: Path) -> None:
    """A watch that the server refuses is its error."""

    async def story() -> None:
        async with serving(Server(answer(410, {"reason": "Expired", "message": "old"})), tmp_path) as api:
            with pytest.raises(Expired):
                async for _ in api.watch(PODS, {}, 5.0):
                    pass

    tell(story)


@pytest.mark.parametrize(
    ("text", "said"), [(None, "is not there"), ("a: b", "cannot be used"), ("{", "cannot be used")]
)
def test_wrong_kubeconfigs(tmp_path: Path, text: str | None, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kubeconfig that is missing or none says which file, and what to do."""
    if text is not None:
        (tmp_path / "config").write_text(text, encoding="utf-8")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)

    async def story() -> None:
        with pytest.raises(SpecError, match=said):
            await Transport().ask("GET", PODS)

    tell(story)
