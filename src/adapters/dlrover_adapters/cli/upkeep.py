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
from dlrover_backends.shared import orphans
from dlrover_core.errors import CoreError
from dlrover_core.host import threads
from dlrover_core.host.threads import NO_THREAD

log = structlog.get_logger("dlrover.launcher")


class Upkeep:
    """The folders of one launcher. ``token``: kept in them for `dlrover`; empty: not. ``say`` is told, for people, what went."""

    def __init__(self, settings: Settings, token: str, say: Callable[[str], None]) -> None:
        self._settings, self._token, self._say = settings, token, say
        self._run = Ground(settings.run_dir) if settings.run_dir is not None else None
        self._job = Ground(settings.directory)
        self._state = Ground(self._job.path.parent.parent, deep=False)
        self._locks: dict[Path, int] = {}
        self._empty: set[Path] = set()
        """Folders that were made anew, and are not filled yet."""
        self._unthreaded = False
        self._wrong: set[Path] = set()
        """Folders of which people were told that they are gone."""

    def look(self) -> None:
        """Have everything there, if that can be."""
        # Both folders before what is in them: the token lies in the one, and a link to it in the other.
        there = [one for one in (self._run, self._job) if one is not None and self._tried(self._hold, one)]
        for one in there:
            self._tried(self._fill, one)
        with contextlib.suppress(OSError):  # the job's folder is in it, of which was spoken
            self._state.hold()

    def _tried(self, act: Callable[[Ground], None], ground: Ground) -> bool:
        try:
            act(ground)
        except OSError as error:
            if ground.path not in self._wrong:
                why = error.strerror or error
                remedy = "make room there, or make the disk writable: what is missing comes back by itself"
                cost = _LOST_RUN if ground is self._run else _LOST_STATE
                self._tell(f"{ground.path} is gone and cannot be made anew ({why}): {cost}; {remedy}")
            self._wrong.add(ground.path)
            return False
        return True

    def _hold(self, ground: Ground) -> None:
        if ground.hold():
            self._empty.add(ground.path)

    def _fill(self, ground: Ground) -> None:
        if ground.path in self._empty:
            if ground is self._run:
                self._in_run()
            else:
                self._in_job()
            self._empty.remove(ground.path)
            self._tell(f"{ground.path} was removed while the job runs, and was made anew")
        self._wrong.discard(ground.path)

    def _in_run(self) -> None:
        assert self._run is not None
        self._lock(self._run.path, lambda path: scratch.locked(path, self._settings.mark))
        self._keep_token()

    def _in_job(self) -> None:
        self._settings.write()
        self._lock(self._job.path, scratch.relocked)
        self._keep_token()

    def _lock(self, path: Path, make: Callable[[Path], int]) -> None:
        """Hold the folder's lock; one that an earlier try took, before something else failed, is still held."""
        before = self._locks.get(path, -1)
        if before >= 0 and scratch.locks(before, path):
            return
        self._locks[path] = make(path)
        if before >= 0:
            os.close(before)

    def _keep_token(self) -> None:
        if self._token and self._settings.run_dir is not None:
            keep(self._token, Path(self._settings.run_dir), self._job.path / "token")

    def _tell(self, words: str) -> None:
        log.warning(words)
        self._say(words)

    def unthreaded(self) -> None:
        """Say, once, that nobody can look."""
        if not self._unthreaded:
            self._tell(f"the run's folders are not looked after for now: {NO_THREAD}")
        self._unthreaded = True

    def end(self) -> None:
        """Keep nothing any longer. Idempotent."""
        for ground in (self._run, self._job, self._state):
            if ground is not None:
                ground.release()
        while self._locks:
            os.close(self._locks.popitem()[1])


_LOST_RUN = (
    "no worker is disturbed; one that is restarted may resume from storage instead of memory, and a node that "
    "dies is not replaced"
)
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

    threads.install()
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
        try:
            await asyncio.to_thread(upkeep.look)
            await asyncio.to_thread(orphans.reap)
        except RuntimeError:
            upkeep.unthreaded()
        if restore is not None:
            with contextlib.suppress(CoreError, OSError):  # its folder is missing, which was said
                await restore()
        await asyncio.sleep(LOOK_S)
