"""A whole cluster on one machine: the fake API server, a scheduler, controllers, and nodes whose pods are processes."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from dlrover_backends.fake_k8s.cluster import FakeCluster
from dlrover_backends.fake_k8s.kubelet import Client, JobController, Kubelet, NodeController, Proxy, Scheduler
from dlrover_backends.fake_k8s.kubelet.client import MERGE, Denied, path_of
from dlrover_backends.fake_k8s.kubelet.network import Network
from dlrover_backends.fake_k8s.rights import User

Object = dict[str, Any]

KUBELET = User("system:kubelet", ("system:masters", "system:authenticated"))


class Ground(FakeCluster):
    """A fake cluster whose pods run, for `with`. Faults of the server that name a user spare the kubelet.

    Args:
        nodes: names of nodes, or their number.
        labels: of each node, beside its host name.
        namespace: made at the start.
        capacity: of each node.
        extra: variables of every container.
        heartbeat_s: between a node's heartbeats.
        grace_s: how long a node may be silent before it is NotReady.
        collect_s: how long pods of a deleted node stay.
        backoff_s: before a container's first restart.
        options: of `FakeServer`.
    """

    def __init__(
        self,
        nodes: int | list[str] = 2,
        *,
        labels: Mapping[str, Mapping[str, str]] | None = None,
        namespace: str = "train",
        capacity: Mapping[str, str] | None = None,
        extra: Mapping[str, str] | None = None,
        heartbeat_s: float = 1.0,
        grace_s: float = 4.0,
        collect_s: float = 4.0,
        backoff_s: float = 0.5,
        **options: Any,
    ) -> None:
        self._network = Network()
        super().__init__(namespace, services=self._network.services, **options)
        names = [f"node-{index}" for index in range(nodes)] if isinstance(nodes, int) else list(nodes)
        self.nodes = names
        self._node_labels = {name: dict((labels or {}).get(name, {})) for name in names}
        self._of_kubelet = {
            "capacity": capacity, "extra": extra, "heartbeat_s": heartbeat_s, "backoff_s": backoff_s, "network": self._network,
        }  # fmt: skip
        self._of_controller = {"grace_s": grace_s, "collect_s": collect_s}
        self._folder = tempfile.TemporaryDirectory(prefix="fake-k8s-")
        self.kubelet: Kubelet
        self.scheduler: Scheduler

    def __enter__(self) -> Ground:  # noqa: PYI034  typing.Self is of Python 3.11
        super().__enter__()
        self.user("kubelet-token", KUBELET)
        self.run(self._go())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.run(self._halt())
        super().__exit__(kind, error, trace)
        self._folder.cleanup()
        self._network.close()

    async def _go(self) -> None:
        self.client = Client(self.url, "kubelet-token")
        root = Path(self._folder.name) / "pods"
        self.kubelet = Kubelet(self.client, root, self._node_labels, **self._of_kubelet)  # type: ignore[arg-type]
        self.scheduler = Scheduler(self.client)
        self._others = (
            self.scheduler,
            NodeController(self.client, **self._of_controller),
            JobController(self.client),
            Proxy(self.client),
        )
        self.server.logs = self.kubelet.log
        await self.kubelet.start()
        for one in self._others:
            await one.start()

    async def _halt(self) -> None:
        for one in self._others:
            await one.stop()
        await self.kubelet.stop()
        await self.client.close()

    def drain(self, node: str) -> list[str]:
        """Cordon a node and evict its pods through the eviction API; returns the names of those that stay for a budget."""
        return self.run(drained(self.client, node))

    def uncordon(self, node: str) -> None:
        """Let pods go to a node again."""
        self.run(self.client.surely("PATCH", f"/api/v1/nodes/{node}", {"spec": {"unschedulable": None}}, MERGE))

    def preempt(self, name: str) -> None:
        """End a pod as pre-emption does."""
        pod = next(one for one in self.objects("pods") if one["metadata"]["name"] == name)
        self.run(self.scheduler.preempt(pod))

    def strike(self, what: Callable[[Kubelet], Any]) -> Any:
        """Let something go wrong on the nodes: `ground.strike(lambda kubelet: kubelet.oom("train", "w-0"))`."""
        return self.call(lambda: what(self.kubelet))


async def drained(client: Client, node: str) -> list[str]:
    """Cordon a node and evict its pods through the eviction API; the names of those that stay for a budget."""
    await client.surely("PATCH", f"/api/v1/nodes/{node}", {"spec": {"unschedulable": True}}, MERGE)
    stay = []
    for pod in (await client.ask("GET", f"/api/v1/pods?fieldSelector=spec.nodeName%3D{node}"))["items"]:
        body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod["metadata"]["name"]}}
        try:
            await client.ask("POST", path_of(pod, "eviction"), body)
        except Denied:
            stay.append(pod["metadata"]["name"])
    return stay
