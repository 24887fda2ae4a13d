"""Masters on several hosts, in virtual time: one leads, the others follow warm and send agents on; logs that fail them all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from structlog.testing import capture_logs
from tests.chaos.hosts_cluster import HostsCluster

from dlrover_core.errors import ConnectionLost, LogCorrupt, MalformedMessage, SchemaTooNew, StandsBy
from dlrover_core.job import job
from dlrover_core.job.state import CODEC, JobState
from dlrover_core.kernel.engine import Accepted
from dlrover_core.kernel.events import Batch, Record
from dlrover_core.kernel.state import digest
from dlrover_core.logs.memory import MemoryLog, SlowAck
from dlrover_core.runtime import messages
from dlrover_core.runtime.agent import Agent
from dlrover_core.runtime.levels import Beat
from dlrover_core.runtime.master import Master
from dlrover_core.runtime.messages import Goodbye, Hello, Message
from dlrover_core.runtime.sessions import Session
from dlrover_core.spec import GroupSpec, JobSpec
from dlrover_core.testing import virtual_loop
from dlrover_core.testing.cluster import ADDRESSES, Cluster
from dlrover_core.testing.invariants import check, check_steps
from dlrover_core.testing.network import MemoryConnection
from dlrover_core.testing.training import Training

SPEC = JobSpec("j", (GroupSpec(nodes_min=2, nodes_max=2, nproc=2),))
BOTH = {"worker-0-0", "worker-1-0"}
HELLO = Hello(messages.VERSION, "run-1", "worker-0-0", 77, 0, 0)


class CountingLog(MemoryLog):
    """Counts the batches that anybody has read."""

    batches_read = 0

    async def batches(self, job: str, after: int = 0) -> AsyncIterator[Batch]:
        """As any log's."""
        async for batch in super().batches(job, after):
            self.batches_read += 1
            yield batch


def tell(
    story: Callable[[Cluster], Awaitable[None]], *, standbys: int = 1, log: MemoryLog | None = None, steps: int = 100
) -> tuple[Cluster, JobState]:
    """Let a job with so many standby masters suffer ``story``; it makes every step once, and no worker is started again."""

    async def told() -> tuple[Cluster, JobState]:
        async with Cluster(SPEC, training=Training(steps), event_log=log, answers=True) as cluster:
            for _ in range(standbys):
                cluster.start_master()
            await story(cluster)
            outcome = await cluster.outcome()
            assert (outcome.state, outcome.root) == ("succeeded", "")
            check_steps(cluster)
            return cluster, await check(cluster)

    return virtual_loop.run(told())


def untouched(cluster: Cluster, state: JobState) -> None:
    """No worker was started twice, and nobody was taken for dead."""
    assert sorted(cluster.training.starts) == [(node, 1) for node in sorted(BOTH)]
    assert state.incidents.number == 0


def step(cluster: Cluster, number: int) -> Awaitable[None]:
    """Until this step is made."""
    return cluster.until(lambda: cluster.training.done >= number)


def now() -> float:
    """The virtual time."""
    return asyncio.get_running_loop().time()


async def led_by(cluster: Cluster, master: Master, limit_s: float = 60.0) -> float:
    """Until this master leads and both agents are its own; returns how long that took."""
    began = now()
    await cluster.until(lambda: master.leading and len(master.sessions) == 2, limit_s)
    return now() - began


def vanish(cluster: Cluster, master: Master) -> None:
    """Kill a master as its agents see it, while its lease lives on."""
    cluster.freeze(master._holder)
    master._listener.drop()  # type: ignore[attr-defined]  # as its kernel does


async def followed(cluster: Cluster, master: Master) -> JobState:
    """The state that a standby has folded, once it has folded all there is."""
    head = await cluster.log.head("j")
    await cluster.until(lambda: master._standby.state is not None and master._standby.state.seq >= head, 1.0)
    assert master._standby.state is not None
    return master._standby.state


async def dial(cluster: Cluster, address: str, *frames: Message) -> MemoryConnection:
    """A connection of somebody else, and its first words."""
    connection = cluster.network.connect("elsewhere", address)
    for frame in frames:
        await connection.send(messages.encode(frame))
    return connection


# ---- warm


