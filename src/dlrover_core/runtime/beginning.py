"""The first event of a run, written by whoever leads for that long: before masters of several hosts start to serve it.

Each host's launcher draws a run id of its own, and only the log knows whose counts. So it is settled there, under a
leadership, and every master after that serves a run that has begun.
"""

from __future__ import annotations

import asyncio

from dlrover_core.errors import LogError, LogUnavailable, NotLeading
from dlrover_core.job.job import CreateJob
from dlrover_core.job.state import CODEC, JobState
from dlrover_core.kernel.engine import Engine
from dlrover_core.kernel.events import Batch
from dlrover_core.kernel.log import AlreadyAppended, Appended, Conflict, Fenced, Leadership, Outcome
from dlrover_core.rules.model import MODEL
from dlrover_core.runtime.pipeline import RETRY_S


async def begin(lead: Leadership, state: JobState, run: str, spec: str, now: int) -> None:
    """Begin ``run`` in the log that ``state`` is the whole of, which is used up; a live one of another id is abandoned.

    Raises `NotLeading` when another leader came in between, `LogFull`, and `LogUnavailable` after some attempts.
    """
    engine = Engine(MODEL, CODEC, state, lead.token)
    engine.handle(CreateJob(run, spec), max(now, state.at + 1))
    batch = engine.take()
    assert batch is not None, "a run that begins has a first event"
    match await _appended(lead, batch):
        case Appended() | AlreadyAppended():
            return
        case Fenced():
            raise NotLeading(engine.state.job.name)
        case Conflict(expected, found):
            raise LogError(f"the log's head is {found}, the new run's first event was to follow {expected}: a bug")


async def _appended(lead: Leadership, batch: Batch) -> Outcome:
    for pause_s in RETRY_S:
        try:
            return await lead.append(batch)
        except LogUnavailable:
            await asyncio.sleep(pause_s)
    return await lead.append(batch)
