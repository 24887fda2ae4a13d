"""Levelling: a scheduler's nodes are made to match desired, again and again.

Nothing here remembers half-done effects. Every pass compares what the backend last listed with what desired says: what is
missing is launched, what is not named is deleted. A new master levels as the old one did.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import structlog

from dlrover_core.errors import LaunchRefused
from dlrover_core.job.nodes import Observed, ObserveNodes
from dlrover_core.job.state import NodeLaunch
from dlrover_core.runtime.backend import Backend, Changed, Listed, Observation

if TYPE_CHECKING:
    from dlrover_core.runtime.master import Master

CONCURRENT_MAX = 16
BACK_OFF_S = (0.2, 1.0, 5.0, 15.0, 30.0)
RELEVEL_S = 30.0

log = structlog.get_logger("dlrover.master")


class Leveller:
    """One backend, levelled to one master's desired."""

    def __init__(self, master: Master, backend: Backend) -> None:
        self._master, self._backend = master, backend
        self._wake = asyncio.Event()
        self._listed: dict[str, Observation] = {}
        self._known = False
        self._busy: set[str] = set()
        self._accepted: set[str] = set()
        self._failures: dict[str, int] = {}
        self._not_before: dict[str, float] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._limit = asyncio.Semaphore(CONCURRENT_MAX)

    @property
    def empty(self) -> bool:
        """Has the backend said that nothing of the job is left?"""
        return self._known and not self._listed

    def wake(self) -> None:
        """Desired has changed."""
        self._wake.set()

    async def run(self) -> None:
        """Observe and level until cancelled."""
        observing = asyncio.ensure_future(self._observe())
        try:
            while True:
                self._pass()
                await self._wait()
        finally:
            observing.cancel()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(observing, *self._tasks, return_exceptions=True)

    async def _wait(self) -> None:
        loop = asyncio.get_running_loop()
        pending = [at - loop.time() for at in self._not_before.values() if at > loop.time()]
        try:
            await asyncio.wait_for(self._wake.wait(), min([RELEVEL_S, *pending]))
        except asyncio.TimeoutError:
            pass
        self._wake.clear()

    async def _observe(self) -> None:
        attempt = 0
        while True:
            try:
                async for seen in self._backend.observe():
                    attempt = 0
                    self._seen(seen)
            except Exception as error:  # noqa: BLE001  # a backend may raise anything; it is asked again
                log.warning("backend cannot be observed", error=f"{type(error).__name__}: {error}")
            await asyncio.sleep(BACK_OFF_S[min(attempt, len(BACK_OFF_S) - 1)])
            attempt += 1

    def _seen(self, seen: Listed | Changed) -> None:
        if isinstance(seen, Listed):
            self._known = True
            self._listed = {node.name: node for node in seen.nodes}
            self._accepted &= set(self._listed)
        elif seen.node.phase == "gone":
            self._listed.pop(seen.node.name, None)
        else:
            self._listed[seen.node.name] = seen.node
        nodes = seen.nodes if isinstance(seen, Listed) else (seen.node,)
        observed = tuple(self._translate(node) for node in nodes)
        self._master.tell(ObserveNodes(observed, isinstance(seen, Listed)))
        self._wake.set()
        self._master.left.set()

    def _translate(self, seen: Observation) -> Observed:
        prefix = f"{self._master.state.job.name}-"
        return Observed(seen.name.removeprefix(prefix), seen.phase, seen.exit_code, seen.reason, seen.host, seen.age_us)

    def _pass(self) -> None:
        """One levelling pass, begun by asking the local clock whether this master still leads."""
        if not self._known or not self._master.leading:
            return
        desired, now = self._master.desired, asyncio.get_running_loop().time()
        for node in desired.launch:
            if node.name not in self._listed and node.name not in self._accepted and self._free(node.name, now):
                self._start(node.name, lambda node=node: self._launch(node))
        for name in list(self._listed):
            if name not in desired.names and self._free(name, now):
                self._start(name, lambda name=name: self._delete(name))

    def _free(self, name: str, now: float) -> bool:
        return name not in self._busy and self._not_before.get(name, 0.0) <= now

    def _start(self, name: str, action: Callable[[], Awaitable[None]]) -> None:
        self._busy.add(name)
        task = asyncio.ensure_future(self._guarded(name, action))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _guarded(self, name: str, action: Callable[[], Awaitable[None]]) -> None:
        loop = asyncio.get_running_loop()
        try:
            async with self._limit:
                await action()
            self._failures.pop(name, None)
            # Accepted is not done: if nothing comes of it, it is asked again.
            self._not_before[name] = loop.time() + BACK_OFF_S[-1]
        except Exception as error:  # noqa: BLE001  # unknown: level again
            failures = self._failures.get(name, 0)
            self._failures[name] = failures + 1
            self._not_before[name] = loop.time() + BACK_OFF_S[min(failures, len(BACK_OFF_S) - 1)]
            log.warning("backend call failed, will be tried again", node=name, error=f"{type(error).__name__}: {error}")
        finally:
            self._busy.discard(name)
            self._wake.set()
            self._prune()

    def _prune(self) -> None:
        alive = set(self._listed) | {node.name for node in self._master.desired.launch} | self._busy
        for table in (self._not_before, self._failures):
            for name in [name for name in table if name not in alive]:
                del table[name]

    async def _launch(self, node: NodeLaunch) -> None:
        try:
            await self._backend.launch(node, self._master.token)
        except LaunchRefused as refused:
            if not refused.permanent:
                raise
            log.error("backend refuses a node for good", node=node.name, reason=refused.reason)
            self._master.tell(ObserveNodes((Observed(node.node, "failed", -1, refused.reason),)))
            return
        self._accepted.add(node.name)

    async def _delete(self, name: str) -> None:
        await self._backend.delete(name, self._master.token, self._master.delete_grace_s)
