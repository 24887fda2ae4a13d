"""Silence is not death: stopped masters, wrong clocks, cut cables, and what each of them must not cost."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from dlrover_core.job import job, nodes, silence
from dlrover_core.job.orders import Order
from dlrover_core.job.state import JobState
from dlrover_core.runtime import messages
from dlrover_core.runtime.departures import DIED, RETURN_S
from dlrover_core.runtime.levels import Beat, BeatSeen
from dlrover_core.runtime.messages import Hello, Level, Welcome
from dlrover_core.spec import GroupSpec, JobSpec
from dlrover_core.testing import virtual_loop
from dlrover_core.testing.cluster import ADDRESS, Cluster
from dlrover_core.testing.invariants import check, check_steps
from dlrover_core.testing.training import Training

GROUP = GroupSpec(nodes_min=3, nodes_max=3, nproc=1)
SPEC = JobSpec("j", (GROUP,), silence_s=5.0, unreachable_s=60.0, mass_silence_s=120.0)
NODES = ["worker-0-0", "worker-1-0", "worker-2-0"]
HOUR_US = 3_600_000_000


def tell(
    story: Callable[[Cluster], Awaitable[None]], steps: int = 600, spec: JobSpec = SPEC
) -> tuple[Cluster, JobState]:
    """Let a job of a minute suffer ``story`` and succeed all the same; every step once, every invariant kept."""

    async def told() -> tuple[Cluster, JobState]:
        async with Cluster(spec, training=Training(steps=steps)) as cluster:
            await cluster.until(lambda: cluster.training.done >= 5)
            await story(cluster)
            outcome = await cluster.outcome()
            assert outcome.state == "succeeded"
            check_steps(cluster)
            return cluster, await check(cluster)

    return virtual_loop.run(told())


def facts(cluster: Cluster, kind: type) -> list[object]:
    """The events of a kind in the log, in order."""

    async def found() -> list[object]:
        return [record.event for record in await cluster.records() if isinstance(record.event, kind)]

    return virtual_loop.run(found())


def undisturbed(cluster: Cluster, state: JobState) -> None:
    """Nobody was relaunched, nobody restarted, no incident opened."""
    assert cluster.backend.launched == NODES
    assert sorted(cluster.training.starts) == [(node, 1) for node in NODES]
    assert state.incidents.number == 0


def test_only_master_stopped() -> None:
    """The only master stopped for three times the silence timeout: nobody is relaunched, and it says that it was away."""

    async def story(cluster: Cluster) -> None:
        cluster.freeze("master-0")
        await asyncio.sleep(3 * SPEC.silence_s)
        cluster.thaw("master-0")

    cluster, state = tell(story)
    undisturbed(cluster, state)
    assert len(facts(cluster, job.MasterPaused)) == 1
    assert facts(cluster, silence.NodeSuspected) == []


def test_whole_host_suspended() -> None:
    """Everything stopped at once for three times the silence timeout: nobody is suspected."""

    async def story(cluster: Cluster) -> None:
        cluster.jump(3 * SPEC.silence_s)
        await asyncio.sleep(1)

    cluster, state = tell(story)
    undisturbed(cluster, state)
    assert len(facts(cluster, job.MasterPaused)) == 1


def test_master_stopped_past_a_deadline() -> None:
    """A master that slept over a suspect's deadline gives it the full time again: the suspect had spoken meanwhile."""

    async def story(cluster: Cluster) -> None:
        cluster.network.cut("worker-1-0", silent=True)
        await cluster.until(lambda: cluster.state.nodes.nodes["worker-1-0"].state == "suspect")
        cluster.freeze("master-0")
        cluster.network.heal()
        await asyncio.sleep(2 * SPEC.unreachable_s)
        cluster.thaw("master-0")

    cluster, state = tell(story, steps=3000)
    undisturbed(cluster, state)
    assert facts(cluster, nodes.NodeLost) == []


