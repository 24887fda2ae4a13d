"""Failures that other systems had in public, told to ours. Each names its case, and promises what ours does instead.

The trackers of torch, torchft, NVRx, Horovod, Kubeflow, Kueue and MaxText tell of them, as ``project#number``. Those that need
a checkpoint engine or a diagnosis that does not exist yet are listed in ``docs/bugs-found.md``, with what they wait for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest
from tests.chaos.hosts_cluster import HostsCluster

from dlrover_core.history.report import report_of
from dlrover_core.job import incidents, job, nodes, progress, ranges, silence, world
from dlrover_core.job.state import CODEC, JobState
from dlrover_core.kernel.engine import Engine
from dlrover_core.kernel.state import pack
from dlrover_core.logs.memory import Faults, MemoryLog, Stuck
from dlrover_core.rules.model import MODEL
from dlrover_core.runtime.ending import Ending
from dlrover_core.spec import GroupSpec, JobSpec, us
from dlrover_core.testing import virtual_loop
from dlrover_core.testing.cluster import Cluster
from dlrover_core.testing.invariants import check, check_steps
from dlrover_core.testing.training import Training

TIMED_OUT = "torch.distributed.DistBackendError: Watchdog caught collective operation timeout"


def spec(nodes_max: int = 2, nodes_min: int = 0, nproc: int = 1, **more: Any) -> JobSpec:
    """A job of so many nodes, all of them needed unless said otherwise."""
    return JobSpec("j", (GroupSpec("worker", nodes_min or nodes_max, nodes_max, nproc),), **more)


def tell(
    cluster_of: Callable[[], Cluster], story: Callable[[Any], Awaitable[None]], ends: str = "succeeded"
) -> tuple[Any, JobState]:
    """Let a job suffer ``story`` from its fifth step on, and end well all the same: each step once, every invariant kept."""

    async def told() -> tuple[Cluster, JobState]:
        async with cluster_of() as cluster:
            await step(cluster, 5)
            await story(cluster)
            assert (await cluster.outcome()).state == ends
            if isinstance(cluster, HostsCluster):
                await cluster.settled()
            check_steps(cluster)
            return cluster, await check(cluster)

    return virtual_loop.run(told())


def step(cluster: Cluster, number: int) -> Awaitable[None]:
    """Until this step is made."""
    return cluster.until(lambda: cluster.training.done >= number)


def facts(cluster: Cluster, kind: type) -> list[Any]:
    """The events of a kind in the log, in order."""

    async def found() -> list[object]:
        return [record.event for record in await cluster.records() if isinstance(record.event, kind)]

    return virtual_loop.run(found())


def sizes(cluster: Cluster) -> list[int]:
    """How many nodes each generation had."""
    return [len(ranges.from_ranges(fact.group, fact.members)) for fact in facts(cluster, world.WorldFormed)]


def trained(cluster: Cluster) -> list[int]:
    """How many nodes each generation had that made a step."""
    stepped = {fact.generation for fact in facts(cluster, progress.FirstStep)}
    return [size for generation, size in enumerate(sizes(cluster), 1) if generation in stepped]


def now() -> float:
    """Virtual seconds."""
    return asyncio.get_running_loop().time()


# ---- who is there


def test_spare_overflow() -> None:
    """NVRx#348, five agents rejoin where four may train: one waits, no world is too large."""

    async def story(cluster: HostsCluster) -> None:
        for at in (10, 20, 30):
            await step(cluster, at)
            cluster.kill_worker(at % 4)
        await step(cluster, 40)
        assert len(cluster.standbys) == 1

    five = [f"host{number}" for number in range(5)]
    cluster, state = tell(lambda: HostsCluster(spec(4, joining=True), five, training=Training(60)), story)
    assert sizes(cluster) == [4, 4, 4, 4]
    assert (state.incidents.number, state.incidents.relaunches) == (3, {})


