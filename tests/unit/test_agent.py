"""The agent alone, against a master that the test plays."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from dlrover_core.errors import ConnectionLost, LaunchFailed, SpecError, TokenRefused
from dlrover_core.job import incidents, nodes, world
from dlrover_core.job.orders import Order, Work
from dlrover_core.runtime import messages
from dlrover_core.runtime.agent import Agent
from dlrover_core.runtime.ending import Ending
from dlrover_core.runtime.launcher import WorkerExit
from dlrover_core.runtime.levels import Beat, BeatSeen
from dlrover_core.runtime.messages import Again, Answer, Assigned, Goodbye, Hello, Message, Numbered, Welcome
from dlrover_core.runtime.outbox import UNANSWERED_MAX, Outbox
from dlrover_core.runtime.transport import Connection, Dialer
from dlrover_core.testing import virtual_loop
from dlrover_core.testing.network import Network
from dlrover_core.testing.training import MemoryLauncher, Training

NODE = "worker-0-0"
WAIT = Order(leave=False, reason="waiting for a world", grace_us=0)


def run_order(generation: int, store: str = "elsewhere:1") -> Order:
    """The order to run one worker in a generation."""
    return Order(False, "", 0, work=Work(generation, 0, 1, 1, 0, 1, store))


class Stage:
    """One agent, and a master whose every word the test says."""

    def __init__(
        self,
        node: str = NODE,
        *,
        masters: Sequence[str] = ("m",),
        dialing: Callable[[Dialer], Dialer] = lambda dialer: dialer,
        **more: Any,
    ) -> None:
        self.network = Network()
        self.training = Training(steps=10_000, cascade_s=None)
        self.launcher = MemoryLauncher(NODE, 1, self.training)
        self.agent = Agent(
            node,
            launcher=self.launcher,
            dialer=dialing(self.network.dialer("h")),
            masters=masters,
            boot=1,
            host="h",
            address="h",
            **more,
        )
        self.connections: asyncio.Queue[Connection] = asyncio.Queue()
        self.got: list[tuple[int, Message]] = []
        self.listener = self.network.listener("m")
        self.token = 1
        self.version = messages.VERSION
        self.refuses = ""

    async def accept(self, connection: Connection) -> None:
        """Keep a new connection for `greet`."""
        self.connections.put_nowait(connection)

    async def greet(self, *, answers: bool = True) -> tuple[Connection, Hello]:
        """Take the next connection, welcome it, and answer what it says from then on."""
        connection, hello = await self._welcome()
        virtual_loop.spawn("master", self.listen(connection, answers=answers))
        return connection, hello

    async def greet_and_hang(self) -> Connection:
        """Take the next connection, welcome it, and say nothing from then on."""
        connection, _ = await self._welcome()
        return connection

    async def _welcome(self) -> tuple[Connection, Hello]:
        connection = await asyncio.wait_for(self.connections.get(), 60)
        hello = messages.decode(await connection.receive())
        assert isinstance(hello, Hello)
        await connection.send(
            messages.encode(Welcome(self.version, "run-1", self.token, 10**6, 15 * 10**6, 60 * 10**6, 5 * 10**6, 3))
        )
        return connection, hello

    async def listen(self, connection: Connection, *, answers: bool) -> None:
        """Keep what the agent says, and answer it."""
        try:
            while True:
                message = messages.decode(await connection.receive())
                if isinstance(message, Beat):
                    await connection.send(messages.encode(BeatSeen(self.token)))
                elif isinstance(message, Numbered):
                    self.got.append((message.number, messages.command_of(message)))
                    if answers:
                        await connection.send(messages.encode(Answer(message.number, 1, self.refuses)))
        except ConnectionLost:
            return

    async def order(self, connection: Connection, order: Order) -> None:
        """Say what the agent should be doing."""
        await connection.send(messages.encode(messages.level(self.token, order, self.version), self.version))

    def commands(self, kind: type) -> list[Message]:
        """The commands of a kind that came, repetitions too."""
        return [command for _, command in self.got if isinstance(command, kind)]


def tell(story: Callable[[Stage, asyncio.Task[str]], Awaitable[None]], node: str = NODE, **more: Any) -> None:
    """Tell a story to a running agent."""

    async def told() -> None:
        stage = Stage(node, **more)
        await stage.listener.serve(stage.accept, dict)
        running = virtual_loop.spawn("agent", stage.agent.run())
        try:
            await story(stage, running)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    virtual_loop.run(told())


def test_outbox_bound() -> None:
    """At most 16 unanswered commands are on the wire, in order; each answer lets the next one go."""

    async def story() -> None:
        outbox = Outbox()
        for _ in range(20):
            outbox.add(nodes.ReportLeft(NODE))
        sent = []
        while (item := outbox.next()) is not None:
            sent.append(item[0])
        assert sent == list(range(1, UNANSWERED_MAX + 1))
        outbox.answered(2)
        assert [outbox.next()[0], outbox.next()[0], outbox.next()] == [17, 18, None]  # type: ignore[index]

    virtual_loop.run(story())


def test_outbox_resends() -> None:
    """On a new connection everything unanswered goes out again, from the first; from where the leader asks, if it asks."""

    async def story() -> None:
        outbox = Outbox()
        for _ in range(5):
            outbox.add(nodes.ReportLeft(NODE))
        for _ in range(5):
            outbox.next()
        outbox.answered(2)
        outbox.rewind()
        assert [outbox.next()[0] for _ in range(3)] == [3, 4, 5]  # type: ignore[index]
        outbox.expected(4)
        assert [outbox.next()[0] for _ in range(2)] == [4, 5]  # type: ignore[index]
        with pytest.raises(ConnectionLost):
            outbox.expected(1)

    virtual_loop.run(story())


def test_ages_grow_while_waiting() -> None:
    """What bears an age has grown older by its wait in the outbox when it goes out, each time it goes out."""

    async def story() -> None:
        outbox = Outbox()
        outbox.add(incidents.ReportExit(NODE, 1, 0, -9, age_us=500))
        ages = []
        for _ in range(2):
            await asyncio.sleep(3)
            outbox.rewind()
            _, command = outbox.next() or (0, ())
            assert isinstance(command, incidents.ReportExit)
            ages.append(command.age_us)
        assert ages == [3_000_500, 6_000_500]

    virtual_loop.run(story())


def test_resend_after_reconnect() -> None:
    """Commands that no leader has answered are sent again, under the same numbers, to the next connection."""

    async def story(stage: Stage, _: asyncio.Task[str]) -> None:
        connection, _hello = await stage.greet(answers=False)
        await asyncio.sleep(2)
        before = list(stage.got)
        assert [number for number, _ in before] == [1, 2, 3]
        await connection.close()
        stage.got.clear()
        _, hello = await stage.greet()
        assert (hello.node, hello.boot, hello.token, hello.run) == (NODE, 1, 1, "run-1")
        await asyncio.sleep(1)
        assert stage.got == before

    tell(story)


def test_workers_run_on_without_a_master() -> None:
    """A lost connection does not touch the workers; the agent comes back at once and says what they run."""

    async def story(stage: Stage, _: asyncio.Task[str]) -> None:
        connection, _hello = await stage.greet()
        await stage.order(connection, run_order(1))
        await asyncio.sleep(2)
        made = stage.training.done
        await connection.close()
        _, hello = await stage.greet()
        assert hello.generation == 1
        await asyncio.sleep(1)
        assert stage.training.done > made
        assert stage.training.starts == [(NODE, 1)]

    tell(story)


@pytest.mark.parametrize("word", ["level", "beat seen", "assigned"])
def test_an_older_leader_is_not_heeded(word: str) -> None:
    """Whoever speaks under an older token than the newest seen is hung up on, and nothing that it says is done."""

    async def story(stage: Stage, _: asyncio.Task[str]) -> None:
        stage.token = 5
        connection, _hello = await stage.greet()
        await stage.order(connection, run_order(1))
        await asyncio.sleep(2)
        stale = {
            "level": messages.level(4, run_order(7)),
            "beat seen": BeatSeen(4),
            "assigned": Assigned(4, "worker-9-0"),
        }[word]
        await connection.send(messages.encode(stale))
        _, hello = await stage.greet()
        assert (hello.node, hello.generation, hello.token) == (NODE, 1, 5)
        await asyncio.sleep(1)
        assert stage.training.starts == [(NODE, 1)]

    tell(story)


def test_a_leader_hands_over() -> None:
    """A goodbye that names another master is followed at once, in the midst of a conversation; workers run on."""

    async def story(stage: Stage, _: asyncio.Task[str]) -> None:
        came: list[Connection] = []

        async def accept(connection: Connection) -> None:
            came.append(connection)
            await stage.accept(connection)

        await stage.network.listener("n").serve(accept, dict)
        connection, _hello = await stage.greet()
        await stage.order(connection, run_order(1))
        await asyncio.sleep(2)
        began = asyncio.get_running_loop().time()
        await connection.send(messages.encode(Goodbye("I go", leave=False, address="n")))
        there, hello = await stage.greet()
        assert came == [there]
        assert asyncio.get_running_loop().time() - began <= 0.01
        assert hello.generation == 1
        await there.close()
        await asyncio.sleep(1)
        assert stage.training.starts == [(NODE, 1)]

    tell(story)


def test_another_master_is_found_beside_a_silent_one() -> None:
    """Within 3 s of a leader's last word whoever leads now has the agent, and hears what the silent one did not answer."""

    async def story(stage: Stage, _: asyncio.Task[str]) -> None:
        async def accept(connection: Connection) -> None:
            stage.token = 2
            await stage.accept(connection)

        await stage.network.listener("n").serve(accept, dict)
        silent, _hello = await stage.greet()
        await stage.order(silent, run_order(1))
        await asyncio.sleep(2)
        silent.deafen()  # type: ignore[attr-defined]
        stage.launcher.kill(0)
        began = asyncio.get_running_loop().time()
        _, hello = await stage.greet()
        assert asyncio.get_running_loop().time() - began <= 3.0
        assert (hello.node, hello.generation, hello.token) == (NODE, 1, 1)
        await asyncio.sleep(0.1)
        assert stage.commands(incidents.ReportExit)
        await asyncio.sleep(60)
        assert stage.connections.empty(), "it stays there"

    tell(story, masters=["m", "n"])


