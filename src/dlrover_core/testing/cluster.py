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
from collections.abc import AsyncIterator, Callable
from types import TracebackType

from dlrover_core.job.state import CODEC, MODEL, JobState, NodeLaunch, fold
from dlrover_core.kernel.events import Record
from dlrover_core.logs.memory import MemoryLog
from dlrover_core.runtime.agent import Agent
from dlrover_core.runtime.backend import Changed, Listed, Observation
from dlrover_core.runtime.master import Master, Outcome
from dlrover_core.spec import JobSpec
from dlrover_core.testing.network import Network
from dlrover_core.testing.training import MemoryLauncher, Training

ADDRESS = "master:1"
BOOT_S = 2.0


class MemoryBackend:
    """Nodes as agents in this loop. They outlive masters; each starts ``boot_s`` after its launch."""

    def __init__(self, cluster: Cluster, boot_s: float = BOOT_S) -> None:
        self._cluster, self._boot_s = cluster, boot_s
        self._nodes: dict[str, Observation] = {}
        self._used: set[str] = set()
        self._agents: dict[str, asyncio.Task[str]] = {}
        self._followers: list[asyncio.Queue[Changed | None]] = []
        self.launched: list[str] = []
        self.mute = False

    async def launch(self, node: NodeLaunch, token: int) -> None:
        """Start an agent, once per name."""
        if node.name in self._used:
            return
        self._used.add(node.name)
        self.launched.append(node.node)
        self._change(Observation(node.name, "pending"))
        self._agents[node.name] = asyncio.ensure_future(self._live(node))
        self._agents[node.name].add_done_callback(lambda task: self._ended(node.name, task))

    async def _live(self, node: NodeLaunch) -> str:
        await asyncio.sleep(self._boot_s)
        self._change(Observation(node.name, "running", host=node.node))
        return await self._cluster.agent(node).run()

    def _ended(self, name: str, task: asyncio.Task[str]) -> None:
        if task.cancelled():
            self._change(Observation(name, "failed", -9, "SIGKILL"))
        elif task.exception() is not None:
            self._change(Observation(name, "failed", 1, str(task.exception())))
        else:
            self._change(Observation(name, "succeeded"))

    def _change(self, seen: Observation) -> None:
        self._nodes[seen.name] = seen
        if seen.phase == "gone":
            del self._nodes[seen.name]
        if not self.mute:
            for follower in self._followers:
                follower.put_nowait(Changed(seen))

    async def delete(self, name: str, token: int, grace_s: float) -> None:
        """End an agent."""
        task = self._agents.get(name)
        if task is not None and not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        if name in self._nodes:
            self._change(Observation(name, "gone"))

    async def observe(self) -> AsyncIterator[Listed | Changed]:
        """Everything, then every change."""
        queue: asyncio.Queue[Changed | None] = asyncio.Queue()
        self._followers.append(queue)
        try:
            yield Listed(tuple(self._nodes.values()))
            while True:
                seen = await queue.get()
                if seen is None:
                    return
                yield seen
        finally:
            self._followers.remove(queue)

    async def room(self, group: str) -> int | None:
        """Unknown."""
        return None

    def relist(self) -> None:
        """Let every follower list again."""
        for follower in self._followers:
            follower.put_nowait(None)

    def kill(self, name: str) -> None:
        """SIGKILL an agent: its workers die with it."""
        self._cluster.launchers[name.split("-", 1)[1]].crash()
        self._agents[name].cancel()

    async def close(self) -> None:
        """End every agent."""
        for task in self._agents.values():
            task.cancel()
        await asyncio.gather(*self._agents.values(), return_exceptions=True)


