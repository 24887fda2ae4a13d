"""Platforms that decide about a whole job: they are told its sizes before anything starts, and what they say of it is heeded."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from dlrover_core.history.explain import explanation_of
from dlrover_core.job import job, operations
from dlrover_core.runtime.backend import (
    HELD,
    RUNNING,
    SUSPENDED,
    Admission,
    Changed,
    GroupSize,
    Listed,
    Wanted,
)
from dlrover_core.spec import GroupSpec, JobSpec
from dlrover_core.testing import virtual_loop
from dlrover_core.testing.cluster import Cluster, MemoryBackend
from dlrover_core.testing.invariants import check
from dlrover_core.testing.platform import Platform
from dlrover_core.testing.training import Training

HOUR_S = 3600.0


class Queued(MemoryBackend):
    """A platform that knows the job as a whole. ``admit`` says whether it may have nodes."""

    def __init__(self, platform: Platform) -> None:
        super().__init__(platform)
        self.told: list[Wanted] = []
        self.fails = 0
        self._said: asyncio.Queue[Admission] = asyncio.Queue()

    async def sized(self, wanted: Wanted, token: int) -> None:
        """Note it, or fail."""
        self._fence(token, "sized")
        if self.fails:
            self.fails -= 1
            raise ConnectionError("no answer")
        self.told.append(wanted)

    def admit(self, admitted: bool, reason: str = "quota") -> None:
        """Say whether the job is admitted."""
        self._said.put_nowait(Admission(admitted, reason))

    async def observe(self) -> AsyncIterator[Listed | Changed | Admission]:  # type: ignore[override]
        """Nodes and admissions as they come."""
        queue: asyncio.Queue[Listed | Changed | Admission] = asyncio.Queue()

        async def pass_on() -> None:
            async for seen in MemoryBackend.observe(self):
                queue.put_nowait(seen)

        async def pass_on_words() -> None:
            while True:
                queue.put_nowait(await self._said.get())

        tasks = [asyncio.ensure_future(pass_on()), asyncio.ensure_future(pass_on_words())]
        try:
            while True:
                yield await queue.get()
        finally:
            for task in tasks:
                task.cancel()


def tell(
    story: Callable[[Cluster, Queued], Awaitable[None]], training: Training | None = None, **settings: Any
) -> None:
    """Tell a story of a job of two to four nodes in virtual time; it must end without an incident."""

    async def whole() -> None:
        group = GroupSpec(nodes_min=2, nodes_max=4, nproc=1)
        spec = JobSpec("queued", (group,), heartbeat_s=5.0, **settings)
        backends: list[Queued] = []

        def made(platform: Platform) -> Queued:
            backends.append(Queued(platform))
            return backends[-1]

        async with Cluster(spec, training=training or Training(10**6, step_s=1.0), backend=made) as cluster:
            await story(cluster, backends[0])
            state = await check(cluster)
            assert (state.incidents.number, state.incidents.relaunches) == (0, {})

    virtual_loop.run(whole(), limit_s=30 * HOUR_S)


def nodes_here(cluster: Cluster) -> int:
    """How many nodes live."""
    return len(cluster.platform.living)


def test_nothing_starts_before_the_platform_knows_the_job() -> None:
    """Failures to tell it are repeated, and the first node comes after; a change of the size is told at once."""

    async def story(cluster: Cluster, backend: Queued) -> None:
        backend.fails = 3
        await asyncio.sleep(3)
        assert nodes_here(cluster) == 0
        await cluster.until(lambda: cluster.training.done > 0)
        assert backend.told == [Wanted((GroupSize("worker", "worker", 2, 4),), RUNNING)]
        at = asyncio.get_running_loop().time()
        await cluster.master.submit(operations.ScaleGroup("worker", 1, 3, "less"))
        await cluster.until(lambda: backend.told[-1].groups[0].nodes_max == 3)
        assert asyncio.get_running_loop().time() - at < 1
        assert backend.told[-1].groups[0].nodes_min == 1

    tell(story)


def test_what_was_told_is_told_again() -> None:
    """A platform that lost it hears it again, a few times an hour and not at each event."""

    async def story(cluster: Cluster, backend: Queued) -> None:
        await asyncio.sleep(HOUR_S)
        assert 10 <= len(backend.told) <= 61
        assert len(set(backend.told)) == 1

    tell(story)


def test_a_job_that_is_no_longer_admitted_gives_its_nodes_back() -> None:
    """It saves and frees all, says why, waits for hours at no cost, and goes on when it is admitted again."""

    async def story(cluster: Cluster, backend: Queued) -> None:
        await cluster.until(lambda: cluster.training.done > 5)
        backend.admit(False, "Kueue: Preempted")
        await cluster.until(lambda: nodes_here(cluster) == 0)
        assert cluster.state.job.freed
        assert cluster.state.job.reason == "its platform says: Kueue: Preempted"
        assert backend.told[-1].state == HELD
        step, records = cluster.training.done, len(await cluster.records())
        backend.admit(False, "Kueue: Preempted")
        await asyncio.sleep(6 * HOUR_S)
        assert len(await cluster.records()) - records < 20
        backend.admit(True, "Kueue: admitted")
        await cluster.until(lambda: cluster.training.done > step)
        assert backend.told[-1].state == RUNNING
        assert "Kueue: Preempted" in str(explanation_of(await cluster.records()))

    tell(story)


def test_a_suspension_of_a_person_is_the_person_s() -> None:
    """The platform's admission does not end it, and the platform hears that nobody wants nodes now."""

    async def story(cluster: Cluster, backend: Queued) -> None:
        await cluster.until(lambda: cluster.training.done > 5)
        await cluster.master.submit(job.SuspendJob("the night", keep_nodes=False, lose=True))
        await cluster.until(lambda: nodes_here(cluster) == 0)
        assert backend.told[-1].state == SUSPENDED
        backend.admit(True)
        await asyncio.sleep(HOUR_S)
        assert nodes_here(cluster) == 0
        await cluster.master.submit(job.ResumeJob("the morning"))
        await cluster.until(lambda: nodes_here(cluster) == 4)

    tell(story)


def test_a_job_that_has_nothing_is_not_suspended() -> None:
    """Before the first admission there is nothing to give back: launches wait, and no suspension is recorded."""

    async def story(cluster: Cluster, backend: Queued) -> None:
        cluster.platform.no_quota = True
        backend.admit(False, "in the queue")
        await asyncio.sleep(HOUR_S)
        assert cluster.state.job.state == "created"
        cluster.platform.no_quota = False
        at = asyncio.get_running_loop().time()
        backend.admit(True)
        await cluster.until(lambda: nodes_here(cluster) == 4)
        assert asyncio.get_running_loop().time() - at < 1, "launches are asked for again at once"

    tell(story)


def test_a_new_master_hears_it_anew() -> None:
    """The next leader tells its platform the sizes before it launches, and heeds what that says."""

    async def story(cluster: Cluster, backend: Queued) -> None:
        await cluster.until(lambda: cluster.training.done > 5)
        cluster.kill_master()
        cluster.start_master()
        await cluster.until(cluster.master.led.is_set)
        newest: Any = cluster.master._leveller._backend  # type: ignore[union-attr]
        await cluster.until(lambda: bool(newest.told))
        newest.admit(False, "stopped")
        await cluster.until(lambda: nodes_here(cluster) == 0)
        newest.admit(True)
        await cluster.until(lambda: nodes_here(cluster) == 4)

    tell(story)
