"""Hosts that come by themselves, and the masters that lead them: take-overs, who becomes what, and people who ask for changes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.chaos.hosts_cluster import HostsCluster
from tests.chaos.meeting_hosts import (
    SPEC,
    TAKE_OVER_S,
    dial,
    facts,
    hear,
    members_ready,
    next_step,
    standby,
    step,
    tell,
)

from dlrover_core.errors import ConnectionLost
from dlrover_core.job import job, nodes, world
from dlrover_core.job.operations import DrainNode, ScaleGroup
from dlrover_core.job.plans import NodeDrained
from dlrover_core.runtime import messages
from dlrover_core.runtime.departures import RETURN_S
from dlrover_core.runtime.ending import Ending
from dlrover_core.runtime.messages import Assigned, Goodbye, Welcome

# ---- masters


@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
def test_killed_master(*, warm: bool) -> None:
    """A killed master costs nothing: nobody restarts, and the standbys wait at the next one."""

    async def story(cluster: HostsCluster) -> None:
        if warm:
            cluster.start_master()
        await cluster.until(lambda: bool(cluster.masters[0].sessions.standbys))
        cluster.kill_leader()
        if not warm:
            cluster.start_master()
        await cluster.until(lambda: cluster.standbys == ["c"], 3)
        cluster.kill_agent(cluster.on("worker-1-0").name)
        assert await next_step(cluster) <= SPEC.gone_s + TAKE_OVER_S

    cluster, state = tell(story, ("a", "b", "c"))
    assert len({node for node, generation in cluster.training.starts if generation == 1}) == 2
    assert state.incidents.relaunches == {"worker-1": 1}


def test_master_of_a_restarted_host() -> None:
    """The master's host restarts with a node on it: the next master serves the live run, whatever it is called.

    The dead node is known by its seat as soon as the host's agent is back.
    """

    async def story(cluster: HostsCluster) -> None:
        cluster.kill_master()
        cluster.kill_host("a")
        await asyncio.sleep(5)
        cluster.run = ""
        cluster.start_master()
        cluster.start_host("a")
        assert await next_step(cluster) <= cluster.boot_s + cluster.warm_s + RETURN_S + TAKE_OVER_S

    cluster, state = tell(story)
    assert state.job.run == "run-1"
    assert facts(cluster, nodes.NodeLost) == []
    assert [ending.outcome for ending in cluster.hosts["b"].endings] == ["succeeded"]


def test_node_dies_while_no_master() -> None:
    """A node that died unseen, and whose host does not come back, is silent to the next master; a standby takes over in time."""

    async def story(cluster: HostsCluster) -> None:
        cluster.kill_master()
        cluster.kill_host("b")
        await asyncio.sleep(5)
        cluster.start_master()
        await cluster.until(lambda: "worker-1-1" in cluster.state.nodes.nodes)
        await next_step(cluster)

    cluster, _ = tell(story, ("a", "b", "c"), steps=300)
    assert [fact.node for fact in facts(cluster, nodes.NodeLost)] == ["worker-1-0"]


def test_master_dies_between_name_and_joining() -> None:
    """Agents that were named and are still warming up when the master dies join the next one under their names."""

    async def story(cluster: HostsCluster) -> None:
        cluster.warm_s = 10.0
        cluster.host("a")
        cluster.host("b")
        cluster.host("c")
        await cluster.until(lambda: sum(bool(host.node) for host in cluster.hosts.values()) == 2)
        cluster.kill_master()
        cluster.start_master()
        await step(cluster, 5)

    cluster, state = tell(story, (), runs=False)
    assert sorted(cluster.training.starts) == [("worker-0-0", 1), ("worker-1-0", 1)]
    assert state.incidents.number == 0


def test_stopped_master() -> None:
    """A master stopped between a reset and the agent's return does not take its own absence for a death."""

    async def story(cluster: HostsCluster) -> None:
        cluster.network.cut("a")
        await asyncio.sleep(SPEC.gone_s / 2)
        cluster.freeze("master-0")
        cluster.network.heal()
        await asyncio.sleep(3)
        cluster.thaw("master-0")
        await step(cluster, 80)

    cluster, state = tell(story, ("a", "b", "c"))
    assert len(cluster.training.starts) == 2
    assert state.incidents.number == 0


