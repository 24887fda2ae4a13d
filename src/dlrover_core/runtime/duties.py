"""What an agent does beside its workers: watching logs, taking stacks, checking its node.

A duty begins when its agent has joined and ends with it. It hears every order and every notice, at once and without a way to
hold either up, and speaks to the leader through its `Desk`.
"""

from __future__ import annotations

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
