"""The Kubernetes backend's own decisions, over an API in memory: whose a pod is, what a lost answer means, what a list lacks."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections import deque
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from k8s_scripted import Server, failed

from dlrover_backends.k8s import names
from dlrover_backends.k8s.client import Deposed, KubernetesBackend
from dlrover_backends.k8s.errors import Busy, Request, Unreachable
from dlrover_core import BackendContext, LaunchRefused, Listed
from dlrover_core.errors import CoreError
from dlrover_core.testing.backend_stand import make_launch, watching

BOUND_S = 20.0
PODS, SECRETS = "/api/v1/namespaces/ml/pods", "/api/v1/namespaces/ml/secrets"


class Stage:
    """A backend of a run over a server in memory, with a clock that stands."""

    def __init__(self, folder: Path | str = "") -> None:
        self.server, self.clock = Server(), 100.0
        self.here = BackendContext(
            "conformance",
            "r1",
            ("m:1",),
            "t",
            arguments=("train.py",),
            args="image=i:1,namespace=ml",
            directory=str(folder),
        )
        self.backend = self.another()

    def another(self, **fields: Any) -> KubernetesBackend:
        """The backend of another master."""
        return KubernetesBackend(
            dataclasses.replace(self.here, **fields), self.server, now=lambda: self.clock, wall=lambda: 0.0
        )

    def path(self, name: str) -> str:
        """Of a node's pod."""
        return f"{PODS}/{names.pod_name(name, 'r1')}"


def tell(story: Callable[[Stage], Awaitable[None]], folder: Path | str = "") -> None:
    """Run a story within a bound."""
    asyncio.run(asyncio.wait_for(story(Stage(folder)), BOUND_S))


def test_a_pod_is_made_once_and_owned() -> None:
    """A launch repeated, by another master too, is one pod, whose owner is the run's secret with the token."""

    async def story(on: Stage) -> None:
        node = make_launch()
        await on.backend.launch(node, 1)
        await on.backend.launch(node, 1)
        await on.another().launch(node, 2)
        (pod,) = on.server.pods()
        (secret,) = (one for name, one in on.server.objects.items() if name.startswith(SECRETS))
        assert pod["metadata"]["ownerReferences"][0]["uid"] == secret["metadata"]["uid"]
        assert secret["stringData"] == {"token": "t"}

    tell(story)


def test_a_stranger_under_our_name_is_named() -> None:
    """A pod of somebody else's that has our name, and even our labels, is refused by name, is not listed, and not deleted."""

    async def story(on: Stage) -> None:
        node = make_launch()
        path = on.path(node.name)
        owners = [{"kind": "ReplicaSet", "name": "web", "uid": "other"}]
        labels = names.labels("conformance", "r1")
        notes = {names.NOTE_NAME: node.name}
        on.server.objects[path] = {
            "metadata": {"name": "x", "uid": "s", "labels": labels, "annotations": notes, "ownerReferences": owners}
        }
        with pytest.raises(LaunchRefused, match=r"not of this run \(its owner: ReplicaSet web\)") as refused:
            await on.backend.launch(node, 1)
        assert refused.value.permanent
        async with watching(on.backend) as watch:
            assert watch.told[0] == Listed(())
        await on.backend.delete(node.name, 1, 5)
        assert path in on.server.objects

    tell(story)


def test_what_was_made_while_a_list_ran_is_not_gone() -> None:
    """A list that began before a pod was made lacks it: it is told as there, or the master would take it for gone."""

    async def story(on: Stage) -> None:
        node, old = make_launch(0), make_launch(1)
        await on.backend.launch(old, 1)
        on.clock += 10
        ask = on.server.ask

        async def late(method: str, path: str, **rest: Any) -> dict[str, Any]:
            answer = await ask(method, path, **rest)
            if method == "GET" and path == PODS:
                on.server.ask = ask  # type: ignore[method-assign]
                await on.backend.launch(node, 1)  # made, and its answer here, before the list's
                del on.server.objects[on.path(old.name)]
            return answer

        on.server.ask = late  # type: ignore[method-assign]
        async with watching(on.backend) as watch:
            assert isinstance(watch.told[0], Listed)
            assert {one.name for one in watch.told[0].nodes} == {node.name, old.name}
        async with watching(on.backend) as watch:
            assert old.name not in watch.nodes

    tell(story)


def test_what_was_made_and_removed_before_a_list_was_taken_is_gone() -> None:
    """The pod was made and removed after the list had been asked for, and before the server took it: no watch tells its end."""

    async def story(on: Stage) -> None:
        node = make_launch()
        await on.backend.launch(make_launch(9), 1)
        on.clock += 10
        ask = on.server.ask

        async def late(method: str, path: str, **rest: Any) -> dict[str, Any]:
            if method == "GET" and path == PODS:
                on.server.ask = ask  # type: ignore[method-assign]
                await on.backend.launch(node, 1)
                await ask("DELETE", on.path(node.name), body={"gracePeriodSeconds": 0})
            return await ask(method, path, **rest)

        on.server.ask = late  # type: ignore[method-assign]
        async with watching(on.backend) as watch:
            assert isinstance(watch.told[0], Listed)
            assert node.name not in {one.name for one in watch.told[0].nodes}

    tell(story)


