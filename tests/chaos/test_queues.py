"""Jobs in a queue, with the real master and the real agents: waiting costs nothing, and nobody waits for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from dlrover_core.history.report import report_of
from dlrover_core.job import nodes, queueing
from dlrover_core.spec import GroupSpec, JobSpec
from dlrover_core.testing import virtual_loop
from dlrover_core.testing.cluster import Cluster
from dlrover_core.testing.invariants import check
from dlrover_core.testing.platform import NO_ROOM, Pool
from dlrover_core.testing.training import Training

HOUR_S = 3600.0
HOSTS = [f"host-{number}" for number in range(8)]


def spec(name: str, fewest: int, most: int, **settings: float) -> JobSpec:
    """A job whose agents beat slowly: hours pass."""
    group = GroupSpec(nodes_min=fewest, nodes_max=most, nproc=1)
    return JobSpec(name, (group,), heartbeat_s=5.0, **settings)  # type: ignore[arg-type]


def told(story: Callable[[], Awaitable[None]]) -> None:
    """Tell a story in virtual time."""

    async def whole() -> None:
        await story()

    virtual_loop.run(whole(), limit_s=30 * HOUR_S)


async def blameless(cluster: Cluster) -> None:
    """Every promise was kept; no incident opened, no budget was touched, nobody was given up."""
    state = await check(cluster)
    assert state.incidents.number == 0
    assert state.incidents.relaunches == {}
    assert not [one for one in await cluster.records() if isinstance(one.event, nodes.NodeLost)]


def trains(cluster: Cluster) -> bool:
    """Has it a world that makes steps?"""
    return cluster.training.done >= 1


def test_hours_without_room() -> None:
    """Nobody is placed for six hours, and the status says why; then all are, and the job ends well."""

    async def story() -> None:
        pool = Pool(HOSTS)
        pool.hold("ClusterQueue is full")
        async with Cluster(spec("queued", 4, 4), training=Training(20), pool=pool) as cluster:
            await asyncio.sleep(6 * HOUR_S)
            assert {node.waits for node in cluster.state.nodes.nodes.values()} == {"ClusterQueue is full"}
            assert len(await cluster.records()) < 100, "waiting is not written down again and again"
            pool.hold("")
            assert (await cluster.outcome()).state == "succeeded"
            await blameless(cluster)
            queued = report_of(await cluster.records()).goodput.by_class["queued"]
            assert queued == pytest.approx(6 * HOUR_S * 1e6, rel=0.01)

    told(story)


def test_a_quota_is_waited_for() -> None:
    """Launches are refused for now, for an hour: nobody is to blame, and they are asked for again."""

    async def story() -> None:
        async with Cluster(spec("quota", 2, 2), training=Training(20)) as cluster:
            cluster.platform.no_quota = True
            await asyncio.sleep(HOUR_S)
            cluster.platform.no_quota = False
            assert (await cluster.outcome()).state == "succeeded"
            await blameless(cluster)

    told(story)


def test_images_that_are_pulled_for_long() -> None:
    """A node whose image comes after half an hour delays nobody's first world, and is taken in."""

    async def story() -> None:
        pool = Pool(["host-0"])
        async with Cluster(spec("images", 1, 2), training=Training(10**6, step_s=1.0), pool=pool) as cluster:
            await cluster.until(lambda: trains(cluster))
            assert asyncio.get_running_loop().time() < 10, "the last call is for those who are counted on"
            await asyncio.sleep(HOUR_S / 2)
            pool.hosts["host-1"] = ""
            pool.place()
            await cluster.until(lambda: len(cluster.state.world.worlds["worker"].members) == 2, 300)
            await blameless(cluster)

    told(story)


def test_two_jobs_that_each_hold_half() -> None:
    """Both want six of eight hosts, and each got four: one gives back, the other trains; after it the first one does."""

    async def story() -> None:
        pool = Pool(HOSTS)
        one = Cluster(spec("one", 6, 6), training=Training(2000, step_s=1.0), pool=pool)
        other = Cluster(spec("other", 6, 6), training=Training(2000, step_s=1.0), pool=pool)
        # Each gets every second host.
        pool.hold("not yet")
        async with one, other:
            await asyncio.sleep(5)
            pool._waiting.sort(key=lambda waits: (int(waits[1].split("-")[-2]), waits[1]))
            pool.hold("")
            await asyncio.sleep(150)
            assert {node.waits for node in one.state.nodes.nodes.values()} == {"", NO_ROOM}
            assert {node.waits for node in other.state.nodes.nodes.values()} == {"", NO_ROOM}
            assert (await one.outcome()).state == (await other.outcome()).state == "succeeded"
            await blameless(one)
            await blameless(other)
            back = [
                record.event
                for cluster in (one, other)
                for record in await cluster.records()
                if isinstance(record.event, queueing.GivenBack)
            ]
            assert 1 <= len(back) <= 4

    told(story)


def test_a_set_that_has_finished_makes_room_for_one_that_waits() -> None:
    """An evaluator waits for hosts that the trainers of its own job have: it gets one when they are done, and the job ends."""

    async def story() -> None:
        groups = (GroupSpec("trainer", 2, 2), GroupSpec("evaluator", 1, 1))
        own = JobSpec("own", groups, heartbeat_s=5.0)
        pool = Pool(["host-0", "host-1"])
        async with Cluster(own, training=Training(20), others=lambda _: Training(5), pool=pool) as cluster:
            assert (await cluster.outcome(600.0)).state == "succeeded"
            await blameless(cluster)
            released = [one.event for one in await cluster.records() if isinstance(one.event, nodes.NodeReleased)]
            assert [one.node for one in released] == ["trainer-0-0", "trainer-1-0"]

    told(story)


def test_room_is_told_when_it_stands() -> None:
    """How many more nodes would start is a fact, asked on news and now and then; a moment's room is none."""

    async def story() -> None:
        pool = Pool(HOSTS)
        async with Cluster(spec("rooms", 2, 2), training=Training(10**6, step_s=1.0), pool=pool) as cluster:
            await cluster.until(lambda: trains(cluster))
            await cluster.until(lambda: cluster.state.queueing.room("worker") == 6, 120)
            pool.hosts["host-7"] = "a stranger's"
            await cluster.until(lambda: cluster.state.queueing.room("worker") == 5, 120)
            for host in HOSTS:
                pool.hosts[host] = pool.hosts[host] or "a stranger's"
            cluster.backend.relist()
            await cluster.until(lambda: cluster.state.queueing.room("worker") == 0, 30)

    told(story)


def test_an_avoided_host_is_taken_after_a_last_call() -> None:
    """The only host that is free is the one to keep off: a successor waits for another, then takes it, charged to nobody."""

    async def story() -> None:
        settings = spec("avoids", 2, 2, last_call_s=60.0)
        async with Cluster(settings, training=Training(10**6, step_s=1.0), pool=Pool(["host-0", "host-1"])) as cluster:
            await cluster.until(lambda: trains(cluster))
            await cluster.leader.obey({"command": "drain", "node": "worker-1"})
            began = asyncio.get_running_loop().time()
            await cluster.until(lambda: len(cluster.state.world.worlds["worker"].members) == 2 and "worker-1-2" in
                                cluster.state.world.worlds["worker"].places, 300)  # fmt: skip
            assert asyncio.get_running_loop().time() - began > 60
            assert cluster.platform.host_of("worker-1-2") == "host-1"
            await blameless(cluster)

    told(story)
