"""The Kubernetes backend over sockets, against the fake API server and nodes whose pods are processes.

With ``KUBECONFIG_CONTRACT`` the same nodes join the cluster that it names (`k8s_contract`).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.integration.k8s_contract import Joined, asked_for

from dlrover_backends.fake_k8s import Fault, Ground, What
from dlrover_backends.fake_k8s.scripted_kueue import ScriptedKueue
from dlrover_backends.k8s import names
from dlrover_backends.k8s.client import KubernetesBackend
from dlrover_core import BackendContext
from dlrover_core.runtime.backend import Admission, GroupSize, Wanted
from dlrover_core.testing import BackendConformance
from dlrover_core.testing.backend_stand import Abilities, Stand, make_launch, watching
from dlrover_core.testing.stories import story

pytestmark = [
    pytest.mark.slow_loop(reason="the client library reads certificates and YAML where it is called"),
    pytest.mark.xdist_group("k8s"),
]
FOREVER = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
BOUND_S = 30.0


class Place:
    """A cluster, and the files that name it."""

    def __init__(self, ground: Ground | Joined, folder: Path) -> None:
        self.ground, self.folder, self.runs = ground, folder, itertools.count(1)
        self.config = ground.kubeconfig(folder / "config")
        container = {"name": "node", "image": "none:1", "command": [sys.executable, "-S", "-c", FOREVER]}
        spec = {"containers": [container], "nodeSelector": ground.pool if isinstance(ground, Joined) else {}}
        (folder / "pod.yaml").write_text(json.dumps({"spec": spec}), encoding="utf-8")

    @property
    def fake(self) -> Ground:
        """The cluster, where it plays faults."""
        if isinstance(self.ground, Joined):
            pytest.skip("a real cluster plays no faults")
        return self.ground

    def backend(self, run: str = "", **more: Any) -> KubernetesBackend:
        """A backend of a new run, or of one that there is."""
        args = f"kubeconfig={self.config},template={self.folder}/pod.yaml,namespace={self.ground.namespace}"
        here = BackendContext("conformance", run or f"run-{next(self.runs)}", ("m:1",), "t", args=args)
        return KubernetesBackend(here, **more)

    def pod_of(self, run: str, name: str) -> Any:
        """A node's pod as it is now."""
        wanted = names.pod_name(name, run)
        return next(one for one in self.ground.objects("pods") if one["metadata"]["name"] == wanted)


@pytest.fixture(name="place")
def made_place(tmp_path: Path) -> Iterator[Place]:
    """Two nodes."""
    if asked_for():
        with Joined(asked_for(), heartbeat_s=1.0) as joined:
            yield Place(joined, tmp_path)
        return
    with Ground(2, heartbeat_s=0.2, grace_s=1.0, collect_s=60.0) as ground:
        yield Place(ground, tmp_path)


