"""TLS between agents, operators and masters: who is let in, who is told what, and that nobody hangs in the door."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import ssl
import subprocess
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from commands import dlrover
from hosts_net import TOKEN, Host, loopback
from running import SCRIPTS, eventually
from structlog.testing import capture_logs

from dlrover_adapters.http import HttpDialer, HttpLimits, HttpListener, bind, fetch_status
from dlrover_adapters.http.client import send_command
from dlrover_adapters.http.tls import Untrusted, check, shown, trusting
from dlrover_core.errors import ConnectionLost, TokenRefused
from dlrover_core.runtime.transport import Connection

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

DATA = Path(__file__).parent / "data"
CA, OTHER, MASTER, ELSEWHERE, EXPIRED = (
    str(DATA / f"{name}.pem") for name in ("ca", "other", "master", "elsewhere", "expired")
)
STEPS, WHERE = (str(SCRIPTS / name) for name in ("steps.py", "where.py"))
QUICK_END = ("--set", "stop_grace_s=5")
BOUND_S = 30.0

pytestmark = pytest.mark.timeout(120)

# ---- through the command line


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[list[Host]]:
    """Two, nothing running."""
    with loopback() as net, Host(net, "a", tmp_path) as a, Host(net, "b", tmp_path) as b:
        yield [a, b]


def at(host: Host) -> str:
    """Where masters at this host listen."""
    return f"{host.address}:{host.net.port}"


def c10d(host: Host) -> tuple[str, ...]:
    """What both say: meet at ``host``."""
    return ("--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", at(host), "--rdzv-id", "many", *QUICK_END)


def operate(host: Host, *words: str) -> tuple[int, str]:
    """Run a command on the job there; its exit status, and what it said."""
    line = [*words[:1], "many", "--state-dir", str(host.state), *words[1:]]
    done = dlrover(line, {**os.environ, "DLROVER_TOKEN": TOKEN})
    return done.returncode, done.stdout + done.stderr


def test_a_job_over_tls(hosts: list[Host]) -> None:
    """Two hosts meet and train; a killed agent is replaced at once; operators need the CA too; everybody ends with 0."""
    a, b = hosts
    a.start(*c10d(a), "--tls-cert", MASTER, "--tls-ca", CA, STEPS)
    a.says("job many")
    b.start(*c10d(a), "--tls-ca", CA, STEPS)
    a.until(1, 2)
    with contextlib.suppress(ProcessLookupError):
        b.one("dlrover-agent").kill()
    assert "the connection ended" not in a.until(2, 2).job.reason
    status, said = operate(a, "suspend")
    assert status == 6
    assert f"the master at {at(a)} speaks only TLS; name the CA of its certificate with --tls-ca" in said
    assert a.control_log().count('event="no TLS"') == 1
    assert "it does not encrypt; it needs --tls-ca" in a.control_log()
    status, said = operate(a, "suspend", "--tls-ca", OTHER, "--master", at(a))
    assert (status, "its certificate is not of the CA in --tls-ca" in said) == (6, True), said
    assert "it hung up; where it does not trust our certificate" in eventually(
        lambda: a.control_log() if a.control_log().count('event="no TLS"') == 2 else "", "the master's word of it"
    )
    status, said = operate(a, "suspend", "--keep-nodes", "--tls-ca", CA, "--wait")
    assert status == 0, said
    status, said = operate(a, "resume", "--tls-ca", CA, "--wait")
    assert status == 0, said
    for host in hosts:
        host.finish()
    assert (a.ended(), b.ended()) == (0, 0)
    assert [host.left() for host in hosts] == [[], []]


def test_who_is_turned_away(hosts: list[Host]) -> None:
    """By `dlrover master` with a certificate: who has another CA, none at all, or no token; each is told what to do."""
    master, host = hosts
    line = ("--nnodes", "1", "--job-id", "many", "--bind", at(master))
    master.start("master", *line, "--tls-cert", MASTER, "--tls-key", MASTER, program="dlrover")
    master.says("--tls-ca CA.pem SCRIPT")
    follow = ("--master", at(master), *QUICK_END)
    for flags, token, status, words in (
        (("--tls-ca", OTHER), TOKEN, 2, "not of the CA in --tls-ca"),
        ((), TOKEN, 2, "speaks only TLS; name the CA of its certificate with --tls-ca"),
        (("--tls-ca", CA), "of-nobody", 77, "the job token is not this job's"),
    ):
        host.start(*follow, *flags, WHERE, token=token)
        assert host.ended() == status, host.said()
        assert words in host.said()
        assert host.left() == []
    host.start(*follow, "--tls-ca", CA, WHERE)
    assert (host.ended(), master.ended()) == (0, 0)


def test_masters_that_are_not_what_is_expected(hosts: list[Host]) -> None:
    """A certificate for another name, one that has expired, none at all: no host is let near, and says why."""
    master, host = hosts
    line = ("--nnodes", "1", "--job-id", "many", "--bind", at(master))
    for flags, words in (
        (("--tls-cert", ELSEWHERE), "IP address mismatch, certificate is not valid for '127.0.0.2'"),
        (("--tls-cert", EXPIRED), "has expired; make a new one, and check this host's clock"),
        ((), "it speaks no TLS; leave --tls-ca out here, or start the masters with --tls-cert"),
    ):
        master.start("master", *line, *flags, program="dlrover")
        master.says("run this on each host")
        host.start("--master", at(master), "--tls-ca", CA, *QUICK_END, WHERE)
        assert host.ended() == 2, host.said()
        assert words in host.said()
        master.signal(signal.SIGINT)
        assert master.ended() == 130


def test_a_host_that_cannot_show_what_it_must(hosts: list[Host]) -> None:
    """HOST itself says what is wrong, at once: no certificate, or one for another name."""
    a, _ = hosts
    for flags, words in (
        (("--tls-ca", CA), f"tls-cert: missing: this host runs the masters, of {at(a)}"),
        (("--tls-ca", CA, "--tls-cert", ELSEWHERE), "would not be taken: IP address mismatch"),
        (("--tls-ca", CA, "--tls-cert", MASTER, "--tls-key", ELSEWHERE), "is not the key of the certificate"),
    ):
        a.start(*c10d(a), *flags, WHERE)
        assert a.ended() == 2
        assert words in a.said()
        assert a.left() == []


def test_the_lines_of_the_documentation(tmp_path: Path) -> None:
    """They make certificates that work, for the name and the address that they name, under newer Pythons' strict rules too."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not here")
    page = (Path(__file__).parents[2] / "docs" / "running-on-many-hosts.md").read_text()
    lines = next(one for one in page.split("```") if "openssl req -x509" in one)
    subprocess.run(["/bin/sh", "-ec", lines], cwd=tmp_path, check=True, capture_output=True, timeout=BOUND_S)
    certificate, key, ca = (str(tmp_path / name) for name in ("host1.pem", "host1.key", "ca.pem"))
    for name in ("host1", "10.0.0.1"):
        check(certificate, key, ca, name)
    strictly = trusting(ca)
    strictly.verify_flags |= ssl.VERIFY_X509_STRICT
    assert (tmp_path / "host1.key").stat().st_mode & 0o77 == 0

    async def story() -> None:
        async with Listening(certificate, key) as address:
            host, _, port = address.rpartition(":")
            dial = asyncio.open_connection(host, int(port), ssl=strictly, server_hostname="host1")
            _, writer = await dial
            writer.close()

    run(story)


