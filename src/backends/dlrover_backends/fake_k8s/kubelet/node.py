"""The kubelet: nodes of given capacity whose pods are processes of this machine, by the API alone."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import signal
from collections.abc import Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

from dlrover_backends.fake_k8s.kubelet import statuses
from dlrover_backends.fake_k8s.kubelet.client import MERGE, STRATEGIC, Cache, Client, Denied, path_of
from dlrover_backends.fake_k8s.kubelet.network import Network
from dlrover_backends.fake_k8s.kubelet.pods import Ending, Pod, Settings
from dlrover_backends.fake_k8s.quantities import amount

Object = dict[str, Any]

CAPACITY = {"cpu": "64", "memory": "512Gi", "nvidia.com/gpu": "8", "pods": "110", "ephemeral-storage": "1Ti"}
LEASES = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"
KINDS = {
    "Secret": "secrets",
    "ConfigMap": "configmaps",
    "Service": "services",
    "PersistentVolumeClaim": "persistentvolumeclaims",
}


class Kubelet:
    """Runs the pods that are bound to its nodes.

    Args:
        client: of the API server.
        root: folder of pods' folders; removed at the end.
        nodes: names, each with its labels.
        capacity: of each node.
        extra: variables of every container.
        heartbeat_s: between a node's heartbeats.
        backoff_s: before a container's first restart.
        network: where pods have their addresses; without it one that is free.
    """

    def __init__(
        self,
        client: Client,
        root: Path,
        nodes: Mapping[str, Mapping[str, str]],
        *,
        capacity: Mapping[str, str] | None = None,
        extra: Mapping[str, str] | None = None,
        heartbeat_s: float = 10.0,
        backoff_s: float = 10.0,
        network: Network | None = None,
    ) -> None:
        self.client = client
        self._network = network or Network()
        self._nodes = {name: dict(labels) for name, labels in nodes.items()}
        self._capacity = dict(capacity or CAPACITY)
        self._heartbeat_s = heartbeat_s
        self._root = root
        self.settings = Settings(root, dict(extra or {}), backoff_s)
        self.pods: dict[str, Pod] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._speaks: dict[str, asyncio.Event] = {}
        self._cache = Cache(client, "/api/v1/pods", self._heard)
        self._found = {
            kind: Cache(client, f"/api/v1/{plural}", lambda _event, _obj: None) for kind, plural in KINDS.items()
        }
        self._background: list[asyncio.Task[None]] = []
        self._reconciling: set[asyncio.Task[None]] = set()
        self._addresses = 0
        self._heartbeats: dict[str, asyncio.Task[None]] = {}

    # -- life --------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Register the nodes, and run what is bound to them."""
        self._root.mkdir(parents=True, exist_ok=True)
        for name in self._nodes:
            self._speaks[name] = asyncio.Event()
            self._speaks[name].set()
            await self._register(name)
            self._heartbeats[name] = asyncio.create_task(self._beat(name))
        self._background = [asyncio.create_task(one.run()) for one in (*self._found.values(), self._cache)]
        for one in self._found.values():
            await one.synced.wait()
        await self._cache.synced.wait()

    async def stop(self) -> None:
        """Kill everything that runs, and tell the server nothing."""
        tasks = [*self._background, *self._heartbeats.values(), *self._tasks.values(), *self._reconciling]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        shutil.rmtree(self._root, ignore_errors=True)

    async def _register(self, name: str) -> None:
        labels = {"kubernetes.io/hostname": name, **self._nodes[name]}
        status = {
            "capacity": self._capacity,
            "allocatable": self._capacity,
            "conditions": statuses.node_conditions(),
            "addresses": [{"type": "InternalIP", "address": "127.0.0.1"}, {"type": "Hostname", "address": name}],
        }
        status["nodeInfo"] = {"kubeletVersion": "v1.36.2", "operatingSystem": "linux", "architecture": "amd64"}
        body = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels}, "status": status}
        with contextlib.suppress(Denied):
            await self.client.ask("POST", "/api/v1/nodes", body)
            return
        await self.client.surely("PATCH", f"/api/v1/nodes/{name}/status", {"status": status}, STRATEGIC)

    async def _beat(self, name: str) -> None:
        """Renew the node's lease and its conditions."""
        lease = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": name}}
        while True:
            await self._speaks[name].wait()
            spec = {"holderIdentity": name, "leaseDurationSeconds": 40, "renewTime": _micro()}
            if await self.client.surely("PATCH", f"{LEASES}/{name}", {"spec": spec}, MERGE) is None:
                await self.client.surely("POST", LEASES, {**lease, "spec": spec})
            body = {"status": {"conditions": statuses.node_conditions()}}
            await self.client.surely("PATCH", f"/api/v1/nodes/{name}/status", body, STRATEGIC)
            await asyncio.sleep(self._heartbeat_s)

    # -- pods --------------------------------------------------------------------------------------------------

    def _heard(self, event: str, obj: Object) -> None:
        node = obj["spec"].get("nodeName")
        if node not in self._nodes or not self._speaks[node].is_set():
            return
        uid = obj["metadata"]["uid"]
        pod = self.pods.get(uid)
        if event == "DELETED":
            if pod is not None:
                pod.vanish()
        elif pod is not None:
            self._see(pod, obj)
        else:
            self._take(obj)

    def _see(self, pod: Pod, obj: Object) -> None:
        """A pod has changed. Ready is restored where the node controller has taken it away, as kubelets do that are back."""
        pod.see(obj)
        if pod.doubted:
            task = asyncio.create_task(pod.tell_again())
            self._reconciling.add(task)
            task.add_done_callback(self._reconciling.discard)

    def _take(self, obj: Object) -> None:
        uid, node = obj["metadata"]["uid"], obj["spec"]["nodeName"]
        self._addresses += 1
        address = self._network.pod(self._addresses)
        pod = Pod(obj, self.client, address, self._look, self.settings, self._speaks[node])
        self.pods[uid] = pod
        self._tasks[uid] = asyncio.create_task(self._run(pod))
        if "deletionTimestamp" in obj["metadata"]:
            pod.see(obj)

    async def _run(self, pod: Pod) -> None:
        refusal = self._refusal(pod.obj)
        if refusal is not None:
            await self.client.surely("PATCH", path_of(pod.obj, "status"), {"status": refusal}, STRATEGIC)
        else:
            await pod.run()
        self.pods.pop(pod.uid, None)
        self._tasks.pop(pod.uid, None)

    def _refusal(self, obj: Object) -> Object | None:
        """The status of a pod that the node has no room for: the scheduler did not know, or was not asked."""
        node = obj["spec"]["nodeName"]
        asked = requests_of(obj)
        for what, value in asked.items():
            capacity = amount(self._capacity.get(what, "0"))
            used = sum(
                (
                    requests_of(one.obj).get(what, Decimal(0))
                    for one in self.pods.values()
                    if one.obj["spec"]["nodeName"] == node
                    and one.uid != obj["metadata"]["uid"]
                    and one.obj["status"].get("phase") not in {"Succeeded", "Failed"}
                ),
                Decimal(0),
            )
            if used + value <= capacity:
                continue
            if "/" in what:
                words = f"Allocate failed due to requested number of devices unavailable for {what}. "
                words += (
                    f"Requested: {int(value)}, Available: {int(max(capacity - used, Decimal(0)))}, which is unexpected"
                )
                return statuses.refused("UnexpectedAdmissionError", words)
            scale = 1000 if what == "cpu" else 1
            numbers = f"requested: {int(value * scale)}, used: {int(used * scale)}, capacity: {int(capacity * scale)}"
            return statuses.refused(f"OutOf{what}", f"Node didn't have enough resource: {what}, {numbers}")
        return None

    def _look(self, kind: str, where: str, name: str) -> Object | None:
        return self._found[kind].objects.get((where, name))

    def log(self, where: str, name: str) -> bytes | None:
        """The output of a pod's first container so far; None if it has none."""
        pod = self.named(where, name)
        if pod is None:
            return None
        with contextlib.suppress(OSError):
            return pod.sandbox.log(pod.obj["spec"]["containers"][0]["name"]).read_bytes()
        return None

    def named(self, where: str, name: str) -> Pod | None:
        """A pod that this kubelet runs."""
        for pod in self.pods.values():
            if (pod.obj["metadata"]["namespace"], pod.obj["metadata"]["name"]) == (where, name):
                return pod
        return None

    # -- what goes wrong ---------------------------------------------------------------------------------------

    def kill(self, where: str, name: str, *, number: int = signal.SIGKILL, container: str = "") -> bool:
        """Signal a container; False if it does not run."""
        pod = self.named(where, name)
        return pod is not None and pod.strike(number, container=container)

    def oom(self, where: str, name: str, *, container: str = "") -> bool:
        """Kill a container for its memory: reason OOMKilled, exit 137; False if it does not run."""
        pod = self.named(where, name)
        return pod is not None and pod.strike(signal.SIGKILL, container=container, reason="OOMKilled")

    def evict(self, where: str, name: str, *, grace_s: float = 0.0) -> bool:
        """Evict a pod for the node's memory, as the kubelet does: phase Failed, reason Evicted."""
        pod = self.named(where, name)
        if pod is not None:
            pod.end(Ending("Evicted", statuses.LOW_ON_MEMORY, grace_s))
        return pod is not None

    def shut_down(self, node: str, *, grace_s: float = 30.0) -> None:
        """Shut a node down with a warning, as a spot host goes: phase Failed, reason Terminated."""
        for pod in list(self.pods.values()):
            if pod.obj["spec"]["nodeName"] == node:
                pod.end(Ending("Terminated", statuses.SHUTDOWN, grace_s))

    def speaks(self, node: str) -> bool:
        """Does the node still tell the server of itself?"""
        return self._speaks[node].is_set()

    def lose(self, node: str, *, dead: bool = True) -> None:
        """Let a node fall silent; `dead` kills what runs there, else it goes on behind a broken network."""
        self._speaks[node].clear()
        for pod in self.pods.values():
            if dead and pod.obj["spec"]["nodeName"] == node:
                pod.strike(signal.SIGKILL)

    def find(self, node: str) -> None:
        """A lost node is back: what happened to its pods meanwhile is looked up, and told."""
        self._speaks[node].set()
        known = {obj["metadata"]["uid"]: obj for obj in self._cache.objects.values()}
        for uid, pod in list(self.pods.items()):
            if pod.obj["spec"]["nodeName"] == node:
                self._see(pod, known[uid]) if uid in known else pod.vanish()
        for uid, obj in known.items():
            if obj["spec"].get("nodeName") == node and uid not in self.pods:
                self._take(obj)

    def refuse_image(self, image: str, *, refused: bool = True) -> None:
        """Let an image be impossible to pull, or possible again."""
        (self.settings.bad_images.add if refused else self.settings.bad_images.discard)(image)


def requests_of(pod: Object) -> dict[str, Decimal]:
    """What a pod asks of its node."""
    found: dict[str, Decimal] = {"pods": Decimal(1)}
    for one in pod["spec"]["containers"]:
        for what, value in ((one.get("resources") or {}).get("requests") or {}).items():
            found[what] = found.get(what, Decimal(0)) + amount(value)
    return found


def _micro() -> str:
    import datetime as dt

    return dt.datetime.now(dt.timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
