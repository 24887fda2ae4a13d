"""What a job did first is told by `dlrover explain` after its log was truncated three times, on every log that can be."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import msgpack
import pytest
import structlog
from tools.etcd_cluster import Cluster as Etcd

from dlrover_adapters.cli.main import main
from dlrover_adapters.etcd import EtcdLog
from dlrover_core.errors import LogCorrupt, LogError, Refused
from dlrover_core.history import explanation_of, render
from dlrover_core.job import incidents
from dlrover_core.job.job import Archived
from dlrover_core.job.state import CODEC, fold
from dlrover_core.kernel.events import Batch, Record
from dlrover_core.kernel.log import Appended, Leadership, Snapshot
from dlrover_core.kernel.state import digest
from dlrover_core.logs.archive import open_store
from dlrover_core.logs.sqlite import SqliteLog
from dlrover_core.runtime.master import Master
from dlrover_core.spec import GroupSpec, JobSpec
from dlrover_core.testing import virtual_loop
from dlrover_core.testing.cluster import Cluster
from dlrover_core.testing.network import Network
from dlrover_core.testing.training import Training

JOB = "long"
SEGMENT_EVENTS = 20
JOINED = 23

pytestmark = pytest.mark.xdist_group("truncated_logs")  # they share one log
Log = SqliteLog | EtcdLog


@pytest.fixture(scope="module")
def history() -> list[Batch]:
    """A job in virtual time: a worker dies at the beginning, then a master, and people pause it for as long as it takes."""

    async def lived() -> list[Batch]:
        spec = JobSpec(JOB, (GroupSpec(nodes_min=2, nodes_max=2, nproc=2),))
        async with Cluster(spec, training=Training(100)) as cluster:
            await cluster.until(lambda: cluster.training.done >= 5)
            cluster.kill_worker(3)
            await cluster.until(lambda: cluster.training.done >= 12)
            cluster.kill_master()
            cluster.start_master()
            await cluster.until(lambda: cluster.master.leading)
            for _ in range(7):
                await cluster.leader.obey({"command": "suspend"})
                await cluster.until(lambda: cluster.leader.state.job.state == "suspended")
                await cluster.leader.obey({"command": "resume"})
                done = cluster.training.done
                await cluster.until(lambda done=done: cluster.training.done >= done + 3)  # type: ignore[misc]
            assert (await cluster.outcome()).state == "succeeded"
            return [batch async for batch in cluster.log.batches(JOB)]

    return virtual_loop.run(lived())


def told_by(batch: Batch, token: int, counter: int, *, elder: bool) -> Batch:
    """The same batch under another token; of an elder version, in which nodes had no seat."""
    raw = msgpack.unpackb(batch.payload)
    raw[1], raw[2] = token, counter
    for row in raw[5]:
        if elder and row[0] == JOINED:
            row[1], row[4] = 1, row[4][:4]
    return CODEC.decode(msgpack.packb(raw))


@pytest.fixture(autouse=True)
def words() -> Iterator[None]:
    """Commands say where their process's words go, and this process has others to run."""
    yield
    structlog.reset_defaults()


@pytest.fixture(params=["sqlite", "etcd"])
def url(request: pytest.FixtureRequest, tmp_path: Path, etcd_server: Etcd, etcd_prefix: str) -> str:
    """A new log whose archive is an object store in memory."""
    cold = f"memory://{uuid.uuid4().hex}"
    if request.param == "sqlite":
        return f"sqlite://{tmp_path}/log.db?archive={cold}"
    return etcd_server.url(etcd_prefix, archive=cold)


async def open_small(url: str) -> Log:
    """The log at the URL, with small files in its archive."""
    if url.startswith("sqlite"):
        place, _, cold = url.removeprefix("sqlite://").partition("?archive=")
        return await SqliteLog.open(place, CODEC, archive=cold, segment_events=SEGMENT_EVENTS, reserve_bytes=0)
    log = await EtcdLog.open_url(url, CODEC)
    log.segment_events = SEGMENT_EVENTS
    return log