class Cluster:
    """One job with its master, its agents, its log. ``skew_us`` shifts the wall clock of masters started from now on."""

    def __init__(
        self,
        spec: JobSpec,
        *,
        training: Training | None = None,
        event_log: MemoryLog | None = None,
        boot_s: float = BOOT_S,
    ) -> None:
        self.spec = spec
        self.training = training if training is not None else Training()
        self.log = event_log if event_log is not None else MemoryLog(CODEC)
        self.network = Network()
        self.backend = MemoryBackend(self, boot_s)
        self.launchers: dict[str, MemoryLauncher] = {}
        self.agents: dict[str, Agent] = {}
        self.skew_us = 0
        self.masters: list[Master] = []
        self._tasks: list[asyncio.Task[Outcome]] = []
        self._boots = 0
        self._outcome: asyncio.Future[Outcome] | None = None

    async def __aenter__(self) -> Cluster:
        """Start the first master."""
        self._outcome = asyncio.get_running_loop().create_future()
        self.start_master()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Stop everything."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.backend.close()

    def start_master(self) -> Master:
        """One more master; it stands by while another leads."""
        loop = asyncio.get_running_loop()
        skew = self.skew_us
        master = Master(
            self.spec,
            event_log=self.log,
            listener=self.network.listener(ADDRESS),
            backend=self.backend,
            wall=lambda: int(loop.time() * 1_000_000) + 1_700_000_000_000_000 + skew,
            holder=f"master-{len(self.masters)}",
            run_id="run-1",
        )
        self.masters.append(master)
        task = asyncio.ensure_future(master.run())
        self._tasks.append(task)
        task.add_done_callback(self._ended)
        return master

    def _ended(self, task: asyncio.Task[Outcome]) -> None:
        assert self._outcome is not None
        if task.cancelled() or self._outcome.done():
            return
        error = task.exception()
        if error is not None:
            self._outcome.set_exception(error)
        else:
            self._outcome.set_result(task.result())

    def agent(self, node: NodeLaunch) -> Agent:
        """The agent of a node that boots."""
        launcher = MemoryLauncher(node.node, node.nproc, self.training)
        self.launchers[node.node] = launcher
        self._boots += 1
        agent = Agent(
            node.node,
            launcher=launcher,
            dialer=self.network.dialer(node.node),
            masters=[ADDRESS],
            boot=self._boots,
            host=node.node,
            address=node.node,
        )
        self.agents[node.node] = agent
        return agent

    # ---- looking

    @property
    def master(self) -> Master:
        """The newest master."""
        return self.masters[-1]

    @property
    def state(self) -> JobState:
        """The leader's state."""
        return next((master.state for master in reversed(self.masters) if master.state.seq), MODEL.new())

    async def records(self) -> list[Record]:
        """The whole log."""
        return [record async for record in self.log.read(self.spec.job)]

    async def names(self) -> list[str]:
        """The kinds of all records, in order."""
        return [type(record.event).__name__ for record in await self.records()]

    async def refold(self) -> JobState:
        """The state, folded anew from the log."""
        return fold(await self.records())

    async def until(self, true: Callable[[], bool], limit_s: float = 3600.0) -> None:
        """Until something holds; looked at every millisecond of virtual time."""

        async def look() -> None:
            while not true():
                await asyncio.sleep(0.001)

        await asyncio.wait_for(look(), limit_s)

    async def outcome(self, limit_s: float = 36_000.0) -> Outcome:
        """How the job ended."""
        assert self._outcome is not None
        return await asyncio.wait_for(asyncio.shield(self._outcome), limit_s)

    # ---- hurting

    def kill_worker(self, rank: int, code: int = -9, error: str = "") -> None:
        """Kill the worker with this rank."""
        for launcher in self.launchers.values():
            if rank in launcher.ranks:
                launcher.kill(rank, code, error)
                return
        raise LookupError(f"no worker has rank {rank} now")

    def kill_node(self, node: str) -> None:
        """Kill an agent and its workers."""
        self.backend.kill(f"{self.spec.job}-{node}")

    def kill_master(self) -> None:
        """Kill every master without a word: no resigning, no goodbye; the log gives leadership to the next."""
        for master, task in zip(self.masters, self._tasks, strict=True):
            if not task.done():
                task.cancel()
                master._listener.drop()  # type: ignore[attr-defined]  # a death closes sockets, whoever holds the port
        with contextlib.suppress(KeyError):
            self.log.expire(self.spec.job)
