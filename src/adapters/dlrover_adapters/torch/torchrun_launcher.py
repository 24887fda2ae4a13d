"""The `Launcher` port over torch's own elastic agent: that one starts, stops and watches workers, we tell it when.

What differs from a launcher of our own: nothing is warm, so a start costs an import; how long a stop takes is torch's choice
(SIGTERM, then up to 30 s, whatever ``grace_s`` says); and torch counts the restarts, so the exit that it will not answer with
another start is reported as the *last*. Steps are never told.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any, NamedTuple

import structlog

from dlrover_core.errors import LaunchFailed
from dlrover_core.runtime.launcher import (
    Notice,
    StoreReady,
    WorkerExit,
    WorkersGone,
    WorkersLaunch,
    WorkersStuck,
)
from dlrover_core.runtime.within import within

from .torchrun_desk import Came, Death, Desk, Exist, Failed, Finished, Leaving, Seen, Sign, Took
from .torchrun_workers import exit_code

TORCH_GRACE_S = 30.0
"""Between SIGTERM and SIGKILL when torch's elastic agent stops its workers (`PContext.close`)."""

STORES_KEPT = 2
"""Of the generations that ran last: somebody may still be about to hear that they are over."""

# What torch sends to workers that it stops, and passes on to them when it is sent these itself.
ITS_SIGNALS = (-signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP, -signal.SIGQUIT)
FINISHED_ALREADY = (
    "its workers had all finished when the others had to begin again, and torch's elastic agent starts none after that: "
    "start torchrun there again"
)

log = structlog.get_logger("dlrover.torchrun")


class Words(NamedTuple):
    """What a dead worker left: the tail of its output, torch's error file, and when that was written (monotonic; 0 without)."""

    tail: str = ""
    error: str = ""
    error_at_us: int = 0


class _Died(NamedTuple):
    """One worker is dead. ``code`` None: torch was quicker to collect it, and will say what it makes of it."""

    seen: Seen
    code: int | None
    died_us: int


OpenStore = Callable[[str], tuple[object, int]]
Watch = Callable[[Seen, Callable[[int | None], None]], Callable[[], None]]


def watch_pidfd(seen: Seen, died: Callable[[int | None], None]) -> Callable[[], None]:
    """Call ``died`` with the exit code as soon as the kernel knows; returns what ends the watch."""
    loop = asyncio.get_running_loop()

    def end() -> None:
        loop.remove_reader(seen.pidfd)
        with contextlib.suppress(OSError):
            os.close(seen.pidfd)

    def fired() -> None:
        code = exit_code(seen.pidfd)
        end()
        died(code)

    loop.add_reader(seen.pidfd, fired)
    return end


