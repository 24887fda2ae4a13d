"""The disruption budget of a job's nodes: a drain takes one at a time of those that run. It follows their number.

Pods without a scale have no ``maxUnavailable``: what a budget says is how many are kept. One that did not follow a job that got
smaller would let no drain end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import structlog

from dlrover_backends.k8s.api import Ask
from dlrover_backends.k8s.errors import Forbidden, NotFound
from dlrover_backends.k8s.refusals import missing_right
from dlrover_core.runtime.backend import ENDS, GroupSize, Wanted

SETTLED_S = 120.0
"""So long fewer nodes run before fewer are kept: the successor of a drained node runs before the next one goes."""

log = structlog.get_logger("dlrover.backend")


def nodes_kept(groups: Iterable[GroupSize]) -> int:
    """Nodes that a drain leaves running to begin with: all but one."""
    return max(0, sum(one.nodes_max for one in groups) - 1)


def path_of(namespace: str, name: str) -> str:
    """Where a budget is."""
    return f"/apis/policy/v1/namespaces/{namespace}/poddisruptionbudgets/{name}"


async def kept_before(ask: Ask, path: str) -> int | None:
    """How many nodes a budget keeps already; None: there is none, or it may not be read. Raises `ApiError`."""
    try:
        found = ((await ask("GET", path)).get("spec") or {}).get("minAvailable")
    except (Forbidden, NotFound):
        return None
    return found if isinstance(found, int) else None  # somebody else's may be a percentage


class Count:
    """How many nodes of a job run. ``now``: steady seconds."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._running: int | None = None  # None: nodes were not listed yet
        self._counts: int | None = None  # so many count
        self._fewer: tuple[float, int] | None = None  # since when fewer run, and the most that did since

    @property
    def more(self) -> bool:
        """Do more run than count?"""
        return self._counts is not None and (self._running or 0) > self._counts

    def go_on(self, kept: int | None) -> None:
        """A budget keeps so many already: a master before this one has counted one more. None: nobody has counted."""
        if kept is not None and self._counts is None:
            self._counts = kept + 1

    def running(self, number: int) -> None:
        """So many run now."""
        self._running = number
        if self._counts is None or number >= self._counts:
            self._fewer = None
        elif self._fewer is None:
            self._fewer = (self._now(), number)
        else:
            self._fewer = (self._fewer[0], max(number, self._fewer[1]))

    def kept(self, groups: Iterable[GroupSize]) -> int:
        """How many nodes a drain leaves running now, of a job of these sizes."""
        most = max(sum(one.nodes_max for one in groups), self._running or 0)
        if self._counts is None:
            self._counts = most
        if self._running is not None:
            self.running(self._running)
            self._counts = max(self._counts, self._running)
        if self._fewer is not None and self._now() - self._fewer[0] >= SETTLED_S:
            self._counts, self._fewer = self._fewer[1], None
        self._counts = min(self._counts, most)
        return max(0, self._counts - 1)


class Budget:
    """A PodDisruptionBudget that was made with the job's masters.

    name:  the object's
    ask:   sends a request, as `Api.ask`
    where: the namespace, once it is known
    """

    def __init__(self, name: str, ask: Ask, where: Callable[[], str]) -> None:
        self._name, self._ask, self._where = name, ask, where
        self._kept: int | None = None
        self._told = ""

    async def sized(self, wanted: Wanted, kept: int) -> None:
        """Let it keep so many nodes. One that somebody has deleted stays so. Raises `ApiError`."""
        if wanted.state in ENDS or kept == self._kept:
            return
        path = path_of(self._where(), self._name)
        try:
            found = await self._ask("GET", path)
            if (found.get("spec") or {}).get("minAvailable") != kept:
                await self._ask("PATCH", path, {"spec": {"minAvailable": kept}})
        except NotFound:
            pass
        except Forbidden as error:  # tried again: the right may be granted
            why = missing_right(error)
            if why != self._told:
                log.warning("the disruption budget keeps its size", budget=self._name, wanted=kept, error=why)
            self._told = why
            return
        self._kept = kept
