"""How much room a scheduler has: asked on news and now and then, and recorded once a change has lasted.

Other tenants change it all the time, and so does every node of this job that starts or ends. So an answer counts only if
the next one, a moment later, is the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from dlrover_core.job.queueing import UNKNOWN, NoteRoom
from dlrover_core.runtime.backend import Backend
from dlrover_core.runtime.leader import Leader
from dlrover_core.runtime.within import within

STANDS_S = 2.0
"""Seconds after which a changed answer must be the same to count."""
APART_S = 5.0
"""Seconds in which news are gathered."""
ANSWER_S = 30.0
LOOK_S = 60.0
"""Seconds between two looks at whether room is asked for at all."""

log = structlog.get_logger("dlrover.master")


class Rooms:
    """The room of every group of one master's job. ``found`` is called when there is room where there was none."""

    def __init__(self, master: Leader, backend: Backend, found: Callable[[], None]) -> None:
        self._master, self._backend, self._found = master, backend, found
        self._news = asyncio.Event()

    def news(self) -> None:
        """A node came, went or waits, so the room may have changed."""
        self._news.set()

    async def run(self) -> None:
        """Ask until cancelled."""
        while True:
            await self._due()
            self._news.clear()
            spec = self._master.state.job.spec
            if spec.room_s and not spec.joining and self._master.state.job.live and self._master.may_order():
                await self._ask([group.name for group in spec.groups])
            await asyncio.sleep(APART_S)

    async def _due(self) -> None:
        every_s = self._master.state.job.spec.room_s or LOOK_S
        timer = asyncio.get_running_loop().call_later(every_s, self._news.set)
        try:
            await self._news.wait()
        finally:
            timer.cancel()

    async def _ask(self, groups: list[str]) -> None:
        known = self._master.state.queueing
        first = {group: await self._of(group) for group in groups}
        changed = [group for group, room in first.items() if room != known.room(group)]
        if not changed:
            return
        await asyncio.sleep(STANDS_S)
        for group in changed:
            room = await self._of(group)
            if room != first[group]:
                self._news.set()
                continue
            if room > 0 >= self._master.state.queueing.room(group):
                self._found()
            self._master.tell(NoteRoom(group, room))

    async def _of(self, group: str) -> int:
        """The scheduler's answer; -1: it does not know."""
        try:
            room = await within(ANSWER_S, self._backend.room(group))
        except Exception as error:  # noqa: BLE001  # a backend may raise anything; it is asked again
            log.debug("room is not known", group=group, error=f"{type(error).__name__}: {error}")
            return UNKNOWN
        return UNKNOWN if room is None else room
