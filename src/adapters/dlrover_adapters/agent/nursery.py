"""The agent's side of the zygote: keeps one alive and warm, and has workers forked ahead of need.

Forking costs 10 ms and more per worker, and twice (`Zygote._fork`); a *spare* was forked earlier and waits for its seat, so that
starting a generation is sending a few packets. A zygote that dies is replaced at once, its spares live on. One that
hangs is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import itertools
import signal
import socket
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple

import structlog

from dlrover_core.errors import LaunchFailed
from dlrover_core.runtime.watchdog import Watch
from dlrover_core.runtime.within import within

from . import import_list, looks, wire
from .children import Child
from .config import AUTO, LaunchConfig
from .minding import minded
from .process import end_sessions, end_strays
from .spawn import Spawned, spawn_keeper, spawn_plain, spawn_saver, spawn_zygote

EARLY_DEATHS_MAX = 3
"""Zygotes in a row that died, for no reason of theirs, before they were ready; then workers are executed instead."""

UNFORKED_PAUSES_S = (0.0, 0.2, 1.0, 3.0)
"""Pauses between forks that nothing came of; then it is an error. A go-between may be killed, and a limit reached for a while."""

CUTS_MAX = 2
"""So often a list of imports is tried again without its end, before it is left out."""

FORKLESS_PAUSES_S = (5.0, 30.0, 120.0)
"""Pauses before another zygote where this host forked nobody for the last one; then workers are executed for good."""

PASSING = frozenset({errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE})
"""Why a process cannot be started for a while."""

STRAYS = frozenset({"dlrover-zygote", "dlrover-spare", "dlrover-keeper", "dlrover-saver"})
"""What children of a zygote are called before they are told who they are."""

SWEEP_S = 5.0

_log = structlog.get_logger(__name__)


class _ZygoteGone(LaunchFailed):
    """It died; another one is on its way."""


class _Unforked(LaunchFailed):
    """The zygote lives, and nothing came of this fork."""


class Spare(NamedTuple):
    """A process that belongs to this agent and waits for what it is to be."""

    child: Child
    link: socket.socket


class Nursery:
    """Makes processes: `take` workers, `fork_keeper`, `fork_saver`. ``refused`` says which preloads were left out, and why.

    ``place`` is given the pid of each process that is to be a worker, before it hears who it is.
    """

    def __init__(
        self,
        config: LaunchConfig,
        first: Spawned | None = None,
        place: Callable[[int], Coroutine[Any, Any, None]] | None = None,
    ) -> None:
        self.refused: dict[str, str] = {}
        self.plain = not config.warm
        self._config, self._first, self._place = config, first, place
        self._link: socket.socket | None = None
        self._forks: dict[int, asyncio.Future[int]] = {}
        self._keys = itertools.count(1)
        self._spares: list[Spare] = []
        self._living: set[int] = set()
        self._settled = asyncio.Event()  # ready, or given up
        self._linked = asyncio.Event()  # there is a zygote to give orders to, or given up
        self._hopeless = ""
        self._loading = ""  # the preload that the zygote is importing
        self._was_ready = False
        self._unfit: tuple[str, str] | None = None
        self._kept = self._cuts = 0
        self._early_deaths = self._forkless = 0
        self._host = ""  # why this host forked nobody for the last zygote
        self._closed = asyncio.Event()
        self._zygote: Child | None = None
        self._minding: Watch | None = None
        self._life: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[object]] = set()
        self._closing = self._remembered = False
        self._imports = import_list.path_of(config)

    @property
    def zygote_pid(self) -> int:
        """The zygote's, or 0 while there is none."""
        return self._zygote.pid if self._zygote is not None else 0

    def open(self) -> None:
        """Start the zygote, unless it is already on its way. Must be called on the main thread."""
        if self.plain:
            self._settled.set()
            self._linked.set()
            return
        self._watch(self._first or spawn_zygote(self._config))
        self._life = asyncio.create_task(self._live(), name="zygote")

    async def ready(self) -> None:
        """Wait until workers can be made. Raises `LaunchFailed` when they never can."""
        await self._settled.wait()
        if self._hopeless:
            raise LaunchFailed(self._hopeless)

    def named(self, node: str) -> None:
        """The node has its name: it is in the zygote's title from now on."""
        self._config = self._config._replace(node=node)
        if self._link is not None:
            with contextlib.suppress(OSError):  # it is dying; its successor is executed under the name
                wire.send(
                    self._link, {"op": "title", "title": f"dlrover zygote --job {self._config.job} --node {node}"}
                )

    # ---- the zygote's life

    def _watch(self, spawned: Spawned) -> None:
        self._link, self._zygote = spawned.link, Child(spawned.pid)
        self._linked.set()
        self._unfit, self._loading, self._was_ready, self._kept, self._host = None, "", False, 0, ""
        asyncio.get_running_loop().add_reader(self._link, self._hear)
        if self._living:
            wire.send(self._link, {"op": "mine", "pids": sorted(self._living)})

    async def _live(self) -> None:
        while self._zygote is not None:
            zygote = self._zygote
            with contextlib.suppress(asyncio.TimeoutError):
                await within(self._config.ready_s, self._settled_or_dead(zygote))
            if zygote.alive and not self._was_ready:
                self._unfit = (
                    self._loading,
                    f"not imported within {self._config.ready_s:g} s; --set ready_s=SECONDS gives it longer",
                )
                zygote.signal(signal.SIGKILL)
            exit_code = await asyncio.shield(zygote.dead)
            early = not self._was_ready
            self._bury_zygote()
            await self._sweep(zygote)
            if self._closing:
                self._hopeless = "the launcher is closed"
            else:
                self._judge(exit_code, early=early)
                await self._remember()
            if not self._hopeless and not self.plain:
                await self._succeed()
        self._settled.set()
        self._linked.set()

    async def _succeed(self) -> None:
        """Start the next zygote, after a pause where this host forks nobody."""
        while not self._host or await self._wait_out():
            try:
                self._watch(spawn_zygote(self._config, frozenset(self.refused)))
                return
            except LaunchFailed as error:
                if getattr(error.__cause__, "errno", None) not in PASSING:
                    self._hopeless = str(error)
                    return
                self._host = str(error)

    async def _wait_out(self) -> bool:
        """Limits of processes and memory pass: have workers executed for a while; False: there is to be no other zygote."""
        if self._forkless == len(FORKLESS_PAUSES_S):
            self._give_up(self._host)
            return False
        pause_s = FORKLESS_PAUSES_S[self._forkless]
        _log.warning(
            "no zygote for a while: workers are executed, which costs their imports",
            reason=self._host,
            again_in_s=pause_s,
            node=self._config.node,
        )
        self._forkless, self._host, self.plain = self._forkless + 1, "", True
        self._settled.set()
        self._linked.set()
        with contextlib.suppress(asyncio.TimeoutError):
            await within(pause_s, self._closed.wait())
        if self._closing:
            self._hopeless = "the launcher is closed"
            return False
        self.plain = False
        self._settled.clear()
        self._linked.clear()
        return True

    async def _settled_or_dead(self, zygote: Child) -> None:
        settled = asyncio.ensure_future(self._settled.wait())
        either: list[asyncio.Future[Any]] = [settled, zygote.dead]
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        finally:
            settled.cancel()

    def _bury_zygote(self) -> None:
        """Everything that hung on it fails now; processes it was in the middle of making end with their sockets."""
        if self._link is not None:
            self._hear_all()
            asyncio.get_running_loop().remove_reader(self._link)
            self._link.close()
        if self._minding is not None:
            self._minding.close()
            self._minding = None
        self._lose_zygote()
        self._link, self._zygote = None, None
        for fork in self._forks.values():
            if not fork.done():
                fork.set_exception(_ZygoteGone("the zygote died while it was forking"))
        self._forks.clear()

    def _lose_zygote(self) -> None:
        """Nobody gives it orders any more; its pidfd has told of its death, or will."""
        self._settled.clear()
        self._linked.clear()
        if self._zygote is not None:
            self._zygote.signal(signal.SIGKILL)

    async def _sweep(self, zygote: Child) -> None:
        """What it was making: go-betweens are in its session, and a child may be ours without our having been told.

        Its successor is started only then, so that whoever is unknown here is of the dead one's making.
        """
        await asyncio.to_thread(end_sessions, {zygote.pid}, SWEEP_S)
        await asyncio.to_thread(end_strays, STRAYS, frozenset({zygote.pid, *self._living}), SWEEP_S)
        zygote.reap()

    def _judge(self, exit_code: int, *, early: bool) -> None:
        """Why the zygote died decides what comes next: another one, one without a preload, or none."""
        preload, reason = self._unfit or ("", "")
        if not self._unfit and early and self._loading and exit_code != -signal.SIGKILL:
            preload, reason = self._loading, f"importing it ends the process with exit code {exit_code}"
        if preload == AUTO and self._kept and self._cuts < CUTS_MAX:
            self._cuts += 1
            self._early_deaths = 0
            _log.info("imported ahead only in part", reason=reason, modules=self._kept, node=self._config.node)
        elif preload:
            self.refused[preload] = reason
            self._early_deaths = 0
            _log.warning("preload refused", preload=preload, reason=reason, node=self._config.node)
        elif reason.startswith("cannot be imported"):
            self._hopeless = f"{self._config.framework} {reason}; is it installed for {self._config.node}?"
        elif reason and not self._host:
            self._give_up(reason)
        elif reason:
            self._early_deaths = 0  # it is the host's doing, and passes: see `_wait_out`
        else:
            self._early_deaths = self._early_deaths + 1 if early else 0
            _log.warning("zygote died", exit_code=exit_code, ready=not early, node=self._config.node)
            if self._early_deaths >= EARLY_DEATHS_MAX:
                self._give_up(
                    f"{EARLY_DEATHS_MAX} zygotes in a row died before they were ready, the last with {exit_code}"
                )

    async def _remember(self) -> None:
        """A list that ended its zygote, or held it up, is not tried again by the next run either."""
        if AUTO in self.refused and not self._remembered:
            self._remembered = True
            await asyncio.to_thread(import_list.refuse, self._imports, self.refused[AUTO])

    def _give_up(self, reason: str) -> None:
        self.plain = True
        _log.warning(
            "no zygote: workers are executed, which costs their imports", reason=reason, node=self._config.node
        )

    # ---- its frames

    def _hear(self) -> None:
        if not self._hear_all() and self._link is not None:
            # Its end, or its death: the pidfd tells, here only silence must be kept.
            asyncio.get_running_loop().remove_reader(self._link)

    def _hear_all(self) -> bool:
        """Take every frame that is there; False at the end."""
        while self._link is not None:
            try:
                frame = wire.receive(self._link)
            except BlockingIOError:
                return True
            if frame is None:
                return False
            self._heard(frame)
        return False

    def _mind(self) -> None:
        """Ask from now on whether it hangs. Before it was ready an import may have taken it minutes, which `_live` bounds."""
        zygote, link = self._zygote, self._link
        if zygote is not None and link is not None and self._minding is None:
            self._minding = minded("zygote", zygote, self._config.hung_s, functools.partial(wire.ask, link))
            self._minding.open()

    def _heard(self, frame: wire.Frame) -> None:
        if self._minding is not None:
            self._minding.answered()
        match frame.body:
            case {"op": "ready"}:
                self._settled.set()
                self._was_ready = True
                self._early_deaths = self._forkless = 0
                self._mind()
            case {"op": "loading", "preload": str(preload)}:
                self._loading = preload
            case {"op": "unfit", "preload": str(preload), "reason": str(reason)}:
                self._unfit = (preload, reason)
                self._kept = int(frame.body.get("kept", 0))
                self._host = reason if frame.body.get("host") else ""
            case {"op": "forked", "key": int(key), "pid": int(pid)} if key in self._forks:
                self._forked(self._forks.pop(key), pid)
            case {"op": "unforked", "key": int(key), "reason": str(reason)} if key in self._forks:
                fork = self._forks.pop(key)
                if not fork.done():
                    fork.set_exception(_Unforked(reason))

    def _forked(self, fork: asyncio.Future[int], pid: int) -> None:
        if not fork.done():
            fork.set_result(pid)
            return
        child = Child(pid)  # whoever ordered it has given up
        child.signal(signal.SIGKILL)
        self._keep(asyncio.create_task(self._bury(child), name="end of a late fork"))

    # ---- making processes

    async def _fork(self, role: str) -> Spare:
        """Have the zygote fork one. Raises `LaunchFailed`; then no such process lives on."""
        if self._link is None:
            raise _ZygoteGone("there is no zygote")
        try:
            mine, theirs = wire.pair()
        except OSError as error:
            raise LaunchFailed(f"no socket can be made for a new process: {error.strerror}; see ulimit -n") from error
        key = next(self._keys)
        forked = self._forks[key] = asyncio.get_running_loop().create_future()
        try:
            with theirs:
                wire.send(self._link, {"op": "fork", "role": role, "key": key}, (theirs.fileno(),))
            pid = await forked
        except ConnectionError as error:
            mine.close()
            self._forks.pop(key, None)  # nobody waits for it, so nobody shall be told that it failed
            self._lose_zygote()
            raise _ZygoteGone("the zygote is dead") from error
        except OSError as error:
            mine.close()
            self._forks.pop(key, None)
            raise LaunchFailed(f"the zygote takes no orders: {error}") from error
        except BaseException:
            mine.close()  # the child, if there is one, sees the end of its socket and ends
            raise
        return self._born(Spawned(pid, mine))

    async def _fork_again(self, role: str) -> Spare | None:
        """A fork, tried again where nothing came of it; None when the zygote died. Raises `LaunchFailed`."""
        for pause_s in UNFORKED_PAUSES_S:
            try:
                return await self._fork_once(role)
            except _Unforked as error:
                _log.warning(
                    "nothing was forked", role=role, reason=str(error), again_in_s=pause_s, node=self._config.node
                )
                await asyncio.sleep(pause_s)
        return await self._fork_once(role)

    async def _fork_once(self, role: str) -> Spare | None:
        with contextlib.suppress(_ZygoteGone):
            return await self._fork(role)
        return None

    def _born(self, spawned: Spawned) -> Spare:
        self._living.add(spawned.pid)
        spawned.link.setblocking(False)
        return Spare(Child(spawned.pid), spawned.link)

    async def fork_keeper(self) -> Spare:
        """A keeper; it needs no preload, so it is made before the zygote is ready. Raises `LaunchFailed`."""
        while True:
            await self._linked.wait()
            if self._hopeless:
                raise LaunchFailed(self._hopeless)
            if self.plain:
                return self._born(spawn_keeper(self._config))
            if keeper := await self._fork_again("keeper"):
                return keeper

    async def fork_saver(self) -> Spare:
        """A saver; workers run, so the zygote is ready, or another one soon. Raises `LaunchFailed`."""
        while True:
            await self.ready()
            if self.plain:
                return self._born(spawn_saver(self._config))
            if saver := await self._fork_again("saver"):
                return saver

    async def take(self, count: int) -> list[Spare]:
        """``count`` processes that wait for a seat: spares first, then new ones. Raises `LaunchFailed`."""
        await self._heed_workers()
        taken: list[Spare] = []
        try:
            while len(taken) < count:
                taken.append(self._next_spare() or await self._make())
        except BaseException:
            for one in taken:
                self.discard(one)
            raise
        return taken

    def _next_spare(self) -> Spare | None:
        while self._spares:
            spare = self._spares.pop(0)
            spare.child.look()
            # A stopped one would be a worker that hangs before its first step, which takes long to be known.
            if spare.child.alive and looks.seen(spare.child.pid).state != "T":
                return spare
            self.discard(spare)
        return None

    async def _make(self) -> Spare:
        while True:
            await self.ready()
            made = self._born(spawn_plain(self._config)) if self.plain else await self._fork_again("worker")
            if made is not None:
                await self._placed(made)
                return made

    async def _placed(self, made: Spare) -> None:
        if self._place is None:
            return
        placing = asyncio.ensure_future(self._place(made.child.pid))
        try:
            await asyncio.shield(placing)
        except BaseException:
            # Not before: the number of a process that was reaped may be another's.
            placing.add_done_callback(lambda _: self.discard(made))
            raise

    def refill(self) -> None:
        """Have spares made for the next generation, unless they are there."""
        if not self.plain and not self._closing:
            self._keep(asyncio.create_task(self._refill(), name="refill of spares"))

    async def _heed_workers(self) -> None:
        """Where a worker has found the list to be wrong, end all that was imported by it: spares and the zygote."""
        if self._loading != AUTO or AUTO in self.refused or self._zygote is None:
            return
        reason = await asyncio.to_thread(import_list.refused, self._imports)
        if reason and self._loading == AUTO and AUTO not in self.refused and self._zygote is not None:
            self.refused[AUTO], self._unfit = reason, (AUTO, reason)
            for spare in self._spares:
                self.discard(spare)
            self._spares.clear()
            self._lose_zygote()

    async def _refill(self) -> None:
        await self._heed_workers()
        with contextlib.suppress(LaunchFailed):  # the next start makes its own, and says what is wrong
            while len(self._spares) < self._config.nproc and not self.plain:
                spare = await self._make()
                # Another refill may have made the last one meanwhile.
                if self._closing or len(self._spares) >= self._config.nproc:
                    self.discard(spare)
                    return
                self._spares.append(spare)

    def discard(self, spare: Spare) -> None:
        """End a process that will not be needed."""
        spare.link.close()
        spare.child.signal(signal.SIGKILL)
        self._keep(asyncio.create_task(self._bury(spare.child), name="end of a spare"))

    async def _bury(self, child: Child) -> None:
        await asyncio.shield(child.dead)
        child.reap()
        self.gone(child.pid)

    def gone(self, pid: int) -> None:
        """A process made here is dead and reaped, its session empty."""
        self._living.discard(pid)
        if self._link is not None:
            with contextlib.suppress(OSError):  # it is dying itself; its successor is told who lives
                wire.send(self._link, {"op": "gone", "pid": pid})

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """End spares and zygote, and wait for their end. Workers must have ended before."""
        self._closing = True
        self._closed.set()
        for spare in self._spares:
            self.discard(spare)
        self._spares.clear()
        if self._zygote is not None:
            self._zygote.signal(signal.SIGKILL)
        if self._life is not None:
            await self._life
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)
