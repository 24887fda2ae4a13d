"""Jobs that cannot go on, or only smaller, or not now: they end with the cause named, and nothing is left running."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from dlrover_core.errors import LaunchRefused
from dlrover_core.job import incidents, nodes, silence, world
from dlrover_core.job.job import StopJob
from dlrover_core.job.state import JobState
from dlrover_core.runtime.backend import Changed, Listed
from dlrover_core.runtime.master import Outcome
from dlrover_core.spec import GroupSpec, JobSpec
from dlrover_core.testing import virtual_loop
from dlrover_core.testing.cluster import Cluster, MemoryBackend
from dlrover_core.testing.invariants import check, check_steps
from dlrover_core.testing.platform import Platform
from dlrover_core.testing.training import Training

Story = Callable[[Cluster], Awaitable[None]]
TRACEBACK = "Traceback (most recent call last):\n  File 'train.py', line 7\nValueError: no such batch: 12"


def spec(**changes: object) -> JobSpec:
    """Two nodes with two workers each, unless said otherwise."""
    group = {"nodes_min": 2, "nodes_max": 2, "nproc": 2}
    group |= {key: changes.pop(key) for key in ("nodes_min", "nodes_max", "nproc", "relaunch_max") if key in changes}  # type: ignore[misc]
    return JobSpec("j", (GroupSpec(**group),), **changes)  # type: ignore[arg-type]


def tell(job: JobSpec, story: Story, steps: int = 50) -> tuple[Cluster, JobState, Outcome]:
    """Let a job suffer ``story`` and end somehow: with nothing left running and every invariant kept."""

    async def told() -> tuple[Cluster, JobState, Outcome]:
        async with Cluster(job, training=Training(steps=steps)) as cluster:
            await story(cluster)
            outcome = await cluster.outcome()
            assert cluster.backend.living == []
            assert [node for node, launcher in cluster.launchers.items() if launcher.ranks] == []
            check_steps(cluster)
            return cluster, await check(cluster), outcome

    return virtual_loop.run(told())


def facts(cluster: Cluster, kind: type) -> list[object]:
    """The events of a kind in the log, in order."""

    async def found() -> list[object]:
        return [record.event for record in await cluster.records() if isinstance(record.event, kind)]

    return virtual_loop.run(found())


def step(cluster: Cluster, number: int) -> Awaitable[None]:
    """Until this step is made."""
    return cluster.until(lambda: cluster.training.done >= number)


@pytest.mark.parametrize("max_restarts", [0, 1, 3])
def test_script_error(max_restarts: int) -> None:
    """A script error that repeats fails the job after ``max_restarts``; the root names rank and exception, no cascade."""

    async def story(cluster: Cluster) -> None:
        for attempt in range(max_restarts + 1):
            await step(cluster, 5 * (attempt + 1))
            cluster.kill_worker(1, 1, TRACEBACK)

    cluster, state, outcome = tell(spec(max_restarts=max_restarts), story)
    assert outcome.state == "failed"
    assert outcome.root == "rank 1 on worker-0-0: ValueError: no such batch: 12 (exception.ValueError)"
    assert state.incidents.restarts == max_restarts
    assert state.world.worlds["worker"].generation == max_restarts + 1
    assert len(facts(cluster, incidents.WorkerExited)) >= max_restarts + 1


def test_root_comes_after_the_cascade() -> None:
    """The cascade of the peers is reported first, the worker's own error later: the job still fails with that error."""

    async def story(cluster: Cluster) -> None:
        await step(cluster, 5)
        cluster.freeze("worker-0-0")
        cluster.kill_worker(1, 1, TRACEBACK)
        await asyncio.sleep(2)
        cluster.thaw("worker-0-0")

    _, _, outcome = tell(spec(max_restarts=0), story)
    assert outcome.state == "failed"
    assert "ValueError: no such batch" in outcome.root


def test_failing_is_not_for_ever() -> None:
    """Where a rank's evidence never comes, the job fails all the same once ``evidence_s`` is over."""

    async def story(cluster: Cluster) -> None:
        await step(cluster, 5)
        cluster.freeze("worker-1-0")
        cluster.kill_worker(1, 1, TRACEBACK)
        began = asyncio.get_running_loop().time()
        await cluster.until(lambda: cluster.state.job.over, every_s=0.01)
        assert 20 <= asyncio.get_running_loop().time() - began <= 21

    _, _, outcome = tell(spec(max_restarts=0, evidence_s=20.0), story)
    assert outcome.state == "failed"
    assert "ValueError" in outcome.root