@pytest.mark.parametrize("lost_label", [False, True])
def test_what_was_removed_before_the_answer_to_its_create_is_made_again(lost_label: bool) -> None:
    """A list without the pod came before the answer to its create: the node is refused for now, unless the pod is there."""

    async def story(on: Stage) -> None:
        node = make_launch()
        ask = on.server.ask

        async def late(method: str, path: str, **rest: Any) -> dict[str, Any]:
            answer = await ask(method, path, **rest)
            if method == "POST" and path == PODS:
                on.server.ask = ask  # type: ignore[method-assign]
                pod = on.server.objects.pop(on.path(node.name))
                listed.append(await reached.enter_async_context(watching(on.backend)))
                if lost_label:
                    on.server.objects[on.path(node.name)] = pod
            return answer

        listed: list[Any] = []
        on.server.ask = late  # type: ignore[method-assign]
        async with contextlib.AsyncExitStack() as reached:
            if lost_label:
                assert await on.backend.launch(node, 1) is None
                return
            with pytest.raises(LaunchRefused, match="removed as soon as it was made") as refused:
                await on.backend.launch(node, 1)
            assert not refused.value.permanent
            await on.backend.launch(node, 1)
            await listed[0].until(lambda seen: node.name in seen)

    tell(story)


def test_what_was_found_made_while_a_list_ran_is_not_gone() -> None:
    """The same where the answer to the create was lost, and asking again told that the pod is there."""

    async def story(on: Stage) -> None:
        node = make_launch()
        await on.backend.launch(make_launch(9), 1)
        on.clock += 10
        ask = on.server.ask

        async def late(method: str, path: str, **rest: Any) -> dict[str, Any]:
            answer = await ask(method, path, **rest)
            if method == "GET" and path == PODS:
                on.server.ask = ask  # type: ignore[method-assign]
                await on.another().launch(node, 1)  # made, and this backend did not hear of it
                await on.backend.launch(node, 1)
                answer = {
                    **answer,
                    "items": [one for one in answer["items"] if one["metadata"]["name"] not in on.path(node.name)],
                }
            return answer

        on.server.ask = late  # type: ignore[method-assign]
        async with watching(on.backend) as watch:
            assert isinstance(watch.told[0], Listed)
            assert node.name in {one.name for one in watch.told[0].nodes}

    tell(story)


def test_a_lost_answer_is_looked_up() -> None:
    """A create whose answer was lost is unknown; asked for again it finds its own pod, and makes no second one."""

    async def story(on: Stage) -> None:
        node = make_launch()
        await on.backend.launch(make_launch(9), 1)
        ask = on.server.ask

        async def lost(method: str, path: str, **rest: Any) -> dict[str, Any]:
            on.server.ask = ask  # type: ignore[method-assign]
            await ask(method, path, **rest)
            raise Unreachable(Request(method, path), 0, "ServerDisconnectedError")

        on.server.ask = lost  # type: ignore[method-assign]
        with pytest.raises(Unreachable):
            await on.backend.launch(node, 1)
        await on.backend.launch(node, 1)
        assert len(on.server.pods()) == 2

    tell(story)


def test_refusals_reach_the_leader() -> None:
    """A quota is a wait, a missing right is one for good, and throttling that does not end is unknown."""

    async def story(on: Stage) -> None:
        await on.backend.launch(make_launch(9), 1)
        quota = failed(403, 'pods "x" is forbidden: exceeded quota: q', method="POST", reason="Forbidden")
        right = failed(403, 'User "v" cannot create resource "pods" in API group ""', method="POST")
        lacking = "failed quota: q: must specify limits.cpu for: node"
        unsaid = failed(403, f'pods "x" is forbidden: {lacking}', method="POST", reason="Forbidden")
        on.server.faults["POST"] = deque([quota, unsaid, right, *[failed(429, after="0")] * 3])
        for permanent, words in (
            (False, "exceeded quota"),
            (True, r"must specify limits.cpu for: node; write limits.cpu for: node under resources of each container"),
            (True, "verb create"),
        ):
            with pytest.raises(LaunchRefused, match=words) as refused:
                await on.backend.launch(make_launch(), 1)
            assert refused.value.permanent is permanent
        with pytest.raises(Busy):
            await on.backend.launch(make_launch(), 1)
        on.server.faults["POST"] = deque([failed(429, after="0")] * 2)
        await on.backend.launch(make_launch(), 1)
        assert on.path(make_launch().name) in on.server.objects

    tell(story)


