"""A pause without nodes: all nodes are given back at a boundary, come again, and no step is lost."""

from __future__ import annotations

import asyncio

import pytest
from tests.chaos.planned_changes import happened, knobs, step, tell

from dlrover_core.history import report_of
from dlrover_core.job import checkpoints, incidents, job, nodes, world
from dlrover_core.testing.cluster import Cluster


async def pauses(cluster: Cluster) -> None:
    """After some steps somebody suspends the job and frees its nodes."""
    await step(cluster, 15)
    await cluster.leader.obey({"command": "suspend", "keep_nodes": False, "reason": "the night"})


async def comes_back(cluster: Cluster) -> None:
    """All nodes go; a long time later the job goes on."""
    await cluster.until(lambda: not cluster.backend.living)
    await asyncio.sleep(5_000)
    assert cluster.leader.state.job.state == "suspended"
    assert not cluster.backend.living
    await cluster.leader.obey({"command": "resume"})


@pytest.mark.parametrize("spread", [0, 1])
def test_suspending_frees_the_nodes_and_loses_no_step(spread: int) -> None:
    """Ranks save at a boundary, that is written, all nodes go; later the job goes on with the next step, on new nodes."""

    async def story(cluster: Cluster) -> None:
        await pauses(cluster)
        await comes_back(cluster)

    told = tell(story, knobs(spread=spread))
    assert (told.lost, told.sizes, told.dropped) == (0, [2, 2], [])
    formed = told.facts(world.WorldFormed)[-1]
    assert (formed.resume_tier, formed.resume_step > 15) == (checkpoints.STORAGE, True)
    assert {one.reason for one in told.facts(nodes.NodeReleased)} == {nodes.SUSPENDED}
    assert all(one.expected for one in told.facts(nodes.NodeGone))
    assert told.facts(incidents.IncidentOpened) == []
    stored = next(r.seq for r in told.records if isinstance(r.event, checkpoints.CheckpointCommitted))
    assert all(r.seq > stored for r in told.records if isinstance(r.event, nodes.NodeReleased))
    assert report_of(told.records).goodput is not None


@pytest.mark.parametrize(
    "moment",
    [job.SuspensionPlanned, checkpoints.RanksArmed, job.JobSuspended, checkpoints.SaveOrdered, nodes.NodeReleased],
)
def test_the_master_dies_while_the_nodes_are_freed(moment: type) -> None:
    """Whoever leads next goes on with it: the job is suspended, its nodes go once all is written, and no step is lost."""

    async def story(cluster: Cluster) -> None:
        await pauses(cluster)
        await happened(cluster, moment)
        cluster.kill_master()
        cluster.start_master()
        await comes_back(cluster)

    told = tell(story)
    assert told.lost == 0
    assert told.facts(incidents.IncidentOpened) == []


@pytest.mark.parametrize(
    ("who", "moment"),
    [
        ("worker", checkpoints.RanksArmed),
        ("node", checkpoints.RanksArmed),
        ("node", job.JobSuspended),
        ("node", checkpoints.SaveOrdered),
    ],
)
def test_somebody_dies_while_the_nodes_are_freed(moment: type, who: str) -> None:
    """The others go all the same, nobody is started for a job that pauses, and it goes on from what is on storage."""

    async def story(cluster: Cluster) -> None:
        await pauses(cluster)
        await happened(cluster, moment)
        if who == "worker":
            cluster.kill_worker(0)
        else:
            cluster.kill_node("worker-1-0")
        await comes_back(cluster)

    told = tell(story)
    assert told.lost <= 10
    suspended = next(r.seq for r in told.records if isinstance(r.event, job.JobSuspended))
    resumed = next(r.seq for r in told.records if isinstance(r.event, job.JobResumed))
    assert not [r for r in told.records if suspended < r.seq < resumed and isinstance(r.event, nodes.NodePlanned)]


def test_suspended_without_nodes_and_taken_back() -> None:
    """A resumption at each moment before the nodes go costs no step; the nodes that are there are used."""
    for moment in (checkpoints.RanksArmed, job.JobSuspended, checkpoints.SaveOrdered):

        async def story(cluster: Cluster, moment: type = moment) -> None:
            await pauses(cluster)
            await happened(cluster, moment)
            await cluster.leader.obey({"command": "resume"})

        told = tell(story)
        assert told.lost == 0
        assert told.facts(nodes.NodeReleased) == []
