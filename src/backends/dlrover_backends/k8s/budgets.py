"""The disruption budget of a job's nodes: how many a drain leaves running. It follows the job's size.

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

log = structlog.get_logger("dlrover.backend")


def nodes_kept(groups: Iterable[GroupSize]) -> int:
    """Nodes that a drain leaves running: those that the job needs; all but one, where it needs all."""
    sizes = tuple(groups)
    fewest, most = sum(one.nodes_min for one in sizes), sum(one.nodes_max for one in sizes)
    return max(0, most - 1) if fewest == most else fewest


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

    async def sized(self, wanted: Wanted) -> None:
        """Let it keep what a job of these sizes needs. One that somebody has deleted stays so. Raises `ApiError`."""
        kept = nodes_kept(wanted.groups)
        if wanted.state in ENDS or kept == self._kept:
            return
        path = f"/apis/policy/v1/namespaces/{self._where()}/poddisruptionbudgets/{self._name}"
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