def test_named_agent_dies_with_its_master() -> None:
    """An agent that dies with its master before it has joined: its name is given up, and the next one goes to a standby."""

    async def story(cluster: HostsCluster) -> None:
        cluster.warm_s = 10.0
        for host in ("a", "b", "c"):
            cluster.host(host)
        await cluster.until(lambda: sum(bool(host.node) for host in cluster.hosts.values()) == 2)
        await cluster.until(lambda: cluster.state.nodes.nodes["worker-1-0"].state == "pending")
        cluster.kill_host(cluster.on("worker-1-0").name)
        cluster.kill_master()
        cluster.start_master()
        await cluster.until(lambda: "worker-1-1" in cluster.state.nodes.nodes, RETURN_S + 1)
        await step(cluster, 5)

    tell(story, (), runs=False)


def test_next_run_of_the_same_name() -> None:
    """The whole job is started again under its name while agents of the last run still live: they go, and come back fresh."""

    async def story(cluster: HostsCluster) -> None:
        cluster.kill_master()
        cluster.training.done = 0
        cluster.training.log.clear()
        cluster.run = "run-2"
        cluster.start_master()
        await step(cluster, 5)

    cluster, state = tell(story)
    assert state.job.run == "run-2"
    assert [[ending.outcome for ending in host.endings] for host in cluster.hosts.values()] == [
        ["lost", "succeeded"]
    ] * 2


# ---- who becomes what, word by word


def test_one_connection_for_life() -> None:
    """A standby is greeted, named, and greeted again under its name, all on one connection."""

    async def story(cluster: HostsCluster) -> None:
        await cluster.master.led.wait()
        connection = await dial(cluster, standby("a"))
        assert isinstance(await hear(connection), Welcome)
        assigned = await hear(connection)
        assert assigned == Assigned(1, "worker-0-0")
        await connection.send(messages.encode(standby("a", node="worker-0-0", run="run-1")))
        assert isinstance(await hear(connection), Welcome)
        await cluster.until(lambda: cluster.state.nodes.nodes["worker-0-0"].state == "pending")
        await connection.close()
        for host in ("a", "b"):
            cluster.host(host)

    tell(story, (), runs=False)


@pytest.mark.parametrize(
    "second",
    [{"node": "worker-1-0"}, {"node": ""}, {"node": "worker-9-0"}, {"node": "worker-0-0", "boot": 78}],
    ids=["another's", "none", "stranger", "boot"],
)
def test_second_greeting_must_be_right(second: dict[str, Any]) -> None:
    """A standby that takes another's name, none, or one that is no node loses its connection; nobody else notices."""

    async def story(cluster: HostsCluster) -> None:
        await cluster.until(lambda: len(members_ready(cluster)) == 2)
        connection = await dial(cluster, standby("x"))
        assert isinstance(await hear(connection), Welcome)
        await connection.send(messages.encode(standby("x", run="run-1")._replace(**second)))
        with pytest.raises(ConnectionLost):  # noqa: PT012  # whatever is said before it does not matter
            while True:
                await hear(connection)
        assert len(cluster.master.sessions) == 2

    tell(story, runs=False)


def test_promise_is_kept_over_a_reconnection() -> None:
    """A standby that comes back on another connection before it heard its name hears it again; nobody else gets it."""

    async def story(cluster: HostsCluster) -> None:
        await cluster.master.led.wait()
        first = await dial(cluster, standby("a"))
        await hear(first)
        second = await dial(cluster, standby("a"))
        assert isinstance(await hear(second), Welcome)
        assert await asyncio.wait_for(hear(second), 1.0) == Assigned(1, "worker-0-0")
        first.drop()
        await asyncio.sleep(1)
        assert set(cluster.master._leveller._backend._promises) == {"worker-0-0"}  # type: ignore[union-attr]
        second.drop()
        for host in ("a", "b"):
            cluster.host(host)

    tell(story, (), runs=False)


