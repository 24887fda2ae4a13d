"""Controllers by the API alone: nodes that fall silent or disappear, and batch/v1 Jobs."""

from __future__ import annotations

import asyncio
from typing import Any

from dlrover_backends.fake_k8s.kubelet.client import MERGE, STRATEGIC, Cache, Client, Controller, path_of
from dlrover_backends.fake_k8s.kubelet.statuses import stamp

Object = dict[str, Any]

UNREACHABLE = "node.kubernetes.io/unreachable"
SILENT = "Kubelet stopped posting node status."
TICK_S = 0.1


class NodeController:
    """Marks silent nodes, taints them, ends their pods, and collects pods of nodes that are gone.

    Args:
        client: of the API server.
        grace_s: how long a node may be silent; 50 in real clusters.
        collect_s: how long after a node's deletion its pods are collected; 40 in real clusters.
    """

    def __init__(self, client: Client, *, grace_s: float = 50.0, collect_s: float = 40.0) -> None:
        self._client = client
        self._grace_s = grace_s
        self._collect_s = collect_s
        self._heard_at: dict[str, tuple[str, float]] = {}  # node -> renew time of its lease, when we saw it
        self._tainted: dict[str, float] = {}
        self._missing: dict[str, float] = {}
        self._nodes = Cache(client, "/api/v1/nodes", lambda _event, _obj: None)
        self._pods = Cache(client, "/api/v1/pods", lambda _event, _obj: None)
        leases = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"
        self._leases = Cache(client, leases, lambda _event, _obj: None)
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Watch nodes."""
        caches = (self._nodes, self._pods, self._leases)
        self._tasks = [asyncio.create_task(one.run()) for one in caches]
        for one in caches:
            await one.synced.wait()
        self._tasks.append(asyncio.create_task(self._work()))

    async def stop(self) -> None:
        """Watch no more."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _work(self) -> None:
        while True:
            now = asyncio.get_running_loop().time()
            for node in list(self._nodes.objects.values()):
                await self._look(node, now)
            await self._collect(now)
            await asyncio.sleep(TICK_S)

    async def _look(self, node: Object, now: float) -> None:
        name = node["metadata"]["name"]
        lease = self._leases.objects.get(("kube-node-lease", name))
        renewed = str(((lease or {}).get("spec") or {}).get("renewTime"))
        if self._heard_at.get(name, ("", 0.0))[0] != renewed:
            self._heard_at[name] = (renewed, now)
        silent = now - self._heard_at[name][1] > self._grace_s
        taints = node["spec"].get("taints") or []
        marked = any(one["key"] == UNREACHABLE for one in taints)
        cordoned = any(one["key"] == "node.kubernetes.io/unschedulable" for one in taints)
        if bool(node["spec"].get("unschedulable")) != cordoned:
            await self._cordon(node, taints, cordoned=not cordoned)
        if silent and not marked:
            await self._mark(node, taints)
            self._tainted[name] = now
        elif not silent and marked:
            kept = [one for one in taints if one["key"] != UNREACHABLE]
            await self._client.surely("PATCH", f"/api/v1/nodes/{name}", {"spec": {"taints": kept or None}}, MERGE)
            self._tainted.pop(name, None)
        if name in self._tainted:
            await self._end_pods(name, now - self._tainted[name])

    async def _cordon(self, node: Object, taints: list[Object], *, cordoned: bool) -> None:
        key = "node.kubernetes.io/unschedulable"
        kept = [one for one in taints if one["key"] != key]
        if cordoned:
            kept.append({"key": key, "effect": "NoSchedule", "timeAdded": stamp()})
        path = f"/api/v1/nodes/{node['metadata']['name']}"
        await self._client.surely("PATCH", path, {"spec": {"taints": kept or None}}, MERGE)

    async def _mark(self, node: Object, taints: list[Object]) -> None:
        """Ready=Unknown, the taints, and the pods no longer ready."""
        name, now = node["metadata"]["name"], stamp()
        unknown = [
            {**one, "status": "Unknown", "reason": "NodeStatusUnknown", "message": SILENT, "lastTransitionTime": now}
            for one in node["status"].get("conditions") or []
        ]
        await self._client.surely(
            "PATCH", f"/api/v1/nodes/{name}/status", {"status": {"conditions": unknown}}, STRATEGIC
        )
        for effect in ("NoSchedule", "NoExecute"):
            taints = [*taints, {"key": UNREACHABLE, "effect": effect, "timeAdded": now}]
            await self._client.surely("PATCH", f"/api/v1/nodes/{name}", {"spec": {"taints": taints}}, MERGE)
        for pod in [one for one in self._pods.objects.values() if one["spec"].get("nodeName") == name]:
            conditions = [
                {**one, "status": "False", "lastTransitionTime": now} if one["type"] == "Ready" else one
                for one in pod["status"].get("conditions") or []
            ]
            if conditions:
                body = {"status": {"conditions": conditions}}
                await self._client.surely("PATCH", path_of(pod, "status"), body, STRATEGIC)

    async def _end_pods(self, name: str, silent_s: float) -> None:
        for pod in [one for one in self._pods.objects.values() if one["spec"].get("nodeName") == name]:
            if "deletionTimestamp" in pod["metadata"]:
                continue
            limits = [
                one.get("tolerationSeconds")
                for one in pod["spec"].get("tolerations") or []
                if one.get("key") in {None, "", UNREACHABLE} and one.get("effect") in {None, "", "NoExecute"}
            ]
            patient = any(one is None for one in limits)
            if patient or (limits and silent_s < min(one for one in limits if one is not None)):
                continue
            words = "Taint manager: deleting due to NoExecute taint"
            await self._disrupt(pod, "DeletionByTaintManager", words, {})
            await self._client.surely("DELETE", path_of(pod), {"preconditions": {"uid": pod["metadata"]["uid"]}})

    async def _disrupt(self, pod: Object, reason: str, message: str, more: Object) -> None:
        condition: Object = {"type": "DisruptionTarget", "status": "True", "reason": reason, "message": message}
        condition.update(lastTransitionTime=stamp(), observedGeneration=pod["metadata"].get("generation", 1))
        order = [
            {"type": one["type"]} for one in pod["status"].get("conditions") or [] if one["type"] != "DisruptionTarget"
        ]
        order.append({"type": "DisruptionTarget"})
        status = {"$setElementOrder/conditions": order, "conditions": [condition], **more}
        await self._client.surely("PATCH", path_of(pod, "status"), {"status": status}, STRATEGIC)

    async def _collect(self, now: float) -> None:
        nodes = {one["metadata"]["name"] for one in self._nodes.objects.values()}
        for pod in list(self._pods.objects.values()):
            name, uid = pod["spec"].get("nodeName"), pod["metadata"]["uid"]
            if not name or name in nodes:
                self._missing.pop(uid, None)
                continue
            if now - self._missing.setdefault(uid, now) < self._collect_s:
                continue
            more: Object = {"observedGeneration": pod["metadata"].get("generation", 1)}
            if pod["status"].get("phase") not in {"Succeeded", "Failed"}:
                more["phase"] = "Failed"
            await self._disrupt(pod, "DeletionByPodGC", "PodGC: node no longer exists", more)
            options = {"gracePeriodSeconds": 0, "preconditions": {"uid": uid}}
            await self._client.surely("DELETE", path_of(pod), options)


