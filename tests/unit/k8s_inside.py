"""The fake API server without sockets: its rules, in the test's own loop and time, as the `Api` port of the backend."""

from __future__ import annotations

import asyncio
import copy
import datetime as dt
import json
from collections.abc import AsyncGenerator, Iterable, Mapping
from typing import Any
from urllib.parse import parse_qsl

from dlrover_backends.fake_k8s import discovery, requests
from dlrover_backends.fake_k8s.answers import Refused
from dlrover_backends.fake_k8s.kinds import Kind
from dlrover_backends.fake_k8s.lists import wanted
from dlrover_backends.fake_k8s.rights import ADMIN
from dlrover_backends.fake_k8s.server import FakeServer
from dlrover_backends.fake_k8s.watching import Watch
from dlrover_backends.k8s.errors import Request, of_answer

EPOCH = dt.datetime(2026, 11, 1, tzinfo=dt.timezone.utc)
MERGE = "application/merge-patch+json"
NAMESPACE = "ml"


def pod_groups(group: str = "scheduling.k8s.io", version: str = "v1beta1") -> Kind:
    """A kind of PodGroups."""
    return Kind(group, version, "podgroups", "PodGroup", singular="podgroup", custom=True, generation=True, status=True)


class Inside:
    """An API server that serves these kinds beside the built-in ones; time is the loop's."""

    def __init__(self, kinds: Iterable[Kind] = ()) -> None:
        self.server = FakeServer(seed=1)
        self.api = self.server.api
        self.asked: list[tuple[str, str]] = []
        for kind in kinds:
            self.api.serve(kind)
        self.api.create(self.api.kind("", "v1", "namespaces"), "", {"metadata": {"name": NAMESPACE}})

    def tick(self) -> None:
        """Let objects be stamped with the loop's time from now on."""
        loop = asyncio.get_running_loop()
        self.api.clock = lambda: EPOCH + dt.timedelta(seconds=loop.time())

    def objects(self, plural: str, group: str = "") -> list[dict[str, Any]]:
        """All objects of a kind."""
        return [one.obj for _, one in sorted(self.api.store.shelf((group, plural)).objects.items())]

    async def ask(
        self, method: str, path: str, *, query: Mapping[str, str] | None = None, body: Any = None, media: str = MERGE
    ) -> dict[str, Any]:
        """Send one request. Raises `ApiError`."""
        self.asked.append((method, path))
        asked = Request(method, path)
        path, _, text = path.partition("?")
        plain = discovery.plain(path, self.api, 0)
        if plain is not None:
            found: dict[str, Any] = json.loads(plain[1])
            return found
        try:
            kind, where, name, sub = requests._place(path, self.api)
            verb = requests._verb(method, name, watch=False)
            media = media if method == "PATCH" else "application/json"
            told = {**dict(parse_qsl(text)), **(query or {})}
            answer = await self.server._done(
                requests.Request(verb, kind, where, name, sub, told, media, "", copy.deepcopy(body), ADMIN), None
            )
        except Refused as refused:
            raise of_answer(asked, refused.code, refused.body, refused.headers) from None
        data: Any = answer.body  # type: ignore[attr-defined]
        got: dict[str, Any] = json.loads(data)
        return got

    async def watch(self, path: str, query: Mapping[str, str], read_s: float) -> AsyncGenerator[dict[str, Any], None]:
        """What changes from the version on."""
        kind, where, _, _ = requests._place(path, self.api)
        watch = Watch(kind, self.api.store, wanted(kind, where, dict(query)), int(query["resourceVersion"]))
        loop = asyncio.get_running_loop()
        until = loop.time() + float(query["timeoutSeconds"])
        try:
            while loop.time() < until:
                for line in watch.pending():
                    yield json.loads(line)
                await watch.news(until - loop.time())
        finally:
            watch.close()
