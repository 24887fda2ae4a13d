"""Hosts that come and go for months: what one of them does is neither held against the others nor against itself for ever."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable

import pytest
from tests.chaos.hosts_cluster import HostsCluster

from dlrover_core.job import job, nodes
from dlrover_core.job.incidents import SERVED_S
from dlrover_core.job.state import JobState
from dlrover_core.logs.memory import MemoryLeadership
from dlrover_core.runtime.departures import RETURN_S
from dlrover_core.spec import GroupSpec, JobSpec
from dlrover_core.testing import virtual_loop
from dlrover_core.testing.invariants import check
from dlrover_core.testing.training import Training

Story = Callable[[HostsCluster], Awaitable[None]]
BASE = JobSpec("j", joining=True, silence_s=5.0)
# From a death that is known to the next step.
TAKE_OVER_S = 0.5


def tell(
    story: Story,
    hosts: str,
    fewest: int,
    most: int,
    *,
    starts: bool = True,
    step_s: float = 0.1,
    spec: JobSpec = BASE,
    **group: int,
) -> JobState:
    """Let a job that never ends by itself live through ``story``; the state then, every invariant kept."""
    spec = dataclasses.replace(spec, groups=(GroupSpec(nodes_min=fewest, nodes_max=most, **group),))

    async def told() -> JobState:
        async with HostsCluster(spec, hosts, training=Training(steps=10**9, step_s=step_s)) as cluster:
            if starts:
                await cluster.until(lambda: cluster.training.done >= 5)
            await story(cluster)
            assert cluster.state.job.live, cluster.state.job.root
            return await check(cluster)

    return virtual_loop.run(told())


def size(cluster: HostsCluster) -> int:
    """How many nodes train."""
    current = cluster.state.world.worlds.get("worker")
    return len(current.members) if current is not None and current.active else 0


async def next_step(cluster: HostsCluster, limit_s: float = 600.0) -> float:
    """Seconds until one more step is made."""
    began, done = asyncio.get_running_loop().time(), cluster.training.done
    await cluster.until(lambda: cluster.training.done > done, limit_s, 0.01)
    return asyncio.get_running_loop().time() - began


@pytest.mark.parametrize("fewest", [1, 2], ids=["MIN:MAX", "N"])
def test_weekly_reboots(fewest: int) -> None:
    """A host that reboots again and again, but serves an hour in between, is welcome every time: nothing adds up."""

    async def story(cluster: HostsCluster) -> None:
        for _ in range(3):
            await asyncio.sleep(SERVED_S + 60)
            cluster.kill_host("b")
            await asyncio.sleep(120)
            cluster.start_host("b")
            await cluster.until(lambda: size(cluster) == 2, 120, 0.1)

    # Beats are what an hour costs: few of them.
    state = tell(story, "ab", fewest, 2, step_s=10.0, spec=dataclasses.replace(BASE, heartbeat_s=10.0, silence_s=30.0))
    assert state.incidents.relaunches == {"worker-1": 1}


def test_crash_loop_is_still_bounded() -> None:
    """A host whose agent dies as soon as it has joined spends the budget of its place."""

    async def story(cluster: HostsCluster) -> None:
        for incarnation in range(4):
            await cluster.until(
                lambda name=f"worker-1-{incarnation}": cluster.hosts["b"].node == name and size(cluster) == 2
            )
            cluster.kill_agent("b")
        await cluster.until(lambda: cluster.state.nodes.slots["worker-1"].given_up)

    tell(story, "ab", 1, 2)


def test_given_up_place_is_open_again() -> None:
    """A place whose host died again and again is had by another one after a while; by scaling at once (`operations`)."""

    async def story(cluster: HostsCluster) -> None:
        for incarnation in range(2):
            await cluster.until(
                lambda name=f"worker-1-{incarnation}": cluster.hosts["b"].node == name and size(cluster) == 2
            )
            cluster.kill_agent("b")
        await cluster.until(lambda: cluster.state.nodes.slots["worker-1"].given_up)
        cluster.kill_host("b")
        cluster.host("c")
        await asyncio.sleep(SERVED_S - 60)
        assert size(cluster) == 1
        cluster.kill_master()
        cluster.start_master()
        await cluster.until(lambda: size(cluster) == 2, 120, 0.1)
        assert cluster.on("worker-1-2").name == "c"

    state = tell(story, "ab", 1, 2, step_s=5.0, relaunch_max=1)
    assert state.incidents.relaunches == {}


@pytest.mark.parametrize(("needed", "die"), [(1, 1), (2, 2), (3, 2)])
def test_most_die_while_standbys_wait(needed: int, die: int) -> None:
    """More than half die at once, the only one too: standbys take over as soon as no living agent would still be away."""

    async def story(cluster: HostsCluster) -> None:
        for host in [cluster.on(f"worker-{index}-0").name for index in range(die)]:
            cluster.kill_host(host)
        assert await next_step(cluster) <= BASE.gone_s + RETURN_S + TAKE_OVER_S

    assert tell(story, "abcdef"[: needed + die], needed, needed).incidents.number == 1


@pytest.mark.parametrize("hosts", ["a", "abc"])
@pytest.mark.parametrize("seconds", [4.0, 11.0, 40.0])
def test_nobody_can_reach_the_master_for_a_while(hosts: str, seconds: float) -> None:
    """Every connection is reset, standbys' too, and cannot be made for longer than an agent waits: nobody is taken for dead."""

    async def story(cluster: HostsCluster) -> None:
        cluster.network.cut(*hosts)
        await asyncio.sleep(seconds)
        cluster.network.heal()
        await asyncio.sleep(30)
        assert len(cluster.training.starts) == min(2, len(hosts))

    assert tell(story, hosts, min(2, len(hosts)), min(2, len(hosts))).incidents.number == 0


