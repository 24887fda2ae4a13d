"""A run's guards follow its size: those that it makes itself (`guards`), or the budget that came with its masters (`budgets`)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable

import structlog

from dlrover_backends.k8s import budgets, guards
from dlrover_backends.k8s.api import Ask, Json
from dlrover_backends.k8s.settings import Settings
from dlrover_core.errors import CoreError
from dlrover_core.runtime.backend import Observation, Wanted
from dlrover_core.runtime.backends import BackendContext

log = structlog.get_logger("dlrover.backend")


class Guarding:
    """Writes the guards of a run.

    here, told: the run, and the backend's arguments
    ask:        sends a request, as `Api.ask`
    where:      the namespace, once it is known
    connected:  connects, if need be
    owned:      what owns the run's objects
    now:        steady seconds
    """

    def __init__(
        self,
        here: BackendContext,
        told: Settings,
        ask: Ask,
        where: Callable[[], str],
        connected: Callable[[], Awaitable[None]],
        owned: Callable[[], Awaitable[Json]],
        now: Callable[[], float],
    ) -> None:
        self._connected, self._owned, self._ask, self._where = connected, owned, ask, where
        self._name = told.budget  # empty: the owner's
        self._budget = budgets.Budget(told.budget, ask, where) if told.budget else None
        self._guard = None if told.owner else guards.Guard(here, ask, where)
        self._count = budgets.Count(now)
        self._wanted: Wanted | None = None
        self._goes_on = False
        self._writing = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None

    async def sized(self, wanted: Wanted) -> None:
        """The job wants this. After a failure, for which no launch waits, it is done when the leader says the sizes again."""
        self._wanted = wanted
        await self._write(wanted)

    def seen(self, nodes: Iterable[Observation]) -> None:
        """These are the run's nodes. If more run than the budget knows of, it follows at once; fewer may be back soon."""
        self._count.running(sum(one.phase == "running" for one in nodes))
        if self._count.more and self._wanted is not None and (self._task is None or self._task.done()):
            self._task = asyncio.ensure_future(self._follow())

    async def rest(self) -> None:
        """No nodes are seen any more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _follow(self) -> None:
        while self._count.more and self._wanted is not None:
            await self._write(self._wanted)

    async def _write(self, wanted: Wanted) -> None:
        try:
            async with self._writing:
                await self._go_on()
                kept = self._count.kept(wanted.groups)
                if self._guard is not None:
                    await self._guard.sized(wanted, await self._owned(), kept)
                if self._budget is not None:
                    await self._connected()
                    await self._budget.sized(wanted, kept)
        except CoreError as error:
            log.warning("the nodes' guards are seen to again", error=str(error))

    async def _go_on(self) -> None:
        """Begin with what the budget keeps: one of all nodes would hold up a drain for minutes. Raises `CoreError`."""
        if self._goes_on or (self._guard is None and self._budget is None):
            return
        await self._connected()
        name = self._name or str((await self._owned())["metadata"]["name"])
        self._count.go_on(await budgets.kept_before(self._ask, budgets.path_of(self._where(), name)))
        self._goes_on = True
