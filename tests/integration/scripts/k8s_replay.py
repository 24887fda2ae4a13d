"""Sends what was recorded of a real API server to the fake one, and lists where the answers differ.

Uids, versions, times and generated names differ between any two servers: they are mapped, and compared for being the
same where the recorded ones are. `before` holds what a scenario did that was not recorded.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit

import aiohttp

from dlrover_backends.fake_k8s import FakeServer, User
from dlrover_backends.fake_k8s.kubelet import Client

Object = dict[str, Any]

DATA = Path(__file__).parents[1] / "data" / "k8s"
TIME = re.compile(r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z$")
UID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
TOKENS = {
    "backend": "backend-token",
    "kubelet": "kubelet-token",
    "admin": "admin-token",
    "viewer": "viewer-token",
    "nobody": "wrong",
    "anonymous": None,
}
WAIT_S = 5.0
END = 10**6  # the sequence number of what follows the last exchange
DROPPED = {"managedFields", "storageVersionHash"}


def recorded(scenario: str) -> list[Object]:
    """The exchanges and watches of a scenario, in the order of sending."""
    lines = (json.loads(line) for line in (DATA / f"{scenario}.jsonl").read_text().splitlines())
    return sorted((one for one in lines if one["kind"] != "scenario"), key=lambda one: one["seq"])


@dataclass
class Replay:
    """One scenario against one fake server.

    Attributes:
        scenario: its file, without the suffix.
        server: what is asked.
        before: by sequence number, what happened just before that was not recorded.
        bodies: by sequence number, what was sent where the recorder wrote down a later state of the same body.
        unscheduled: a scheduler without nodes says so of each pod.
        watch_s: how long watches of more than a second stay open.
        differences: what differs: scenario, sequence number, path, recorded, ours.
        actors: schedulers and controllers that play beside the server.
        beats: tasks that renew leases.
        exchanges: how many exchanges were compared.
        events: how many watch events were compared.
    """

    scenario: str
    server: FakeServer
    before: dict[int, Callable[[Replay], Awaitable[None]]] = field(default_factory=dict)
    bodies: dict[int, Any] = field(default_factory=dict)
    unscheduled: bool = False
    watch_s: str = "2"
    differences: list[tuple[str, int, str, str, str]] = field(default_factory=list)
    exchanges: int = 0
    events: int = 0
    actors: list[tuple[Any, Client]] = field(default_factory=list)
    beats: list[asyncio.Task[None]] = field(default_factory=list)
    lines: int = 0  # events of the watch that was opened last
    _same: dict[str, str] = field(default_factory=dict)  # recorded uid, version, name or token -> ours
    _made: set[str] = field(default_factory=set)
    _watches: list[asyncio.Task[None]] = field(default_factory=list)
    _missing: list[Callable[[], int]] = field(default_factory=list)
    _until: dict[asyncio.Task[None], float] = field(default_factory=dict)
    session: aiohttp.ClientSession = field(init=False)

    async def run(self) -> None:
        """Send everything, in order."""
        async with aiohttp.ClientSession() as self.session:
            for one in recorded(self.scenario):
                if one["seq"] in self.before:
                    await self.before[one["seq"]](self)
                await self._ended(one)
                await self.adopt(one)
                if one["kind"] == "watch":
                    opened = asyncio.Event()
                    watch = asyncio.create_task(self._watch(one, opened))
                    self._watches.append(watch)
                    if one["end"] == "server-eof" and one["t_end"] - one["t_open"] < 2:
                        self._until[watch] = one["t_end"]
                    await asyncio.wait_for(opened.wait(), WAIT_S)
                else:
                    await self._exchange(one)
            if END in self.before:
                await self.before[END](self)
            if self._missing:
                await self._closed()
            await asyncio.gather(*self._watches)
            for task in self.beats:
                task.cancel()
            await asyncio.gather(*self.beats, return_exceptions=True)
            for actor, client in self.actors:
                await actor.stop()
                await client.close()

    async def send(self, method: str, path: str, body: Any = None, **more: Any) -> tuple[int, Object, Any]:
        """One request of the recorder's own; returns status, headers and body."""
        headers = {"Authorization": "Bearer admin-token", "Content-Type": "application/json", **more}
        data = None if body is None else json.dumps(body)
        async with self.session.request(method, self.server.url + path, headers=headers, data=data) as response:
            raw = await response.read()
            return response.status, dict(response.headers), _read(raw)

    async def _ended(self, one: Object) -> None:
        """Wait for watches that had ended before this was sent."""
        began = one.get("t", one.get("t_open", 0))
        for watch, until in list(self._until.items()):
            if until <= began:
                del self._until[watch]
                await watch

    async def _closed(self) -> None:
        """End watches that the recorder closed, once they have sent what it saw."""
        for _ in range(400):
            if all(missing() <= 0 for missing in self._missing):
                break
            await asyncio.sleep(0.005)
        self.server.end_watches()

    async def make_node(self, name: str) -> None:
        """A host as the recorder's."""
        room = {"cpu": "16", "memory": "64Gi", "nvidia.com/gpu": "8", "pods": "110"}
        ready = {"type": "Ready", "status": "True", "reason": "KubeletReady"}
        status = {"capacity": room, "allocatable": room, "conditions": [ready]}
        await self.send("POST", "/api/v1/nodes", {"metadata": {"name": name}, "status": status})

    async def beside(self, actor: Any, **options: Any) -> None:
        """Start a scheduler or controller, until the end."""
        client = Client(self.server.url, "kubelet-token")
        self.actors.append((actor(client, **options), client))
        await self.actors[-1][0].start()

    def heartbeat(self, name: str) -> None:
        """Renew a host's lease until the end."""
        path = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"

        async def beat() -> None:
            await self.send("POST", path, {"metadata": {"name": name}, "spec": {"holderIdentity": name}})
            count = 0
            while True:
                count += 1
                body = {"spec": {"renewTime": f"2026-11-20T11:54:15.{count:06d}Z"}}
                await self.send("PATCH", f"{path}/{name}", body, **{"Content-Type": "application/merge-patch+json"})
                await asyncio.sleep(0.05)

        self.beats.append(asyncio.create_task(beat()))

    async def until(self, path: str, holds: Callable[[Any], Any]) -> None:
        """Wait until the answer to a GET is as it should be."""
        for _ in range(2000):
            status, _headers, body = await self.send("GET", path)
            if status == 200 and holds(body):
                return
            await asyncio.sleep(0.005)
        raise TimeoutError(f"{path} does not become what it should")

    def settle(self) -> None:
        """Definitions are served from here on: until then requests for them are told to wait, however busy the machine is."""
        assert self.server.initializing
        self.server.establish()

    async def events_seen(self, count: int) -> None:
        """Wait until the watch that was opened last has sent so many events."""
        for _ in range(1000):
            if self.lines >= count:
                return
            await asyncio.sleep(0.005)
        raise TimeoutError(f"{self.lines} events of {count}")

    async def make(self, obj: Object) -> Object:
        """Create an object that the recording shows but not the creation of."""
        kind = obj.get("kind", "Pod")
        places = {"Pod": "/api/v1/namespaces/train/pods", "Node": "/api/v1/nodes"}
        metadata = {k: v for k, v in obj["metadata"].items() if k in {"name", "labels", "annotations", "finalizers"}}
        body = {"metadata": metadata, "spec": obj.get("spec") or {}}
        if kind == "Node":
            body["status"] = obj.get("status") or {}
        _, _, made = await self.send("POST", places[kind], body)
        if self.unscheduled and kind == "Pod":
            made = await self._unschedulable(made["metadata"]["name"])
        self.pair(obj["metadata"], made["metadata"])
        return made

    async def _unschedulable(self, name: str) -> Any:
        condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "observedGeneration": 1}
        condition.update(message="no nodes available to schedule pods", lastTransitionTime="2026-11-20T11:53:58Z")
        path = f"/api/v1/namespaces/train/pods/{name}/status"
        body = {"status": {"conditions": [condition]}}
        return (await self.send("PATCH", path, body, **{"Content-Type": "application/merge-patch+json"}))[2]

    def pair(self, theirs: Object, ours: Object) -> None:
        """Take two objects' metadata for one object's."""
        self._made.add(theirs["uid"])
        self._same[theirs["uid"]] = ours["uid"]
        if "resourceVersion" in theirs:
            self._same.setdefault("v" + theirs["resourceVersion"], ours["resourceVersion"])

    async def adopt(self, one: Object) -> None:
        """Make what a list shows of objects whose creation was not recorded."""
        if one["kind"] != "exchange" or one["request"]["method"] not in {"GET", "DELETE"}:
            return
        body = one["response"].get("body")
        if one["response"].get("status") != 200 or not isinstance(body, dict):
            return
        if body.get("kind") in {"PodList", "NodeList"}:
            for item in sorted(body.get("items") or [], key=lambda each: int(each["metadata"]["resourceVersion"])):
                if item["metadata"]["uid"] not in self._made and "spec" in item:
                    await self.make({"kind": body["kind"].removesuffix("List"), **item})

    def _ours(self, value: Any, key: str = "") -> Any:
        """A recorded value as this server would know it."""
        if isinstance(value, dict):
            return {k: self._ours(v, k) for k, v in value.items() if k != "managedFields"}
        if isinstance(value, list):
            return [self._ours(one) for one in value]
        if isinstance(value, str) and key == "resourceVersion":
            return self._same.get("v" + value, value)
        return self._same.get(value, value) if isinstance(value, str) and key in {"uid", "continue"} else value

    def _path(self, path: str, *, watch: bool = False) -> str:
        parts = urlsplit(path)
        query = {k: self._ours(v, k) for k, v in parse_qsl(parts.query, keep_blank_values=True)}
        if watch:
            query["timeoutSeconds"] = self.watch_s if float(query.get("timeoutSeconds", 0)) > 1 else "0.3"
        query.pop("timeout", None)
        names = "/".join(self._same.get("n" + one, one) for one in parts.path.split("/"))
        return f"{names}?{urlencode(query)}" if query else names

    def _headers(self, one: Object) -> dict[str, str]:
        headers = dict(one["request"].get("headers") or {})
        token = TOKENS[one.get("actor", "backend")]
        return {**headers, "Authorization": f"Bearer {token}"} if token else headers

    async def _exchange(self, one: Object) -> None:
        request, wanted = one["request"], one["response"]
        data = request.get("body_text")
        if request.get("body") is not None:
            data = json.dumps(self._ours(self.bodies.get(one["seq"], request["body"])))
        url = self.server.url + self._path(request["path"])
        self.exchanges += 1
        try:
            call = self.session.request(request["method"], url, headers=self._headers(one), data=data)
            async with call as response:
                raw = await response.read()
                headers = response.headers
                status = response.status
        except aiohttp.ClientError as error:
            if "error" not in wanted:
                self._differs(one, "error", "an answer", type(error).__name__)
            return
        if "error" in wanted:
            self._differs(one, "error", wanted["error"], str(status))
            return
        body = wanted.get("body", wanted.get("body_text"))
        got = _read(raw)
        self._compare(one, "status", wanted["status"], status)
        for name in ("Content-Type", "Retry-After", "Warning"):
            self._compare(one, f"header.{name}", (wanted.get("headers") or {}).get(name), headers.get(name))
        self._learn(body, got)
        self._compare(one, "body", body, got)
        if self.unscheduled and status == 201 and isinstance(got, dict) and got.get("kind") == "Pod":
            await self._unschedulable(got["metadata"]["name"])

    def _learn(self, theirs: Any, ours: Any) -> None:
        """Pair uids, versions, generated names and tokens of two answers."""
        if isinstance(theirs, dict) and isinstance(ours, dict):
            if theirs.get("generateName") and theirs.get("name") and ours.get("name"):
                self._same["n" + theirs["name"]] = ours["name"]
            for key in theirs.keys() & ours.keys():
                mine, other = ours[key], theirs[key]
                if key == "uid" and isinstance(other, str):
                    self._made.add(other)
                    self._same.setdefault(other, mine)
                elif key == "resourceVersion" and isinstance(other, str):
                    self._same.setdefault("v" + other, mine)
                elif key == "continue" and isinstance(other, str):
                    self._same[other] = mine
                else:
                    self._learn(other, mine)
        elif isinstance(theirs, list) and isinstance(ours, list):
            for other, mine in zip(theirs, ours, strict=False):
                self._learn(other, mine)

    async def _watch(self, one: Object, opened: asyncio.Event) -> None:
        url = self.server.url + self._path(one["request"]["path"], watch=True)
        wanted = [event for event in one["events"] if "object" in event.get("event", {})]
        got: list[Object] = []
        ended = "client-close"
        if one["end"] == "client-close":
            real = sum(event["event"]["type"] != "BOOKMARK" for event in wanted)
            self._missing.append(lambda: real - len(got))
        try:
            async with self.session.get(url, headers=self._headers(one)) as response:
                opened.set()
                self.lines = 0
                if one["end"] == "complete-body":
                    got = [{"type": None, "object": _read(await response.read())}]
                    wanted = wanted[:0]
                    ended = "complete-body"
                else:
                    try:
                        async for line in response.content:
                            got.append(json.loads(line))
                            self.lines += 1
                        ended = "server-eof"
                    except aiohttp.ClientPayloadError:
                        ended = "connection-cut"
        except aiohttp.ClientError as error:
            opened.set()
            self._differs(one, "error", "a stream", type(error).__name__)
            return
        if one["end"] != "client-close":
            self._compare(one, "end", one["end"], ended)
        self._compare_events(one, [event["event"] for event in wanted], got)

    def _compare_events(self, one: Object, wanted: list[Object], got: list[Object]) -> None:
        marks = [event for event in wanted if event["type"] == "BOOKMARK"]
        real = [event for event in wanted if event["type"] != "BOOKMARK"]
        ours = [event for event in got if event["type"] not in {"BOOKMARK", None}]
        if bool(marks) != any(event["type"] == "BOOKMARK" for event in got):
            self._differs(one, "events.BOOKMARK", str(len(marks)), "none" if marks else "some")
        ours_marks = [event for event in got if event["type"] == "BOOKMARK"]
        if marks and ours_marks:
            for mark in (marks[0]["object"], ours_marks[0]["object"]):
                mark["metadata"].pop("resourceVersion")
            self._compare(one, "events.BOOKMARK", marks[0]["object"], ours_marks[0]["object"])
        for index, event in enumerate(real):
            self.events += 1
            if index >= len(ours):
                self._differs(one, f"events[{index}]", _short(event), "nothing")
                continue
            self._learn(event["object"], ours[index]["object"])
            self._compare(one, f"events[{index}].type", event["type"], ours[index]["type"])
            self._compare(one, f"events[{index}].object", event["object"], ours[index]["object"])
        for event in ours[len(real) :]:
            self._differs(one, f"events[{len(real)}]", "nothing", _short(event))

    def _compare(self, one: Object, path: str, theirs: Any, ours: Any) -> None:
        if isinstance(theirs, dict) and isinstance(ours, dict):
            for key in sorted((theirs.keys() | ours.keys()) - DROPPED):
                if key not in ours:
                    self._differs(one, f"{path}.{key}", _short(theirs[key]), "missing")
                elif key not in theirs:
                    self._differs(one, f"{path}.{key}", "missing", _short(ours[key]))
                else:
                    self._compare(one, f"{path}.{key}", theirs[key], ours[key])
        elif isinstance(theirs, list) and isinstance(ours, list):
            if len(theirs) != len(ours):
                self._differs(one, f"{path}.length", str(len(theirs)), str(len(ours)))
            for index, (other, mine) in enumerate(zip(theirs, ours, strict=False)):
                self._compare(one, f"{path}[{index}]", other, mine)
        elif not self._equal(path.rpartition(".")[2], theirs, ours):
            self._differs(one, path, _short(theirs), _short(ours))

    def _equal(self, key: str, theirs: Any, ours: Any) -> bool:
        if theirs == ours:
            return True
        if not (isinstance(theirs, str) and isinstance(ours, str)):
            return False
        if TIME.match(theirs) and TIME.match(ours):
            return True
        if key == "resourceVersion":
            return self._same.get("v" + theirs) == ours
        if key == "continue":
            return bool(theirs) == bool(ours)
        if key == "name":
            return self._same.get("n" + theirs) == ours
        return self._same.get(theirs) == ours or _plain(theirs) == _plain(ours)

    def _differs(self, one: Object, path: str, theirs: str, ours: str) -> None:
        self.differences.append((self.scenario[:2], one["seq"], path, theirs, ours))


def _plain(words: str) -> str:
    """Words without what differs between any two servers."""
    words = UID.sub("<uid>", words)
    return re.sub(r"\b\d{3,7}\b", "<n>", words)


def _short(value: Any) -> str:
    text = json.dumps(value, sort_keys=True)
    return text if len(text) <= 300 else f"{text[:300]}..."


def _read(raw: bytes) -> Any:
    try:
        return json.loads(raw)
    except ValueError:
        return raw.decode()


async def started(**options: Any) -> FakeServer:
    """A server as the recorder had it: a namespace, and its actors' tokens."""
    server = FakeServer(bookmark_s=0.5, future_s=0.1, definition_s=600.0, **options)
    for actor in ("backend", "kubelet"):
        server.rights.tokens[TOKENS[actor] or ""] = User(actor, ("system:masters", "system:authenticated"))
    server.rights.tokens["viewer-token"] = User("viewer", ("system:authenticated",))
    server.api.create(server.api.kind("", "v1", "namespaces"), "", {"metadata": {"name": "train"}})
    await server.start()
    return server