def test_a_standby_has_folded_what_the_leader_has() -> None:
    """At every moment a standby's state, once it has read all, is the fold of the log to the last bit."""

    async def story(cluster: Cluster) -> None:
        for number in (1, 10, 30):
            await step(cluster, number)
            state = await followed(cluster, cluster.masters[1])
            assert digest(state) == digest(await cluster.refold())
            assert digest(state) == digest(cluster.leader.state)

    untouched(*tell(story))


def test_a_warm_standby_reads_only_the_rest() -> None:
    """When the leader is killed the standby leads with the very state that it has folded: nothing is read again."""
    log = CountingLog(CODEC)

    async def story(cluster: Cluster) -> None:
        await step(cluster, 30)
        warm = cluster.masters[1]
        state, all_of_it = await followed(cluster, warm), len([one async for one in log.batches("j")])
        assert all_of_it > 5
        before = log.batches_read
        cluster.kill_leader()
        assert await led_by(cluster, warm) <= 0.2
        assert warm.state is state
        assert log.batches_read - before <= 1
        before = log.batches_read
        cluster.start_master()
        await followed(cluster, cluster.master)
        assert log.batches_read - before >= all_of_it

    cluster, state = tell(story, log=log)
    untouched(cluster, state)
    assert state.token == 2


@pytest.mark.parametrize("error", [SchemaTooNew("written tomorrow"), LogCorrupt("j", 7, "damaged"), ValueError("ours")])
def test_a_standby_that_cannot_fold(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says so once, stays, and leads by reading everything; whatever is still wrong by then is not hidden."""
    follow = MemoryLog.follow

    async def broken(self: MemoryLog, job: str, after: int = 0) -> AsyncIterator[Record]:
        async for record in follow(self, job, after):
            if record.seq == 7:
                raise error
            yield record

    monkeypatch.setattr(MemoryLog, "follow", broken)

    async def story(cluster: Cluster) -> None:
        with capture_logs() as lines:
            await step(cluster, 30)
            assert cluster.masters[1]._standby.state is None
            cluster.kill_leader()
            assert await led_by(cluster, cluster.masters[1]) <= 0.2
        assert [line["error"] for line in lines if line["event"] == "standing by cold"] == [
            f"{type(error).__name__}: {error}"
        ]

    untouched(*tell(story))


def test_a_standby_outlives_an_outage_of_the_log() -> None:
    """A log that is away for a while, and a standby goes on where it was: warm again, without beginning anew."""
    log = CountingLog(CODEC)

    async def story(cluster: Cluster) -> None:
        await step(cluster, 10)
        state = await followed(cluster, cluster.masters[1])
        log.faults.unavailable = True
        log._bell.ring("j")
        await cluster.until(lambda: cluster.masters[1].status()["degraded"] != "", 1.0)
        await step(cluster, 40)
        log.faults.unavailable = False
        before = log.batches_read
        await cluster.until(lambda: cluster.masters[1].status()["degraded"] == "", 1.0)
        await asyncio.wait_for(cluster.leader.submit(job.NotePause(1)), 5)
        assert await followed(cluster, cluster.masters[1]) is state
        assert log.batches_read - before <= 4

    untouched(*tell(story, log=log))


# ---- who leads


def test_agents_are_sent_to_the_leader() -> None:
    """A standby tells an agent where the leader is, and is none the wiser about it afterwards."""

    async def story(cluster: Cluster) -> None:
        await step(cluster, 5)
        standby = cluster.masters[1]
        connection = await dial(cluster, standby.address, HELLO)
        said = messages.decode(await asyncio.wait_for(connection.receive(), 1))
        assert said == Goodbye("master-0 leads", leave=False, address=ADDRESSES[0])
        with pytest.raises(ConnectionLost):
            await connection.receive()
        assert len(standby.sessions) == 0

    untouched(*tell(story))


@pytest.mark.parametrize("frame", [b"\xff\xfe", messages.encode(Beat(0, 0, 0))], ids=["garbage", "beat"])
def test_strangers_at_a_standby(frame: bytes) -> None:
    """Who does not begin with a Hello is hung up on by a standby too."""

    async def story(cluster: Cluster) -> None:
        await step(cluster, 5)
        connection = cluster.network.connect("elsewhere", cluster.masters[1].address)
        await connection.send(frame)
        with pytest.raises(ConnectionLost):
            await asyncio.wait_for(connection.receive(), 1)

    untouched(*tell(story))


def test_agents_that_know_only_standbys() -> None:
    """Agents whose list does not name the leader find it all the same, and their job begins as soon as ever."""

    async def story(cluster: Cluster) -> None:
        cluster.addresses = list(ADDRESSES[1:])
        await led_by(cluster, cluster.masters[0], 5.0)

    untouched(*tell(story, standbys=2))


def test_people_ask_a_standby() -> None:
    """A standby's status says its role, who leads, where, and how far it has followed; commands are for the leader."""

    async def story(cluster: Cluster) -> None:
        await step(cluster, 5)
        leader, standby = cluster.masters
        assert standby._listener.status is not None  # type: ignore[attr-defined]  # the one in memory
        await followed(cluster, standby)
        there, here = leader.status(), standby.status()
        assert (there["role"], there["leader"], there["leader_address"]) == ("leader", "master-0", ADDRESSES[0])
        assert (here["role"], here["leader"], here["leader_address"]) == ("standby", "master-0", ADDRESSES[0])
        assert (here["seq"], here["token"], here["job"], here["state"]) == (there["seq"], 0, "j", "running")
        assert set(here) == set(there)
        with pytest.raises(StandsBy, match=f"led by master-0 at {ADDRESSES[0]}; ask there") as caught:
            await standby.obey({"command": "suspend"})
        assert (caught.value.holder, caught.value.address) == ("master-0", ADDRESSES[0])
        with pytest.raises(MalformedMessage):
            await standby.obey({"command": "dance"})

    untouched(*tell(story))


@pytest.mark.parametrize("seconds", [3.0, 3.7, 4.4])
@pytest.mark.parametrize("standbys", [1, 2])
def test_nobody_leads_for_a_while(standbys: int, seconds: float) -> None:
    """While a dead leader's lease lives agents wait at standbys: whoever leads next has them within a moment."""

    async def story(cluster: Cluster) -> None:
        await step(cluster, 5)
        vanish(cluster, cluster.masters[0])
        await asyncio.sleep(seconds)
        cluster.log.expire("j")
        await cluster.until(lambda: any(one.leading for one in cluster.masters), 0.1)
        # Kept by the one that leads now, or by another, which looks four times a second.
        assert await led_by(cluster, cluster.leader) <= (0.05 if standbys == 1 else 0.35)

    cluster, state = tell(story, standbys=standbys)
    untouched(cluster, state)
    assert state.token == 2


def test_a_predecessor_at_the_same_address() -> None:
    """A standby never points at itself, though the log still names a dead leader at its own address."""

    async def story(cluster: Cluster) -> None:
        await step(cluster, 5)
        dead = cluster.masters[0]
        vanish(cluster, dead)
        cluster._tasks[1].cancel()
        await asyncio.gather(cluster._tasks[1], return_exceptions=True)
        address, cluster._free_address = cluster._free_address, lambda: ADDRESSES[0]  # type: ignore[method-assign]
        again = cluster.start_master()
        cluster._free_address = address  # type: ignore[method-assign]
        await followed(cluster, again)
        connection = await dial(cluster, again.address, HELLO)
        said = messages.decode(await asyncio.wait_for(connection.receive(), 5))
        assert said == Goodbye("nobody leads now", leave=False)
        assert again.status()["leader_address"] == ""
        cluster.log.expire("j")
        assert await led_by(cluster, again) <= 3.0

    untouched(*tell(story))


def test_a_black_hole_on_the_list() -> None:
    """A master that takes connections and never says a word costs an agent a few seconds, not its whole patience."""

    async def story(cluster: Cluster) -> None:
        async def swallow(_connection: Any) -> None:
            await asyncio.get_running_loop().create_future()

        hole = cluster.network.listener("hole:1")
        await virtual_loop.spawn("hole", hole.serve(swallow, dict))
        cluster.addresses.insert(0, "hole:1")
        assert await led_by(cluster, cluster.masters[0]) <= 2.0 + 5.0

    untouched(*tell(story))


# ---- handing over


def test_hand_over() -> None:
    """A leader that is asked to go hands over within a fifth of a second: agents, decisions and all; nobody restarts."""

    async def story(cluster: Cluster) -> None:
        await step(cluster, 20)
        old, new = cluster.masters
        began = now()
        old.hand_over("maintenance")
        await cluster.until(lambda: new.leading and new.led.is_set(), 1.0)
        assert isinstance(await asyncio.wait_for(new.submit(job.NotePause(1)), 1.0), Accepted)
        assert now() - began <= 0.2
        await led_by(cluster, new)
        assert now() - began <= 0.2
        await cluster.until(lambda: cluster.handed_over == ["master-0"], 1.0)

    cluster, state = tell(story)
    untouched(cluster, state)
    assert state.token == 2


def test_hand_over_waits_for_no_agent() -> None:
    """An agent that reads nothing does not hear the leader's goodbye: the next one leads as soon as ever."""

    async def story(cluster: Cluster) -> None:
        await step(cluster, 20)
        session = cluster.leader.sessions.of("worker-1-0")
        assert session is not None
        forever = asyncio.get_running_loop().create_future()
        session.connection.send = lambda _frame: forever  # type: ignore[method-assign]
        cluster.leader.hand_over("maintenance")
        await cluster.until(cluster.masters[1].led.is_set, 0.2)
        await cluster.until(lambda: cluster.handed_over == ["master-0"], 2.0)
        await led_by(cluster, cluster.masters[1], 5.0)

    untouched(*tell(story))


def test_hand_over_round_and_round() -> None:
    """Six hand-overs in a row, each to a standby that has just come: no worker restarts."""

    async def story(cluster: Cluster) -> None:
        for number in range(6):
            await step(cluster, 5 + 12 * number)
            cluster.leader.hand_over(f"the {number}th time")
            await led_by(cluster, cluster.master, 0.3)
            cluster.start_master()

    cluster, state = tell(story)
    untouched(cluster, state)
    assert cluster.handed_over == [f"master-{number}" for number in range(6)]


def test_what_is_queued_is_done_before() -> None:
    """Commands that were taken are done and answered once, though the log is slow; later ones are the next leader's."""

    async def story(cluster: Cluster) -> None:
        await step(cluster, 20)
        old, new = cluster.masters
        cluster.log.faults.at_next(SlowAck(0.5))
        asked = [asyncio.ensure_future(old.obey({"command": verb})) for verb in ("suspend", "resume")]
        await asyncio.sleep(0.1)
        old.hand_over("maintenance")
        await asyncio.sleep(0.1)
        with pytest.raises(StandsBy):
            await old.obey({"command": "suspend"})
        assert all(seq > 0 for seq in await asyncio.gather(*asked))
        await led_by(cluster, new, 2.0)
        told = [name for name in await cluster.names() if name in ("JobSuspended", "JobResumed")]
        assert told == ["JobSuspended", "JobResumed"]

    tell(story)


def test_hand_over_without_a_log() -> None:
    """A leader whose log is away goes after a bounded time; what it had decided and could not keep is said again."""

    async def story(cluster: Cluster) -> None:
        await step(cluster, 20)
        old, new = cluster.masters
        cluster.log.faults.unavailable = True
        cluster.kill_worker(3)
        await asyncio.sleep(0.1)
        old.hand_over("maintenance")
        await cluster.until(lambda: bool(cluster.handed_over), 10.0)
        cluster.log.faults.unavailable = False
        await led_by(cluster, new, 5.0)

    cluster, state = tell(story)
    assert (state.incidents.number, state.incidents.restarts) == (1, 1)
    assert {generation for _, generation in cluster.training.starts} == {1, 2}


def test_a_standby_hands_over() -> None:
    """A standby that is asked to go goes, and nobody notices; nor does it come to lead later."""

    async def story(cluster: Cluster) -> None:
        await step(cluster, 5)
        cluster.masters[1].hand_over("maintenance")
        await cluster.until(lambda: cluster.handed_over == ["master-1"], 0.1)
        last = cluster.start_master()
        cluster.kill_leader()
        await led_by(cluster, last, 0.3)

    untouched(*tell(story))


def test_hand_over_in_the_midst_of_a_failure() -> None:
    """A worker dies as the leader goes: whoever hears of it, it is one incident and one restart."""

    async def story(cluster: Cluster) -> None:
        await step(cluster, 20)
        cluster.kill_worker(3)
        await asyncio.sleep(0.002)
        cluster.leader.hand_over("maintenance")
        await led_by(cluster, cluster.masters[1], 0.3)

    _, state = tell(story)
    assert (state.incidents.number, state.incidents.restarts) == (1, 1)


# ---- logs that fail


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


# ---- not sure


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


# ---- zombies


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