def test_workers_cannot_be_started() -> None:
    """Where workers cannot be started the node is replaced, not retried for ever on the spot."""

    async def story(cluster: Cluster) -> None:
        await cluster.until(lambda: "worker-1-0" in cluster.launchers)
        cluster.launchers["worker-1-0"].unable = "no zygote"

    cluster, state, outcome = tell(spec(), story)
    assert outcome.state == "succeeded"
    assert cluster.backend.launched == ["worker-0-0", "worker-1-0", "worker-1-1"]
    assert state.incidents.relaunches == {"worker-1": 1}
    assert "no zygote" in next(fact.reason for fact in facts(cluster, nodes.NodeFailed))  # type: ignore[attr-defined]


def test_stuck_workers() -> None:
    """Workers that survive SIGKILL make their node faulty: it is replaced, and training goes on elsewhere."""

    async def story(cluster: Cluster) -> None:
        await step(cluster, 5)
        cluster.launchers["worker-1-0"].stuck = True
        cluster.kill_worker(0)
        await cluster.until(lambda: cluster.training.done >= 10)

    cluster, state, outcome = tell(spec(kill_wait_s=5.0), story)
    assert outcome.state == "succeeded"
    assert cluster.backend.launched == ["worker-0-0", "worker-1-0", "worker-1-1"]
    assert (state.incidents.number, state.incidents.relaunches) == (1, {"worker-1": 1})


def test_relaunches_exhausted_goes_on_smaller() -> None:
    """No relaunch left and enough nodes without it: training goes on smaller."""

    async def story(cluster: Cluster) -> None:
        for incarnation in range(3):
            name = f"worker-1-{incarnation}"
            await cluster.until(
                lambda name=name: any(node == name for node, _ in cluster.training.starts), every_s=0.01
            )  # type: ignore[misc]
            await asyncio.sleep(0.5)
            cluster.kill_node(name)

    cluster, state, outcome = tell(spec(nodes_min=1, relaunch_max=2), story)
    assert outcome.state == "succeeded"
    assert cluster.backend.launched == ["worker-0-0", "worker-1-0", "worker-1-1", "worker-1-2"]
    assert [member.node for member in state.world.worlds["worker"].members] == ["worker-0-0"]
    assert state.incidents.relaunches == {"worker-1": 2}


def test_relaunches_exhausted_fails() -> None:
    """No relaunch left and too few nodes without it: the job fails, and the node is named."""

    async def story(cluster: Cluster) -> None:
        await step(cluster, 5)
        cluster.kill_node("worker-1-0")

    cluster, _, outcome = tell(spec(relaunch_max=0), story)
    assert outcome.state == "failed"
    assert "worker-1-0" in outcome.root
    assert cluster.backend.launched == ["worker-0-0", "worker-1-0"]


def test_refused_for_good() -> None:
    """A backend that refuses every node for good fails the job with its reason; it is not asked for ever."""

    async def story(cluster: Cluster) -> None:
        cluster.backend.unwilling = LaunchRefused("no such image", permanent=True)

    _, _, outcome = tell(spec(), story)
    assert outcome.state == "failed"
    assert "no such image" in outcome.root


def test_refused_for_now() -> None:
    """A backend that refuses for a while is asked again: the job starts when it may."""

    async def story(cluster: Cluster) -> None:
        cluster.backend.unwilling = LaunchRefused("no room", permanent=False)
        await asyncio.sleep(100)
        cluster.backend.unwilling = None

    _, state, outcome = tell(spec(), story)
    assert outcome.state == "succeeded"
    assert state.incidents.number == 0


def test_stop() -> None:
    """Stopped in mid-training: workers get their grace, everybody leaves, the job is stopped and no incident opens."""

    async def story(cluster: Cluster) -> None:
        await step(cluster, 5)
        for launcher in cluster.launchers.values():
            launcher.patience_s = 10.0
        began = asyncio.get_running_loop().time()
        await cluster.leader.submit(StopJob("Ctrl-C"))
        await asyncio.sleep(9)
        assert all(launcher.ranks for launcher in cluster.launchers.values())
        await cluster.outcome()
        assert 10 <= asyncio.get_running_loop().time() - began <= 11

    _, state, outcome = tell(spec(), story, steps=500)
    assert (outcome.state, outcome.reason) == ("stopped", "Ctrl-C")
    assert state.incidents.number == 0


class Away(MemoryBackend):
    """A backend whose platform answers no deletion, and tells nothing, while it is ``away``."""

    away = False

    async def delete(self, name: str, token: int, grace_s: float) -> None:
        """Refused while it is away."""
        if self.away:
            raise ConnectionError("its platform is away")
        await super().delete(name, token, grace_s)

    async def observe(self) -> AsyncIterator[Listed | Changed]:
        """Nothing while it is away."""
        async for seen in super().observe():
            if not self.away:
                yield seen