def test_a_name_is_used_once() -> None:
    """A late order for what was deleted is refused for good, and a lower token's is of a deposed master."""

    async def story(on: Stage) -> None:
        node = make_launch(0, 3)
        await on.backend.launch(node, 2)
        await on.backend.delete(node.name, 2, 0)
        method, _, body = on.server.asked[-1]
        assert method == "DELETE"
        assert body is not None
        assert body["gracePeriodSeconds"] == 1
        assert body["preconditions"] == {"uid": body["preconditions"]["uid"]}
        for late in (node, make_launch(0, 2)):
            with pytest.raises(LaunchRefused) as refused:
                await on.backend.launch(late, 2)
            assert refused.value.permanent
        await on.backend.launch(make_launch(0, 4), 2)
        with pytest.raises(Deposed):
            await on.backend.launch(make_launch(1), 1)
        with pytest.raises(Deposed):
            await on.backend.delete(make_launch(0, 4).name, 1, 0)

    tell(story)


def test_nothing_is_made_for_a_job_that_is_deleted(tmp_path: Path) -> None:
    """The owner deleted, or being deleted, is the job deleted: nothing is made any more, by another master neither."""

    async def story(on: Stage) -> None:
        await on.backend.launch(make_launch(), 1)
        path = f"{SECRETS}/{names.owner_name('conformance', 'r1')}"
        secret = on.server.objects[path]
        secret["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
        on.clock += 60
        with pytest.raises(LaunchRefused, match="is being deleted"):
            await on.backend.launch(make_launch(1), 1)
        del on.server.objects[path]
        on.clock += 60
        for backend in (on.backend, on.another()):
            with pytest.raises(LaunchRefused, match="was deleted: so is the job"):
                await backend.launch(make_launch(1), 1)
        await on.another(run="r2").launch(make_launch(1), 1)

    tell(story, tmp_path)


def test_changes_are_told_once() -> None:
    """A change that shows nothing new is not told, nor is the late end of a pod that another one has followed."""

    async def story(on: Stage) -> None:
        node = make_launch()
        async with watching(on.backend) as watch:
            await on.backend.launch(node, 1)
            (pod,) = on.server.pods()
            pod["metadata"]["labels"]["x"] = "y"
            on.server.tell("MODIFIED", pod)
            stale = {"metadata": {**pod["metadata"], "uid": "an-older-one"}, "status": {}}
            on.server.tell("DELETED", stale)
            pod["status"] = {"phase": "Running", "containerStatuses": [{"name": "node", "state": {"running": {}}}]}
            pod["spec"]["nodeName"] = "h1"
            on.server.tell("MODIFIED", pod)
            seen = await watch.running(node.name)
            assert seen[node.name].host == "h1"
            assert watch.phases(node.name) == ["pending", "running"]
            await on.backend.delete(node.name, 1, 3)
            await watch.gone(node.name)

    tell(story)


def test_clearing_leaves_nothing_of_the_run(tmp_path: Path) -> None:
    """At the end pods and secret go, by uid; what other runs and other people have stays, and the run may begin again."""

    async def story(on: Stage) -> None:
        await on.backend.launch(make_launch(), 1)
        other = on.another(run="r2")
        await other.launch(make_launch(), 1)
        await on.another().clear()
        await on.another().clear()
        assert len(on.server.pods()) == 1
        assert len(on.server.objects) == 2
        await other.clear()
        assert on.server.objects == {}
        await on.another().launch(make_launch(), 1)
        assert len(on.server.pods()) == 1

    tell(story, tmp_path)


def test_a_missing_right_to_look_says_what_to_grant() -> None:
    """An observation without the right to list ends with the command that grants it."""

    async def story(on: Stage) -> None:
        await on.backend.launch(make_launch(), 1)
        on.server.faults["GET"] = deque([failed(403, 'User "v" cannot list resource "pods"')])
        with pytest.raises(CoreError, match=r"verb list, resource pods.*--verb=create,get,list,watch,delete"):
            async for _ in on.backend.observe():
                pass

    tell(story)


def test_a_template_is_read_at_each_launch(tmp_path: Path) -> None:
    """A changed template holds for pods that are made from then on."""

    async def story(on: Stage) -> None:
        file = tmp_path / "pod.yaml"
        backend = on.another(cwd=str(tmp_path), args="namespace=ml,template=pod.yaml")
        for index, image in enumerate(("a:1", "a:2")):
            file.write_text(f"kind: Pod\nspec:\n  containers:\n  - image: {image}\n", encoding="utf-8")
            await backend.launch(make_launch(index), 1)
        assert [one["spec"]["containers"][0]["image"] for one in on.server.pods()] == ["a:1", "a:2"]

    tell(story)
