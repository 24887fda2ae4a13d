"""Masters that do not surely lead, in virtual time: logs that fail, leases that run out, and zombies."""

from __future__ import annotations

import asyncio

import pytest
from structlog.testing import capture_logs
from tests.chaos.hosts_cluster import HostsCluster
from tests.chaos.standing_by import HELLO, dial, led_by, step, tell, untouched, vanish

from dlrover_core.runtime import messages
from dlrover_core.runtime.agent import Agent
from dlrover_core.runtime.master import Master
from dlrover_core.runtime.messages import Goodbye, Hello
from dlrover_core.runtime.sessions import Session
from dlrover_core.spec import GroupSpec, JobSpec
from dlrover_core.testing import virtual_loop
from dlrover_core.testing.cluster import ADDRESSES, Cluster
from dlrover_core.testing.invariants import check_steps
from dlrover_core.testing.network import MemoryConnection


@pytest.mark.parametrize("fault", ["unavailable", "full"])
def test_degraded_without_a_decision(fault: str) -> None:
    """Though nothing is to be decided the leader notices, says since when and why, once, and says when it is over."""
    since = 0

    async def story(cluster: Cluster) -> None:
        nonlocal since
        await step(cluster, 20)
        leader = cluster.leader
        with capture_logs() as lines:
            began = leader.now()
            setattr(cluster.log.faults, fault, True)
            assert leader._pipeline is not None
            # Not by its status, which looks for itself.
            await cluster.until(lambda: leader._pipeline.degraded != "", 1.5)
            told = leader.status()
            assert {"full": "LogFull", "unavailable": "LogUnavailable"}[fault] in told["degraded"]
            assert began <= told["degraded_since"] <= leader.now()
            assert told["role"] == "leader"
            await step(cluster, 50)
            assert leader.status()["degraded_since"] == told["degraded_since"]
            setattr(cluster.log.faults, fault, False)
            await cluster.until(lambda: leader.status()["degraded"] == "", 1.5)
            assert leader.status()["degraded_since"] == 0
        events = [line["event"] for line in lines]
        assert (events.count("control plane degraded"), events.count("control plane back")) == (1, 1)

    untouched(*tell(story, standbys=0))


@pytest.mark.parametrize("fault", ["unavailable", "full"])
def test_decisions_resume(fault: str) -> None:
    """With the log away or full a death waits for its decision, and gets it when the log is back."""

    async def story(cluster: Cluster) -> None:
        await step(cluster, 20)
        setattr(cluster.log.faults, fault, True)
        cluster.kill_worker(3)
        await asyncio.sleep(20)
        assert cluster.training.done == 20
        assert {generation for _, generation in cluster.training.starts} == {1}
        setattr(cluster.log.faults, fault, False)
        await cluster.until(lambda: cluster.training.done > 20, 4.0)
        assert cluster.leader.status()["degraded"] == ""

    _, state = tell(story)
    assert (state.incidents.number, state.incidents.restarts, state.token) == (1, 1, 1)


def test_a_standby_says_that_the_log_is_away() -> None:
    """A standby without the log says so, and since when; who led last is still the best that it can tell."""

    async def story(cluster: Cluster) -> None:
        await step(cluster, 5)
        standby = cluster.masters[1]
        cluster.log.faults.unavailable = True
        await cluster.until(lambda: standby.status()["degraded"] != "", 1.0)
        told = standby.status()
        assert (told["leader_address"], told["degraded_since"] > 0) == (ADDRESSES[0], True)
        connection = await dial(cluster, standby.address, HELLO)
        said = messages.decode(await asyncio.wait_for(connection.receive(), 1))
        assert isinstance(said, Goodbye)
        assert (said.address, said.leave) == (ADDRESSES[0], False)
        assert "its fault script says so" in said.reason
        cluster.log.faults.unavailable = False
        await cluster.until(lambda: standby.status()["degraded"] == "", 1.0)

    untouched(*tell(story))


@pytest.mark.parametrize("seconds", [0.3, 3.0, 30.0])
def test_not_sure_to_lead(seconds: float) -> None:
    """A leader that may not lead any more orders nothing; when it surely does again, all that it held back happens."""

    async def story(cluster: Cluster) -> None:
        await step(cluster, 20)
        leader = cluster.leader
        cluster.log.faults.unsure = True
        cluster.kill_worker(3)
        if seconds > 2:
            await cluster.until(lambda: leader.status()["degraded"] != "", 1.5)
        await asyncio.sleep(seconds)
        assert {generation for _, generation in cluster.training.starts} == {1}
        if seconds > 20:
            assert len(leader.sessions) == 0
        cluster.log.faults.unsure = False
        await cluster.until(lambda: cluster.training.done > 20, 5.0)
        assert cluster.leader is leader
        await cluster.until(lambda: leader.status()["degraded"] == "", 1.5)

    _, state = tell(story)
    assert (state.incidents.number, state.incidents.restarts, state.token) == (1, 1, 1)


