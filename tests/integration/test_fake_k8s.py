"""The fake Kubernetes API server plays the faults that it is told to, over real sockets."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from dlrover_backends.fake_k8s import FakeCluster, FakeServer, Fault, User, What, account

Object = dict[str, Any]

PODS = "/api/v1/namespaces/train/pods"
BOUND_S = 10.0


def in_a_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """A test with an event loop of its own."""

    @functools.wraps(test)
    def run(**given: Any) -> None:
        asyncio.run(test(**given))

    return run


class Client:
    """A client of a few verbs; each request says its outcome, `cut` for no answer."""

    def __init__(self, server: FakeServer, session: aiohttp.ClientSession) -> None:
        self.server = server
        self.session = session

    async def ask(self, method: str, path: str, body: Any = None, token: str = "admin-token") -> tuple[Any, Any]:  # noqa: S107
        """Status and body of one request."""
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        if method == "PATCH":
            headers["Content-Type"] = "application/merge-patch+json"
        data = None if body is None else json.dumps(body)
        try:
            async with self.session.request(method, self.server.url + path, headers=headers, data=data) as answer:
                text = await answer.text()
                return answer.status, json.loads(text) if text.startswith("{") else text
        except aiohttp.ClientError:
            return "cut", None

    async def make(self, name: str, **metadata: Any) -> tuple[Any, Any]:
        """Create a pod."""
        return await self.ask("POST", PODS, pod(name, **metadata))

    async def names(self, query: str = "") -> list[str]:
        """The names of the pods that a list shows."""
        _, listed = await self.ask("GET", PODS + query)
        return [one["metadata"]["name"] for one in listed["items"]]

    async def watch(self, query: str, most: int) -> tuple[list[Object], str]:
        """Up to so many events, and how the stream ended: `eof`, `cut` or `open`."""
        events: list[Object] = []
        headers = {"Authorization": "Bearer admin-token"}
        try:
            url = f"{self.server.url}{PODS}?watch=true&{query}"
            async with self.session.get(url, headers=headers) as answer:
                while len(events) < most:
                    line = await asyncio.wait_for(answer.content.readline(), BOUND_S)
                    if not line:
                        return events, "eof"
                    events.append(json.loads(line))
                return events, "open"
        except aiohttp.ClientError:
            return events, "cut"


def pod(name: str, **metadata: Any) -> Object:
    """A pod of one container."""
    containers = [{"name": "main", "image": "trainer:dev"}]
    return {"metadata": {"name": name, **metadata}, "spec": {"containers": containers, "restartPolicy": "Never"}}


@asynccontextmanager
async def serving() -> AsyncIterator[Client]:
    """A server with the namespace `train`, and a client."""
    server = FakeServer(future_s=0.05)
    server.api.create(server.api.kind("", "v1", "namespaces"), "", {"metadata": {"name": "train"}})
    await server.start()
    try:
        async with aiohttp.ClientSession() as session:
            yield Client(server, session)
    finally:
        await server.stop()


@in_a_loop
async def test_a_lost_answer_took_effect() -> None:
    """A create whose answer is lost has happened: the repeated create finds the name taken."""
    async with serving() as client:
        client.server.faults.add(Fault(What.LOST, verbs=frozenset({"create"})))
        assert (await client.make("w-0"))[0] == "cut"
        assert (await client.make("w-0"))[0] == 409


@in_a_loop
async def test_a_refused_connection_did_nothing() -> None:
    """A create whose connection breaks at once has not happened."""
    async with serving() as client:
        client.server.faults.add(Fault(What.REFUSED, verbs=frozenset({"create"})))
        assert (await client.make("w-0"))[0] == "cut"
        assert await client.names() == []


@in_a_loop
async def test_errors_and_throttling() -> None:
    """Errors have the code and Retry-After that were asked for, as often as was asked, and then pass."""
    async with serving() as client:
        client.server.faults.add(Fault(What.ERROR, code=503, retry_after_s=2, times=2))
        client.server.faults.add(Fault(What.THROTTLED))
        answers = [(await client.make("w-0"))[0] for _ in range(4)]
        assert answers == [503, 503, 429, 201]
        assert [what for what, *_ in client.server.faults.happened] == ["error", "error", "throttled"]


@in_a_loop
async def test_a_conflict_changes_nothing() -> None:
    """A scripted 409 leaves the object as it was."""
    async with serving() as client:
        await client.make("w-0")
        client.server.faults.add(Fault(What.CONFLICT))
        code, body = await client.ask("PATCH", f"{PODS}/w-0", {"metadata": {"labels": {"a": "b"}}})
        assert (code, body["reason"]) == (409, "Conflict")
        assert "labels" not in (await client.ask("GET", f"{PODS}/w-0"))[1]["metadata"]


@in_a_loop
async def test_a_stale_list_shows_an_earlier_state() -> None:
    """An old cache does not know the pod that was created last."""
    async with serving() as client:
        await client.make("w-0")
        await client.make("w-1")
        client.server.faults.add(Fault(What.STALE, behind=1))
        assert await client.names("?resourceVersion=0") == ["w-0"]
        assert await client.names("?resourceVersion=0") == ["w-0", "w-1"]


@pytest.mark.parametrize(("what", "end"), [(What.CUT, "cut"), (What.ENDED, "eof")])
@in_a_loop
async def test_watches_that_end(what: What, end: str) -> None:
    """A watch breaks or ends cleanly after the number of events that was asked for."""
    async with serving() as client:
        for name in ("w-0", "w-1", "w-2"):
            await client.make(name)
        client.server.faults.add(Fault(what, events=2))
        events, how = await client.watch("resourceVersion=0", 9)
        names = [one["object"]["metadata"]["name"] for one in events]
        assert how == end
        assert names == ["w-0", "w-1"][: len(names)]  # what is in a connection that breaks may be lost
        assert what is What.CUT or len(names) == 2


@in_a_loop
async def test_a_frozen_watch_stays_open_and_silent() -> None:
    """A frozen watch sends nothing of what happens, and its time ends it in the usual way."""
    async with serving() as client:
        await client.make("w-0")
        client.server.faults.add(Fault(What.FROZEN, events=1))
        events, how = await client.watch("resourceVersion=0&timeoutSeconds=1&allowWatchBookmarks=true", 9)
        assert ([one["type"] for one in events], how) == (["ADDED"], "eof")


@in_a_loop
async def test_a_watch_from_a_compacted_version_gets_an_error_event() -> None:
    """410 comes as HTTP 200 with one ERROR event for a watch, and as HTTP 410 for a page of a list."""
    async with serving() as client:
        await client.make("w-0")
        await client.make("w-1")
        _, first = await client.ask("GET", f"{PODS}?limit=1")
        await client.make("w-2")
        client.server.compact()
        events, how = await client.watch(f"resourceVersion={first['metadata']['resourceVersion']}", 9)
        assert [(one["type"], one["object"]["code"]) for one in events] == [("ERROR", 410)]
        assert how == "eof"
        code, body = await client.ask("GET", f"{PODS}?limit=1&continue={first['metadata']['continue']}")
        assert (code, body["reason"]) == (410, "Expired")
        code, _ = await client.ask("GET", f"{PODS}?limit=1&continue={body['metadata']['continue']}")
        assert code == 200


@in_a_loop
async def test_open_watches_end_on_demand() -> None:
    """Watches that are open can be cut, or expired with an ERROR event."""
    async with serving() as client:
        for how, types, end in (("cut", [], "cut"), ("expired", ["ERROR"], "eof")):
            watching = asyncio.create_task(client.watch(f"resourceVersion={client.server.api.store.version}", 9))
            await until(lambda: client.server.watches == 1)
            client.server.end_watches(how)
            events, ended = await asyncio.wait_for(watching, BOUND_S)
            assert ([one["type"] for one in events], ended) == (types, end)


@in_a_loop
async def test_a_killed_server_comes_back_with_its_objects() -> None:
    """While a server is away connections are refused; afterwards its objects are what they were, on the same port."""
    async with serving() as client:
        await client.make("w-0")
        await client.server.kill()
        assert (await client.ask("GET", PODS))[0] == "cut"
        await client.server.start()
        assert await client.names() == ["w-0"]


@in_a_loop
async def test_a_frozen_server_answers_when_it_thaws() -> None:
    """A server under SIGSTOP accepts the connection, says nothing, and answers afterwards."""
    async with serving() as client:
        client.server.freeze()
        asked = asyncio.create_task(client.names())
        done, _ = await asyncio.wait([asked], timeout=0.05)
        assert not done
        client.server.thaw()
        assert await asyncio.wait_for(asked, BOUND_S) == []


@in_a_loop
async def test_seeded_faults_repeat() -> None:
    """The same seed meets the same requests with the same faults."""
    async with serving() as client:
        histories = []
        for _ in range(2):
            client.server.faults.clear()
            client.server.faults.happened.clear()
            client.server.faults.seeded(7, {What.ERROR: 0.2, What.LOST: 0.2, What.THROTTLED: 0.2})
            for index in range(30):
                await client.ask("GET", f"{PODS}/w-{index}")
            histories.append(list(client.server.faults.happened))
        assert histories[0] == histories[1] != []


@in_a_loop
async def test_a_role_names_the_right_that_is_missing() -> None:
    """A service account may do what its Role says, and a refusal names verb, resource, group and namespace."""
    async with serving() as client:
        client.server.rights.tokens["sa"] = account("train", "dlrover")
        role = "/apis/rbac.authorization.k8s.io/v1/namespaces/train"
        rules = [{"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list"]}]
        await client.ask("POST", f"{role}/roles", {"metadata": {"name": "r"}, "rules": rules})
        subjects = [{"kind": "ServiceAccount", "name": "dlrover"}]
        ref = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "r"}
        await client.ask(
            "POST", f"{role}/rolebindings", {"metadata": {"name": "b"}, "subjects": subjects, "roleRef": ref}
        )
        assert (await client.ask("GET", PODS, token="sa"))[0] == 200
        code, body = await client.ask("POST", PODS, pod("w-0"), token="sa")
        assert code == 403
        assert body["message"] == (
            'pods is forbidden: User "system:serviceaccount:train:dlrover" cannot create resource "pods" in API group "" '
            'in the namespace "train"'
        )


@in_a_loop
async def test_owners_take_what_they_own_with_them() -> None:
    """Deleting an owner deletes its dependents, and theirs."""
    async with serving() as client:
        _, owner = await client.ask("POST", "/api/v1/namespaces/train/configmaps", {"metadata": {"name": "o"}})
        refs = [{"apiVersion": "v1", "kind": "ConfigMap", "name": "o", "uid": owner["metadata"]["uid"]}]
        _, first = await client.make("w-0", ownerReferences=refs)
        refs = [{"apiVersion": "v1", "kind": "Pod", "name": "w-0", "uid": first["metadata"]["uid"]}]
        await client.make("w-1", ownerReferences=refs)
        await client.ask("DELETE", "/api/v1/namespaces/train/configmaps/o")
        await until(lambda: not client.server.api.store.shelf(("", "pods")).objects)


@in_a_loop
async def test_foreground_deletion_waits_for_dependents() -> None:
    """An owner that is deleted in the foreground goes last."""
    async with serving() as client:
        _, owner = await client.ask("POST", "/api/v1/namespaces/train/configmaps", {"metadata": {"name": "o"}})
        uid = owner["metadata"]["uid"]
        refs = [{"apiVersion": "v1", "kind": "ConfigMap", "name": "o", "uid": uid, "blockOwnerDeletion": True}]
        await client.make("w-0", ownerReferences=refs, finalizers=["example.test/hold"])
        await client.ask("DELETE", "/api/v1/namespaces/train/configmaps/o?propagationPolicy=Foreground")
        await until(lambda: "deletionTimestamp" in one(client, "pods", "w-0")["metadata"])
        assert one(client, "configmaps", "o")["metadata"]["finalizers"] == ["foregroundDeletion"]
        await client.ask("PATCH", f"{PODS}/w-0", {"metadata": {"finalizers": None}})
        await until(lambda: not client.server.api.store.shelf(("", "configmaps")).objects)


def one(client: Client, plural: str, name: str) -> Object:
    """An object as the server holds it."""
    return client.server.api.store.shelf(("", plural)).objects["train", name].obj


async def until(condition: Any) -> None:
    """Let the server's loop run until something holds; it shares this loop, so each turn is one step of it."""

    async def turn() -> None:
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0)

    await asyncio.wait_for(turn(), BOUND_S)


def test_a_cluster_in_a_thread(tmp_path: Any) -> None:
    """A test without a loop of its own starts the server in a thread, and reads its objects."""
    with FakeCluster() as cluster:
        cluster.user("viewer", User("viewer"))
        path = cluster.kubeconfig(tmp_path / "config")
        assert json.loads(path.read_text())["clusters"][0]["cluster"]["server"] == cluster.url
        assert [one["metadata"]["name"] for one in cluster.objects("namespaces")] == [
            "default",
            "kube-node-lease",
            "kube-system",
            "train",
        ]
