"""A run in its queue: the loop beside the backend that asks Kueue, follows its answer, and gives quota back.

It decides nothing of training. Nodes that are not admitted are refused for now, so they wait in the platform's words and at no
cost. A node above MIN that is evicted gets a notice, and leaves at a step boundary. The admission of the whole is passed on:
without it masters suspend the job with its nodes given back, and with it the job goes on. Everything follows from the
Workloads and pods that are there, so the loop of the next master goes on where this one was.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from typing import Any, NamedTuple, Protocol, Union

import structlog

from dlrover_backends.k8s import endings, kueue, names
from dlrover_backends.k8s.api import Api, Ask, Json, only, uid_of
from dlrover_backends.k8s.errors import ApiError, Conflict, Forbidden, Invalid, NotFound
from dlrover_backends.k8s.listwatch import ListWatch, Snapshot
from dlrover_backends.k8s.refusals import missing_right
from dlrover_backends.k8s.settings import Settings
from dlrover_core.errors import LaunchRefused, SpecError
from dlrover_core.job.orders import NodeLaunch
from dlrover_core.runtime.backend import ENDS, Admission, Observation, Wanted
from dlrover_core.runtime.backends import BackendContext

EVICT_S = 60.0
"""How long a node above MIN has to leave at a step boundary once its quota is asked back."""
FORCE_S = 60.0
"""How long after that its pod is deleted: masters may be away, and quota that others wait for is held in vain."""
RETRY_S = (0.5, 2.0, 10.0, 30.0)
LOOK_S = 300.0


log = structlog.get_logger("dlrover.backend")


class Again(NamedTuple):
    """What is known of the pods of this place has changed, though they have not."""

    place: str


class Cluster(Protocol):
    """What the loop sees of the backend."""

    @property
    def api(self) -> Api:
        """The connection, once there is one."""
        ...

    @property
    def namespace(self) -> str:
        """Where everything is made."""
        ...

    @property
    def living(self) -> list[Json] | None:
        """The run's pods that are not gone; None: they were not listed yet."""
        ...