# ---- the transport alone


def run(story: Callable[[], Awaitable[None]]) -> None:
    """Tell a story in an event loop of its own, within a bound."""

    async def told() -> None:
        await asyncio.wait_for(story(), BOUND_S)

    asyncio.run(told())


class Listening:
    """A master's listener that shows a certificate and keeps what comes."""

    def __init__(self, certificate: str = MASTER, key: str = "", **limits: float) -> None:
        tls = shown(certificate, key)
        self.listener = HttpListener(bind(), TOKEN, limits=HttpLimits(close_s=0.3)._replace(**limits), tls=tls)
        self.came: asyncio.Queue[Connection] = asyncio.Queue()

    async def _accept(self, connection: Connection) -> None:
        self.came.put_nowait(connection)
        await asyncio.Event().wait()

    async def __aenter__(self) -> str:
        await self.listener.serve(self._accept, lambda: {"state": "running"}, self._obey)
        return self.listener.address

    @staticmethod
    async def _obey(_asked: object) -> int:
        return 7

    async def __aexit__(self, *_: object) -> None:
        await self.listener.close()


@contextlib.asynccontextmanager
async def dialer(tls: ssl.SSLContext | None) -> AsyncIterator[HttpDialer]:
    """An agent's end."""
    found = HttpDialer(TOKEN, tls=tls)
    try:
        yield found
    finally:
        await found.close()


