"""What people ask of a job, with the real master and the real agents: graces are kept, and a master's death loses no wish."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from dlrover_core.errors import MalformedMessage, NotLeading, Refused
from dlrover_core.job import nodes, world
from dlrover_core.spec import GroupSpec, JobSpec
from dlrover_core.testing import virtual_loop
from dlrover_core.testing.cluster import Cluster
from dlrover_core.testing.invariants import check, check_steps
from dlrover_core.testing.training import Training

PATIENCE_S = 20.0


def spec(fewest: int, most: int) -> JobSpec:
    """Workers that need twenty seconds to save, and are given thirty."""
    return JobSpec("asked", (GroupSpec(nodes_min=fewest, nodes_max=most, nproc=1),), stop_grace_s=30.0)


def told(story: Callable[[Cluster], Awaitable[None]], fewest: int, most: int, steps: int = 600) -> None:
    """Tell a story of a job that ends well, and look whether every promise was kept."""

    async def whole() -> None:
        cluster = Cluster(spec(fewest, most), training=Training(steps))
        cluster.patience_s = PATIENCE_S
        async with cluster:
            await cluster.until(lambda: cluster.training.done >= 5)
            await story(cluster)
            assert (await cluster.outcome()).state == "succeeded"
            check_steps(cluster)
            state = await check(cluster)
            assert state.incidents.number == 0

    virtual_loop.run(whole())


async def until_new_steps(cluster: Cluster, generation: int) -> None:
    """Wait for steps of this generation."""
    await cluster.until(lambda: bool(cluster.training.log) and cluster.training.log[-1][0] >= generation)


@pytest.mark.parametrize("verb", ["drain", "scale"])
def test_who_leaves_by_plan_has_its_grace(verb: str) -> None:
    """Workers that save for twenty seconds are not killed after one: the agent ends by itself, and says why."""

    async def story(cluster: Cluster) -> None:
        asked = {
            "drain": {"command": "drain", "node": "worker-1-0"},
            "scale": {"command": "scale", "nodes_max": 1, "nodes_min": 1},
        }
        await cluster.leader.obey(asked[verb])
        await until_new_steps(cluster, 2)
        assert cluster.backend.ended["worker-1-0"] == f"the node is {'drained' if verb == 'drain' else 'scaled down'}"
        gone = [
            record for record in await cluster.records() if isinstance(record.event, (nodes.NodeGone, nodes.NodeFailed))
        ]
        assert [type(record.event).__name__ for record in gone] == ["NodeGone"]
        formed = [record for record in await cluster.records() if isinstance(record.event, world.WorldFormed)]
        # Those who stay are asked politely too, and the next world waits for them.
        first = next(
            record.at
            for record in await cluster.records()
            if type(record.event).__name__ == "FirstStep" and record.seq > formed[-1].seq
        )
        dissolved = next(
            record.at for record in await cluster.records() if isinstance(record.event, world.WorldDissolved)
        )
        assert first - dissolved >= PATIENCE_S * 1_000_000

    told(story, 1, 2)


def test_a_drained_node_gets_a_successor_elsewhere() -> None:
    """Where there is another host, the successor runs on it."""

    async def story(cluster: Cluster) -> None:
        await cluster.leader.obey({"command": "drain", "node": "worker-1"})
        await until_new_steps(cluster, 2)
        assert cluster.state.nodes.nodes["worker-1-1"].host == "spare-1-1"

    told(story, 2, 2)


@pytest.mark.parametrize("when", [0.0, 1.0, 25.0])
def test_a_wish_outlives_its_master(when: float) -> None:
    """Suspended, and the master dies at once, in the middle of the stop, or after it: the next one holds the job."""

    async def story(cluster: Cluster) -> None:
        await cluster.leader.obey({"command": "suspend", "reason": "lunch"})
        await asyncio.sleep(when)
        cluster.kill_master()
        cluster.start_master()
        await asyncio.sleep(1000)
        steps = cluster.training.done
        await asyncio.sleep(1000)
        assert cluster.training.done == steps
        assert (cluster.state.job.state, cluster.state.job.reason) == ("suspended", "lunch")
        assert len(cluster.backend.living) == 2
        await cluster.leader.obey({"command": "resume"})

    told(story, 2, 2)


def test_resumed_before_everybody_has_stopped() -> None:
    """The next world waits for the last worker of the one before, as after any change."""

    async def story(cluster: Cluster) -> None:
        await cluster.leader.obey({"command": "suspend"})
        await cluster.leader.obey({"command": "resume"})
        await until_new_steps(cluster, 2)

    told(story, 2, 2)


def test_growing_by_hand() -> None:
    """More nodes come up while the others train, and are taken in with a polite stop."""

    async def story(cluster: Cluster) -> None:
        await cluster.leader.obey({"command": "scale", "nodes_max": 4, "nodes_min": 4})
        await until_new_steps(cluster, 2)
        assert len(cluster.state.world.worlds["worker"].members) == 4

    told(story, 2, 2)


def test_whom_one_asks_in_vain() -> None:
    """A master that does not lead claims nothing, and nonsense is no command."""

    async def story(cluster: Cluster) -> None:
        with pytest.raises(Refused, match="leads job 'asked', not 'other'"):
            await cluster.leader.obey({"command": "suspend", "job": "other"})
        with pytest.raises(MalformedMessage, match="there is no command"):
            await cluster.leader.obey({"command": "explode"})
        standby = cluster.start_master()
        with pytest.raises(NotLeading):
            await standby.obey({"command": "suspend"})

    told(story, 1, 1)
