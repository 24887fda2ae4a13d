"""Masters on several hosts, in virtual time: one leads, the others follow warm and send agents on; hand-overs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from structlog.testing import capture_logs
from tests.chaos.standing_by import HELLO, dial, led_by, now, step, tell, untouched, vanish

from dlrover_core.errors import ConnectionLost, LogCorrupt, MalformedMessage, SchemaTooNew, StandsBy
from dlrover_core.job import job
from dlrover_core.job.state import CODEC, JobState
from dlrover_core.kernel.engine import Accepted
from dlrover_core.kernel.events import Batch, Record
from dlrover_core.kernel.state import digest
from dlrover_core.logs.memory import MemoryLog, SlowAck
from dlrover_core.runtime import messages
from dlrover_core.runtime.levels import Beat
from dlrover_core.runtime.master import Master
from dlrover_core.runtime.messages import Goodbye
from dlrover_core.testing import virtual_loop
from dlrover_core.testing.cluster import ADDRESSES, Cluster


class CountingLog(MemoryLog):
    """Counts the batches that anybody has read."""

    batches_read = 0

    async def batches(self, job: str, after: int = 0) -> AsyncIterator[Batch]:
        """As any log's."""
        async for batch in super().batches(job, after):
            self.batches_read += 1
            yield batch


async def followed(cluster: Cluster, master: Master) -> JobState:
    """The state that a standby has folded, once it has folded all there is."""
    head = await cluster.log.head("j")
    await cluster.until(lambda: master._standby.state is not None and master._standby.state.seq >= head, 1.0)
    assert master._standby.state is not None
    return master._standby.state


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
