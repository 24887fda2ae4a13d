"""What is there now, and every change from then on: the loop of list and watch that recovers from whatever an API server does.

No client library's watch is fit for this (docs/kubernetes.md): some are silent for ever on a frozen connection, others spin. The
loop lists in pages, watches from the list's version, goes on from the last one when the server ends the watch, lists anew after
410, and now and again anyway. Versions are opaque: they are compared for equality, and never made up.

A list is always the newest state (no ``resourceVersion``): one from a server's old cache could lack an object that was made a
moment ago, and whoever reads it would take the object for gone.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from typing import NamedTuple, Union

import structlog

from dlrover_backends.k8s.api import Api, Json
from dlrover_backends.k8s.backoff import BackOff
from dlrover_backends.k8s.errors import ApiError, Busy, Expired, Request, Unreachable, of_answer
from dlrover_core.runtime.within import within

PAGE = 500
WATCH_S = (240.0, 300.0)
"""The server is asked to end a watch after a time in these bounds, so that not all watches end at once."""
READ_S = 90.0
"""A watch that is silent for longer is dead: bookmarks come each minute."""
LIST_MAX_S = 120.0
RELIST_S = (600.0, 900.0)
RESUMES_MAX = 3
"""After so many watches in a row that have failed without an event, the state is listed anew."""

log = structlog.get_logger("dlrover.backend")


class Snapshot(NamedTuple):
    """All objects that match. ``began``: when the first page was asked for; what was made after that may be missing.

    version: the list's ``resourceVersion``
    """

    objects: tuple[Json, ...]
    began: float
    version: str = ""

    def follows(self, thing: Json) -> bool:
        """Was the list taken after the object was as it is shown? Then an object that the list lacks is gone.

        Versions of one resource are numbers that grow: KEP-5504 promises what etcd always did. Others are not compared.
        """
        own = str((thing.get("metadata") or {}).get("resourceVersion") or "")
        return own.isdecimal() and self.version.isdecimal() and int(own) <= int(self.version)

    def may_lack(self, thing: Json, at: float) -> bool:
        """May an object that was seen at a time be there although the list lacks it?"""
        return at >= self.began and not self.follows(thing)


class Change(NamedTuple):
    """One object was ADDED, MODIFIED or DELETED. A deleted one, or one that matches no longer, is shown as it was last."""

    type: str
    object: Json


class ListWatch:
    """`Snapshot` first and after every gap, then each `Change`. Time, chance and pauses are arguments, for tests.

    api:      where to ask
    path:     the collection, such as ``/api/v1/namespaces/ml/pods``
    selector: labels that objects must have, ``key=value,key=value``
    """

    def __init__(
        self,
        api: Api,
        path: str,
        selector: str = "",
        *,
        now: Callable[[], float] = time.monotonic,
        chance: Callable[[], float] = random.random,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
        read_s: float = READ_S,
    ) -> None:
        self._api, self._path = api, path
        self._selected: Mapping[str, str] = {"labelSelector": selector} if selector else {}
        self._now, self._chance, self._pause, self._read_s = now, chance, pause, read_s
        self._back_off = BackOff(chance)

    async def run(self) -> AsyncGenerator[Union[Snapshot, Change]]:
        """Until cancelled. Raises `ApiError` for what waiting does not mend: no right, no such collection."""
        expired = 0
        while True:
            snapshot, version = await self._listed()
            yield snapshot
            until = self._now() + _between(RELIST_S, self._chance)
            fruitless = 0
            while version and fruitless < RESUMES_MAX and self._now() < until:
                fruitless += 1
                try:
                    async with aclosing(self._watched(version)) as events:
                        async for event in events:
                            fruitless = expired = 0
                            self._back_off.went_well(self._now())
                            version = _version(event) or version
                            if event["type"] != "BOOKMARK":
                                yield Change(event["type"], event["object"])
                except Expired as error:
                    version = ""  # what was deleted in between can only be told by a new list
                    expired += 1
                    if expired > 1:  # a list whose own version is too old: asked for without end it would be a storm
                        await self._wait(error)
                except (Busy, Unreachable) as error:
                    await self._wait(error)
                else:
                    fruitless = 0

    async def _listed(self) -> tuple[Snapshot, str]:
        while True:
            began = self._now()
            try:
                objects, version = await within(LIST_MAX_S, self._pages())
            except (Busy, Unreachable, Expired) as error:
                await self._wait(error)
            except asyncio.TimeoutError:
                await self._wait(Unreachable(Request("GET", self._path), 0, f"no list within {LIST_MAX_S:g} s"))
            else:
                self._back_off.went_well(self._now())
                return Snapshot(tuple(objects), began, version), version

    async def _pages(self) -> tuple[list[Json], str]:
        """All pages of one list. One whose ``continue`` has expired is begun anew: the server's fresh one would leave gaps."""
        found: list[Json] = []
        query = {**self._selected, "limit": str(PAGE)}
        while True:
            page = await self._api.ask("GET", self._path, query=query)
            found += page.get("items") or ()
            told = page.get("metadata") or {}
            if not told.get("continue"):
                return found, str(told.get("resourceVersion") or "")
            query["continue"] = str(told["continue"])

    async def _watched(self, version: str) -> AsyncGenerator[Json, None]:
        seconds = int(_between(WATCH_S, self._chance))
        query = {
            **self._selected,
            "resourceVersion": version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(seconds),
        }
        began = self._now()
        async with aclosing(self._api.watch(self._path, query, self._read_s)) as events:
            async for event in events:
                if event.get("type") == "ERROR":
                    status = event["object"]
                    raise of_answer(Request("GET", f"{self._path}?watch=1"), _code(status.get("code")), status, {})
                yield event
        # A server that ends watches at once would be asked without end.
        if self._now() - began < 1.0:
            await self._pause(_between((0.2, 1.0), self._chance))

    async def _wait(self, error: ApiError) -> None:
        pause = self._back_off.failed(self._now(), error.retry_after_s)
        log.warning("the Kubernetes API is asked again", error=str(error), pause_s=round(pause, 1))
        await self._pause(pause)


def _version(event: Json) -> str:
    return str((event["object"].get("metadata") or {}).get("resourceVersion") or "")


def _code(code: object) -> int:
    return code if isinstance(code, int) else 500


def _between(bounds: tuple[float, float], chance: Callable[[], float]) -> float:
    return bounds[0] + (bounds[1] - bounds[0]) * chance()
