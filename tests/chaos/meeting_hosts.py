"""What stories of hosts that come by themselves share: a job, and what is told of it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from tests.chaos.hosts_cluster import HostsCluster

from dlrover_core.job.state import JobState
from dlrover_core.runtime import messages
from dlrover_core.runtime.messages import Hello
from dlrover_core.spec import GroupSpec, JobSpec
from dlrover_core.testing import virtual_loop
from dlrover_core.testing.cluster import ADDRESS
from dlrover_core.testing.invariants import check, check_steps
from dlrover_core.testing.network import MemoryConnection
from dlrover_core.testing.training import Training

SPEC = JobSpec(
    "j",
    (GroupSpec(nodes_min=2, nodes_max=2, nproc=2),),
    joining=True,
    silence_s=5.0,
    unreachable_s=60.0,
    mass_silence_s=60.0,
)
ELASTIC = JobSpec("j", (GroupSpec(nodes_min=2, nodes_max=3),), joining=True, last_call_s=10.0, grow_window_s=5.0)
# From a death, or a wish, to workers: names, joining, a world, a start, a step.
TAKE_OVER_S = 0.2
LIVES = frozenset({"died", "replaced", "lost", "left"})


def tell(
    story: Callable[[HostsCluster], Awaitable[None]],
    hosts: tuple[str, ...] = ("a", "b"),
    *,
    spec: JobSpec = SPEC,
    steps: int = 100,
    ends: str = "succeeded",
    runs: bool = True,
    boot_s: float = 2.0,
) -> tuple[HostsCluster, JobState]:
    """Let a joining job suffer ``story``; every step once, every invariant kept, and every host heard how it ended."""

    async def told() -> tuple[HostsCluster, JobState]:
        async with HostsCluster(spec, hosts, training=Training(steps=steps), boot_s=boot_s) as cluster:
            if runs:
                await step(cluster, 5)
            await story(cluster)
            outcome = await cluster.outcome()
            assert outcome.state == ends, outcome
            await cluster.settled()
            assert [host.name for host in cluster.hosts.values() if not host.dead and host.ending in LIVES] == []
            if ends == "succeeded":
                check_steps(cluster)
                assert cluster.training.done == cluster.training.steps
            return cluster, await check(cluster)

    return virtual_loop.run(told())


def step(cluster: HostsCluster, number: int) -> Awaitable[None]:
    """Until this step is made."""
    return cluster.until(lambda: cluster.training.done >= number)


async def next_step(cluster: HostsCluster) -> float:
    """Seconds until one more step is made."""
    began, done = now(), cluster.training.done
    await step(cluster, done + 1)
    return now() - began


def now() -> float:
    """Virtual seconds."""
    return asyncio.get_running_loop().time()


def facts(cluster: HostsCluster, kind: type) -> list[Any]:
    """The events of a kind in the log, in order."""

    async def found() -> list[object]:
        return [record.event for record in await cluster.records() if isinstance(record.event, kind)]

    return virtual_loop.run(found())


def members(cluster: HostsCluster) -> list[str]:
    """The hosts of the newest world, in rank order."""
    current = cluster.state.world.worlds["worker"]
    return [cluster.state.nodes.nodes[member.node].host for member in current.members]


async def nothing(_: HostsCluster) -> None:
    """An undisturbed story."""


async def dial(cluster: HostsCluster, hello: Hello) -> MemoryConnection:
    """A connection of somebody whose every word is the test's."""
    connection = cluster.network.connect(hello.host or "elsewhere", ADDRESS)
    await connection.send(messages.encode(hello))
    return connection


def standby(host: str, boot: int = 77, **more: Any) -> Hello:
    """A standby's greeting."""
    return Hello(messages.VERSION, "", "", boot, 0, 0, host, 2, "0")._replace(**more)


async def hear(connection: MemoryConnection) -> messages.Message:
    """The master's next word."""
    return messages.decode(await asyncio.wait_for(connection.receive(), 60))


def members_ready(cluster: HostsCluster) -> list[str]:
    """The nodes that have joined."""
    return [node.node for node in cluster.state.nodes.nodes.values() if node.joined]
