"""A job's masters and their launcher: it owns the port, the node processes and two masters, one leading and one in reserve.

Masters may die at any moment: the reserve, once it is there, has the log's lock within a millisecond and the port is still
open, because it is ours. In a log that hosts share the reserve leads when the dead one's lease is over, if the successor that is
started meanwhile, which knows who is dead and waits for no lease, has not come first. Where other hosts have masters of the job
too there is one master here, and the reserve is on another host. Only after our master, leading, has been silent for long is
there a reserve here too, from then on. We ourselves hold no state; when we are killed, everything we started is killed with us by
the kernel.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import signal
import socket
import time
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, Protocol, Union

import structlog

from dlrover_adapters.agent import signals
from dlrover_adapters.agent.spawn import module_command
from dlrover_adapters.cli import ahead_master
from dlrover_adapters.cli.ahead_master import Descriptors
from dlrover_adapters.cli.asking import Asking, on_terminal
from dlrover_adapters.cli.scratch import MARK
from dlrover_adapters.cli.settings import EX_FATAL, EX_OVER, EX_UNRECORDED, EX_UNRESTARTED, EX_UNSTORED, Settings
from dlrover_adapters.cli.unled import Unled
from dlrover_core.runtime.within import within

if TYPE_CHECKING:
    import ssl

log = structlog.get_logger("dlrover.launcher")

_Process = Union[asyncio.subprocess.Process, ahead_master.AheadMaster]

CRASHES_MAX, CRASH_WINDOW_S = 20, 10.0
BACK_OFF_S = 0.5
UNFORKED_MAX, UNFORKED_PAUSE_S = 60, 2.0
"""Tries, and the pauses between them, while the host refuses to start a process; then the job fails if no master lives."""
DEAD_MAX = 128
"""Successors are told of so many dead masters: of those that lived longest, as whom the log refuses leads nothing."""
LEAVE_S = 10.0
SAY_S = 2.0
RESERVE_S, RESERVE_MAX_S = 5.0, 30.0
"""The reserve starts this long after the first agents are warm, which is waited for no longer than this: the start and the first
steps need the processor first. A master that dies before has a successor all the same, within a second instead of at once."""


class MastersFailed(Exception):
    """No master can lead this job. The message says what the last of them said. ``fatal``: starting more is pointless."""

    def __init__(self, message: str, *, fatal: bool = False) -> None:
        super().__init__(message)
        self.fatal = fatal


class Nodes(Protocol):
    """The nodes that live and die with this launcher."""

    async def __aenter__(self) -> object:
        """Open."""
        ...

    async def __aexit__(self, *_: object) -> None:
        """End them all."""
        ...

    async def warm(self) -> None:
        """Wait until those started first need the processor no longer."""
        ...

    async def restore(self) -> None:
        """Make sockets anew that were removed. Raises `OSError` and `CoreError`."""
        ...

    def kill(self) -> None:
        """SIGKILL them all."""
        ...

    async def close(self, grace_s: float = 0.0) -> None:
        """End them all, SIGTERM first where there is a grace, and take no new ones. Idempotent."""
        ...

    def said(self) -> Mapping[str, Mapping[str, Any]]:
        """What each node's agent said of itself (`unled.said`), and the node's ``phase``."""
        ...


class NoNodes:
    """For launchers of masters alone: nodes come by themselves, from elsewhere."""

    async def __aenter__(self) -> object:
        """Nothing to open."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Nothing to end."""

    async def warm(self) -> None:
        """Nothing needs the processor."""

    async def restore(self) -> None:
        """There is no socket."""

    def kill(self) -> None:
        """Nothing to kill."""

    async def close(self, grace_s: float = 0.0) -> None:
        """Nothing to end."""

    def said(self) -> Mapping[str, Mapping[str, Any]]:
        """Nobody is here to say anything."""
        return {}


