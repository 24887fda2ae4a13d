"""Hosts that come by themselves: joining, waiting, dying, coming back, and hearing the end; told in virtual time."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest
from structlog.testing import capture_logs
from tests.chaos.hosts_cluster import HostsCluster
from tests.chaos.meeting_hosts import (
    ELASTIC,
    SPEC,
    TAKE_OVER_S,
    dial,
    facts,
    hear,
    members,
    members_ready,
    next_step,
    nothing,
    now,
    standby,
    step,
    tell,
)

from dlrover_core.job import nodes, silence, world
from dlrover_core.runtime import messages
from dlrover_core.runtime.departures import RETURN_S
from dlrover_core.runtime.ending import Ending
from dlrover_core.runtime.messages import Goodbye
from dlrover_core.spec import GroupSpec, JobSpec
from dlrover_core.testing import virtual_loop
from dlrover_core.testing.cluster import ADDRESS

# ---- joining


def test_hosts_join() -> None:
    """Two hosts come, get their names, train, and hear that the job has succeeded."""
    cluster, state = tell(nothing)
    assert sorted(cluster.training.starts) == [("worker-0-0", 1), ("worker-1-0", 1)]
    assert state.incidents.number == 0
    assert {host.ending for host in cluster.hosts.values()} == {"succeeded"}


def test_surplus_waits_and_hears_the_end() -> None:
    """Whoever is not needed waits, is no node, and leaves with the others, told how the job ended."""
    cluster, state = tell(nothing, ("a", "b", "c", "d"))
    assert len(facts(cluster, nodes.NodeJoined)) == 2
    assert {host.name: host.ending for host in cluster.hosts.values()} == dict.fromkeys("abcd", "succeeded")
    assert state.incidents.number == 0


def test_fewest_after_the_last_call() -> None:
    """MIN:MAX with MIN hosts there: the world forms when the last call is over, and not before."""

    async def story(cluster: HostsCluster) -> None:
        await cluster.until(lambda: len(cluster.state.nodes.nodes) == 3 and len(members_ready(cluster)) == 2)
        began = now()
        await step(cluster, 1)
        assert ELASTIC.last_call_s <= now() - began <= ELASTIC.last_call_s + 1

    tell(story, spec=ELASTIC, runs=False)


def test_late_host_grows_the_world() -> None:
    """A third host of MIN:MAX that comes late is taken into the running world at once: everybody is there then."""

    async def story(cluster: HostsCluster) -> None:
        cluster.host("c")
        await cluster.until(lambda: len(cluster.state.world.worlds["worker"].members) == 3, 10)

    cluster, _ = tell(story, spec=ELASTIC, steps=200)
    assert {node for node, _ in cluster.training.starts} == {"worker-0-0", "worker-1-0", "worker-2-0"}


def test_an_empty_place_has_no_deadline() -> None:
    """A place that no host has come for is nobody's failure, however long it stays empty."""
    cluster, state = tell(nothing, spec=dataclasses.replace(ELASTIC, launch_s=20.0), steps=600)
    assert state.nodes.nodes["worker-2-0"].state == "planned"
    assert facts(cluster, nodes.NodeLost) == []
    assert state.incidents.number == 0


def test_places_are_node_ranks() -> None:
    """Hosts that ask for places get them, whoever comes first: node ranks are the places."""

    async def story(cluster: HostsCluster) -> None:
        for host, place in (("late", 2), ("first", 0), ("middle", 1)):
            cluster.host(host, place=place)
            await cluster.until(lambda host=host: bool(cluster.hosts[host].node))
        await step(cluster, 1)
        assert members(cluster) == ["first", "middle", "late"]
        cluster.kill_agent("first")
        await next_step(cluster)
        assert members(cluster) == ["first", "middle", "late"], "the place is kept for its host"

    tell(story, (), spec=JobSpec("j", (GroupSpec(nodes_min=3, nodes_max=3),), joining=True), runs=False)


