"""Deletion: grace, finalizers, preconditions, eviction, and the collector of what owners leave behind."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from typing import Any

from dlrover_backends.fake_k8s import answers, selectors
from dlrover_backends.fake_k8s.api import CLEANUP, NAMESPACES, PODS, Api, stamp
from dlrover_backends.fake_k8s.kinds import Kind
from dlrover_backends.fake_k8s.store import Change, Key

Object = dict[str, Any]

_FOREGROUND = "foregroundDeletion"
_BUDGETS = ("policy", "poddisruptionbudgets")
_DEFINITIONS = ("apiextensions.k8s.io", "customresourcedefinitions")


class Deletion:
    """Deletes objects of an `Api`, and plays the controllers that finish deletions.

    Args:
        api: the objects.
        soon: runs a function a moment later, after the answer to the present request.
    """

    def __init__(self, api: Api, soon: Callable[[Callable[[], None]], None]) -> None:
        self.api = api
        self._soon = soon
        self._collecting = False
        self._waiting = False  # a namespace or a foreground deletion waits for others to go
        self._uids = {
            stored.obj["metadata"]["uid"]
            for key in api.store.kinds()
            for stored in api.store.shelf(key).objects.values()
        }
        self._owners: set[str] = set()  # uids that some object named as its owner
        api.listen(self._heard)

    def delete(self, kind: Kind, where: str, name: str, options: Object, *, dry: bool = False) -> Object:
        """Delete one object; returns what the server answers.

        Raises:
            Refused: 404, or 409 for a precondition that does not hold.
        """
        obj = self.api.stored(kind, where, name).obj
        self._preconditions(kind, name, obj, options.get("preconditions") or {})
        if dry:
            return obj
        if kind.key == NAMESPACES:
            return self._namespace(kind, name, obj)
        if kind.key == _DEFINITIONS:
            return self._definition(kind, name, obj)
        if kind.key == PODS:
            return self._pod(kind, where, name, obj, options)
        finalizers = self._finalizers(obj, options)
        if finalizers:
            if "deletionTimestamp" in obj["metadata"]:
                return obj
            return self._mark(kind, (where, name), obj, 0, finalizers)
        gone = self.api.store.remove(kind.key, (where, name)).obj
        if kind.returns:
            return gone
        details: Object = {"name": name}
        if kind.group:
            details["group"] = kind.group
        details.update(kind=kind.plural, uid=obj["metadata"]["uid"])
        return answers.success(details=details)

    def _preconditions(self, kind: Kind, name: str, obj: Object, wanted: Object) -> None:
        metadata = obj["metadata"]
        if wanted.get("uid") not in {None, metadata["uid"]}:
            words = (
                f"the UID in the precondition ({wanted['uid']}) does not match the UID in record ({metadata['uid']}). "
                "The object might have been deleted and then recreated"
            )
            raise answers.precondition(kind, name, words)
        if wanted.get("resourceVersion") not in {None, metadata["resourceVersion"]}:
            words = (
                f"the ResourceVersion in the precondition ({wanted['resourceVersion']}) does not match the "
                f"ResourceVersion in record ({metadata['resourceVersion']}). The object might have been modified"
            )
            raise answers.precondition(kind, name, words)

    def _finalizers(self, obj: Object, options: Object) -> list[str]:
        found = list(obj["metadata"].get("finalizers") or [])
        policy = options.get("propagationPolicy")
        if policy is None and options.get("orphanDependents") is not None:
            policy = "Orphan" if options["orphanDependents"] else "Background"
        if policy is not None:
            found = [one for one in found if one not in {"orphan", _FOREGROUND}]
        if policy == "Orphan":
            found.append("orphan")
        if policy == "Foreground":
            found.append(_FOREGROUND)
        return found

    def _mark(self, kind: Kind, key: Key, obj: Object, grace_s: int, finalizers: list[str]) -> Object:
        """Set the deletion's time: one more version, one more generation."""
        metadata = dict(obj["metadata"])
        if kind.generation and "deletionTimestamp" not in metadata:
            metadata["generation"] = metadata.get("generation", 0) + 1
        at = self.api.clock() + dt.timedelta(seconds=grace_s)
        metadata.update(deletionTimestamp=stamp(at), deletionGracePeriodSeconds=grace_s)
        if finalizers:
            metadata["finalizers"] = finalizers
        return self.api.store.put(kind.key, key, {**obj, "metadata": metadata}).obj

    def _pod(self, kind: Kind, where: str, name: str, obj: Object, options: Object) -> Object:
        grace_s = options.get("gracePeriodSeconds")
        if grace_s is None:
            grace_s = obj["spec"].get("terminationGracePeriodSeconds") or 30
        if not obj["spec"].get("nodeName") or obj["status"].get("phase") in {"Succeeded", "Failed"}:
            grace_s = 0
        grace_s = int(grace_s) if int(grace_s) >= 0 else 1  # a negative grace is one second
        metadata = obj["metadata"]
        finalizers = self._finalizers(obj, options)
        if "deletionTimestamp" in metadata and grace_s > 0:
            if grace_s >= metadata["deletionGracePeriodSeconds"]:
                return obj
            return self._shorten(kind, (where, name), obj, grace_s)
        if "deletionTimestamp" not in metadata or metadata["deletionGracePeriodSeconds"] > 0:
            obj = self._mark(kind, (where, name), obj, grace_s, finalizers)
        if grace_s > 0 or finalizers:
            return obj
        return self.api.store.remove(kind.key, (where, name)).obj

    def _shorten(self, kind: Kind, key: Key, obj: Object, grace_s: int) -> Object:
        metadata = dict(obj["metadata"])
        before = dt.datetime.strptime(metadata["deletionTimestamp"], "%Y-%m-%dT%H:%M:%S%z")
        at = before - dt.timedelta(seconds=metadata["deletionGracePeriodSeconds"] - grace_s)
        metadata.update(deletionTimestamp=stamp(at), deletionGracePeriodSeconds=grace_s)
        return self.api.store.put(kind.key, key, {**obj, "metadata": metadata}).obj

    def _namespace(self, kind: Kind, name: str, obj: Object) -> Object:
        if "deletionTimestamp" in obj["metadata"]:
            return obj
        metadata = {**obj["metadata"], "deletionTimestamp": self.api.now()}
        new = {**obj, "metadata": metadata, "status": {**obj["status"], "phase": "Terminating"}}
        answer = self.api.store.put(kind.key, ("", name), new).obj
        self._soon(self._collect)
        return answer

    def _definition(self, kind: Kind, name: str, obj: Object) -> Object:
        if "deletionTimestamp" in obj["metadata"]:
            return obj
        metadata = {**obj["metadata"], "deletionTimestamp": self.api.now(), "finalizers": [CLEANUP]}
        words = "CustomResourceDefinition marked for deletion; CustomResource deletion will begin soon"
        leaving = {"type": "Terminating", "status": "True", "reason": "InstanceDeletionPending", "message": words}
        leaving["lastTransitionTime"] = self.api.now()
        conditions = [*(obj["status"].get("conditions") or []), leaving]
        new = {**obj, "metadata": metadata, "status": {**obj["status"], "conditions": conditions}}
        answer = self.api.store.put(kind.key, ("", name), new).obj
        self._soon(lambda: self._finish_definition(name))
        return answer

    def _finish_definition(self, name: str) -> None:
        found = self.api.store.get(_DEFINITIONS, ("", name))
        if found is None:
            return
        spec = found.obj["spec"]
        key = (spec["group"], spec["names"]["plural"])
        for one in list(self.api.store.shelf(key).objects):
            self.api.store.remove(key, one)
        self.api.withdraw(*key)
        self.api.store.remove(_DEFINITIONS, ("", name))

    # -- eviction ----------------------------------------------------------------------------------------------

    def evict(self, where: str, name: str, options: Object) -> Object:
        """Evict a pod, if its disruption budgets allow it.

        Raises:
            Refused: 404, or 429 with the cause DisruptionBudget.
        """
        kind = self.api.kind("", "v1", "pods")
        pod = self.api.stored(kind, where, name).obj
        if pod["status"].get("phase") in {"Pending", "Running"} and "deletionTimestamp" not in pod["metadata"]:
            self._spend(where, pod)
        self._preconditions(kind, name, pod, options.get("preconditions") or {})
        if "deletionTimestamp" not in pod["metadata"]:
            self.disrupt(where, name, "EvictionByEvictionAPI", "Eviction API: evicting")
        self.delete(kind, where, name, {k: v for k, v in options.items() if k != "preconditions"})
        return answers.success(code=201)

    def _spend(self, where: str, pod: Object) -> None:
        labels = pod["metadata"].get("labels") or {}
        for (namespace, name), budget in sorted(self.api.store.shelf(_BUDGETS).objects.items()):
            if namespace != where or not selectors.labels_of_object(budget.obj["spec"].get("selector"))(labels):
                continue
            status = self._budget(namespace, budget.obj)
            if not _healthy(pod):
                continue
            if status["disruptionsAllowed"] < 1:
                needs, has = status["desiredHealthy"], status["currentHealthy"]
                words = f"The disruption budget {name} needs {needs} healthy pods and has {has} currently"
                body = answers.status(
                    429,
                    "Cannot evict pod as it would violate the pod's disruption budget.",
                    details={"causes": [{"reason": "DisruptionBudget", "message": words}]},
                )
                raise answers.Refused(429, body)

    def disrupt(self, where: str, name: str, reason: str, message: str) -> None:
        """Write the condition DisruptionTarget."""
        kind = self.api.kind("", "v1", "pods")

        def change(pod: Object) -> Object:
            condition: Object = {"type": "DisruptionTarget", "status": "True", "reason": reason, "message": message}
            condition.update(lastProbeTime=None, lastTransitionTime=self.api.now())
            others = [one for one in pod["status"].get("conditions") or [] if one["type"] != "DisruptionTarget"]
            pod["status"]["conditions"] = [*others, condition]
            return pod

        self.api.patch_status(kind, where, name, change)

    def _budget(self, where: str, budget: Object) -> Object:
        """A disruption budget's numbers, counted now."""
        matches = selectors.labels_of_object(budget["spec"].get("selector"))
        pods = [
            stored.obj
            for key, stored in self.api.store.shelf(PODS).objects.items()
            if key[0] == where and matches(stored.obj["metadata"].get("labels") or {})
        ]
        expected = sum(one["status"].get("phase") not in {"Succeeded", "Failed"} for one in pods)
        healthy = sum(_healthy(one) for one in pods)
        spec = budget["spec"]
        if "maxUnavailable" in spec:
            desired = expected - _part(spec["maxUnavailable"], expected)
        else:
            desired = _part(spec.get("minAvailable", 1), expected)
        allowed = max(0, healthy - desired)
        condition = {
            "type": "DisruptionAllowed",
            "status": "True" if allowed else "False",
            "observedGeneration": budget["metadata"].get("generation", 1),
            "lastTransitionTime": self.api.now(),
            "reason": "SufficientPods" if allowed else "InsufficientPods",
            "message": "",
        }
        return {
            "observedGeneration": budget["metadata"].get("generation", 1),
            "disruptionsAllowed": allowed,
            "currentHealthy": healthy,
            "desiredHealthy": max(0, desired),
            "expectedPods": expected,
            "conditions": [condition],
        }

    # -- controllers -------------------------------------------------------------------------------------------

    def _heard(self, kind: tuple[str, str], change: Change) -> None:
        """Note what a write asks of the controllers."""
        metadata = change.now.obj["metadata"]
        owners = [one["uid"] for one in metadata.get("ownerReferences") or []]
        self._owners.update(owners)
        if change.deleted:
            self._uids.discard(metadata["uid"])
            needed = self._waiting or metadata["uid"] in self._owners
        else:
            self._uids.add(metadata["uid"])
            special = kind == NAMESPACES or {"orphan", _FOREGROUND} & set(metadata.get("finalizers") or ())
            needed = bool("deletionTimestamp" in metadata and special)
            needed = needed or bool(owners and not any(one in self._uids for one in owners))
        if needed and not self._collecting:
            self._collecting = True
            self._soon(self._collect)
        if kind in {_BUDGETS, PODS} and self.api.store.shelf(_BUDGETS).objects:
            self._soon(self._count_budgets)

    def _count_budgets(self) -> None:
        for (where, name), stored in list(self.api.store.shelf(_BUDGETS).objects.items()):
            status = self._budget(where, stored.obj)
            was = stored.obj.get("status") or {}
            if was.get("conditions") and was["conditions"][0]["status"] == status["conditions"][0]["status"]:
                status["conditions"] = was["conditions"]
            if status != was:
                self.api.store.put(_BUDGETS, (where, name), {**stored.obj, "status": status})

    def _collect(self) -> None:
        """Delete what owners that are gone leave behind, and finish what waits for that."""
        self._collecting = self._waiting = False
        for key in self.api.store.kinds():
            for place, stored in list(self.api.store.shelf(key).objects.items()):
                metadata = stored.obj["metadata"]
                owners = metadata.get("ownerReferences") or []
                if (
                    owners
                    and not any(one["uid"] in self._uids for one in owners)
                    and "deletionTimestamp" not in metadata
                ):
                    self._try(key, place)
                waiting = metadata.get("finalizers") or []
                if "deletionTimestamp" in metadata and "orphan" in waiting:
                    self._orphan(key, place, metadata["uid"])
                elif "deletionTimestamp" in metadata and _FOREGROUND in waiting:
                    self._foreground(key, place, metadata["uid"])
        for (_, name), stored in list(self.api.store.shelf(NAMESPACES).objects.items()):
            if "deletionTimestamp" in stored.obj["metadata"]:
                self._empty(name)

    def _try(self, key: tuple[str, str], place: Key) -> None:
        try:
            self.delete(self.api.by_key(key), *place, {"propagationPolicy": "Background"})
        except (answers.Refused, StopIteration):
            return

    def _dependents(self, uid: str) -> list[tuple[tuple[str, str], Key, Object]]:
        return [
            (key, place, stored.obj)
            for key in self.api.store.kinds()
            for place, stored in list(self.api.store.shelf(key).objects.items())
            if any(one["uid"] == uid for one in stored.obj["metadata"].get("ownerReferences") or [])
        ]

    def _orphan(self, key: tuple[str, str], place: Key, uid: str) -> None:
        for of, at, obj in self._dependents(uid):
            metadata = dict(obj["metadata"])
            metadata["ownerReferences"] = [one for one in metadata["ownerReferences"] if one["uid"] != uid]
            if not metadata["ownerReferences"]:
                del metadata["ownerReferences"]
            self.api.store.put(of, at, {**obj, "metadata": metadata})
        self._unfinalized(key, place, "orphan")

    def _foreground(self, key: tuple[str, str], place: Key, uid: str) -> None:
        blocking = False
        for of, at, obj in self._dependents(uid):
            if "deletionTimestamp" not in obj["metadata"]:
                self._try(of, at)
            still = self.api.store.get(of, at) is not None
            holds = any(
                one["uid"] == uid and one.get("blockOwnerDeletion") for one in obj["metadata"]["ownerReferences"]
            )
            blocking = blocking or (still and holds)
        self._waiting = self._waiting or blocking
        if not blocking:
            self._unfinalized(key, place, _FOREGROUND)

    def _unfinalized(self, key: tuple[str, str], place: Key, finalizer: str) -> None:
        stored = self.api.store.get(key, place)
        if stored is None:
            return
        metadata = dict(stored.obj["metadata"])
        metadata["finalizers"] = [one for one in metadata.get("finalizers") or [] if one != finalizer]
        if metadata["finalizers"]:
            self.api.store.put(key, place, {**stored.obj, "metadata": metadata})
        else:
            self.api.store.remove(key, place)

    def _empty(self, namespace: str) -> None:
        left = False
        for key in self.api.store.kinds():
            for place in [one for one in self.api.store.shelf(key).objects if one[0] == namespace]:
                stored = self.api.store.get(key, place)
                if stored is not None and "deletionTimestamp" not in stored.obj["metadata"]:
                    self._try(key, place)
                left = left or self.api.store.get(key, place) is not None
        self._waiting = self._waiting or left
        if not left and self.api.store.get(NAMESPACES, ("", namespace)) is not None:
            self.api.store.remove(NAMESPACES, ("", namespace))


def _healthy(pod: Object) -> bool:
    if "deletionTimestamp" in pod["metadata"]:
        return False
    conditions = pod["status"].get("conditions") or []
    return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)


def _part(value: Any, whole: int) -> int:
    if isinstance(value, str) and value.endswith("%"):
        return -(-int(value[:-1]) * whole // 100)
    return int(value)