def test_a_master_that_hung_until_it_died_is_not_the_first_to_be_dialled() -> None:
    """Its launcher has killed it, and starts another one behind the same port: until that serves, a standby keeps the agent."""

    async def story(stage: Stage, _: asyncio.Task[str]) -> None:
        standing: list[Connection] = []

        async def stands_by(connection: Connection) -> None:
            standing.append(connection)
            await connection.receive()

        await stage.network.listener("n").serve(stands_by, dict)
        hung = await stage.greet_and_hang()
        await asyncio.sleep(3.5)
        assert standing, "asked while the leader was silent"
        standing.clear()
        hung.drop()  # type: ignore[attr-defined]
        await asyncio.sleep(0.1)
        assert standing
        assert stage.connections.empty()

    tell(story, masters=["m", "n"])


def test_a_master_that_pauses_keeps_its_agent() -> None:
    """While its master pauses for 3 s an agent asks a standby, which knows of nobody else; then it goes on as before."""

    async def story(stage: Stage, _: asyncio.Task[str]) -> None:
        asked: list[float] = []

        async def accept(connection: Connection) -> None:
            assert isinstance(messages.decode(await connection.receive()), Hello)
            asked.append(asyncio.get_running_loop().time())
            await connection.send(messages.encode(Goodbye("m leads", leave=False, address="m")))

        await stage.network.listener("n").serve(accept, dict)
        connection = await stage.greet_and_hang()
        await asyncio.sleep(5)
        assert asked, "it was silent"
        virtual_loop.spawn("master", stage.listen(connection, answers=True))
        await asyncio.sleep(3)
        asked.clear()
        await asyncio.sleep(60)
        assert not asked
        assert stage.connections.empty(), "it has hung up"

    tell(story, masters=["m", "n"])


