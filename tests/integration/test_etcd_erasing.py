"""Erasing a job from an etcd: whose log goes, and what is left of an erase that ended half way."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from etcd_logs import run
from tools.etcd_cluster import Cluster

from dlrover_adapters.etcd import deleting, erasing
from dlrover_adapters.etcd.leadership import EtcdLeadership
from dlrover_adapters.etcd.log import EtcdLog
from dlrover_core.errors import LogUnavailable
from dlrover_core.job.job import JobCreated, JobStarted
from dlrover_core.job.state import CODEC
from dlrover_core.kernel.events import Record
from dlrover_core.kernel.log import Appended, Snapshot

JOB, RUN = "digits", "u-1"


async def written(log: EtcdLog, job: str = JOB, run: str = RUN, batches: int = 5) -> EtcdLeadership:
    """A log that begins with this run, one event a batch, and a snapshot; its leader."""
    lead = await log.lead(job, "a", 600.0)
    for seq in range(1, batches + 1):
        event = JobCreated(job, run, "{}") if seq == 1 else JobStarted()
        batch = CODEC.batch(lead.token, seq, [Record(seq, 1_000 * seq, lead.token, 0, event)])
        assert await lead.append(batch) == Appended(seq)
    await lead.snapshot(Snapshot(3, "", b"state"))
    return lead


async def read(log: EtcdLog, job: str = JOB) -> list[int]:
    """The sequence numbers of all that a job's log has."""
    return [one.seq async for one in log.read(job)]


def test_a_job_that_is_forgotten_leaves_nothing(
    etcd_server: Cluster, etcd_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not while a master leads it, and no other job; in bounded transactions; once more is no error; the name begins anew."""
    monkeypatch.setattr(deleting, "AT_ONCE", 2)

    async def story() -> None:
        url, begun = etcd_server.url(etcd_prefix), list[int]()
        log = await EtcdLog.open_url(url, CODEC)
        try:
            await written(log, f"{JOB}2", batches=1)
            lead = await written(log)
            with pytest.raises(LogUnavailable, match="is led by a"):
                await erasing.erase(url, JOB, RUN)
            assert await read(log) == [1, 2, 3, 4, 5]
            await lead.resign()
            for _ in range(2):
                await erasing.erase(url, JOB, RUN, lambda: begun.append(1))
            assert (await log.jobs(), await log.head(JOB), begun) == ([f"{JOB}2"], 0, [1])
            assert not (await log.etcd.call("Range", log.etcd.under(log.keys(JOB).base))).kvs
            assert await read(log, f"{JOB}2") == [1]
            await written(log, run="u-2")
        finally:
            await log.close()

    run(story())


def test_another_runs_log_stays(etcd_server: Cluster, etcd_prefix: str) -> None:
    """A job that was begun by somebody else keeps its history, whoever erases a job of its name."""

    async def story() -> None:
        url = etcd_server.url(etcd_prefix)
        log = await EtcdLog.open_url(url, CODEC)
        try:
            await (await written(log, run="theirs")).resign()
            await erasing.erase(url, JOB, RUN, lambda: pytest.fail("nothing goes"))
            assert (await read(log), await log.jobs()) == ([1, 2, 3, 4, 5], [JOB])
        finally:
            await log.close()

    run(story())


@pytest.mark.parametrize("then", ["erased", "begun"])
def test_what_is_left_of_half_an_erase_is_no_log(
    etcd_server: Cluster, etcd_prefix: str, monkeypatch: pytest.MonkeyPatch, then: str
) -> None:
    """Readers say that the log was erased; another erase deletes the rest, and so does a job of the name before it begins."""
    monkeypatch.setattr(deleting, "AT_ONCE", 2)

    async def story() -> None:
        url = etcd_server.url(etcd_prefix)
        log = await EtcdLog.open_url(url, CODEC)
        try:
            await (await written(log)).resign()
            with monkeypatch.context() as patch:
                patch.setattr(deleting, "batches", halfway)
                with pytest.raises(asyncio.TimeoutError):
                    await erasing.erase(url, JOB, RUN)
            for _ in range(2):
                with pytest.raises(LogUnavailable, match="its log was erased"):
                    await read(log)
            if then == "erased":
                await erasing.erase(url, JOB, RUN)
                assert (await read(log), await log.jobs()) == ([], [])
            else:
                lead = await written(log, run="u-2", batches=3)
                assert await read(log) == [1, 2, 3]
                await lead.resign()
                await erasing.erase(url, JOB, RUN)  # comes late: it is another's now
                assert await read(log) == [1, 2, 3]
        finally:
            await log.close()

    run(story())


def test_a_log_without_a_head_that_nobody_erased_stays(etcd_server: Cluster, etcd_prefix: str) -> None:
    """Whatever took the head away: the next leader deletes none of it."""

    async def story() -> None:
        log = await EtcdLog.open_url(etcd_server.url(etcd_prefix), CODEC)
        try:
            await (await written(log)).resign()
            keys = log.keys(JOB)
            await log.etcd.call("Txn", log.etcd.txn([], [log.etcd.delete_op(keys.head)]))
            lead = await log.lead(JOB, "b", 600.0)
            assert len((await log.etcd.call("Range", log.etcd.under(keys.log))).kvs) == 5
            await lead.resign()
        finally:
            await log.close()

    run(story())


def test_a_job_that_begins_meanwhile_is_not_erased(
    etcd_server: Cluster, etcd_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even one that is over before the erase goes on: it has a head."""

    async def story() -> None:
        url = etcd_server.url(etcd_prefix)
        log = await EtcdLog.open_url(url, CODEC)
        try:
            await (await written(log)).resign()
            with monkeypatch.context() as patch:

                async def late(*what: Any) -> bool:
                    patch.undo()
                    await (await written(log, run="u-2", batches=2)).resign()
                    return await deleting.batches(*what)

                patch.setattr(deleting, "batches", late)
                with pytest.raises(LogUnavailable, match="has been led meanwhile"):
                    await erasing.erase(url, JOB, RUN)
            assert await read(log) == [1, 2]
        finally:
            await log.close()

    run(story())


async def halfway(etcd: Any, keys: Any, conditions: list[Any]) -> bool:
    """One page, and no answer from then on."""
    page = await etcd.call("Range", etcd.range(keys.log, end=keys.batch(3)))
    assert len(page.kvs) == 2
    gone = etcd.txn(conditions, [etcd.delete_op(keys.log, keys.batch(3))])
    assert (await etcd.call("Txn", gone)).succeeded
    raise asyncio.TimeoutError