@pytest.mark.parametrize("what", ["unsure", "unavailable"])
def test_nobody_is_suspected_of_the_silence_of_an_outage(what: str) -> None:
    """The time without a log is the master's own absence: it is recorded first, and nobody was silent in it."""

    async def story(cluster: Cluster) -> None:
        await step(cluster, 20)
        setattr(cluster.log.faults, what, True)
        await asyncio.sleep(60.0)
        setattr(cluster.log.faults, what, False)
        await cluster.until(lambda: cluster.leader.status()["degraded"] == "", 5.0)
        await asyncio.sleep(20.0)
        names.extend(await cluster.names())

    names: list[str] = []
    cluster, state = tell(story, steps=300)
    untouched(cluster, state)
    assert "MasterPaused" in names
    assert {"NodeSuspected", "MassSilence"}.isdisjoint(names)


def test_a_node_wanted_while_not_sure() -> None:
    """A node that nobody was sure enough to give away goes to the host that waits, once somebody is."""

    async def told() -> None:
        spec = JobSpec("j", (GroupSpec(nodes_min=2, nodes_max=2),), joining=True)
        async with HostsCluster(spec, "abc", answers=True) as cluster:
            await step(cluster, 5)
            victim, (spare,) = cluster.on("worker-1-0"), cluster.standbys
            cluster.log.faults.unsure = True
            cluster.kill_host(victim.name)
            await asyncio.sleep(4.0)
            assert cluster.hosts[spare].node == ""
            cluster.log.faults.unsure = False
            await cluster.until(lambda: cluster.hosts[spare].node != "", 10.0)
            assert (await cluster.outcome()).state == "succeeded"
            check_steps(cluster)

    virtual_loop.run(told())


def test_a_zombie_is_deposed() -> None:
    """A leader that is stopped past its lease and goes on finds out at its next append; until then nobody listens to it."""

    async def story(cluster: Cluster) -> None:
        await step(cluster, 10)
        cluster.freeze("master-0")
        cluster.log.expire("j")
        # Its agents notice that it is silent, and look around.
        await led_by(cluster, cluster.masters[1], 4.0)
        cluster.thaw("master-0")
        await cluster.until(lambda: cluster.deposed == ["master-0"], 1.0)

    cluster, state = tell(story, steps=300)
    untouched(cluster, state)
    assert state.token == 2


@pytest.mark.parametrize("honest", [True, False], ids=["agents say what they know", "agents say nothing"])
def test_a_zombie_leads_nobody(honest: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A zombie that hears nothing from its log believes that it leads. Agents come to it, and heed none of its orders."""

    async def story(cluster: Cluster) -> None:
        await step(cluster, 10)
        zombie, new = cluster.masters
        assert zombie._lead is not None
        forever = asyncio.get_running_loop().create_future()
        monkeypatch.setattr(zombie._lead, "valid", lambda: True)
        monkeypatch.setattr(zombie._lead, "append", lambda _batch: forever)
        monkeypatch.setattr(zombie._lead, "gone", asyncio.get_running_loop().create_future())
        cluster.freeze("master-0")
        cluster.log.expire("j")
        await led_by(cluster, new, 20.0)
        cluster.kill_worker(3)
        await cluster.until(lambda: {generation for _, generation in cluster.training.starts} == {1, 2}, 5.0)
        await cluster.until(lambda: {agent._token for agent in cluster.agents.values()} == {2}, 2.0)
        began = cluster.training.done
        if not honest:
            say = Agent._hello
            monkeypatch.setattr(Agent, "_hello", lambda agent, node: _forgetful(say(agent, node)))
        came, welcomed = _watch_arrivals(cluster, ADDRESSES[0]), _watch_greetings(zombie)
        cluster.thaw("master-0")
        vanish(cluster, new)
        await step(cluster, began + 50)
        assert len(came) >= 2
        assert zombie.leading
        # Greetings of before, from when the agents did not know better, came to it as it went on.
        assert not any(hello.token == 2 for hello in welcomed)
        assert len(zombie.sessions) == 0
        assert {generation for _, generation in cluster.training.starts} == {1, 2}
        monkeypatch.undo()
        cluster.network.serve(new.address, new._listener)  # type: ignore[arg-type]  # the one in memory
        cluster.thaw(new._holder)
        await led_by(cluster, new, 5.0)

    _, state = tell(story, steps=400)
    assert (state.incidents.number, state.incidents.restarts, state.token) == (1, 1, 2)


def _forgetful(hello: Hello) -> Hello:
    """The same greeting of an agent that has seen no leader yet."""
    return hello._replace(token=0)


def _watch_greetings(master: Master) -> list[Hello]:
    """Whom a master welcomes from now on."""
    welcomed: list[Hello] = []
    opened = master.sessions._open

    def watched(session: Session) -> None:
        welcomed.append(session.hello)
        opened(session)

    master.sessions._open = watched  # type: ignore[method-assign]
    return welcomed


def _watch_arrivals(cluster: Cluster, address: str) -> list[str]:
    """Who dials an address from now on."""
    came: list[str] = []
    connect = cluster.network.connect

    def watched(host: str, where: str) -> MemoryConnection:
        if where == address:
            came.append(host)
        return connect(host, where)

    cluster.network.connect = watched  # type: ignore[method-assign]
    return came