def test_overtaken_while_stopping() -> None:
    """Orders that come while workers are being stopped: only the newest is carried out, no generation in between starts."""

    async def story(stage: Stage, _: asyncio.Task[str]) -> None:
        connection, _hello = await stage.greet()
        await stage.order(connection, run_order(1))
        await asyncio.sleep(1)
        stage.launcher.patience_s = 5.0
        await stage.order(connection, run_order(2)._replace(grace_us=10**7))
        await asyncio.sleep(1)
        for generation in (3, 4):
            await stage.order(connection, run_order(generation))
        await asyncio.sleep(10)
        assert stage.training.starts == [(NODE, 1), (NODE, 4)]
        assert [one.generation for one in stage.commands(world.ReportStarted)] == [1, 4]  # type: ignore[attr-defined]
        assert stage.commands(incidents.ReportExit) == []

    tell(story)


def test_same_order_again() -> None:
    """The same order said again after a reconnect restarts nobody."""

    async def story(stage: Stage, _: asyncio.Task[str]) -> None:
        for _attempt in range(3):
            connection, _hello = await stage.greet()
            await stage.order(connection, run_order(1))
            await asyncio.sleep(2)
            await connection.close()
        assert stage.training.starts == [(NODE, 1)]

    tell(story)


def test_end_of_a_generation_is_reported_once() -> None:
    """Told that a generation is over, the agent stops it and says so, once, with the last step made."""

    async def story(stage: Stage, _: asyncio.Task[str]) -> None:
        connection, _hello = await stage.greet()
        await stage.order(connection, run_order(1))
        await asyncio.sleep(2)
        for _ in range(2):
            await stage.order(connection, WAIT._replace(over=1))
            await asyncio.sleep(1)
        assert stage.commands(world.ReportStopped) == [world.ReportStopped(NODE, 1, stage.training.done)]
        assert stage.launcher.ranks == []

    tell(story)