def test_a_place_waits_for_its_host() -> None:
    """A standby that asks for a place takes no other, and an unplaced one fills what is free."""

    async def story(cluster: HostsCluster) -> None:
        cluster.host("one", place=1)
        await cluster.until(lambda: cluster.hosts["one"].node == "worker-1-0")
        cluster.host("also one", place=1)
        await cluster.until(lambda: cluster.standbys == ["also one"])
        cluster.host("any")
        await cluster.until(lambda: cluster.hosts["any"].node == "worker-0-0")

    tell(story, (), runs=False)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"nproc": 3}, "host c offers 3 workers and this job runs 2 (worker) on each node"),
        ({"place": 2}, "host c asks for place 2 and this job has places 0 to 1"),
    ],
    ids=["nproc", "place"],
)
def test_useless_standby(changes: dict[str, int], says: str) -> None:
    """A host that could never be a node of this job is told so, and what to do, and its launcher gives up."""

    async def story(cluster: HostsCluster) -> None:
        host = cluster.host("c", **changes)
        await cluster.until(lambda: host.done)
        assert host.ending == ""
        assert says in host.endings[-1].reason

    tell(story)


def test_standby_of_a_launched_job() -> None:
    """A job whose nodes are launched has no use for agents without a node, and says so."""

    async def told() -> None:
        from dlrover_core.testing.cluster import Cluster

        async with Cluster(JobSpec("j", (GroupSpec(),))) as cluster:
            await cluster.until(lambda: cluster.training.done >= 1)
            connection = cluster.network.connect("c", ADDRESS)
            await connection.send(messages.encode(standby("c", nproc=1)))
            goodbye = messages.decode(await connection.receive())
            assert isinstance(goodbye, Goodbye)
            assert goodbye.leave
            assert "launched by its scheduler" in goodbye.reason
            await cluster.outcome()

    virtual_loop.run(told())


def test_too_few_come() -> None:
    """Without enough hosts within the time for joining the job fails, and says who is there and what is missing."""

    async def story(cluster: HostsCluster) -> None:
        began = now()
        outcome = await cluster.outcome()
        assert SPEC.launch_s <= now() - began <= SPEC.launch_s + 10
        assert outcome.root.startswith("only 1 of 2 nodes joined within 900 s: worker-0-0 on a came; 1 more host")

    cluster, _ = tell(story, ("a",), ends="failed", runs=False)
    assert cluster.hosts["a"].endings == [
        Ending("failed", "the job is failed", cluster.state.job.root),
    ]


def test_nobody_comes() -> None:
    """A job that nobody joins fails in time too."""
    _cluster, state = tell(nothing, (), ends="failed", runs=False)
    assert "nobody came; 2 more hosts must run dlrover-run" in state.job.root


# ---- deaths


def test_standby_takes_over() -> None:
    """A node is killed while a standby waits: from death to next step takes what the kernel's word needs, and a start."""

    async def story(cluster: HostsCluster) -> None:
        victim = cluster.on("worker-1-0").name
        (warm,) = cluster.standbys
        cluster.kill_agent(victim)
        assert await next_step(cluster) <= SPEC.gone_s + TAKE_OVER_S
        assert cluster.on("worker-1-1").name == warm
        await cluster.until(lambda: cluster.standbys == [victim])

    _, state = tell(story, ("a", "b", "c"))
    assert state.incidents.relaunches == {"worker-1": 1}


def test_no_standby_waits() -> None:
    """Without a standby the next agent to come takes the place the moment it dials, not when somebody looks again."""

    async def story(cluster: HostsCluster) -> None:
        cluster.kill_agent(cluster.on("worker-1-0").name)
        took = await next_step(cluster)
        assert took <= cluster.boot_s + cluster.warm_s + TAKE_OVER_S
        # Longer than any pause between two asks of a leveller.
        cluster.kill_host(cluster.on("worker-1-1").name)
        await asyncio.sleep(100)
        cluster.host("fresh")
        assert await next_step(cluster) <= cluster.boot_s + cluster.warm_s + TAKE_OVER_S

    tell(story)


