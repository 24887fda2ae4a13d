"""`GET /v1/records` and the log that is read over it: real sockets, real masters, and peers that are none."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import struct
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, asynccontextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from unittest import mock

import pytest
import structlog
from structlog.testing import capture_logs
from tests.unit.life import three_deaths
from tools.etcd_cluster import Cluster

from dlrover_adapters.cli.main import main
from dlrover_adapters.http import HttpLimits, HttpListener, bind
from dlrover_adapters.http.log import HttpLog
from dlrover_adapters.http.tls import shown
from dlrover_core.errors import LogCorrupt, LogUnavailable, Refused, SchemaTooNew, SpecError, TokenRefused
from dlrover_core.job.job import ResumeJob, SuspendJob
from dlrover_core.job.state import CODEC
from dlrover_core.kernel.events import Record
from dlrover_core.kernel.log import Appended, EventLog, LeaderInfo
from dlrover_core.logs import open_log
from dlrover_core.logs.memory import MemoryLog
from dlrover_core.runtime import records as pages
from dlrover_core.runtime.master import Master
from dlrover_core.runtime.records import Records
from dlrover_core.spec import GroupSpec, JobSpec

TOKEN = "the-token-of-this-job"
BOUND_S = 30.0
DATA = Path(__file__).parent / "data"


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the environment, where readers look for it."""
    monkeypatch.setenv("DLROVER_TOKEN", TOKEN)


def run(story: Callable[[], Awaitable[None]]) -> None:
    """Tell a story in an event loop of its own, within a bound."""

    async def told() -> None:
        await asyncio.wait_for(story(), BOUND_S)

    asyncio.run(told())


class Leading:
    """A master of job `j`, which leads or stands by; nobody launches its nodes."""

    def __init__(self, event_log: EventLog, holder: str = "one", *, answers: bool = False, **limits: float) -> None:
        self.listener = HttpListener(bind(), TOKEN, job="j", limits=HttpLimits(close_s=0.3)._replace(**limits))
        self.at = self.listener.address
        self.master = Master(
            JobSpec("j", (GroupSpec(nodes_min=1, nodes_max=2),)),
            event_log=event_log,
            listener=self.listener,
            backend=None,
            wall=lambda: time.time_ns() // 1000,
            holder=holder,
            run_id="run-1",
            answers=answers,
        )
        self.task = asyncio.ensure_future(self.master.run())

    async def leads(self) -> Leading:
        """Wait until it does."""
        led = asyncio.ensure_future(self.master.led.wait())
        await asyncio.wait({self.task, led}, return_when=asyncio.FIRST_COMPLETED)
        assert led.done(), self.task
        return self

    async def toss(self, times: int = 1) -> None:
        """Something for the log: suspended and resumed in turn."""
        for _ in range(times):
            suspended = self.master.state.job.state == "suspended"
            await self.master.submit(ResumeJob("x") if suspended else SuspendJob("x"))

    async def end(self) -> None:
        """Without a hand-over."""
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


@asynccontextmanager
async def leading(event_log: EventLog | None = None, **limits: float) -> AsyncIterator[Leading]:
    """A master that leads."""
    found = Leading(event_log if event_log is not None else MemoryLog(CODEC), **limits)
    try:
        yield await found.leads()
    finally:
        await found.end()


async def all_of(log: EventLog, job: str = "j", after: int = 0) -> list[Record]:
    """What a log holds."""
    return [record async for record in log.read(job, after)]


