"""A small client of the Kubernetes API for the kubelet and the controllers beside it: requests, and caches that follow."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import pathlib
import ssl
from collections.abc import Callable
from typing import Any

import aiohttp

Object = dict[str, Any]
Key = tuple[str, str]
Heard = Callable[[str, Object], None]

RETRY_S = 0.2
STRATEGIC = "application/strategic-merge-patch+json"
MERGE = "application/merge-patch+json"


class Denied(Exception):
    """The server refused a request: `code`, and the Status object."""

    def __init__(self, code: int, body: Any) -> None:
        super().__init__(code, body)
        self.code = code
        self.body = body


class Client:
    """Requests to one API server.

    Args:
        url: of the server.
        token: bearer token; empty with a client certificate.
        tls: context of an HTTPS server.
    """

    def __init__(self, url: str, token: str = "", tls: ssl.SSLContext | None = None) -> None:
        self._url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._tls = tls
        self._session: aiohttp.ClientSession | None = None

    @property
    def url(self) -> str:
        """Of the server."""
        return self._url

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0, ssl=self._tls if self._tls is not None else True)
            self._session = aiohttp.ClientSession(connector=connector, headers=self._headers, read_bufsize=1 << 22)
        return self._session

    async def close(self) -> None:
        """Close all connections."""
        if self._session is not None:
            await self._session.close()

    async def ask(self, method: str, path: str, body: Any = None, media: str = "application/json") -> Object:
        """One request.

        Raises:
            Denied: the server refused.
            aiohttp.ClientError: no answer.
        """
        data = None if body is None else json.dumps(body)
        headers = {} if body is None else {"Content-Type": media}
        async with self._open().request(method, self._url + path, data=data, headers=headers) as answer:
            text = await answer.text()
            found: Any = json.loads(text) if text.startswith("{") else {"message": text}
            if answer.status >= 400:
                raise Denied(answer.status, found)
            assert isinstance(found, dict)
            return found

    async def surely(self, method: str, path: str, body: Any = None, media: str = "application/json") -> Object | None:
        """A request that is repeated until the server has answered; None if it answered with a refusal."""
        while True:
            try:
                return await self.ask(method, path, body, media)
            except Denied as denied:
                if denied.code not in {429, 500, 503, 504}:
                    return None
            except (aiohttp.ClientError, OSError, asyncio.TimeoutError):
                pass
            await asyncio.sleep(RETRY_S)

    async def lines(self, path: str) -> aiohttp.ClientResponse:
        """Open a watch."""
        timeout = aiohttp.ClientTimeout(total=None, sock_read=120)
        return await self._open().get(self._url + path, timeout=timeout)


class Cache:
    """All objects of one kind, followed by list and watch.

    Args:
        client: whose server.
        path: of the collection.
        heard: called with ADDED, MODIFIED or DELETED and the object, after the cache knows it.
        query: more of the query, `fieldSelector=...`.
    """

    def __init__(self, client: Client, path: str, heard: Heard, query: str = "") -> None:
        self._client = client
        self._path = path
        self._heard = heard
        self._query = f"&{query}" if query else ""
        self.objects: dict[Key, Object] = {}
        self.synced = asyncio.Event()

    async def run(self) -> None:
        """Follow until cancelled."""
        version = ""
        while True:
            try:
                if not version:
                    version = await self._list()
                version = await self._watch(version)
            except Denied as denied:
                version = "" if denied.code == 410 else version
                await asyncio.sleep(RETRY_S)
            except (aiohttp.ClientError, OSError, asyncio.TimeoutError):
                await asyncio.sleep(RETRY_S)

    async def _list(self) -> str:
        listed = await self._client.ask("GET", f"{self._path}?limit=0{self._query}")
        found = {_key(one): one for one in listed.get("items") or []}
        for key in [one for one in self.objects if one not in found]:
            self._tell("DELETED", self.objects.pop(key))
        for key, obj in found.items():
            known = self.objects.get(key)
            if known is not None and known["metadata"]["uid"] != obj["metadata"]["uid"]:
                self._tell("DELETED", known)
                known = None
            if known is None or known["metadata"]["resourceVersion"] != obj["metadata"]["resourceVersion"]:
                self.objects[key] = obj
                self._tell("MODIFIED" if known is not None else "ADDED", obj)
        self.synced.set()
        return str(listed["metadata"]["resourceVersion"])

    async def _watch(self, version: str) -> str:
        query = f"watch=true&allowWatchBookmarks=true&timeoutSeconds=300&resourceVersion={version}{self._query}"
        answer = await self._client.lines(f"{self._path}?{query}")
        with contextlib.closing(answer):
            if answer.status != 200:
                raise Denied(answer.status, None)
            async for line in answer.content:
                event = json.loads(line)
                obj = event["object"]
                if event["type"] == "ERROR":
                    return ""
                version = obj["metadata"]["resourceVersion"]
                if event["type"] == "BOOKMARK":
                    continue
                if event["type"] == "DELETED":
                    self.objects.pop(_key(obj), None)
                else:
                    self.objects[_key(obj)] = obj
                self._tell(event["type"], obj)
        return version

    def _tell(self, event: str, obj: Object) -> None:
        self._heard(event, obj)


def _key(obj: Object) -> Key:
    return obj["metadata"].get("namespace", ""), obj["metadata"]["name"]


def path_of(pod: Object, sub: str = "") -> str:
    """A pod's path."""
    metadata = pod["metadata"]
    return f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}{'/' + sub if sub else ''}"


async def from_kubeconfig(path: str) -> Client:
    """A client for the current context of a kubeconfig, with all that `kubernetes-asyncio` understands of one.

    Raises:
        ImportError: the file is no JSON with a token, and `kubernetes-asyncio` is not installed.
    """
    with contextlib.suppress(ValueError, KeyError, IndexError):
        config = json.loads(pathlib.Path(path).read_text())  # noqa: ASYNC240  once, at the start
        return Client(config["clusters"][0]["cluster"]["server"], config["users"][0]["user"]["token"])
    kube: Any = importlib.import_module("kubernetes_asyncio.config")
    found: Any = importlib.import_module("kubernetes_asyncio.client").Configuration()
    await kube.load_kube_config(config_file=path, client_configuration=found)
    tls = None
    if found.host.startswith("https"):
        tls = ssl.create_default_context(cafile=found.ssl_ca_cert)
        if found.cert_file:
            tls.load_cert_chain(found.cert_file, found.key_file)
        if not found.verify_ssl:
            tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE
    token = str(found.api_key.get("BearerToken", "")).removeprefix("Bearer ")
    return Client(found.host, token, tls)


class Controller:
    """Looks at all objects again whenever one of them has changed."""

    def __init__(self) -> None:
        self._news = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def caches(self) -> tuple[Cache, ...]:
        """What it looks at; each cache calls `heard`."""
        raise NotImplementedError

    async def look(self) -> None:
        """Act on what the caches hold now."""
        raise NotImplementedError

    async def start(self) -> None:
        """Follow the objects."""
        self._tasks = [asyncio.create_task(one) for one in (*(cache.run() for cache in self.caches()), self._work())]

    async def stop(self) -> None:
        """Follow them no more."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def heard(self, _event: str, _obj: Object) -> None:
        """An object has changed."""
        self._news.set()

    async def _work(self) -> None:
        for cache in self.caches():
            await cache.synced.wait()
        while True:
            await self._news.wait()
            self._news.clear()
            await self.look()
