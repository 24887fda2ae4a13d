"""Failed pods that stay for ``kubectl logs``."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from k8s_inside import Inside

from dlrover_backends.k8s import endings, names
from dlrover_backends.k8s.client import KubernetesBackend
from dlrover_backends.k8s.errors import Request, of_answer
from dlrover_core import BackendContext
from dlrover_core.testing.backend_stand import Watch, make_launch, watching

Json = dict[str, Any]

HERE = BackendContext("conformance", "r1", ("m:1",), "t", arguments=("x.py",), args="image=i:1,namespace=ml")
POD = "/api/v1/namespaces/ml/pods"


def run(story: Any) -> None:
    """Within a bound."""
    asyncio.run(asyncio.wait_for(story, 30))


def pods(api: Inside) -> list[str]:
    """The nodes whose pods there are."""
    return [one["metadata"]["annotations"][names.NOTE_NAME] for one in api.objects("pods")]


ENDED, RUNS = {"terminated": {"exitCode": 3, "reason": "Error"}}, {"running": {}}
SIDECAR = {
    "containers": [{"name": "node", "image": "i"}],
    "initContainers": [{"name": "side", "restartPolicy": "Always"}],
}


async def fails(
    api: Inside,
    backend: KubernetesBackend,
    watch: Watch,
    incarnation: int,
    index: int = 0,
    phase: str = "Failed",
    state: Any = ENDED,
    beside: Any = None,
) -> str:
    """A node is launched, fails, and is deleted; the path of its pod."""
    node = make_launch(index, incarnation)
    await backend.launch(node, 1)
    path = f"{POD}/{names.pod_name(node.name, 'r1')}"
    shown = [{"name": "node", "state": state, "ready": False}, *([] if beside is None else [beside])]
    status = {"phase": phase, "containerStatuses": shown}
    await api.ask("PATCH", f"{path}/status", body={"status": status})
    assert (await watch.over(node.name)).phase == "failed"
    await backend.delete(node.name, 1, 0.0)
    await watch.gone(node.name)
    return path


def test_the_newest_failed_pod_of_each_place_stays() -> None:
    """No list of nodes has it, and its predecessor goes; also where a master before has kept that one."""

    async def story() -> None:
        api = Inside()
        first = KubernetesBackend(HERE, api)
        async with watching(first) as watch:
            await fails(api, first, watch, 0)
            await fails(api, first, watch, 0, index=1)
            await fails(api, first, watch, 1)
        assert sorted(pods(api)) == ["conformance-worker-0-1", "conformance-worker-1-0"]
        second = KubernetesBackend(HERE, api)
        async with watching(second) as watch:
            assert await watch.until(lambda nodes: True) == {}
            path = await fails(api, second, watch, 2)
        assert sorted(pods(api)) == ["conformance-worker-0-2", "conformance-worker-1-0"]
        labels = (await api.ask("GET", path))["metadata"]["labels"]
        assert (labels[names.LABEL_KEPT], labels[names.LABEL_JOB]) == ("r1", "conformance")
        await second.clear()
        assert pods(api) == []

    run(story())


@pytest.mark.parametrize(
    ("phase", "state"),
    [
        ("Pending", {"waiting": {"reason": "CreateContainerConfigError", "message": 'secret "token" not found'}}),
        ("Running", ENDED),
    ],
)
def test_a_failed_node_whose_pod_is_not_over_is_deleted(phase: str, state: Any) -> None:
    """What can never start, and what a sidecar still runs in, holds its host's room, which the successor needs."""

    async def story() -> None:
        api = Inside()
        backend = KubernetesBackend(HERE, api)
        side = {"name": "proxy", "state": RUNS}
        async with watching(backend) as watch:
            await fails(api, backend, watch, 0, phase=phase, state=state, beside=side)
        assert pods(api) == []

    run(story())


def test_a_pod_whose_containers_have_all_ended_stays() -> None:
    """Kubelets tell that first, with the phase ``Running``; when they say ``Failed``, the node has been deleted long since."""

    async def story() -> None:
        api = Inside()
        backend = KubernetesBackend(HERE, api)
        async with watching(backend) as watch:
            await fails(api, backend, watch, 0, phase="Running")
        assert pods(api) == ["conformance-worker-0-0"]

    run(story())


@pytest.mark.parametrize(
    ("containers", "sidecars", "over"),
    [
        ({"node": ENDED}, {"side": ENDED}, True),
        ({"node": ENDED}, {"side": RUNS}, False),
        ({"node": ENDED}, {}, False),
        ({"node": RUNS}, {"side": ENDED}, False),
        ({}, {}, False),
    ],
)
def test_a_pod_is_over_when_its_sidecars_are(containers: Json, sidecars: Json, over: bool) -> None:
    """Init containers that go on beside the node hold room, too; a status that does not tell of one says nothing of it."""
    shown = [[{"name": name, "state": state} for name, state in each.items()] for each in (containers, sidecars)]
    status = {"phase": "Running", "containerStatuses": shown[0], "initContainerStatuses": shown[1]}
    assert endings.is_over({"spec": SIDECAR, "status": status}) is over


def test_another_s_pod_with_our_labels_stays() -> None:
    """Labels find a pod; its owner says whose it is."""

    async def story() -> None:
        api = Inside()
        labels = {**names.labels("conformance", ""), names.LABEL_KEPT: "r1"}
        theirs = {"name": "theirs", "labels": labels, "annotations": {names.NOTE_NAME: "conformance-worker-0-0"}}
        spec = {"containers": [{"name": "a", "image": "i"}]}
        await api.ask("POST", POD, body={"apiVersion": "v1", "kind": "Pod", "metadata": theirs, "spec": spec})
        backend = KubernetesBackend(HERE, api)
        async with watching(backend) as watch:
            await fails(api, backend, watch, 1)
        await backend.clear()
        assert [one["metadata"]["name"] for one in api.objects("pods")] == ["theirs"]

    run(story())


def test_without_the_right_failed_pods_are_deleted(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked for once."""

    async def story() -> None:
        api, asked, sent = Inside(), list[str](), Inside.ask

        async def ask(method: str, path: str, **rest: Any) -> Any:
            if method == "PATCH" and not path.endswith("/status"):
                asked.append(path)
                raise of_answer(Request(method, path), 403, {"message": "no", "reason": "Forbidden"}, {})
            return await sent(api, method, path, **rest)

        backend = KubernetesBackend(HERE, api)
        async with watching(backend) as watch:
            monkeypatch.setattr(api, "ask", ask)
            await fails(api, backend, watch, 0)
            await fails(api, backend, watch, 1)
        assert pods(api) == []
        assert len(asked) == 1

    run(story())


def test_a_node_that_is_stopped_is_deleted() -> None:
    """Only who has failed has something to tell."""

    async def story() -> None:
        api = Inside()
        backend = KubernetesBackend(HERE, api)
        async with watching(backend) as watch:
            await backend.launch(make_launch(), 1)
            await watch.until(lambda nodes: make_launch().name in nodes)
            await backend.delete(make_launch().name, 1, 0.0)
            await watch.gone(make_launch().name)
        assert pods(api) == []

    run(story())