def test_what_a_death_is_known_by_is_passed_on() -> None:
    """Signature and place of an exit, which the launcher has found, are in the report."""

    async def story(stage: Stage, _: asyncio.Task[str]) -> None:
        stage.version = messages.VERSION
        connection, _hello = await stage.greet()
        await stage.order(connection, run_order(1))
        await asyncio.sleep(1)
        known = ("exception.KeyError", "KeyError at train.py:7 in step")
        stage.launcher._notices.put_nowait(
            WorkerExit(1, 0, 0, 1, asked=False, died_us=0, signature=known[0], place=known[1])
        )
        await asyncio.sleep(1)
        (told,) = stage.commands(incidents.ReportExit)
        assert isinstance(told, incidents.ReportExit)
        assert (told.signature, told.place) == known

    tell(story)


def test_signal_leaves_with_grace() -> None:
    """Ctrl-C: workers get the grace of a planned stop, then the agent says that it left, and goes."""

    async def story(stage: Stage, running: asyncio.Task[str]) -> None:
        connection, _hello = await stage.greet()
        await stage.order(connection, run_order(1))
        await asyncio.sleep(1)
        stage.launcher.patience_s = 20.0
        began = asyncio.get_running_loop().time()
        stage.agent.leave("SIGINT")
        assert await running == "SIGINT"
        assert 20 <= asyncio.get_running_loop().time() - began <= 21
        assert stage.got[-1][1] == nodes.ReportLeft(NODE)
        assert stage.commands(incidents.ReportExit) == []

    tell(story)


def test_signal_without_a_master() -> None:
    """Ctrl-C while nobody listens: the agent goes all the same, soon."""

    async def story(stage: Stage, running: asyncio.Task[str]) -> None:
        stage.listener.drop()
        await asyncio.sleep(1)
        stage.agent.leave("SIGTERM")
        assert await asyncio.wait_for(running, 6) == "SIGTERM"

    tell(story)


def test_told_to_leave() -> None:
    """An order to leave is obeyed with the order's grace, and answered with a last word."""

    async def story(stage: Stage, running: asyncio.Task[str]) -> None:
        connection, _hello = await stage.greet()
        await stage.order(connection, run_order(1))
        await asyncio.sleep(1)
        await stage.order(connection, Order(leave=True, reason="the job is failed", grace_us=0))
        assert await asyncio.wait_for(running, 1) == "the job is failed"
        assert stage.got[-1][1] == nodes.ReportLeft(NODE)

    tell(story)


def test_turned_away_for_good() -> None:
    """A stranger goes at once: nobody would take its last word."""

    async def story(stage: Stage, running: asyncio.Task[str]) -> None:
        connection = await stage.connections.get()
        await connection.receive()
        await connection.send(messages.encode(Goodbye("run r is over", leave=True)))
        assert await asyncio.wait_for(running, 1) == "run r is over"

    tell(story)


def test_turned_away_for_now() -> None:
    """Turned away because another leads, the agent asks again with growing pauses, not in a frenzy."""

    async def story(stage: Stage, _: asyncio.Task[str]) -> None:
        asked = 0
        until = asyncio.get_running_loop().time() + 20
        while asyncio.get_running_loop().time() < until:
            connection = await stage.connections.get()
            await connection.receive()
            await connection.send(messages.encode(Goodbye("another master leads", leave=False)))
            asked += 1
        assert 8 <= asked <= 40

    tell(story)