class JobController(Controller):
    """Runs batch/v1 Jobs: parallelism, completions, back-off limit, pod failure policy, indexes.

    Args:
        client: of the API server.
    """

    def __init__(self, client: Client) -> None:
        super().__init__()
        self._client = client
        self._jobs = Cache(client, "/apis/batch/v1/jobs", self.heard)
        self._pods = Cache(client, "/api/v1/pods", self.heard)
        self._made: dict[str, set[str]] = {}  # uid of a job -> names made, before the cache knows them

    def caches(self) -> tuple[Cache, ...]:
        """What it looks at."""
        return (self._jobs, self._pods)

    async def look(self) -> None:
        """Act on what the caches hold now."""
        for job in list(self._jobs.objects.values()):
            if "deletionTimestamp" not in job["metadata"]:
                await self._sync(job)

    async def _sync(self, job: Object) -> None:
        uid, spec, status = job["metadata"]["uid"], job["spec"], job.get("status") or {}
        if any(one["type"] in {"Complete", "Failed"} for one in status.get("conditions") or []):
            return
        pods = [one for one in self._pods.objects.values() if _owned(one, uid)]
        made = self._made.setdefault(uid, set())
        made -= {one["metadata"]["name"] for one in pods}
        ended = [one for one in pods if one["status"].get("phase") in {"Succeeded", "Failed"}]
        active = [one for one in pods if one not in ended]
        good = [one for one in ended if one["status"]["phase"] == "Succeeded"]
        bad = [one for one in ended if one["status"]["phase"] == "Failed" and not _ignored(spec, one)]
        completions = spec.get("completions")
        verdict = _verdict(spec, good, bad)
        new: Object = {
            "active": len(active),
            "ready": sum(_ready(one) for one in active),
            "succeeded": len(good),
            "failed": len(bad),
            "startTime": status.get("startTime") or stamp(),
        }
        new = {key: value for key, value in new.items() if value or key == "ready"}
        if verdict is not None:
            new["conditions"] = verdict
            if verdict[-1]["type"] == "Complete":
                new["completionTime"] = stamp()
            for one in active:
                await self._client.surely("DELETE", path_of(one), {"propagationPolicy": "Background"})
        elif not spec.get("suspend"):
            wanted = spec["parallelism"] if completions is None else min(spec["parallelism"], completions - len(good))
            for _ in range(max(0, wanted - len(active) - len(made))):
                await self._make(job, pods, made)
        if {key: status.get(key) for key in new} != new:
            path = f"/apis/batch/v1/namespaces/{job['metadata']['namespace']}/jobs/{job['metadata']['name']}/status"
            gone = {key: None for key in ("active", "succeeded", "failed") if key in status and key not in new}
            await self._client.surely("PATCH", path, {"status": {**new, **gone}}, MERGE)

    async def _make(self, job: Object, pods: list[Object], made: set[str]) -> None:
        template, metadata = job["spec"]["template"], job["metadata"]
        name = f"{metadata['name']}-"
        labels = {
            **((template.get("metadata") or {}).get("labels") or {}),
            "batch.kubernetes.io/controller-uid": metadata["uid"],
            "batch.kubernetes.io/job-name": metadata["name"],
        }
        spec = dict(template["spec"])
        if job["spec"].get("completionMode") == "Indexed":
            taken = {_index(one) for one in pods if one["status"].get("phase") != "Failed"}
            taken |= {one.rpartition("-")[0].rpartition("-")[2] for one in made}
            index = next(str(i) for i in range(10**6) if str(i) not in taken)
            name = f"{metadata['name']}-{index}-"
            labels["batch.kubernetes.io/job-completion-index"] = index
            env = {"name": "JOB_COMPLETION_INDEX", "value": index}
            spec["containers"] = [{**one, "env": [*(one.get("env") or []), env]} for one in spec["containers"]]
            spec["hostname"] = f"{metadata['name']}-{index}"
        owner = {"apiVersion": "batch/v1", "kind": "Job", "name": metadata["name"], "uid": metadata["uid"]}
        owner.update(controller=True, blockOwnerDeletion=True)
        annotations = (template.get("metadata") or {}).get("annotations")
        body: Object = {"apiVersion": "v1", "kind": "Pod", "spec": spec}
        body["metadata"] = {"generateName": name, "labels": labels, "ownerReferences": [owner]}
        if annotations:
            body["metadata"]["annotations"] = annotations
        found = await self._client.surely("POST", f"/api/v1/namespaces/{metadata['namespace']}/pods", body)
        if found is not None:
            made.add(found["metadata"]["name"])


