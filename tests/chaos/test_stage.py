"""Level "loop": plans played by the real masters and agents; every kind of fault, users' backends, and what a run tells."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest

from dlrover_core.errors import ConnectionLost, LaunchRefused, PlanError
from dlrover_core.job import nodes
from dlrover_core.job.orders import NodeLaunch
from dlrover_core.job.state import JobState
from dlrover_core.kernel.events import Record
from dlrover_core.runtime import messages
from dlrover_core.runtime.backend import Changed, Listed, Observation
from dlrover_core.runtime.levels import Beat
from dlrover_core.runtime.messages import Hello, Numbered
from dlrover_core.sim.faults import LOOP, Fault, kinds
from dlrover_core.sim.run import Broken, Stalled
from dlrover_core.sim.scenario import Plan, Scenario
from dlrover_core.spec import GroupSpec, JobSpec
from dlrover_core.testing import BackendConformance, Stand, invariants, virtual_loop
from dlrover_core.testing.cluster import Cluster
from dlrover_core.testing.network import MemoryConnection, Network
from dlrover_core.testing.platform import Machine, NameTaken, NoQuota, Platform
from dlrover_core.testing.stage import Played, check_lineage, play
from dlrover_core.testing.story import Story
from dlrover_core.testing.training import Training

SMALL = Scenario(nodes=3, workers_per_node=2, steps=40, step_s=0.25, boot_s=0.5, notice_s=1.0)
# What must follow for a kind to show in the log: a lie about launches needs a launch.
FOLLOWED_BY: dict[str, tuple[Fault, ...]] = {
    **dict.fromkeys(("create_error", "create_stuck", "quota"), (Fault("event 0", "kill_node", 1),)),
    "clock_jump": (Fault("event 0", "crash_master"),),
    "clock_skew": (Fault("event 0", "crash_master"),),
    "second_master": (Fault("event 0", "crash_master", amount=30.0),),
}
AMOUNTS = {
    "log_slow": 5.0, "create_stuck": 1.0, "preempt": 2.0, "scale": 2.0, "suspend": 5.0, "hang_worker": 20.0,
    "preempt_sooner": 4.0, "preempt_later": 2.0, "preempt_withdrawn": 4.0,
}  # fmt: skip
# What a job never notices is that it was not disturbed.
UNNOTICED = (
    "create_error",
    "node_clock",
    "old_agent",
    "relist",
    "double_messages",
    "reorder_messages",
    "partition",
    "ack_lost",
)


def told(*faults: Fault, scenario: Scenario = SMALL, **how: Any) -> Played:
    """A plan played with every default promise asked after every event."""
    return play(Plan(LOOP, scenario, faults), watch=invariants.DEFAULT, **how)


@pytest.mark.parametrize("kind", kinds(LOOP))
def test_every_kind_ends_well(kind: str) -> None:
    """Whatever is done to a job that has budgets and a spare host: it succeeds, every promise is kept, and twice the same."""
    faults = (Fault("step 10", kind, 1, AMOUNTS.get(kind, 0.0)), *FOLLOWED_BY.get(kind, ()))
    run = told(*faults)
    assert (run.outcome, run.steps, run.missed) == ("succeeded", SMALL.steps, [])
    assert [fault for fault, _ in run.struck] == list(faults)
    assert sum(run.hits.values()) == len(faults)
    assert play(run.plan).log_hash == run.log_hash
    if kind not in UNNOTICED:
        assert run.log_hash != play(Plan(LOOP, SMALL, FOLLOWED_BY.get(kind, ()))).log_hash


MANY = Plan(
    LOOP,
    Scenario(nodes=4, workers_per_node=2, steps=60, step_s=0.5, nodes_min=2, standbys=1, hosted_masters=True),
    (
        Fault("2.001 s", "delay", 1, 0.3),
        Fault("step 5", "kill_worker", 3),
        Fault("WorldFormed", "crash_before_append"),
        Fault("step 20", "drop_to_master", 2, 20.0),
        Fault("event 0", "kill_host", 0, 60.0),
        Fault("relaunch requested", "log_fenced"),
        Fault("all running", "node_clock", 1, 1.5),
        Fault("step 40", "stale_list"),
    ),
    seed=7,
)  # fmt: skip


def test_hash_seed_does_not_matter() -> None:
    """A plan with a bit of everything leaves the same bytes in interpreters with other hash seeds."""
    script = "from tests.chaos.test_stage import MANY, play; print(play(MANY).log_hash)"
    hashes = {play(MANY).log_hash}
    for seed in ("0", "4711"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run(
            [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=60, check=True
        )
        hashes.add(done.stdout.split()[-1])
    assert len(hashes) == 1


def test_seed_orders_what_happens_at_one_moment() -> None:
    """Another seed lets things of one moment happen in another order; the job does not mind."""
    runs = [play(MANY._replace(seed=seed), watch=invariants.DEFAULT) for seed in range(4)]
    assert len({run.log_hash for run in runs}) > 1
    assert {run.outcome for run in runs} == {"succeeded"}


# ---- when faults strike


def test_faults_wait_for_the_one_before_and_times_do_not() -> None:
    """Each fault waits for its moment from the one before it on; those at a time come at that time."""
    run = told(
        Fault("step 20", "kill_worker", 0),
        Fault("all running", "kill_worker", 1),
        Fault("all running", "double_messages", 0),
        Fault("1.5 s", "relist"),
        Fault("step 5", "second_master"),
    )
    assert [fault.kind for fault, _ in run.struck] == [
        "relist", "kill_worker", "kill_worker", "double_messages", "second_master",
    ]  # fmt: skip
    assert run.struck_at[0] == 1.5
    assert run.step_at[19] <= run.struck_at[1] < run.step_at[20]
    assert [name for name in events(run) if name == "IncidentOpened"] == ["IncidentOpened"] * 2
    assert run.struck_at[3] == run.struck_at[4]


def test_a_fault_whose_moment_never_comes_is_missed() -> None:
    """What never strikes is listed, and nothing after it strikes either, unless it has a time."""
    late = (Fault("NodeLost", "kill_worker"), Fault("step 5", "kill_worker"))
    run = told(*late, Fault("2 s", "relist"))
    assert run.missed == list(late)
    assert [fault.kind for fault, _ in run.struck] == ["relist"]


def test_a_fault_waits_for_somebody_to_strike() -> None:
    """Where nobody leads there is no leader to kill: the next one is."""
    run = told(Fault("step 10", "crash_master", amount=5.0), Fault("event 0", "crash_master"))
    assert events(run).count("LeaderStarted") == 2
    assert run.struck_at[1] - run.struck_at[0] >= 5.0


def test_hits_name_the_phase() -> None:
    """The table of hits says what the job was at."""
    run = told(Fault("WorldDissolved", "relist"), Fault("step 5", "kill_node", 0))
    assert run.hits == {}
    run = told(
        Fault("step 5", "kill_node", 0), Fault("WorldDissolved", "relist"), Fault("event 0", "crash_master", amount=9.0)
    )
    assert run.hits == {("kill_node", "training"): 1, ("relist", "waiting"): 1, ("crash_master", "waiting"): 1}


# ---- what a run tells


def events(run: Played) -> list[str]:
    """The kinds of its records."""
    return [type(record.event).__name__ for record in run.records]


def test_run_adds_up() -> None:
    """Times by class sum to the time from the first record on, and steps lost are those made again."""
    scenario = Scenario(nodes=2, steps=40, step_s=0.5, checkpoint_steps=10, checkpoint_s=0.1)
    run = told(Fault("step 17", "kill_worker", 1), scenario=scenario)
    assert run.lost_steps == 7
    assert sum(run.by_class.values()) == pytest.approx(run.virtual_s - run.record_at[0], abs=0.01)
    assert run.goodput == pytest.approx(40 * 0.5 / run.virtual_s)
    assert len(run.records) == run.events == run.state.seq == len(run.record_at)
    assert len(run.step_at) == 40


def test_watchers_see_every_record_once_and_break_the_run() -> None:
    """A promise is asked about every durable record, in order, with the state it led to; broken, it names the record."""
    seen: list[int] = []

    def order(state: JobState, record: Record) -> None:
        assert state.seq == record.seq
        seen.append(record.seq)

    class NoFailures:
        def __call__(self, state: JobState, record: Record) -> None:
            assert not isinstance(record.event, nodes.NodeFailed), "a node failed"

    calm = play(Plan(LOOP, SMALL), watch=[order, NoFailures])
    assert seen == list(range(1, calm.events + 1))
    with pytest.raises(Broken, match="a node failed") as found:
        play(Plan(LOOP, SMALL, (Fault("step 3", "kill_node"),)), watch=[NoFailures])
    assert "NodeFailed" in found.value.event
    assert found.value.seq > 10


def test_other_levels_are_refused() -> None:
    """A plan of another level, and a kind that this one does not have, are refused before anything begins."""
    with pytest.raises(PlanError, match="level"):
        play(Plan("engine", SMALL))
    with pytest.raises(PlanError, match="torn_write"):
        play(Plan(LOOP, SMALL, (Fault("step 1", "torn_write"),)))


def test_lineage() -> None:
    """A step lost, made twice, or made by a generation that is over, is told."""
    scenario = Scenario(steps=6, checkpoint_steps=2)
    check_lineage(scenario, [(1, 1), (1, 2), (1, 3), (2, 3), (2, 4), (2, 5), (2, 6)], whole=True)
    for log in (
        [(1, 1), (1, 3)],
        [(1, 1), (1, 2), (1, 2)],
        [(1, 1), (1, 2), (1, 3), (2, 4)],
        [(1, 1), (2, 1), (1, 2)],
        [(1, 1)],
    ):
        with pytest.raises(Broken):
            check_lineage(scenario, log, whole=True)


def test_size_of_the_world_and_slow_workers_cost_time() -> None:
    """With a fixed batch a world of half the nodes takes twice as long for a step, and a slow worker holds up all."""
    scenario = Scenario(nodes=2, nodes_min=1, spares=0, steps=30, on_join="never", relaunch_max=0)
    run = told(Fault("step 10", "kill_node", 1), scenario=scenario)
    assert run.step_at[29] - run.step_at[28] == pytest.approx(2.0)
    run = told(Fault("step 10", "slow_worker", 1, 3.0), scenario=scenario)
    assert run.step_at[20] - run.step_at[19] == pytest.approx(3.0)


# ---- users' backends


class Ours:
    """A backend of one's own, as short as can be: it asks the room, and remembers nothing."""

    def __init__(self, room: Platform) -> None:
        self._room = room

    def _fence(self, token: int) -> None:
        if token < self._room.notes.get("token", 0):
            raise PermissionError(f"token {token} is old")
        self._room.notes["token"] = token

    async def launch(self, node: NodeLaunch, token: int) -> None:
        """Start a machine of the node's own name: who asks twice finds it taken."""
        self._fence(token)
        try:
            await self._room.start(node.name, node)
        except NameTaken:
            return
        except NoQuota as refused:
            raise LaunchRefused(str(refused), permanent=False) from refused

    async def delete(self, name: str, token: int, grace_s: float) -> None:
        """Stop it."""
        self._fence(token)
        await self._room.stop(name, grace_s)

    async def observe(self) -> AsyncIterator[Listed | Changed]:
        """List, and follow what comes after; where the stream breaks, whoever observes begins anew."""
        version, machines = self._room.snapshot()
        yield Listed(tuple(seen(machine) for machine in machines))
        async for machine in self._room.changes(version):
            yield Changed(seen(machine))

    async def room(self, group: str) -> int | None:
        """As many as there are free hosts."""
        return self._room.free


