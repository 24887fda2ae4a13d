"""A scheduler by the API alone: fits, selectors, taints, priorities; in the words of kube-scheduler."""

from __future__ import annotations

from collections import Counter
from decimal import Decimal
from typing import Any

from dlrover_backends.fake_k8s import selectors
from dlrover_backends.fake_k8s.kubelet.client import STRATEGIC, Cache, Client, Controller, path_of
from dlrover_backends.fake_k8s.kubelet.node import requests_of
from dlrover_backends.fake_k8s.kubelet.statuses import stamp
from dlrover_backends.fake_k8s.quantities import amount

Object = dict[str, Any]

NAME = "default-scheduler"
PREEMPTED = "default-scheduler: preempting to accommodate a higher priority pod"
NO_NODES = "no nodes available to schedule pods"
_SELECTOR = "node(s) didn't match Pod's node affinity/selector"


class Scheduler(Controller):
    """Binds pods to nodes.

    Args:
        client: of the API server.
    """

    def __init__(self, client: Client) -> None:
        super().__init__()
        self._client = client
        self._pods = Cache(client, "/api/v1/pods", self.heard)
        self._nodes = Cache(client, "/api/v1/nodes", self.heard)
        self._told: dict[str, str] = {}  # uid -> message
        self._bound: dict[str, str] = {}  # uid -> node, before the cache knows it

    def caches(self) -> tuple[Cache, ...]:
        """What it looks at."""
        return (self._nodes, self._pods)

    async def look(self) -> None:
        """Act on what the caches hold now."""
        waiting = [one for one in self._pods.objects.values() if self._waits(one)]
        waiting.sort(key=lambda one: (-one["spec"].get("priority", 0), one["metadata"]["creationTimestamp"]))
        used = self._used()
        for pod in waiting:
            await self._place(pod, used)

    def _waits(self, pod: Object) -> bool:
        spec, metadata = pod["spec"], pod["metadata"]
        return (
            spec.get("schedulerName") == NAME
            and not spec.get("nodeName")
            and not spec.get("schedulingGates")
            and "deletionTimestamp" not in metadata
            and metadata["uid"] not in self._bound
            and pod["status"].get("phase") == "Pending"
        )

    def _used(self) -> dict[str, dict[str, Decimal]]:
        """What is taken of each node."""
        used: dict[str, dict[str, Decimal]] = {}
        for pod in self._pods.objects.values():
            uid = pod["metadata"]["uid"]
            node = pod["spec"].get("nodeName") or self._bound.get(uid)
            if pod["spec"].get("nodeName"):
                self._bound.pop(uid, None)
            if node and pod["status"].get("phase") not in {"Succeeded", "Failed"}:
                _add(used.setdefault(node, {}), requests_of(pod))
        return used

    async def _place(self, pod: Object, used: dict[str, dict[str, Decimal]]) -> None:
        reasons: Counter[str] = Counter()
        fits = []
        for name, node in sorted((node["metadata"]["name"], node) for node in self._nodes.objects.values()):
            why = _refusals(pod, node, used.get(name, {})) or self._crowds(pod, name)
            if not why:
                fits.append(name)
            reasons.update(why)
        if not self._nodes.objects:
            await self._tell(pod, NO_NODES, None)
        elif fits:
            name = min(fits, key=lambda one: (used.get(one, {}).get("pods", Decimal(0)), one))
            nominated = pod["status"].get("nominatedNodeName")
            await self._bind(pod, nominated if nominated in fits else name, used)
        else:
            await self._preempt(pod, used, reasons)

    def _crowds(self, pod: Object, name: str) -> list[str]:
        """Why a pod keeps off a node for the pods there; hosts are the only topology that is known."""
        terms = ((pod["spec"].get("affinity") or {}).get("podAntiAffinity") or {}).get(
            "requiredDuringSchedulingIgnoredDuringExecution"
        )
        for term in terms or []:
            matches = selectors.labels_of_object(term.get("labelSelector"))
            for other in self._pods.objects.values():
                metadata = other["metadata"]
                there = other["spec"].get("nodeName") or self._bound.get(metadata["uid"])
                ended = other["status"].get("phase") in {"Succeeded", "Failed"}
                same = metadata["namespace"] == pod["metadata"]["namespace"]
                if there == name and same and not ended and matches(metadata.get("labels") or {}):
                    return ["node(s) didn't match pod anti-affinity rules"]
        return []

    async def _bind(self, pod: Object, name: str, used: dict[str, dict[str, Decimal]]) -> None:
        target = {"apiVersion": "v1", "kind": "Node", "name": name}
        metadata = {"name": pod["metadata"]["name"], "uid": pod["metadata"]["uid"]}
        body = {"apiVersion": "v1", "kind": "Binding", "metadata": metadata, "target": target}
        if await self._client.surely("POST", path_of(pod, "binding"), body) is not None:
            self._bound[pod["metadata"]["uid"]] = name
            self._told.pop(pod["metadata"]["uid"], None)
            _add(used.setdefault(name, {}), requests_of(pod))
            words = f"Successfully assigned {pod['metadata']['namespace']}/{pod['metadata']['name']} to {name}"
            await self._event(pod, "Scheduled", words, "Binding", kind="Normal")

    async def _preempt(self, pod: Object, used: dict[str, dict[str, Decimal]], reasons: Counter[str]) -> None:
        """Make room by ending pods of lower priority, if that helps."""
        total = len(self._nodes.objects)
        listed = ", ".join(sorted(f"{count} {why}" for why, count in reasons.items()))
        words = f"0/{total} nodes are available: {listed}."
        node, victims = self._victims(pod, used)
        if node is None:
            selected = sum(count for why, count in reasons.items() if why == _SELECTOR)
            helpless = [f"{total - selected} No preemption victims found for incoming pod"] if selected < total else []
            helpless += [f"{selected} Preemption is not helpful for scheduling"] if selected else []
            words += f" no new claims to deallocate, preemption: 0/{total} nodes are available: {', '.join(helpless)}."
            await self._tell(pod, words, None)
            return
        victims = [one for one in victims if "deletionTimestamp" not in one["metadata"]]
        for victim in victims:
            await self._condemn(victim)
        await self._tell(pod, words, node)
        for victim in victims:
            await self._remove(victim, pod)

    async def preempt(self, victim: Object, by: Object | None = None) -> None:
        """End a pod as pre-emption does: the condition DisruptionTarget, then the deletion."""
        await self._condemn(victim)
        await self._remove(victim, by)

    async def _condemn(self, victim: Object) -> None:
        condition = {"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler"}
        condition.update(message=PREEMPTED, lastTransitionTime=stamp())
        generation = {"observedGeneration": victim["metadata"].get("generation", 1)}
        ordered = [{"type": one["type"]} for one in victim["status"].get("conditions") or []]
        order = [*ordered, {"type": "DisruptionTarget"}]
        body = {"status": {"$setElementOrder/conditions": order, "conditions": [{**condition, **generation}]}}
        await self._client.surely("PATCH", path_of(victim, "status"), body, STRATEGIC)

    async def _remove(self, victim: Object, by: Object | None) -> None:
        options = {"preconditions": {"uid": victim["metadata"]["uid"]}}
        await self._client.surely("DELETE", path_of(victim), options)
        if by is not None:
            words = f"Preempted by pod {by['metadata']['uid']} on node {victim['spec']['nodeName']}"
            await self._event(victim, "Preempted", words, "Preempting", kind="Normal")

    def _victims(self, pod: Object, used: dict[str, dict[str, Decimal]]) -> tuple[str | None, list[Object]]:
        if pod["spec"].get("preemptionPolicy") == "Never":
            return None, []
        priority = pod["spec"].get("priority", 0)
        for name, node in sorted((node["metadata"]["name"], node) for node in self._nodes.objects.values()):
            lower = [
                one
                for one in self._pods.objects.values()
                if one["spec"].get("nodeName") == name
                and one["spec"].get("priority", 0) < priority
                and one["status"].get("phase") not in {"Succeeded", "Failed"}
            ]
            lower.sort(key=lambda one: one["spec"].get("priority", 0))
            left = dict(used.get(name, {}))
            chosen: list[Object] = []
            for victim in lower:
                if not _refusals(pod, node, left):
                    break
                chosen.append(victim)
                _add(left, {what: -value for what, value in requests_of(victim).items()})
            if chosen and not _refusals(pod, node, left):
                return name, chosen
        return None, []

    async def _tell(self, pod: Object, words: str, nominated: str | None) -> None:
        uid = pod["metadata"]["uid"]
        if self._told.get(uid) == words:
            return
        self._told[uid] = words
        condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": words}
        condition["lastTransitionTime"] = stamp()
        generation = {"observedGeneration": pod["metadata"].get("generation", 1)}
        status: Object = {"conditions": [{**condition, **generation}]}
        if nominated is not None:
            status["nominatedNodeName"] = nominated
        await self._client.surely(
            "PATCH", path_of(pod, "status"), {"metadata": {"uid": uid}, "status": status}, STRATEGIC
        )
        await self._event(pod, "FailedScheduling", words, "Scheduling", kind="Warning")

    async def _event(self, pod: Object, reason: str, words: str, action: str, *, kind: str) -> None:
        metadata = pod["metadata"]
        involved = {"kind": "Pod", "namespace": metadata["namespace"], "name": metadata["name"], "uid": metadata["uid"]}
        body = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"generateName": f"{metadata['name']}."},
            "involvedObject": {**involved, "apiVersion": "v1"},
            "reason": reason,
            "message": words,
            "type": kind,
            "action": action,
            "reportingComponent": NAME,
            "reportingInstance": NAME,
        }
        await self._client.surely("POST", f"/api/v1/namespaces/{metadata['namespace']}/events", body)


