"""Pods of nodes that have failed stay for ``kubectl logs``: of each place the newest.

A pod that is kept has the label ``dlrover-core/kept`` instead of its run's and its group's, so it leaves every list of nodes. It
has ended, and costs nothing but its object and its logs; the end of the run removes it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import NamedTuple

import structlog

from dlrover_backends.k8s import endings, names
from dlrover_backends.k8s.api import Ask, Json, only, uid_of
from dlrover_backends.k8s.errors import ApiError, Conflict, Forbidden, NotFound
from dlrover_backends.k8s.refusals import missing_right
from dlrover_core.runtime.backends import BackendContext

OVER_MAX = 4096

log = structlog.get_logger("dlrover.backend")


class _Pod(NamedTuple):
    incarnation: int
    name: str
    uid: str


class Kept:
    """The kept pods of one run.

    ask:     sends a request, as `Api.ask`
    pods:    the path of the namespace's pods, once it is known
    is_ours: does a pod belong to this owner? Anybody can set labels
    """

    def __init__(
        self, here: BackendContext, ask: Ask, pods: Callable[[], str], is_ours: Callable[[Json, Json], bool]
    ) -> None:
        self._here, self._ask, self._pods, self._is_ours = here, ask, pods, is_ours
        self._newest: dict[str, _Pod] | None = None
        self._older = set[_Pod]()
        self._may = True
        self._over: dict[str, None] = {}  # uids of pods that hold nothing any more, oldest first

    def see(self, pod: Json) -> None:
        """A pod as it is now. Only one that is over may be kept: any other may hold its host's room, whatever it is taken for."""
        if endings.is_over(pod):
            self._over[uid_of(pod)] = None
            if len(self._over) > OVER_MAX:
                del self._over[next(iter(self._over))]
        else:
            self._over.pop(uid_of(pod), None)

    async def keep(self, node: str, pod: str, uid: str, owner: Json) -> bool:
        """Keep the pod of a node that is over, and delete the one that was kept of its place; False: this one is to be deleted.

        Raises `NotFound` and `Conflict` where the pod is gone or another one has its name, and `ApiError`.
        """
        if not self._may or uid not in self._over:
            return False
        own = names.labels(self._here.job, self._here.run)
        labels = {names.LABEL_RUN: None, names.LABEL_NODE: None, names.LABEL_KEPT: own[names.LABEL_RUN]}
        try:
            await self._ask("PATCH", f"{self._pods()}/{pod}", {"metadata": {"uid": uid, "labels": labels}})
        except Forbidden as error:
            self._may = False
            log.info("failed pods are deleted, not kept for kubectl logs", error=missing_right(error))
            return False
        place, _, incarnation = node.rpartition("-")
        if self._newest is None:  # a master before this one may have kept some
            kept = await self._listed(owner)
            self._newest = {}
            for one in kept:
                its, _, number = endings.true_name(one).rpartition("-")
                if number.isdecimal():
                    self._add(its, _Pod(int(number), one["metadata"]["name"], uid_of(one)))
        self._add(place, _Pod(int(incarnation), pod, uid))
        for each in sorted(self._older):
            try:
                await self._remove(each.name, each.uid)
            except ApiError as error:  # with the next one that is kept
                log.info("an older failed pod stays for now", pod=each.name, error=str(error))
                break
            self._older.discard(each)
        return True

    async def clear(self, owner: Json) -> None:
        """Delete all of them. Raises `ApiError`."""
        for one in await self._listed(owner):
            await self._remove(one["metadata"]["name"], uid_of(one))

    def _add(self, place: str, pod: _Pod) -> None:
        assert self._newest is not None
        known = self._newest.get(place, pod)
        self._newest[place] = max(known, pod)
        self._older |= {known, pod} - {self._newest[place]}

    async def _listed(self, owner: Json) -> list[Json]:
        labels = names.labels(self._here.job, self._here.run)
        labels[names.LABEL_KEPT] = labels.pop(names.LABEL_RUN)
        found = (await self._ask("GET", f"{self._pods()}?{names.query(labels)}")).get("items") or ()
        return [one for one in found if self._is_ours(one, owner)]

    async def _remove(self, name: str, uid: str) -> None:
        with contextlib.suppress(NotFound, Conflict):
            await self._ask("DELETE", f"{self._pods()}/{name}", only(uid))
