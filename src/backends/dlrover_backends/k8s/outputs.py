"""What nodes print, brought to whoever watches: containers' output, followed through the API server.

Agents print what workers print, and beside that their own log, which is left out: it is a file of its own elsewhere.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from typing import Protocol

import structlog

from dlrover_backends.k8s import endings
from dlrover_backends.k8s.api import Api, Json
from dlrover_backends.k8s.errors import ApiError, Busy, Forbidden, Unreachable
from dlrover_backends.k8s.listwatch import ListWatch, Snapshot
from dlrover_backends.k8s.pods import CONTAINER_NOTE

FOLLOWED_MAX = 32
"""Pods that are followed at a time: each is a connection, and no terminal is read by a person beyond that."""
AGAIN_S = 1.0
_AGENT_S = re.compile(rb"timestamp=\S+ level=\w+ role=agent ")

log = structlog.get_logger("dlrover.backend")


class Reading(Api, Protocol):
    """Requests, and texts that grow."""

    def lines(self, path: str, query: Mapping[str, str]) -> AsyncGenerator[bytes, None]:
        """Lines as they come, until the text ends. Raises `ApiError`."""
        ...


class Outputs:
    """Follows the pods of one run.

    api:      where to ask
    pods:     path of the namespace's pods
    selector: labels of the run's pods
    is_ours:  whether a pod is of this run
    write:    takes each line, with its end
    earlier:  is what pods that are there at first have printed already shown, too?
    who:      the command that speaks, where the output itself cannot be shown
    """

    def __init__(
        self,
        api: Reading,
        pods: str,
        selector: str,
        is_ours: Callable[[Json], bool],
        write: Callable[[bytes], None],
        *,
        earlier: bool = True,
        who: str = "dlrover-run",
    ) -> None:
        self._api, self._pods, self._selector = api, pods, selector
        self._is_ours, self._write, self._earlier = is_ours, write, earlier
        self._who = who
        self._following: dict[str, asyncio.Task[None]] = {}
        self._over: set[str] = set()
        self._said: set[str] = set()

    async def run(self) -> None:
        """Until cancelled. Raises `ApiError` where pods may not be listed."""
        try:
            async with aclosing(ListWatch(self._api, self._pods, self._selector).run()) as seen:
                async for one in seen:
                    for pod in one.objects if isinstance(one, Snapshot) else (one.object,):
                        self._look_at(pod)
                    self._earlier = True
        finally:
            tasks = list(self._following.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _look_at(self, pod: Json) -> None:
        uid = str(pod["metadata"].get("uid") or "")
        if uid in self._following or uid in self._over or not self._is_ours(pod) or not _prints(pod):
            return
        if len(self._following) >= FOLLOWED_MAX:
            self._say(f"the output of {FOLLOWED_MAX} nodes is shown here; kubectl logs shows that of the others")
            return
        task = self._following[uid] = asyncio.ensure_future(self._follow(pod, earlier=self._earlier))
        task.add_done_callback(lambda _: self._ended(uid))

    def _ended(self, uid: str) -> None:
        self._over.add(uid)
        self._following.pop(uid, None)

    async def _follow(self, pod: Json, *, earlier: bool) -> None:
        name = pod["metadata"]["name"]
        path, query = f"{self._pods}/{name}/log", {"follow": "true", **({} if earlier else {"tailLines": "0"})}
        if container := (pod["metadata"].get("annotations") or {}).get(CONTAINER_NOTE):
            query["container"] = container
        while True:
            try:
                async with aclosing(self._api.lines(path, query)) as lines:
                    async for line in lines:
                        if not _AGENT_S.match(line):
                            self._write(line + b"\n")
                return
            except (Unreachable, Busy):
                # What was printed meanwhile is not asked for: it would be shown twice, or from the very beginning.
                self._say(f"the output of node {endings.true_name(pod)} was cut off; kubectl logs {name} has all of it")
                query["tailLines"] = "0"
                await asyncio.sleep(AGAIN_S)
            except Forbidden:
                self._say("what nodes print is not shown, for want of a right: verb get, resource pods/log")
                return
            except ApiError as error:  # the pod is gone, or has no container yet that ran
                log.info("a pod's output cannot be followed", pod=name, error=str(error))
                return

    def _say(self, words: str) -> None:
        if words not in self._said:
            self._said.add(words)
            self._write(f"{self._who}: {words}\n".encode())


def _prints(pod: Json) -> bool:
    """Has the node's container begun?"""
    statuses = (pod.get("status") or {}).get("containerStatuses") or ()
    return any({"running", "terminated"} & set(one.get("state") or ()) for one in statuses)