def seen(machine: Machine) -> Observation:
    """A machine as a backend tells it."""
    return Observation(machine.name, machine.phase, machine.exit_code, machine.reason, machine.host)


class NewNames(Ours):
    """Its mistake: every call starts a machine, under a name that nobody has had."""

    async def launch(self, node: NodeLaunch, token: int) -> None:
        """Not idempotent."""
        number = self._room.notes["number"] = self._room.notes.get("number", 0) + 1
        await self._room.start(f"{node.name}.{number}", node)

    async def delete(self, name: str, token: int, grace_s: float) -> None:
        """The newest of that name."""
        for machine in reversed(self._room.snapshot().machines):
            if machine.name.startswith(f"{name}."):
                await self._room.stop(machine.name, grace_s)
                return

    async def observe(self) -> AsyncIterator[Listed | Changed]:
        """Without the number, each name once."""
        async for told in super().observe():
            told_nodes = told.nodes if isinstance(told, Listed) else (told.node,)
            short = {one.name.rpartition(".")[0]: one for one in told_nodes}
            mine = tuple(one._replace(name=name) for name, one in short.items())
            yield Listed(mine) if isinstance(told, Listed) else Changed(mine[0])


class Deaf(Ours):
    """Its mistake: when the stream of changes breaks it goes on with what comes from then on, and lists nothing."""

    async def observe(self) -> AsyncIterator[Listed | Changed]:
        """`Listed` once, at the beginning."""
        version, machines = self._room.snapshot()
        yield Listed(tuple(seen(machine) for machine in machines))
        while True:
            async for machine in self._room.changes(version):
                yield Changed(seen(machine))
            await asyncio.sleep(5.0)
            version = self._room.snapshot().version


