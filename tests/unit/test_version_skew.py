"""Protocol 1 against protocol 2: recorded frames of the older side, which must be able to read all that it is sent."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgpack
import pytest
from samples import of
from structlog.testing import capture_logs

from dlrover_core.errors import ConnectionLost
from dlrover_core.job import checkpoints, failures, health, nodes, scaling, world
from dlrover_core.job.orders import NodeLaunch, Order
from dlrover_core.kernel import wire
from dlrover_core.runtime import messages
from dlrover_core.runtime.agent import Agent
from dlrover_core.runtime.duties import Duty
from dlrover_core.runtime.ending import Ending
from dlrover_core.runtime.transport import Connection
from dlrover_core.spec import GroupSpec, JobSpec
from dlrover_core.testing import virtual_loop
from dlrover_core.testing.cluster import ADDRESS, Cluster
from dlrover_core.testing.invariants import check
from dlrover_core.testing.network import MemoryConnection, Network
from dlrover_core.testing.saving import Knobs, SaveDuty, Saving
from dlrover_core.testing.training import MemoryLauncher, Training

# Recorded with version 1, byte for byte: an agent's whole life as worker-0-0, boot 5, and what a master said to one.
FRAMES = {
    "hello": "92019601a572756e2d31aa776f726b65722d302d30050000",
    "joined": "920493010194aa776f726b65722d302d30a168a831302e302e302e3101",
    "store": "920493020492aa776f726b65722d302d30ad31302e302e302e313a34303030",
    "started": "920493030692aa776f726b65722d302d3001",
    "finished": "920493040893aa776f726b65722d302d300107",
    "left": "920493050291aa776f726b65722d302d30",
    "beat": "920893010764",
    "welcome": "92029901a572756e2d3101ce000f4240ce00e4e1c0ce03938700ce004c4b4003ce01c9c380",
    "order": "920792019ec2a000010001010001ab656c736577686572653a31ff000000",
    "refusal": "920393d92970726f746f636f6c2032206973206e6f742073657276656420686572653a203120746f203120617265c3a0",
}
# How many fields version 1 declared, by kind of message; it refused any further one, and kinds it did not know.
WIDTHS = {1: 6, 2: 9, 3: 3, 4: 3, 5: 3, 6: 1, 7: 2, 8: 3, 9: 1}
ORDER_WIDTH = 14
JOINED_WIDTH = 4


def frame(name: str) -> bytes:
    """A recorded frame."""
    return bytes.fromhex(FRAMES[name])


def readable(raw: bytes) -> tuple[int, list[Any]]:
    """Kind and fields of a frame, as version 1 would accept them."""
    kind, fields = msgpack.unpackb(raw)
    assert kind in WIDTHS, f"version 1 does not know kind {kind}"
    assert len(fields) <= WIDTHS[kind], f"kind {kind} has {WIDTHS[kind]} fields, got {fields}"
    if kind == 7:
        assert len(fields[1]) <= ORDER_WIDTH, fields
    return kind, fields


class Old:
    """An agent of version 1, played back from its recording."""

    def __init__(self, connection: MemoryConnection) -> None:
        self.connection = connection
        self.heard: list[tuple[int, list[Any]]] = []

    async def say(self, *names: str) -> None:
        """Send recorded frames."""
        for name in names:
            await self.connection.send(frame(name))

    async def until(self, kind: int, *, leave: bool | None = None) -> list[Any]:
        """Hear until a frame of this kind, or an order to leave, comes."""
        while True:
            heard = readable(await asyncio.wait_for(self.connection.receive(), 60))
            self.heard.append(heard)
            if heard[0] == kind and (leave is None or heard[1][1][0] is leave):
                return heard[1]


def test_master_serves_an_older_agent() -> None:
    """An agent of version 1 lives its whole life at a master of version 2, which tells it nothing that it could not read."""

    async def story() -> None:
        async with Cluster(JobSpec("j", (GroupSpec(),)), boot_s=10_000) as cluster:
            await cluster.master.led.wait()
            old = Old(cluster.network.connect("h", ADDRESS))
            await old.say("hello")
            assert (await old.until(2))[0] == 1, "it is greeted in its own version"
            await old.say("joined", "store")
            while (order := (await old.until(7, leave=False))[1])[3] != 1:
                pass
            assert order[9] == "10.0.0.1:4000"
            await old.say("started", "beat", "finished")
            order = (await old.until(7, leave=True))[1]
            assert order[1] == "the job is succeeded"
            await old.say("left")
            while (await old.until(5))[0] != 5:
                pass
            assert cluster.state.nodes.nodes["worker-0-0"].released == "left"

    virtual_loop.run(story())


@pytest.mark.parametrize(
    ("change", "says"),
    [({"run": "run-0"}, "run run-0 is over"), ({"node": "worker-7-0"}, "worker-7-0 is not a node of this run")],
    ids=["run", "stranger"],
)
def test_older_agents_are_turned_away_readably(change: dict[str, str], says: str) -> None:
    """A goodbye to an agent of version 1 has no field that it would refuse."""

    async def story() -> None:
        async with Cluster(JobSpec("j", (GroupSpec(),))) as cluster:
            await cluster.master.led.wait()
            hello = messages.decode(frame("hello"))
            assert isinstance(hello, messages.Hello)
            connection = cluster.network.connect("h", ADDRESS)
            await connection.send(messages.encode(hello._replace(**change), 1))
            kind, fields = readable(await connection.receive())
            assert (kind, fields[1]) == (3, True)
            assert says in fields[0]
            await cluster.outcome()

    virtual_loop.run(story())


@pytest.mark.parametrize("version", [0, messages.VERSION + 1])
def test_foreign_versions_are_refused(version: int) -> None:
    """A version that is not served hears what to install, in words that version 1 can read; the log has one line of it."""

    async def story() -> None:
        async with Cluster(JobSpec("j", (GroupSpec(),))) as cluster:
            await cluster.master.led.wait()
            hello = messages.decode(frame("hello"))
            assert isinstance(hello, messages.Hello)
            with capture_logs() as lines:
                connection = cluster.network.connect("h", ADDRESS)
                await connection.send(messages.encode(hello._replace(version=version), 1))
                raw = await connection.receive()
            _, fields = readable(raw) if version == 0 else msgpack.unpackb(raw)
            assert fields[1] is True
            assert (
                f"protocol {version} is not served here: 1 to {messages.VERSION} are; install dlrover-core "
                in fields[0]
            )
            assert [line["log_level"] for line in lines if "turned away" in line["event"]] == ["warning"]
            await cluster.outcome()

    virtual_loop.run(story())


# ---- an older master


class Stage:
    """A master of version 1 that says what was recorded, and one agent of ours."""

    def __init__(self, node: str, duties: Sequence[Duty] = ()) -> None:
        self.network = Network()
        self.connections: asyncio.Queue[Connection] = asyncio.Queue()
        self.listener = self.network.listener("m")
        self.agent = Agent(
            node,
            launcher=MemoryLauncher("h", 1, Training(10_000)),
            dialer=self.network.dialer("h"),
            masters=["m"],
            boot=1,
            host="h",
            address="h",
            seat="" if node else "0",
            duties=duties,
        )

    async def run(self) -> asyncio.Task[str]:
        """Begin."""

        async def accept(connection: Connection) -> None:
            self.connections.put_nowait(connection)

        await self.listener.serve(accept, dict)
        return virtual_loop.spawn("agent", self.agent.run())


def test_older_master_refuses_us() -> None:
    """A master of version 1 can read our greeting, refuses it, and the agent ends saying so."""

    async def story() -> None:
        stage = Stage("worker-0-0")
        running = await stage.run()
        connection = await stage.connections.get()
        kind, fields = readable(await connection.receive())
        assert (kind, fields[0]) == (1, messages.VERSION)
        await connection.send(frame("refusal"))
        assert await running == "protocol 2 is not served here: 1 to 1 are"
        assert stage.agent.ending == Ending("", "protocol 2 is not served here: 1 to 1 are")

    virtual_loop.run(story())


def test_older_master_that_serves_us() -> None:
    """Greeted by a master of version 1 an agent says nothing that it could not read."""

    async def story() -> None:
        stage = Stage("worker-0-0")
        running = await stage.run()
        connection = await stage.connections.get()
        await connection.receive()
        await connection.send(frame("welcome"))
        kind, fields = readable(await connection.receive())
        assert (kind, fields[1]) == (4, 1)
        assert len(fields[2]) <= JOINED_WIDTH
        await connection.send(frame("order"))
        while (said := readable(await connection.receive()))[1][1] != 6:
            assert said[0] in (4, 8)
        stage.agent.leave("enough")
        with pytest.raises(ConnectionLost):  # noqa: PT012  # each frame is looked at
            while True:
                assert readable(await connection.receive())[0] in (4, 8)
        await running

    virtual_loop.run(story())


def test_older_master_cannot_read_a_standby() -> None:
    """A standby's greeting is more than version 1 can read: it closes, and the agent's log says what that may mean."""

    async def story() -> None:
        stage = Stage("")
        with capture_logs() as lines:
            running = await stage.run()
            connection = await stage.connections.get()
            kind, fields = msgpack.unpackb(await connection.receive())
            assert len(fields) > WIDTHS[kind]
            await connection.close()
            await stage.connections.get()
        assert any("older than protocol 2" in line.get("hint", "") for line in lines)
        running.cancel()

    virtual_loop.run(story())


# How many fields version 2 had of what has grown since; beside these and the kinds of version 1 nothing has grown.
GROWN_SINCE_2 = {Order: 16, messages.Beat: 3, messages.BeatSeen: 1, failures.ReportExit: 9, world.ReportFinished: 3}
# And version 3.
GROWN_SINCE_3 = {Order: 26, messages.Beat: 9, messages.BeatSeen: 1, world.ReportFinished: 3}
# And version 4.
GROWN_SINCE_4 = {Order: 36, world.ReportFinished: 3}


def test_widths_are_those_of_version_1() -> None:
    """What is cut for version 1 is what has grown since, and nothing else."""
    grown = {messages.Hello: 6, messages.Goodbye: 3, Order: ORDER_WIDTH, nodes.ReportJoined: JOINED_WIDTH}
    grown = {**GROWN_SINCE_2, **grown}
    assert dict(messages._WIDTHS[1]) == grown
    for cls, width in grown.items():
        assert len(cls._fields) > width
    for kind, cls in messages._FRAMES.items():
        assert cls in grown or kind not in WIDTHS or len(cls._fields) == WIDTHS[kind]  # type: ignore[attr-defined]


def test_widths_are_those_of_version_2() -> None:
    """So it is for version 2; and the commands that duties send are of version 3, so that none goes to an older master."""
    assert dict(messages._WIDTHS[2]) == GROWN_SINCE_2
    for cls, width in GROWN_SINCE_2.items():
        assert len(cls._fields) > width
    assert sorted(wire.COMMANDS) == list(range(1, len(wire.COMMANDS) + 1))
    assert wire.COMMANDS[13] is scaling.LeaveNode, "the last of version 2"


def test_widths_are_those_of_version_3() -> None:
    """So it is for version 3; what is said of checkpoints is of version 4."""
    assert dict(messages._WIDTHS[3]) == GROWN_SINCE_3
    assert wire.COMMANDS[16] is health.ReportCheck, "the last of version 3"
    for cls, width in GROWN_SINCE_3.items():
        assert len(cls._fields) > width
    for kind, cls in wire.COMMANDS.items():
        assert wire.since(cls) == (1 if kind < 14 else 3 if kind < 17 else 4)


def test_widths_are_those_of_version_4() -> None:
    """Version 4 knows neither what a generation left undecided nor which due state a good end lacks."""
    assert dict(messages._WIDTHS[4]) == GROWN_SINCE_4
    for cls, width in GROWN_SINCE_4.items():
        assert len(cls._fields) == width + (1 if cls is Order else 2)


@pytest.mark.parametrize(("version", "grown"), [(3, GROWN_SINCE_3), (4, GROWN_SINCE_4)])
def test_older_peers_are_told_only_what_they_know(version: int, grown: dict[type, int]) -> None:
    """What has grown since has the fields of then; the newest version hears all of it."""
    for cls, width in grown.items():
        message = of(cls)
        assert messages.fields_for(message, version) == tuple(message)[:width]
        assert messages.fields_for(message, messages.VERSION) == message


@pytest.mark.parametrize("versions", [(1, 1), (2, 2), (3, 3), (5, 3), (3, 5), (4, 3)])
def test_a_job_that_saves_with_older_agents(versions: tuple[int, int]) -> None:
    """Agents of before checkpoints are served as ever: the job is restarted and succeeds; nothing is committed without all."""
    saving = Saving(Knobs(every=2, store_every=10, spread=0))

    async def story() -> list[Any]:
        spec = JobSpec("j", (GroupSpec(nodes_min=2, nodes_max=2),))
        async with Cluster(spec, training=Training(60, saving=saving)) as cluster:
            made = cluster.agent

            def of_its_version(node: NodeLaunch, host: str) -> Agent:
                cluster.agent_version = versions[node.index]
                return made(node, host)

            cluster.agent = of_its_version  # type: ignore[method-assign]
            await cluster.until(lambda: cluster.training.done >= 25)
            cluster.kill_worker(1)
            assert (await cluster.outcome()).state == "succeeded"
            await check(cluster)
            return [record.event for record in await cluster.records()]

    events = virtual_loop.run(story())
    assert not any(isinstance(one, (checkpoints.CheckpointCommitted, checkpoints.SaveOrdered)) for one in events)
    told = any(isinstance(one, checkpoints.Restored) for one in events)
    assert told == (versions[0] > 3), "rank 0's node tells it, if it is new enough"
    assert saving.restores[-1].generation == 2


def test_an_agent_that_saves_at_an_older_master() -> None:
    """A master of version 3 can read all that our agent says: what was queued before it was known how old it is, too."""

    async def story() -> None:
        stage = Stage("worker-0-0", [SaveDuty(Saving(Knobs(replicas=True)))])
        running = await stage.run()
        connection = await stage.connections.get()
        await connection.receive()
        welcome = messages.decode(frame("welcome"))
        assert isinstance(welcome, messages.Welcome)
        await connection.send(messages.encode(welcome._replace(version=3), 3))
        beats = 0
        while beats < 3:
            kind, fields = msgpack.unpackb(await connection.receive())
            beats += kind == 8
            assert kind != 8 or len(fields) <= GROWN_SINCE_3[messages.Beat]
            assert kind != 4 or fields[1] < 17, "version 3 does not know this command"
            if kind == 4:
                await connection.send(messages.encode(messages.Answer(fields[0], 1), 3))
            if kind == 8:
                await connection.send(messages.encode(messages.BeatSeen(3, 7), 3))
        running.cancel()

    virtual_loop.run(story())