class TestKubernetes(BackendConformance):
    """The contract of a backend."""

    grace_s = 1.0
    place: Place

    @pytest.fixture(autouse=True)
    def _placed(self, place: Place) -> None:
        type(self).place = place

    @contextlib.asynccontextmanager
    async def make_backend(self) -> AsyncIterator[Stand]:
        """A run of its own, of which nothing is left."""
        place, backend = self.place, self.place.backend()
        run, ground = backend._here.run, place.ground

        async def kill(name: str) -> None:
            pod = place.pod_of(run, name)["metadata"]["name"]
            assert ground.strike(lambda kubelet: kubelet.kill(place.ground.namespace, pod))

        async def cordon(wanted: bool) -> None:
            for node in ground.nodes:
                body = {"spec": {"unschedulable": wanted or None}}
                path = f"/api/v1/nodes/{node}"
                await asyncio.to_thread(
                    lambda path=path, body=body: ground.run(
                        ground.client.surely("PATCH", path, body, "application/merge-patch+json")
                    )
                )

        async def fill() -> None:
            await cordon(True)

        async def free() -> None:
            await cordon(False)

        async def lose(name: str) -> None:
            node = place.pod_of(run, name)["spec"]["nodeName"]
            ground.strike(lambda kubelet: kubelet.lose(node, dead=False))

        async def reach(name: str) -> None:
            pod = place.pod_of(run, name)
            ground.strike(lambda kubelet: kubelet.find(pod["spec"]["nodeName"]))
            # A kubelet whose node is back tells its pods' conditions anew.
            conditions = [{**one, "status": "True"} for one in pod["status"]["conditions"]]
            path = f"/api/v1/namespaces/{ground.namespace}/pods/{pod['metadata']['name']}/status"
            assert backend._api is not None
            await backend._api.ask("PATCH", path, body={"status": {"conditions": conditions}})

        async def warn(name: str, after_s: float) -> None:
            pod = place.pod_of(run, name)["metadata"]
            path = f"/api/v1/namespaces/{ground.namespace}/pods/{pod['name']}"

            def deaf() -> bool:
                return b"up" in (ground.strike(lambda kubelet: kubelet.log(ground.namespace, pod["name"])) or b"")

            await asyncio.to_thread(ground.until, deaf)
            assert backend._api is not None
            await backend._api.ask("DELETE", path, body={"gracePeriodSeconds": int(after_s)})

        try:
            yield Stand(backend, kill, Abilities(fill=fill, free=free, lose=lose, reach=reach, warn=warn))
        finally:
            await backend.clear()

    @story
    async def test_a_notice_is_withdrawn(self, stand: Stand) -> None:
        """A deletion that has begun cannot be stopped."""
        pytest.skip("Kubernetes takes no notice back")

    @story
    async def test_the_newest_notice_is_told(self, stand: Stand) -> None:
        """A deadline that moves sooner is told. Kubernetes lets none move later."""
        assert stand.can.warn is not None
        name = make_launch().name
        async with watching(stand.backend) as watch:
            await self._warned(stand, watch, 600.0)
            await stand.can.warn(name, 60.0)
            await watch.until(lambda seen: 0 < seen[name].notice_us <= 60_000_000)


def tell(story_: Any) -> None:
    """Run a story within a bound."""
    asyncio.run(asyncio.wait_for(story_(), BOUND_S))


def test_the_server_dies_and_comes_back_without_history(place: Place) -> None:
    """Killed under an open watch and back with a compacted log: what happened meanwhile is told, by a new list."""

    async def told() -> None:
        backend = place.backend()
        place.fake  # noqa: B018
        run, (first, second) = backend._here.run, (make_launch(0), make_launch(1))
        try:
            async with watching(backend) as watch:
                await backend.launch(first, 1)
                await backend.launch(second, 1)
                await watch.running(first.name, second.name)
                pod = place.pod_of(run, first.name)["metadata"]["name"]
                place.fake.away()
                assert place.ground.strike(lambda kubelet: kubelet.kill(place.ground.namespace, pod))
                place.fake.back(compacted=True)
                assert (await watch.over(first.name)).exit_code == 137
                assert watch.nodes[second.name].phase == "running"
        finally:
            await backend.clear()

    tell(told)


def test_a_frozen_watch_is_left(place: Place) -> None:
    """A watch whose connection stays open and silent is given up after the read time-out, and nothing is missed."""

    async def told() -> None:
        place.fake  # noqa: B018
        backend = place.backend(read_s=0.5)
        node = make_launch()
        try:
            async with watching(backend) as watch:
                await backend.launch(node, 1)
                await watch.running(node.name)
                place.fake.call(lambda: place.fake.faults.add(Fault(What.FROZEN, resource="pods", user="*admin*")))
                pod = place.pod_of(backend._here.run, node.name)["metadata"]["name"]
                assert place.ground.strike(lambda kubelet: kubelet.oom(place.ground.namespace, pod))
                assert (await watch.over(node.name)).reason.startswith("OOMKilled")
        finally:
            await backend.clear()

    tell(told)