class Forgetful(Ours):
    """Its mistake: it lists the machines that it has started itself. The next master's knows of none."""

    def __init__(self, room: Platform) -> None:
        super().__init__(room)
        self._mine: set[str] = set()

    async def launch(self, node: NodeLaunch, token: int) -> None:
        """And remembers it."""
        self._mine.add(node.name)
        await super().launch(node, token)

    async def observe(self) -> AsyncIterator[Listed | Changed]:
        """Only its own."""
        async for told in super().observe():
            if isinstance(told, Listed):
                yield Listed(tuple(one for one in told.nodes if one.name in self._mine))
            elif told.node.name in self._mine:
                yield told


class TestOurs(BackendConformance):
    """The example keeps the contract of all backends, over a room whose machines do nothing."""

    @contextlib.asynccontextmanager
    async def make_backend(self) -> AsyncIterator[Stand]:
        """An empty room."""

        async def live(node: NodeLaunch, host: str) -> str:
            await asyncio.get_running_loop().create_future()
            return ""

        room = Platform(live, boot_s=0.0)

        async def kill(name: str) -> None:
            room.kill(name)

        yield Stand(Ours(room), kill, cannot=dict.fromkeys(("waits", "lost", "notices"), "the example does not say"))
        await room.close()


LYING = (
    Fault("0 s", "create_error", amount=2.0),
    Fault("step 5", "relist"),
    Fault("step 8", "stale_list", amount=3.0),
    Fault("step 10", "quota", amount=5.0),
    Fault("step 12", "kill_node", 1),
    Fault("step 20", "crash_master"),
    Fault("all running", "preempt_now", 2),
)