def test_host_killed_and_back() -> None:
    """A whole host is killed and comes back in its seat: its node is known to be dead, and it is the successor."""

    async def story(cluster: HostsCluster) -> None:
        victim = cluster.on("worker-1-0").name
        cluster.kill_host(victim)
        await asyncio.sleep(30)
        cluster.start_host(victim)
        assert await next_step(cluster) <= cluster.boot_s + cluster.warm_s + TAKE_OVER_S
        assert cluster.on("worker-1-1").name == victim

    tell(story)


def test_power_cut_and_back() -> None:
    """A host loses power: no kernel says a word. When it is back, its seat proves the first agent dead, at once."""

    async def story(cluster: HostsCluster) -> None:
        victim = cluster.on("worker-1-0").name
        cluster.kill_host(victim, told=False)
        await asyncio.sleep(20)
        assert cluster.state.nodes.nodes["worker-1-0"].state == "suspect"
        cluster.start_host(victim)
        assert await next_step(cluster) <= cluster.boot_s + cluster.warm_s + TAKE_OVER_S

    cluster, _ = tell(story)
    assert facts(cluster, nodes.NodeLost) == []
    assert next(fact.reason for fact in facts(cluster, nodes.NodeGone)) == "another agent sits in its seat on b"


def test_standby_dies_while_it_is_named() -> None:
    """A standby that dies before it has taken its name: the next one gets the node at once, and nothing is charged."""

    async def story(cluster: HostsCluster) -> None:
        await cluster.until(lambda: len(cluster.standbys) == 1)
        cluster.freeze("c")
        cluster.kill_host(cluster.on("worker-1-0").name)
        await cluster.until(lambda: "worker-1-1" in cluster.state.nodes.nodes)
        cluster.host("d")
        await cluster.until(lambda: cluster.standbys[-1:] == ["d"])
        cluster.hosts["c"].kill()
        assert await next_step(cluster) <= TAKE_OVER_S + cluster.warm_s
        assert cluster.on("worker-1-1").name == "d"

    _, state = tell(story, ("a", "b", "c"))
    assert state.incidents.relaunches == {"worker-1": 1}


def test_stopped_standby_does_not_hold_a_node() -> None:
    """A standby that is told its name and says nothing loses it: the next one gets the node."""

    async def story(cluster: HostsCluster) -> None:
        await cluster.until(lambda: len(cluster.standbys) == 1)
        cluster.freeze("c")
        cluster.kill_host(cluster.on("worker-1-0").name)
        await cluster.until(lambda: "worker-1-1" in cluster.state.nodes.nodes)
        cluster.host("d")
        assert await next_step(cluster) <= 15
        assert cluster.on("worker-1-1").name == "d"
        cluster.thaw("c")
        await cluster.until(lambda: "c" in cluster.standbys)

    tell(story, ("a", "b", "c"), steps=300)


def test_freshest_standby_first() -> None:
    """Of two standbys the one that was heard lately is taken, though the silent one has waited longer."""

    async def story(cluster: HostsCluster) -> None:
        cluster.host("d")
        await cluster.until(lambda: cluster.standbys == ["c", "d"])
        cluster.network.cut("c", silent=True)
        await asyncio.sleep(4)
        cluster.kill_agent(cluster.on("worker-1-0").name)
        assert await next_step(cluster) <= SPEC.gone_s + TAKE_OVER_S
        assert cluster.on("worker-1-1").name == "d"
        cluster.network.heal()

    tell(story, ("a", "b", "c"), steps=300)


def test_everybody_dies() -> None:
    """All agents die at once: no network was it, and everybody's successor joins."""

    async def story(cluster: HostsCluster) -> None:
        cluster.kill_agent("a")
        cluster.kill_agent("b")
        assert await next_step(cluster) <= RETURN_S + cluster.boot_s + cluster.warm_s + TAKE_OVER_S

    _, state = tell(story)
    assert state.incidents.number == 1


