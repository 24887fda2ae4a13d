"""A worker, a node, the master: each killed alone and all together, told in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from dlrover_core.job import incidents
from dlrover_core.job.state import JobState
from dlrover_core.spec import GroupSpec, JobSpec
from dlrover_core.testing import virtual_loop
from dlrover_core.testing.cluster import Cluster
from dlrover_core.testing.invariants import check, check_steps

SPEC = JobSpec("j", (GroupSpec(nodes_min=2, nodes_max=2, nproc=2),))
BOTH = {"worker-0-0", "worker-1-0"}


def tell(story: Callable[[Cluster], Awaitable[None]], spec: JobSpec = SPEC) -> tuple[Cluster, JobState]:
    """Let a job suffer ``story`` and succeed all the same; every step once, every invariant kept."""

    async def told() -> tuple[Cluster, JobState]:
        async with Cluster(spec) as cluster:
            await story(cluster)
            outcome = await cluster.outcome()
            assert (outcome.state, outcome.root) == ("succeeded", "")
            check_steps(cluster)
            assert cluster.training.done == cluster.training.steps
            assert cluster.backend.living == []
            return cluster, await check(cluster)

    return virtual_loop.run(told())


def step(cluster: Cluster, number: int) -> Awaitable[None]:
    """Until this step is made."""
    return cluster.until(lambda: cluster.training.done >= number)


def started(cluster: Cluster) -> list[set[str]]:
    """Who started workers, generation by generation."""
    generations = sorted({generation for _, generation in cluster.training.starts})
    return [{node for node, number in cluster.training.starts if number == one} for one in generations]


def closed(cluster: Cluster) -> list[incidents.IncidentClosed]:
    """How the incidents ended, in order."""

    async def facts() -> list[incidents.IncidentClosed]:
        return [
            record.event for record in await cluster.records() if isinstance(record.event, incidents.IncidentClosed)
        ]

    return virtual_loop.run(facts())


def test_nothing_happens() -> None:
    """Undisturbed, a job makes one world, no incident, and ends clean."""

    async def story(cluster: Cluster) -> None:
        await step(cluster, 50)

    cluster, state = tell(story)
    assert started(cluster) == [BOTH]
    assert state.incidents.number == 0
    assert cluster.backend.launched == ["worker-0-0", "worker-1-0"]


def test_killed_worker() -> None:
    """A killed worker costs one restart of the processes, no node, a fifth of a second and the step in the making."""

    async def story(cluster: Cluster) -> None:
        await step(cluster, 5)
        cluster.kill_worker(3)

    cluster, state = tell(story)
    assert started(cluster) == [BOTH, BOTH]
    assert cluster.backend.launched == ["worker-0-0", "worker-1-0"]
    assert (state.incidents.number, state.incidents.restarts, state.incidents.relaunches) == (1, 1, {})
    (end,) = closed(cluster)
    assert end.down_us <= 200_000
    assert end.steps_lost == 1


def test_killed_node() -> None:
    """A killed node costs one relaunch and no restart; the survivor's agent stays; down for one boot and a step."""

    async def story(cluster: Cluster) -> None:
        await step(cluster, 5)
        cluster.kill_node("worker-1-0")

    cluster, state = tell(story)
    assert started(cluster) == [BOTH, {"worker-0-0", "worker-1-1"}]
    assert cluster.backend.launched == ["worker-0-0", "worker-1-0", "worker-1-1"]
    assert (state.incidents.number, state.incidents.restarts, state.incidents.relaunches) == (1, 0, {"worker-1": 1})
    (end,) = closed(cluster)
    assert end.down_us <= 2_300_000
    assert end.steps_lost == 1


@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
def test_killed_master(*, warm: bool) -> None:
    """A killed master costs nothing: no worker restarts, no incident opens, no step is late."""

    async def story(cluster: Cluster) -> None:
        if warm:
            cluster.start_master()
        await step(cluster, 5)
        cluster.kill_leader()
        if not warm:
            cluster.start_master()

    cluster, state = tell(story)
    assert started(cluster) == [BOTH]
    assert state.incidents.number == 0
    assert state.token == 2


def test_no_master_for_a_while() -> None:
    """Without any master training goes on; the next one finds its agents again within a second or two."""

    async def story(cluster: Cluster) -> None:
        await step(cluster, 5)
        cluster.kill_master()
        await step(cluster, 35)
        cluster.start_master()
        await cluster.until(lambda: len(cluster.master.sessions) == 2, 2.5)

    cluster, state = tell(story)
    assert started(cluster) == [BOTH]
    assert state.incidents.number == 0


def test_worker_dies_while_no_master() -> None:
    """A death that no master saw is reported to the next one, aged: one incident, its down time counted from the death."""

    async def story(cluster: Cluster) -> None:
        await step(cluster, 5)
        cluster.kill_master()
        cluster.kill_worker(0)
        await asyncio.sleep(10)
        assert cluster.training.done == 5
        cluster.start_master()

    cluster, state = tell(story)
    assert started(cluster) == [BOTH, BOTH]
    assert (state.incidents.number, state.incidents.restarts) == (1, 1)
    (end,) = closed(cluster)
    assert 10_000_000 <= end.down_us <= 13_000_000


