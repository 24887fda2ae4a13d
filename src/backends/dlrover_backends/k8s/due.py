"""What a pod means changes with time alone: one waits for its kubelet for too long, one on a dead host should have been gone.

No watch tells of that, and the next list is minutes away. So such a pod is looked at again when it is due.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import NamedTuple, Union

from dlrover_backends.k8s import endings, queues
from dlrover_backends.k8s.api import Json, uid_of
from dlrover_backends.k8s.listwatch import Change, Snapshot
from dlrover_backends.k8s.stuck import Patience
from dlrover_core.runtime.backend import Observation
from dlrover_core.runtime.within import within

SLACK_S = 0.1
"""A pod is looked at so long after its time, so that rounding does not find it too early."""


class _Due(NamedTuple):
    """A pod, by uid, whose time has come."""

    uid: str


class Dues:
    """Pods that wait for a time. ``patience``: how long they may wait for kubelets. ``wall``: the clock of the API's times."""

    def __init__(self, patience: Patience, wall: Callable[[], float]) -> None:
        self._patience, self._wall = patience, wall
        self._pods: dict[str, tuple[float, Json]] = {}  # by uid: when by the loop's clock, and the pod as last seen
        self._sooner = asyncio.Event()

    def note(self, pod: Json, seen: Observation) -> None:
        """A pod was looked at, and means this until it changes, or is due."""
        uid = uid_of(pod)
        self._pods.pop(uid, None)
        if seen.phase != "pending":
            return
        left = [one for one in (self._patience.left_s(pod), endings.late_in_s(pod, self._wall())) if one is not None]
        if not left:
            return
        at = asyncio.get_running_loop().time() + max(0.0, min(left)) + SLACK_S
        self._pods[uid] = (at, pod)
        self._sooner.set()

    async def beside(
        self, loop: AsyncGenerator[Union[Snapshot, Change]]
    ) -> AsyncGenerator[Union[Snapshot, Change], None]:
        """What a loop of lists and watches says, and a `Change` of each pod that is due. Raises what the loop raises.

        What an earlier one has shown is forgotten: its list comes first.
        """
        self._pods.clear()
        async with aclosing(queues.merged(loop, self._wake())) as seen:
            async for one in seen:
                if isinstance(one, _Due):
                    _, pod = self._pods.pop(one.uid, (0.0, None))
                    if pod is not None:  # else it has changed, or is gone, meanwhile
                        yield Change("MODIFIED", pod)
                    continue
                if isinstance(one, Snapshot):
                    self._pods.clear()
                elif one.type == "DELETED":
                    self._pods.pop(uid_of(one.object), None)
                yield one

    async def _wake(self) -> AsyncGenerator[_Due, None]:
        loop = asyncio.get_running_loop()
        while True:
            self._sooner.clear()
            uid, (at, _) = min(self._pods.items(), key=lambda one: one[1][0], default=("", (None, None)))
            if at is not None and at <= loop.time():
                yield _Due(uid)
                continue
            with contextlib.suppress(asyncio.TimeoutError):
                if at is None:
                    await self._sooner.wait()
                else:
                    await within(at - loop.time(), self._sooner.wait())
