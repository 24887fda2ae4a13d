"""Checkpoints, in virtual time: what is committed stays so whoever dies, what all hold is written, and every loss is counted."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from dlrover_core.history import report_of
from dlrover_core.job import checkpoints, incidents, progress, world
from dlrover_core.job.job import JobStopped, JobStopping, StopJob
from dlrover_core.job.operations import DrainNode
from dlrover_core.kernel.engine import CommandRefused
from dlrover_core.kernel.events import Record
from dlrover_core.spec import GroupSpec, JobSpec
from dlrover_core.testing import virtual_loop
from dlrover_core.testing.checkpointing import check_saved
from dlrover_core.testing.cluster import Cluster
from dlrover_core.testing.invariants import check
from dlrover_core.testing.saving import Knobs, Restore, Saving
from dlrover_core.testing.training import Training

Story = Callable[[Cluster], Awaitable[None]]
SLOW_S = 3000.0


class Told:
    """What came of a story: the log, and what was kept where."""

    def __init__(self, records: list[Record], saving: Saving) -> None:
        self.records, self.saving = records, saving

    def facts(self, *kinds: type) -> list[Any]:
        """The events of these kinds, in order."""
        return [record.event for record in self.records if isinstance(record.event, kinds)]

    @property
    def committed(self) -> list[tuple[int, int]]:
        """What was committed, in order."""
        return [(one.generation, one.step) for one in self.facts(checkpoints.CheckpointCommitted)]


def tell(
    story: Story,
    knobs: Knobs | None = None,
    *,
    nodes: int = 2,
    nproc: int = 1,
    steps: int = 60,
    ends: str = "succeeded",
    **settings: Any,
) -> Told:
    """Let a job that saves suffer ``story``; it ends like that, every promise is kept, and commits name what was written."""
    saving = Saving(knobs)
    spec = JobSpec("j", (GroupSpec(nodes_min=nodes, nodes_max=nodes, nproc=nproc),), **settings)

    async def told() -> Told:
        async with Cluster(spec, training=Training(steps, saving=saving), answers=True) as cluster:
            await story(cluster)
            outcome = await cluster.outcome()
            assert outcome.state == ends, outcome
            await check(cluster)
            records = await cluster.records()
            check_saved(records, saving)
            return Told(records, saving)

    return virtual_loop.run(told())


def step(cluster: Cluster, number: int) -> Awaitable[None]:
    """Until this step is made."""
    return cluster.until(lambda: cluster.training.done >= number)


async def quiet(cluster: Cluster) -> None:
    """Nothing happens to it."""


def written(cluster: Cluster, number: int) -> Awaitable[None]:
    """Until all parts of this step are on storage, whoever knows it."""
    saving = cluster.training.saving
    assert saving is not None
    return cluster.until(
        lambda: any(one[1] == number and len(p) == saving.parts[one[0]] for one, p in saving.written.items())
    )


# ---- the ordinary course


@pytest.mark.parametrize("spread", [0, 1])
def test_what_is_due_is_committed_once(spread: int) -> None:
    """Every step that is due is committed, in one event, by whoever many nodes write it; every step trains once."""
    told = tell(quiet, Knobs(every=2, store_every=10, spread=spread), nodes=3)
    # The last one, too, though the script has ended before it is written.
    assert told.committed == [(1, 10), (1, 20), (1, 30), (1, 40), (1, 50), (1, 60)]
    assert {one.parts for one in told.facts(checkpoints.CheckpointCommitted)} == {3}
    assert {one.why for one in told.facts(checkpoints.CheckpointCommitted)} == {checkpoints.DUE}
    assert len(told.facts(checkpoints.KeepingStarted)) == 1
    assert told.facts(checkpoints.SaveOrdered) == []


def test_a_commit_does_not_wait_for_a_heartbeat() -> None:
    """What is written is told at once: from the last part to the commit it takes far less than a heartbeat."""
    took: list[float] = []

    async def story(cluster: Cluster) -> None:
        await written(cluster, 10)
        began = asyncio.get_running_loop().time()
        await cluster.until(lambda: cluster.state.checkpoints.of("worker").newest == (1, 10))
        took.append(asyncio.get_running_loop().time() - began)

    told = tell(story, Knobs(every=2, store_every=10, spread=0))
    assert took[0] < 0.2 < JobSpec("j", (GroupSpec(),)).heartbeat_s
    assert told.committed[0] == (1, 10)


# ---- workers and nodes die


def test_a_killed_worker_costs_what_was_not_saved() -> None:
    """The world goes on from its nodes' memory; the newest state that all hold goes to storage; the steps lost are counted."""

    async def story(cluster: Cluster) -> None:
        await step(cluster, 27)
        cluster.kill_worker(1)

    told = tell(story, Knobs(every=5, store_every=10))
    assert told.saving.restores[1] == Restore(2, (1, 25), checkpoints.MEMORY)
    (ordered,) = told.facts(checkpoints.SaveOrdered)
    assert (ordered.generation, ordered.step) == (1, 25)
    (saved,) = [one for one in told.facts(checkpoints.CheckpointCommitted) if one.why != checkpoints.DUE]
    assert (saved.generation, saved.step, saved.why) == (1, 25, ordered.why)
    restored = [one for one in told.facts(checkpoints.Restored) if one.generation == 2]
    # One node speaks for all that found their own memory.
    assert [(one.step, one.tier) for one in restored] == [(25, checkpoints.MEMORY)]
    assert [one.step for one in told.facts(progress.FirstStep)] == [1, 26]
    report = report_of(told.records)
    (incident,) = report.incidents
    assert incident.restored is not None
    assert incident.restored.tier == checkpoints.MEMORY
    # With the one that was begun.
    assert incident.steps_lost == 27 + 1 - 25
    assert (report.saves.committed, report.saves.ordered) == (len(told.committed), 1)
    assert [(one.tier, one.count) for one in report.saves.restores] == [(checkpoints.MEMORY, 1)]


