"""The HTTP transport over real sockets: who gets in, what is carried, and that nobody can hold the others up."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import ssl
import subprocess

import pytest
from http_ends import LIMITS, TOKEN, Master, dialer, raw, run, upgraded
from structlog.testing import capture_logs

from dlrover_adapters.http import (
    HttpListener,
    HttpTransport,
    adopt,
    bind,
    fetch_status,
)
from dlrover_core.errors import ConnectionLost, TokenRefused
from dlrover_core.runtime.transport import FRAME_BYTES_MAX, Connection

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
