"""The master's half of the local backend: orders and observations over the node host's socket, nothing kept in between."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Union, cast

from dlrover_backends.shared import asking
from dlrover_core.errors import ConnectionLost, SpecError
from dlrover_core.job.orders import NodeLaunch
from dlrover_core.runtime.backend import Changed, Listed
from dlrover_core.runtime.backends import BackendContext
from dlrover_core.runtime.within import within

CALL_S = 30.0
RECONNECT_S = (0.02, 0.1, 0.5, 1.0)


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

    def observe(self) -> AsyncIterator[Union[Listed, Changed]]:
        """`Listed` first and after every reconnection, then one `Changed` for every change. Ends when cancelled."""
        return asking.observe(lambda: self._path, self._masters, who=self._who, pauses_s=RECONNECT_S)

    async def _call(self, *request: object) -> object:
        try:
            answer = await within(CALL_S, asking.ask(self._path, *request))
        except asyncio.TimeoutError as error:
            raise ConnectionLost(f"{self._who} did not answer within {CALL_S:g} s") from error
        return asking.result(answer, self._who)

    @property
    def _who(self) -> str:
        return f"the node host at {self._path}"


def backend(context: BackendContext) -> LocalBackend:
    """The local backend of a job, whose argument is the socket of the launcher's node host. Raises `SpecError` without one."""
    if not context.args:
        raise SpecError("backend", "local serves a launcher's own nodes, and is chosen by naming no backend at all")
    return LocalBackend(context.args, context.masters)