def test_a_killed_node_is_served_by_its_peers() -> None:
    """The survivor writes what it holds and its copy of the dead node's part; the node in the dead one's place gets it there."""

    async def story(cluster: Cluster) -> None:
        await step(cluster, 27)
        cluster.kill_node("worker-0-0")

    told = tell(story, Knobs(every=2, store_every=10, replicas=True))
    (ordered,) = told.facts(checkpoints.SaveOrdered)
    assert (ordered.generation, ordered.step) == (1, 26)
    assert (1, 26) in told.committed
    assert told.saving.restores[1].state == (1, 26)
    assert {(one.node, one.tier) for one in told.facts(checkpoints.Restored) if one.generation == 2} == {
        ("worker-0-1", checkpoints.PEER)
    }
    # The leader knew by then what is whole: a floor, where ranks decide by themselves.
    assert [(one.resume_step, one.resume_tier) for one in told.facts(world.WorldFormed)][-1][0] == 26


@pytest.mark.parametrize("spread", [0, 1])
def test_a_killed_node_whose_part_nobody_holds(spread: int) -> None:
    """A dead node takes its part along, be it objects alone: the world goes on from storage, and counts the loss."""

    async def story(cluster: Cluster) -> None:
        await step(cluster, 28)
        cluster.kill_node("worker-1-0")

    told = tell(story, Knobs(every=2, store_every=10, spread=spread))
    assert told.facts(checkpoints.SaveOrdered) == []
    assert told.saving.restores[1] == Restore(2, (1, 20), checkpoints.STORAGE)
    assert {one.tier for one in told.facts(checkpoints.Restored) if one.generation == 2} == {checkpoints.STORAGE}
    assert [one.step for one in told.facts(progress.FirstStep)] == [1, 21]
    report = report_of(told.records)
    assert report.steps_lost == 28 + 1 - 20
    assert report.goodput.by_class["rework"] > 0
    assert [(one.tier, one.count) for one in report.saves.restores] == [(checkpoints.STORAGE, 1)]


def test_a_copy_stands_in_for_a_killed_node() -> None:
    """With replicas the partner holds the dead node's part: it is written from there, and restored from there."""

    async def story(cluster: Cluster) -> None:
        await step(cluster, 28)
        cluster.kill_node("worker-1-0")

    told = tell(story, Knobs(every=2, store_every=10, spread=0, replicas=True), nodes=3)
    (ordered,) = told.facts(checkpoints.SaveOrdered)
    assert (ordered.generation, ordered.step) in {(1, 26), (1, 28)}
    assert (1, ordered.step) in told.committed
    assert told.saving.restores[1] == Restore(2, (1, ordered.step), checkpoints.PEER)
    assert {one.node for one in told.facts(checkpoints.ReplicaOffered)} == {
        "worker-0-0", "worker-1-0", "worker-2-0", "worker-1-1"
    }  # fmt: skip


