"""Event logs: in memory for tests and simulation, in SQLite for one host; others are found through entry points.

`open_log` is the door. A distribution adds a scheme by an entry point in the group ``dlrover.logs``: its name is the scheme,
its object a class
with ``async classmethod open_url(url: str, codec: Codec) -> EventLog``.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from types import TracebackType
from typing import TYPE_CHECKING, Any, cast

from dlrover_core.errors import SpecError

if TYPE_CHECKING:
    from dlrover_core.kernel.codec import Codec
    from dlrover_core.kernel.log import EventLog

Opener = Callable[[str, "Codec"], Awaitable["EventLog"]]

GROUP = "dlrover.logs"
OURS = ("memory", "sqlite")


def open_log(url: str, codec: Codec | None = None) -> Opening:
    """The log at ``url``, to be entered or awaited.

    ``async with open_log(url) as log:``, or ``log = await open_log(url)`` and in the end ``await log.close()``.

    ``memory:``; ``sqlite:///absolute/path``, ``sqlite:relative/path``, ``sqlite:`` for the default place, each with
    ``?archive=URL`` if need be (a directory, or what `stores` knows); or a scheme of an installed distribution. ``codec`` is
    by default that of jobs.
    Raises `SpecError` for a URL that no log understands.
    """
    return Opening(url, codec)


class Opening:
    """A log about to be opened: await it, or enter it."""

    def __init__(self, url: str, codec: Codec | None) -> None:
        self.url, self.codec = url, codec
        self._log: EventLog | None = None

    def __await__(self) -> Generator[Any, None, EventLog]:
        return self._open().__await__()

    async def __aenter__(self) -> EventLog:
        self._log = await self._open()
        return self._log

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._log is not None:
            await self._log.close()

    async def _open(self) -> EventLog:
        scheme = self.url.partition(":")[0]
        # To read what each distribution offers, and to import what is found, takes longer than a loop should stand still.
        if scheme in OURS:
            opener = find_opener(scheme)
        else:
            import asyncio  # who only names a log, as the launcher does before its first agent, needs none

            opener = await asyncio.to_thread(find_opener, scheme)
        codec = self.codec
        if codec is None:
            from dlrover_core.job.state import CODEC

            codec = CODEC
        return await opener(self.url, codec)


def find_opener(scheme: str) -> Opener:
    """What opens logs of a scheme. Raises `SpecError` that names the schemes there are."""
    # Ours are known by name, so that they work from a checkout that was never installed.
    if scheme == "memory":
        from dlrover_core.logs.memory import MemoryLog

        return MemoryLog.open_url
    if scheme == "sqlite":
        from dlrover_core.logs.sqlite import SqliteLog

        return SqliteLog.open_url
    from importlib.metadata import entry_points

    found = {entry.name: entry for entry in entry_points(group=GROUP)}
    if scheme not in found:
        known = ", ".join(sorted({*OURS, *found}))
        raise SpecError("log", f"no log is installed for {scheme!r}; there are: {known}")
    return cast(Opener, found[scheme].load().open_url)
