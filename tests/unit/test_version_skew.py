"""Version 4 of the protocol against ours: recorded frames of the older side, which must be able to read all that it is sent."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgpack
import pytest
from orders import ordering
from samples import of
from structlog.testing import capture_logs

from dlrover_core.diagnosis.stall import Pulse
from dlrover_core.errors import MalformedMessage
from dlrover_core.job import checkpoints
from dlrover_core.job.checkpoints import Keep, OfferReplica
from dlrover_core.job.orders import NodeLaunch, Order
from dlrover_core.job.progress import ReportFirstStep
from dlrover_core.job.world import ReportFinished
from dlrover_core.kernel import wire
from dlrover_core.kernel.wire import COMMANDS
from dlrover_core.runtime import messages, version_4
from dlrover_core.runtime.agent import Agent
from dlrover_core.runtime.duties import Duty
from dlrover_core.runtime.ending import Ending
from dlrover_core.runtime.keeping import Everywhere, KeptBeat
from dlrover_core.runtime.levels import Beat, BeatSeen
from dlrover_core.runtime.messages import Goodbye, Hello, Level, Numbered, Welcome, decode, encode
from dlrover_core.runtime.paces import LossBeat, PaceBeat
from dlrover_core.runtime.transport import Connection
from dlrover_core.spec import GroupSpec, JobSpec
from dlrover_core.testing import virtual_loop
from dlrover_core.testing.cluster import ADDRESS, Cluster
from dlrover_core.testing.invariants import check
from dlrover_core.testing.network import MemoryConnection, Network
from dlrover_core.testing.saving import Knobs, SaveDuty, Saving
from dlrover_core.testing.training import MemoryLauncher, Training

OLD = 4
# Recorded with the release that spoke version 4, byte for byte, each with the fields that were not at their defaults.
RECORDED = json.loads((Path(__file__).parent / "golden" / "protocol_4.json").read_text())
# How many fields version 4 declared, by kind of message; it refused any further one.
WIDTHS = {1: 10, 2: 9, 3: 4, 4: 3, 5: 3, 6: 1, 7: 2, 8: 10, 9: 4, 10: 2}
ORDER_WIDTH = 36


def frame(of_what: str, name: str) -> bytes:
    """A recorded frame."""
    found = RECORDED[of_what][name]
    return bytes.fromhex(found if isinstance(found, str) else found["frame"])


def readable(raw: bytes) -> tuple[int, list[Any]]:
    """Kind and fields of a frame, as version 4 would accept them."""
    kind, fields = msgpack.unpackb(raw)
    assert len(fields) <= WIDTHS[kind], f"kind {kind} has {WIDTHS[kind]} fields in version 4, got {fields}"
    if kind == 7:
        assert len(fields[1]) <= ORDER_WIDTH, fields
    if kind == 4:
        then = msgpack.unpackb(frame("commands", COMMANDS[fields[1]].__name__))[1][2]
        assert len(fields[2]) <= len(then), f"{COMMANDS[fields[1]].__name__} had {len(then)} fields, got {fields[2]}"
    return kind, fields


# ---- what is recorded


@pytest.mark.parametrize("name", RECORDED["orders"])
def test_orders_are_flat_to_older_agents_and_from_older_masters(name: str) -> None:
    """The recorded frame says what its fields say, in both directions, byte for byte."""
    raw = frame("orders", name)
    level = decode(raw, OLD)
    assert isinstance(level, Level)
    order = messages.order_of(level, OLD)
    said = {key: _tuples(value) for key, value in RECORDED["orders"][name]["fields"].items()}
    assert order == ordering(Order(said.pop("leave"), said.pop("reason"), said.pop("grace_us")), **said)
    assert encode(messages.level(7, order, OLD), OLD) == raw
    assert messages.order_of(decode(encode(messages.level(7, order))), messages.VERSION) == order  # type: ignore[arg-type]


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


@pytest.mark.parametrize("name", RECORDED["beats"])
def test_heartbeats_are_flat_in_version_4(name: str) -> None:
    """The recorded frame has the parts that its fields say, and is made of them again."""
    raw, said = frame("beats", name), RECORDED["beats"][name]["fields"]
    beat = decode(raw, OLD)
    assert isinstance(beat, Beat)
    assert beat[:3] == (said["generation"], said["step"], said["lag_us"])
    assert {type(one) for one in beat.parts} == {
        cls
        for cls, field in ((Pulse, "idle_us"), (PaceBeat, "pace"), (LossBeat, "losses"), (KeptBeat, "kept"))
        if field in said
    }
    pulse, kept = wire.find(beat.parts, Pulse), wire.find(beat.parts, KeptBeat)
    assert (pulse.idle_us, pulse.step_us) == (said.get("idle_us", -1), said.get("step_us", 0))
    assert version_4.kept(kept) == tuple(said.get("kept", ()))
    assert encode(beat, OLD) == raw
    assert decode(encode(beat)) == beat
    assert readable(encode(beat._replace(parts=(*beat.parts, Pulse(1, 2, total=1000))), OLD))


@pytest.mark.parametrize("name", RECORDED["seen"])
def test_answers_to_heartbeats_are_flat_in_version_4(name: str) -> None:
    """The recorded frame says what its fields say, and an answer is made as it was."""
    raw, said = frame("seen", name), RECORDED["seen"][name]["fields"]
    seen = decode(raw, OLD)
    assert isinstance(seen, BeatSeen)
    told = Everywhere(*(said.get(field, -1) for field in Everywhere._fields))
    assert (seen.token, wire.find(seen.parts, Everywhere)) == (said["token"], told)
    assert encode(seen, OLD) == raw


@pytest.mark.parametrize("name", RECORDED["commands"])
def test_commands_have_the_fields_of_version_4(name: str) -> None:
    """Each recorded command is understood, and is said to older masters as it was."""
    raw, kind = frame("commands", name), RECORDED["commands"][name]["kind"]
    then = decode(raw, OLD)
    assert isinstance(then, Numbered)
    command = messages.command_of(then)
    assert (type(command), type(command).__name__) == (COMMANDS[kind], name)
    assert encode(messages.numbered(9, of(COMMANDS[kind]), OLD), OLD) == raw


@pytest.mark.parametrize("name", RECORDED["frames"])
def test_the_other_messages_are_as_they_were(name: str) -> None:
    """What else is said has not changed."""
    raw = frame("frames", name)
    assert encode(decode(raw, OLD), OLD) == raw


def test_what_version_4_does_not_know_is_left_out() -> None:
    """Fields that are newer than version 4 are said to ours alone."""
    order = Order(False, "", 0).telling(Keep(committed=3, committed_of=1, decided=1))
    level = decode(encode(messages.level(7, order, OLD), OLD), OLD)
    assert messages.order_of(level, OLD).part(Keep) == Keep(committed=3, committed_of=1)  # type: ignore[arg-type]
    ended = ReportFinished("n", 3, 16, "step 16 is not a checkpoint on storage", 16)
    assert messages.numbered(1, ended, OLD).fields == ("n", 3, 16)
    assert messages.command_of(messages.numbered(1, ended)) == ended
    first = ReportFirstStep("n", 1, 1, 5, True, 7)
    assert messages.numbered(1, first, OLD).fields == first[:5]


@pytest.mark.parametrize(
    "fields",
    [(), (True,), (True, "r", "x"), (True, "r", 0, *[0] * 40), (True, "r", 0, "x"), (True, "r", 0, *[0] * 6, 5)],
)
def test_bad_flat_fields_are_refused(fields: tuple[Any, ...]) -> None:
    """An order of version 4 is checked like any other."""
    with pytest.raises(MalformedMessage):
        messages.order_of(Level(1, fields), OLD)


# ---- an older agent


class OldAgent:
    """An agent of version 4, played back from its recording."""

    def __init__(self, connection: MemoryConnection) -> None:
        self.connection = connection

    async def say(self, *said: messages.Message) -> None:
        """Send these in the shapes of then."""
        for one in said:
            await self.connection.send(encode(one, OLD))

    async def until(self, kind: int, *, leave: bool | None = None) -> list[Any]:
        """Hear until a frame of this kind, or an order to leave, comes."""
        while True:
            heard = readable(await asyncio.wait_for(self.connection.receive(), 60))
            if heard[0] == kind and (leave is None or heard[1][1][0] is leave):
                return heard[1]


def hello(**fields: Any) -> Hello:
    """What an agent of version 4 says first."""
    return Hello(OLD, "run-1", "worker-0-0", 5, 0, 0, "h", 1)._replace(**fields)


def test_master_serves_an_older_agent() -> None:
    """An agent of version 4 lives its whole life at our master, which tells it nothing that it could not read."""

    async def story() -> None:
        async with Cluster(JobSpec("j", (GroupSpec(),)), boot_s=10_000) as cluster:
            await cluster.master.led.wait()
            old = OldAgent(cluster.network.connect("h", ADDRESS))
            await old.say(hello())
            assert (await old.until(2))[0] == OLD, "it is greeted in its own version"
            node = "worker-0-0"
            commands = [
                COMMANDS[1](node, "h", "10.0.0.1", 1), COMMANDS[4](node, "10.0.0.1:4000"), COMMANDS[6](node, 1),
                COMMANDS[8](node, 1, 7), COMMANDS[2](node),
            ]  # fmt: skip
            said = [messages.numbered(number, one, OLD) for number, one in enumerate(commands, start=1)]
            await old.say(*said[:2])
            while (order := (await old.until(7, leave=False))[1])[3] != 1:
                pass
            assert order[9] == "10.0.0.1:4000"
            await old.say(said[2])
            await old.connection.send(frame("beats", "all"))
            assert len(await old.until(9)) == 4
            await old.say(said[3])
            order = (await old.until(7, leave=True))[1]
            assert order[1] == "the job is succeeded"
            await old.say(said[4])
            while (await old.until(5))[0] != 5:
                pass
            assert cluster.state.nodes.nodes[node].released == "left"

    virtual_loop.run(story())


@pytest.mark.parametrize(
    ("change", "says"),
    [({"run": "run-0"}, "run run-0 is over"), ({"node": "worker-7-0"}, "worker-7-0 is not a node of this run")],
    ids=["run", "stranger"],
)
def test_older_agents_are_turned_away_readably(change: dict[str, str], says: str) -> None:
    """A goodbye to an agent of version 4 has no field that it would refuse."""

    async def story() -> None:
        async with Cluster(JobSpec("j", (GroupSpec(),))) as cluster:
            await cluster.master.led.wait()
            connection = cluster.network.connect("h", ADDRESS)
            await connection.send(encode(hello(**change), OLD))
            kind, fields = readable(await connection.receive())
            assert (kind, fields[1]) == (3, True)
            assert says in fields[0]
            await cluster.outcome()

    virtual_loop.run(story())


@pytest.mark.parametrize("version", [0, 1, 2, 3, messages.VERSION + 1])
def test_foreign_versions_are_refused(version: int) -> None:
    """A version that is not served hears what to install, in words that version 1 can read; the log has one line of it."""

    async def story() -> None:
        async with Cluster(JobSpec("j", (GroupSpec(),))) as cluster:
            await cluster.master.led.wait()
            with capture_logs() as lines:
                connection = cluster.network.connect("h", ADDRESS)
                # As version 1 greets: six fields.
                await connection.send(msgpack.packb([1, [version, "run-1", "worker-0-0", 5, 0, 0]]))
                raw = await connection.receive()
            kind, fields = msgpack.unpackb(raw)
            assert (kind, fields[1]) == (3, True)
            assert version > messages.VERSION or len(fields) == 3
            assert f"protocol {version} is not served here: 4 to 5 are; install dlrover-core " in fields[0]
            assert [line["log_level"] for line in lines if "turned away" in line["event"]] == ["warning"]
            await cluster.outcome()

    virtual_loop.run(story())


@pytest.mark.parametrize("versions", [(4, 4), (5, 4), (4, 5)])
def test_a_job_that_saves_with_older_agents(versions: tuple[int, int]) -> None:
    """With agents of version 4 a job is checked, saved, restarted and ends as ever."""
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
    assert any(isinstance(one, checkpoints.CheckpointCommitted) for one in events)
    assert any(isinstance(one, checkpoints.SaveOrdered) for one in events)
    assert any(isinstance(one, checkpoints.Restored) for one in events)
    assert saving.restores[-1].generation == 2


# ---- an older master


class Stage:
    """A master of version 4 that says what was recorded, and one agent of ours."""

    def __init__(self, duties: Sequence[Duty] = ()) -> None:
        self.network = Network()
        self.connections: asyncio.Queue[Connection] = asyncio.Queue()
        self.listener = self.network.listener("m")
        self.agent = Agent(
            "worker-0-0",
            launcher=MemoryLauncher("h", 1, Training(10_000)),
            dialer=self.network.dialer("h"),
            masters=["m"],
            boot=1,
            host="h",
            address="h",
            duties=duties,
        )

    async def run(self) -> asyncio.Task[str]:
        """Begin."""

        async def accept(connection: Connection) -> None:
            self.connections.put_nowait(connection)

        await self.listener.serve(accept, dict)
        return virtual_loop.spawn("agent", self.agent.run())

    async def greeted(self) -> Connection:
        """The agent says our version, is refused as then, and says that of then."""
        first = await self.connections.get()
        kind, fields = readable(await first.receive())
        assert (kind, fields[0]) == (1, messages.VERSION)
        await first.send(bytes.fromhex(RECORDED["refusal"]))
        await first.close()
        again = await self.connections.get()
        kind, fields = readable(await again.receive())
        assert (kind, fields[0]) == (1, OLD)
        return again


WELCOME = Welcome(OLD, "run-1", 1, 1_000_000, 15_000_000, 300_000_000, 30_000_000, 3)


def test_an_older_master_serves_us() -> None:
    """An agent of ours greets a master of version 4 again in its own version, and says nothing that it could not read."""

    async def story() -> None:
        stage = Stage([SaveDuty(Saving(Knobs(replicas=True)))])
        running = await stage.run()
        connection = await stage.greeted()
        await connection.send(encode(WELCOME, OLD))
        await connection.send(encode(messages.level(1, _works(), OLD), OLD))
        said: list[int] = []
        while said.count(8) < 3 or 6 not in said:
            kind, fields = readable(await connection.receive())
            said.append(fields[1] if kind == 4 else kind)
            if kind == 4:
                await connection.send(encode(messages.Answer(fields[0], 1), OLD))
            if kind == 8:
                await connection.send(frame("seen", "copies").replace(b"\x07", b"\x01", 1))
        assert stage.agent._desk is not None
        assert stage.agent._desk.heard(Everywhere) == Everywhere(100, 98, 96)
        stage.agent.leave("enough")
        while True:
            kind, fields = readable(await connection.receive())
            if kind == 3:
                break
            if kind == 4:
                await connection.send(encode(messages.Answer(fields[0], 1), OLD))
        assert await running == "enough"

    virtual_loop.run(story())


def test_an_older_master_that_was_upgraded_is_greeted_in_our_version() -> None:
    """At the same address: what was said to the old one is not said for ever."""

    async def story() -> None:
        stage = Stage()
        running = await stage.run()
        connection = await stage.greeted()
        await connection.send(encode(WELCOME, OLD))
        await connection.close()
        again = await stage.connections.get()
        kind, fields = readable(await again.receive())
        assert (kind, fields[0]) == (1, messages.VERSION)
        stage.agent.leave("enough")
        await again.send(encode(Goodbye("go", leave=True)))
        await running

    virtual_loop.run(story())


def _works() -> Order:
    return ordering(Order(False, "", 0), generation=1, nproc=1, world_size=1, nodes=1, store="h:1", committed=4)


@pytest.mark.parametrize("newest", [1, 3])
def test_a_master_that_is_too_old_ends_the_agent(newest: int) -> None:
    """A master of versions 1 to 3 refuses our agent, which ends saying what to install."""

    async def story() -> None:
        stage = Stage()
        running = await stage.run()
        connection = await stage.connections.get()
        await connection.receive()
        why = f"an agent that speaks protocol 5 is not served here: 1 to {newest} are; install dlrover-core 0.0.9"
        await connection.send(encode(Goodbye(why, leave=True), 1))
        assert await running == why
        assert stage.agent.ending == Ending("", why)

    virtual_loop.run(story())


def test_a_command_that_version_4_does_not_know_leaves_no_gap() -> None:
    """What was queued before it was known how old the master is gets a number, and a shape that it refuses by itself."""

    class Newer(OfferReplica):
        """A command of a later concern."""

    Newer.__since__, Newer.__number__ = messages.VERSION, 99  # type: ignore[attr-defined]
    numbered = messages.numbered(4, Newer("worker-0-0", "h:1"), OLD)
    assert (numbered.number, COMMANDS[numbered.kind].__name__, numbered.fields) == (
        4,
        "WithdrawStore",
        ("worker-0-0", ""),
    )
    assert messages.numbered(4, Newer("worker-0-0", "h:1")).name == "Newer"