def test_a_writer_dies_while_it_writes() -> None:
    """What a dead node was to write another one writes that holds it as well: what was ordered is not forgotten."""

    async def story(cluster: Cluster) -> None:
        await step(cluster, 25)
        cluster.kill_worker(1)
        await cluster.until(lambda: cluster.state.checkpoints.of("worker").order is not None)
        cluster.kill_node("worker-0-0")
        await cluster.until(lambda: cluster.state.checkpoints.of("worker").newest >= (1, 24))

    told = tell(story, Knobs(every=2, store_every=10, write_s=1.0, slots=4, replicas=True))
    assert (1, 24) in told.committed


def test_damaged_memory_is_no_checkpoint() -> None:
    """Memory that fails its verification is not used: all take the next tier, and it stands in the log which fell and why."""

    async def story(cluster: Cluster) -> None:
        await step(cluster, 25)
        assert cluster.training.saving is not None
        cluster.training.saving.damaged.add("worker-1-0")
        cluster.kill_worker(1)

    told = tell(story, Knobs(every=2, store_every=10, spread=0))
    assert told.saving.restores[1].tier == checkpoints.STORAGE
    fell = [one.fell for one in told.facts(checkpoints.Restored) if one.fell]
    assert fell == [((checkpoints.MEMORY, "a block of worker-1-0 is not what was saved"),)]
    assert report_of(told.records).saves.fell == 1


# ---- nodes that are told to go


@pytest.mark.parametrize("spread", [0, 1])
@pytest.mark.parametrize("number", [25, 30])
def test_a_stopped_job_is_saved(spread: int, number: int) -> None:
    """Whoever writes: what all hold as the job is stopped is a checkpoint before the last agent has left, and at once."""

    async def story(cluster: Cluster) -> None:
        await step(cluster, number)
        await cluster.leader.submit(StopJob("enough"))

    told = tell(story, Knobs(every=2, store_every=10, spread=spread), ends="stopped", stop_grace_s=60.0)
    newest = told.saving.saved[-1]
    assert told.committed[-1] == newest
    assert newest in told.saving.sealed
    assert newest[1] >= number - 1
    began, ended = (_at(told, kind) for kind in (JobStopping, JobStopped))
    # The time that it takes to write, or to write what was due, and then that; nobody waits for anybody's grace.
    assert ended - began < 1_500_000


@pytest.mark.parametrize("spread", [0, 1])
def test_a_failed_job_is_saved(spread: int) -> None:
    """Its workers get no time, what they leave behind does: the next run begins there."""

    async def story(cluster: Cluster) -> None:
        await step(cluster, 25)
        cluster.kill_worker(1, 1, "ValueError: bad batch")

    told = tell(story, Knobs(every=2, store_every=10, spread=spread), ends="failed", max_restarts=0)
    assert [one.step for one in told.facts(checkpoints.SaveOrdered)] == [24]
    assert told.committed[-1] == (1, 24)
    assert (1, 24) in told.saving.sealed


def test_a_stop_does_not_wait_for_a_storage_that_is_gone() -> None:
    """It is tried for as long as a stop may take, and no longer."""

    async def story(cluster: Cluster) -> None:
        await step(cluster, 25)
        assert cluster.training.saving is not None
        cluster.training.saving.broken.add("*")
        await cluster.leader.submit(StopJob("enough"))

    told = tell(story, Knobs(every=2, store_every=10), ends="stopped", stop_grace_s=10.0)
    assert told.committed[-1] == (1, 20)
    assert _at(told, JobStopped) - _at(told, JobStopping) < 11_000_000