async def cut(log: Log, upto: int) -> int:
    """Delete what is archived."""
    return await (log.truncate(JOB, upto) if isinstance(log, SqliteLog) else log.trim(JOB, upto))


async def write(log: Log, history: list[Batch]) -> tuple[list[Record], list[int]]:
    """Tell a history to a log, as several leaders did, archiving and deleting on the way.

    Returns the records as they were told, and how many batches each truncation deleted.
    """
    records: list[Record] = []
    deleted: list[int] = []
    noted = 0
    for _, batches in itertools.groupby(history, lambda batch: batch.token):
        lead: Leadership = await log.lead(JOB, "a master")
        for counter, batch in enumerate(batches, 1):
            told = told_by(batch, lead.token, counter, elder=batch.first_seq <= SEGMENT_EVENTS)
            assert await lead.append(told) == Appended(told.last_seq)
            records += told.records
            if told.last_seq - noted > SEGMENT_EVENTS + 10:
                await lead.snapshot(Snapshot(told.last_seq - 1, "another schema", b"\xc1"))
                await lead.snapshot(Snapshot(told.last_seq, "another schema", b"\xc1"))
                segments = await log.archive(JOB, told.last_seq, noted)
                noted = segments[-1].last
                deleted.append(await cut(log, noted))
        await lead.resign()
    return records, deleted


def incident_seqs(records: list[Record]) -> Iterator[int]:
    """Every event of the first incident that somebody may ask about."""
    kinds = (incidents.IncidentOpened, incidents.Diagnosed, incidents.ActionChosen, incidents.IncidentClosed)
    return (one.seq for one in records if isinstance(one.event, kinds))


@pytest.mark.slow_loop(reason="commands import what they need on the loop that is theirs alone")
def test_explain_reaches_into_the_archive(url: str, history: list[Batch], capsys: pytest.CaptureFixture[str]) -> None:
    """Three truncations, an elder version's events and foreign snapshots later: cause, evidence and rule, word for word.

    The archive lies below the URL that says where, one folder per job: nothing but its files and its mark.
    """

    async def story() -> list[Record]:
        log = await open_small(url)
        try:
            records, deleted = await write(log, history)
            assert len([count for count in deleted if count]) >= 3
            assert [record async for record in log.read(JOB)] == records
            assert digest(fold([record async for record in log.read(JOB)])) == digest(fold(records))
            return records
        finally:
            await log.close()

    records = asyncio.run(story())
    store = open_store(url.partition("archive=")[2].replace("%3A", ":").replace("%2F", "/"), JOB)
    assert {name.rpartition(".")[2] for name in store.names()} == {"seg", "archive"}
    asked = list(incident_seqs(records))
    assert max(asked) <= 2 * SEGMENT_EVENTS
    for seq in asked:
        capsys.readouterr()
        assert main(["explain", JOB, str(seq), "--log", url]) == 0
        explanation = explanation_of(records, seq)
        assert explanation is not None
        assert capsys.readouterr().out == render.explanation(explanation) + "\n"


@pytest.mark.slow_loop(reason="as above")
def test_explain_says_what_the_archive_has_lost(
    url: str, history: list[Batch], capsys: pytest.CaptureFixture[str]
) -> None:
    """With the file of the first incident gone, the command names the event that cannot be read; a leader still leads."""

    async def story() -> None:
        log = await open_small(url)
        try:
            records, _ = await write(log, history)
            archive = log._archive_of(JOB) if isinstance(log, EtcdLog) else log.archive_of(JOB)
            assert archive is not None
            files, root = archive.store._files()  # type: ignore[attr-defined]
            files.rm_file(f"{root}/{archive.verify()[0].name}")
            with pytest.raises(LogCorrupt) as found:
                [record async for record in log.read(JOB)]
            assert found.value.seq == 1
            lead = await log.lead(JOB, "the next")
            snapshot = await log.latest_snapshot(JOB)
            assert snapshot is not None
            rest = [record async for record in log.read(JOB, snapshot.seq)]
            assert rest == records[snapshot.seq :]
            await lead.resign()
        finally:
            await log.close()

    asyncio.run(story())
    capsys.readouterr()
    assert main(["explain", JOB, "30", "--log", url]) == 4
    assert "event 1: " in capsys.readouterr().err


