"""The agent alone, against a master that the test plays."""

from __future__ import annotations

import asyncio

import pytest
from agent_stage import NODE, Stage, run_order, tell

from dlrover_core.errors import ConnectionLost
from dlrover_core.job import incidents, nodes, world
from dlrover_core.job.orders import Order
from dlrover_core.runtime import messages
from dlrover_core.runtime.launcher import WorkerExit
from dlrover_core.runtime.levels import BeatSeen
from dlrover_core.runtime.messages import Again, Assigned, Goodbye, Hello
from dlrover_core.runtime.outbox import UNANSWERED_MAX, Outbox
from dlrover_core.runtime.transport import Connection
from dlrover_core.testing import virtual_loop

WAIT = Order(leave=False, reason="waiting for a world", grace_us=0)


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