class Queue:
    """One run in a LocalQueue.

    here, told: the run, and the backend's arguments
    ask:        sends a request, as `Api.ask`
    cluster:    the connection, the namespace, and the pods
    now, wall:  steady seconds, and the time of the day
    """

    def __init__(
        self,
        here: BackendContext,
        told: Settings,
        ask: Ask,
        *,
        cluster: Cluster,
        now: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._here, self._told, self._ask, self._cluster = here, told, ask, cluster
        self._now, self._wall = now, wall
        self._news = asyncio.Event()
        self._job: kueue.Job | None = None
        self._objects: dict[str, Json] | None = None
        self._seen = kueue.Decision(None, {})
        self._flavors: dict[str, Json] = {}
        self._evicted: dict[str, float] = {}
        self._taken: dict[str, str] = {}
        self._wrong = ""

    # ---- what the backend asks

    async def check(self) -> None:
        """Raises `SpecError` where there is no Kueue, or no such queue, and `ApiError`."""
        try:
            found = await self._ask("GET", f"/apis/{kueue.API}")
        except NotFound:
            found = {}
        if not any(one.get("name") == "workloads" for one in found.get("resources") or ()):
            raise SpecError(
                "queue",
                f"{self._told.queue!r} needs Kueue with {kueue.API}, which this cluster does not serve: install Kueue 0.14 or "
                "newer, or leave queue out",
            )
        try:
            await self._ask("GET", f"{self._path('localqueues')}/{self._told.queue}")
        except Forbidden:
            return  # whoever may not look hears it from the Workload
        except NotFound as error:
            raise SpecError(
                "queue", f"there is no LocalQueue {self._told.queue!r} in namespace {self._cluster.namespace}"
            ) from error

    def sized(self, wanted: Wanted, owner: Json, pods: Mapping[str, Json]) -> None:
        """The job wants this. ``pods``: a pod of each group, as it would be made."""
        self._job = kueue.Job(self._here.job, self._here.run, self._told.queue, wanted, owner, pods)
        self._news.set()

    def admit(self, node: NodeLaunch, pod: Json) -> None:
        """Let a node's pod be made where its quota is. Raises `LaunchRefused`, for now, where there is none."""
        if self._wrong:
            raise LaunchRefused(f"{kueue.SAYS}: {self._wrong}", permanent=False)
        found = self._seen.of(node.group, node.index)
        if not self._seen.admitted:
            raise LaunchRefused(self._seen.reason, permanent=False)
        if found is None:
            raise LaunchRefused(f"{kueue.SAYS}: the node is on its way into queue {self._told.queue}", permanent=False)
        if found.state != kueue.ADMITTED:
            raise LaunchRefused(found.reason, permanent=False)
        try:
            kueue.placed(pod, found, node.group, self._flavors)
        except KeyError as missing:
            raise LaunchRefused(f"{kueue.SAYS}: flavor {missing} is not known yet", permanent=False) from missing

    def marked(self, seen: Observation, place: str) -> Observation:
        """What a pod shows, with the notice that its quota is asked back. All of MIN is suspended instead."""
        one, since = self._seen.above.get(place), self._evicted.get(place)
        if one is None or since is None or seen.notice or seen.phase not in {"pending", "running"}:
            return seen
        left_s = max(0.0, EVICT_S - (self._now() - since))
        return seen._replace(notice=one.reason, notice_us=max(1, int(left_s * 1e6)), age_us=0)

    def taken(self, name: str) -> str:
        """Why the queue itself ended a pod; empty: it did not."""
        return self._taken.pop(name, "")

    def news(self) -> None:
        """A pod has changed."""
        self._news.set()

    # ---- the loop

    async def run(self) -> AsyncGenerator[Union[Admission, Again]]:
        """What is news for the masters, until cancelled. It goes on once they have heard it."""
        following, said, failures = asyncio.ensure_future(self._follow()), "", 0
        try:
            while True:
                self._news.clear()
                wait_s, living, job = LOOK_S, self._cluster.living, self._job
                if job is not None and self._objects is not None and living is not None:
                    before, seen = self._seen, self._look(job)
                    if not seen.admitted:
                        self._seen = seen  # nothing more is launched, and then masters hear why
                    try:
                        await self._learn(seen)
                        await self._level(job, seen, living)
                        failures = 0
                    except ApiError as error:
                        log.warning("the queue is asked again", error=str(error))
                        wait_s = RETRY_S[min(failures, len(RETRY_S) - 1)]
                        failures += 1
                    text = f"{seen.admitted} {self._may(seen)} {seen.reason}"
                    if text != said and job.wanted.state not in ENDS:
                        said = text
                        yield Admission(seen.admitted, seen.reason)
                        if seen.admitted:
                            # Masters have heard that the job is admitted: a launch finds no older word of the queue's.
                            self._seen = seen
                            yield Admission(seen.admitted, seen.reason)
                    self._seen = seen
                    for place in self._changed(before, seen):
                        yield Again(place)
                await self._wait(min([wait_s, *self._due()]))
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)

    async def _wait(self, seconds: float) -> None:
        timer = asyncio.get_running_loop().call_later(seconds, self._news.set)
        try:
            await self._news.wait()
        finally:
            timer.cancel()

    async def _follow(self) -> None:
        """The Workloads of the run as they are."""
        selector, failures = names.selector(self._here.job, self._here.run), 0
        while True:
            try:
                loop = ListWatch(self._cluster.api, self._path("workloads"), selector, now=self._now)
                async for one in loop.run():
                    failures = 0
                    if isinstance(one, Snapshot):
                        self._objects = {each["metadata"]["name"]: each for each in one.objects}
                    elif self._objects is not None and one.type == "DELETED":
                        self._objects.pop(one.object["metadata"]["name"], None)
                    elif self._objects is not None:
                        self._objects[one.object["metadata"]["name"]] = one.object
                    self._news.set()
            except Forbidden as error:
                self._wrong = missing_right(error)
            except ApiError as error:
                self._wrong = f"its Workloads cannot be watched: {error}"
            except Exception as error:  # noqa: BLE001  # pods are observed all the same, and launches wait in these words
                self._wrong = f"its Workloads cannot be watched: {type(error).__name__}: {error}"
            log.warning("the queue cannot be followed", error=self._wrong)
            await asyncio.sleep(RETRY_S[min(failures, len(RETRY_S) - 1)])
            failures += 1

    def _look(self, job: kueue.Job) -> kueue.Decision:
        """Read what is there."""
        self._wrong = ""
        seen = kueue.admitted((self._objects or {}).values(), str(job.owner["metadata"].get("uid") or ""))
        evicted = {place for place, one in seen.above.items() if one.state == kueue.EVICTED}
        self._evicted = {place: self._evicted.get(place, self._now()) for place in evicted}
        return seen

    def _changed(self, before: kueue.Decision, seen: kueue.Decision) -> list[str]:
        """The places whose nodes have something new to hear."""
        was, now = (
            {place for place, one in each.above.items() if one.state == kueue.EVICTED} for each in (before, seen)
        )
        return sorted(was ^ now)

    async def _learn(self, seen: kueue.Decision) -> None:
        """Read the flavors that were chosen. Raises `ApiError`."""
        for one in filter(None, (seen.minimum, *seen.above.values())):
            for flavor in {each for group in one.flavors.values() for each in group} - set(self._flavors):
                try:
                    self._flavors[flavor] = await self._ask("GET", f"/apis/{kueue.API}/resourceflavors/{flavor}")
                except Forbidden as error:
                    self._wrong = missing_right(error)
                except NotFound:
                    self._wrong = f"the ResourceFlavor {flavor} is gone"

    async def _level(self, job: kueue.Job, seen: kueue.Decision, pods: list[Json]) -> None:
        """Write what has to be written. Raises `ApiError` for what may mend itself."""
        living: dict[str, list[Json]] = {}
        for pod in pods:
            living.setdefault(place_of(pod), []).append(pod)
        for one in kueue.writes(job, seen, living, _stamp(self._wall())):
            await self._write(one)
        for place, since in self._evicted.items():
            late = self._now() - since > EVICT_S + FORCE_S
            for pod in living.get(place) or ():
                if not endings.is_deleted(pod) and (late or not (pod.get("spec") or {}).get("nodeName")):
                    await self._end(pod, seen.above[place].reason)

    async def _write(self, one: kueue.Write) -> None:
        path = self._path("workloads")
        try:
            if one.verb == "create":
                made = await self._ask("POST", path, one.body)
                self._note(made)
            elif one.verb == "delete":
                await self._ask("DELETE", f"{path}/{one.name}", one.body)
            else:
                self._note(await self._ask("PATCH", f"{path}/{one.name}/status", one.body))
        except NotFound:
            return  # it is gone, and the watch will tell
        except Conflict as error:
            if one.verb == "create":
                await self._look_at(one.name, error)
        except Forbidden as error:
            self._wrong = missing_right(error)
            log.error("the queue is not asked", error=self._wrong)
        except Invalid as error:
            self._wrong = f"the API server does not take Workload {one.name}: {error.message}"
            log.error("the queue is not asked", error=self._wrong)

    async def _look_at(self, name: str, taken: ApiError) -> None:
        """The name of a Workload is taken: by ours, which the watch will tell of, or by a stranger's."""
        found = await self._ask("GET", f"{self._path('workloads')}/{name}")
        owners = found["metadata"].get("ownerReferences") or ()
        if self._job is not None and not any(
            one.get("uid") == self._job.owner["metadata"].get("uid") for one in owners
        ):
            where = f"Workload {name} in namespace {self._cluster.namespace}"
            self._wrong = f"{where} is not of this run: delete it ({taken.message})"

    def _note(self, one: Json) -> None:
        """Know a Workload as it was written, until the watch tells more."""
        if self._objects is not None and "metadata" in one:
            self._objects[one["metadata"]["name"]] = one
            self._news.set()

    async def _end(self, pod: Json, reason: str) -> None:
        """Delete a pod whose quota is asked back, and that has not begun to train, or does not leave."""
        name = endings.true_name(pod)
        self._taken[name] = f"Preempted: {reason}"
        path = f"/api/v1/namespaces/{self._cluster.namespace}/pods/{pod['metadata']['name']}"
        options = only(uid_of(pod))
        try:
            await self._ask("DELETE", path, options)
        except (NotFound, Conflict):
            return

    def _may(self, seen: kueue.Decision) -> str:
        """Which places may be launched: when one more may, launches are asked for again."""
        places = sorted(place for place, one in seen.above.items() if one.state == kueue.ADMITTED)
        return f"{places} {sorted(self._flavors)} {self._wrong}"

    def _due(self) -> list[float]:
        """Seconds until evicted nodes are late."""
        late = (since + EVICT_S + FORCE_S + 0.1 - self._now() for since in self._evicted.values())
        return [left for left in late if left > 0]

    def _path(self, plural: str) -> str:
        return f"/apis/{kueue.API}/namespaces/{self._cluster.namespace}/{plural}"