def test_ghost_member_is_not_waited_for() -> None:
    """torchft#63, a worker dies before its first quorum: nobody waits for the ghost, its successor takes its place."""

    async def story() -> None:
        async with Cluster(spec(3)) as cluster:
            await cluster.until(lambda: "worker-1-0" in cluster.agents)
            cluster.kill_node("worker-1-0")
            await step(cluster, 1)
            # One more boot, and no timeout of anybody's.
            assert now() < 6
            assert "worker-1-0" not in cluster.state.nodes.nodes
            assert (await cluster.outcome()).state == "succeeded"
            await check(cluster)

    virtual_loop.run(story())


class Restarts:
    """A job of two nodes, told to a bare engine, that loses a worker or a node again and again."""

    def __init__(self) -> None:
        group = GroupSpec(nodes_min=2, nodes_max=2, relaunch_max=1_000_000)
        self.engine: Engine[JobState] = Engine(MODEL, CODEC, MODEL.new(), token=1)
        self.at = 1_700_000_000_000_000
        self.stores = 0
        self.do(job.CreateJob("run", JobSpec("j", (group,), max_restarts=10**9).to_json()))
        self.come("worker-0-0")
        self.come("worker-1-0")
        self.train()

    def do(self, *commands: tuple[object, ...]) -> None:
        """One batch, a second after the last one."""
        self.at += us(1)
        for command in commands:
            self.engine.handle(command, self.at)
        self.engine.take()
        if self.engine.state.seq % 1000 < len(commands):
            self.engine.rebase()

    def come(self, name: str) -> None:
        """A node runs on one of eight hosts, joins, and offers a store."""
        self.stores += 1
        here = nodes.Observed(name, "running", host=f"host-{self.stores % 8}")
        self.do(
            nodes.ObserveNodes((here,)),
            nodes.ReportJoined(name, here.host, "a", 1),
            world.OfferStore(name, f"store-{self.stores}"),
        )

    def train(self) -> None:
        """The newest generation starts and makes a step."""
        current = self.engine.state.world.worlds["worker"]
        assert current.active
        for member in current.members:
            self.do(world.ReportStarted(member.node, current.generation))
        self.do(progress.ReportFirstStep(current.members[0].node, current.generation, current.generation, told=True))

    def lose_worker(self) -> None:
        """A worker dies; the world that follows needs another store."""
        current = self.engine.state.world.worlds["worker"]
        self.stores += 1
        self.do(world.OfferStore(current.members[0].node, f"store-{self.stores}"))
        # On both nodes alike: none of them stands out, and is left for another host.
        rank = current.generation % 2
        self.do(incidents.ReportExit(current.members[rank].node, current.generation, rank, -9))
        self.train()

    def lose_node(self) -> None:
        """A node is seen to fail, to be gone, and its successor comes."""
        current = self.engine.state.world.worlds["worker"]
        name = current.members[1].node
        place, incarnation = name.rsplit("-", 1)
        self.stores += 1
        self.do(world.OfferStore(current.members[0].node, f"store-{self.stores}"))
        self.do(nodes.ObserveNodes((nodes.Observed(name, "failed", -9),)))
        self.do(nodes.ObserveNodes((nodes.Observed(name, "gone"),)))
        self.come(f"{place}-{int(incarnation) + 1}")
        self.train()


