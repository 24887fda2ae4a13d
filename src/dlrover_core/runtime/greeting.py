"""How an agent reaches a master: it dials, greets and waits for the first answer, each with a time-out.

A stopped master keeps its connections, and another master may lead long before the agents have lost patience. So an agent
whose master leaves its heartbeats unanswered asks the other known masters, each over a connection of its own, and keeps the
present connection: a master that only paused goes on, and nothing is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Callable
from typing import NamedTuple

import structlog

from dlrover_core.errors import ConnectionLost, MalformedMessage, TokenRefused
from dlrover_core.runtime import messages
from dlrover_core.runtime.masters import Masters, pause_s
from dlrover_core.runtime.messages import Goodbye, Hello, Welcome
from dlrover_core.runtime.transport import Connection, Dialer, receive_within

UNANSWERED_BEATS = 2
"""After so many unanswered heartbeats, other masters are asked."""
LOOK_S = 1.0
"""Seconds after which an agent that knows one master checks whether it has learned of another."""

_NOT_SERVED = re.compile(r"an agent that speaks protocol \d+ is not served here: \d+ to (\d+) are")
"""The words by which a master refuses a version. `Sessions` uses them, and masters of protocol 4 are recognised by them."""

log = structlog.get_logger("dlrover.agent")


class Greeted(NamedTuple):
    """A master that has taken an agent in."""

    address: str
    connection: Connection
    welcome: Welcome


def _older(refusal: Goodbye) -> int:
    """The version of a master that is too old for ours but that we speak; 0: there is none."""
    found = _NOT_SERVED.match(refusal.reason)
    newest = int(found[1]) if found is not None else 0
    return newest if messages.OLDEST_VERSION <= newest < messages.VERSION else 0


class Unanswered(NamedTuple):
    """What an agent says to other masters while its own is silent."""

    wait_s: float
    """Seconds that the present master may still be silent before others are asked; 0 or less: ask now."""
    hello: Hello
    """The greeting."""
    token: int
    """The newest token that the agent has seen: only a newer one counts."""
    silence_s: float
    """How long the only master may take to answer."""


class Greeter:
    """Dials and greets the ``masters`` of one agent. With several masters, each has less time to answer."""

    def __init__(self, dialer: Dialer, masters: Masters) -> None:
        self._dialer, self._masters = dialer, masters
        # Masters of the previous version, each with what it speaks.
        self._older: dict[str, int] = {}

    async def dial(self, address: str, silence_s: float) -> Connection:
        """A connection to the master at ``address``. Raises `ConnectionLost` and `TokenRefused`.

        Dialling ends when other masters are named: a host that is gone may not answer for long.
        """
        wait_s = self._masters.answer_s(silence_s)
        connecting = asyncio.ensure_future(self._dialer.connect(address))
        naming = asyncio.ensure_future(self._masters.named.wait())
        try:
            await asyncio.wait({connecting, naming}, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
            if connecting.done():
                return connecting.result()
            why = "other masters are named" if naming.done() else f"within {wait_s:g} s"
            raise ConnectionLost(f"{address} did not answer: {why}")
        finally:
            for task in (connecting, naming):
                task.cancel()
            await asyncio.gather(connecting, naming, return_exceptions=True)

    async def greet(self, connection: Connection, hello: Hello, silence_s: float) -> Welcome | Goodbye:
        """Say ``hello``, and return the master's answer. Raises `ConnectionLost` and `MalformedMessage`."""
        # Only this once: the master may have been upgraded by the next time.
        version = self._older.pop(connection.peer, hello.version)
        await connection.send(messages.encode(hello._replace(version=version)))
        first = messages.decode(await receive_within(connection, self._masters.answer_s(silence_s)))
        if not isinstance(first, Welcome | Goodbye):
            raise MalformedMessage(f"a master greets with Welcome, not {type(first).__name__}")
        if isinstance(first, Goodbye) and (older := _older(first)):
            self._older[connection.peer] = older
            raise ConnectionLost(f"{connection.peer} speaks protocol {older} at most: it is greeted again in that one")
        return first

    # ---- beside a conversation with a master that is silent

    async def elsewhere(self, unanswered: Callable[[], Unanswered]) -> Greeted:
        """While the present master is silent, ask all others, until one of them leads under a newer token.

        A standby keeps the connection, so it serves the agent the moment that it leads. The caller closes the connection.
        """
        while True:
            wait_s = unanswered().wait_s if len(self._masters.known) > 1 else LOOK_S
            if wait_s > 0:
                await asyncio.sleep(wait_s)
                continue
            found = await self._ask_all(unanswered)
            if found is not None:
                log.info("another master leads", address=found.address, token=found.welcome.token)
                return found

    async def _ask_all(self, unanswered: Callable[[], Unanswered]) -> Greeted | None:
        """The first master that takes the agent in; None: the present master speaks again."""
        present = self._masters.address
        others = [one for one in self._masters.known if one != present]
        asks = [asyncio.ensure_future(self._ask_until(one, present, unanswered)) for one in others]
        try:
            waiting = set(asks)
            while waiting:
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for one in done:
                    found = one.result()
                    if found is not None:
                        asks.remove(one)
                        return found
            return None
        finally:
            for one in asks:
                one.cancel()
            for late in await asyncio.gather(*asks, return_exceptions=True):
                if isinstance(late, Greeted):
                    await late.connection.close()

    async def _ask_until(self, address: str, present: str, unanswered: Callable[[], Unanswered]) -> Greeted | None:
        loop, attempt = asyncio.get_running_loop(), 0
        while (now := unanswered()).wait_s <= 0:
            began, asked = loop.time(), address
            for _ in range(2):  # ask the named master at once, but not the one that this one names
                said: Greeted | Goodbye | None = None
                with contextlib.suppress(ConnectionLost, MalformedMessage, TokenRefused):
                    said = await self._ask(asked, now.hello, now.silence_s)
                if isinstance(said, Greeted):
                    if said.welcome.token > now.token:
                        return said
                    await said.connection.close()
                if not isinstance(said, Goodbye) or said.address in ("", asked, present):
                    break
                asked = said.address
            await asyncio.sleep(max(0.0, pause_s(attempt, address) - (loop.time() - began)))
            attempt += 1
        return None

    async def _ask(self, address: str, hello: Hello, silence_s: float) -> Greeted | Goodbye:
        connection = await self.dial(address, silence_s)
        taken_in = False
        try:
            said = await self.greet(connection, hello, silence_s)
            if isinstance(said, Goodbye):
                return said
            taken_in = True
            return Greeted(address, connection, said)
        finally:
            if not taken_in:
                await connection.close()