def test_an_eviction_is_a_notice_then_the_platforms_word(place: Place) -> None:
    """A host that is drained says so while its pods run, and how they ended afterwards."""

    async def told() -> None:
        backend = place.backend()
        node = make_launch()
        try:
            async with watching(backend) as watch:
                await backend.launch(node, 1)
                seen = await watch.running(node.name)
                host = seen[node.name].host
                await asyncio.to_thread(place.ground.drain, host)
                await watch.until(lambda seen: seen[node.name].notice.startswith("EvictionByEvictionAPI"))
                assert watch.nodes[node.name].notice_us > 0
                await backend.delete(node.name, 1, 1)
                await watch.gone(node.name)
                last = watch.seen(node.name)[-2:]
                assert any(one.reason.startswith("EvictionByEvictionAPI") for one in last), last
                place.ground.uncordon(host)
        finally:
            await backend.clear()

    tell(told)


def test_clearing_removes_all_of_a_run(place: Place) -> None:
    """Nothing of a run stays in the cluster."""

    async def told() -> None:
        backend = place.backend()
        node = make_launch()
        async with watching(backend) as watch:
            await backend.launch(node, 1)
            await watch.running(node.name)
            await place.backend(backend._here.run).clear()
            await watch.gone(node.name)
        await backend.close()

    tell(told)
    place.ground.until(lambda: not place.ground.objects("pods", namespace=place.ground.namespace))
    assert place.ground.objects("secrets", namespace=place.ground.namespace) == []


def test_nodes_join_a_cluster_that_is_there(tmp_path: Path) -> None:
    """As for `KUBECONFIG_CONTRACT`: a kubeconfig is enough to try the backend in a namespace and on nodes of its own."""
    with Ground(0, grace_s=1.0) as plane, Joined(plane.kubeconfig(tmp_path / "plane"), heartbeat_s=0.2) as joined:
        place = Place(joined, tmp_path)

        async def told() -> None:
            backend = place.backend()
            node = make_launch()
            try:
                async with watching(backend) as watch:
                    await backend.launch(node, 1)
                    seen = await watch.running(node.name)
                    assert seen[node.name].host in joined.nodes
                    joined.strike(lambda kubelet: kubelet.lose(seen[node.name].host, dead=False))
                    await watch.until(lambda seen: seen[node.name].phase == "lost")
                    joined.strike(lambda kubelet: kubelet.find(seen[node.name].host))
                    pod = place.pod_of(backend._here.run, node.name)["metadata"]["name"]
                    assert joined.strike(lambda kubelet: kubelet.oom(joined.namespace, pod))
                    assert (await watch.over(node.name)).reason.startswith("OOMKilled")
            finally:
                await backend.clear()

        tell(told)
        joined.until(lambda: not joined.objects("pods"))
    assert not plane.server.api.store.shelf(("", "nodes")).objects


def test_a_master_that_has_asked_nothing_yet_follows_its_queue(place: Place) -> None:
    """It observes before it is connected, which is the leader's first act, and hears that the job is admitted."""
    ground = place.fake
    ground.call(
        lambda: ScriptedKueue(
            ground.server.api, "train", 1, later=lambda due: asyncio.get_running_loop().call_soon(due)
        )
    )
    args = f"kubeconfig={place.config},template={place.folder}/pod.yaml,namespace=train,queue=research"
    backend = KubernetesBackend(BackendContext("conformance", "queued", ("m:1",), "t", args=args))

    async def admitted() -> None:
        async with contextlib.aclosing(backend.observe()) as seen:
            async for one in seen:
                if isinstance(one, Admission) and one.admitted:
                    return

    async def told() -> None:
        seen = asyncio.ensure_future(admitted())
        await asyncio.sleep(0)
        await backend.sized(Wanted((GroupSize("worker", "worker", 1, 1),)), 1)
        await asyncio.wait_for(seen, BOUND_S)
        await backend.clear()

    asyncio.run(told())
