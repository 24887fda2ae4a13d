"""An API server that keeps objects in a dictionary and fails as it is told, for unit tests of the Kubernetes backend."""

from __future__ import annotations

import asyncio
import copy
import functools
import itertools
import json
from collections import deque
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from typing import Any

from dlrover_backends.k8s.errors import ApiError, Request, of_answer

RECORDED = Path(__file__).parents[1] / "integration/data/k8s"


@functools.cache
def _lines(kind: str, *scenarios: str) -> tuple[dict[str, Any], ...]:
    texts = [(RECORDED / f"{one}.jsonl").read_text(encoding="utf-8") for one in scenarios]
    lines = [json.loads(line) for text in texts for line in text.splitlines()]
    return tuple(one for one in lines if one["kind"] == kind)


def recorded_pods() -> list[dict[str, Any]]:
    """Pods as watches of a real API server showed them, in order."""
    found = _lines("watch", "06-pod-lifecycle-failures", "09-schedule-preempt", "10-node-failure")
    shown = [each["event"]["object"] for one in found for each in one["events"]]
    return copy.deepcopy([one for one in shown if one.get("kind") == "Pod"])


def recorded_refusals() -> list[dict[str, Any]]:
    """What a real API server refused: ``note``, ``method``, ``path``, ``status``, ``headers`` and ``body``."""
    found = _lines("exchange", "01-pod-create-errors", "04-gone-compaction-restart", "13-throttled-429")
    refused = [one for one in found if one["response"].get("status", 0) >= 400]
    return [
        {
            "note": one["note"],
            **{key: one["request"][key] for key in ("method", "path")},
            **{key: one["response"][key] for key in ("status", "headers")},
            "body": one["response"].get("body") or one["response"].get("body_text"),
        }
        for one in refused
    ]


def failed(status: int, message: str = "", *, method: str = "GET", after: str = "", reason: str = "") -> ApiError:
    """The error of an answer with this status."""
    headers = {"Retry-After": after} if after else {}
    return of_answer(
        Request(method, "/api/v1/namespaces/ml/pods"), status, {"message": message, "reason": reason}, headers
    )


class Script:
    """The `Api` port: answers in order: a dictionary, an error, or a list of a watch's events, which may end in an error."""

    def __init__(self, *answers: Any) -> None:
        self.answers, self.asked = deque(answers), list[tuple[str, dict[str, str]]]()

    async def ask(
        self, method: str, path: str, *, query: Mapping[str, str] | None = None, body: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """The next answer."""
        self.asked.append((f"{method} {path}", dict(query or {})))
        answer = self.answers.popleft()
        if isinstance(answer, BaseException):
            raise answer
        assert isinstance(answer, dict), f"a list was asked for, and the script has {answer}"
        return answer

    async def watch(self, path: str, query: Mapping[str, str], read_s: float) -> AsyncGenerator[dict[str, Any], None]:
        """The events of the next answer."""
        self.asked.append((f"WATCH {path}", dict(query)))
        answer = self.answers.popleft()
        if isinstance(answer, BaseException):
            raise answer
        for event in answer:
            if isinstance(event, BaseException):
                raise event
            yield event


class Server:
    """The `Api` port over objects by path; its watches tell changes. ``faults``: errors of the next requests, by method."""

    def __init__(self) -> None:
        self.objects: dict[str, dict[str, Any]] = {}
        self.asked: list[tuple[str, str, dict[str, Any] | None]] = []
        self.faults: dict[str, deque[ApiError]] = {}
        self._count = itertools.count(1)
        self._watches: list[asyncio.Queue[dict[str, Any]]] = []
        self._told: list[tuple[int, dict[str, Any]]] = []

    async def ask(
        self, method: str, path: str, *, query: Mapping[str, str] | None = None, body: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Create, get, list or delete."""
        self.asked.append((method, path, body))
        if self.faults.get(method):
            raise self.faults[method].popleft()
        asked, path = Request(method, path), path.partition("?")[0]
        if method == "POST":
            assert body is not None
            name = f"{path}/{body['metadata']['name']}"
            if name in self.objects:
                raise of_answer(asked, 409, {"message": f"{name} already exists", "reason": "AlreadyExists"}, {})
            made = json.loads(json.dumps(body))
            made["metadata"] |= {"uid": f"uid-{next(self._count)}", "resourceVersion": str(next(self._count))}
            self.objects[name] = made
            self.tell("ADDED", made)
            return made
        if asked.verb == "list":
            found = [one for name, one in self.objects.items() if name.startswith(f"{path}/")]
            return {"items": found, "metadata": {"resourceVersion": str(next(self._count))}}
        if path not in self.objects:
            raise of_answer(asked, 404, {"message": f"{path} not found", "reason": "NotFound"}, {})
        if method == "DELETE":
            wanted = ((body or {}).get("preconditions") or {}).get("uid")
            if wanted and wanted != self.objects[path]["metadata"]["uid"]:
                raise of_answer(asked, 409, {"message": "the uid is another one", "reason": "Conflict"}, {})
            self.tell("DELETED", self.objects.pop(path))
            return {"kind": "Status"}
        return self.objects[path]

    async def watch(self, path: str, query: Mapping[str, str], read_s: float) -> AsyncGenerator[dict[str, Any], None]:
        """What is told from the list of this version on."""
        queue = asyncio.Queue[dict[str, Any]]()
        self._watches.append(queue)
        for number, event in self._told:
            if number > int(query.get("resourceVersion") or self._now()):
                queue.put_nowait(event)
        while True:
            yield await queue.get()

    def tell(self, type_: str, one: dict[str, Any]) -> None:
        """Tell all watches of a change."""
        self._told.append((next(self._count), event := {"type": type_, "object": json.loads(json.dumps(one))}))
        for queue in self._watches:
            queue.put_nowait(event)

    def _now(self) -> int:
        return self._told[-1][0] if self._told else 0

    def pods(self) -> list[dict[str, Any]]:
        """All pods."""
        return [one for name, one in self.objects.items() if "/pods/" in name]
