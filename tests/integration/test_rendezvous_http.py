"""Agents without a node over real sockets: they join, wait, take over, and hear the end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress

from dlrover_adapters.http import HttpDialer, HttpListener, bind
from dlrover_core.job.state import CODEC
from dlrover_core.logs.memory import MemoryLog
from dlrover_core.runtime.agent import Agent
from dlrover_core.runtime.master import Master, Outcome
from dlrover_core.spec import GroupSpec, JobSpec
from dlrover_core.testing.training import MemoryLauncher, Training

TOKEN = "the-token-of-this-job"
BOUND_S = 30.0
SPEC = JobSpec("j", (GroupSpec(nodes_min=2, nodes_max=2, nproc=1),), joining=True)


class Hosts:
    """A real master on a real port, and agents that dial it."""

    def __init__(self) -> None:
        self.listener = HttpListener(bind(), TOKEN)
        self.training = Training(steps=100, step_s=0.01)
        self.agents: dict[str, Agent] = {}
        self.running: dict[str, asyncio.Task[str]] = {}
        self.dialers: dict[str, HttpDialer] = {}
        self.launchers: dict[str, MemoryLauncher] = {}
        self.master = Master(
            SPEC,
            event_log=MemoryLog(CODEC),
            listener=self.listener,
            backend=None,
            wall=lambda: time.time_ns() // 1000,
            holder="master",
            run_id="run",
        )

    def join(self, host: str, boot: int) -> None:
        """One more host's agent."""
        self.launchers[host] = MemoryLauncher(host, 1, self.training)
        self.dialers[host] = HttpDialer(TOKEN)
        self.agents[host] = Agent(
            "",
            launcher=self.launchers[host],
            dialer=self.dialers[host],
            masters=[self.listener.address],
            boot=boot,
            host=host,
            address="127.0.0.1",
            seat="0",
        )
        self.running[host] = asyncio.ensure_future(self.agents[host].run())

    async def die(self, host: str) -> None:
        """The kernel ends its connections, its workers are dead, and nothing of it ever runs again."""
        self.launchers[host].crash()
        connection = self.agents[host]._connection
        connection._cut()  # type: ignore[union-attr]  # what a death does to a socket
        self.running[host].cancel()
        await asyncio.gather(self.running[host], return_exceptions=True)


def tell(story: Callable[[Hosts, asyncio.Task[Outcome]], Awaitable[None]]) -> None:
    """Tell a story to a master that leads, within a bound."""

    async def told() -> None:
        hosts = Hosts()
        mastering = asyncio.ensure_future(hosts.master.run())
        try:
            await hosts.master.led.wait()
            await story(hosts, mastering)
        finally:
            for task in (*hosts.running.values(), mastering):
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task

    asyncio.run(asyncio.wait_for(told(), BOUND_S))


async def until(true: Callable[[], bool]) -> None:
    """Until something holds, looked at often."""
    while not true():  # noqa: ASYNC110  # anything may make it true
        await asyncio.sleep(0.005)


def test_standby_takes_over() -> None:
    """Three hosts join a job of two: one waits, takes the place of one that dies, and all hear that the job has succeeded."""

    async def story(hosts: Hosts, mastering: asyncio.Task[Outcome]) -> None:
        for boot, host in enumerate(("a", "b", "c"), 1):
            hosts.join(host, boot)
        await until(lambda: hosts.training.done >= 5)
        assert len(hosts.master.sessions.standbys) == 1
        victim = next(host for host, agent in hosts.agents.items() if agent.node == "worker-1-0")
        began = asyncio.get_running_loop().time()
        await hosts.die(victim)
        await until(lambda: ("worker-1-1", 3) in hosts.training.starts or ("worker-1-1", 2) in hosts.training.starts)
        assert asyncio.get_running_loop().time() - began < SPEC.gone_s + 8.0 < SPEC.silence_s
        assert (await mastering).state == "succeeded"
        for host, agent in hosts.agents.items():
            if host != victim:
                await hosts.running[host]
                assert agent.ending.outcome == "succeeded"

    tell(story)
