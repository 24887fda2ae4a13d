"""What a story about a backend stands on: the backend, what can be done to its nodes from outside, and whoever observes it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple
from unittest import SkipTest

from dlrover_core.job.orders import NodeLaunch
from dlrover_core.runtime.backend import PHASES, Admission, Backend, Changed, Listed, Observation
from dlrover_core.spec import DEFAULT_GROUP

JOB = "conformance"
Seen = dict[str, Observation]


class Abilities(NamedTuple):
    """What a stand can make its platform do; None: it cannot, and stories that need it are not told.

    fill:     leave no room: nodes that are launched from now on wait
    free:     undo `fill`
    lose:     lose the host of a node, by the node's name; the node runs on
    reach:    undo `lose`
    warn:     give notice that a node is taken away after so many seconds; the newest notice counts
    withdraw: withdraw that notice
    """

    fill: Callable[[], Awaitable[None]] | None = None
    free: Callable[[], Awaitable[None]] | None = None
    lose: Callable[[str], Awaitable[None]] | None = None
    reach: Callable[[str], Awaitable[None]] | None = None
    warn: Callable[[str, float], Awaitable[None]] | None = None
    withdraw: Callable[[str], Awaitable[None]] | None = None


class Stand(NamedTuple):
    """A backend with no nodes, and ways to do something to its nodes that it did not order.

    backend: what is tried
    kill:    end a node, by name, as an accident does
    can:     what its platform can be made to do
    cannot:  what the backend has no notion of, and why: ``waits``, ``lost``, ``notices``, ``hosts``, ``avoid``
    """

    backend: Backend
    kill: Callable[[str], Awaitable[None]]
    can: Abilities = Abilities()
    cannot: Mapping[str, str] = MappingProxyType({})

    def need(self, what: str, *abilities: str) -> None:
        """Skip the story where the backend has no notion of this, or its platform cannot be made to do it."""
        if what in self.cannot:
            raise SkipTest(f"{what}: {self.cannot[what]}")
        missing = [f"`{one}`" for one in abilities if getattr(self.can, one) is None]
        if missing:
            raise SkipTest(f"its Stand has no {', '.join(missing)} in `can`, and no word on {what!r} in `cannot`")


def make_launch(index: int = 0, incarnation: int = 0, *, job: str = JOB) -> NodeLaunch:
    """The order to launch a worker node."""
    node = f"{DEFAULT_GROUP}-{index}-{incarnation}"
    return NodeLaunch(f"{job}-{node}", node, DEFAULT_GROUP, index, incarnation, nproc=1, avoid=())


class Watch:
    """One consumer of `observe`: what it was told, and what follows from that."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._news = asyncio.Condition()
        self._error: Exception | None = None
        self.told: list[Listed | Changed] = []
        self.nodes: Seen = {}

    def __repr__(self) -> str:
        """What it was told last, for whoever reads why a promise was not kept."""
        return ", ".join(f"{name} {node.phase}" for name, node in self.nodes.items()) or "no nodes"

    async def run(self) -> None:
        """Observe until cancelled."""
        try:
            async for seen in self._backend.observe():
                if isinstance(seen, Admission):
                    continue
                async with self._news:
                    self._note(seen)
                    self._news.notify_all()
        except Exception as error:  # noqa: BLE001  # shown by whoever waits
            async with self._news:
                self._error = error
                self._news.notify_all()

    def _note(self, seen: Listed | Changed) -> None:
        assert isinstance(seen, Listed) or self.told, "the first thing told must be Listed"
        self.told.append(seen)
        if isinstance(seen, Listed):
            self.nodes = {node.name: node for node in seen.nodes}
            assert len(self.nodes) == len(seen.nodes), "a name is listed twice"
        elif seen.node.phase == "gone":
            self.nodes.pop(seen.node.name, None)
        else:
            self.nodes[seen.node.name] = seen.node
        for node in seen.nodes if isinstance(seen, Listed) else (seen.node,):
            assert node.phase in PHASES, node
            assert node.age_us >= 0, node

    async def until(self, condition: Callable[[Seen], bool]) -> Seen:
        """Wait until the nodes are so; what they are."""
        async with self._news:
            await self._news.wait_for(lambda: self._error is not None or (bool(self.told) and condition(self.nodes)))
            if self._error is not None:
                raise self._error
            return dict(self.nodes)

    async def running(self, *names: str) -> Seen:
        """Wait until all of these run."""
        return await self.until(lambda seen: all(name in seen and seen[name].phase == "running" for name in names))

    async def over(self, name: str) -> Observation:
        """Wait until a node has ended; how."""
        seen = await self.until(lambda seen: name in seen and seen[name].phase in ("succeeded", "failed"))
        return seen[name]

    async def gone(self, *names: str) -> Seen:
        """Wait until none of these is left."""
        return await self.until(lambda seen: not any(name in seen for name in names))

    def phases(self, name: str) -> list[str]:
        """Every phase this consumer was told of a node, in order."""
        return [node.phase for node in self.seen(name)]

    def seen(self, name: str) -> list[Observation]:
        """Everything that this consumer was told of a node, in order."""
        nodes = [node for seen in self.told for node in (seen.nodes if isinstance(seen, Listed) else (seen.node,))]
        return [node for node in nodes if node.name == name]


@contextlib.asynccontextmanager
async def watching(backend: Backend) -> AsyncIterator[Watch]:
    """A consumer that observes meanwhile, and has been told the first list."""
    watch = Watch(backend)
    task = asyncio.ensure_future(watch.run())
    try:
        await watch.until(lambda _: True)
        yield watch
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
