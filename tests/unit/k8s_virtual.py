"""Jobs in a cluster in virtual time: real masters and agents, the production backend, the fake API server, scripted pods."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

from k8s_inside import EPOCH, NAMESPACE, Inside

from dlrover_backends.fake_k8s.scripted_kueue import ScriptedKueue
from dlrover_backends.k8s import names
from dlrover_backends.k8s.client import KubernetesBackend
from dlrover_backends.k8s.errors import ApiError
from dlrover_core import BackendContext
from dlrover_core.job.names import group_of
from dlrover_core.job.orders import NodeLaunch
from dlrover_core.spec import GroupSpec, JobSpec
from dlrover_core.testing import virtual_loop
from dlrover_core.testing.cluster import Cluster
from dlrover_core.testing.platform import Platform
from dlrover_core.testing.saving import Knobs, Saving
from dlrover_core.testing.training import Training

HOUR_S = 3600.0
PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"
OVER = ("succeeded", "failed", "gone")


class Pods:
    """Lets each pod be an agent on a platform, and each pod that is deleted end it."""

    def __init__(self, api: Inside, platform: Platform) -> None:
        self.api, self.platform = api, platform
        self._started: dict[str, str] = {}

    async def run(self) -> None:
        """Until cancelled."""
        following = asyncio.ensure_future(self._report())
        listed = await self.api.ask("GET", PODS)
        query = {"resourceVersion": listed["metadata"]["resourceVersion"], "timeoutSeconds": "1000000"}
        try:
            async for event in self.api.watch(PODS, query, 0.0):
                await self._look(event["type"], event["object"])
        finally:
            following.cancel()

    def machine(self, pod: dict[str, Any]) -> NodeLaunch:
        """What a pod is on the platform: a machine named as the node."""
        notes = pod["metadata"]["annotations"]
        name, node = notes[names.NOTE_NAME], notes[names.NOTE_NODE]
        place, _, incarnation = node.rpartition("-")
        return NodeLaunch(name, node, group_of(node), int(place.rpartition("-")[2]), int(incarnation), 1, ())

    async def _look(self, type_: str, pod: dict[str, Any]) -> None:
        made = self.machine(pod)
        if type_ == "DELETED":
            await self.platform.stop(made.name, 0)
        elif pod["metadata"].get("deletionTimestamp"):
            await self.platform.stop(made.name, float(pod["metadata"]["deletionGracePeriodSeconds"]))
        elif made.name not in self._started:
            self._started[made.name] = pod["metadata"]["name"]
            await self.platform.start(made.name, made)

    async def _report(self) -> None:
        version, machines = self.platform.snapshot()
        for machine in machines:
            await self._told(machine)
        async for machine in self.platform.changes(version):
            with contextlib.suppress(ApiError):
                await self._told(machine)

    async def _told(self, machine: Any) -> None:
        pod = self._started.get(machine.name)
        if pod is None:
            return
        path = f"{PODS}/{pod}"
        now = await self.api.ask("GET", path)
        if machine.phase in OVER and now["metadata"].get("deletionTimestamp"):
            await self.api.ask("DELETE", path, body={"gracePeriodSeconds": 0})
            return
        if machine.waits:
            unscheduled = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes"}
            status = {"phase": "Pending", "conditions": [unscheduled]}
            await self.api.ask("PATCH", f"{path}/status", body={"status": status})
        if machine.phase == "pending":
            return
        if not now["spec"].get("nodeName"):
            await self.api.ask("POST", f"{path}/binding", body={"target": {"name": machine.host or "host"}})
        await self.api.ask("PATCH", f"{path}/status", body={"status": _status(machine)})


def _status(machine: Any) -> dict[str, Any]:
    if machine.phase not in OVER:
        state: dict[str, Any] = {"running": {"startedAt": "2026-11-01T00:00:00Z"}}
        phase, ready = "Running", "True"
    else:
        state = {
            "terminated": {"exitCode": machine.exit_code, "reason": "Completed" if not machine.exit_code else "Error"}
        }
        phase, ready = "Succeeded" if not machine.exit_code else "Failed", "False"
    container = {
        "name": "node",
        "image": "i",
        "imageID": "",
        "ready": ready == "True",
        "restartCount": 0,
        "state": state,
    }
    return {"phase": phase, "conditions": [{"type": "Ready", "status": ready}], "containerStatuses": [container]}


class Queued:
    """A job of MIN to MAX nodes in the queue of a scripted Kueue."""

    def __init__(self, cluster: Cluster, api: Inside, kueue: ScriptedKueue) -> None:
        self.cluster, self.api, self.kueue = cluster, api, kueue

    @property
    def pods(self) -> list[dict[str, Any]]:
        """All pods."""
        return self.api.objects("pods")

    @property
    def size(self) -> int:
        """Nodes of the world that trains."""
        world = self.cluster.state.world.worlds.get("worker")
        return len(world.members) if world is not None and world.active else 0

    @property
    def step(self) -> int:
        """Steps made."""
        return self.cluster.training.done


def tell(
    story: Callable[[Queued], Awaitable[None]],
    fewest: int = 2,
    most: int = 4,
    *,
    quota: int,
    labels: dict[str, str] | None = None,
    tolerations: list[dict[str, Any]] | None = None,
    args: str = "",
    **settings: Any,
) -> Cluster:
    """Tell a story in virtual time; returns the cluster, whose log is whole. ``args``: more of the backend's arguments."""
    found: list[Cluster] = []

    async def whole() -> None:
        loop = asyncio.get_running_loop()
        api = Inside()
        api.tick()
        kueue = ScriptedKueue(api.api, NAMESPACE, quota, labels=labels, tolerations=tolerations, later=loop.call_soon)
        here = BackendContext(
            "queued", "run-1", ("m:1",), "t", arguments=("a.py",), args=f"image=i,namespace=ml,queue=research{args}"
        )

        def made(_: Platform) -> KubernetesBackend:
            return KubernetesBackend(here, api, now=loop.time, wall=lambda: EPOCH.timestamp() + loop.time())

        spec = JobSpec("queued", (GroupSpec(nodes_min=fewest, nodes_max=most, nproc=1),), heartbeat_s=5.0, **settings)
        training = Training(10**6, step_s=1.0, saving=Saving(Knobs(planned=True)))
        cluster = Cluster(spec, training=training, backend=made)
        found.append(cluster)
        async with cluster:
            pods = asyncio.ensure_future(Pods(api, cluster.platform).run())
            try:
                await story(Queued(cluster, api, kueue))
            finally:
                pods.cancel()
                await asyncio.gather(pods, return_exceptions=True)

    virtual_loop.run(whole(), limit_s=40 * HOUR_S)
    return found[0]
