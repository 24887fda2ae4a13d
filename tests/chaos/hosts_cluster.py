"""Hosts that come by themselves: a cluster whose master launches nothing, and launchers that keep one agent each.

```python
async def story() -> None:
    async with HostsCluster(JobSpec("j", (GroupSpec(nodes_min=2, nodes_max=2),), joining=True), hosts=["a", "b", "c"]) as cluster:
        await cluster.until(lambda: cluster.training.done >= 5)
        cluster.kill_agent("a")
        outcome = await cluster.outcome()
virtual_loop.run(story())
```
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextvars import Context
from types import TracebackType

from dlrover_core.logs.memory import MemoryLog
from dlrover_core.runtime.agent import Agent
from dlrover_core.runtime.ending import Ending
from dlrover_core.spec import JobSpec
from dlrover_core.testing import virtual_loop
from dlrover_core.testing.cluster import Cluster
from dlrover_core.testing.platform import BOOT_S
from dlrover_core.testing.training import MemoryLauncher, Training

# The job is over, or this host was told that it is not needed any more.
DONE = ("succeeded", "failed", "stopped", "drained", "scaled down", "given up")


class Host:
    """One host's launcher: keeps one agent, starts the next one ``boot_s`` after the last has ended, as long as there is a job.

    ``endings`` says how each of its agents went, ``died`` for one that was killed.
    """

    def __init__(self, cluster: HostsCluster, name: str, *, nproc: int, place: int = -1) -> None:
        self._cluster, self.name, self.nproc, self.place = cluster, name, nproc, place
        self.endings: list[Ending] = []
        self.agent: Agent | None = None
        self.launcher: MemoryLauncher | None = None
        self.done = self.dead = False
        self._agents = 0
        self._keeping: asyncio.Task[None] | None = None
        self._running: asyncio.Task[str] | None = None

    def start(self) -> None:
        """The launcher starts, and soon its agent."""
        self.done = self.dead = False
        self._keeping = virtual_loop.spawn(self.name, self._keep())
        self._keeping.add_done_callback(self._kept, context=Context())

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(self._cluster.boot_s)
            agent = self._make()
            self._running = asyncio.ensure_future(agent.run())
            await self._watch(agent, self._running)
            ending = Ending("died") if self._running.cancelled() else agent.ending
            self.endings.append(ending)
            self.agent = None
            if ending.outcome in DONE or not ending.outcome:
                return

    async def _watch(self, agent: Agent, running: asyncio.Task[str]) -> None:
        """Until the agent has ended; where no master answers for as long as one joins, the job is taken to be over."""
        launch_s = self._cluster.spec.launch_s
        while not running.done():
            await asyncio.wait({running}, timeout=launch_s)
            if agent.unmastered_s > launch_s:
                agent.leave("no master answers")

    def _kept(self, task: asyncio.Task[None]) -> None:
        self.done = True
        if not task.cancelled() and task.exception() is not None:
            self._cluster.broken.append(str(task.exception()))

    def _make(self) -> Agent:
        cluster = self._cluster
        self._agents += 1
        process = f"{self.name}.{self._agents}"
        self.launcher = MemoryLauncher(process, self.nproc, cluster.training)
        self.launcher.warm_s = cluster.warm_s
        cluster.launchers[process] = self.launcher
        self.agent = cluster.make_agent(self, self.launcher)
        return self.agent

    @property
    def node(self) -> str:
        """The node that its agent is; empty: none."""
        return self.agent.node if self.agent is not None else ""

    @property
    def ending(self) -> str:
        """The outcome that its last agent went with."""
        return self.endings[-1].outcome if self.endings else ""

    def kill_agent(self) -> None:
        """SIGKILL the agent: its workers die with it, its kernel ends its connections, and the launcher starts the next."""
        if self.launcher is not None and self._running is not None and not self._running.done():
            self.launcher.crash()
            self._cluster.network.die(self.name)
            self._running.cancel()
            self._cluster.thaw(self.name)

    def kill(self, *, told: bool = True) -> None:
        """SIGKILL launcher and agent, as a reboot does; unless ``told``, the power is out and no kernel says a word."""
        self.dead = True
        if not told:
            self._cluster.network.cut(self.name, silent=True)
        self.kill_agent()
        if self._keeping is not None:
            self._keeping.cancel()

    async def close(self) -> None:
        """End whatever runs here."""
        tasks = [task for task in (self._keeping, self._running) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class HostsCluster(Cluster):
    """A `Cluster` of a joining job. Each host starts at once unless the test starts it; agents are warm after ``warm_s``."""

    def __init__(
        self,
        spec: JobSpec,
        hosts: Sequence[str] = (),
        *,
        training: Training | None = None,
        event_log: MemoryLog | None = None,
        boot_s: float = BOOT_S,
        warm_s: float = 0.5,
        answers: bool = False,
    ) -> None:
        super().__init__(spec, training=training, event_log=event_log, boot_s=boot_s, answers=answers)
        self.boot_s, self.warm_s = boot_s, warm_s
        self.hosts: dict[str, Host] = {}
        self.broken: list[str] = []
        self._first = list(hosts)

    async def __aenter__(self) -> HostsCluster:  # noqa: PYI034  # Self needs 3.11
        """Start the first master and the hosts."""
        await super().__aenter__()
        for name in self._first:
            self.host(name)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop everything."""
        await super().__aexit__(kind, error, trace)
        for host in self.hosts.values():
            await host.close()
        assert kind is not None or not self.broken, self.broken

    def host(self, name: str, *, nproc: int = 0, place: int = -1) -> Host:
        """One more host joins."""
        host = self.hosts[name] = Host(self, name, nproc=nproc or self.spec.groups[0].nproc, place=place)
        host.start()
        return host

    def make_agent(self, host: Host, launcher: MemoryLauncher) -> Agent:
        """A blank agent of a host: a standby."""
        self._boots += 1
        return Agent(
            "",
            launcher=launcher,
            dialer=self.network.dialer(host.name),
            masters=self.addresses,
            boot=self._boots,
            host=host.name,
            address=host.name,
            seat="0",
            place=host.place,
        )

    # ---- looking

    def on(self, node: str) -> Host:
        """The host whose agent is this node. Raises `LookupError` where none is."""
        for host in self.hosts.values():
            if host.node == node:
                return host
        raise LookupError(f"no host's agent is {node}")

    @property
    def standbys(self) -> list[str]:
        """The hosts that wait at the newest master."""
        return [one.hello.host for one in self.master.sessions.standbys.values()]

    async def settled(self) -> None:
        """Until every launcher has nothing left to do: the job is over, and everybody knows."""
        await self.until(lambda: all(host.done for host in self.hosts.values()), 36_000, every_s=0.1)

    # ---- hurting

    def kill_agent(self, host: str) -> None:
        """SIGKILL a host's agent with its workers; its launcher starts the next."""
        self.hosts[host].kill_agent()

    def kill_host(self, host: str, *, told: bool = True) -> None:
        """End everything on a host; unless ``told``, without a word of its kernel."""
        self.hosts[host].kill(told=told)

    def start_host(self, host: str) -> None:
        """The host is back, its launcher begins anew in the same seat."""
        self.network.heal(host)
        self.hosts[host].start()