def test_a_drained_node_leaves_its_part_on_storage() -> None:
    """Where each node holds a part of its own and ranks cannot agree on a boundary, who goes writes its part, and then goes."""

    async def story(cluster: Cluster) -> None:
        await step(cluster, 28)
        cluster.master.tell(DrainNode("worker-1-0", "maintenance"))

    told = tell(story, Knobs(every=2, store_every=10, spread=0), nodes=3)
    (ordered,) = told.facts(checkpoints.SaveOrdered)
    assert ordered.step >= 28
    assert (1, ordered.step) in told.committed
    assert told.saving.restores[1] == Restore(2, (1, ordered.step), checkpoints.STORAGE)
    assert report_of(told.records).steps_lost <= 2


def _at(told: Told, kind: type) -> int:
    return next(record.at for record in told.records if isinstance(record.event, kind))


# ---- masters die


@pytest.mark.parametrize("later_s", [0.0, 0.005, 0.02, 0.1, 1.0])
def test_a_master_killed_between_written_and_committed(later_s: float) -> None:
    """The next leader hears of the parts again: the step is committed, once, whenever the old one dies."""

    async def story(cluster: Cluster) -> None:
        await written(cluster, 20)
        await asyncio.sleep(later_s)
        cluster.kill_master()
        cluster.start_master()

    told = tell(story, Knobs(every=2, store_every=10, spread=0))
    assert told.committed.count((1, 20)) == 1
    assert told.committed == sorted(set(told.committed))


def test_a_master_killed_before_it_orders_the_save() -> None:
    """What nodes have told is in the log: the next leader orders what the dead one had not yet."""

    async def story(cluster: Cluster) -> None:
        await step(cluster, 25)
        # Its word comes late, and the leader that has heard the other one dies meanwhile.
        cluster.freeze("worker-1-0")
        cluster.kill_worker(0)
        await cluster.until(lambda: any(isinstance(one, checkpoints.StepsHeld) for one in seen(cluster)))
        cluster.kill_master()
        cluster.start_master()
        await asyncio.sleep(1)
        cluster.thaw("worker-1-0")

    told = tell(story, Knobs(every=2, store_every=10))
    assert [one.step for one in told.facts(checkpoints.SaveOrdered)] == [24]
    assert (1, 24) in told.committed


def seen(cluster: Cluster) -> list[Any]:
    """The events that the memory log holds now."""
    held = cluster.state.checkpoints.of("worker")
    known = [one for one in (held.now, held.ended) if one is not None]
    return [checkpoints.StepsHeld(node, one.generation, steps) for one in known for node, steps in one.held.items()]


@pytest.mark.parametrize("seq", range(14, 46, 2))
def test_a_master_killed_anywhere(seq: int) -> None:
    """Whichever record is its last one: everything due is committed once, and so is what was ordered as a worker died."""

    async def story(cluster: Cluster) -> None:
        await asyncio.gather(_kill_at(cluster, seq), _hurt(cluster))

    async def _kill_at(cluster: Cluster, seq: int) -> None:
        await cluster.until(lambda: cluster.state.seq >= seq)
        cluster.kill_master()
        cluster.start_master()

    async def _hurt(cluster: Cluster) -> None:
        await step(cluster, 25)
        cluster.kill_worker(1)

    told = tell(story, Knobs(every=2, store_every=10, spread=0), steps=45)
    assert told.committed == [(1, 10), (1, 20), (1, 24), (2, 30), (2, 40)]
    assert len(told.facts(checkpoints.SaveOrdered)) == 1


# ---- storage fails


def test_a_failing_storage_hurts_nobody() -> None:
    """Training goes on at its pace; each node tells once that storage fails and once that it is back; then commits go on."""

    async def story(cluster: Cluster) -> None:
        assert cluster.training.saving is not None
        await step(cluster, 15)
        cluster.training.saving.broken.add("*")
        began = asyncio.get_running_loop().time()
        await step(cluster, 45)
        assert asyncio.get_running_loop().time() - began < 30 * cluster.training.step_s + 0.1
        assert cluster.state.checkpoints.failing.keys() == {"worker-0-0", "worker-1-0"}
        assert cluster.master.alarms == 2
        assert cluster.state.checkpoints.of("worker").newest == (1, 10)
        cluster.training.saving.broken.clear()

    told = tell(story, Knobs(every=2, store_every=10, spread=0, retry_s=0.5), steps=80)
    edges = [(type(one).__name__, one.node) for one in told.facts(checkpoints.StorageFailed, checkpoints.StorageBack)]
    assert sorted(edges) == [
        ("StorageBack", "worker-0-0"), ("StorageBack", "worker-1-0"),
        ("StorageFailed", "worker-0-0"), ("StorageFailed", "worker-1-0"),
    ]  # fmt: skip
    assert told.committed[-2:] == [(1, 70), (1, 80)]
    report = report_of(told.records)
    assert report.saves.outages == 1
    assert 2_000_000 < report.saves.outage_us < 6_000_000


