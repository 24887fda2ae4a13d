"""A cluster in one loop: the real master and the real agents over in-memory ports, and the faults one can do to them.

```python
async def story() -> None:
    async with Cluster(JobSpec("j", (GroupSpec(nodes_min=2, nodes_max=2, nproc=2),))) as cluster:
        await cluster.until(lambda: cluster.training.done >= 5)
        cluster.kill_worker(3)
        outcome = await cluster.outcome()
virtual_loop.run(story())
```
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from contextvars import Context
from types import TracebackType

from dlrover_core.errors import HandedOver, LaunchRefused
from dlrover_core.job.orders import NodeLaunch
from dlrover_core.job.sets import Sets
from dlrover_core.job.state import CODEC, FOLD, JobState, fold
from dlrover_core.kernel.events import Record
from dlrover_core.logs.memory import MemoryLog
from dlrover_core.runtime import messages
from dlrover_core.runtime.agent import Agent
from dlrover_core.runtime.backend import Backend, Changed, Listed, Observation
from dlrover_core.runtime.duties import Duty
from dlrover_core.runtime.master import SNAPSHOT_EVENTS, Master, Outcome
from dlrover_core.runtime.pipeline import Deposed
from dlrover_core.sim.training import NEVER
from dlrover_core.spec import JobSpec
from dlrover_core.testing import virtual_loop
from dlrover_core.testing.called import Called, Heard
from dlrover_core.testing.checks import CheckStub
from dlrover_core.testing.network import DELAY_S, Network
from dlrover_core.testing.platform import BOOT_S, Machine, NameTaken, NoQuota, Platform, Pool
from dlrover_core.testing.training import MemoryLauncher, ShowHangs, Training

ADDRESS = "master:1"
ADDRESSES = ("master-a:1", "master-b:1", "master-c:1")
EPOCH_US = 1_700_000_000_000_000


class MemoryBackend:
    """The nodes of a `Platform`. One instance serves all masters that come.

    Calls under a token older than the newest seen are refused and kept in ``refused``; ``unwilling`` is raised by every launch
    while it is set.
    """

    def __init__(self, platform: Platform) -> None:
        self._platform = platform
        self._token = 0
        self.launched, self.ended, self.blind = platform.launched, platform.ended, platform.blind
        self.refused: list[str] = []
        self.unwilling: Exception | None = None

    def _fence(self, token: int, what: str) -> None:
        if token < self._token:
            self.refused.append(what)
            raise PermissionError(f"{what} under token {token}: {self._token} is newer")
        self._token = token

    async def launch(self, node: NodeLaunch, token: int) -> None:
        """Start an agent, once per name."""
        self._fence(token, f"launch {node.node}")
        if self.unwilling is not None:
            raise self.unwilling
        try:
            await self._platform.start(node.name, node)
        except NameTaken:
            return
        except NoQuota as refused:
            raise LaunchRefused(str(refused), permanent=False) from refused

    async def delete(self, name: str, token: int, grace_s: float) -> None:
        """End an agent: by itself within the grace, else by force."""
        self._fence(token, f"delete {name}")
        await self._platform.stop(name, grace_s)

    async def observe(self) -> AsyncIterator[Listed | Changed]:
        """Everything, then every change."""
        version, machines = self._platform.snapshot()
        yield Listed(tuple(_seen(machine) for machine in machines))
        async for machine in self._platform.changes(version):
            yield Changed(_seen(machine))

    async def room(self, group: str) -> int | None:  # noqa: ARG002  # the port's
        """How many hosts are free."""
        return self._platform.free

    def relist(self) -> None:
        """Let every follower list again."""
        self._platform.break_streams()

    def lose(self, name: str) -> None:
        """Forget a node without its having ended: somebody deleted it behind our back."""
        self._platform.lose(name)

    def kill(self, name: str) -> None:
        """SIGKILL an agent: its workers die with it."""
        self._platform.kill(name)

    @property
    def living(self) -> list[str]:
        """The nodes whose agents have not ended."""
        return self._platform.living


def _seen(machine: Machine) -> Observation:
    # Only of a notice it matters when it was said.
    age_us = round((asyncio.get_running_loop().time() - machine.said_s) * 1e6) if machine.notice else 0
    return Observation(
        machine.name,
        machine.phase,
        machine.exit_code,
        machine.reason,
        machine.host,
        machine.domain,
        notice=machine.notice,
        notice_us=machine.notice_us,
        age_us=age_us,
        waits=machine.waits,
    )


class Cluster:
    """One job with its master, its agents, its log. ``skew_us`` shifts the wall clock of masters started from now on.

    Its nodes run in a `Platform`, on hosts of its own or of a ``pool`` shared with other jobs. A ``backend`` is made for each
    master, over that; without one, `MemoryBackend` serves all.

    Masters share one address, as those of one host do, and only the leader is reached there. With ``answers`` they are on
    several hosts: agents know three addresses, and standbys answer.
    ``snapshot_events`` is every how many events masters keep a snapshot, and archive what came before it.
    Nodes on ``sick`` hosts fail their check, where there is one; ``ill`` are those that have.
    ``patience_s`` is how long workers of nodes that boot from now on take to stop, if they are given so long.

    ``training`` is that of the first coupling set; another set's is made by ``others``, called with the set's name, when its
    first node boots, and is in ``trainings``. ``heard`` is what nodes were told of others' addresses, in order.
    """

    def __init__(
        self,
        spec: JobSpec,
        *,
        training: Training | None = None,
        event_log: MemoryLog | None = None,
        boot_s: float = BOOT_S,
        snapshot_events: int = SNAPSHOT_EVENTS,
        answers: bool = False,
        hosts: Sequence[str] = (),
        pool: Pool | None = None,
        notice_s: float = 0.0,
        network_s: float = DELAY_S,
        backend: Callable[[Platform], Backend] | None = None,
        others: Callable[[str], Training] | None = None,
    ) -> None:
        self.answers = answers
        self.addresses = list(ADDRESSES) if answers else [ADDRESS]
        self.spec, self.snapshot_events = spec, snapshot_events
        self.training = training if training is not None else Training()
        self.sets = Sets(spec.groups)
        self.trainings = {next(self.sets.all(spec)): self.training}
        self._other = others if others is not None else self._like_the_first
        self.heard: list[Heard] = []
        self.log = event_log if event_log is not None else MemoryLog(CODEC)
        self.network = Network(network_s)
        self.platform = Platform(
            self._live, crash=self._crash, hosts=hosts, pool=pool, boot_s=boot_s, notice_s=notice_s
        )
        self.backend = MemoryBackend(self.platform)
        self._make_backend = backend
        self.launchers: dict[str, MemoryLauncher] = {}
        self.agents: dict[str, Agent] = {}
        self.skew_us = 0
        self.jumped_us: dict[str, int] = {}
        self.agent_version = messages.VERSION
        self.patience_s = 0.0
        self.sick: set[str] = set()
        self.ill: set[str] = set()
        self.run = "run-1"
        self.masters: list[Master] = []
        self.deposed: list[str] = []
        self.handed_over: list[str] = []
        self._killed: set[str] = set()
        self._tasks: list[asyncio.Task[Outcome]] = []
        self._boots = 0
        self._outcome: asyncio.Future[Outcome] | None = None

    async def __aenter__(self) -> Cluster:  # noqa: PYI034  # Self needs 3.11
        """Start the first master."""
        self._outcome = asyncio.get_running_loop().create_future()
        self.start_master()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop everything."""
        self._loop.thaw_all()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.platform.close()

    def start_master(self) -> Master:
        """One more master; it stands by while another leads."""
        loop = asyncio.get_running_loop()
        skew, holder = self.skew_us, f"master-{len(self.masters)}"
        backend = self._make_backend(self.platform) if self._make_backend is not None else self.backend
        master = Master(
            self.spec,
            event_log=self.log,
            listener=self.network.listener(self._free_address()),
            backend=backend if not self.spec.joining else None,
            wall=lambda: int(loop.time() * 1_000_000) + EPOCH_US + skew + self.jumped_us.get(holder, 0),
            holder=holder,
            run_id=self.run,
            snapshot_events=self.snapshot_events,
            answers=self.answers,
        )
        self.masters.append(master)
        task = virtual_loop.spawn(master._holder, master.run())
        self._tasks.append(task)
        task.add_done_callback(lambda task: self._ended(master, task), context=Context())
        return master

    def _free_address(self) -> str:
        """Where no living master listens; beyond those that agents know, one that they do not."""
        if not self.answers:
            return ADDRESS
        taken = {master.address for master in self.masters if self.alive(master)}
        unlisted = f"master-{len(self.masters)}:1"
        return next((address for address in self.addresses if address not in taken), unlisted)

    def _ended(self, master: Master, task: asyncio.Task[Outcome]) -> None:
        assert self._outcome is not None
        if task.cancelled():
            return
        error = task.exception()
        if isinstance(error, Deposed):
            self.deposed.append(master._holder)
        elif isinstance(error, HandedOver):
            self.handed_over.append(master._holder)
        elif self._outcome.done():
            return
        elif error is not None:
            self._outcome.set_exception(error)
        else:
            self._outcome.set_result(task.result())

    def agent(self, node: NodeLaunch, host: str) -> Agent:
        """The agent of a node that boots."""
        training = self.training_of(node.node)
        launcher = MemoryLauncher(node.node, node.nproc, training)
        launcher.patience_s = self.patience_s
        self.launchers[node.node] = launcher
        self._boots += 1
        checked = self.spec.in_force(self.sets.groups(self.sets.of(node.node))[0]).precheck != "off"
        checks = [CheckStub(host, self.sick, self.ill)] if checked else []
        agent = Agent(
            node.node,
            launcher=launcher,
            dialer=self.network.dialer(node.node, version=self.agent_version),
            masters=self.addresses,
            boot=self._boots,
            host=host,
            address=node.node,
            duties=[ShowHangs(launcher), *checks, *training.duties(), *self._addresses(host)],
        )
        self.agents[node.node] = agent
        return agent

    def _addresses(self, host: str) -> list[Duty]:
        return [Called(host, self.heard)] if any(group.uses for group in self.spec.groups) else []

    def training_of(self, node: str) -> Training:
        """The training of a node's coupling set."""
        name = self.sets.of(node)
        if name not in self.trainings:
            self.trainings[name] = self._other(name)
        return self.trainings[name]

    def _like_the_first(self, name: str) -> Training:
        """As many steps, as fast; a set that the job's end does not wait for trains until it is stopped."""
        first = self.training
        return Training(first.steps if self.sets.ends(name) else NEVER, first.step_s, first.cascade_s, first.times)

    async def _live(self, node: NodeLaunch, host: str) -> str:
        return await self.agent(node, host).run()

    def _crash(self, node: str, told: bool) -> None:
        """Its workers die with an agent. SIGKILL does not wait for a stopped process either."""
        if not told:
            self.network.cut(node, silent=True)
        if node in self.launchers:
            self.launchers[node].crash(told=told)
        saving = self.training_of(node).saving
        if saving is not None:
            saving.lose(node)
        self.thaw(node)

    # ---- looking

    @property
    def master(self) -> Master:
        """The newest master."""
        return self.masters[-1]

    def alive(self, master: Master) -> bool:
        """Does its process live?"""
        return master._holder not in self._killed and not self._tasks[self.masters.index(master)].done()

    async def hand_over(self) -> None:
        """Ask whoever leads to go, and wait until it has gone."""
        going = [master for master in self.masters if master.leading]
        for master in going:
            master.hand_over("somebody asked")
        await self.until(lambda: not any(self.alive(master) for master in going))

    @property
    def leader(self) -> Master:
        """The master that leads. Raises `LookupError` where none does."""
        for master in self.masters:
            if master.leading:
                return master
        raise LookupError("nobody leads")

    @property
    def state(self) -> JobState:
        """The leader's state."""
        leading = [master for master in self.masters if master.leading]
        known = (master.state for master in (*leading, *reversed(self.masters)) if master.state.seq)
        return next(known, None) or FOLD.new()

    async def records(self) -> list[Record]:
        """The whole log."""
        return [record async for record in self.log.read(self.spec.job)]

    async def names(self) -> list[str]:
        """The kinds of all records, in order."""
        return [type(record.event).__name__ for record in await self.records()]

    async def refold(self) -> JobState:
        """The state, folded anew from the log."""
        return fold(await self.records())

    async def until(self, true: Callable[[], bool], limit_s: float = 600.0, every_s: float = 0.001) -> None:
        """Until something holds; looked at every millisecond of virtual time before which anything has run."""
        loop = self._loop

        async def look() -> None:
            asked = loop.asked
            while not true():  # anything may make it true; time is virtual
                # What asks for the time may come true while nothing runs.
                await (asyncio.sleep(every_s) if loop.asked != asked else loop.tick(every_s))
                asked = loop.asked

        await asyncio.wait_for(look(), limit_s)

    async def outcome(self, limit_s: float = 36_000.0) -> Outcome:
        """How the job ended."""
        assert self._outcome is not None
        return await asyncio.wait_for(asyncio.shield(self._outcome), limit_s)

    # ---- hurting

    def kill_worker(self, rank: int, code: int = -9, error: str = "", *, of: str = "") -> None:
        """Kill the worker with this rank, ``of`` this set; empty: of the first set that has one."""
        for launcher in self.launchers.values():
            if rank in launcher.ranks and of in ("", self.sets.of(launcher.node)):
                launcher.kill(rank, code, error)
                return
        raise LookupError(f"no worker has rank {rank} now")

    def kill_node(self, node: str) -> None:
        """Kill an agent and its workers."""
        self.backend.kill(f"{self.spec.job}-{node}")

    def kill_master(self) -> None:
        """Kill every master without a word: no resigning, no goodbye; the log gives leadership to the next."""
        self._kill([master for master, task in zip(self.masters, self._tasks, strict=True) if not task.done()])

    def kill_leader(self) -> None:
        """Kill the master that leads; whoever stands by takes over."""
        self._kill([self.leader])

    def _kill(self, masters: list[Master]) -> None:
        for master in masters:
            self._killed.add(master._holder)
            self._tasks[self.masters.index(master)].cancel()
            master._listener.drop()  # type: ignore[attr-defined]  # a death closes sockets, whoever holds the port
        with contextlib.suppress(KeyError):
            self.log.expire(self.spec.job)
        for master in masters:
            self.thaw(master._holder)

    def freeze(self, owner: str) -> None:
        """Stop a node's agent or a master (by its holder) as SIGSTOP does; workers run on."""
        self._loop.freeze(owner)

    def thaw(self, owner: str) -> None:
        """Let it go on."""
        self._loop.thaw(owner)

    def jump(self, seconds: float) -> None:
        """Stop everything for so long: the whole host was suspended."""
        self._loop.jump(seconds)

    @property
    def _loop(self) -> virtual_loop.VirtualLoop:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, virtual_loop.VirtualLoop), "a cluster lives on a virtual-time loop"
        return loop
