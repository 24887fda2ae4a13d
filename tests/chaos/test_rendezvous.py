"""Hosts that come by themselves: joining, waiting, dying, coming back, and hearing the end; told in virtual time."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from structlog.testing import capture_logs
from tests.chaos.hosts_cluster import HostsCluster

from dlrover_core.errors import ConnectionLost
from dlrover_core.job import job, nodes, silence, world
from dlrover_core.job.operations import DrainNode, ScaleGroup
from dlrover_core.job.plans import NodeDrained
from dlrover_core.job.state import JobState
from dlrover_core.runtime import messages
from dlrover_core.runtime.departures import RETURN_S
from dlrover_core.runtime.ending import Ending
from dlrover_core.runtime.messages import Assigned, Goodbye, Hello, Welcome
from dlrover_core.spec import GroupSpec, JobSpec
from dlrover_core.testing import virtual_loop
from dlrover_core.testing.cluster import ADDRESS
from dlrover_core.testing.invariants import check, check_steps
from dlrover_core.testing.network import MemoryConnection
from dlrover_core.testing.training import Training

SPEC = JobSpec(
    "j",
    (GroupSpec(nodes_min=2, nodes_max=2, nproc=2),),
    joining=True,
    silence_s=5.0,
    unreachable_s=60.0,
    mass_silence_s=60.0,
)
ELASTIC = JobSpec("j", (GroupSpec(nodes_min=2, nodes_max=3),), joining=True, last_call_s=10.0, grow_window_s=5.0)
# From a death, or a wish, to workers: names, joining, a world, a start, a step.
TAKE_OVER_S = 0.2
LIVES = frozenset({"died", "replaced", "lost", "left"})


def tell(
    story: Callable[[HostsCluster], Awaitable[None]],
    hosts: tuple[str, ...] = ("a", "b"),
    *,
    spec: JobSpec = SPEC,
    steps: int = 100,
    ends: str = "succeeded",
    runs: bool = True,
    boot_s: float = 2.0,
) -> tuple[HostsCluster, JobState]:
    """Let a joining job suffer ``story``; every step once, every invariant kept, and every host heard how it ended."""

    async def told() -> tuple[HostsCluster, JobState]:
        async with HostsCluster(spec, hosts, training=Training(steps=steps), boot_s=boot_s) as cluster:
            if runs:
                await step(cluster, 5)
            await story(cluster)
            outcome = await cluster.outcome()
            assert outcome.state == ends, outcome
            await cluster.settled()
            assert [host.name for host in cluster.hosts.values() if not host.dead and host.ending in LIVES] == []
            if ends == "succeeded":
                check_steps(cluster)
                assert cluster.training.done == cluster.training.steps
            return cluster, await check(cluster)

    return virtual_loop.run(told())


def step(cluster: HostsCluster, number: int) -> Awaitable[None]:
    """Until this step is made."""
    return cluster.until(lambda: cluster.training.done >= number)


async def next_step(cluster: HostsCluster) -> float:
    """Seconds until one more step is made."""
    began, done = now(), cluster.training.done
    await step(cluster, done + 1)
    return now() - began


def now() -> float:
    """Virtual seconds."""
    return asyncio.get_running_loop().time()


def facts(cluster: HostsCluster, kind: type) -> list[Any]:
    """The events of a kind in the log, in order."""

    async def found() -> list[object]:
        return [record.event for record in await cluster.records() if isinstance(record.event, kind)]

    return virtual_loop.run(found())


def members(cluster: HostsCluster) -> list[str]:
    """The hosts of the newest world, in rank order."""
    current = cluster.state.world.worlds["worker"]
    return [cluster.state.nodes.nodes[member.node].host for member in current.members]


async def nothing(_: HostsCluster) -> None:
    """An undisturbed story."""


async def dial(cluster: HostsCluster, hello: Hello) -> MemoryConnection:
    """A connection of somebody whose every word is the test's."""
    connection = cluster.network.connect(hello.host or "elsewhere", ADDRESS)
    await connection.send(messages.encode(hello))
    return connection


def standby(host: str, boot: int = 77, **more: Any) -> Hello:
    """A standby's greeting."""
    return Hello(messages.VERSION, "", "", boot, 0, 0, host, 2, "0")._replace(**more)


async def hear(connection: MemoryConnection) -> messages.Message:
    """The master's next word."""
    return messages.decode(await asyncio.wait_for(connection.receive(), 60))


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


def members_ready(cluster: HostsCluster) -> list[str]:
    """The nodes that have joined."""
    return [node.node for node in cluster.state.nodes.nodes.values() if node.joined]


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
