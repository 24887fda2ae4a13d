"""The supervisor's view of the nodes of its node host: asked over a socket in the run's folder."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dlrover_backends.shared import wire
from dlrover_core.errors import CoreError
from dlrover_core.runtime.within import within

SOCKET = "keeper.sock"
LOOK_S, ANSWER_S, AGAIN_S = 1.0, 10.0, 0.2


class RemoteNodes:
    """Nodes that live with another process, as `Supervisor` wants them; they outlive the supervisor."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / SOCKET
        self._said: Mapping[str, Mapping[str, Any]] = {}
        self._looking: asyncio.Task[None] | None = None
        self._killing: set[asyncio.Task[Any]] = set()

    async def __aenter__(self) -> object:
        """Begin to look."""
        self._looking = asyncio.create_task(self._look())
        return self

    async def __aexit__(self, *_: object) -> None:
        """Look no longer: the nodes go on."""
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)

    async def _look(self) -> None:
        while True:
            with contextlib.suppress(CoreError, asyncio.TimeoutError):
                self._said = dict(await within(ANSWER_S, self._ask("said")))
            await asyncio.sleep(LOOK_S)

    async def _ask(self, *request: object) -> Any:
        async with wire.connect(self._path) as (reader, writer):
            await wire.write(writer, *request)
            return (await wire.read(reader))[0]

    async def warm(self) -> None:
        """Wait until those started first need the processor no longer."""
        while True:
            with contextlib.suppress(CoreError):
                await self._ask("warm")
                return
            await asyncio.sleep(AGAIN_S)

    async def restore(self) -> None:
        """The node host looks after its sockets itself."""

    def kill(self) -> None:
        """SIGKILL them all."""
        task = asyncio.ensure_future(self._tell("kill"))
        self._killing.add(task)
        task.add_done_callback(self._killing.discard)

    async def _tell(self, *request: object) -> None:
        with contextlib.suppress(CoreError, asyncio.TimeoutError):
            await self._ask(*request)

    async def close(self, grace_s: float = 0.0) -> None:
        """End them all; the node host ends too."""
        await self._tell("close", float(grace_s))

    def said(self) -> Mapping[str, Mapping[str, Any]]:
        """What each node's agent said of itself, a moment ago."""
        return self._said