def grown(restarts: int, lose: Callable[[Restarts], None]) -> tuple[int, int]:
    """Bytes of the packed state after a tenth of so many restarts, and after all of them."""
    told = Restarts()
    for _ in range(restarts // 10):
        lose(told)
    before = len(pack(told.engine.state))
    for _ in range(restarts - restarts // 10):
        lose(told)
    assert told.engine.state.incidents.number == restarts
    return before, len(pack(told.engine.state))


@pytest.mark.parametrize("lose", [Restarts.lose_worker, Restarts.lose_node], ids=["workers", "nodes"])
def test_ghost_members_leave_nothing_behind(lose: Callable[[Restarts], None]) -> None:
    """torchft#63, every restart leaves an entry in the heartbeat map: our state after ten times the restarts is as large.

    But for the digits of its numbers. The same held for 100,000 restarts, which take too long to be told every day.
    """
    before, after = grown(3_000, lose)
    # Strikes of a day, the newest roots and what incidents have used up are kept, bounded: their numbers have more digits.
    assert after - before < 1000


def test_two_rooms() -> None:
    """torchft#48 and #70, a join window shorter than a step: never two worlds at once, and no step is made in both.

    Nodes come late one by one, each within the step that the ones before are making.
    """
    elastic = spec(4, nodes_min=1, last_call_s=1.0, grow_window_s=1.0)

    async def story(cluster: HostsCluster) -> None:
        for name in ("b", "c", "d"):
            cluster.host(name)
            await asyncio.sleep(3.0)
        await step(cluster, 12)
        assert len(cluster.state.world.worlds["worker"].members) == 4

    def late() -> HostsCluster:
        joining = JobSpec("j", elastic.groups, joining=True, last_call_s=1.0, grow_window_s=1.0)
        return HostsCluster(joining, ["a"], training=Training(30, step_s=5.0))

    cluster, state = tell(late, story)
    assert sizes(cluster)[-1] == 4
    # Each generation but the last was ended before the next one began, and by plan: nothing had failed.
    ended = [(fact.generation, fact.planned) for fact in facts(cluster, world.WorldDissolved)]
    assert ended == [(generation, True) for generation in range(1, len(sizes(cluster)))]
    assert state.incidents.number == 0


def test_agent_stops_and_returns() -> None:
    """pytorch#147064 and #182221, SIGINT for one agent, which is started again: it is in the next world, no error."""

    async def story(cluster: HostsCluster) -> None:
        parting = cluster.on("worker-1-0")
        assert parting.agent is not None
        parting.agent.part("SIGINT")
        await cluster.until(lambda: parting.done)
        assert parting.endings == [Ending("", "SIGINT")]
        cluster.start_host(parting.name)
        done = cluster.training.done
        await step(cluster, done + 1)
        assert parting.node == "worker-1-1"

    cluster, state = tell(lambda: HostsCluster(spec(2, joining=True), ["a", "b"], training=Training(60)), story)
    assert (state.incidents.number, sizes(cluster)) == (0, [2, 2])


@pytest.mark.parametrize("returning", [(0, 0), (0, 40), (40, 0)], ids=["together", "one late", "the other late"])
def test_dip_below_the_minimum(returning: tuple[int, int]) -> None:
    """horovod#3494, fewer than the minimum survive, then the others return: one world, and all are in it."""

    async def story(cluster: HostsCluster) -> None:
        cluster.kill_host("c")
        cluster.kill_host("d")
        await cluster.until(lambda: not cluster.state.world.worlds["worker"].active)
        await asyncio.sleep(60)
        for name, after in sorted(zip(("c", "d"), returning, strict=True), key=lambda one: one[1]):
            await asyncio.sleep(after)
            cluster.start_host(name)

    four = ["a", "b", "c", "d"]
    job_spec = spec(4, nodes_min=3, joining=True, last_call_s=5.0, grow_window_s=5.0)
    cluster, state = tell(lambda: HostsCluster(job_spec, four, training=Training(400)), story)
    # Whoever comes after the last call is taken in with a polite stop.
    assert trained(cluster) == ([4, 4] if not any(returning) else [4, 3, 4])
    assert all(one.closed for one in state.incidents.by_number.values())


# ---- who keeps it together


@pytest.mark.parametrize("standbys", [0, 2], ids=["alone", "standbys"])
def test_store_host_dies(standbys: int) -> None:
    """pytorch#67742, the host that keeps the rendezvous dies and all agents exit: here no worker restarts for it."""

    async def story(cluster: Cluster) -> None:
        for _ in range(standbys):
            cluster.start_master()
        await asyncio.sleep(1)
        if standbys:
            cluster.kill_leader()
        else:
            cluster.kill_master()
            await asyncio.sleep(20)
            cluster.start_master()
        await asyncio.sleep(1)

    cluster, state = tell(lambda: Cluster(spec(3, nproc=2), training=Training(400), answers=bool(standbys)), story)
    assert sorted(cluster.training.starts) == [(f"worker-{index}-0", 1) for index in range(3)]
    assert (state.incidents.number, state.token) == (0, 2)


def test_node_with_the_store_dies() -> None:
    """pytorch#67742, the node of rank 0 takes its TCPStore with it: the other agents live, the next world has another."""

    async def story(cluster: Cluster) -> None:
        cluster.kill_node("worker-0-0")

    cluster, _ = tell(lambda: Cluster(spec(3)), story)
    assert cluster.backend.launched == ["worker-0-0", "worker-1-0", "worker-2-0", "worker-0-1"]
    stores = [fact.store for fact in facts(cluster, world.WorldFormed)]
    assert len(set(stores)) == len(stores) == 2


def test_uneven_timeouts() -> None:
    """kubeflow/trainer#2000, 128 workers hit a collective's timeout minutes apart: one cut for all, one restart.

    Agents of four of the sixteen nodes are stopped, so that their workers see the timeout before they hear of the cut.
    """
    deaf = [f"worker-{index}-0" for index in (3, 7, 11, 15)]

    async def story(cluster: Cluster) -> None:
        for name in deaf:
            cluster.freeze(name)
        cluster.kill_worker(0, 1, TIMED_OUT)
        for minute, name in enumerate(deaf):
            await asyncio.sleep(50)
            for rank in cluster.launchers[name].ranks:
                cluster.launchers[name].kill(rank, 1, f"{TIMED_OUT} after {minute} minutes")
            cluster.thaw(name)

    def big() -> Cluster:
        return Cluster(spec(16, nproc=8), training=Training(100, cascade_s=None))

    cluster, state = tell(big, story)
    assert sizes(cluster) == [16, 16]
    assert (state.incidents.number, state.incidents.restarts, state.incidents.relaunches) == (1, 1, {})
    assert len(cluster.backend.launched) == 16


@pytest.mark.parametrize("what", ["log", "workers", "agent"])
def test_an_error_on_the_way_to_a_world(what: str) -> None:
    """In torchft an error in ``_run_quorum`` leaves sibling ranks waiting for ever: every wait here has a deadline."""
    began: list[float] = []

    async def story(cluster: Cluster) -> None:
        if what == "workers":
            cluster.launchers["worker-1-0"].unable = "no such interpreter"
        elif what == "agent":
            cluster.freeze("worker-1-0")
        cluster.kill_worker(0)
        if what == "log":
            # The record of the next world cannot be written.
            cluster.log.faults.unavailable = True
            await asyncio.sleep(30)
            cluster.log.faults.unavailable = False
        began.append(now())
        await cluster.until(lambda: cluster.state.world.worlds["worker"].generation > 1)
        done = cluster.training.done
        await step(cluster, done + 1)
        began.append(now())

    soon = spec(3, unreachable_s=60.0)
    tell(lambda: Cluster(soon, training=Training(50)), story)
    # An agent that hears nothing and says nothing is given up once ``unreachable_s`` is over, and a node booted in its place.
    assert began[1] - began[0] < (soon.silence_s + soon.unreachable_s + 10 if what == "agent" else 10)


@pytest.mark.parametrize("lands", [False, True], ids=["undecided", "decided"])
def test_dead_log_writer(*, lands: bool) -> None:
    """SIGKILL for the controller between deciding and acting, which every Python peer's job dies of: here it is acted on once."""
    script = Faults()

    async def story(cluster: Cluster) -> None:
        script.at_next(Stuck(lands))
        cluster.kill_node("worker-1-0")
        await cluster.until(lambda: bool(script.tripped))
        cluster.kill_master()
        cluster.start_master()

    cluster, state = tell(lambda: Cluster(spec(2), event_log=MemoryLog(CODEC, script)), story)
    assert cluster.backend.launched == ["worker-0-0", "worker-1-0", "worker-1-1"]
    assert (state.incidents.number, state.incidents.relaunches) == (1, {"worker-1": 1})


# ---- what it cost, and whose fault it was


def test_double_accounting() -> None:
    """maxtext#3235, an elastic restart writes the job's end: here it ends once, and time is counted once.

    A worker, a node and the master die; the classes of time sum to wall-clock time to the microsecond.
    """

    async def story(cluster: Cluster) -> None:
        cluster.kill_worker(1)
        await step(cluster, 20)
        cluster.kill_node("worker-1-0")
        await step(cluster, 40)
        cluster.kill_master()
        cluster.start_master()

    cluster, _ = tell(lambda: Cluster(spec(2), training=Training(60)), story)
    records = virtual_loop.run(cluster.records())
    told = report_of(records)
    ends = [one for one in records if isinstance(one.event, (job.JobSucceeded, job.JobFailed, job.JobStopped))]
    assert len(ends) == 1
    assert sum(told.goodput.by_class.values()) == told.goodput.wall_us == ends[0].at - told.created_at
    assert told.goodput.training_us <= 60 * us(0.1)
    for one, following in zip(told.timeline.segments, told.timeline.segments[1:], strict=False):
        assert one.end == following.begin


@pytest.mark.parametrize("times", [1, 10])
def test_node_flaps(times: int) -> None:
    """kueue#6514, a node is NotReady for 20 s and ready again: suspected, heard, and nothing is swapped."""

    async def story(cluster: Cluster) -> None:
        for _ in range(times):
            cluster.network.cut("worker-1-0", silent=True)
            await asyncio.sleep(20)
            cluster.network.heal("worker-1-0")
            await asyncio.sleep(10)

    cluster, state = tell(lambda: Cluster(spec(3), training=Training(4000)), story)
    assert len(facts(cluster, silence.NodeSuspected)) == len(facts(cluster, silence.NodeHeard)) == times
    assert cluster.backend.launched == ["worker-0-0", "worker-1-0", "worker-2-0"]
    assert (state.incidents.number, sizes(cluster)) == (0, [3])


@pytest.mark.parametrize("errors", [["loss is NaN at step 7"], ["loss is NaN at step 7", "Loss is nan: rank {}"]])
def test_global_nan(errors: Sequence[str]) -> None:
    """Ray, a bad batch lets all ranks fail alike: it is nobody's node, none is evicted, no host is avoided."""

    async def story(cluster: Cluster) -> None:
        for rank in range(8):
            cluster.kill_worker(rank, 1, f"FloatingPointError: {errors[rank % len(errors)].format(rank)}")

    cluster, state = tell(lambda: Cluster(spec(4, nproc=2)), story)
    (incident,) = state.incidents.by_number.values()
    assert incident.action == "RESTART_PROCESSES"
    assert len(cluster.backend.launched) == 4
    assert (state.hosts.hosts, state.incidents.relaunches, facts(cluster, nodes.NodeReleased)) == ({}, {}, [])


def test_global_nan_again_and_again() -> None:
    """Ray, the bad batch is there after every restart: the job fails with that very error."""

    async def story(cluster: Cluster) -> None:
        for restart in range(3):
            await step(cluster, 5 * (restart + 1))
            for launcher in cluster.launchers.values():
                for rank in launcher.ranks:
                    launcher.kill(rank, 1, "FloatingPointError: loss is NaN")
            await cluster.until(lambda: cluster.state.job.over or cluster.state.incidents.unmended("worker") is None)

    cluster, state = tell(lambda: Cluster(spec(2, nproc=2, max_restarts=2)), story, ends="failed")
    assert "FloatingPointError: loss is NaN" in state.job.root
    assert len(cluster.backend.launched) == 2
