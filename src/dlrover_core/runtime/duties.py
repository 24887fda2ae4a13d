"""What an agent does beside its workers: watching logs, taking stacks, checking its node.

A duty begins when its agent has joined and ends with it. It hears every order and every notice, at once and without a way to
hold either up, and speaks to the leader through its `Desk`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from dlrover_core.job.state import Order
from dlrover_core.runtime.launcher import Notice
from dlrover_core.runtime.messages import Message


class Desk:
    """A duty's view of its agent: ``node``, the newest ``order``, the ``generation`` that its workers run (0: none)."""

    def __init__(self, node: str, run: str, order: Order, send: Callable[[Message], None]) -> None:
        self.node, self.run, self.order, self.generation = node, run, order, 0
        # What the next beats tell of ranks' paces and losses, as `paces` writes it.
        self.pace: tuple[int, ...] = ()
        self.losses: tuple[int, ...] = ()
        self._send = send

    def send(self, command: Message) -> None:
        """Report to whoever leads, as often as it takes. Lost where the master is older than such commands."""
        self._send(command)


class Orders:
    """The half of a duty that waits for orders, to derive duties from. Only the newest counts: those before it are over."""

    def __init__(self) -> None:
        self._order: Order | None = None
        self._news = asyncio.Event()
        self._news.set()  # what is ordered when it begins is news, too

    def ordered(self, order: Order) -> None:
        """A new order."""
        self._order = order
        self._news.set()

    def noticed(self, notice: Notice) -> None:
        """Nothing follows."""

    def newest(self, desk: Desk) -> Order:
        """The newest order; there is no news any more until another one comes."""
        self._news.clear()
        return self._order or desk.order

    async def news(self, desk: Desk) -> Order:
        """Wait until there is news, and what it is."""
        await self._news.wait()
        return self.newest(desk)


class Duty(Protocol):
    """One duty. `run` is cancelled when the agent goes; what it raises ends the agent, so it catches what may go wrong."""

    async def run(self, desk: Desk) -> None:
        """Do it until cancelled."""
        ...

    def ordered(self, order: Order) -> None:
        """A new order has come; called from the agent's loop, must return at once."""
        ...

    def noticed(self, notice: Notice) -> None:
        """Something happened to a worker; as `ordered`."""
        ...