def test_an_agent_that_dies_is_seen_as_dead() -> None:
    """Its kernel's word counts as it does without TLS: the connection has ended, and is no silence."""

    async def story() -> None:
        listening = Listening()
        async with listening as address:
            host, _, port = address.rpartition(":")
            reader, writer = await asyncio.open_connection(host, int(port), ssl=trusting(CA))
            lines = ["GET /v1/agent HTTP/1.1", f"Host: {address}", "Upgrade: websocket", "Connection: Upgrade"]
            lines += ["Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==", "Sec-WebSocket-Version: 13"]
            writer.write("\r\n".join([*lines, f"Authorization: Bearer {TOKEN}", "", ""]).encode())
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 101 ")
            there = await listening.came.get()
            writer.transport.abort()
            with pytest.raises(ConnectionLost) as lost:
                await there.receive()
            assert lost.value.ended

    run(story)


def test_agents_are_told_in_the_log() -> None:
    """A dialer says what it does not trust, as a connection that may be tried again; nothing is asked about a hung-up one."""

    async def story() -> None:
        for certificate, tls, words in (
            (EXPIRED, trusting(CA), "has expired"),
            (MASTER, trusting(OTHER), "not of the CA"),
            (ELSEWHERE, trusting(CA), "IP address mismatch"),
            (MASTER, None, "speaks only TLS"),
        ):
            async with Listening(certificate) as address, dialer(tls) as here:
                with capture_logs() as logs, pytest.raises(Untrusted, match=words):
                    await here.connect(address)
                assert [words in one["reason"] for one in logs if one["event"] == "master not trusted"] == [True]
                with pytest.raises(Untrusted, match=words):
                    await fetch_status(address, TOKEN, tls=tls)
                with pytest.raises(Untrusted, match=words):
                    await send_command(address, TOKEN, {}, tls=tls)

    run(story)


def test_the_token_is_needed_all_the_same() -> None:
    """Encryption lets nobody in."""

    async def story() -> None:
        async with Listening() as address:
            assert await fetch_status(address, TOKEN, tls=trusting(CA)) == {"state": "running"}
            assert await send_command(address, TOKEN, {"command": "stop"}, tls=trusting(CA)) == 7
            for token in ("", "of-somebody-else"):
                with pytest.raises(TokenRefused):
                    await fetch_status(address, token, tls=trusting(CA))

    run(story)


def test_nobody_hangs_in_the_door() -> None:
    """Who begins to encrypt and stops is cut in time, and makes room for others before that; each is one line."""

    async def story() -> None:
        limits = {"strangers_max": 3, "handshake_s": 1.0}
        async with Listening(**limits) as address, dialer(trusting(CA)) as here:
            host, _, port = address.rpartition(":")
            with capture_logs() as logs:
                strangers = [await asyncio.open_connection(host, int(port)) for _ in range(5)]
                strangers[-1][1].write(b"\x16\x03\x01")
                connection = await here.connect(address)
                ends = [await reader.read() for reader, _ in strangers]
            assert ends == [b""] * 5
            reasons = [one["reason"] for one in logs if one["event"] == "connection cut: no handshake"]
            assert sorted(set(reasons)) == ["it took too long", "too many others wait"]
            assert len(reasons) == 5
            assert [one for one in logs if one["event"] == "no TLS"] == []
            await connection.send(b"still here")
            await connection.close()
            for _, writer in strangers:
                writer.close()

    run(story)
