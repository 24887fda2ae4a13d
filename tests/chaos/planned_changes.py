"""Planned changes of a world, told with the real master and the real agents."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, cast

from dlrover_core.job import plans, world
from dlrover_core.kernel.events import Record
from dlrover_core.spec import GroupSpec, JobSpec
from dlrover_core.testing import virtual_loop
from dlrover_core.testing.checkpointing import check_saved
from dlrover_core.testing.cluster import Cluster
from dlrover_core.testing.invariants import check
from dlrover_core.testing.saving import Knobs, Saving
from dlrover_core.testing.training import Training

Story = Callable[[Cluster], Awaitable[None]]


def knobs(**other: Any) -> Knobs:
    """Every tenth step is saved: whoever is stopped anywhere else loses some."""
    return Knobs(**{"every": 10, "store_every": 0, "planned": True, "replicas": True, **other})


class Told:
    """What came of a story: the log, and the steps that were made."""

    def __init__(self, records: list[Record], cluster: Cluster) -> None:
        self.records, self.log = records, list(cluster.training.log)

    def facts(self, *kinds: type) -> list[Any]:
        """The events of these kinds, in order."""
        return [record.event for record in self.records if isinstance(record.event, kinds)]

    @property
    def lost(self) -> int:
        """Steps that were made more than once."""
        return len(self.log) - len({step for _, step in self.log})

    @property
    def sizes(self) -> list[int]:
        """How many nodes each world had."""
        return [sum(count for _, _, count, _, _ in one.members) for one in self.facts(world.WorldFormed)]

    @property
    def dropped(self) -> list[str]:
        """Why plans were dropped."""
        return [one.reason for one in self.facts(plans.WorldPlanDropped)]


def tell(
    story: Story,
    kept: Knobs | None = None,
    *,
    fewest: int = 2,
    most: int = 2,
    nproc: int = 1,
    steps: int = 400,
    hosts: tuple[str, ...] = (),
    **settings: Any,
) -> Told:
    """Let a job that saves suffer ``story``; it succeeds, and every promise is kept."""
    saving = Saving(kept if kept is not None else knobs())
    spec = JobSpec(
        "j", (GroupSpec(nodes_min=fewest, nodes_max=most, nproc=nproc),), **{"stop_grace_s": 5.0, **settings}
    )

    async def told() -> Told:
        training = Training(steps, saving=saving)
        async with Cluster(spec, training=training, answers=True, hosts=hosts) as cluster:
            await story(cluster)
            outcome = await cluster.outcome()
            assert outcome.state == "succeeded", outcome
            await check(cluster)
            records = await cluster.records()
            check_saved(records, saving)
            return Told(records, cluster)

    return virtual_loop.run(told())


async def step(cluster: Cluster, number: int) -> None:
    """Until this step is made, and more than one has been kept in memory."""
    await cluster.until(lambda: cluster.training.done >= number)


async def happened(cluster: Cluster, kind: type) -> None:
    """Until there is an event of this kind."""
    await recorded(cluster, lambda records: any(isinstance(record.event, kind) for record in records))


async def recorded(cluster: Cluster, true: Callable[[list[Record]], bool]) -> None:
    """Until this holds of the log."""
    loop = cast(virtual_loop.VirtualLoop, asyncio.get_running_loop())

    async def look() -> None:
        records: list[Record] = []
        while True:
            more = [record async for record in cluster.log.read(cluster.spec.job, len(records))]
            records += more
            if more and true(records):
                return
            await loop.tick(0.0005)  # anybody may write

    await asyncio.wait_for(look(), 600.0)
