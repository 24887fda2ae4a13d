"""An agent that has no node yet, and masters that move or know another token."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

import pytest
from agent_stage import NODE, Stage, assigned, run_order, tell

from dlrover_core.errors import ConnectionLost, LaunchFailed, SpecError, TokenRefused
from dlrover_core.job import nodes, world
from dlrover_core.job.orders import Order
from dlrover_core.runtime import messages
from dlrover_core.runtime.ending import Ending
from dlrover_core.runtime.messages import Answer, Assigned, Goodbye, Numbered, Welcome
from dlrover_core.runtime.transport import Connection, Dialer
from dlrover_core.testing import virtual_loop


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
