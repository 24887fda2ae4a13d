"""What guards the nodes of an attached job: other pods cannot reach them, and a drain takes one at a time.

Masters in pods come with both (`masters`). An attached job makes them itself, where it may: they belong to the run's Secret, and
go with it. Torch's stores ask nobody for a token, so nodes are reached from pods of their own job alone.
"""

from __future__ import annotations

from collections.abc import Callable

import structlog

from dlrover_backends.k8s import names, owning
from dlrover_backends.k8s.api import Ask, Json
from dlrover_backends.k8s.errors import Conflict, Forbidden, Invalid, NotFound
from dlrover_backends.k8s.paths import PLURALS
from dlrover_backends.k8s.refusals import missing_right
from dlrover_core.runtime.backend import ENDS, Wanted
from dlrover_core.runtime.backends import BackendContext

POLICY, BUDGET = "networking.k8s.io/v1", "policy/v1"
_WITHOUT = {
    "NetworkPolicy": "other pods may reach this job's nodes",
    "PodDisruptionBudget": "a drain may take all of this job's nodes at once",
}

log = structlog.get_logger("dlrover.backend")


def objects(here: BackendContext, owner: Json, kept: int) -> list[Json]:
    """The NetworkPolicy of a job's pods, standbys included, and the PodDisruptionBudget of its nodes, which keeps so many."""
    labels = names.labels(here.job, here.run)
    nodes = {"matchLabels": labels, "matchExpressions": [{"key": names.LABEL_NODE, "operator": "Exists"}]}
    inside = {"from": [{"podSelector": {"matchLabels": labels}}]}
    budget = {"minAvailable": kept, "selector": nodes, "unhealthyPodEvictionPolicy": "AlwaysAllow"}
    return [
        _object(
            here,
            owner,
            POLICY,
            "NetworkPolicy",
            {"podSelector": {"matchLabels": labels}, "policyTypes": ["Ingress"], "ingress": [inside]},
        ),
        _object(here, owner, BUDGET, "PodDisruptionBudget", budget),
    ]


def _object(here: BackendContext, owner: Json, version: str, kind: str, spec: Json) -> Json:
    metadata = {
        "name": owner["metadata"]["name"],
        "labels": names.labels(here.job, here.run),
        "annotations": {names.NOTE_JOB: here.job},
        "ownerReferences": [owning.reference(owner)],
    }
    return {"apiVersion": version, "kind": kind, "metadata": metadata, "spec": spec}


class Guard:
    """The guards of a run.

    here:  the run
    ask:   sends a request, as `Api.ask`
    where: the namespace, once it is known
    """

    def __init__(self, here: BackendContext, ask: Ask, where: Callable[[], str]) -> None:
        self._here, self._ask, self._where = here, ask, where
        # By kind: the spec of what there is, and why the last attempt failed.
        self._made: dict[str, Json] = {}
        self._told: dict[str, str] = {}

    async def sized(self, wanted: Wanted, owner: Json, kept: int) -> None:
        """Make what there is not, and let the budget keep so many nodes. A right that is missing is told, and is tried again.

        Raises `ApiError` for what may mend itself.
        """
        if wanted.state in ENDS:
            return
        for one in objects(self._here, owner, kept):
            kind = one["kind"]
            if self._made.get(kind) == one["spec"]:
                continue
            try:
                await self._make(one)
            except (Forbidden, Invalid, NotFound) as error:
                if isinstance(error, NotFound):
                    self._made.pop(kind, None)  # somebody has deleted it: it is made anew
                why = missing_right(error) if isinstance(error, Forbidden) else str(error)
                if self._told.get(kind) != why:
                    log.warning(_WITHOUT[kind], kind=kind, error=why)
                self._told[kind] = why
                continue
            self._made[kind] = one["spec"]
            self._told.pop(kind, None)

    async def _make(self, one: Json) -> None:
        path = f"/apis/{one['apiVersion']}/namespaces/{self._where()}/{PLURALS[one['kind']]}"
        if one["kind"] not in self._made:
            try:
                await self._ask("POST", path, one)
                return
            except Conflict:  # of a master before this one
                pass
        await self._ask("PATCH", f"{path}/{one['metadata']['name']}", {"spec": one["spec"]})
