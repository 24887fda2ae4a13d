"""Forgetting a job that is over: all that an etcd has of it goes, but never under a master that leads."""

from __future__ import annotations

from collections.abc import Callable

import structlog

from dlrover_adapters.etcd import deleting
from dlrover_adapters.etcd.keys import Keys, end_of
from dlrover_adapters.etcd.log import EtcdLog
from dlrover_adapters.etcd.looking import look
from dlrover_core.errors import LogError, LogUnavailable
from dlrover_core.job.job import JobCreated
from dlrover_core.job.state import CODEC


async def erase(url: str, job: str, run: str, begun: Callable[[], None] = lambda: None) -> None:
    """Delete every key of a job whose log began with ``run``; a log that began with another one is another's, and stays.

    What is not there is no error; one that was interrupted is finished by the next. ``begun`` is called before anything of a log
    is deleted.

    Raises `LogUnavailable` while a master leads the job, or nobody answers; `SpecError` for a URL that cannot be right.
    """
    log = await EtcdLog.open_url(url, CODEC)
    try:
        etcd, keys = log.etcd, log.keys(job)
        if not await _behead(log, keys, run, begun):
            return
        # A job that has begun since has a leader, or a head.
        free = [etcd.created(keys.leader, 0), etcd.created(keys.head, 0)]
        rest = [etcd.delete_op(keys.base, end_of(keys.base)), etcd.delete_op(keys.name)]
        if not await deleting.batches(etcd, keys, free):
            raise await _led(log, job)
        if not (await etcd.call("Txn", etcd.txn(free, rest))).succeeded:
            raise await _led(log, job)
    finally:
        await log.close()


async def _behead(log: EtcdLog, keys: Keys, run: str, begun: Callable[[], None]) -> bool:
    """Put the mark of an erased log in the head's place, so that the rest is no log; is it so now? Raises as `erase` does."""
    etcd = log.etcd
    first = etcd.range(keys.log, end=end_of(keys.log), limit=1)
    _, (marks, heads, batches) = await look(etcd, (etcd.range(keys.erased), etcd.range(keys.head), first))
    found = marks[0].value.decode(errors="replace") if marks else _run_of(batches[0].value) if batches else ""
    if (heads or batches) and found != run:
        structlog.get_logger("dlrover.etcd").warning("the log is another run's and stays", job=keys.job, run=found)
        return False
    if heads or batches:
        begun()
    if (heads or batches) and not marks:
        same = [etcd.created(keys.leader, 0), etcd.modified(keys.head, heads[0].mod_revision if heads else 0)]
        mark = etcd.put_op(keys.erased, run.encode())
        gone = [mark, etcd.delete_op(keys.head), etcd.delete_op(keys.snap, end_of(keys.snap))]
        if not (await etcd.call("Txn", etcd.txn(same, gone))).succeeded:
            raise await _led(log, keys.job)
    return True


async def _led(log: EtcdLog, job: str) -> LogUnavailable:
    leader = await log.leader(job)
    who = f"is led by {leader.address or leader.holder}" if leader is not None else "has been led meanwhile"
    return LogUnavailable(f"job {job!r} in {log.etcd.address.shown} {who}")


def _run_of(payload: bytes) -> str:
    """The run that a log began with; empty: it cannot be told."""
    try:
        events = [one.event for one in CODEC.decode(payload).records]
    except LogError:
        return ""
    return next((one.run for one in events if isinstance(one, JobCreated)), "")
