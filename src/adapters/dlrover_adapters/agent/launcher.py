"""The Linux launcher: the `Launcher` port over a zygote, pidfds, files and a Unix socket."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import AsyncIterator

import structlog

from dlrover_core.diagnosis import stall
from dlrover_core.errors import LaunchFailed
from dlrover_core.host.threads import NO_THREAD
from dlrover_core.runtime.launcher import (
    Notice,
    StoreGone,
    StoreReady,
    WorkerExit,
    WorkersGone,
    WorkersLaunch,
    WorkersStuck,
    WorkerStep,
)
from dlrover_core.runtime.within import within

from . import signals, wire
from .addresses import Addresses
from .affinity import cpus_by_rank
from .checkpoints.saving import Saving
from .checkpoints.vault import Vault
from .children import wait_dead
from .config import LaunchConfig, Mode
from .data_socket import DataSocket
from .doorbell import Doorbell
from .framework import load
from .ground import Restorable, Watch
from .last_words import LastWords, last_words
from .leftovers import Leavings
from .log_bounds import LogBounds
from .log_watch import Known, Output, OutputWatch
from .logs import LogPump, RankFiles, StreamFile, made_all, unwritten
from .nursery import STRAYS, Nursery, Spare
from .pace_watch import WorkerSlot
from .process import await_sessions_end, become_subreaper, end_sessions
from .ranks import Rank, Worker
from .run_folders import private_folder
from .seat import seat_for, to_wire
from .slot import StepSlot
from .spawn import Spawned
from .stores import Stores

NOTICES_MAX = 4096
"""Unread notices from which on further steps are dropped, all but first ones; exits never are."""

SWEEP_S = 10.0
CONSOLE_S = 5.0
"""A console that takes nothing for this long at the end loses what is left."""

_log = structlog.get_logger(__name__)


class LinuxLauncher:
    """Starts, stops and watches the workers of one node. Make it and use it on one loop, in the process's main thread.

    ``first`` is a zygote from `spawn_zygote`, started before this module was even imported. From `open` on this process is
    a child subreaper, and stays one. ``watch`` is told of every file that workers write into.
    """

    def __init__(self, config: LaunchConfig, first: Spawned | None = None, watch: OutputWatch | None = None) -> None:
        self._config = config.checked()
        self._first, self._watch, self._steps = first, watch, True
        self._notices: asyncio.Queue[Notice | None] = asyncio.Queue()
        self._workers: list[Worker] = []
        self._burials: set[asyncio.Task[None]] = set()
        self._unburied: dict[int, int] = {}
        self._sweep: asyncio.Task[None] | None = None
        self._to_sweep: list[Worker] = []
        self._leavings = Leavings(STRAYS, self._gone, self.say, self._config.cgroup)
        self._refill: asyncio.TimerHandle | None = None
        self._run_dir = self._log_dir = self._unwritten = ""
        self._run_lock = -1
        self._bounds = LogBounds(self._config.log_bytes_max)
        self._pump = LogPump(self._bounds)
        self._cpus: asyncio.Future[tuple[tuple[int, ...], ...]] | None = None
        self._nursery: Nursery | None = None
        self._stores: Stores | None = None
        self._bell: Doorbell | None = None
        self._ground: Watch | None = None
        self.addresses: Addresses | None = None
        self.vault: Vault | None = None
        self.saving: Saving | None = None
        self.data: DataSocket | None = None
        self._opening: asyncio.Future[None] | None = None
        self._finish: asyncio.TimerHandle | None = None
        self._closed = False

    @property
    def nproc(self) -> int:
        """Workers that this launcher starts."""
        return self._config.nproc

    @property
    def refused(self) -> dict[str, str]:
        """Preloads that made the zygote unfit to fork from and were left out, each with the reason."""
        return dict(self._nursery.refused) if self._nursery is not None else {}

    @property
    def log_dir(self) -> str:
        """Where redirected and teed streams lie."""
        return self._log_dir

    @property
    def pids(self) -> dict[str, int]:
        """Who is who now: ``zygote``, ``keeper``, ``saver`` (0 while being replaced), workers by rank. For people and chaos."""
        found = {"zygote": self._nursery.zygote_pid, "keeper": 0} if self._nursery is not None else {}
        if self._stores is not None:
            found["keeper"] = self._stores.keeper_pid
        if self.saving is not None and self.saving.begun:
            found["saver"] = self.saving.pid
        return {**found, **{f"rank {one.rank}": one.child.pid for one in self._workers if one.child.alive}}

    def named(self, node: str) -> None:
        """The node has its name: logs and titles bear it from now on."""
        self._config = self._config._replace(node=node)
        if self._nursery is not None:
            self._nursery.named(node)
        if self._stores is not None:
            self._stores.named(node)
        if self.saving is not None:
            self.saving.named(node)

    # ---- opening

    async def open(self) -> None:
        """Make everything warm. Raises `LaunchFailed` when workers could never be started here; then nothing is left.

        Whoever calls second waits for the first.
        """
        if self._opening is None:
            self._opening = asyncio.ensure_future(self._open())
        await asyncio.shield(self._opening)

    async def _open(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise LaunchFailed(
                "the launcher must be opened on the main thread: workers die with the thread that watches them"
            )
        try:
            self._steps = load(self._config.framework).STEPS
        except ImportError as error:
            raise LaunchFailed(
                f"{self._config.framework} cannot be imported: {error}; is it installed for {self._config.node}?"
            ) from error
        become_subreaper()
        self._nursery = Nursery(self._config, self._first, self._leavings.take)
        try:
            self._nursery.open()  # first of all: it takes seconds, the rest happens meanwhile
            await self._open_rest(self._nursery)
        except RuntimeError as error:
            await self.close()
            raise LaunchFailed(f"{NO_THREAD} ({error})") from error
        except BaseException:
            await self.close()
            raise

    async def _open_rest(self, nursery: Nursery) -> None:
        if self._config.numa:
            self._cpus = asyncio.ensure_future(asyncio.to_thread(cpus_by_rank, self._config))
        await asyncio.to_thread(self._make_folders)
        self._bounds.open()
        self._pump.open()
        self._bell = Doorbell(os.path.join(self._run_dir, "agent.sock"), self._rung)
        self._bell.open()
        self.vault = Vault(self._run_dir)
        self.vault.open()
        self.data = DataSocket(self._run_dir)
        self.data.open()
        kept: list[Restorable] = [self._bell, self.vault, self.data]
        if self.addresses is not None:
            self.addresses.file.open(self._run_dir)
            kept.append(self.addresses.file)
        self._ground = Watch(self._run_dir, kept, self.say)
        await self._ground.begin()
        await self._leavings.begin()
        self.saving = Saving(self._config, self.vault.arenas, nursery.fork_saver, nursery.gone)
        if self._config.stores:
            self._stores = Stores(self._config, nursery.fork_keeper, nursery.gone, self._offer, self._lost)
            self._stores.open()
        await nursery.ready()
        nursery.refill()
        if self._stores is not None:
            await self._stores.ready()
        if self._cpus is not None:
            await self._cpus

    def say(self, words: str) -> None:
        """Tell people something about this host."""
        _log.warning(words, node=self._config.node)

    def _make_folders(self) -> None:
        config = self._config
        try:
            made = private_folder(config.run_dir)
            self._run_dir, self._run_lock = made.path, made.lock
            if made.why:
                self.say(made.why)
            asked = any((*config.redirects, *config.tee))
            if config.log_dir is not None:
                self._log_dir = os.path.abspath(config.log_dir)
            else:
                self._log_dir = tempfile.mkdtemp(prefix="torch_logs_") if asked else self._run_dir
        except OSError as error:
            raise LaunchFailed(f"cannot make the launcher's folders: {error}") from error
        if asked and config.log_dir is None:
            _log.info("worker logs", log_dir=self._log_dir, node=config.node)

    def _offer(self, address: str) -> None:
        self._notices.put_nowait(StoreReady(address))

    def _lost(self, address: str, unused: bool) -> None:
        if unused:
            self._notices.put_nowait(StoreGone(address))
        self._end_if_storeless()

    def _end_if_storeless(self) -> None:
        """Kill a generation whose store died before its world had formed: torch would go on connecting for half an hour."""
        if not self._workers or self._stores is None or all(one.stepped for one in self._workers):
            return
        store = self._workers[0].launch.store
        if not self._stores.is_dead(store):
            return
        for one in self._workers:
            if one.child.alive:
                one.note = f"the store {store} died before the world had formed; workers were killed"
                one.child.signal(signal.SIGKILL)
                one.child.kill_group()

    # ---- starting

    async def start(self, launch: WorkersLaunch) -> None:
        """Start every worker of ``launch``. Raises `LaunchFailed`; then none of them lives."""
        assert self._nursery is not None, "open() comes before start()"
        assert self._bell is not None, "open() makes the doorbell"
        alive = [one.child.pid for one in self._workers if one.child.alive]
        assert not alive, f"generation {launch.generation} must not start: processes {alive} of the last one live"
        self.spend_store(launch.store)
        if self._stores is not None:
            await self._stores.fix(here=launch.node_rank == 0)
        if self._ground is not None:
            await self._ground.look()
        try:
            await self._leavings.end()
            files = await asyncio.to_thread(self._make_files, launch)
        except RuntimeError as error:
            raise LaunchFailed(f"generation {launch.generation}: {NO_THREAD}") from error
        more = await self._more(launch.nproc)
        try:
            spares = await within(self._config.start_s, self._nursery.take(launch.nproc))
        except asyncio.TimeoutError as error:
            raise LaunchFailed(
                f"generation {launch.generation}: workers could not be made within {self._config.start_s:g} s; "
                "--set start_s=SECONDS waits longer"
            ) from error
        try:
            workers = [
                self._seat(spare, launch, local_rank, files[local_rank], more[local_rank])
                for local_rank, spare in enumerate(spares)
            ]
        except (OSError, LaunchFailed) as error:
            for spare in spares:
                self._nursery.discard(spare)
            await wait_dead([spare.child for spare in spares], SWEEP_S)
            raise LaunchFailed(f"generation {launch.generation}: a worker ended before it began: {error}") from error
        self._begin(workers)
        self._end_if_storeless()
        if self._stores is not None:
            self._stores.keep_only(launch.store)
        self._refill = asyncio.get_running_loop().call_later(self._config.refill_s, self._refill_now)

    def _begin(self, workers: list[Worker]) -> None:
        """All of them exist: from here on their ends are told."""
        self._workers = workers
        if self.vault is not None:
            self.vault.begin(workers[0].launch)
        if self.data is not None:
            self.data.begin(workers[0].launch)
        self._forget_finish()
        for worker in workers:
            for stream in (worker.files.stdout, worker.files.stderr):
                self._bounds.watch(stream)
                if stream.console:
                    self._pump.follow(stream)
                if self._watch is not None:
                    self._watch.follow(Output(stream.path, worker.launch.generation, worker.rank, worker.child.pid))
            worker.child.dead.add_done_callback(functools.partial(self._died, worker))

    def spend_store(self, address: str) -> None:
        """A world names this store: if it is ours it serves nobody else, and the next is opened. Idempotent.

        `start` does it; whoever hears of a world that is superseded before it starts calls it too, or no store is offered.
        """
        if self._stores is not None:
            self._stores.spend(address)

    def _make_files(self, launch: WorkersLaunch) -> list[RankFiles]:
        files = made_all(self._config, self._run_dir, self._log_dir, launch)
        words = unwritten(files, self._run_dir)
        if words and not self._unwritten:
            self.say(words)
        self._unwritten = words
        return files

    async def _more(self, nproc: int) -> tuple[dict[str, str], ...]:
        """What workers find in their environment because of other groups, by local rank."""
        return ({},) * nproc if self.addresses is None else await self.addresses.environment(nproc)

    def _seat(
        self, spare: Spare, launch: WorkersLaunch, local_rank: int, files: RankFiles, more: dict[str, str]
    ) -> Worker:
        """Tell a spare who it is; from here on it is a worker."""
        assert self._bell is not None, "open() makes the doorbell"
        cpus = self._cpus.result()[local_rank] if self._cpus is not None else ()
        seat = seat_for(self._config, launch, local_rank, self._bell.path, files.error, cpus, more)
        with contextlib.ExitStack() as failing, contextlib.ExitStack() as stack:
            slot = StepSlot()
            failing.callback(slot.close)
            fds = []
            for stream in (files.stdout, files.stderr):
                fd = os.open(stream.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
                stack.callback(os.close, fd)
                fds.append(fd)
            wire.send(spare.link, to_wire(seat), (*fds, slot.fd))
            failing.pop_all()
        spare.link.close()
        self._unburied[launch.generation] = self._unburied.get(launch.generation, 0) + 1
        return Worker(spare.child, launch, local_rank, files, slot)

    def _forget(self, file: StreamFile) -> None:
        """Nobody shows this one, and nobody writes it any more."""
        self._bounds.finish(file)
        if not file.keep:
            with contextlib.suppress(OSError):
                os.unlink(file.path)

    # ---- steps

    def _rung(self, generation: int, rank: int, step: int, told: bool, imports_us: int) -> None:
        for worker in self._workers:
            if worker.rank == rank and worker.launch.generation == generation:
                first, worker.stepped = not worker.stepped, True
                if first or self._notices.qsize() < NOTICES_MAX:
                    at_us = time.monotonic_ns() // 1000
                    self._notices.put_nowait(WorkerStep(generation, rank, step, first, at_us, told, imports_us))
                if first and all(one.stepped for one in self._workers):
                    self._refill_now()
                return

    def slots(self) -> tuple[WorkerSlot, ...]:
        """The slots of the workers that run."""
        return tuple(
            WorkerSlot(one.launch.generation, one.local_rank, one.rank, one.slot.fd)
            for one in self._workers
            if one.child.alive and one.slot.fd >= 0
        )

    def pulse(self) -> stall.Pulse | None:
        """How long the workers have made no step, exactly; None where they are no programs that could tell, or begin to end."""
        now_us, workers = time.monotonic_ns() // 1000, self._workers
        if not workers or not all(one.child.alive for one in workers) or self._config.mode is Mode.COMMAND:
            return None
        if not self._steps and not all(one.stepped for one in workers):
            return None
        return stall.together([one.slot.pulse(one.begun_us, now_us) for one in workers])

    def ranks(self, generation: int) -> list[Rank]:
        """The living workers of a generation, to be looked at."""
        found = [one for one in self._workers if one.child.alive and one.launch.generation == generation]
        return [Rank(one, self._stacks(one), self._bell) for one in found if self._bell is not None]

    def _stacks(self, worker: Worker) -> str:
        return os.path.join(self._run_dir, f"stacks-{worker.launch.generation}-{worker.rank}.txt")

    def _refill_now(self) -> None:
        """The generation runs: forking for the next one no longer competes with its start."""
        if self._refill is not None:
            self._refill.cancel()
            self._refill = None
        if self._nursery is not None and not self._closed:
            self._nursery.refill()

    # ---- ends

    def _died(self, worker: Worker, _dead: asyncio.Future[int]) -> None:
        left_s = worker.grace_until - time.monotonic()
        if left_s > 0:
            # A shell that dies of the signal leaves behind what it ran: that has its grace too.
            worker.lingering = asyncio.ensure_future(asyncio.to_thread(await_sessions_end, worker.child.pid, left_s))
        elif not worker.ended_well:
            worker.child.kill_group()  # at once, and while the zombie still owns the number
        worker.buried = asyncio.create_task(self._bury(worker), name=f"burial of rank {worker.rank}")
        self._burials.add(worker.buried)
        worker.buried.add_done_callback(self._burials.discard)

        if worker.ended_well and self._config.finish_s > 0:
            loop = asyncio.get_running_loop()
            self._finish = self._finish or loop.call_later(self._config.finish_s, self._end_laggards, worker)

    def _forget_finish(self) -> None:
        if self._finish is not None:
            self._finish.cancel()
            self._finish = None

    def _end_laggards(self, first: Worker) -> None:
        """``finish_s`` is over: whoever still runs in the generation of the one that was done ``first`` hangs."""
        self._finish = None
        for one in self._workers:
            if one.child.alive and one.launch.generation == first.launch.generation:
                bound = self._config.finish_s
                one.note = f"still running {bound:g} s after rank {first.rank} had ended well (finish_s)"
                one.child.signal(signal.SIGKILL)
                one.child.kill_group()

    async def _bury(self, worker: Worker) -> None:
        if worker.lingering is not None:
            await worker.lingering
            worker.child.kill_group()
        if self._watch is not None:
            self._watch.finish(worker.files.stdout.path)
            self._watch.finish(worker.files.stderr.path)
        words, known = await asyncio.to_thread(self._last_words, worker)
        launch = worker.launch
        if self._bell is not None:
            self._bell.catch_up()
        self._notices.put_nowait(
            WorkerExit(
                generation=launch.generation,
                local_rank=worker.local_rank,
                rank=worker.rank,
                exit_code=worker.child.dead.result(),
                asked=worker.asked,
                died_us=worker.child.died_us,
                step=worker.slot.read(),
                tail=words.tail,
                error=words.error or worker.note,
                error_at_us=words.error_at_us,
                signature=known.signature,
                place=known.place,
                work=worker.slot.in_work(words.error) if not worker.ended_well else "",
            )
        )
        self._unburied[launch.generation] -= 1
        if not self._unburied[launch.generation]:
            del self._unburied[launch.generation]
            self._notices.put_nowait(WorkersGone(launch.generation))
        for one in (worker.files.stdout, worker.files.stderr):
            if one.console:
                self._pump.finish(one)
            else:
                await asyncio.to_thread(self._forget, one)
        worker.slot.close()
        with contextlib.suppress(OSError):
            os.unlink(self._stacks(worker))
        self._to_sweep.append(worker)
        if self._sweep is None:
            self._sweep = asyncio.create_task(self._sweep_all(), name="sweep of sessions")

    def _last_words(self, worker: Worker) -> tuple[LastWords, Known]:
        """What it left behind, and what its death is known by, unless we ended it and know why. In a thread."""
        words = last_words(worker.files)
        if self._watch is None or worker.note or (worker.asked and not words.error):
            return words, Known()
        return words, self._watch.known(worker.child.dead.result(), words)

    async def _sweep_all(self) -> None:
        """End what dead workers left running, in as few passes over /proc as their deaths allow; then reap them."""
        try:
            while self._to_sweep:
                workers, self._to_sweep = self._to_sweep, []
                over = [one.child for one in workers if not one.ended_well]
                over += await self._leavings.spare([one.child for one in workers if one.ended_well])
                left = await asyncio.to_thread(end_sessions, [one.pid for one in over], SWEEP_S)
                if left:
                    _log.error("children of dead workers cannot be killed", pids=left, node=self._config.node)
                for one in over:
                    one.reap()
                    self._gone(one.pid)
        finally:
            self._sweep = None

    def _gone(self, pid: int) -> None:
        if self._nursery is not None:
            self._nursery.gone(pid)

    async def stop(self, grace_s: float, kill_wait_s: float) -> bool:
        """Stop all workers; True when every one is dead. Idempotent.

        With ``grace_s`` they get first the signal that stopped the job, or SIGTERM; SIGKILL is for their whole sessions.
        """
        for one in self._workers:
            one.child.look()  # who is dead by now was not asked
        alive = [one for one in self._workers if one.child.alive]
        for one in alive:
            one.asked = True
        children = [one.child for one in alive]
        if grace_s > 0:
            number = signals.told(self._config.run_dir)
            for one in alive:
                self._ask(one, number, grace_s)
            children = await wait_dead(children, grace_s)
            await asyncio.gather(*(one.lingering for one in alive if one.lingering is not None))
        for child in children:
            child.signal(signal.SIGKILL)
            child.kill_group()
        stuck = await wait_dead(children, kill_wait_s)
        if stuck:
            generation = alive[0].launch.generation
            self._notices.put_nowait(WorkersStuck(generation, tuple(one.pid for one in stuck)))
        else:
            if well := bool(self._workers) and all(one.ended_well for one in self._workers):
                await self._buried()
            await self._leavings.end(grace_s if well else 0.0, lambda: signals.asked(self._config.run_dir))
        return not stuck

    async def _buried(self) -> None:
        """Wait until the dead are buried and their sessions swept."""
        while waits := [*self._burials, *([self._sweep] if self._sweep is not None else [])]:
            await asyncio.gather(*waits, return_exceptions=True)

    def _ask(self, worker: Worker, number: signal.Signals, grace_s: float) -> None:
        """A Python program ends its children itself; any other is often a shell that must not be the only one to hear."""
        if self._config.mode is Mode.COMMAND:
            worker.grace_until = time.monotonic() + grace_s
            with contextlib.suppress(ProcessLookupError):
                os.killpg(worker.child.pid, number)
        else:
            worker.child.signal(number)

    async def notices(self) -> AsyncIterator[Notice]:
        """Everything that happens, in order, until `close`. One consumer."""
        while (notice := await self._notices.get()) is not None:
            yield notice

    async def close(self) -> None:
        """Kill what is left and release everything; all that workers printed is on the console then. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._opening is not None and not self._opening.done() and self._opening is not asyncio.current_task():
            self._opening.cancel()
            await asyncio.wait([self._opening])
        self._forget_finish()
        if self._refill is not None:
            self._refill.cancel()
        if not await self.stop(0.0, SWEEP_S):
            _log.error("workers cannot be killed and are left behind", pids=self.pids, node=self._config.node)
        await self._buried()
        if self._stores is not None:
            await self._stores.close()
        if self._ground is not None:
            await self._ground.end()
        if self.saving is not None:
            await self.saving.close()
        if self.vault is not None:
            await self.vault.close()
        if self.data is not None:
            self.data.close()
        if self._nursery is not None:
            await self._nursery.close()
        await self._leavings.close()
        if self._bell is not None:
            self._bell.close()
        await asyncio.to_thread(self._pump.close, CONSOLE_S)
        await asyncio.to_thread(self._bounds.close)
        if self._cpus is not None:
            await asyncio.gather(self._cpus, return_exceptions=True)
        if self._run_dir:
            await asyncio.to_thread(shutil.rmtree, self._run_dir, ignore_errors=True)
        lock, self._run_lock = self._run_lock, -1
        if lock >= 0:
            os.close(lock)
        self._notices.put_nowait(None)