@pytest.mark.parametrize("skew_us", [HOUR_US, -HOUR_US], ids=["ahead", "behind"])
def test_wrong_clock_at_take_over(skew_us: int) -> None:
    """A successor whose clock is an hour off relaunches nobody, and time in the log never goes back."""

    async def story(cluster: Cluster) -> None:
        cluster.kill_master()
        cluster.skew_us = skew_us
        cluster.start_master()

    cluster, state = tell(story)
    undisturbed(cluster, state)
    assert facts(cluster, silence.NodeSuspected) == []


@pytest.mark.parametrize("skew_us", [HOUR_US, -HOUR_US], ids=["ahead", "behind"])
def test_deadlines_after_a_wrong_clock(skew_us: int) -> None:
    """After a take-over with a clock an hour off a silent node is found in time, not an hour late and not at once."""

    async def story(cluster: Cluster) -> None:
        cluster.kill_master()
        cluster.skew_us = skew_us
        cluster.start_master()
        await asyncio.sleep(5)
        cluster.network.cut("worker-1-0", silent=True)
        cut_at = asyncio.get_running_loop().time()
        await cluster.until(lambda: "worker-1-1" in cluster.backend.launched, every_s=0.1)
        took = asyncio.get_running_loop().time() - cut_at
        assert SPEC.unreachable_s + SPEC.silence_s <= took <= SPEC.unreachable_s + SPEC.silence_s + 3

    cluster, _ = tell(story, steps=1500)
    assert cluster.backend.launched == [*NODES, "worker-1-1"]


@pytest.mark.parametrize("skew_us", [HOUR_US, -HOUR_US], ids=["ahead", "behind"])
def test_suspect_of_the_predecessor(skew_us: int) -> None:
    """A suspect that the new master has not heard is not called heard, and gets its full time from the take-over."""

    async def story(cluster: Cluster) -> None:
        cluster.network.cut("worker-1-0", silent=True)
        await cluster.until(lambda: cluster.state.nodes.nodes["worker-1-0"].state == "suspect")
        cluster.kill_master()
        cluster.skew_us = skew_us
        cluster.start_master()
        began = asyncio.get_running_loop().time()
        await cluster.until(lambda: "worker-1-1" in cluster.backend.launched, every_s=0.1)
        took = asyncio.get_running_loop().time() - began
        assert SPEC.unreachable_s - 1 <= took <= SPEC.unreachable_s + 1

    cluster, _ = tell(story, steps=1500)
    assert facts(cluster, silence.NodeHeard) == []


@pytest.mark.parametrize("silent", [False, True], ids=["reset", "silent"])
def test_all_agents_cut_off(*, silent: bool) -> None:
    """All agents cut off at once for two minutes, then healed: the master suspects itself, nobody is relaunched."""

    async def story(cluster: Cluster) -> None:
        cluster.network.cut(*NODES, silent=silent)
        await asyncio.sleep(100)
        assert cluster.training.done > 900
        cluster.network.heal()
        await cluster.until(lambda: all(node.state == "running" for node in cluster.state.nodes.nodes.values()), 10)

    cluster, state = tell(story, steps=1500)
    undisturbed(cluster, state)
    assert len(facts(cluster, silence.MassSilence)) == 1
    assert len(facts(cluster, silence.NodeHeard)) == 3


def test_one_agent_cut_off_for_a_moment() -> None:
    """One agent cut off for shorter than ``unreachable_s``: suspected, heard again, nothing restarted."""

    async def story(cluster: Cluster) -> None:
        cluster.network.cut("worker-2-0", silent=True)
        await asyncio.sleep(SPEC.unreachable_s / 2)
        assert cluster.state.nodes.nodes["worker-2-0"].state == "suspect"
        cluster.network.heal()

    cluster, state = tell(story)
    undisturbed(cluster, state)
    assert len(facts(cluster, silence.NodeSuspected)) == len(facts(cluster, silence.NodeHeard)) == 1