def test_a_backend_of_ones_own_lives_through_a_lying_scheduler() -> None:
    """A user's backend, made anew for each master, serves a job whose scheduler lies in every way."""
    made: list[Ours] = []

    def make(room: Platform) -> Ours:
        made.append(Ours(room))
        return made[-1]

    run = told(*LYING, backend=make)
    assert (run.outcome, run.missed) == ("succeeded", [])
    assert len(made) == 2
    assert run.log_hash == told(*LYING).log_hash


def test_a_launch_that_is_not_idempotent_is_caught() -> None:
    """A launch that was answered with an error is asked again: who then starts a second machine is told so."""
    with pytest.raises(Broken, match="worker-0-0 was started 2 times: a launch must be idempotent"):
        told(Fault("0 s", "create_error", amount=1.0), backend=NewNames)


def test_a_backend_that_misses_changes_is_caught() -> None:
    """Who does not list again after the stream broke does not know of the node that died meanwhile: nobody replaces it."""
    for backend in (Ours, Deaf):
        story = Story(SMALL, backend=backend)
        story.at("step 5").kill_node(0)
        story.at("incident opened").relist()
        story.eventually("all running", within_s=60)
        with contextlib.nullcontext() if backend is Ours else pytest.raises(Broken, match="all running, within 60 s"):
            story.play()


def test_a_backend_that_keeps_its_books_in_memory_is_caught() -> None:
    """The next master's backend knows of no node: all are taken for gone, and replaced for nothing."""
    for backend in (Ours, Forgetful):
        story = Story(SMALL, backend=backend)
        story.at("step 5").crash_master()
        story.never("relaunch requested")
        with contextlib.nullcontext() if backend is Ours else pytest.raises(Broken, match="never relaunch requested"):
            story.play()


# ---- links


async def pair(network: Network) -> tuple[MemoryConnection, MemoryConnection]:
    """Both ends of a connection of host h: the host's and the master's."""
    accepted: asyncio.Queue[MemoryConnection] = asyncio.Queue()

    async def accept(connection: Any) -> None:
        accepted.put_nowait(connection)

    await network.listener("m").serve(accept, dict)
    here = await network.dialer("h").connect("m")
    assert isinstance(here, MemoryConnection)
    return here, await accepted.get()


def numbered(number: int) -> bytes:
    """A command's frame."""
    return messages.encode(messages.numbered(number, nodes.ReportLeft("worker-0-0")))


def numbers(frames: list[bytes]) -> list[int]:
    """Which commands these are."""
    return [message.number for message in map(messages.decode, frames) if isinstance(message, Numbered)]


async def arrived(end: MemoryConnection) -> list[bytes]:
    """What has come by now."""
    await asyncio.sleep(1.0)
    return [await end.receive() for _ in range(len(end._inbox))]


def test_doubled_and_overtaken_are_only_commands_and_beats() -> None:
    """Commands come twice, or before the one that was sent before; a greeting and a goodbye come once and in their place."""

    async def story() -> None:
        network = Network()
        here, there = await pair(network)
        network.link("h").double, network.link("h").reorder = 1, 1
        await here.send(messages.encode(Hello(2, "", "worker-0-0", 1, 0, 0)))
        for number in (1, 2, 3, 4):
            await here.send(numbered(number))
        first, *rest = await arrived(there)
        assert isinstance(messages.decode(first), Hello)
        assert numbers(rest) == [2, 1, 2, 3, 4]
        network.link("h").reorder = 1
        await here.send(numbered(5))
        assert await arrived(there) == []
        await here.close()
        assert numbers(await arrived(there)) == [5]
        assert there.closed

    virtual_loop.run(story())