def test_node_dies_while_no_master() -> None:
    """A node that died unseen is found by the next master in what its backend lists: one incident, one relaunch."""

    async def story(cluster: Cluster) -> None:
        await step(cluster, 5)
        cluster.kill_master()
        cluster.kill_node("worker-1-0")
        await asyncio.sleep(10)
        cluster.start_master()

    cluster, state = tell(story)
    assert cluster.backend.launched == ["worker-0-0", "worker-1-0", "worker-1-1"]
    assert (state.incidents.number, state.incidents.restarts, state.incidents.relaunches) == (1, 0, {"worker-1": 1})


def test_one_after_the_other() -> None:
    """Three deaths in turn: two incidents, one restart, one relaunch, and not a worker restarted for the master's sake."""

    async def story(cluster: Cluster) -> None:
        await step(cluster, 5)
        cluster.kill_worker(3)
        await step(cluster, 10)
        cluster.kill_node("worker-1-0")
        await step(cluster, 20)
        cluster.kill_master()
        cluster.start_master()

    cluster, state = tell(story)
    assert started(cluster) == [BOTH, BOTH, {"worker-0-0", "worker-1-1"}]
    assert (state.incidents.number, state.incidents.restarts, state.incidents.relaunches) == (2, 1, {"worker-1": 1})
    assert all(end.steps_lost <= 1 for end in closed(cluster))


def test_all_at_once() -> None:
    """Worker, node and master die in one instant: one incident, one relaunch, at most one restart more than due."""

    async def story(cluster: Cluster) -> None:
        await step(cluster, 5)
        cluster.kill_worker(0)
        cluster.kill_node("worker-1-0")
        cluster.kill_master()
        cluster.start_master()

    cluster, state = tell(story)
    assert cluster.backend.launched == ["worker-0-0", "worker-1-0", "worker-1-1"]
    assert state.incidents.number == 1
    assert (state.incidents.restarts, state.incidents.relaunches) == (0, {"worker-1": 1})
    (end,) = closed(cluster)
    assert end.down_us <= 3_000_000
    assert end.steps_lost <= 1


def test_every_node_dies() -> None:
    """All nodes die at once: each is relaunched once, in one incident."""

    async def story(cluster: Cluster) -> None:
        await step(cluster, 5)
        cluster.kill_node("worker-0-0")
        cluster.kill_node("worker-1-0")

    cluster, state = tell(story)
    assert started(cluster) == [BOTH, {"worker-0-1", "worker-1-1"}]
    assert state.incidents.number == 1
    assert state.incidents.relaunches == {"worker-0": 1, "worker-1": 1}


def test_every_worker_dies_at_once() -> None:
    """All workers die in one instant, in any order of report: one incident, one restart."""

    async def story(cluster: Cluster) -> None:
        await step(cluster, 5)
        for rank in (2, 0, 3, 1):
            cluster.kill_worker(rank)

    cluster, state = tell(story)
    assert started(cluster) == [BOTH, BOTH]
    assert (state.incidents.number, state.incidents.restarts) == (1, 1)


def test_node_dies_before_the_first_step() -> None:
    """A node that dies while the first world starts is replaced like any other, and its incident closes."""

    async def story(cluster: Cluster) -> None:
        await cluster.until(lambda: any(node == "worker-1-0" for node, _ in cluster.training.starts))
        cluster.kill_node("worker-1-0")

    _cluster, state = tell(story)
    assert state.incidents.number == 1
    assert [incident.closed for incident in state.incidents.by_number.values()] == [True]


def test_node_dies_again_while_it_is_replaced() -> None:
    """The replacement dies while it boots: same incident, next incarnation, two units of that node's budget."""

    async def story(cluster: Cluster) -> None:
        await step(cluster, 5)
        cluster.kill_node("worker-1-0")
        await cluster.until(lambda: "worker-1-1" in cluster.backend.launched)
        cluster.kill_node("worker-1-1")

    cluster, state = tell(story)
    assert cluster.backend.launched[-2:] == ["worker-1-1", "worker-1-2"]
    assert state.incidents.number == 1
    assert state.incidents.relaunches == {"worker-1": 2}


def test_a_worker_dies_twice() -> None:
    """Two deaths in two generations are two incidents, each with its restart."""

    async def story(cluster: Cluster) -> None:
        for at in (5, 10):
            await step(cluster, at)
            cluster.kill_worker(1)

    cluster, state = tell(story)
    assert (state.incidents.number, state.incidents.restarts) == (2, 2)
    assert started(cluster) == [BOTH, BOTH, BOTH]


def test_node_deleted_behind_our_back() -> None:
    """A node that vanishes from the backend while its agent lives is replaced; its agent is told to leave."""

    async def story(cluster: Cluster) -> None:
        await step(cluster, 5)
        cluster.backend.lose("j-worker-1-0")
        await cluster.until(lambda: "worker-1-0" not in cluster.backend.living)

    cluster, state = tell(story)
    assert cluster.backend.launched[-1] == "worker-1-1"
    assert state.incidents.number == 1
