"""The TCP proxy for chaos: forwards faithfully until told otherwise, and then breaks exactly what it was told to."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator

import pytest

from dlrover_core.testing import Proxy

BOUND_S = 10.0
SILENT_S = 0.1


class Server:
    """Answers every line with itself in capitals, and keeps what it heard."""

    def __init__(self) -> None:
        self.heard: list[str] = []
        self.address = ""
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> Server:  # noqa: PYI034  # Self needs 3.11
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.address = "{}:{}".format(*self._server.sockets[0].getsockname())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while line := await reader.readline():
                self.heard.append(line.decode().strip())
                writer.write(line.upper())
        writer.close()


class Client:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    def send(self, line: str) -> None:
        """Say a line."""
        self._writer.write(f"{line}\n".encode())

    async def answer(self) -> str:
        """The next line; raises ConnectionError where the connection was reset, is empty where it ended well."""
        return (await asyncio.wait_for(self._reader.readline(), BOUND_S)).decode().strip()

    async def asks(self, line: str) -> str:
        """Say a line and hear the answer."""
        self.send(line)
        return await self.answer()

    async def silent(self) -> bool:
        """No answer comes for a while."""
        done, _ = await asyncio.wait([asyncio.ensure_future(self._reader.read(1))], timeout=SILENT_S)
        return not done

    def end(self) -> None:
        """Say that nothing more comes."""
        self._writer.write_eof()


@contextlib.asynccontextmanager
async def connected(address: str) -> AsyncIterator[Client]:
    """A client of whoever listens there."""
    host, port = address.rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield Client(reader, writer)
    finally:
        writer.transport.abort()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def eventually(holds: object) -> None:
    """Yield to the loop until it ``holds``, within the bound."""
    assert callable(holds)

    async def watch() -> None:
        while not holds():  # noqa: ASYNC110  # what is waited for is in another's hands
            await asyncio.sleep(0)

    await asyncio.wait_for(watch(), BOUND_S)


def test_forwards_and_counts() -> None:
    """Bytes go both ways unchanged and are counted, on every connection, and an end of one side is passed on."""

    async def story() -> None:
        async with Server() as server, Proxy(server.address) as proxy:
            async with connected(proxy.address) as one, connected(proxy.address) as two:
                assert await one.asks("hello") == "HELLO"
                assert await two.asks("x" * 50_000) == "X" * 50_000
                one.end()
                assert await one.answer() == ""
                assert await two.asks("still here") == "STILL HERE"
            await eventually(lambda: proxy.connections == 0)
            assert (proxy.accepted, proxy.cuts) == (2, 0)
            assert proxy.bytes_up == proxy.bytes_down == 6 + 50_001 + 11

    asyncio.run(story())


def test_refuse_and_heal() -> None:
    """Refusing resets what is open and refuses what is new; healed, the proxy is back at the same address."""

    async def story() -> None:
        async with Server() as server, Proxy(server.address) as proxy, connected(proxy.address) as client:
            assert await client.asks("a") == "A"
            proxy.refuse()
            with pytest.raises(ConnectionError):
                await client.answer()
            with pytest.raises(ConnectionRefusedError):
                async with connected(proxy.address):
                    pass
            proxy.heal()
            async with connected(proxy.address) as again:
                assert await again.asks("b") == "B"
            assert (proxy.cuts, server.heard) == (1, ["a", "b"])

    asyncio.run(story())


def test_cut() -> None:
    """A cut resets what is open, what was never served too, and welcomes what is new."""

    async def story() -> None:
        async with Server() as server, Proxy(server.address) as proxy, connected(proxy.address) as client:
            assert await client.asks("a") == "A"
            proxy.cut()
            with pytest.raises(ConnectionError):
                await client.answer()
            async with connected(proxy.address) as again:
                assert await again.asks("b") == "B"

    asyncio.run(story())


def test_blocked_both_ways() -> None:
    """A partition is silence: no reset, nothing arrives; healed, what was held arrives late and whole."""

    async def story() -> None:
        async with Server() as server, Proxy(server.address) as proxy, connected(proxy.address) as client:
            assert await client.asks("a") == "A"
            proxy.block()
            client.send("b")
            async with connected(proxy.address) as late:
                late.send("c")
                assert await late.silent()
                assert server.heard == ["a"]
                proxy.heal()
                assert await client.answer() == "B"
            await eventually(lambda: len(server.heard) == 3)

    asyncio.run(story())


def test_blocked_up() -> None:
    """Blocked up, the target hears nothing and can still be heard."""

    async def story() -> None:
        async with Server() as server, Proxy(server.address) as proxy, connected(proxy.address) as client:
            assert await client.asks("a") == "A"
            proxy.block(down=False)
            client.send("b")
            assert await client.silent()
            assert server.heard == ["a"]

    asyncio.run(story())


def test_blocked_down() -> None:
    """Blocked down, the target hears and acts and nobody learns of it; each call says anew which ways are shut."""

    async def story() -> None:
        async with Server() as server, Proxy(server.address) as proxy, connected(proxy.address) as client:
            proxy.block(up=False)
            client.send("b")
            await eventually(lambda: server.heard == ["b"])
            proxy.block(down=False)
            assert await client.answer() == "B"
            client.send("c")
            assert await client.silent()
            assert server.heard == ["b"]

    asyncio.run(story())


@pytest.mark.parametrize("linger_s", [0.0, 0.02])
def test_lost_acknowledgement(linger_s: float) -> None:
    """The request arrives and is carried out, its answer is lost, its connection reset; what follows is well."""

    async def story() -> None:
        async with Server() as server, Proxy(server.address) as proxy, connected(proxy.address) as bystander:
            assert await bystander.asks("a") == "A"
            lost = proxy.cut_after_request(2, linger_s=linger_s)
            async with connected(proxy.address) as client:
                assert await client.asks("b") == "B"
                assert not lost.done()
                client.send("c")
                await asyncio.wait_for(lost, BOUND_S)
                with pytest.raises(ConnectionError):
                    await client.answer()
            assert server.heard == ["a", "b", "c"]
            assert await bystander.asks("d") == "D"
            assert proxy.cuts == 1
            forgiven = proxy.cut_after_request()
            proxy.heal()
            assert forgiven.cancelled()
            assert await bystander.asks("e") == "E"

    asyncio.run(story())


def test_lost_acknowledgement_of_a_large_request() -> None:
    """Bursts smaller than asked for do not count: a protocol's pings go by."""

    async def story() -> None:
        async with Server() as server, Proxy(server.address) as proxy, connected(proxy.address) as client:
            lost = proxy.cut_after_request(at_least_bytes=100, linger_s=0.0)
            assert await client.asks("ping") == "PING"
            client.send("x" * 100)
            await asyncio.wait_for(lost, BOUND_S)
            assert server.heard == ["ping", "x" * 100]

    asyncio.run(story())


