"""A stage for one agent, whose master the test plays."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from dlrover_core.errors import ConnectionLost
from dlrover_core.job.orders import Order, Work
from dlrover_core.runtime import messages
from dlrover_core.runtime.agent import Agent
from dlrover_core.runtime.levels import Beat, BeatSeen
from dlrover_core.runtime.messages import Answer, Assigned, Hello, Message, Numbered, Welcome
from dlrover_core.runtime.transport import Connection, Dialer
from dlrover_core.testing import virtual_loop
from dlrover_core.testing.network import Network
from dlrover_core.testing.training import MemoryLauncher, Training

NODE = "worker-0-0"


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