class TorchrunLauncher:
    """One identity's launcher; the desk outlives it. ``leave`` is called with the reason when torchrun goes, ``words`` with the
    path of a dead worker's error file.

    To the master a node has one worker, torch's elastic agent: how many processes that one runs is not said at a rendezvous.
    """

    nproc = 1

    def __init__(
        self,
        desk: Desk,
        *,
        open_store: OpenStore,
        bind: str,
        address: str,
        leave: Callable[[str], None],
        words: Callable[[str], Awaitable[Words]],
        watch: Watch = watch_pidfd,
    ) -> None:
        self._desk, self._open_store, self._bind, self._address, self._leave = desk, open_store, bind, address, leave
        self._words, self._watch = words, watch
        self._notices: asyncio.Queue[Notice | None] = asyncio.Queue()
        self._stores: dict[str, Any] = {}
        self._ahead = ""
        self._running: WorkersLaunch | None = None
        self._posted = 0
        self._alive: dict[int, Callable[[], None]] = {}
        self._asked = self._told = self._told_last = self._gone = False
        self._held: list[WorkerExit] = []
        self._dead = asyncio.Event()
        self._news: asyncio.Queue[Sign | _Died] = asyncio.Queue()
        self._work: asyncio.Task[None] | None = None

    # ---- the port

    async def open(self) -> None:
        """Listen to the elastic agent, and have one store ahead. Raises `LaunchFailed`."""
        loop = asyncio.get_running_loop()

        def listen(sign: Sign) -> None:
            # A sign of torchrun's last moments may find the loop closed: nobody is left to be told.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._news.put_nowait, sign)

        try:
            self._offer()
        except (OSError, RuntimeError) as error:
            raise LaunchFailed(f"no store can be opened on {self._bind}: {error}") from error
        self._desk.listen(listen)
        self._work = asyncio.ensure_future(self._hear())

    async def start(self, launch: WorkersLaunch) -> None:
        """Lay it on the desk: the elastic agent is there, or on its way. Raises `LaunchFailed` where it never will be."""
        if not self._desk.post(launch):
            raise LaunchFailed(FINISHED_ALREADY)
        self._posted = launch.generation

    def spend_store(self, address: str) -> None:
        """A world has named this store; if it is ours, open the next."""
        if address and address == self._ahead:
            self._ahead = ""
            with contextlib.suppress(OSError, RuntimeError):
                self._offer()

    async def stop(self, grace_s: float, kill_wait_s: float) -> bool:
        """Have the elastic agent stop its workers. True when all are dead; torch's own patience counts, not ``grace_s``."""
        running = self._desk.withdraw()
        if running is not None:
            self._took(running)
        if self._posted:
            self._notices.put_nowait(WorkersGone(self._posted))
            self._posted = 0
        if running is None:
            return True
        self._asked = True
        if not self._desk.begun:
            # No worker lives. Should the elastic agent be about to start some, it stops them when it next asks.
            self._desk.call_back()
            self._dead.set()
        if not self._dead.is_set():
            self._desk.call_back()
            try:
                await within(max(grace_s, TORCH_GRACE_S) + kill_wait_s, self._dead.wait())
            except asyncio.TimeoutError:
                self._notices.put_nowait(WorkersStuck(running.generation, tuple(self._alive)))
                return False
        self._bury()
        return True

    async def notices(self) -> AsyncIterator[Notice]:
        """Everything that happens, in order."""
        while (notice := await self._notices.get()) is not None:
            yield notice

    async def close(self) -> None:
        """Watch no more. Workers are torch's, and so is their end; stores stay for those who still say goodbye there."""
        for end in self._alive.values():
            end()
        self._alive.clear()
        if self._work is not None:
            self._work.cancel()
            await asyncio.gather(self._work, return_exceptions=True)
        self._notices.put_nowait(None)

    # ---- stores

    def _offer(self) -> None:
        store, port = self._open_store(self._bind)
        self._ahead = f"[{self._address}]:{port}" if ":" in self._address else f"{self._address}:{port}"
        self._stores[self._ahead] = store
        for old in [one for one in self._stores if one != self._ahead][:-STORES_KEPT]:
            del self._stores[old]
        self._notices.put_nowait(StoreReady(self._ahead))

    # ---- what the elastic agent does

    async def _hear(self) -> None:
        """One after the other: what is said about a death comes before what is done about it."""
        while True:
            match await self._news.get():
                case Took(launch):
                    self._took(launch)
                case Exist(generation, workers):
                    self._exist(generation, workers)
                case _Died() as death:
                    await self._died(death)
                case Came(generation):
                    self._came(generation)
                case Finished():
                    self._finished()
                case Failed(_, deaths):
                    self._failed(deaths)
                case Leaving(reason, dead):
                    self._leaving(reason, dead=dead)

    def _took(self, launch: WorkersLaunch) -> None:
        if launch is self._running:
            return
        self._running = launch
        if self._posted == launch.generation:
            self._posted = 0
        self._asked = self._told = self._told_last = self._gone = False
        self._held.clear()
        self._dead.clear()

    def _exist(self, generation: int, workers: tuple[Seen, ...]) -> None:
        late = self._running is None or self._running.generation != generation or self._gone
        for seen in workers:
            if late or seen.pid in self._alive:
                os.close(seen.pidfd)
            else:
                self._alive[seen.pid] = self._watch(seen, partial(self._on_death, seen))

    def _on_death(self, seen: Seen, code: int | None) -> None:
        self._news.put_nowait(_Died(seen, code, _now_us()))

    async def _died(self, death: _Died) -> None:
        seen, code, died_us = death
        words = Words()
        if code and seen.error_file:
            words = await self._words(seen.error_file)
        if self._running is None or self._alive.pop(seen.pid, None) is None:
            return
        if code:
            self._judge(seen, WorkerExit(self._running.generation, 0, seen.rank, code, False, died_us, -1, *words))
        if not self._alive:
            self._dead.set()
            if self._told or self._asked:
                self._bury()

    def _judge(self, seen: Seen, gone: WorkerExit) -> None:
        """Was it torch's doing, may it have been, or is it a failure?"""
        by_torch = gone.exit_code in ITS_SIGNALS or gone.exit_code == -signal.SIGKILL
        if self._asked or (self._told and by_torch):
            self._notices.put_nowait(gone._replace(asked=True))
        elif gone.exit_code in ITS_SIGNALS or seen.last is None:
            # Somebody may have stopped torchrun, which passes the signal on, or torch may have no restarts left: its next
            # step will tell.
            self._held.append(gone._replace(last=bool(seen.last)))
        else:
            self._tell(gone._replace(last=seen.last))

    def _tell(self, gone: WorkerExit) -> None:
        self._told, self._told_last = True, self._told_last or gone.last
        self._notices.put_nowait(gone)

    def _came(self, generation: int) -> None:
        """Torch's elastic agent wants the next generation. If nobody called it, its workers have failed."""
        running = self._running
        if running is None or running.generation != generation or self._gone:
            return
        if not self._asked and not self._told:
            for held in self._held:
                self._tell(held)
        if not self._asked and not self._told:
            # Its exit code is not known; 1 is what a failing script's would be.
            tail = "torch's elastic agent restarts its workers; how they ended it does not tell"
            self._tell(WorkerExit(running.generation, 0, running.first_rank, 1, False, _now_us(), -1, tail))
        self._bury()

    def _finished(self) -> None:
        if self._running is not None and not self._gone:
            rank = self._running.first_rank
            self._notices.put_nowait(WorkerExit(self._running.generation, 0, rank, 0, False, _now_us()))
            self._bury()

    def _failed(self, deaths: tuple[Death, ...]) -> None:
        """Torch gives up: the first death that it knows of ends the job, unless that was said when it happened."""
        running = self._running
        if running is None or self._told_last:
            return
        if not deaths and self._held:
            for held in self._held:
                self._tell(held._replace(last=True))
        else:
            found = deaths or (Death(running.first_rank, 1),)
            for death in found[:1] if self._told else found:
                exits = WorkerExit(
                    running.generation, 0, death.rank, death.exit_code, False, _now_us(), -1, "", death.error
                )
                self._tell(exits._replace(error_at_us=death.error_at_us, last=True))
        self._bury()

    def _leaving(self, reason: str, *, dead: bool) -> None:
        self._asked = True
        if dead:
            self._bury()
        self._leave(reason)

    def _bury(self) -> None:
        """Everybody of the generation is dead, and whatever there was to say about it is said."""
        for end in self._alive.values():
            end()
        self._alive.clear()
        self._dead.set()
        if self._running is not None and not self._gone:
            self._gone = True
            self._notices.put_nowait(WorkersGone(self._running.generation))


def _now_us() -> int:
    return time.monotonic_ns() // 1000
