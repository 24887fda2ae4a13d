"""Sessions: one bad connection is its own problem and nobody else's."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import msgpack
import pytest

from dlrover_core.errors import ConnectionLost
from dlrover_core.job import nodes
from dlrover_core.job.leases import ReturnLease
from dlrover_core.job.orders import Order, Work
from dlrover_core.runtime import messages, pipeline, sessions
from dlrover_core.runtime.keeping import KeptBeat
from dlrover_core.runtime.leasing import Leasing
from dlrover_core.runtime.levels import Beat
from dlrover_core.runtime.messages import Again, Answer, Goodbye, Hello, Level, Message, Numbered, Welcome
from dlrover_core.runtime.sessions import Session
from dlrover_core.spec import GroupSpec, JobSpec
from dlrover_core.testing import virtual_loop
from dlrover_core.testing.cluster import ADDRESS, Cluster
from dlrover_core.testing.invariants import check
from dlrover_core.testing.network import MemoryConnection

HELLO = Hello(messages.VERSION, "run-1", "worker-0-0", 77, 0, 0)


def tell(story: Callable[[Cluster], Awaitable[None]]) -> None:
    """Tell a story to a training cluster of two; it succeeds all the same, and its workers start once."""

    async def told() -> None:
        async with Cluster(JobSpec("j", (GroupSpec(nodes_min=2, nodes_max=2),))) as cluster:
            await cluster.until(lambda: cluster.training.done >= 5)
            await story(cluster)
            assert (await cluster.outcome()).state == "succeeded"
            assert len(cluster.training.starts) == 2
            await check(cluster)

    virtual_loop.run(told())


async def dial(cluster: Cluster, *frames: Message) -> MemoryConnection:
    """A connection of somebody else, and its first words."""
    connection = cluster.network.connect("elsewhere", ADDRESS)
    for frame in frames:
        await connection.send(messages.encode(frame))
    return connection


async def hear(connection: MemoryConnection) -> Message:
    """The next word of the master."""
    return messages.decode(await connection.receive())


async def lost(connection: MemoryConnection) -> None:
    """Hear until the connection is closed by the other end."""
    with pytest.raises(ConnectionLost):  # noqa: PT012  # whatever is said before it does not matter
        while True:
            await asyncio.wait_for(connection.receive(), 60)


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\xff" * 100,
        b"GET / HTTP/1.1\r\n\r\n",
        msgpack.packb([1, [1, 2]]),
        msgpack.packb([99, []]),
        msgpack.packb([1, [1, "run-1", 5, 77, 0, 0]]),
        messages.encode(Beat(0, 0, 0)),
        messages.encode(Welcome(1, "", 1, 1, 1, 1, 1, 1)),
    ],
    ids=["empty", "garbage", "http", "short", "unknown", "types", "beat", "master"],
)
def test_malformed_first_frame(frame: bytes) -> None:
    """Whoever does not begin with a Hello loses the connection, and nobody else notices."""

    async def story(cluster: Cluster) -> None:
        connection = cluster.network.connect("elsewhere", ADDRESS)
        await connection.send(frame)
        await lost(connection)
        assert len(cluster.master.sessions) == 2

    tell(story)


def test_says_nothing() -> None:
    """Whoever connects and says nothing is not kept for ever."""

    async def story(cluster: Cluster) -> None:
        began = asyncio.get_running_loop().time()
        cluster.training.steps = 200
        await lost(cluster.network.connect("elsewhere", ADDRESS))
        assert asyncio.get_running_loop().time() - began == pytest.approx(sessions.GREETING_S, abs=0.1)

    tell(story)


@pytest.mark.parametrize(
    "changes",
    [
        {"run": "run-0"},
        {"version": messages.VERSION + 1},
        {"version": messages.OLDEST_VERSION - 1},
        {"node": "worker-0-9"},
    ],
    ids=["run", "newer", "older", "node"],
)
def test_turned_away(changes: dict[str, object]) -> None:
    """Another run, protocol or node is told to leave, and why, before its connection ends."""

    async def story(cluster: Cluster) -> None:
        connection = await dial(cluster, HELLO._replace(**changes))
        goodbye = await hear(connection)
        assert isinstance(goodbye, Goodbye)
        assert goodbye.leave
        assert goodbye.reason
        await lost(connection)

    tell(story)


def test_speaks_for_another_node() -> None:
    """An agent that speaks for another node loses its connection; what it said is not even recorded."""

    async def story(cluster: Cluster) -> None:
        seq = cluster.state.seq
        lie = messages.numbered(1, nodes.ReportFault("worker-1-0", "I do not like it"))
        connection = await dial(cluster, HELLO, lie)
        await lost(connection)
        assert cluster.state.seq == seq

    tell(story)


@pytest.mark.parametrize(
    "frame",
    [Numbered(1, 999, ()), Numbered(1, 3, ("worker-0-0",)), Goodbye("no", leave=True)],
    ids=["kind", "fields", "role"],
)
def test_malformed_later_frame(frame: Message) -> None:
    """A malformed command ends the connection without a record."""

    async def story(cluster: Cluster) -> None:
        seq = cluster.state.seq
        await lost(await dial(cluster, HELLO, frame))
        assert cluster.state.seq == seq

    tell(story)


def test_slow_reader() -> None:
    """Who leaves too much unread loses its own connection; everybody else is served at once."""

    async def story() -> None:
        class Clogged:
            peer = "slow"

            async def send(self, frame: bytes) -> None:
                await asyncio.sleep(30)

        slow = Session(Clogged(), HELLO)  # type: ignore[arg-type]  # never receives
        draining = asyncio.ensure_future(slow.drain())
        for number in range(sessions.OUTBOX_MAX + 50):
            slow.push(Answer(number, number))
            await asyncio.sleep(0)
        assert len(slow._outbox) <= sessions.OUTBOX_MAX
        with pytest.raises(ConnectionLost, match="unread"):
            await asyncio.wait_for(draining, 30 * sessions.OUTBOX_MAX * 2)

    virtual_loop.run(story())


def test_told_once() -> None:
    """The same order is not said twice; another is."""
    session = Session(None, HELLO)  # type: ignore[arg-type]  # nothing is sent
    order = Order(leave=False, reason="", grace_us=0, work=Work(generation=1))
    session.tell(1, order)
    session.tell(1, order._replace())
    session.tell(1, order._replace(work=Work(generation=2)))
    assert [message.order[1][0] for message in session._outbox if isinstance(message, Level)] == [1, 2]


def test_gap_is_asked_for() -> None:
    """A number that is missing is asked for; nothing is decided meanwhile."""

    async def story(cluster: Cluster) -> None:
        boot, last = cluster.agents["worker-0-0"]._boot, cluster.state.senders["worker-0-0"].last
        frame = messages.numbered(last + 2, nodes.ReportLeft("worker-0-0"))
        connection = await dial(cluster, HELLO._replace(boot=boot), frame)
        heard = [await hear(connection) for _ in range(3)]
        assert heard[-1] == Again(last + 1)
        await connection.close()

    tell(story)


def test_a_beat_of_a_generation_that_never_was() -> None:
    """What it says is kept of it is nonsense, and does not hide what there is."""

    async def story(cluster: Cluster) -> None:
        said = Beat(1, 5, 0, (KeptBeat(2**40, True, held=(8,)),))
        boot = cluster.agents["worker-0-0"]._boot
        for beat in (said, said._replace(parts=(KeptBeat(1, True, held=(4,)),))):
            connection = await dial(cluster, HELLO._replace(boot=boot), beat)
            await asyncio.sleep(0.01)
            await connection.close()
        assert cluster.leader.sessions.keeping.holds("worker-0-0") == (1, (4,))

    tell(story)


def test_listeners_hear_what_nodes_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, before a heartbeat that comes later."""

    async def story(cluster: Cluster) -> None:
        heard: list[object] = []
        monkeypatch.setattr(Leasing, "reported", lambda _, command: heard.append(command))
        connection = await dial(cluster, HELLO._replace(boot=cluster.agents["worker-0-0"]._boot))
        returned = ReturnLease("worker-0-0", "eval")
        await connection.send(messages.encode(messages.numbered(1, returned)))
        await asyncio.sleep(0.01)
        assert heard == [returned]
        await connection.close()

    tell(story)


def test_overload_is_not_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command that found the queue full is asked for again, so that it is never forgotten."""

    async def story(cluster: Cluster) -> None:
        connection = await dial(cluster, HELLO._replace(boot=cluster.agents["worker-0-0"]._boot))
        with monkeypatch.context() as patch:
            patch.setattr(pipeline, "QUEUE_MAX", 0)
            await connection.send(messages.encode(messages.numbered(1, nodes.ReportFault("worker-0-0", "x"))))
            await asyncio.sleep(0.01)
        heard = [await hear(connection) for _ in range(3)]
        assert heard[-1] == Again(1)
        await connection.close()

    tell(story)


def test_second_agent_of_a_node_is_told_to_leave() -> None:
    """A second process under the name of a node whose agent has spoken gets no orders: it is told to leave."""

    async def story(cluster: Cluster) -> None:
        connection = await dial(cluster, HELLO._replace(boot=4711))
        assert await hear(connection) == Goodbye("worker-0-0 has an agent already", leave=True, outcome="lost")

    tell(story)
