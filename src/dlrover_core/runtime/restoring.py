"""The state of a job, read from its log."""

from __future__ import annotations

import structlog

from dlrover_core.job.state import FOLD, JobState
from dlrover_core.kernel.log import EventLog
from dlrover_core.kernel.state import unpack

log = structlog.get_logger("dlrover.master")


async def restored(event_log: EventLog, name: str) -> JobState:
    """The state of a job: the newest snapshot that this version understands, and the records after it."""
    return await caught_up(event_log, name, await snapshotted(event_log, name))


async def snapshotted(event_log: EventLog, name: str) -> JobState:
    """The state in the newest snapshot of this schema; without one, the empty state."""
    snapshot = await event_log.latest_snapshot(name)
    if snapshot is None:
        return FOLD.new()
    if snapshot.schema != FOLD.schema:
        log.warning("snapshot ignored", reason="taken by a version with another state", seq=snapshot.seq)
        return FOLD.new()
    return unpack(JobState, snapshot.state)


async def caught_up(event_log: EventLog, name: str, state: JobState) -> JobState:
    """The state with the log's later records. After an error, it stands where the log could be read to."""
    async for batch in event_log.batches(name, state.seq):
        FOLD.fold((record for record in batch.records if record.seq > state.seq), state)
    return state
