"""Training as the control plane sees it: workers in lockstep that die, resume, hang and report. In memory, in virtual time.

A world makes a step every ``step_s`` while all of its ranks live; when one dies the others fail ``cascade_s`` later, as a
collective does; a new generation resumes after the last step whose state was kept. One rank that hangs, or is slow, holds up
all. The `Launcher` over it obeys the port.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from dlrover_core.diagnosis import hanging
from dlrover_core.diagnosis.hanging import Facts
from dlrover_core.diagnosis.stall import Pulse
from dlrover_core.errors import LaunchFailed
from dlrover_core.job.hangs import Probe, ReportStacks
from dlrover_core.job.orders import NodeLaunch
from dlrover_core.runtime.agent import Agent
from dlrover_core.runtime.duties import Desk, Duty, Orders
from dlrover_core.runtime.launcher import (
    Notice,
    StoreReady,
    WorkerExit,
    WorkersGone,
    WorkersLaunch,
    WorkersStuck,
    WorkerStep,
)
from dlrover_core.sim.agents import SHOW_S
from dlrover_core.sim.training import ELSEWHERE, WAITING
from dlrover_core.testing import virtual_loop
from dlrover_core.testing.network import Network
from dlrover_core.testing.saving import SaveDuty, Saving

START_S = 0.02
REAP_S = 0.001
BURY_S = 0.002
CASCADE = "RuntimeError: [gloo] Connection closed by peer"
TIMED_OUT = "RuntimeError: NCCL watchdog: Timed out waiting for a collective"


@dataclass(slots=True)
class _Generation:
    size: int
    ranks: dict[int, MemoryLauncher] = field(default_factory=dict)
    running: asyncio.Task[None] | None = None


@dataclass(frozen=True, slots=True)
class Times:
    """What workers take for what they do besides steps, in seconds; and how often, in steps, their state is kept.

    With a ``size`` a world of fewer ranks takes proportionally longer for a step. ``cascade_ranks``: how many peers of a dead
    rank say so; 0: all. A collective that never ends raises after ``collective_s``; 0: never.
    """

    start_s: float = START_S
    load_s: float = 0.0
    stop_s: float = REAP_S
    exit_s: float = BURY_S
    keep_steps: int = 1
    keep_s: float = 0.0
    size: int = 0
    cascade_ranks: int = 0
    collective_s: float = 0.0


class Training:
    """All worlds of one coupling set. ``steps`` is how many it makes in all; ``log`` every (generation, step) made, in order.

    ``stepped`` is called after each. ``astray`` is what older generations made after a newer one had begun: of no use to anybody.
    Of `hung` ranks their world makes no step; `slow` is by node and local rank. With a ``saving`` it resumes from what that
    keeps; without one, from the last step whose state `Times` says was kept. Workers of a ``quiet`` one tell no steps.
    """

    def __init__(
        self,
        steps: int = 50,
        step_s: float = 0.1,
        cascade_s: float | None = 0.005,
        times: Times | None = None,
        saving: Saving | None = None,
        *,
        quiet: bool = False,
    ) -> None:
        self.steps, self.step_s, self.cascade_s, self.saving, self.quiet = steps, step_s, cascade_s, saving, quiet
        self.times = times if times is not None else Times()
        self.done = self.kept = self.newest = 0
        self.log: list[tuple[int, int]] = []
        self.astray: list[tuple[int, int]] = []
        self.stepped: Callable[[int], None] = lambda _: None
        self.hung: set[tuple[int, int]] = set()
        self.slow: dict[tuple[str, int], list[float]] = {}
        self._moves = asyncio.Event()
        self.starts: list[tuple[str, int]] = []
        self._generations: dict[int, _Generation] = {}
        self.network = Network()
        self._boots = 0

    def join(self, launch: WorkersLaunch, rank: int, launcher: MemoryLauncher) -> None:
        """One worker runs."""
        generation = self._generations.setdefault(launch.generation, _Generation(launch.world_size))
        generation.ranks[rank] = launcher
        if len(generation.ranks) == generation.size and generation.running is None:
            # Workers are processes of their own: an agent that is stopped does not stop them.
            generation.running = virtual_loop.spawn("training", self._run(launch.generation, generation))

    def left(self, generation: int, rank: int, *, cascades: bool) -> None:
        """One worker is dead: the world steps no more, and the others notice."""
        world = self._generations.get(generation)
        if world is None or world.ranks.pop(rank, None) is None:
            return
        stood = world.running is not None
        if world.running is not None:
            world.running.cancel()
            world.running = None
        if cascades and self.cascade_s is not None:
            virtual_loop.spawn("training", self._cascade(generation, world, self.cascade_s, CASCADE))
        elif stood and self.times.collective_s:
            virtual_loop.spawn("training", self._cascade(generation, world, self.times.collective_s, TIMED_OUT))

    async def _cascade(self, generation: int, world: _Generation, after_s: float, error: str) -> None:
        others = list(world.ranks.items())
        await asyncio.sleep(after_s)
        for other, launcher in others[: self.times.cascade_ranks or None]:
            launcher.die(generation, other, 1, error)

    def hang(self, generation: int, rank: int) -> None:
        """A worker makes no step from now on; after their own patience its peers raise."""
        self.hung.add((generation, rank))
        if self.times.collective_s:
            virtual_loop.spawn("training", self._weary(generation, rank))

    async def _weary(self, generation: int, rank: int) -> None:
        await asyncio.sleep(self.times.collective_s)
        world = self._generations.get(generation)
        if world is not None and (generation, rank) in self.hung and rank in world.ranks:
            await self._cascade(generation, world, 0.0, TIMED_OUT)

    def go_on(self, generation: int, rank: int) -> None:
        """It does again."""
        self.hung.discard((generation, rank))
        self._moves.set()

    def duties(self) -> list[Duty]:
        """What an agent of this training does beside its workers."""
        return [SaveDuty(self.saving)] if self.saving is not None else []

    async def agent(self, master: str, node: NodeLaunch) -> str:
        """Serve a node of this training in this loop, until its master tells it to leave; returns why."""
        self._boots += 1
        launcher = MemoryLauncher(node.node, node.nproc, self)
        return await Agent(
            node.node,
            launcher=launcher,
            dialer=self.network.dialer(node.node),
            masters=[master],
            boot=self._boots,
            host=node.node,
            address=node.node,
            duties=[ShowHangs(launcher), *self.duties()],
        ).run()

    async def _run(self, number: int, generation: _Generation) -> None:
        first, self.newest = True, max(self.newest, number)
        if self.saving is not None:
            self.kept = await self.saving.restore(number, generation.ranks)
        self.done = min(self.done, self.kept)
        if self.times.load_s:
            await asyncio.sleep(self.times.load_s)
        while self.done < self.steps:
            if self.saving is not None:
                await self.saving.between(number, self.done)
            await self._step(number, generation)
            if number < self.newest:
                # Its master has given it up, and it does not know: what it makes counts for nothing, and is noted.
                self.astray.append((number, self.done))
                continue
            self.done += 1
            self.log.append((number, self.done))
            for rank, launcher in generation.ranks.items() if not self.quiet else ():
                launcher.stepped(number, rank, self.done, first)
            first = False
            self.stepped(self.done)
            if self.saving is not None:
                self.saving.made(number, self.done)
                continue
            if self.done % self.times.keep_steps == 0:
                if self.times.keep_s:
                    await asyncio.sleep(self.times.keep_s)
                self.kept = self.done
        await asyncio.sleep(self.step_s)
        if self.saving is not None:
            self.saving.finished(number)
        generation.running = None
        for rank, launcher in list(generation.ranks.items()):
            generation.ranks.pop(rank)
            launcher.die(number, rank, 0, "")

    async def _step(self, number: int, generation: _Generation) -> None:
        """As slowly as the slowest, and not before those that hang go on."""
        takes_s = self.step_s
        if self.times.size > generation.size:
            takes_s *= self.times.size / generation.size
        if self.slow:
            takes_s *= max(
                max(self.slow.get(launcher.place(rank), (1.0,))) for rank, launcher in generation.ranks.items()
            )
        await asyncio.sleep(takes_s)
        while any((number, rank) in self.hung for rank in generation.ranks):
            self._moves.clear()
            await self._moves.wait()


class MemoryLauncher:
    """A node's workers in memory. ``stuck``: SIGKILL does not kill them; ``unable``: none can be started.

    ``node`` is what its stores are called after; a standby's is the name of its process. It is open after ``warm_s``.
    """

    def __init__(self, node: str, nproc: int, training: Training) -> None:
        self.node, self.nproc, self.training = node, nproc, training
        self.stuck = False
        self.warm_s = 0.0
        self.unable = ""
        self.patience_s = 0.0
        self.bury_s = training.times.exit_s
        self._notices: asyncio.Queue[Notice | None] = asyncio.Queue()
        self._launch: WorkersLaunch | None = None
        self._living: dict[int, int] = {}
        self._asked = False
        self._stores = 0
        self._spent: set[str] = set()
        self._moved_us = self._usual_us = self._longest_us = 0
        self._step = -1

    async def open(self) -> None:
        """Two stores on offer."""
        if self.warm_s:
            await asyncio.sleep(self.warm_s)
        for _ in range(2):
            self._offer()

    def _offer(self) -> None:
        self._stores += 1
        self._notices.put_nowait(StoreReady(f"{self.node}:{self._stores}"))

    def spend_store(self, address: str) -> None:
        """Another store is offered for the one that a world has taken."""
        if address.startswith(f"{self.node}:") and address not in self._spent:
            self._spent.add(address)
            self._offer()

    async def start(self, launch: WorkersLaunch) -> None:
        """Workers exist after a moment."""
        if self._living:
            raise LaunchFailed(f"{self.node} still runs generation {self._launch and self._launch.generation}")
        if self.unable:
            raise LaunchFailed(self.unable)
        self._launch, self._asked = launch, False
        self._moved_us, self._usual_us, self._longest_us, self._step = self._now_us(), 0, 0, -1
        await asyncio.sleep(self.training.times.start_s)
        self.training.starts.append((launch.node or self.node, launch.generation))
        self._living = {launch.first_rank + one: one for one in range(launch.nproc)}
        for rank in list(self._living):
            self.training.join(launch, rank, self)

    async def stop(self, grace_s: float, kill_wait_s: float) -> bool:
        """All dead after a moment; with ``stuck``, not."""
        if self.stuck and self._living and self._launch is not None:
            await asyncio.sleep(grace_s + kill_wait_s)
            self._notices.put_nowait(WorkersStuck(self._launch.generation, tuple(self._living)))
            return False
        self._asked = True
        if self._living:
            await asyncio.sleep(min(grace_s, self.patience_s) + self.training.times.stop_s)
        self._end(-9 if grace_s == 0 else -15)
        return True

    def _end(self, code: int) -> None:
        for rank in list(self._living):
            assert self._launch is not None
            self.die(self._launch.generation, rank, code, "")

    def die(self, generation: int, rank: int, code: int, error: str) -> None:
        """One worker is dead, by itself or by somebody's hand."""
        if self._launch is None or self._launch.generation != generation or rank not in self._living:
            return
        local = self._living.pop(rank)
        self.training.left(generation, rank, cascades=not self._asked and code != 0)
        now_us = self._now_us()
        step = self.training.done
        gone = WorkerExit(generation, local, rank, code, self._asked, now_us, step, error, error, now_us)
        # Its last words are read before anybody hears of its death.
        asyncio.get_running_loop().call_later(self.bury_s, self._buried, gone, not self._living)

    def _buried(self, gone: WorkerExit, last: bool) -> None:
        self._notices.put_nowait(gone)
        if last:
            self._notices.put_nowait(WorkersGone(gone.generation))

    def kill(self, rank: int, code: int = -9, error: str = "") -> None:
        """Kill one worker from outside."""
        assert self._launch is not None
        self.die(self._launch.generation, rank, code, error)

    @property
    def ranks(self) -> list[int]:
        """The global ranks that live here."""
        return list(self._living)

    @property
    def generation(self) -> int:
        """Of the workers that were started last; 0: none were."""
        return self._launch.generation if self._launch is not None else 0

    def place(self, rank: int) -> tuple[str, int]:
        """Where a rank of ours lives: the node, and which of its workers it is."""
        return self.node, self._living.get(rank, -1)

    def stepped(self, generation: int, rank: int, step: int, first: bool) -> None:
        """A worker made a step."""
        now_us = self._now_us()
        if self._step >= 0 and step > self._step:
            self._usual_us = now_us - self._moved_us
            self._longest_us = max(self._longest_us, self._usual_us)
        self._moved_us, self._step = now_us, step
        self._notices.put_nowait(WorkerStep(generation, rank, step, first, self._now_us(), told=True))

    def pulse(self) -> Pulse | None:
        """How long its workers have made no step."""
        if not self._living or self.training.quiet:
            return None
        return Pulse(self._step, self._now_us() - self._moved_us, self._usual_us, self._longest_us)

    def shown(self) -> tuple[str, ...]:
        """What its ranks are at: those that hang are elsewhere, the others wait for them."""
        hung, idle_us = self.training.hung, self._now_us() - self._moved_us
        found = (
            Facts(one, "S", "", idle_us, stack=(ELSEWHERE if (self.generation, one) in hung else WAITING,))
            for one in self._living
        )
        return tuple(hanging.to_text(one) for one in found)

    def _now_us(self) -> int:
        # By its own host's clock, whoever's doing it is.
        return int(virtual_loop.time_of(self.node) * 1_000_000)

    async def notices(self) -> AsyncIterator[Notice]:
        """Everything that happens."""
        while True:
            notice = await self._notices.get()
            if notice is None:
                return
            yield notice

    def crash(self, *, told: bool = True) -> None:
        """The whole node is gone: its workers die with it and no agent is told; unless ``told``, their peers are not either."""
        if self._launch is not None:
            for rank in list(self._living):
                self._living.pop(rank)
                self.training.left(self._launch.generation, rank, cascades=told)

    async def close(self) -> None:
        """Kill what is left."""
        self._asked = True
        self._end(-9)
        self._notices.put_nowait(None)


class ShowHangs(Orders):
    """The duty of an agent in memory: shows what its ranks are at, as soon as the leader suspects a hang."""

    def __init__(self, launcher: MemoryLauncher) -> None:
        super().__init__()
        self._launcher = launcher

    async def run(self, desk: Desk) -> None:
        """Until cancelled."""
        shown = 0
        while True:
            hang = (await self.news(desk)).part(Probe).hang
            if hang > shown:
                shown = hang
                await asyncio.sleep(SHOW_S)
                desk.send(ReportStacks(desk.node, hang, self._launcher.shown()))
