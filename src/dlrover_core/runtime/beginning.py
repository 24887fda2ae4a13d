"""The first events of a run, and other sizes for a run that goes on, each written under a short leadership.

Each host's launcher draws a run id of its own, and only the log decides which one counts. So the decision is written to the
log before the masters of several hosts start to serve the run, and every master after that serves a run that has begun.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from dlrover_core.errors import LogError, LogUnavailable, NotLeading, Refused
from dlrover_core.job.job import CreateJob
from dlrover_core.job.operations import ScaleGroup
from dlrover_core.job.state import CODEC, JobState
from dlrover_core.kernel.engine import Engine, NotDone
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
    await _committed(lead, engine)


async def resize(lead: Leadership, state: JobState, asked: Sequence[ScaleGroup], now: int) -> None:
    """Give groups of the live run other sizes, as a person's command would; ``state`` is the whole log, and is used up.

    Raises `Refused` where the job cannot take one of them now, `NotLeading`, `LogFull` and `LogUnavailable`.
    """
    engine = Engine(MODEL, CODEC, state, lead.token)
    for command in asked:
        reply = engine.handle(command, max(now, state.at + 1))
        if isinstance(reply, NotDone):
            raise Refused(reply.reason)
    await _committed(lead, engine)


async def _committed(lead: Leadership, engine: Engine[JobState]) -> None:
    batch = engine.take()
    assert batch is not None, "what was handled has led to events"
    match await _appended(lead, batch):
        case Appended() | AlreadyAppended():
            return
        case Fenced():
            raise NotLeading(engine.state.job.name)
        case Conflict(expected, found):
            raise LogError(f"the log's head is {found}, the first event was to follow {expected}: a bug")


async def _appended(lead: Leadership, batch: Batch) -> Outcome:
    for pause_s in RETRY_S:
        try:
            return await lead.append(batch)
        except LogUnavailable:
            await asyncio.sleep(pause_s)
    return await lead.append(batch)