def test_a_name_is_one_agents() -> None:
    """Another process that claims the name of an agent that is still warming up is told that its identity is over."""

    async def story(cluster: HostsCluster) -> None:
        cluster.warm_s = 5.0
        cluster.host("a")
        await cluster.until(lambda: cluster.hosts["a"].node == "worker-0-0")
        await cluster.until(lambda: cluster.state.nodes.nodes["worker-0-0"].state == "pending")
        rival = await dial(cluster, standby("x", node="worker-0-0", run="run-1"))
        assert await hear(rival) == Goodbye("worker-0-0 is another agent's by now", leave=True, outcome="lost")
        cluster.host("b")

    tell(story, (), runs=False)


def test_two_agents_in_one_seat() -> None:
    """A second standby in a seat ends the first one's connection: two cannot live there."""

    async def story(cluster: HostsCluster) -> None:
        first = await dial(cluster, standby("x", 77))
        second = await dial(cluster, standby("x", 78))
        assert isinstance(await hear(second), Welcome)
        await asyncio.sleep(1)
        assert [one.boot for one in cluster.master.sessions.standbys.values() if one.hello.host == "x"] == [78]
        assert first.closed
        second.drop()

    tell(story)


def test_avoided_host_comes_last() -> None:
    """A host in quarantine is taken only when nobody else has come for as long as the last call lasts."""

    async def story(cluster: HostsCluster) -> None:
        victim = cluster.on("worker-1-0").name
        cluster.hosts[victim].agent._outbox.add(nodes.ReportFault("worker-1-0", "hardware: GPU 3 fell off the bus"))  # type: ignore[union-attr]
        assert SPEC.last_call_s <= await next_step(cluster) <= SPEC.last_call_s + 5
        assert cluster.on("worker-1-1").name == victim
        cluster.hosts[victim].agent._outbox.add(nodes.ReportFault("worker-1-1", "hardware: GPU 3 fell off the bus"))  # type: ignore[union-attr]
        await asyncio.sleep(5)
        cluster.host("healthy")
        await next_step(cluster)
        assert cluster.on("worker-1-2").name == "healthy"

    tell(story)


# ---- people


@pytest.mark.parametrize("when", ["before", "running"])
def test_stopped(when: str) -> None:
    """A stopped job says so to everybody, waiting standbys and hosts that come now too."""

    async def story(cluster: HostsCluster) -> None:
        if when == "running":
            await step(cluster, 5)
        else:
            await cluster.until(lambda: len(cluster.master.sessions) == 1)
        cluster.master.tell(job.StopJob("enough"))

    hosts = ("a", "b", "c") if when == "running" else ("a",)
    cluster, _ = tell(story, hosts, ends="stopped", runs=False)
    assert {host.ending for host in cluster.hosts.values()} == {"stopped"}


def test_too_late_for_a_stopping_job() -> None:
    """A host that comes while the job is being stopped is told so at once."""

    async def story(cluster: HostsCluster) -> None:
        for host in cluster.hosts.values():
            assert host.launcher is not None
            host.launcher.patience_s = 20.0
        cluster.master.tell(job.StopJob("enough"))
        late = cluster.host("late")
        await cluster.until(lambda: late.done, 5)
        assert late.endings == [Ending("stopped", "the job is stopping")]

    tell(story, ends="stopped")


def test_host_without_workers() -> None:
    """A host on which no worker can be started is replaced by the standby; its next agent waits behind the others."""

    async def story(cluster: HostsCluster) -> None:
        bad = cluster.on("worker-1-0")
        assert bad.launcher is not None
        bad.launcher.unable = "no GPU is left"
        cluster.kill_agent(cluster.on("worker-0-0").name)
        await cluster.until(lambda: bad.ending == "replaced")
        await next_step(cluster)
        await cluster.until(lambda: bad.name in cluster.standbys)

    tell(story, ("a", "b", "c", "d"), steps=200)