def _index(pod: Object) -> str:
    return str((pod["metadata"].get("labels") or {}).get("batch.kubernetes.io/job-completion-index"))


def _owned(pod: Object, uid: str) -> bool:
    owners = pod["metadata"].get("ownerReferences") or []
    return any(one["uid"] == uid and one.get("controller") for one in owners)


def _ready(pod: Object) -> bool:
    return any(one["type"] == "Ready" and one["status"] == "True" for one in pod["status"].get("conditions") or [])


def _rule(spec: Object, pod: Object) -> str:
    """What the pod failure policy says of a failed pod: FailJob, Ignore, Count; Count without a policy."""
    codes = {
        one["name"]: (one.get("state") or {}).get("terminated", {}).get("exitCode")
        for one in pod["status"].get("containerStatuses") or []
    }
    conditions = {one["type"]: one["status"] for one in pod["status"].get("conditions") or []}
    for rule in (spec.get("podFailurePolicy") or {}).get("rules") or []:
        on = rule.get("onExitCodes")
        if on is not None:
            found = [code for name, code in codes.items() if code and on.get("containerName") in {None, name}]
            inside = [code for code in found if (code in on["values"]) == (on["operator"] == "In")]
            if inside:
                return str(rule["action"])
        for one in rule.get("onPodConditions") or []:
            if conditions.get(one["type"]) == one.get("status", "True"):
                return str(rule["action"])
    return "Count"


def _ignored(spec: Object, pod: Object) -> bool:
    return _rule(spec, pod) == "Ignore"


def _verdict(spec: Object, good: list[Object], bad: list[Object]) -> list[Object] | None:
    """The conditions of a job that is over; None if it goes on."""
    failing = next((one for one in bad if _rule(spec, one) == "FailJob"), None)
    if failing is not None:
        words = f"Container for pod {failing['metadata']['namespace']}/{failing['metadata']['name']} failed"
        words += " matching FailJob rule"
        return [_condition("FailureTarget", "PodFailurePolicy", words), _condition("Failed", "PodFailurePolicy", words)]
    if len(bad) > spec.get("backoffLimit", 6):
        words = "Job has reached the specified backoff limit"
        reason = "BackoffLimitExceeded"
        return [_condition("FailureTarget", reason, words), _condition("Failed", reason, words)]
    completions = spec.get("completions")
    enough = [one.get("succeededCount") for one in (spec.get("successPolicy") or {}).get("rules") or []]
    if any(one is not None and len(good) >= one for one in enough):
        words = "Matched rules at index 0"
        return [_condition(kind, "SuccessPolicy", words) for kind in ("SuccessCriteriaMet", "Complete")]
    if (completions is not None and len(good) >= completions) or (completions is None and good):
        words = "Reached expected number of succeeded pods"
        reason = "CompletionsReached"
        return [_condition("SuccessCriteriaMet", reason, words), _condition("Complete", reason, words)]
    return None


def _condition(kind: str, reason: str, words: str) -> Object:
    now = stamp()
    times = {"lastProbeTime": now, "lastTransitionTime": now}
    return {"type": kind, "status": "True", **times, "reason": reason, "message": words}