def test_lost_acknowledgement_of_a_request_in_pieces() -> None:
    """A request that is larger than one read arrives whole before its connection is cut."""

    async def story() -> None:
        async with Server() as server, Proxy(server.address) as proxy, connected(proxy.address) as client:
            lost = proxy.cut_after_request()
            client.send("x" * 60_000)
            client.send("y" * 60_000)
            await asyncio.wait_for(lost, BOUND_S)
            assert [len(one) for one in server.heard] == [60_000, 60_000]

    asyncio.run(story())


def test_lost_acknowledgement_of_one_who_never_answers() -> None:
    """A target that does not answer is not waited for longer than a second."""

    async def story() -> None:
        taken: list[asyncio.StreamWriter] = []
        mute = await asyncio.start_server(lambda reader, writer: taken.append(writer), "127.0.0.1", 0)
        async with (
            mute,
            Proxy("{}:{}".format(*mute.sockets[0].getsockname())) as proxy,
            connected(proxy.address) as client,
        ):
            lost = proxy.cut_after_request()
            client.send("a")
            await asyncio.wait_for(lost, BOUND_S)
        for one in taken:
            one.close()

    asyncio.run(story())


def test_dead_target() -> None:
    """Where the target is not there, clients are told by a reset."""

    async def story() -> None:
        async with Server() as server:
            address = server.address
        async with Proxy(address) as proxy, connected(proxy.address) as client:
            with pytest.raises(ConnectionError):
                await client.answer()
            assert proxy.cuts == 0

    asyncio.run(story())


def test_end_cuts_what_is_open() -> None:
    """At the end of its block nothing of it is left: neither connections nor its port, nor a wait for a lost answer."""

    async def story() -> None:
        async with Server() as server:
            async with Proxy(server.address) as proxy, connected(proxy.address) as client:
                assert await client.asks("a") == "A"
                lost, forgotten = proxy.cut_after_request(9), proxy.cut_after_request(9)
                assert lost.cancelled()
                address = proxy.address
                await proxy.__aexit__(None, None, None)
                assert forgotten.cancelled()
                with pytest.raises(ConnectionError):
                    await client.answer()
                with pytest.raises(ConnectionRefusedError):
                    async with connected(address):
                        pass
            assert len(asyncio.all_tasks()) <= 2

    asyncio.run(story())


@pytest.mark.parametrize("target", ["", "host", ":80", "host:", "host:port"])
def test_target_is_checked(target: str) -> None:
    """A target that is no address is said at once."""
    with pytest.raises(ValueError, match=re.escape(f"{target!r} is not HOST:PORT")):
        Proxy(target)


def test_request_number_is_checked() -> None:
    """There is no zeroth request to lose."""

    async def story() -> None:
        async with Proxy("127.0.0.1:1") as proxy:
            with pytest.raises(ValueError, match="the 0-th request"):
                proxy.cut_after_request(0)

    asyncio.run(story())