def test_masters_archive_and_delete_one_after_the_other(etcd_server: Etcd, etcd_prefix: str) -> None:
    """Two masters on etcd, of which the second takes over: files, their events and the deletions go on in one line."""
    url = etcd_server.url(etcd_prefix, archive=f"memory://{uuid.uuid4().hex}")

    async def lead(name: str, deleted: int) -> None:
        """Lead until so many events are not in etcd any more."""
        log = await open_small(url)
        assert isinstance(log, EtcdLog)
        master = Master(
            JobSpec(JOB, (GroupSpec(nodes_min=1, nodes_max=1, nproc=1),)),
            event_log=log,
            listener=Network().listener("master:1"),
            backend=None,
            wall=lambda: time.time_ns() // 1000,
            holder=name,
            run_id="run-1",
            snapshot_events=SEGMENT_EVENTS,
        )
        running = asyncio.ensure_future(master.run())
        try:
            await asyncio.wait_for(master.led.wait(), 30)
            for most in itertools.cycle((2, 1)):
                with contextlib.suppress(Refused):  # its predecessor's last word was the same
                    await master.obey({"command": "scale", "group": "worker", "nodes_max": most, "nodes_min": 1})
                kept = await log.etcd.call("Range", log.etcd.under(log.keys(JOB).log, limit=1))
                if CODEC.decode(kept.kvs[0].value).first_seq > deleted:
                    break
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await log.close()

    async def story() -> None:
        await lead("one", 2 * SEGMENT_EVENTS)
        await lead("two", 7 * SEGMENT_EVENTS)
        log = await open_small(url)
        assert isinstance(log, EtcdLog)
        try:
            records = [record async for record in log.read(JOB)]
            assert [record.seq for record in records] == list(range(1, len(records) + 1))
            assert len({record.token for record in records}) == 2
            noted = [one.event for one in records if isinstance(one.event, Archived)]
            archive = await log._archive(JOB)
            assert archive is not None
            segments = archive.verify()
            assert [tuple(one) for one in noted] == [tuple(one) for one in segments][: len(noted)]
            assert len(noted) >= 7
        finally:
            await log.close()

    asyncio.run(story())


def test_nothing_is_deleted_whose_archive_is_gone(url: str, history: list[Batch]) -> None:
    """With its files lost or exchanged, deleting is refused, and the log still has what it had."""

    async def story() -> None:
        log = await open_small(url)
        try:
            lead = await log.lead(JOB, "a master")
            for counter, batch in enumerate(history[:60], 1):
                assert await lead.append(told_by(batch, lead.token, counter, elder=False)) == Appended(batch.last_seq)
            head = await log.head(JOB)
            await lead.snapshot(Snapshot(head - 1, "s", b""))
            await lead.snapshot(Snapshot(head, "s", b""))
            segments = await log.archive(JOB)
            archive = await log._archive(JOB) if isinstance(log, EtcdLog) else log.archive_of(JOB)
            assert archive is not None
            files, root = archive.store._files()  # type: ignore[attr-defined]
            other = archive.store.read(segments[1].name)
            files.pipe_file(f"{root}/{segments[0].name}", other)
            with pytest.raises(LogCorrupt):
                await cut(log, segments[1].last)
            for segment in segments:
                files.rm_file(f"{root}/{segment.name}")
            with pytest.raises(LogError, match="not archived"):
                await cut(log, segments[1].last)
            assert [record.seq async for record in log.read(JOB)] == list(range(1, head + 1))
        finally:
            await log.close()

    asyncio.run(story())
