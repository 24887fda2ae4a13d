"""Masters on several hosts, in virtual time: what tests of their succession ask and do."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from dlrover_core.job.state import JobState
from dlrover_core.logs.memory import MemoryLog
from dlrover_core.runtime import messages
from dlrover_core.runtime.master import Master
from dlrover_core.runtime.messages import Hello, Message
from dlrover_core.spec import GroupSpec, JobSpec
from dlrover_core.testing import virtual_loop
from dlrover_core.testing.cluster import Cluster
from dlrover_core.testing.invariants import check, check_steps
from dlrover_core.testing.network import MemoryConnection
from dlrover_core.testing.training import Training

SPEC = JobSpec("j", (GroupSpec(nodes_min=2, nodes_max=2, nproc=2),))
BOTH = {"worker-0-0", "worker-1-0"}
HELLO = Hello(messages.VERSION, "run-1", "worker-0-0", 77, 0, 0)


def tell(
    story: Callable[[Cluster], Awaitable[None]], *, standbys: int = 1, log: MemoryLog | None = None, steps: int = 100
) -> tuple[Cluster, JobState]:
    """Let a job with so many standby masters suffer ``story``; it makes every step once, and no worker is started again."""

    async def told() -> tuple[Cluster, JobState]:
        async with Cluster(SPEC, training=Training(steps), event_log=log, answers=True) as cluster:
            for _ in range(standbys):
                cluster.start_master()
            await story(cluster)
            outcome = await cluster.outcome()
            assert (outcome.state, outcome.root) == ("succeeded", "")
            check_steps(cluster)
            return cluster, await check(cluster)

    return virtual_loop.run(told())


def untouched(cluster: Cluster, state: JobState) -> None:
    """No worker was started twice, and nobody was taken for dead."""
    assert sorted(cluster.training.starts) == [(node, 1) for node in sorted(BOTH)]
    assert state.incidents.number == 0


def step(cluster: Cluster, number: int) -> Awaitable[None]:
    """Until this step is made."""
    return cluster.until(lambda: cluster.training.done >= number)


def now() -> float:
    """The virtual time."""
    return asyncio.get_running_loop().time()


async def led_by(cluster: Cluster, master: Master, limit_s: float = 60.0) -> float:
    """Until this master leads and both agents are its own; returns how long that took."""
    began = now()
    await cluster.until(lambda: master.leading and len(master.sessions) == 2, limit_s)
    return now() - began


def vanish(cluster: Cluster, master: Master) -> None:
    """Kill a master as its agents see it, while its lease lives on."""
    cluster.freeze(master._holder)
    master._listener.drop()  # type: ignore[attr-defined]  # as its kernel does


async def dial(cluster: Cluster, address: str, *frames: Message) -> MemoryConnection:
    """A connection of somebody else, and its first words."""
    connection = cluster.network.connect("elsewhere", address)
    for frame in frames:
        await connection.send(messages.encode(frame))
    return connection