async def raw(address: str, *lines: str) -> tuple[int, bytes]:
    """One request as it is written, and the answer."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write("\r\n".join([*lines, "Host: x", "Connection: close", "", ""]).encode())
    answer = await reader.read()
    writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), body


GET, AUTHORIZED = "GET /v1/records{} HTTP/1.1", f"Authorization: Bearer {TOKEN}"


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
def test_the_log_through_its_master_is_the_log(kind: str, tmp_path: Path) -> None:
    """Record for record, from any place, in pages of any size; and what else a log can be asked. It cannot be led."""

    async def story() -> None:
        where = "memory:" if kind == "memory" else f"sqlite://{tmp_path}/log.db"
        async with open_log(where) as event_log, leading(event_log) as one, open_log(f"http://{one.at}/j") as log:
            await one.toss(30)
            there = await all_of(event_log)
            for size in (1, 300, pages.PAGE_BYTES):
                with mock.patch("dlrover_adapters.http.log.PAGE_BYTES", size):
                    assert await all_of(log) == there
                    assert await all_of(log, after=7) == there[7:]
                    stored = [batch.payload async for batch in event_log.batches("j")]
                    assert [batch.payload async for batch in log.batches("j")] == stored
            assert await all_of(log, after=there[-1].seq) == []
            assert (await log.jobs(), await log.head("j")) == (["j"], there[-1].seq)
            assert await log.leader("j") == LeaderInfo(1, "one", one.at)
            assert (await log.latest_snapshot("j"), log.shared) == (None, False)
            with pytest.raises(SpecError, match="is for reading: nobody can lead job 'j' there"):
                await log.lead("j", "me")

    run(story)


def test_who_is_let_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """The token, in either header, once: the second is for proxies that keep the first. Another job's master is none of ours."""

    async def story() -> None:
        async with leading() as one:
            plain, other = f"X-DLRover-Token: {TOKEN}", "X-DLRover-Token: of-another-job"
            for headers, status in [
                ((AUTHORIZED,), 200),
                ((plain,), 200),
                (("Authorization: Bearer of-a-proxy", plain), 200),
                ((AUTHORIZED, other), 401),
                ((plain, plain), 401),
                ((AUTHORIZED, AUTHORIZED), 401),
                ((other,), 401),
                ((), 401),
            ]:
                assert (await raw(one.at, GET.format(""), *headers))[0] == status, headers
            assert (await raw(one.at, GET.format("?job=k"), AUTHORIZED))[0] == 421
            assert (await raw(one.at, "POST /v1/records HTTP/1.1", AUTHORIZED))[0] == 405
            async with open_log(f"http://{one.at}/k") as log:
                with pytest.raises(LogUnavailable, match="leads another job than 'k'"):
                    await all_of(log, "k")
            monkeypatch.setenv("DLROVER_TOKEN", "of-another-job")
            async with open_log(f"http://{one.at}/j") as log:
                with pytest.raises(TokenRefused, match="is not this job's"):
                    await all_of(log)
            monkeypatch.delenv("DLROVER_TOKEN")
            async with open_log(f"http://{one.at}/j") as log:
                with pytest.raises(TokenRefused, match="the job token is missing"):
                    await log.jobs()

    run(story)