def test_one_way_silence() -> None:
    """Where one way is silent the other still works; what vanished once leaves a hole, and nothing comes behind it."""

    async def story() -> None:
        network = Network()
        here, there = await pair(network)
        link = network.link("h")
        link.mute = 1
        await here.send(numbered(1))
        await there.send(messages.encode(Beat(1, 1, 0)))
        assert await arrived(there) == []
        assert len(await arrived(here)) == 1
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(network.dialer("h").connect("m"), 30)
        link.mute = 0
        await here.send(numbered(2))
        assert await arrived(there) == []
        assert not there.closed
        again = await network.dialer("h").connect("m")
        await again.send(numbered(3))

    virtual_loop.run(story())


def test_a_lost_frame_takes_its_connection_with_it() -> None:
    """A stream cannot lose a frame and go on: both ends hear of a reset."""

    async def story() -> None:
        network = Network()
        here, there = await pair(network)
        network.link("h").lose = 1
        await here.send(numbered(1))
        for end in (here, there):
            with pytest.raises(ConnectionLost) as lost:
                await end.receive()
            assert lost.value.ended
        network.link("h").late_s = 2.0
        began = asyncio.get_running_loop().time()
        assert await network.dialer("h").connect("m")
        assert asyncio.get_running_loop().time() == began + 4.0

    virtual_loop.run(story())


def test_late_frames_keep_their_order() -> None:
    """What is sent when a link has become fast again does not overtake what is still under way."""

    async def story() -> None:
        network = Network()
        here, there = await pair(network)
        network.link("h").late_s = 5.0
        await here.send(numbered(1))
        network.link("h").late_s = 0.0
        await here.send(numbered(2))
        assert await arrived(there) == []
        await asyncio.sleep(5.0)
        assert numbers(await arrived(there)) == [1, 2]

    virtual_loop.run(story())


def test_old_agents_speak_the_oldest_protocol() -> None:
    """An agent that starts as an old one is served as one, and the job goes on with old and new together."""

    async def story() -> None:
        spec = JobSpec("old", (GroupSpec(nodes_min=2, nodes_max=2),))
        async with Cluster(spec, training=Training(30)) as cluster:
            await cluster.until(lambda: cluster.training.done >= 3)
            cluster.agent_version = messages.OLDEST_VERSION
            cluster.kill_node("worker-1-0")
            await cluster.until(lambda: cluster.training.done >= 8)
            sessions = [cluster.master.sessions.of(node) for node in ("worker-0-0", "worker-1-1")]
            assert [one.version for one in sessions if one is not None] == [messages.VERSION, messages.OLDEST_VERSION]
            assert (await cluster.outcome()).state == "succeeded"

    virtual_loop.run(story())


def test_agents_with_clocks_of_their_own() -> None:
    """A node whose clock runs fast reports more often, one whose clock runs slow seldom; ages are by its own clock."""

    async def story() -> None:
        spec = JobSpec("clocks", (GroupSpec(nodes_min=2, nodes_max=2),), silence_s=5.0)
        async with Cluster(spec, training=Training(100)) as cluster:
            await cluster.until(lambda: cluster.training.done >= 3)
            cluster._loop.skew("worker-0-0", 1000.0)
            cluster._loop.skew("worker-1-0", 0.1)
            await cluster.until(lambda: cluster.state.nodes.nodes["worker-1-0"].state == "suspect", limit_s=10)
            assert cluster.state.nodes.nodes["worker-0-0"].state == "running"
            cluster.kill_worker(0)
            assert (await cluster.outcome()).state == "succeeded"
            ages = [record.event.age_us for record in await cluster.records() if hasattr(record.event, "age_us")]
            assert max(ages) < 20_000_000

    virtual_loop.run(story())


def test_a_job_that_cannot_go_on_is_told_and_not_waited_for() -> None:
    """A job for which there will never be hosts enough stalls: the run ends, and says how far it came."""
    with pytest.raises(Stalled, match="at step 0") as found:
        play(Plan(LOOP, SMALL), backend=Idle, limit_s=100)
    assert found.value.seq > 0


class Idle(Ours):
    """It takes every order and does nothing."""

    async def launch(self, node: NodeLaunch, token: int) -> None:
        """Later, perhaps."""