def test_stop_while_the_platform_is_away() -> None:
    """Agents have their time; a backend that fails at every deletion is given up after seconds: who clears later tries again."""
    made: list[Away] = []

    def backend(platform: Platform) -> Away:
        made.append(Away(platform))
        return made[0]

    async def told() -> float:
        async with Cluster(spec(), training=Training(steps=500), backend=backend) as cluster:
            await step(cluster, 5)
            made[0].away = True
            began = asyncio.get_running_loop().time()
            await cluster.leader.submit(StopJob("Ctrl-C"))
            assert (await cluster.outcome()).state == "stopped"
            return asyncio.get_running_loop().time() - began

    assert 5 < virtual_loop.run(told()) < 12


def test_stop_before_anything_runs() -> None:
    """Stopped while its nodes boot, a job is stopped at once."""

    async def story(cluster: Cluster) -> None:
        await cluster.until(lambda: len(cluster.backend.launched) == 2)
        await cluster.leader.submit(StopJob("changed my mind"))

    _, _, outcome = tell(spec(), story)
    assert outcome.state == "stopped"


def test_stop_while_a_node_is_unreachable() -> None:
    """A job is stopped though one of its agents can never say that it has left."""

    async def story(cluster: Cluster) -> None:
        await step(cluster, 5)
        cluster.network.cut("worker-1-0")
        await cluster.leader.submit(StopJob("enough"))

    _, _, outcome = tell(spec(unreachable_s=30.0), story, steps=100_000)
    assert outcome.state == "stopped"


def test_end_comes_at_once() -> None:
    """A short job does not wait for any back-off before its nodes are deleted and its master ends."""

    async def story(cluster: Cluster) -> None:
        await step(cluster, 3)
        await cluster.outcome()
        assert asyncio.get_running_loop().time() < 4

    tell(spec(), story, steps=3)


@pytest.mark.parametrize("fault", ["full", "unavailable"])
def test_log_away_for_a_while(fault: str) -> None:
    """No log for ten minutes: training goes on, the status says why decisions wait, then all of them are made, none lost."""

    async def story(cluster: Cluster) -> None:
        await step(cluster, 5)
        setattr(cluster.log.faults, fault, True)
        await asyncio.sleep(600)
        assert cluster.training.done > 5900
        cluster.kill_worker(3)
        await asyncio.sleep(30)
        assert {"full": "LogFull", "unavailable": "LogUnavailable"}[fault] in cluster.leader.status()["degraded"]
        assert cluster.state.world.worlds["worker"].generation >= 1
        assert len(cluster.training.starts) == 2
        setattr(cluster.log.faults, fault, False)
        await cluster.until(lambda: len(cluster.training.starts) == 4, 10)
        assert cluster.leader.status()["degraded"] == ""

    cluster, state, outcome = tell(spec(), story, steps=6100)
    assert outcome.state == "succeeded"
    assert (state.incidents.number, state.incidents.restarts) == (1, 1)
    assert facts(cluster, silence.NodeSuspected) == []
    assert [fact.generation for fact in facts(cluster, world.WorldFormed)] == [1, 2]  # type: ignore[attr-defined]


def test_log_away_at_take_over() -> None:
    """A master that would take over while the log is away waits for it: training goes on meanwhile."""

    async def story(cluster: Cluster) -> None:
        await step(cluster, 5)
        cluster.kill_master()
        cluster.log.faults.unavailable = True
        cluster.start_master()
        await asyncio.sleep(60)
        cluster.log.faults.unavailable = False

    _, state, outcome = tell(spec(), story, steps=1000)
    assert outcome.state == "succeeded"
    assert state.incidents.number == 0


def test_cut_off_rank_zero_while_worlds_pass_by() -> None:
    """Worlds that the node of rank 0 never heard of use up its stores: it offers new ones, and training goes on."""

    async def story(cluster: Cluster) -> None:
        await step(cluster, 5)
        for _ in range(4):
            cluster.network.cut("worker-0-0")
            await asyncio.sleep(0.2)
            before = cluster.state.world.worlds["worker"].generation
            # By errors of their own: killed again and again without a word, they would speak against their host.
            cluster.kill_worker(2, 1, "RuntimeError: it broke")
            await cluster.until(lambda before=before: cluster.state.world.worlds["worker"].generation > before)
            await asyncio.sleep(0.1)
            before += 1
            cluster.launchers["worker-1-0"].kill(2, 1, "RuntimeError: it broke")
            await cluster.until(lambda before=before: cluster.state.world.worlds["worker"].generation > before)
            cluster.network.heal()
            made = cluster.training.done
            await cluster.until(lambda made=made: cluster.training.done > made + 2, 60)

    _, _, outcome = tell(spec(max_restarts=20), story)
    assert outcome.state == "succeeded"