def test_a_proxy_in_between(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that wants Authorization for itself, and takes it away: the token passes beside it."""
    monkeypatch.setenv("DLROVER_PROXY_AUTHORIZATION", "Bearer theirs")

    async def story() -> None:
        async with leading() as one:
            host, _, port = one.at.rpartition(":")

            async def proxied(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                lines = [line for line in head.split("\r\n") if not line.startswith("Authorization:")]
                if "Authorization: Bearer theirs" not in head:
                    writer.write(b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 0\r\n\r\n")
                else:
                    lines[0] = lines[0].replace("/api/proxy/v1/", "/v1/")
                    there, further = await asyncio.open_connection(host, int(port))
                    further.write("\r\n".join([lines[0], "Connection: close", *lines[1:]]).encode())
                    writer.write(await there.read())
                    further.close()
                writer.close()

            async with serving(proxied) as at:
                async with open_log(f"http://{at}/api/proxy/j") as log:
                    assert await all_of(log) == await all_of(one.master._log)
                monkeypatch.setenv("DLROVER_PROXY_AUTHORIZATION", "Bearer wrong")
                async with open_log(f"http://{at}/api/proxy/j") as log:
                    with pytest.raises(TokenRefused, match=r"the proxy at .* refused us .*DLROVER_PROXY_AUTHORIZATION"):
                        await all_of(log)

    run(story)


@pytest.mark.parametrize(
    ("query", "reason"),
    [
        ("?after=x", "after=x is no number of an event"),
        ("?after=-1", "after=-1 is no number"),
        ("?after=" + "9" * 40, "is no number of an event"),
        ("?limit=many", "limit=many is no number of bytes"),
        ("?wait=x", "wait=x is no number of seconds"),
        ("?wait=-1", "wait=-1 is no number"),
        ("?wait=nan", "wait=nan is no number"),
        ("?wait=inf", "wait=inf is no number"),
    ],
)
def test_what_makes_no_sense_is_refused(query: str, reason: str) -> None:
    """With 400, and which part it is."""

    async def story() -> None:
        async with leading() as one:
            status, body = await raw(one.at, GET.format(query), AUTHORIZED)
            assert (status, reason in json.loads(body)["reason"]) == (400, True), body

    run(story)


def test_a_log_that_is_shorter_than_what_was_read() -> None:
    """Whoever reads on in another log than before is told, and not left to wait."""

    async def story() -> None:
        async with leading() as one, open_log(f"http://{one.at}/j") as log:
            with pytest.raises(LogCorrupt, match=r"the log ends with event \d, but 99 was read before") as caught:
                await all_of(log, after=99)
            assert caught.value.seq == one.master.state.seq + 1
            async with aclosing(log.follow("j", 99)) as records:
                with pytest.raises(LogCorrupt):
                    await anext(records)

    run(story)


def test_following_waits_for_what_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several readers get every record once, in order, soon after it is there; one too many is sent away, and tries again."""
    monkeypatch.setattr(pages, "WAIT_S_MAX", 0.3)

    async def story() -> None:
        async with leading(readers_max=3) as one:

            async def reader() -> list[int]:
                found = list[int]()
                async with open_log(f"http://{one.at}/j") as log, aclosing(log.follow("j")) as records:
                    while len(found) < upto:
                        found.append((await anext(records)).seq)
                return found

            upto = one.master.state.seq + 20
            readers = [asyncio.ensure_future(reader()) for _ in range(5)]
            await one.toss(20)
            assert await asyncio.gather(*readers) == [list(range(1, upto + 1))] * 5
            handing = one.listener._handing
            assert handing is not None
            while handing._under_way:  # noqa: ASYNC110  # a reader's end is heard a moment later
                await asyncio.sleep(0.005)

    run(story)


def test_too_many_readers_are_told() -> None:
    """They may be served by another master, or later."""

    async def story() -> None:
        async with leading(readers_max=0) as one, open_log(f"http://{one.at}/j") as log:
            with pytest.raises(LogUnavailable, match="0 others read here already"):
                await all_of(log)

    run(story)


def test_a_reader_that_takes_nothing_is_cut(tmp_path: Path) -> None:
    """It holds a page, and a place among the readers, no longer than the limit says."""

    async def story() -> None:
        async with open_log(f"sqlite://{tmp_path}/log.db") as event_log, leading(event_log, send_s=0.2) as one:
            big = SuspendJob("x" * 400_000)
            for _ in range(3):
                with contextlib.suppress(Refused):
                    await one.master.submit(big)
                    await one.master.submit(ResumeJob("x" * 400_000))
            host, _, port = one.at.rpartition(":")
            reader, writer = await asyncio.open_connection(host, int(port), limit=1024)
            writer.transport.pause_reading()  # type: ignore[attr-defined]  # a socket's
            lines = [GET.format("?limit=1000000"), AUTHORIZED, "Host: x", "", ""]
            writer.write("\r\n".join(lines).encode() * 20)
            handing = one.listener._handing
            assert handing is not None
            with capture_logs() as said:
                while not any("takes nothing" in line["event"] for line in said):  # noqa: ASYNC110  # a log has no event
                    await asyncio.sleep(0.01)
            writer.transport.abort()
            del reader
            while handing._under_way:  # noqa: ASYNC110  # nor has a number
                await asyncio.sleep(0)

    run(story)


def test_followers_go_on_with_the_next_leader() -> None:
    """A standby answers as the leader does. The leader dies, a follower that knows it alone has learnt of the other, or keeps

    to its list; a reader in the middle of the log waits for nobody. No record is missed or doubled.
    """

    async def story() -> None:
        event_log = MemoryLog(CODEC)
        one = await Leading(event_log, "one").leads()
        two = Leading(event_log, "two", answers=True)
        try:
            async with open_log(f"http://{two.at}/j") as log:
                assert await all_of(log) == await all_of(event_log)
                while (found := await log.leader("j")) != LeaderInfo(1, "one", one.at):
                    assert found is None  # it has not looked yet
            async with open_log(f"http://{one.at},{two.at}/j") as log, open_log(f"http://{two.at}/j") as other:
                with capture_logs() as said:
                    async with aclosing(log.follow("j")) as records, aclosing(other.follow("j")) as others:
                        before = await event_log.head("j")
                        assert [(await anext(records)).seq for _ in range(before)] == list(range(1, before + 1))
                        await one.end()
                        await two.leads()
                        await two.toss(5)
                        now = await event_log.head("j")
                        assert [(await anext(records)).seq for _ in range(now - before)] == list(
                            range(before + 1, now + 1)
                        )
                        assert [(await anext(others)).seq for _ in range(now)] == list(range(1, now + 1))
                assert await all_of(log) == await all_of(event_log)
                assert await log.leader("j") == LeaderInfo(2, "two", two.at)
                assert [line["event"] for line in said if line["log_level"] == "warning"] in (
                    [],
                    ["no master hands out records now, trying on"],
                )
        finally:
            await one.end()
            await two.end()

    run(story)


def test_a_leader_is_learnt_from_a_standby() -> None:
    """A standby that cannot read its log sends its readers to whoever leads."""

    async def story() -> None:
        event_log = MemoryLog(CODEC)

        async def lame(_after: int, _bytes_max: int, _wait_s: float) -> bytes:
            raise pages.Elsewhere("the log is away", one.at)

        listener = HttpListener(bind(), TOKEN, limits=HttpLimits(close_s=0.3))
        async with leading(event_log) as one:
            await listener.serve(_nobody, dict, None, lame)
            try:
                async with open_log(f"http://{listener.address}/j") as log:
                    assert await all_of(log) == await all_of(event_log)
            finally:
                await listener.close()

    run(story)


def test_the_last_records_are_handed_out() -> None:
    """A master that ends answers those who wait, with what came last."""

    async def story() -> None:
        async with leading() as one, open_log(f"http://{one.at}/j") as log, aclosing(log.follow("j")) as records:
            for _ in range(one.master.state.seq):
                last = await anext(records)
            waiting = asyncio.ensure_future(anext(records))
            while not one.listener._handing._under_way:  # type: ignore[union-attr]  # noqa: ASYNC110  # a number has no event
                await asyncio.sleep(0)
            await one.toss()
            await one.end()
            assert (await waiting).seq == last.seq + 1

    run(story)


async def _nobody(_connection: object) -> None:
    return None


Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def serving(handler: Handler) -> AsyncIterator[str]:
    """Whatever listens there, and where."""
    server = await asyncio.start_server(handler, "127.0.0.1")
    host, port = server.sockets[0].getsockname()
    try:
        yield f"{host}:{port}"
    finally:
        server.close()
        await server.wait_closed()


def page(*payloads: bytes, after: int = 0, last: int = 1, job: str = "j") -> bytes:
    """A page of these batches."""
    body = b"".join(payloads)
    row = (job, after, last, last, False, 0, "", "", [len(one) for one in payloads], pages.zlib.crc32(body))
    return pages.pack(row, body)


def answer(body: bytes, kind: str = pages.CONTENT_TYPE, status: str = "200 OK", more: int = 0) -> bytes:
    """An answer as it goes over the wire; it promises ``more`` bytes than there are."""
    return (
        f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body) + more}\r\nLocation: /login\r\n\r\n".encode()
        + body
    )


