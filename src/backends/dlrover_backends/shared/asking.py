"""A backend's half of a node host's wire: orders and their answers, and observing that goes on after a connection was lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Union, cast

import structlog

from dlrover_backends.shared import wire
from dlrover_core.errors import CoreError, LaunchRefused, MalformedMessage
from dlrover_core.runtime.backend import Changed, Listed, Observation

log = structlog.get_logger("dlrover.backend")


class StaleToken(CoreError):
    """An order of a deposed master. ``highest`` is the token of a newer one."""

    def __init__(self, token: int, highest: int) -> None:
        super().__init__(f"token {token} is of a deposed master: one with {highest} has given orders")
        self.token, self.highest = token, highest


async def ask(path: Path, *request: object) -> tuple[Any, ...]:
    """One order, and the answer to it. Raises `ConnectionLost` and `MalformedMessage`."""
    async with wire.connect(path) as (reader, writer):
        await wire.write(writer, *request)
        return await wire.read(reader)


def result(answer: tuple[Any, ...], who: str) -> object:
    """What an order has brought. Raises `LaunchRefused`, `StaleToken`, `CoreError`, and `MalformedMessage`. ``who`` answered."""
    match answer:
        case ("done", value):
            return cast(object, value)
        case ("refused", str(reason), bool(permanent)):
            raise LaunchRefused(reason, permanent=permanent)
        case ("stale", int(token), int(highest)):
            raise StaleToken(token, highest)
        case ("failed", str(reason)):
            raise CoreError(f"{who} failed: {reason}")
    raise MalformedMessage(f"{who} answered {answer[0]!r}")


async def observe(
    path: Callable[[], Path],
    *words: object,
    who: str,
    pauses_s: Sequence[float],
    first: Callable[[], Awaitable[None]] | None = None,
) -> AsyncGenerator[Union[Listed, Changed], None]:
    """`Listed` first and after every lost connection, then one `Changed` for every change. Ends when cancelled.

    ``words``: said behind ``observe``; ``who``: the host's name in our log; ``pauses_s``: before each new connection, the last
    one for all that follow; ``first``: before each connection, to have somebody to connect to.
    """
    failures = 0
    while True:
        try:
            if first is not None:
                await first()
            async with wire.connect(path()) as (reader, writer):
                await wire.write(writer, "observe", *words)
                while True:
                    seen = _seen(await wire.read(reader), who)
                    failures = 0
                    yield seen
        except CoreError as error:
            if not failures:
                log.warning("whoever tells of nodes is lost, connecting anew", who=who, error=str(error))
        await asyncio.sleep(pauses_s[min(failures, len(pauses_s) - 1)])
        failures += 1


def _seen(frame: tuple[Any, ...], who: str) -> Listed | Changed:
    match frame:
        case ("listed", tuple(nodes)):
            return Listed(tuple(Observation(*node) for node in nodes))
        case ("changed", tuple(node)):
            return Changed(Observation(*node))
    raise MalformedMessage(f"{who} says {frame[0]!r}")
