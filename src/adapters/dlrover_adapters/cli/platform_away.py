"""A job that is to stop though the platform of its nodes has gone: nobody can say that they have ended, and nobody waits.

Without agents a master waits for its backend's word of every node; where the platform itself does not answer, none comes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sized
from typing import Protocol

from dlrover_core.job.state import JobState
from dlrover_core.runtime.backend import Reaching

AWAY_S, LOOK_S = 5.0, 1.0
"""A platform that is silent for so long is gone, for a job that is to stop."""
STOPS = ("stopping", "stopped")


class Leader(Protocol):
    """What is seen of the master."""

    @property
    def state(self) -> JobState:
        """The job's."""
        ...

    @property
    def sessions(self) -> Sized:
        """Those of agents."""
        ...


async def until_gone(backend: object, master: Leader) -> str:
    """Return why the platform of a job that is to stop, and of which no agent is left, is taken for gone. It may never be."""
    if not isinstance(backend, Reaching):
        await asyncio.Event().wait()
    assert isinstance(backend, Reaching)
    while True:
        if master.state.job.state in STOPS and not len(master.sessions):
            why = await silent(backend, AWAY_S)
            if why and master.state.job.state in STOPS and not len(master.sessions):
                return why
        await asyncio.sleep(LOOK_S)


async def silent(backend: Reaching, for_s: float) -> str:
    """Why a platform has not answered once for so long; empty as soon as it does."""
    began = time.monotonic()
    while why := await backend.away():
        if time.monotonic() - began >= for_s:
            return why
        await asyncio.sleep(LOOK_S)
    return ""
