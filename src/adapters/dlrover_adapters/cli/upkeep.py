"""What a launcher keeps on disk while its job runs, whoever removes it: the run's folder, and the job's in the state directory.

Processes that are started later look for sockets, the token and the lock there. Nothing of it is needed by workers that train.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import structlog

from dlrover_adapters.agent.ground import LOOK_S, Ground
from dlrover_adapters.cli import scratch
from dlrover_adapters.cli.settings import Settings
from dlrover_adapters.http.token import keep
from dlrover_backends.local import orphans
from dlrover_core.errors import CoreError

log = structlog.get_logger("dlrover.launcher")


class Upkeep:
    """The folders of one launcher. ``token``: kept in them for `dlrover`; empty: not. ``say`` is told, for people, what went."""

    def __init__(self, settings: Settings, token: str, say: Callable[[str], None]) -> None:
        self._settings, self._token, self._say = settings, token, say
        self._run = Ground(settings.run_dir) if settings.run_dir is not None else None
        self._job = Ground(settings.directory)
        self._state = Ground(self._job.path.parent.parent, deep=False)
        self._locks: list[int] = []
        self._wrong: dict[Path, str] = {}

    def look(self) -> None:
        """Have everything there, if that can be."""
        if self._run is not None:
            self._have(
                self._run,
                self._in_run,
                "no worker is disturbed; one that is restarted may resume from storage instead of memory, and a node that "
                "dies is not replaced",
            )
        self._have(self._job, self._in_job, _LOST_STATE)
        with contextlib.suppress(OSError):  # the job's folder is in it, of which was spoken
            self._state.hold()

    def _have(self, ground: Ground, fill: Callable[[], None], cost: str) -> None:
        known = self._wrong.get(ground.path)
        try:
            if ground.hold() or known is not None:
                fill()
                self._tell(f"{ground.path} was removed while the job runs, and was made anew")
                self._wrong.pop(ground.path, None)
        except OSError as error:
            if known is None:
                why = error.strerror or error
                remedy = "make room there, or make the disk writable: what is missing comes back by itself"
                self._tell(f"{ground.path} is gone and cannot be made anew ({why}): {cost}; {remedy}")
            self._wrong[ground.path] = str(error)

    def _in_run(self) -> None:
        assert self._run is not None
        self._locks.append(scratch.locked(self._run.path, self._settings.mark))
        self._keep_token()

    def _in_job(self) -> None:
        self._settings.write()
        self._locks.append(scratch.relocked(self._job.path))
        self._keep_token()

    def _keep_token(self) -> None:
        if self._token and self._settings.run_dir is not None:
            keep(self._token, Path(self._settings.run_dir), self._job.path / "token")

    def _tell(self, words: str) -> None:
        log.warning(words)
        self._say(words)

    def end(self) -> None:
        """Keep nothing any longer. Idempotent."""
        for ground in (self._run, self._job, self._state):
            if ground is not None:
                ground.release()
        while self._locks:
            os.close(self._locks.pop())


_LOST_STATE = (
    "no worker is disturbed; `dlrover status` and `stop` do not find the job, and what happens may not be recorded"
)


@contextlib.asynccontextmanager
async def kept(
    settings: Settings, token: str, command: str, restore: Callable[[], Awaitable[None]] | None = None
) -> AsyncIterator[None]:
    """Keep the folders of ``settings`` meanwhile; ``restore`` is called on the loop after each look, for sockets in them."""

    def say(words: str) -> None:
        print(f"{command}: {words}", file=sys.stderr)

    upkeep = Upkeep(settings, token, say)
    keeping = asyncio.ensure_future(_keep(upkeep, restore))
    try:
        yield
    finally:
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
        upkeep.end()


async def _keep(upkeep: Upkeep, restore: Callable[[], Awaitable[None]] | None) -> None:
    while True:
        await asyncio.to_thread(upkeep.look)
        await asyncio.to_thread(orphans.reap)
        if restore is not None:
            with contextlib.suppress(CoreError, OSError):  # its folder is missing, which was said
                await restore()
        await asyncio.sleep(LOOK_S)
