"""What an agent does beside its workers: watching logs, taking stacks, checking its node.

A duty begins when its agent has joined and ends with it. It hears every order and every notice, at once and without a way to
hold either up, and speaks to the leader through its `Desk`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Protocol, runtime_checkable

from dlrover_core.job.orders import Order
from dlrover_core.kernel.wire import P, Part, find
from dlrover_core.runtime.launcher import Notice
from dlrover_core.runtime.messages import Message
from dlrover_core.runtime.within import within

TOLD_S, TOLD_EACH_S = 10.0, 60.0
"""What is waited for after a good end is told of after so long, and then each time as long as that."""


class Desk:
    """A duty's view of its agent: ``node``, the newest ``order``, the ``generation`` that its workers run (0: none)."""

    def __init__(self, node: str, run: str, order: Order, send: Callable[[Message], None]) -> None:
        self.node, self.run, self.order, self.generation = node, run, order, 0
        # What the next beats tell, by class.
        self.told: dict[type, Part] = {}
        self._heard: tuple[Part, ...] = ()
        self.beats_seen = 0
        self.seen_news: Callable[[], None] = lambda: None
        self.hurried = asyncio.Event()
        # Workers that have ended well are only said to have finished once nothing is on its way to storage any more.
        self.at_rest = asyncio.Event()
        self.at_rest.set()
        # Tells people what that is, which has been waited for so many seconds.
        self.waits: Callable[[float], None] = lambda _: None
        # Asked once nothing is on its way any more: why a state that was due on storage is not there, and its step, as
        # `WorkersFinished` has them.
        self.unstored: Callable[[], tuple[str, int]] = lambda: ("", -1)
        self._send = send

    def send(self, command: Message) -> None:
        """Report to whoever leads, as often as it takes. Lost where the master is older than such commands."""
        self._send(command)

    def tell(self, part: Part) -> None:
        """Let the next beats tell this, until another part of its class; a part that says nothing takes it back."""
        self.told.pop(type(part), None)
        if part != type(part)():
            self.told[type(part)] = part

    def heard(self, cls: type[P]) -> P:
        """What the leader said with its newest answer; what says nothing, if it did not."""
        return find(self._heard, cls)

    def seen(self, parts: tuple[Part, ...]) -> None:
        """A beat was answered; ``seen_news`` is called when the answer says something else."""
        news, self._heard = parts != self._heard, parts
        self.beats_seen += 1
        if news:
            self.seen_news()

    def unhear(self) -> None:
        """What the leader said was of another generation."""
        self._heard = ()

    def hurry(self) -> None:
        """What the next beat tells is waited for: let it go out now."""
        self.hurried.set()

    async def until_at_rest(self) -> None:
        """Until no duty has anything under way. How long that takes nobody can say here: whose duty it is gives up what fails."""
        loop = asyncio.get_running_loop()
        began, told_s = loop.time(), TOLD_S
        while not self.at_rest.is_set():
            try:
                await within(told_s, self.at_rest.wait())
            except asyncio.TimeoutError:
                self.waits(loop.time() - began)
                told_s = TOLD_EACH_S


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


@runtime_checkable
class Settling(Protocol):
    """What a duty may have beside: something to bring to safety before its agent goes."""

    async def settle(self, order: Order) -> None:
        """The agent goes as ordered, its workers are being stopped. Bounded by ``order.grace_us``; must not raise."""
        ...


async def settled(duties: Iterable[Duty], order: Order, grace_us: int) -> None:
    """Let all duties bring to safety what they have.

    A job that has failed gives its workers no time; what they leave behind has the ``grace_us`` of a stop.
    """
    if order.outcome == "failed":
        order = order._replace(grace_us=grace_us)
    await asyncio.gather(*(one.settle(order) for one in duties if isinstance(one, Settling)))
