"""A scripted Kueue: admits Workloads while a quota of nodes lasts, and evicts on demand, in the words of the real one.

It knows one LocalQueue, one flavor and nothing of cohorts, priorities or fair shares. What it writes of a Workload, and what it
waits for, is what Kueue 0.19 writes and waits for: quota stays taken until the admission is taken out of the status.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from dlrover_backends.fake_k8s.api import Api
from dlrover_backends.fake_k8s.kinds import served_without_definition
from dlrover_backends.fake_k8s.store import Change

Object = dict[str, Any]
GROUP, VERSION = "kueue.x-k8s.io", "v1beta2"
WORKLOADS = (GROUP, "workloads")


class ScriptedKueue:
    """Kueue inside an API server, in its loop.

    Args:
        api: of the server.
        namespace: of the LocalQueue.
        quota: how many nodes fit.
        queue: name of the LocalQueue.
        flavor: name of the only ResourceFlavor.
        labels: node labels of the flavor.
        tolerations: of the flavor.
        later: calls a function once the present write is over: a loop's `call_soon`.
    """

    def __init__(
        self,
        api: Api,
        namespace: str,
        quota: int,
        *,
        queue: str = "research",
        flavor: str = "default-flavor",
        labels: dict[str, str] | None = None,
        tolerations: list[Object] | None = None,
        later: Callable[[Callable[[], None]], object],
    ) -> None:
        self._api, self._quota, self._flavor, self._later = api, quota, flavor, later
        self._due = False
        self._order: dict[str, int] = {}
        for kind in served_without_definition():
            if kind.group == GROUP:
                api.serve(kind)
        self._kind = api.kind(GROUP, VERSION, "workloads")
        with contextlib.suppress(Exception):  # there already
            api.create(
                api.kind(GROUP, VERSION, "resourceflavors"),
                "",
                {"metadata": {"name": flavor}, "spec": {"nodeLabels": labels or {}, "tolerations": tolerations or []}},
            )
        local = {"metadata": {"name": queue}, "spec": {"clusterQueue": "cluster-queue"}}
        api.create(api.kind(GROUP, VERSION, "localqueues"), namespace, local)
        api.listen(self._heard)

    @property
    def quota(self) -> int:
        """How many nodes fit."""
        return self._quota

    @quota.setter
    def quota(self, nodes: int) -> None:
        self._quota = nodes
        self._settle()

    @property
    def workloads(self) -> list[Object]:
        """All Workloads, the oldest first."""
        found = [one.obj for one in self._api.store.shelf(WORKLOADS).objects.values()]
        return sorted(found, key=lambda one: self._order.setdefault(one["metadata"]["uid"], len(self._order)))

    @property
    def used(self) -> int:
        """How many nodes hold quota."""
        return sum(count(one) for one in self.workloads if holds(one))

    def evict(
        self, nodes: int, reason: str = "Preempted", message: str = "Preempted to accommodate a workload"
    ) -> None:
        """Ask the quota back of the newest Workload that stands for this many nodes and holds some."""
        found = [one for one in self.workloads if holds(one) and count(one) == nodes and not _is(one, "Evicted")]
        self._write(found[-1], ("Evicted", True, reason, message))

    # ---- what it does by itself

    def _heard(self, key: tuple[str, str], change: Change) -> None:
        if key != WORKLOADS:
            return
        self._order.setdefault(change.now.obj["metadata"]["uid"], len(self._order))
        if not self._due:
            self._due = True
            self._later(self._settle)

    def _settle(self) -> None:
        self._due = False
        for one in self.workloads:
            active = one["spec"].get("active") is not False
            if _is(one, "Finished") or "deletionTimestamp" in one["metadata"]:
                continue
            if holds(one):
                if not active and not _is(one, "Evicted"):
                    self._write(one, ("Evicted", True, "Deactivated", "The workload is deactivated"))
            elif active and count(one) <= self._quota - self.used:
                self._admit(one)
            elif active:
                more = count(one) - (self._quota - self.used)
                words = f"insufficient unused quota for cpu in flavor {self._flavor}, {more} more needed"
                names = one["spec"]["podSets"][0]["name"]
                self._write(
                    one, ("QuotaReserved", False, "Pending", f"couldn't assign flavors to pod set {names}: {words}")
                )

    def _admit(self, one: Object) -> None:
        sets = [
            {"name": each["name"], "flavors": {"cpu": self._flavor}, "count": each["count"]}
            for each in one["spec"]["podSets"]
        ]
        told = [
            ("QuotaReserved", True, "QuotaReserved", "Quota reserved in ClusterQueue cluster-queue"),
            ("Admitted", True, "Admitted", "The workload is admitted"),
        ]
        if _is(one, "Evicted"):
            told.append(("Evicted", False, "QuotaReserved", "Previously: evicted"))
        self._write(one, *told, admission={"clusterQueue": "cluster-queue", "podSetAssignments": sets})

    def _write(self, one: Object, *told: tuple[str, bool, str, str], **more: Any) -> None:
        def change(obj: Object) -> Object:
            status = {**(obj.get("status") or {}), **more}
            found = {each["type"]: each for each in status.get("conditions") or []}
            for type_, true, reason, message in told:
                before, said = found.get(type_) or {}, "True" if true else "False"
                since = before.get("lastTransitionTime") if before.get("status") == said else None
                found[type_] = {"type": type_, "status": said, "reason": reason, "message": message}
                found[type_]["lastTransitionTime"] = since or self._api.now()
            return {**obj, "status": {**status, "conditions": list(found.values())}}

        self._api.patch_status(self._kind, one["metadata"]["namespace"], one["metadata"]["name"], change)


def count(workload: Object) -> int:
    """How many nodes a Workload stands for."""
    return sum(int(one.get("count", 1)) for one in workload["spec"]["podSets"])


def holds(workload: Object) -> bool:
    """Does it hold quota?"""
    status = workload.get("status") or {}
    return bool(status.get("admission")) and not _is(workload, "Finished")


def _is(workload: Object, type_: str) -> bool:
    found = (workload.get("status") or {}).get("conditions") or ()
    return any(one["type"] == type_ and one["status"] == "True" for one in found)