def test_reset_of_everybody() -> None:
    """Every connection is reset and cannot be made again for a moment: that is a network, and costs nobody anything."""

    async def story(cluster: HostsCluster) -> None:
        cluster.network.cut("a", "b", "c")
        await asyncio.sleep(1)
        cluster.network.heal()
        await step(cluster, 50)

    cluster, state = tell(story, ("a", "b", "c"))
    assert len(cluster.training.starts) == 2
    assert state.incidents.number == 0


def test_reset_of_one() -> None:
    """One connection is reset and made again at once, as a living agent does: nothing happened."""

    async def story(cluster: HostsCluster) -> None:
        cluster.network.cut("a")
        cluster.network.heal()
        await step(cluster, 50)

    cluster, _ = tell(story)
    assert len(cluster.training.starts) == 2
    assert facts(cluster, nodes.NodeGone)[0].expected


def test_relaunches_run_out() -> None:
    """Hosts whose agents die again and again end the job, not the world."""

    async def story(cluster: HostsCluster) -> None:
        for incarnation in range(4):
            await cluster.until(lambda name=f"worker-1-{incarnation}": name in members_ready(cluster))
            cluster.kill_agent(cluster.on(f"worker-1-{incarnation}").name)

    cluster, state = tell(story, ends="failed")
    assert state.incidents.relaunches == {"worker-1": 3}
    told = [ending for host in cluster.hosts.values() for ending in host.endings if ending.outcome == "failed"]
    assert [ending.root for ending in told] == [state.job.root]


# ---- silence


def test_partition() -> None:
    """A cut cable is silence: no replacement before ``unreachable_s``, though a standby waits; then the standby takes over."""

    async def story(cluster: HostsCluster) -> None:
        victim = cluster.on("worker-1-0").name
        began = now()
        cluster.network.cut(victim, silent=True)
        await cluster.until(lambda: "worker-1-1" in cluster.state.nodes.nodes)
        assert SPEC.unreachable_s <= now() - began <= SPEC.unreachable_s + SPEC.silence_s + 3
        await next_step(cluster)
        cluster.network.heal()
        await cluster.until(lambda: cluster.standbys == [victim])
        assert [ending.outcome for ending in cluster.hosts[victim].endings] == ["lost"]

    cluster, _ = tell(story, ("a", "b", "c"), steps=1500)
    assert [fact.node for fact in facts(cluster, nodes.NodeLost)] == ["worker-1-0"]


def test_short_partition() -> None:
    """Silence that ends in time costs nothing."""

    async def story(cluster: HostsCluster) -> None:
        cluster.network.cut("b", silent=True)
        await asyncio.sleep(30)
        cluster.network.heal()
        await cluster.until(lambda: cluster.state.nodes.nodes["worker-1-0"].state == "running")

    cluster, state = tell(story, ("a", "b", "c"), steps=600)
    assert len(cluster.training.starts) == 2
    assert state.incidents.number == 0
    assert len(facts(cluster, silence.NodeHeard)) == 1


# ---- versions


@pytest.mark.parametrize("version", [0, messages.VERSION + 1])
def test_foreign_version(version: int) -> None:
    """An agent of a protocol that is not served hears what to install; the log has one line about it."""

    async def story(cluster: HostsCluster) -> None:
        with capture_logs() as lines:
            connection = await dial(cluster, standby("x", version=version))
            goodbye = await hear(connection)
        assert isinstance(goodbye, Goodbye)
        assert goodbye.leave
        assert (
            f"protocol {version} is not served here: 4 to {messages.VERSION} are; install dlrover-core"
            in goodbye.reason
        )
        assert len([line for line in lines if line["log_level"] == "warning"]) == 1

    tell(story)


def test_worlds_are_of_those_who_are_there() -> None:
    """After all of that: a world never names a node that is gone."""
    cluster, _ = tell(nothing, ("a", "b", "c"))
    assert len(facts(cluster, world.WorldFormed)) == 1