SPEC = JobSpec("j", (GroupSpec(nodes_min=2, nodes_max=2, nproc=2),))
BATCH = CODEC.batch(1, 1, three_deaths(SPEC).records[:1])


@pytest.mark.parametrize(
    ("said", "error", "words"),
    [
        (answer(page(BATCH.payload), more=100), LogUnavailable, "cannot be asked: "),
        (answer(page(BATCH.payload)[:-3]), LogUnavailable, "cut or changed on its way"),
        (answer(page(BATCH.payload[:-1] + b"\xff")), LogCorrupt, "event 1"),
        (answer(b"<html>", "text/html"), LogUnavailable, "HTTP status 200; is a dlrover master listening there?"),
        (answer(b"nonsense"), LogUnavailable, "no dlrover master: 8 bytes are no page of records"),
        (answer(b"x" * (pages.PACKED_BYTES_MAX + 1)), LogUnavailable, "it answers more than 4,194,304 bytes"),
        (answer(page()[:4] + struct.pack("<I", 9) + page()[8:]), SchemaTooNew, "format 9, newer than 1; upgrade"),
        (answer(page(BATCH.payload, job="k")), LogUnavailable, "answers for events of job 'k'"),
        (answer(page(BATCH.payload, after=5)), LogUnavailable, "answers for events of job 'j' after 5"),
        (answer(page(last=7)), LogCorrupt, "promised events up to 7"),
        (answer(page(BATCH.payload, BATCH.payload)), LogCorrupt, "event 2: the master at .* goes on with 1-1"),
        (answer(b"", status="302 Found"), LogUnavailable, "sends us on to '/login'; name that place"),
        (answer(b"", status="404 Not Found"), LogUnavailable, "hands out no records: it is of an older version"),
        (answer(b'{"reason": "cut", "seq": 7}', "application/json", "500 No"), LogCorrupt, "event 7: says the master"),
        (answer(b'{"reason": "too new"}', "application/json", "500 No"), SchemaTooNew, "too new"),
        (answer(b'{"reason": "away"}', "application/json", "503 No"), LogUnavailable, "the master at .*: away"),
        (answer(b"[]", "application/json", "503 No"), LogUnavailable, "HTTP status 503"),
        (answer(b"", status="500 No"), LogUnavailable, "HTTP status 500"),
        (b"SSH-2.0-OpenSSH\r\n", LogUnavailable, "cannot be asked"),
        (b"", LogUnavailable, "cannot be asked"),
    ],
)  # fmt: skip
def test_what_is_no_answer_is_told(said: bytes, error: type[Exception], words: str) -> None:
    """Cut, spoilt, oversized, of a newer version, of another job, or of no master at all: it is said, and nothing is believed."""

    async def answers(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(said)
            await writer.drain()
        writer.close()

    async def story() -> None:
        async with serving(answers) as at, open_log(f"http://{at}/j") as log:
            with pytest.raises(error, match=words):
                await all_of(log)

    run(story)


def test_a_master_that_dies_in_its_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was read of a half answer does not count; the next master is asked for it. One who is alone is asked again."""
    died = list[int]()

    async def dies(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        died.append(1)
        writer.write(answer(page(BATCH.payload)[:-9], more=9))
        writer.transport.abort()

    async def story() -> None:
        async with serving(dies) as at, leading() as one, open_log(f"http://{at},{one.at}/j") as log:
            assert await all_of(log) == await all_of(one.master._log)
            await one.toss()
            assert await all_of(log) == await all_of(one.master._log)
            assert died == [1], "a master that answered is kept to"

    run(story)


def test_reading_outlives_a_change_of_leaders(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody answers between two pages: `read` waits for the next leader, and gives up where none comes."""
    monkeypatch.setattr("dlrover_adapters.http.log.PAGE_BYTES", 1)
    monkeypatch.setattr("dlrover_adapters.http.log.PATIENCE_S", 0.5)

    async def story() -> None:
        async with leading() as one:
            await one.toss(2)
            first, *_, last = [batch.last_seq async for batch in one.master._log.batches("j")]
            asked, desk = 0, Records(one.master._log, "j", lambda: None)

            async def hand_out(after: int, bytes_max: int, wait_s: float) -> bytes:
                nonlocal asked
                asked += after == first
                if (after == first and asked < 3) or after == last - 1:
                    raise pages.Elsewhere("it is taking over", "")
                return await desk.hand_out(after, bytes_max, wait_s)

            listener, found = HttpListener(bind(), TOKEN, limits=HttpLimits(close_s=0.3)), list[int]()

            async def read() -> None:
                async with open_log(f"http://{listener.address}/j") as log:
                    async for record in log.read("j"):
                        found.append(record.seq)

            await listener.serve(_nobody, dict, None, hand_out)
            try:
                with pytest.raises(LogUnavailable, match="it is taking over"):
                    await read()
            finally:
                await listener.close()
            assert found == list(range(1, last))

    run(story)


def test_tls() -> None:
    """With the CA of the masters' certificate; without it, or without TLS, who reads is told what to do."""

    async def story() -> None:
        event_log = MemoryLog(CODEC)
        async with leading(event_log):
            listener = HttpListener(bind(), TOKEN, limits=HttpLimits(close_s=0.3), tls=shown(str(DATA / "master.pem")))
            desk = Records(event_log, "j", lambda: None)
            await listener.serve(_nobody, dict, None, desk.hand_out)
            try:
                async with open_log(f"https://{listener.address}/j?cacert={DATA / 'ca.pem'}") as log:
                    assert await all_of(log) == await all_of(event_log)
                async with open_log(f"https://{listener.address}/j?cacert={DATA / 'other.pem'}") as log:
                    with pytest.raises(LogUnavailable, match="its certificate is not of the CA"):
                        await all_of(log)
                async with open_log(f"http://{listener.address}/j") as log:
                    with pytest.raises(LogUnavailable, match="speaks only TLS"):
                        await all_of(log)
            finally:
                await listener.close()
            with pytest.raises(SpecError, match="cannot be read"):
                await open_log(f"https://{listener.address}/j?cacert=/nowhere")

    run(story)


def test_on_etcd_a_standby_reads_for_itself(etcd_server: Cluster, etcd_prefix: str) -> None:
    """Two masters over one etcd: a follower of the standby sees what the leader does, and goes on when it is the leader."""

    async def story() -> None:
        url = etcd_server.url(etcd_prefix, ttl="2")
        async with open_log(url) as first, open_log(url) as second:
            one = await Leading(first, "one").leads()
            two = Leading(second, "two", answers=True)
            try:
                async with open_log(f"http://{two.at}/j") as log, aclosing(log.follow("j")) as records:
                    await one.toss(3)
                    before = one.master.state.seq
                    assert [(await anext(records)).seq for _ in range(before)] == list(range(1, before + 1))
                    await one.end()
                    await two.leads()
                    await two.toss()
                    now = two.master.state.seq
                    assert [(await anext(records)).seq for _ in range(now - before)] == list(range(before + 1, now + 1))
                    assert await all_of(log) == await all_of(first)
            finally:
                await one.end()
                await two.end()

    run(story)


# ---- the commands


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """A finished job's log in a file, and where something hands it out as its master would."""
    folder = tmp_path_factory.mktemp("served")
    url, ready, end = f"sqlite://{folder}/log.db", threading.Event(), asyncio.Event()
    at = list[str]()
    loop = asyncio.new_event_loop()

    async def hand_out() -> None:
        async with open_log(url) as event_log:
            lead = await event_log.lead("digits", "test")
            life = three_deaths(JobSpec("digits", (GroupSpec(nodes_min=2, nodes_max=2, nproc=2),)))
            batch = CODEC.batch(lead.token, 1, [record._replace(token=lead.token) for record in life.records])
            assert isinstance(await lead.append(batch), Appended)
            await lead.resign()
            listener = HttpListener(bind(), TOKEN, job="digits", limits=HttpLimits(close_s=0.3))
            desk = Records(event_log, "digits", lambda: None)
            await listener.serve(_nobody, lambda: {"job": "digits"}, None, desk.hand_out)
            at.append(listener.address)
            ready.set()
            await end.wait()
            await listener.close()

    thread = threading.Thread(target=loop.run_until_complete, args=(hand_out(),))
    thread.start()
    assert ready.wait(BOUND_S)
    yield url, at[0]
    loop.call_soon_threadsafe(end.set)
    thread.join(BOUND_S)
    loop.close()


def dlrover(*words: str) -> tuple[int, str, str]:
    """One command to its end, in this process."""
    out, err, logging = io.StringIO(), io.StringIO(), structlog.get_config()
    with redirect_stdout(out), redirect_stderr(err), mock.patch.dict(os.environ, {"COLUMNS": "120"}):
        try:
            code = main(words)
        except SystemExit as end:  # argparse's
            code = end.code if isinstance(end.code, int) else 1
    structlog.configure(**logging)
    assert "Traceback" not in err.getvalue()
    return code, out.getvalue(), err.getvalue()


@pytest.mark.parametrize(
    "words",
    [
        ("status", "JOB"),
        ("status", "JOB", "--json"),
        ("events", "JOB", "--since", "9"),
        ("explain", "JOB"),
        ("explain", "JOB", "12"),
        ("report", "JOB", "--json"),
        ("replay", "JOB"),
        ("hosts", "JOB"),
    ],
)
def test_commands_say_the_same_through_a_master(
    served: tuple[str, str], words: tuple[str, ...], tmp_path: Path
) -> None:
    """What reads a log reads it through a master: with the URL as the job, and with the URL as the log."""
    url, at = served
    there = dlrover(*(one.replace("JOB", "digits") for one in words), "--log", url)
    assert there[0] == 0, there
    where = f"http://{at}/digits"
    assert dlrover(*(one.replace("JOB", where) for one in words), "--state-dir", str(tmp_path)) == there
    assert dlrover(*(one.replace("JOB", "digits") for one in words), "--log", where) == there


def test_commands_say_what_is_wrong(served: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No such job, nobody there, a wrong token, a URL of nothing, the exit code, one line, no token."""
    _, at = served
    code, _, err = dlrover("events", f"http://{at}/nope")
    assert (code, "no job 'nope' in http://" in err, "there are: digits" in err) == (3, True, True)
    assert dlrover("report", "--log", f"http://{at}")[0] == 0
    code, _, err = dlrover("events", "http://127.0.0.1:1/digits", "--follow")
    assert (code, "the master at 127.0.0.1:1 cannot be asked: Connection refused" in err) == (4, True)
    code, _, err = dlrover("status", "http://127.0.0.1:1/digits", "--state-dir", str(tmp_path))
    assert (code, "Connection refused" in err) == (4, True)
    code, _, err = dlrover("events", f"http://{at}")
    assert (code, "names no job; say http://HOST:29400/JOB" in err) == (2, True)
    wrong = tmp_path / "token"
    wrong.write_text("of-another-job")
    monkeypatch.delenv("DLROVER_TOKEN")
    code, _, err = dlrover("explain", f"http://{at}/digits", "--token-file", str(wrong))
    assert (code, "the job token is not this job's" in err, "of-another-job" in err) == (6, True, False)
    wrong.write_text(TOKEN)
    assert dlrover("explain", f"http://{at}/digits", "--token-file", str(wrong))[0] == 0


def test_what_asks_the_leader_finds_it_through_a_master(tmp_path: Path) -> None:
    """`dlrover suspend http://...` and `--wait` need no access to the log either."""

    async def story() -> None:
        async with leading() as one:
            words = ("--state-dir", str(tmp_path), "--wait", "--timeout", "20")
            url = f"http://{one.at}/j"
            code, out, err = await asyncio.to_thread(dlrover, "suspend", url, "--keep-nodes", *words)
            assert (code, "job j: suspended" in out) == (0, True), err
            code, out, err = await asyncio.to_thread(dlrover, "resume", "j", "--log", url, *words[:2], "--no-wait")
            assert (code, "resume is done" in out) == (0, True), err
            assert one.master.state.job.state != "suspended"

    run(story)


def test_nobody_leads_there() -> None:
    """Whoever opens such a log by hand gets the class that reads it, and an error for anything else."""

    async def story() -> None:
        async with open_log("http://127.0.0.1:1/j") as log:
            assert isinstance(log, HttpLog)
            with pytest.raises(SpecError, match="for reading"):
                await log.lead("j", "me", wait=False)
            with pytest.raises(LogUnavailable, match="Connection refused"):
                await log.head("j")

    run(story)
