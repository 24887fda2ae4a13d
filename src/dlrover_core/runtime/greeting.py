"""How an agent reaches a master: it dials, greets, and waits for the first word, each for a bounded time."""

from __future__ import annotations

import asyncio

import structlog

from dlrover_core.errors import ConnectionLost, MalformedMessage
from dlrover_core.runtime import messages
from dlrover_core.runtime.masters import Masters
from dlrover_core.runtime.messages import Goodbye, Welcome
from dlrover_core.runtime.transport import Connection, Dialer, receive_within
from dlrover_core.runtime.within import within

log = structlog.get_logger("dlrover.agent")


class Greeter:
    """Dials and greets the ``masters`` of one agent. Where there are several, each has less time to answer."""

    def __init__(self, dialer: Dialer, masters: Masters) -> None:
        self._dialer, self._masters = dialer, masters

    async def dial(self, address: str, silence_s: float) -> Connection:
        """A connection to the master at ``address``. Raises `ConnectionLost` and `TokenRefused`."""
        wait_s = self._masters.answer_s(silence_s)
        try:
            return await within(wait_s, self._dialer.connect(address))
        except asyncio.TimeoutError as error:
            raise ConnectionLost(f"{address} did not answer within {wait_s:g} s") from error

    async def greet(
        self, connection: Connection, hello: bytes, silence_s: float, *, newer_shape: bool
    ) -> Welcome | Goodbye:
        """Say ``hello``, and hear what the master answers. ``newer_shape``: a master of protocol 1 cannot read this hello.

        Raises `ConnectionLost` and `MalformedMessage`.
        """
        await connection.send(hello)
        try:
            first = messages.decode(await receive_within(connection, self._masters.answer_s(silence_s)))
        except ConnectionLost as lost:
            if newer_shape:
                log.warning(
                    "no answer to our greeting",
                    hint="a master older than protocol 2 cannot read it: install one version of dlrover-core everywhere",
                    master=connection.peer,
                    reason=str(lost),
                )
            raise
        if not isinstance(first, Welcome | Goodbye):
            raise MalformedMessage(f"a master greets with Welcome, not {type(first).__name__}")
        return first
