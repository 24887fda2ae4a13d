"""The master's half of the local backend: orders and observations over the node host's socket, nothing kept in between."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, Union, cast

import structlog

from dlrover_backends.local.host import StaleToken
from dlrover_backends.shared import wire
from dlrover_core.errors import ConnectionLost, CoreError, LaunchRefused, MalformedMessage, SpecError
from dlrover_core.job.orders import NodeLaunch
from dlrover_core.runtime.backend import Changed, Listed, Observation
from dlrover_core.runtime.backends import BackendContext
from dlrover_core.runtime.within import within

CALL_S = 30.0
RECONNECT_S = (0.02, 0.1, 0.5, 1.0)

log = structlog.get_logger("dlrover.backend")


class LocalBackend:
    """The `Backend` port over the node host at the Unix socket ``path``. Holds no connection between calls.

    ``masters``: where the nodes' agents find the masters of whoever observes; the host tells them if that is news.
    """

    def __init__(self, path: str | Path, masters: Sequence[str] = ()) -> None:
        self._path, self._masters = Path(path), tuple(masters)

    async def launch(self, node: NodeLaunch, token: int) -> None:
        """Start a node; returns when its program runs. Raises `LaunchRefused`, `StaleToken`, `ConnectionLost`."""
        await self._call("launch", token, tuple(node))

    async def delete(self, name: str, token: int, grace_s: float) -> None:
        """Delete a node: SIGTERM to its agent, after ``grace_s`` SIGKILL to all of it. Raises `StaleToken`, `ConnectionLost`."""
        await self._call("delete", token, name, float(grace_s))

    async def room(self, group: str) -> int | None:
        """How many more nodes would start now; None: unknown. Groups share one host. Raises `ConnectionLost`."""
        return cast(Union[int, None], await self._call("room", group))

    async def observe(self) -> AsyncIterator[Union[Listed, Changed]]:
        """`Listed` first and after every reconnection, then one `Changed` for every change. Ends when cancelled."""
        failures = 0
        while True:
            try:
                async with wire.connect(self._path) as (reader, writer):
                    await wire.write(writer, "observe", self._masters)
                    while True:
                        seen = _seen(await wire.read(reader))
                        failures = 0
                        yield seen
            except (ConnectionLost, MalformedMessage) as error:
                if not failures:
                    log.warning("node host is lost, reconnecting", path=str(self._path), error=str(error))
            await asyncio.sleep(RECONNECT_S[min(failures, len(RECONNECT_S) - 1)])
            failures += 1

    async def _call(self, *request: object) -> object:
        try:
            answer = await within(CALL_S, self._ask(request))
        except asyncio.TimeoutError as error:
            raise ConnectionLost(f"the node host at {self._path} did not answer within {CALL_S:g} s") from error
        match answer:
            case ("done", value):
                return cast(object, value)
            case ("refused", str(reason), bool(permanent)):
                raise LaunchRefused(reason, permanent=permanent)
            case ("stale", int(token), int(highest)):
                raise StaleToken(token, highest)
            case ("failed", str(reason)):
                raise CoreError(f"the node host failed: {reason}")
        raise MalformedMessage(f"the node host at {self._path} answered {answer[0]!r}")

    async def _ask(self, request: tuple[object, ...]) -> tuple[Any, ...]:
        async with wire.connect(self._path) as (reader, writer):
            await wire.write(writer, *request)
            return await wire.read(reader)


def backend(context: BackendContext) -> LocalBackend:
    """The local backend of a job, whose argument is the socket of the launcher's node host. Raises `SpecError` without one."""
    if not context.args:
        raise SpecError("backend", "local serves a launcher's own nodes, and is chosen by naming no backend at all")
    return LocalBackend(context.args, context.masters)


def _seen(frame: tuple[Any, ...]) -> Listed | Changed:
    match frame:
        case ("listed", tuple(nodes)):
            return Listed(tuple(Observation(*node) for node in nodes))
        case ("changed", tuple(node)):
            return Changed(Observation(*node))
    raise MalformedMessage(f"the node host says {frame[0]!r}")