def test_master_that_does_not_greet() -> None:
    """A stopped master takes connections and says nothing: the agent gives up on it and tries again."""

    async def story(stage: Stage, _: asyncio.Task[str]) -> None:
        await stage.connections.get()
        _, hello = await stage.greet()
        assert hello.node == NODE

    tell(story)


def test_forgotten_by_the_leader() -> None:
    """A leader that asks for what was answered long ago does not know this node: the connection is given up, not looped on."""

    async def story(stage: Stage, _: asyncio.Task[str]) -> None:
        connection, _hello = await stage.greet()
        await asyncio.sleep(1)
        stage.agent._outbox.add(nodes.ReportFault(NODE, "x"))
        await connection.send(messages.encode(Again(1)))
        await stage.greet()
        await asyncio.sleep(1)
        assert len([number for number, _ in stage.got if number == 4]) <= 2

    tell(story)


def test_unheard_worlds_use_up_stores() -> None:
    """Worlds that came and went while the agent was cut off may have used its stores: it withdraws them and offers others."""

    async def story(stage: Stage, _: asyncio.Task[str]) -> None:
        connection, _hello = await stage.greet()
        await stage.order(connection, run_order(1, f"{NODE}:1"))
        await asyncio.sleep(1)
        await stage.order(connection, run_order(4))
        await asyncio.sleep(1)
        withdrawn = [one.address for one in stage.commands(world.WithdrawStore)]  # type: ignore[attr-defined]
        offered = [one.address for one in stage.commands(world.OfferStore)]  # type: ignore[attr-defined]
        assert withdrawn == [f"{NODE}:2", f"{NODE}:3"]
        assert offered == [f"{NODE}:{number}" for number in range(1, 6)]

    tell(story)


# ---- agents without a node


async def assigned(stage: Stage) -> tuple[Connection, Hello]:
    """The standby is greeted, given a name, and greets again."""
    connection = await asyncio.wait_for(stage.connections.get(), 60)
    first = messages.decode(await connection.receive())
    assert isinstance(first, Hello)
    welcome = messages.encode(
        Welcome(messages.VERSION, "run-1", stage.token, 10**6, 15 * 10**6, 60 * 10**6, 5 * 10**6, 3)
    )
    await connection.send(welcome)
    await connection.send(messages.encode(Assigned(stage.token, NODE)))
    while not isinstance(hello := messages.decode(await connection.receive()), Hello):
        assert isinstance(hello, Beat), f"a standby says nothing but that it lives: {hello}"
    await connection.send(welcome)
    virtual_loop.spawn("master", stage.listen(connection, answers=True))
    assert first == hello._replace(node="", run="", token=0)
    return connection, hello


@pytest.mark.parametrize("warm_s", [0.0, 5.0], ids=["warm", "cold"])
def test_standby_becomes_a_node(warm_s: float) -> None:
    """Told its name, a standby greets again on the same connection and joins as soon as it is warm, its stores on offer."""

    async def story(stage: Stage, _: asyncio.Task[str]) -> None:
        connection, hello = await assigned(stage)
        assert (hello.node, hello.host, hello.nproc, hello.seat, hello.place) == (NODE, "h", 1, "s", 3)
        began = asyncio.get_running_loop().time()
        while not stage.commands(nodes.ReportJoined):  # noqa: ASYNC110  # time is virtual
            await asyncio.sleep(0.01)
        assert asyncio.get_running_loop().time() - began <= warm_s + 0.1
        await asyncio.sleep(0.1)
        assert [number for number, _ in stage.got] == [1, 2, 3]
        assert stage.got[0][1] == nodes.ReportJoined(NODE, "h", "h", 1, "s")
        assert len(stage.commands(world.OfferStore)) == 2
        await stage.order(connection, run_order(1))
        await asyncio.sleep(1)
        assert stage.training.starts == [(NODE, 1)]

    def slowly(stage: Stage, running: asyncio.Task[str]) -> Awaitable[None]:
        stage.launcher.warm_s = warm_s
        return story(stage, running)

    tell(slowly, "", seat="s", place=3)