def _add(sums: dict[str, Decimal], more: dict[str, Decimal]) -> None:
    for what, value in more.items():
        sums[what] = sums.get(what, Decimal(0)) + value


def _refusals(pod: Object, node: Object, used: dict[str, Decimal]) -> list[str]:
    """Why a pod does not go to a node, in kube-scheduler's words; empty if it does."""
    labels = {**(node["metadata"].get("labels") or {}), "metadata.name": node["metadata"]["name"]}
    if node["spec"].get("unschedulable") and not _tolerated(pod, "node.kubernetes.io/unschedulable", "", "NoSchedule"):
        return ["node(s) were unschedulable"]
    for taint in node["spec"].get("taints") or []:
        key, value, effect = taint["key"], taint.get("value", ""), taint["effect"]
        if effect in {"NoSchedule", "NoExecute"} and not _tolerated(pod, key, value, effect):
            return [f"node(s) had untolerated taint(s) {{{key}: {value}}}"]
    wanted = pod["spec"].get("nodeSelector") or {}
    if any(labels.get(key) != value for key, value in wanted.items()) or not _affine(pod, labels):
        return [_SELECTOR]
    found = []
    room = node["status"].get("allocatable") or {}
    for what, value in requests_of(pod).items():
        if used.get(what, Decimal(0)) + value > amount(room.get(what, "0")):
            found.append("Too many pods" if what == "pods" else f"Insufficient {what}")
    return found


def _tolerated(pod: Object, key: str, value: str, effect: str) -> bool:
    for one in pod["spec"].get("tolerations") or []:
        same = one.get("key") in {None, "", key} and one.get("effect") in {None, "", effect}
        if same and (one.get("operator") == "Exists" or one.get("value", "") == value):
            return True
    return False


def _affine(pod: Object, labels: dict[str, str]) -> bool:
    affinity = ((pod["spec"].get("affinity") or {}).get("nodeAffinity") or {}).get(
        "requiredDuringSchedulingIgnoredDuringExecution"
    )
    if not affinity:
        return True
    return any(
        all(
            selectors.expression(one, labels)
            for one in [
                *(term.get("matchExpressions") or []),
                *({**each, "key": "metadata.name"} for each in term.get("matchFields") or []),
            ]
        )
        for term in affinity["nodeSelectorTerms"]
    )
