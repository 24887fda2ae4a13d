"""An agent's work beside its workers: watching logs, taking stacks, checking its node.

A duty begins when its agent has joined and ends with the agent. It gets every order and every notice at once, cannot delay
either, and speaks to the leader through its `Desk`.
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

LOST = 0
"""In place of a report's number: the master is too old to know it."""
TOLD_S, TOLD_EACH_S = 10.0, 60.0
"""A wait for duties after a good end is logged after so many seconds, and then at such intervals."""


class Desk:
    """A duty's view of its agent: ``node``, the newest ``order``, the ``generation`` that its workers run (0: none)."""

    def __init__(self, node: str, run: str, order: Order, send: Callable[[Message], int | None]) -> None:
        self.node, self.run, self.order, self.generation = node, run, order, 0
        # The parts of the next heartbeats, by class.
        self.told: dict[type, Part] = {}
        self._heard: tuple[Part, ...] = ()
        self.beats_seen = 0
        self.seen_news: Callable[[], None] = lambda: None
        self.hurried = asyncio.Event()
        # The agent reports that workers have finished only once nothing is on its way to storage.
        self.at_rest = asyncio.Event()
        self.at_rest.set()
        # Logs what has been waited for, for so many seconds.
        self.waits: Callable[[float], None] = lambda _: None
        # Called once nothing is on its way: why a state that was due on storage is not there, and its step, as
        # `WorkersFinished` has them.
        self.unstored: Callable[[], tuple[str, int]] = lambda: ("", -1)
        self._send = send
        self._asked: dict[int, Callable[[str], None]] = {}

    def send(self, command: Message, told: Callable[[str], None] | None = None) -> bool:
        """Report to the leader, as often as it takes. False: the report is lost, as the master is too old to know it.

        ``told`` hears once why the leader has refused the report; an empty text: it was done.
        """
        number = self._send(command)
        if told is not None and number:
            self._asked[number] = told
        return number != LOST

    def answered(self, number: int, refused: str) -> None:
        """The leader has answered a report, and all before it."""
        for one in [one for one in self._asked if one <= number]:
            self._asked.pop(one)(refused if one == number else "")

    def tell(self, part: Part) -> None:
        """Let heartbeats carry this part until another one of its class replaces it; an empty part removes it."""
        self.told.pop(type(part), None)
        if part != type(part)():
            self.told[type(part)] = part

    def heard(self, cls: type[P]) -> P:
        """The leader's newest part of this class; an empty one, if there is none."""
        return find(self._heard, cls)

    def seen(self, parts: tuple[Part, ...]) -> None:
        """A heartbeat was answered. ``seen_news`` is called if the answer has changed."""
        news, self._heard = parts != self._heard, parts
        self.beats_seen += 1
        if news:
            self.seen_news()

    def unhear(self) -> None:
        """Forget the leader's parts: they were of another generation."""
        self._heard = ()

    def hurry(self) -> None:
        """Send the next heartbeat now."""
        self.hurried.set()

    async def until_at_rest(self) -> None:
        """Wait until no duty has work under way. There is no time limit here: each duty gives up what fails."""
        loop = asyncio.get_running_loop()
        began, told_s = loop.time(), TOLD_S
        while not self.at_rest.is_set():
            try:
                await within(told_s, self.at_rest.wait())
            except asyncio.TimeoutError:
                self.waits(loop.time() - began)
                told_s = TOLD_EACH_S


class Orders:
    """Base of duties that wait for orders. Only the newest order counts; earlier ones are over."""

    def __init__(self) -> None:
        self._order: Order | None = None
        self._news = asyncio.Event()
        self._news.set()  # the order at its start is news, too

    def ordered(self, order: Order) -> None:
        """Take in a new order."""
        self._order = order
        self._news.set()

    def noticed(self, notice: Notice) -> None:
        """Ignore notices."""

    def newest(self, desk: Desk) -> Order:
        """The newest order. It is no longer news."""
        self._news.clear()
        return self._order or desk.order

    async def news(self, desk: Desk) -> Order:
        """Wait until there is a new order."""
        await self._news.wait()
        return self.newest(desk)


class Duty(Protocol):
    """One duty. `run` is cancelled when the agent leaves. An error that it raises ends the agent, so it catches what may fail."""

    async def run(self, desk: Desk) -> None:
        """Work until cancelled."""
        ...

    def ordered(self, order: Order) -> None:
        """Take in a new order. Called from the agent's loop, so it must return at once."""
        ...

    def noticed(self, notice: Notice) -> None:
        """Take in a notice about a worker. Called as `ordered` is."""
        ...


@runtime_checkable
class Settling(Protocol):
    """An optional method of a duty: save what it has before its agent leaves."""

    async def settle(self, order: Order) -> None:
        """The agent leaves as ordered, and its workers are being stopped. Bounded by ``order.grace_us``; must not raise."""
        ...


async def settled(duties: Iterable[Duty], order: Order, grace_us: int) -> None:
    """Let all duties save what they have.

    A failed job gives its workers no time, but the duties get ``grace_us``, the grace of a stop, to save what workers left.
    """
    if order.outcome == "failed":
        order = order._replace(grace_us=grace_us)
    await asyncio.gather(*(one.settle(order) for one in duties if isinstance(one, Settling)))