def test_the_only_host_dies_and_another_one_comes() -> None:
    """Nobody is left; whoever comes proves that master and network are well, and takes the place."""

    async def story(cluster: HostsCluster) -> None:
        cluster.kill_host("a")
        await asyncio.sleep(100)
        cluster.host("b")
        assert await next_step(cluster) <= cluster.boot_s + cluster.warm_s + 2 * RETURN_S + TAKE_OVER_S

    tell(story, "a", 1, 1)


def test_flapping_host_does_not_hold_up_the_first_world() -> None:
    """A host that joins and dies, for ever, sooner than the last call ends: the others begin without it."""

    async def story(cluster: HostsCluster) -> None:
        def joined() -> bool:
            node = cluster.state.nodes.nodes.get(cluster.hosts["b"].node)
            return node is not None and node.joined

        for _ in range(6):
            await cluster.until(joined, 60, 0.05)
            await asyncio.sleep(BASE.last_call_s / 2)
            cluster.kill_agent("b")
        assert cluster.training.done

    tell(story, "ab", 1, 3, starts=False, relaunch_max=1_000_000)


def test_named_agent_dies_before_the_master_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent with a name comes to the next master and dies while that one still waits for the log: its place is not lost."""
    announce = MemoryLeadership.announce

    async def slowly(lead: MemoryLeadership, address: str) -> None:
        await asyncio.sleep(10)
        await announce(lead, address)

    async def story(cluster: HostsCluster) -> None:
        cluster.warm_s = 3.0
        for host in "abc":
            cluster.host(host)
        await cluster.until(lambda: sum(bool(host.node) for host in cluster.hosts.values()) == 2, every_s=0.0001)
        cluster.kill_master()
        monkeypatch.setattr(MemoryLeadership, "announce", slowly)
        victim = cluster.on("worker-1-0").name
        cluster.start_master()
        await cluster.until(lambda: cluster.master.sessions.of("worker-1-0") is not None)
        assert cluster.state.nodes.nodes["worker-1-0"].state == "planned"
        cluster.kill_host(victim)
        assert await next_step(cluster) <= 20
        assert "worker-1-0" not in {
            record.event.node for record in await cluster.records() if isinstance(record.event, nodes.NodeJoined)
        }

    tell(story, "", 2, 2, starts=False)


@pytest.mark.parametrize("when", ["waiting", "suspended"])
def test_a_polite_leave_costs_nothing_while_nobody_trains(when: str) -> None:
    """A host whose launcher is told to go while it waits for others, or in a pause, is no failure, however often."""

    async def story(cluster: HostsCluster) -> None:
        if when == "suspended":
            cluster.host("b")
            await next_step(cluster)
            cluster.master.tell(job.SuspendJob("the night"))
            await cluster.until(lambda: not size(cluster))
        host = cluster.hosts["a"]
        for _ in range(9):
            await cluster.until(
                lambda: any(node.joined and node.host == "a" for node in cluster.state.nodes.nodes.values())
            )
            assert host.agent is not None
            host.agent.part("signal 2")
            await cluster.until(lambda: host.done)
            host.start()

    state = tell(story, "a", 2, 2, starts=False)
    assert (state.incidents.number, state.incidents.relaunches) == (0, {})