def test_one_agent_cut_off_for_good() -> None:
    """Cut off beyond ``unreachable_s`` while its backend says it runs: replaced on another host, and training goes on."""

    async def story(cluster: Cluster) -> None:
        cluster.network.cut("worker-1-0", silent=True)
        await asyncio.sleep(SPEC.unreachable_s + SPEC.silence_s + 15)
        made = cluster.training.done
        await asyncio.sleep(5)
        assert cluster.training.done >= made + 40

    cluster, state = tell(story, steps=1500)
    assert cluster.backend.launched == [*NODES, "worker-1-1"]
    (planned,) = [fact for fact in facts(cluster, nodes.NodePlanned) if fact.node == "worker-1-1"]  # type: ignore[attr-defined]
    assert planned.avoid == ("host-1",)  # type: ignore[attr-defined]
    assert (state.incidents.number, state.incidents.restarts) == (1, 0)
    assert "worker-1-0" not in cluster.backend.living


def test_a_connection_that_a_kernel_ended_is_a_death() -> None:
    """An agent that is not back within the longest pause of one that tries again has died, whatever its backend still says."""

    async def story(cluster: Cluster) -> None:
        cluster.network.cut("worker-1-0")
        at = asyncio.get_running_loop().time()
        await cluster.until(lambda: cluster.state.nodes.nodes["worker-1-0"].state == "failed", every_s=0.05)
        assert asyncio.get_running_loop().time() - at <= RETURN_S + 0.1

    cluster, state = tell(story)
    (failed,) = facts(cluster, nodes.NodeFailed)
    assert failed == nodes.NodeFailed("worker-1-0", 0, DIED, seen=False)
    assert cluster.backend.launched == [*NODES, "worker-1-1"]
    assert state.incidents.number == 1


def test_an_agent_that_dies_on_a_host_that_is_not_reached_is_lost_at_once() -> None:
    """The platform has said already that it hears nothing of that host: nobody waits for more words of it."""

    async def story(cluster: Cluster) -> None:
        cluster.platform.reach(cluster.platform.of("worker-1-0"), lost=True)
        await cluster.until(lambda: "worker-1-0" in cluster.state.notices.unreached, every_s=0.05)
        cluster.network.cut("worker-1-0")
        at = asyncio.get_running_loop().time()
        await cluster.until(lambda: "worker-1-1" in cluster.backend.launched, every_s=0.05)
        assert asyncio.get_running_loop().time() - at <= SPEC.gone_s + 0.1

    cluster, state = tell(story)
    assert cluster.backend.launched == [*NODES, "worker-1-1"]
    assert state.incidents.number == 1


def test_an_agent_that_is_back_at_once_is_alive() -> None:
    """A link that was cut for a second and a half, and no more: nothing is said about it, and nothing restarts."""

    async def story(cluster: Cluster) -> None:
        cluster.network.cut("worker-1-0")
        await asyncio.sleep(1.5)
        cluster.network.heal()
        await asyncio.sleep(5)

    cluster, state = tell(story)
    undisturbed(cluster, state)


def test_unseen_death() -> None:
    """A node that died while its backend goes on calling it running: broken world mended by its peers' word, then replaced."""

    async def story(cluster: Cluster) -> None:
        cluster.backend.blind.add("worker-1-0")
        cluster.kill_node("worker-1-0")
        await cluster.until(lambda: "worker-1-1" in cluster.backend.launched, every_s=0.1)
        cluster.backend.blind.clear()

    cluster, state = tell(story)
    assert cluster.backend.launched == [*NODES, "worker-1-1"]
    assert state.incidents.number == 1


def test_agent_without_a_master_keeps_training() -> None:
    """Without any master for ten times ``unreachable_s`` training goes on as long as steps are made."""

    async def story(cluster: Cluster) -> None:
        cluster.kill_master()
        await asyncio.sleep(10 * SPEC.unreachable_s)
        assert cluster.training.done > 5900
        cluster.start_master()

    cluster, state = tell(story, steps=6100)
    undisturbed(cluster, state)