def test_standby_keeps_its_name_over_a_reconnection() -> None:
    """Once it has its name it greets under it for ever."""

    async def story(stage: Stage, _: asyncio.Task[str]) -> None:
        connection, _hello = await assigned(stage)
        await asyncio.sleep(2)
        await connection.close()
        _, hello = await stage.greet()
        assert (hello.node, hello.seat) == (NODE, "s")

    tell(story, "", seat="s")


def test_named_twice() -> None:
    """A master that gives a node another name loses the connection; the node stays what it is."""

    async def story(stage: Stage, _: asyncio.Task[str]) -> None:
        connection, _hello = await assigned(stage)
        await connection.send(messages.encode(Assigned(stage.token, "worker-5-0")))
        _, hello = await stage.greet()
        assert hello.node == NODE
        with pytest.raises(ValueError, match="worker-0-0 already"):
            stage.agent.name("worker-5-0")

    tell(story, "", seat="s")


def test_standby_hears_the_end_of_the_job() -> None:
    """A standby that is told that the job is over goes at once, reports nothing, and says goodbye."""

    async def story(stage: Stage, running: asyncio.Task[str]) -> None:
        connection, _hello = await stage.greet()
        order = Order(leave=True, reason="the job is failed", grace_us=0, outcome="failed", root="rank 0: boom")
        await connection.send(messages.encode(messages.level(stage.token, order)))
        assert await asyncio.wait_for(running, 1) == "the job is failed"
        assert stage.agent.ending == Ending("failed", "the job is failed", "rank 0: boom")
        assert stage.got == []

    tell(story, "", seat="s")


def test_last_frame_is_a_goodbye() -> None:
    """An agent that ends by itself says so: its connection's end needs no guessing."""

    async def story(stage: Stage, running: asyncio.Task[str]) -> None:
        connection = await stage.connections.get()
        await connection.receive()
        await connection.send(
            messages.encode(Welcome(messages.VERSION, "run-1", 1, 10**6, 15 * 10**6, 60 * 10**6, 5 * 10**6, 3))
        )
        await asyncio.sleep(0.1)
        stage.agent.leave("SIGTERM")
        said = []
        with pytest.raises(ConnectionLost):  # noqa: PT012  # all it says
            while True:
                said.append(messages.decode(await connection.receive()))
                if isinstance(said[-1], Numbered):
                    await connection.send(messages.encode(Answer(said[-1].number, 1)))
        assert said[-1] == Goodbye("SIGTERM", leave=True)
        assert await running == "SIGTERM"

    tell(story)


def test_blank_agent_waits_for_its_name() -> None:
    """A blank agent makes everything warm and stays away from every master until it is named."""

    async def story(stage: Stage, _: asyncio.Task[str]) -> None:
        await asyncio.sleep(30)
        assert stage.connections.empty()
        began = asyncio.get_running_loop().time()
        stage.agent.name(NODE)
        _, hello = await stage.greet()
        assert hello.node == NODE
        await asyncio.sleep(0.01)
        assert stage.commands(nodes.ReportJoined) == [nodes.ReportJoined(NODE, "h", "h", 1)]
        assert asyncio.get_running_loop().time() - began <= 0.1

    tell(story, "", dial_before_name=False)


def test_blank_agent_that_is_not_needed() -> None:
    """A blank agent that is told to go, goes at once."""

    async def story(stage: Stage, running: asyncio.Task[str]) -> None:
        await asyncio.sleep(1)
        stage.agent.leave("SIGTERM")
        assert await asyncio.wait_for(running, 0.1) == "SIGTERM"

    tell(story, "", dial_before_name=False)


