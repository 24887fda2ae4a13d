"""Forgetting a job that is over: all that an etcd has of it goes, but never under a master that leads."""

from __future__ import annotations

import structlog

from dlrover_adapters.etcd.keys import end_of
from dlrover_adapters.etcd.log import TRIM_BATCHES, EtcdLog
from dlrover_core.errors import LogError, LogUnavailable
from dlrover_core.job.job import JobCreated
from dlrover_core.job.state import CODEC


async def erase(url: str, job: str, run: str) -> None:
    """Delete every key of a job whose log began with ``run``; a log that began with another one is another's, and stays.

    What is not there is no error; one that was interrupted is finished by the next.
    Raises `LogUnavailable` while a master leads the job, or nobody answers; `SpecError` for a URL that cannot be right.
    """
    log = await EtcdLog.open_url(url, CODEC)
    try:
        etcd, keys = log.etcd, log.keys(job)
        start, end = keys.log, end_of(keys.log)
        (first,) = (await etcd.call("Range", etcd.range(start, end=end, limit=1))).kvs or (None,)
        if first is not None and (found := _run_of(first.value)) != run:
            structlog.get_logger("dlrover.etcd").warning("the log is another run's and stays", job=job, run=found)
            return
        while True:  # oldest first, and not all at once: etcd applies a transaction whole, and everybody waits for it
            page = await etcd.call("Range", etcd.range(start, end=end, limit=TRIM_BATCHES, keys_only=True))
            more = bool(page.kvs and page.more)
            gone = (
                [etcd.delete_op(start, page.kvs[-1].key.decode() + "\0")]
                if more
                else [etcd.delete_op(keys.base, end_of(keys.base)), etcd.delete_op(keys.name)]
            )
            done = await etcd.call("Txn", etcd.txn([etcd.created(keys.leader, 0)], gone))
            if not done.succeeded:
                leader = await log.leader(job)
                who = (leader.address or leader.holder) if leader is not None else "a master"
                raise LogUnavailable(f"job {job!r} in {etcd.address.shown} is led by {who}")
            if not more:
                return
    finally:
        await log.close()


def _run_of(payload: bytes) -> str:
    """The run that a log began with; empty: it cannot be told."""
    try:
        events = [one.event for one in CODEC.decode(payload).records]
    except LogError:
        return ""
    return next((one.run for one in events if isinstance(one, JobCreated)), "")