def test_agent_without_master_and_steps_stops_its_workers() -> None:
    """Without master and without steps for half of ``unreachable_s`` an agent stops its workers, once, and tells later."""

    async def story(cluster: Cluster) -> None:
        cluster.training.cascade_s = None
        cluster.kill_master()
        cluster.kill_worker(0)
        await asyncio.sleep(SPEC.unreachable_s / 2 - 1)
        assert [len(cluster.launchers[node].ranks) for node in NODES] == [0, 1, 1]
        await asyncio.sleep(2)
        assert [len(cluster.launchers[node].ranks) for node in NODES] == [0, 0, 0]
        await asyncio.sleep(5 * SPEC.unreachable_s)
        cluster.start_master()

    cluster, state = tell(story)
    assert (state.incidents.number, state.incidents.restarts) == (1, 1)
    assert cluster.backend.launched == NODES


def test_stopped_agent() -> None:
    """An agent stopped for shorter than ``unreachable_s`` while its workers run on: suspected, heard again, undisturbed."""

    async def story(cluster: Cluster) -> None:
        cluster.freeze("worker-1-0")
        await asyncio.sleep(SPEC.unreachable_s / 2)
        assert cluster.state.nodes.nodes["worker-1-0"].state == "suspect"
        cluster.thaw("worker-1-0")

    cluster, state = tell(story)
    undisturbed(cluster, state)


def test_agent_leaves_a_stopped_master_for_its_successor() -> None:
    """Agents of a master that is stopped, not dead, find the one that took over; the zombie orders nobody when it wakes."""

    async def story(cluster: Cluster) -> None:
        cluster.start_master()
        cluster.freeze("master-0")
        cluster.log.expire("j")
        await cluster.until(lambda: len(cluster.masters[1].sessions) == 3, 3 * SPEC.silence_s)
        cluster.kill_worker(0)
        await cluster.until(lambda: ("worker-0-0", 2) in cluster.training.starts)
        cluster.thaw("master-0")
        await cluster.until(lambda: cluster.deposed == ["master-0"], 5)

    _cluster, state = tell(story)
    assert (state.incidents.number, state.incidents.restarts, state.token) == (1, 1, 2)


def test_zombie_cannot_order() -> None:
    """What a fenced master decided is void: no record, no launch, no order, though it still holds its connections."""

    async def story(cluster: Cluster) -> None:
        zombie = cluster.master
        cluster.start_master()
        cluster.freeze("master-0")
        cluster.log.expire("j")
        await cluster.until(lambda: cluster.masters[1].leading)
        cluster.thaw("master-0")
        assert not zombie.leading
        refused = zombie.submit(nodes.ReportFault("worker-0-0", "the zombie says so"))
        await asyncio.wait({refused}, timeout=5)
        assert refused.cancelled()
        await cluster.until(lambda: cluster.deposed == ["master-0"], 1)
        cluster.kill_node("worker-1-0")
        await cluster.until(lambda: "worker-1-1" in cluster.backend.launched)
        with pytest.raises(PermissionError):
            await cluster.backend.delete("j-worker-0-0", zombie.token, 0.0)

    cluster, _ = tell(story)
    assert "the zombie says so" not in {fact.reason for fact in facts(cluster, nodes.NodeFailed)}  # type: ignore[attr-defined]
    assert cluster.backend.launched == [*NODES, "worker-1-1"]


async def stray(cluster: Cluster, **changes: object) -> messages.Message:
    """The answer to a Hello of somebody who should not be here."""
    hello = Hello(messages.VERSION, "run-1", "worker-0-0", 99, 0, 0)._replace(**changes)
    connection = cluster.network.connect("stray", ADDRESS)
    await connection.send(messages.encode(hello))
    return messages.decode(await connection.receive())