class Supervisor:
    """One run, from start to end. The signals at which it ``leaves`` ask it to hand the job over, not to stop it.

    ``first``: a process that was started ahead to be the first master.
    """

    def __init__(
        self,
        settings: Settings,
        token: str,
        port: socket.socket,
        host: Nodes,
        command: str = "dlrover-run",
        *,
        leaves: Collection[signal.Signals] = (),
        first: ahead_master.AheadMaster | None = None,
    ) -> None:
        self._first = first
        self._settings, self._token, self._port, self._host = settings, token, port, host
        self._command, self._leaves = command, leaves
        # Files in memory: whatever becomes of the disk, masters can be started, and told to stop the job.
        self._papers = self._stop = -1
        self._say = on_terminal(command)
        self._masters: dict[int, _Process] = {}
        self._unforked = 0
        self._over, self._doubt = asyncio.Event(), asyncio.Event()
        self._crashes: list[float] = []
        self._dead: list[tuple[float, str]] = []
        self._asked = self._number = 0
        self._failure = ""
        self.left = self.unrecorded = self.unstored = False
        self.failed = ""
        self._unled = Unled(settings, host.said, self._say)
        self._ending: asyncio.Future[None] | None = None
        self.stopped_by: signal.Signals | None = None

    async def run(self) -> None:
        """Until the job is over. Raises `MastersFailed`."""
        self._papers, self._stop = self._settings.in_memory(), os.memfd_create("dlrover-stop")
        try:
            await self._run()
        finally:
            papers, stop, self._papers, self._stop = self._papers, self._stop, -1, -1
            os.close(papers)
            os.close(stop)

    async def _run(self) -> None:
        async with self._host:
            keepers = [asyncio.ensure_future(self._keep_one())]
            if self._reserve_elsewhere:
                keepers.append(asyncio.ensure_future(self._keep_second()))
            else:
                keepers.append(asyncio.ensure_future(self._keep_reserve()))
            if not self._settings.shared:
                keepers.append(asyncio.ensure_future(self._end_unled()))
            over = asyncio.ensure_future(self._over.wait())
            try:
                await asyncio.wait({over, *keepers}, return_when=asyncio.FIRST_COMPLETED)
                for keeper in keepers:
                    if keeper.done():
                        keeper.result()
                if self._failure:
                    raise MastersFailed(self._failure)
            finally:
                for task in (over, *keepers):
                    task.cancel()
                await asyncio.gather(over, *keepers, return_exceptions=True)
                if self._ending is not None:
                    await asyncio.gather(self._ending, return_exceptions=True)
                await self._end_masters()

    @property
    def _reserve_elsewhere(self) -> bool:
        """May other hosts have masters of this job? Those of a job whose nodes are our children are all here."""
        return self._settings.shared and self._settings.nodes_elsewhere

    async def _end_unled(self) -> None:
        end = await self._unled.end()
        self.unrecorded, self.unstored, self.failed = True, bool(end.owed), end.failed
        self._over.set()

    async def _keep_reserve(self) -> None:
        with contextlib.suppress(asyncio.TimeoutError):
            await within(RESERVE_MAX_S, self._host.warm())
        await asyncio.sleep(RESERVE_S)
        await self._keep_one()

    async def _keep_second(self) -> None:
        await self._doubt.wait()
        log.info("a second master is kept here, as the one that leads does not answer")
        await self._keep_one()

    async def _keep_one(self) -> None:
        """Keep one master's place filled until the job is over."""
        loop = asyncio.get_running_loop()
        while not self._over.is_set():
            began = loop.time()
            self._number += 1
            try:
                code = await self._one_master(self._number)
            except OSError as error:
                await self._unstarted(error)
                continue
            self._unforked = 0
            if code in (EX_UNRECORDED, EX_UNSTORED, EX_UNRESTARTED):
                self.unrecorded, self.unstored = True, code == EX_UNSTORED
                self.failed = "a worker that failed could not be restarted" if code == EX_UNRESTARTED else ""
                self._over.set()
                return
            if code == EX_OVER:
                self.left = False
                self._over.set()
                return
            if self.left:
                if self._masters:  # the one that led may still have words for its agents
                    await self._over.wait()
                self._over.set()
                return
            if self._asked and code == -signal.SIGTERM:
                continue  # asked before it could listen; the next one finds the words
            if code == EX_FATAL:
                raise MastersFailed(f"the job's log cannot be led; see {self._settings.control_log}", fatal=True)
            self._crashes = [at for at in self._crashes if at > loop.time() - CRASH_WINDOW_S] + [loop.time()]
            if len(self._crashes) > CRASHES_MAX:
                raise MastersFailed(
                    f"{CRASHES_MAX} masters ended within {CRASH_WINDOW_S:g} s; see {self._settings.control_log}"
                )
            if loop.time() - began < BACK_OFF_S:
                await asyncio.sleep(BACK_OFF_S)

    async def _unstarted(self, error: OSError) -> None:
        """A limit of processes or memory was reached: it may pass, and training needs no master meanwhile.

        Raises `MastersFailed` when it has not passed for long and nobody leads.
        """
        self._unforked += 1
        log.error("a master cannot be started", reason=error.strerror or str(error), again_in_s=UNFORKED_PAUSE_S)
        if self._unforked >= UNFORKED_MAX and not self._masters:
            raise MastersFailed(f"no master can be started: {error.strerror or error}; see ulimit -u and pids.max")
        await asyncio.sleep(UNFORKED_PAUSE_S)

    async def _one_master(self, number: int) -> int:
        """The exit code of a master that knows who is dead: any of them may have led last, for some are refused by the log."""
        spec = self._settings.job
        asking = Asking(spec.job, spec.hung_s, self._say, self._after_hung, self._doubt.set)
        try:
            return await self._living_master(number, asking)
        finally:
            asking.close()

    async def _living_master(self, number: int, asking: Asking) -> int:
        began = asyncio.get_running_loop().time()
        process = await self._begun(number, asking)
        self._masters[process.pid] = process
        asking.begin(process.pid, functools.partial(self._kill, process))
        if self.left:
            self._ask(process)
        try:
            return await process.wait()
        finally:
            del self._masters[process.pid]
            if process.returncode is None:
                process.kill()
                await process.wait()
            lived_s = asyncio.get_running_loop().time() - began
            self._dead.append((lived_s, self._settings.holder(process.pid, number)))
            if len(self._dead) > DEAD_MAX:
                self._dead.remove(min(self._dead))

    async def _begun(self, number: int, asking: Asking) -> _Process:
        """The process of a master: that which was started ahead, unless it is dead, or a new one. Raises `OSError`."""
        words = ["--job", self._settings.job.job, "--parent", str(os.getpid()), "--number", str(number)]
        words += ["--quiet"] if self._masters else []
        words += [word for _, holder in self._dead for word in ("--dead", holder)]
        env = {"DLROVER_TOKEN": self._token, MARK: self._settings.mark}
        own = Descriptors(self._port.fileno(), self._papers, self._stop, asking.theirs.fileno())
        first, self._first = self._first, None
        if first is not None and first.tell(words, env, own):
            return first
        return await asyncio.create_subprocess_exec(
            *module_command(ahead_master.MODULE),
            *words,
            *own.words(),
            stdin=asyncio.subprocess.DEVNULL,
            pass_fds=own,
            env={**os.environ, **env},
            start_new_session=True,
        )

    def _after_hung(self, leads: bool) -> str:
        """What follows when a master that hangs is killed, for people."""
        if not leads:
            return "another one takes its place"
        if self._reserve_elsewhere:
            return "another host's master leads, or one here"
        return "the one in reserve leads" if len(self._masters) > 1 else "a new one is started"

    @staticmethod
    def _ask(process: _Process) -> None:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()

    @staticmethod
    def _kill(process: _Process) -> None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()

    async def _end_masters(self) -> None:
        for process in list(self._masters.values()):
            self._kill(process)
            await process.wait()

    def fail(self, why: str) -> None:
        """End all masters: `run` raises `MastersFailed`."""
        self._failure = why
        self._over.set()

    def stop(self, number: signal.Signals) -> None:
        """The first time: let the job stop in its own time. The second: kill its nodes. The third: leave it."""
        loop, spec = asyncio.get_running_loop(), self._settings.job
        self._asked += 1
        if self.left or number in self._leaves:
            self._leave()
        elif self._asked == 1:
            self.stopped_by = number
            if self._settings.run_dir is not None:
                signals.tell(self._settings.run_dir, number)
            if self._stop >= 0:
                os.pwrite(self._stop, f"{self._command} got {signal.Signals(number).name}".encode(), 0)
            for process in self._masters.values():
                self._ask(process)
            if self._unled.wrong:  # nobody else tells them
                self._ending = asyncio.ensure_future(self._end_nodes(spec.stop_grace_s + LEAVE_S))
            loop.call_later(SAY_S, self._say_stopping)
            # No master may be able to lead; then nobody stops anything.
            loop.call_later(spec.stop_grace_s + spec.kill_wait_s + LEAVE_S, self._over.set)
        elif self._asked == 2:
            # The master sees them die, and the log gets its end.
            self._host.kill()
            loop.call_later(LEAVE_S, self._over.set)
        else:
            self._over.set()

    async def _end_nodes(self, grace_s: float) -> None:
        await self._host.close(grace_s)
        self._over.set()

    def _say_stopping(self) -> None:
        if not self._over.is_set() and self._asked == 1:
            wait = "workers have their grace, and a master must be able to decide it; once more kills them"
            self._say(f"job {self._settings.job.job} stops: {wait}")

    def _leave(self) -> None:
        """The first time: let our master hand over, and go. The second: do not wait for it."""
        self.left = True
        if self._asked > 1:
            self._over.set()
            return
        for process in self._masters.values():
            self._ask(process)
        asyncio.get_running_loop().call_later(LEAVE_S, self._over.set)


async def watch(
    address: str,
    token: str,
    tls: ssl.SSLContext | None,
    show: Callable[[Mapping[str, Any], float], None],
    period_s: float,
) -> None:
    """Show our masters' status now and again, until cancelled; while nobody answers, the last one stays."""
    from dlrover_adapters.http.client import fetch_status
    from dlrover_core.errors import CoreError

    while True:
        with contextlib.suppress(CoreError, OSError, asyncio.TimeoutError):
            show(await fetch_status(address, token, tls=tls), time.monotonic())
        await asyncio.sleep(period_s)