def test_a_flapping_storage_is_told_of_now_and_then() -> None:
    """At every other step that is due storage fails: that is one failure that goes on, not one each."""

    async def story(cluster: Cluster) -> None:
        saving = cluster.training.saving
        assert saving is not None
        for number in range(10, 200, 10):
            await step(cluster, number)
            await asyncio.sleep(2 * saving.knobs.write_s)
            saving.broken.symmetric_difference_update({"*"})
        saving.broken.clear()

    told = tell(story, Knobs(every=2, store_every=10, spread=0, retry_s=0.1), steps=210)
    edges = [type(one).__name__ for one in told.facts(checkpoints.StorageFailed, checkpoints.StorageBack)]
    assert len([one for one in edges if one == "StorageFailed"]) == 2 * 2
    assert len(edges) <= 2 * 4
    # Who tells of it holds back: what is refused is a record, too.
    assert "ReportStorage" not in [one.command for one in told.facts(CommandRefused)]
    assert told.committed[-1] == (1, 210)


def test_a_storage_that_is_gone_does_not_keep_a_job_from_ending() -> None:
    """What was due as the script ended is tried for a while, and then given up."""
    knobs = Knobs(every=2, store_every=10)

    async def story(cluster: Cluster) -> None:
        assert cluster.training.saving is not None
        await step(cluster, 55)
        cluster.training.saving.broken.add("*")
        await cluster.until(lambda: cluster.state.job.over, limit_s=10 * knobs.patience_s, every_s=0.1)

    told = tell(story, knobs)
    assert told.committed[-1] == (1, 50)


def test_a_job_has_succeeded_when_its_last_state_is_on_storage() -> None:
    """That takes most of an hour: the job ends when it is there, and no sooner."""
    began = []

    async def story(cluster: Cluster) -> None:
        await step(cluster, 60)
        began.append(asyncio.get_running_loop().time())
        await cluster.until(lambda: cluster.state.job.over, limit_s=2 * SLOW_S, every_s=1)
        assert asyncio.get_running_loop().time() - began[0] == pytest.approx(SLOW_S, abs=5)

    told = tell(story, Knobs(every=2, store_every=10, write_s=SLOW_S))
    assert told.committed[-1] == (1, 60)


# ---- anything at any time


@pytest.mark.parametrize("seed", range(12))
def test_anything_at_any_time(seed: int) -> None:
    """Workers, nodes and masters die and storage fails, at random: promises hold, and no restart loses what was committed."""
    chance = random.Random(seed)

    async def story(cluster: Cluster) -> None:
        saving = cluster.training.saving
        assert saving is not None
        for number in range(3):
            await step(cluster, 20 * number + chance.randrange(5, 20))
            await asyncio.sleep(chance.random())
            what = chance.choice(("worker", "node", "master", "storage"))
            living = [one for launcher in cluster.launchers.values() for one in launcher.ranks]
            if what == "worker" and living:
                cluster.kill_worker(chance.choice(living))
            elif what == "node" and cluster.backend.living:
                cluster.kill_node(chance.choice(cluster.backend.living))
            elif what == "master":
                cluster.kill_master()
                cluster.start_master()
            else:
                saving.broken.symmetric_difference_update({"*"})
        saving.broken.clear()

    knobs = Knobs(
        every=chance.choice((1, 2, 5)),
        store_every=chance.choice((5, 10)),
        spread=chance.choice((0, 1, 2)),
        replicas=chance.random() < 0.5,
        write_s=chance.choice((0.05, 0.5, 2.0)),
    )
    told = tell(story, knobs, nodes=4, steps=90)
    assert told.facts(incidents.IncidentOpened) is not None
    assert told.committed == sorted(set(told.committed))
