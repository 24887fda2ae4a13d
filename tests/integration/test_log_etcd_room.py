"""What the etcd log deletes, once it is archived, and what it tells operators of the room it takes."""

from __future__ import annotations

from pathlib import Path

import pytest
from etcd_logs import opened, run
from structlog.testing import capture_logs
from tools.etcd_cluster import Cluster

from dlrover_adapters.etcd import checks
from dlrover_adapters.etcd import log as etcd_log
from dlrover_adapters.etcd.client import Etcd, Status
from dlrover_core.errors import LogCorrupt, LogError, LogFull
from dlrover_core.kernel.log import Appended, Snapshot
from dlrover_core.testing.log_conformance import JOB, Pen, seqs

SMALL = 100  # of a segment's 10,000 events, which take long to make, where their number does not matter

# ---- the archive


@pytest.fixture
def archived(etcd_server: Cluster, etcd_prefix: str, tmp_path: Path) -> str:
    """A log with an archive."""
    return etcd_server.url(etcd_prefix, archive=str(tmp_path / "archive"))


def test_without_an_archive_nothing_is_deleted(etcd_server: Cluster, etcd_prefix: str) -> None:
    """Nothing is deleted that is not archived."""

    async def story() -> None:
        async with opened(etcd_server.url(etcd_prefix)) as log:
            log.segment_events = SMALL
            pen = Pen(await log.lead(JOB, "a"))
            for _ in range(4):
                await pen.write(events=SMALL // 2)
                await pen.lead.snapshot(Snapshot(pen.head, "", b""))
            assert list(await log.archive(JOB)) == []
            assert await log.trim(JOB, pen.head) == 0
            assert len(await seqs(log.read(JOB))) == pen.head

    run(story())


@pytest.mark.slow_loop(reason="batches of thousands of events are made and decoded at once")
def test_what_is_archived_is_deleted_and_still_read(archived: str) -> None:
    """Archived events up to the older snapshot leave etcd; readers find them all, in order, across the seam; twice."""

    async def story() -> None:
        async with opened(archived) as log:
            pen = Pen(await log.lead(JOB, "a"))
            deleted = 0
            for _ in range(3):
                for _ in range(6):
                    await pen.write(events=2_500)
                await pen.lead.snapshot(Snapshot(pen.head, "", b""))
                segments = await log.archive(JOB, pen.head)
                assert all(one.last - one.first + 1 >= 10_000 for one in segments)
                deleted += await log.trim(JOB, pen.head)
            # Archived are 40,000 in fours of batches; the older snapshot stands at 30,000.
            assert deleted == 12
            left = await log.etcd.call("Range", log.etcd.under(log.keys(JOB).log, keys_only=True))
            assert left.kvs[0].key.decode() == log.keys(JOB).batch(32_500)
            assert await seqs(log.read(JOB)) == list(range(1, 45_001))
            assert await log.trim(JOB, pen.head) == 0

    run(story())


def test_a_damaged_archive_deletes_nothing(archived: str, tmp_path: Path) -> None:
    """Before anything is deleted the archive is read back; if it is not whole, etcd keeps all."""

    async def story() -> None:
        async with opened(archived) as log:
            log.segment_events = SMALL
            pen = Pen(await log.lead(JOB, "a"))
            for _ in range(4):
                await pen.write(events=SMALL // 4)
            assert len(await log.archive(JOB)) == 1
            for seq in (SMALL - 1, SMALL):
                await pen.lead.snapshot(Snapshot(seq, "", b""))
            file = next((tmp_path / "archive").rglob("*.seg"))
            content = bytearray(file.read_bytes())
            content[len(content) // 2] ^= 1
            file.chmod(0o600)
            file.write_bytes(content)
            with pytest.raises(LogCorrupt):
                await log.trim(JOB, pen.head)
            assert len(await seqs(log.read(JOB))) == SMALL

    run(story())


def test_only_the_leader_deletes(archived: str) -> None:
    """Who does not lead deletes nothing; who has just been deposed neither."""

    async def story() -> None:
        async with opened(archived) as log, opened(archived) as other:
            log.segment_events = other.segment_events = SMALL
            pen = Pen(await log.lead(JOB, "a", 600.0))
            for _ in range(4):
                await pen.write(events=SMALL // 4)
            await log.archive(JOB)
            for seq in (SMALL - 1, SMALL):
                await pen.lead.snapshot(Snapshot(seq, "", b""))
            with pytest.raises(LogError, match="only its leader"):
                await other.trim(JOB, pen.head)
            await other.lead(JOB, "b", dead=["nobody", "a"])
            assert await log.trim(JOB, pen.head) == 0
            assert await other.trim(JOB, pen.head) == 3  # the batches before the older snapshot

    run(story())


# ---- what an operator should know


def test_a_log_that_only_grows_is_said_once(
    etcd_server: Cluster, etcd_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a long log without an archive the leader says so, once."""
    monkeypatch.setattr(etcd_log, "UNARCHIVED_EVENTS", 5)

    async def story() -> None:
        async with opened(etcd_server.url(etcd_prefix)) as log:
            pen = Pen(await log.lead(JOB, "a"))
            with capture_logs() as said:
                await pen.write(events=4)
                await log.archive(JOB)
                assert not said
                await pen.write()
                await log.archive(JOB)
                await log.archive(JOB)
            assert [one["event"] for one in said] == ["the job's log grows and nothing is ever deleted"]

    run(story())


def test_a_leader_says_what_is_wrong_with_its_etcd(
    etcd_server: Cluster, etcd_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A version that loses data and a database that is nearly full are warnings for who leads, not errors."""

    async def story() -> None:
        async with opened(etcd_server.url(etcd_prefix)) as log:
            good = Status("3.5.21", 7 * 2**30, 1, 1, 2, quota_bytes=8 * 2**30)
            for status, words in (
                (good._replace(db_bytes=2**30), []),
                (good, ["nearly full"]),
                (good._replace(quota_bytes=0), ["nearly full"]),
                (good._replace(db_bytes=2**30, version="3.5.2"), ["lose data"]),
            ):

                async def statuses(self: Etcd, timeout_s: float = 1.0, status: Status = status) -> dict[str, Status]:
                    return {"here": status}

                with monkeypatch.context() as patch, capture_logs() as said:
                    patch.setattr(Etcd, "statuses", statuses)
                    await checks.writing(log.etcd)
                assert len(said) == len(words)
                assert all(word in one["event"] for word, one in zip(words, said, strict=True))

    run(story())


def test_what_filled_an_etcd_has_landed(
    etcd_server: Cluster, etcd_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The transaction that fills an etcd is done, and answered with "no space": the batch is appended. The next one is not."""

    async def story() -> None:
        async with opened(etcd_server.url(etcd_prefix)) as log:
            pen = Pen(await log.lead(JOB, "a", 600.0))
            call, does = log.etcd.call, [True, False]

            async def full(method: str, *asked: object, **how: object) -> object:
                if method != "Txn":
                    return await call(method, *asked, **how)
                if does.pop(0):
                    await call(method, *asked, **how)
                raise LogFull("no space")

            with monkeypatch.context() as patch:
                patch.setattr(log.etcd, "call", full)
                batch = pen.draft()
                assert await pen.lead.append(batch) == Appended(batch.last_seq)
                pen.head = batch.last_seq
                batch = pen.draft()
                with pytest.raises(LogFull):
                    await pen.lead.append(batch)
            assert await seqs(log.read(JOB)) == [1]
            assert await pen.lead.append(batch) == Appended(batch.last_seq)

    run(story())