@pytest.mark.parametrize(
    "error", [TokenRefused("the token is wrong"), LaunchFailed("no zygote")], ids=["token", "warm"]
)
def test_standby_that_cannot_be_one(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """What makes an agent impossible ends it while it waits for a name, not when it gets one."""

    async def fail(*_: object) -> None:
        raise error

    async def story() -> None:
        stage = Stage("", seat="s")
        monkeypatch.setattr(
            *((stage.agent._dialer, "connect") if isinstance(error, TokenRefused) else (stage.launcher, "open")), fail
        )
        await stage.listener.serve(stage.accept, dict)
        with pytest.raises(type(error)):
            await asyncio.wait_for(stage.agent.run(), 10)

    virtual_loop.run(story())


def test_a_master_with_another_token_is_passed_by() -> None:
    """Whoever took us in knows us: a standby that was started with another token is not the end of a node that trains."""

    class Refusing:
        """The dialer of an agent whose second master does not know it."""

        def __init__(self, dialer: Any) -> None:
            self._dialer, self.refused = dialer, 0

        async def connect(self, address: str) -> Connection:
            if address == "other":
                self.refused += 1
                raise TokenRefused("the token is wrong")
            return await self._dialer.connect(address)

        async def close(self) -> None:
            await self._dialer.close()

    async def story(listed: list[str]) -> bool:
        dialers: list[Refusing] = []

        def refusing(dialer: Dialer) -> Dialer:
            dialers.append(Refusing(dialer))
            return dialers[-1]

        stage = Stage(masters=listed, dialing=refusing)
        await stage.listener.serve(stage.accept, dict)
        running = virtual_loop.spawn("agent", stage.agent.run())
        try:
            connection, _ = await asyncio.wait_for(stage.greet(), 5)
            await asyncio.sleep(2)
            await connection.send(messages.encode(Goodbye("m hands over", leave=False)))
            again = asyncio.ensure_future(stage.greet())
            await asyncio.wait([again, running], timeout=10, return_when=asyncio.FIRST_COMPLETED)
            assert dialers[0].refused
            return again.done()
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    assert virtual_loop.run(story(["m", "other"]))


def test_a_token_refused_by_the_first_master() -> None:
    """Nobody has taken it in: an agent with the wrong token ends, however many masters there are."""

    async def refuse(_address: str) -> Connection:
        raise TokenRefused("the token is wrong")

    async def story() -> None:
        stage = Stage(masters=["m", "other"])
        stage.agent._dialer.connect = refuse  # type: ignore[method-assign]
        with pytest.raises(TokenRefused):
            await asyncio.wait_for(stage.agent.run(), 10)

    virtual_loop.run(story())


def test_masters_that_move_are_found() -> None:
    """Whoever keeps the agent names them anew: it goes there at once, from a long pause as from a dial that nobody answers."""

    async def story(stage: Stage, _: asyncio.Task[str]) -> None:
        async def accept(connection: Connection) -> None:
            await stage.accept(connection)

        connection, _hello = await stage.greet()
        await stage.order(connection, run_order(1))
        await asyncio.sleep(2)
        await stage.listener.close()
        await connection.close()
        await asyncio.sleep(20.123)
        for refused in ([], ["x"] * 17, [""], ["x" * 301]):
            with pytest.raises(SpecError, match="masters"):
                stage.agent.masters_are(refused)
        await stage.network.listener("n").serve(accept, dict)
        began = asyncio.get_running_loop().time()
        stage.agent.masters_are(["n"])
        there, hello = await stage.greet()
        assert asyncio.get_running_loop().time() - began <= 0.01
        assert (hello.node, hello.generation) == (NODE, 1)
        # Served, it stays, whatever is named; when that master is gone, it goes there.
        await stage.network.listener("o").serve(accept, dict)
        stage.agent.masters_are(["o", "p"])
        await asyncio.sleep(60)
        assert stage.connections.empty()
        stage.token = 0
        await there.close()
        await stage.greet(answers=False)
        stage.token = 2
        _, hello = await stage.greet()
        assert hello.token == 1, "the lower token in between was refused"
        await asyncio.sleep(1)
        assert stage.training.starts == [(NODE, 1)]

    tell(story)


def test_a_dial_that_nobody_answers_is_given_up_for_masters_that_moved() -> None:
    """A host that is gone answers nobody for a quarter of a minute: longer than a leader takes to start elsewhere."""

    class Nowhere(Dialer):
        def __init__(self, inner: Dialer) -> None:
            self.inner = inner

        async def connect(self, address: str) -> Connection:
            if address == "gone":
                await asyncio.sleep(10_000)
            return await self.inner.connect(address)

        async def close(self) -> None:
            await self.inner.close()

    async def story(stage: Stage, _: asyncio.Task[str]) -> None:
        await asyncio.sleep(3.3)
        began = asyncio.get_running_loop().time()
        stage.agent.masters_are(["m"])
        await stage.greet()
        assert asyncio.get_running_loop().time() - began <= 0.01

    tell(story, masters=["gone"], dialing=Nowhere)
