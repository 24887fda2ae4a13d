"""`GET /v1/records` and the log that is read over it: real sockets, and real masters."""

from __future__ import annotations

import asyncio
import contextlib
import json
from contextlib import aclosing
from pathlib import Path
from unittest import mock

import pytest
from leading_records import TOKEN, Leading, _nobody, all_of, leading, run, serving
from leading_records import served as served  # noqa: PLC0414 - the fixture is taken over
from leading_records import token as token  # noqa: PLC0414 - the fixture is taken over
from structlog.testing import capture_logs

from dlrover_adapters.http import HttpLimits, HttpListener, bind
from dlrover_core.errors import LogCorrupt, LogUnavailable, Refused, SpecError, TokenRefused
from dlrover_core.job.job import ResumeJob, SuspendJob
from dlrover_core.job.state import CODEC
from dlrover_core.kernel.log import LeaderInfo
from dlrover_core.logs import open_log
from dlrover_core.logs.memory import MemoryLog
from dlrover_core.runtime import records as pages


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