def test_suspended_and_resumed() -> None:
    """A suspended job keeps its nodes and its standbys; resumed, it goes on where it was, however long that took."""

    async def story(cluster: HostsCluster) -> None:
        cluster.master.tell(job.SuspendJob("the cluster is needed"))
        await cluster.until(lambda: not cluster.state.world.worlds["worker"].active)
        done = cluster.training.done
        await asyncio.sleep(2 * SPEC.launch_s)
        assert cluster.training.done == done
        cluster.master.tell(job.ResumeJob("it is ours again"))
        assert await next_step(cluster) <= 1.0

    cluster, state = tell(story, ("a", "b", "c"))
    assert state.incidents.number == 0
    assert len(facts(cluster, nodes.NodeJoined)) == 2


def test_drained() -> None:
    """A drained node's host is told so and done; the standby takes its place with no failure on record."""

    async def story(cluster: HostsCluster) -> None:
        victim = cluster.on("worker-1-0").name
        cluster.master.tell(DrainNode("worker-1-0", "maintenance"))
        assert await next_step(cluster) <= 5
        assert cluster.on("worker-1-1").name == "c"
        await cluster.until(lambda: cluster.hosts[victim].done)
        assert cluster.hosts[victim].ending == "drained"

    _, state = tell(story, ("a", "b", "c"))
    assert state.incidents.number == 0


def test_a_host_parts() -> None:
    """A host that is told to go (its launcher's Ctrl-C) asks to be drained: all workers get their grace, nothing failed."""

    async def story(cluster: HostsCluster) -> None:
        parting = cluster.on("worker-1-0")
        assert parting.agent is not None
        parting.agent.part("Ctrl-C")
        assert await next_step(cluster) <= 5
        assert cluster.on("worker-1-1").name == "c"
        await cluster.until(lambda: parting.done)
        assert parting.endings[-1] == Ending("", "Ctrl-C")

    cluster, state = tell(story, ("a", "b", "c"))
    assert state.incidents.number == 0
    assert [(fact.node, fact.reason) for fact in facts(cluster, NodeDrained)] == [("worker-1-0", "Ctrl-C")]
    assert all(fact.planned for fact in facts(cluster, world.WorldDissolved))
    assert state.incidents.relaunches == {}


def test_a_host_that_parted_comes_back() -> None:
    """Nobody wanted its host free: started again, it is as good as any other, at once."""

    async def story(cluster: HostsCluster) -> None:
        parting = cluster.on("worker-1-0")
        assert parting.agent is not None
        parting.agent.part("Ctrl-C")
        await cluster.until(lambda: parting.done)
        cluster.start_host(parting.name)
        assert await next_step(cluster) <= cluster.boot_s + 1

    _, state = tell(story)
    assert state.incidents.number == 0


@pytest.mark.parametrize("how", ["no master", "silent master", "refused"])
def test_a_host_parts_whatever_the_answer(how: str) -> None:
    """Where nobody can drain it, or will, a host that is told to go goes all the same, soon."""

    async def story(cluster: HostsCluster) -> None:
        parting = cluster.on("worker-1-0")
        assert parting.agent is not None
        if how == "no master":
            cluster.kill_master()
        elif how == "silent master":
            cluster.network.cut(parting.name, silent=True)
        else:
            cluster.master.tell(job.StopJob("enough"))
        parting.agent.part("Ctrl-C")
        parting.agent.part("Ctrl-C again")
        await cluster.until(lambda: parting.done, 40)
        if how == "no master":
            cluster.start_master()
        elif how == "silent master":
            cluster.network.heal(parting.name)

    tell(story, ("a", "b", "c"), steps=300, ends="stopped" if how == "refused" else "succeeded")


def test_scaled() -> None:
    """Scaled up, a standby joins; scaled down, the host of the last place is told so and is done."""

    async def story(cluster: HostsCluster) -> None:
        cluster.master.tell(ScaleGroup("worker", 2, 3, "more"))
        await cluster.until(lambda: len(cluster.state.world.worlds["worker"].members) == 3, 10)
        cluster.master.tell(ScaleGroup("worker", 2, 2, "fewer"))
        await cluster.until(lambda: len(cluster.state.world.worlds["worker"].members) == 2, 10)
        await cluster.until(lambda: cluster.hosts["c"].done)
        assert cluster.hosts["c"].ending == "scaled down"

    tell(story, ("a", "b", "c"), steps=300)
