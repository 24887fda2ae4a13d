"""The backend in memory keeps the whole contract of backends: its platform can do all that stories ask for."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from itertools import count
from unittest import SkipTest

import pytest

from dlrover_adapters.cli.conformance_ours import InMemory
from dlrover_core.runtime.backend import Backend, Changed, Listed, Observation
from dlrover_core.testing import Abilities, Stand, virtual_loop
from dlrover_core.testing.backend_conformance import Story
from dlrover_core.testing.conformance import promises
from dlrover_core.testing.platform_stories import PlatformStories


class TestMemoryBackend(InMemory):
    """In virtual time: notices that grow old cost nothing."""

    def run(self, story: Story) -> None:
        """Tell a story in a virtual loop."""

        async def told() -> None:
            async with self.make_backend() as stand:
                await story(stand)

        virtual_loop.run(told(), limit_s=self.story_s)


class _Lying:
    """Tells what a backend tells, changed by a function."""

    def __init__(self, backend: Backend, change: Callable[[Observation], Observation]) -> None:
        self._backend, self._change = backend, change
        self.launch, self.delete, self.room = backend.launch, backend.delete, backend.room

    async def observe(self) -> AsyncIterator[Listed | Changed]:
        """Each observation, changed."""
        async for told in self._backend.observe():
            if isinstance(told, Listed):
                yield Listed(tuple(self._change(one) for one in told.nodes))
            else:
                yield Changed(self._change(told.node))


_NUMBERS = count()
LIES: dict[str, Callable[[Observation], Observation]] = {
    "test_a_node_that_waits_says_why": lambda seen: seen._replace(waits=""),
    "test_a_lost_host_is_no_end": lambda seen: seen._replace(phase="failed") if seen.phase == "lost" else seen,
    "test_a_notice_is_told": lambda seen: seen._replace(age_us=0),
    "test_the_newest_notice_is_told": lambda seen: seen._replace(notice_us=min(seen.notice_us, 600_000_000)),
    "test_a_notice_is_withdrawn": lambda seen: seen._replace(notice="preemption"),
    "test_hosts_are_avoided": lambda seen: seen._replace(host="host-0"),
    "test_a_running_node_has_a_host": lambda seen: seen._replace(host=f"host-{next(_NUMBERS)}"),
}


@pytest.mark.parametrize("name", sorted(LIES))
def test_a_backend_that_gets_it_wrong_is_found(name: str) -> None:
    """Each story fails on a backend that tells one thing otherwise than it is."""

    class Lying(TestMemoryBackend):
        @contextlib.asynccontextmanager
        async def make_backend(self) -> AsyncIterator[Stand]:
            async with super().make_backend() as stand:
                yield stand._replace(backend=_Lying(stand.backend, LIES[name]))

    with pytest.raises((AssertionError, asyncio.TimeoutError)):
        getattr(Lying(), name)()


def test_what_a_stand_cannot_do_is_skipped_with_a_reason() -> None:
    """It says why, or is told how to say it."""

    class Poor(TestMemoryBackend):
        @contextlib.asynccontextmanager
        async def make_backend(self) -> AsyncIterator[Stand]:
            async with super().make_backend() as stand:
                yield stand._replace(can=Abilities(), cannot={"notices": "nobody is warned here"})

    with pytest.raises(SkipTest, match="notices: nobody is warned here"):
        Poor().test_a_notice_is_told()
    with pytest.raises(SkipTest, match="no `lose`, `reach` in `can`, and no word on 'lost' in `cannot`"):
        Poor().test_a_lost_host_is_no_end()


def test_every_story_is_told_of_a_backend_in_memory() -> None:
    """Nothing about platforms is skipped: it can do all of it."""
    told = {f"test_{one.name}" for one in promises(InMemory)}
    assert {name for name in vars(PlatformStories) if name.startswith("test_")} <= told
