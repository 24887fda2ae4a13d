"""Two jobs in one queue for hours, with the real masters and agents: what the test of queues and the campaign `queue` do."""

from __future__ import annotations

import asyncio
from typing import Any

from dlrover_core.job import incidents, nodes, queueing, world
from dlrover_core.spec import GroupSpec, JobSpec
from dlrover_core.testing import virtual_loop
from dlrover_core.testing.cluster import Cluster
from dlrover_core.testing.invariants import check
from dlrover_core.testing.platform import Pool
from dlrover_core.testing.training import Training

HOUR_S = 3600.0
NAMES = ("one", "other")


async def _hours(hours: float, hosts: int, steps: int, seed: int) -> dict[str, Any]:
    """Each wants three quarters of the hosts. Nobody is placed for so many hours; then each gets every second host."""
    wanted, pool = hosts * 3 // 4, Pool([f"host-{number}" for number in range(hosts)])
    group, settings = GroupSpec(nodes_min=wanted, nodes_max=wanted), {"heartbeat_s": 5.0}
    jobs = [
        Cluster(JobSpec(f"{name}-{seed}", (group,), **settings), training=Training(steps, step_s=1.0), pool=pool)  # type: ignore[arg-type]
        for name in NAMES
    ]
    pool.hold("ClusterQueue is full")
    loop = asyncio.get_running_loop()
    async with jobs[0], jobs[1]:
        await asyncio.sleep(hours * HOUR_S)
        waited = max([len(await job.records()) for job in jobs])
        pool._waiting.sort(key=lambda waits: (int(waits[1].split("-")[-2]), waits[1]))
        pool.hold("")
        room_at = loop.time()
        first, second = await _in_the_order_of_their_start(jobs)
        first_s = loop.time() - room_at
        assert (await first.outcome()).state == "succeeded"
        room_at = loop.time()
        await second.until(lambda: _trains(second), 30 * HOUR_S, every_s=0.1)
        second_s = loop.time() - room_at
        assert (await second.outcome()).state == "succeeded"
        told: dict[str, Any] = {
            "hosts": hosts,
            "wanted": 2 * wanted,
            "queued_s": round(hours * HOUR_S),
            "gang_s": first.spec.gang_s,
            "records_while_queued": waited,
            "first_starts_s": round(first_s, 1),
            "second_starts_s": round(second_s, 1),
        }
        return told | await _cost(jobs)


async def _in_the_order_of_their_start(jobs: list[Cluster]) -> list[Cluster]:
    await jobs[0].until(lambda: any(_trains(job) for job in jobs), 30 * HOUR_S, every_s=0.1)
    return sorted(jobs, key=lambda job: not _trains(job))


def _trains(job: Cluster) -> bool:
    return job.training.done >= 1


async def _cost(jobs: list[Cluster]) -> dict[str, int]:
    """What waiting cost both together; every promise is asked of both logs."""
    cost = dict.fromkeys(("incidents", "charged", "lost", "given_back", "worlds"), 0)
    for job in jobs:
        state = await check(job)
        facts = [record.event for record in await job.records()]
        cost["incidents"] += sum(isinstance(fact, incidents.IncidentOpened) for fact in facts)
        cost["charged"] += state.incidents.restarts + sum(state.incidents.relaunches.values())
        cost["lost"] += sum(isinstance(fact, nodes.NodeLost) for fact in facts)
        cost["given_back"] += sum(isinstance(fact, queueing.GivenBack) for fact in facts)
        cost["worlds"] += sum(isinstance(fact, world.WorldFormed) for fact in facts)
    return cost


def hours_in_a_queue(hours: float, hosts: int, steps: int = 300, seed: int = 0) -> dict[str, Any]:
    """What came of it. The jobs' names end with the seed, and how long a job pauses follows from its name.

    ``first_starts_s`` and ``second_starts_s``: from room to a job's first step.
    """
    return virtual_loop.run(_hours(hours, hosts, steps, seed), limit_s=(hours + 30) * HOUR_S)