@pytest.mark.parametrize(
    ("changes", "leave"),
    [
        ({"node": "worker-0-7"}, True),
        ({"node": "nobody-0-0"}, True),
        ({"run": "run-0"}, True),
        ({"version": 99}, True),
        ({"version": 0}, True),
        ({"token": 7}, False),
    ],
    ids=["incarnation", "stranger", "run", "newer", "older", "token"],
)
def test_who_is_turned_away(changes: dict[str, object], *, leave: bool) -> None:
    """Another incarnation, run or protocol must leave; who has seen a newer leader must look for it."""

    async def story(cluster: Cluster) -> None:
        answer = await stray(cluster, **changes)
        assert isinstance(answer, messages.Goodbye)
        assert answer.leave is leave

    cluster, state = tell(story, steps=50)
    undisturbed(cluster, state)


def test_older_incarnation_leaves() -> None:
    """A replaced node that is heard again is told to leave, stops its workers, and counts no more."""

    async def story(cluster: Cluster) -> None:
        cluster.backend.blind.add("worker-1-0")
        cluster.network.cut("worker-1-0")
        await cluster.until(lambda: ("worker-1-1", 2) in cluster.training.starts, every_s=0.1)
        assert "worker-1-0" in cluster.backend.living
        cluster.network.heal()
        await cluster.until(lambda: "worker-1-0" not in cluster.backend.living, 5)
        cluster.backend.blind.clear()
        cluster.backend.lose("j-worker-1-0")

    # The backend's own deletion takes its time: it is the agent that must go by itself.
    cluster, state = tell(story, steps=1500, spec=SPEC)
    assert cluster.backend.launched == [*NODES, "worker-1-1"]
    assert state.incidents.number == 1


def test_agent_refuses_an_older_token() -> None:
    """An order under a token older than the newest seen is not obeyed: the connection is given up."""

    async def story() -> None:
        async with Cluster(SPEC) as cluster:
            await cluster.until(lambda: cluster.training.done >= 5)
            cluster.kill_master()
            listener = cluster.network.listener(ADDRESS)
            refused: list[str] = []

            async def impostor(connection: object) -> None:
                hello = messages.decode(await connection.receive())  # type: ignore[attr-defined]
                assert isinstance(hello, Hello)
                greeting = Welcome(messages.VERSION, "run-1", hello.token, 10**6, 5 * 10**6, 60 * 10**6, 0, 3)
                await connection.send(messages.encode(greeting))  # type: ignore[attr-defined]
                leave = messages.level(hello.token - 1, Order(leave=True, reason="go", grace_us=0))
                await connection.send(messages.encode(leave))  # type: ignore[attr-defined]
                try:
                    while True:
                        await connection.receive()  # type: ignore[attr-defined]
                except messages.MalformedMessage:
                    raise
                except Exception as lost:  # noqa: BLE001  # whatever ends it
                    refused.append(str(lost))

            await listener.serve(impostor, dict)
            await asyncio.sleep(5)
            assert len(refused) > 3
            assert len(cluster.backend.living) == 3
            listener.drop()
            cluster.start_master()
            assert (await cluster.outcome()).state == "succeeded"
            undisturbed(cluster, await check(cluster))

    virtual_loop.run(story())


def test_beats_are_answered() -> None:
    """A master answers every heartbeat, or agents would think it silent."""

    async def story(cluster: Cluster) -> None:
        node = "worker-0-0"
        connection = cluster.network.connect("double", ADDRESS)
        await connection.send(messages.encode(Hello(messages.VERSION, "", node, cluster.agents[node]._boot, 0, 0)))
        await connection.send(messages.encode(Beat(0, -1, 0)))
        heard = [messages.decode(await connection.receive()) for _ in range(3)]
        assert [type(message) for message in heard] == [Welcome, Level, BeatSeen]
        await connection.close()

    tell(story, steps=50)