def place_of(pod: Json) -> str:
    """The place of the node that a pod is, ``worker-2``."""
    node = str((pod["metadata"].get("annotations") or {}).get(names.NOTE_NODE) or "")
    return node.rpartition("-")[0]


async def merged(*sources: AsyncGenerator[Any]) -> AsyncGenerator[Any]:
    """What several sources say, as it comes, until one of them fails: that error is raised.

    A source goes on once what it said was heard.
    """
    said: asyncio.Queue[tuple[Any, BaseException | None]] = asyncio.Queue()

    async def pass_on(source: AsyncGenerator[Any]) -> None:
        try:
            async with aclosing(source):
                async for one in source:
                    said.put_nowait((one, None))
                    await said.join()
        except Exception as error:  # noqa: BLE001  # raised where it is awaited
            said.put_nowait((None, error))

    tasks = [asyncio.ensure_future(pass_on(source)) for source in sources]
    try:
        while True:
            one, error = await said.get()
            if error is not None:
                raise error
            yield one
            said.task_done()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def rules(queue: str) -> list[dict[str, list[str]]]:
    """What a Role must grant for a queue, beside what pods need. ResourceFlavors are cluster-wide: `flavor_rules`."""
    if not queue:
        return []
    return [
        {"apiGroups": [kueue.GROUP], "resources": ["workloads"], "verbs": ["create", "delete", "get", "list", "watch"]},
        {"apiGroups": [kueue.GROUP], "resources": ["workloads/status"], "verbs": ["patch"]},
    ]


def flavor_rules() -> list[dict[str, list[str]]]:
    """What a ClusterRole must grant for a queue."""
    return [{"apiGroups": [kueue.GROUP], "resources": ["resourceflavors"], "verbs": ["get"]}]


def _stamp(wall_s: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(wall_s))
