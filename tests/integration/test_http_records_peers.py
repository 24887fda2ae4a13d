"""Reading a log over HTTP outlives masters that die, and believes no peer that answers nonsense."""

from __future__ import annotations

import asyncio
import contextlib
import struct
from contextlib import aclosing
from pathlib import Path

import pytest
from leading_records import TOKEN, Leading, _nobody, all_of, answer, leading, page, run, serving
from leading_records import token as token  # noqa: PLC0414 - the fixture is taken over
from tests.unit.life import three_deaths
from tools.etcd_cluster import Cluster

from dlrover_adapters.http import HttpLimits, HttpListener, bind
from dlrover_adapters.http.tls import shown
from dlrover_core.errors import LogCorrupt, LogUnavailable, SchemaTooNew, SpecError
from dlrover_core.job.state import CODEC
from dlrover_core.logs import open_log
from dlrover_core.logs.memory import MemoryLog
from dlrover_core.runtime import records as pages
from dlrover_core.runtime.records import Records
from dlrover_core.spec import GroupSpec, JobSpec

DATA = Path(__file__).parent / "data"
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
