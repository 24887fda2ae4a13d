"""The operator: observes ElasticJobs, their masters' Jobs and pods, and writes what `reconcile` says, one job at a time each.

It keeps nothing that the cluster does not say. It may be killed at any moment: what was half written is seen and finished.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import hashlib
import random
import secrets
import time
from collections.abc import Awaitable, Callable
from datetime import datetime, timezone
from typing import NamedTuple

import structlog

from dlrover_backends.k8s import masters, names, paths, pods
from dlrover_backends.k8s.api import Api, Json
from dlrover_backends.k8s.backoff import BackOff
from dlrover_backends.k8s.elasticjob import reconcile, refused, standing, translate
from dlrover_backends.k8s.elasticjob.cache import Cache
from dlrover_backends.k8s.elasticjob.reconcile import Ask, Erase, Make, Observed, Outcome, Patch, Remove, Settings
from dlrover_backends.k8s.elasticjob.telling import At, Masters, Told
from dlrover_backends.k8s.errors import ApiError, Conflict, Forbidden, NotFound, Request
from dlrover_backends.k8s.listwatch import ListWatch
from dlrover_core.errors import CoreError, Refused
from dlrover_core.runtime.within import within

LOOK_S = 5.0
"""How often a job's masters are asked."""
TELL_S = 10.0
REFUSED_S = 60.0
"""After a refusal masters are asked for the same again so much later."""
AT_ONCE = 16
NAMED_MAX = 200
"""So many characters of a job's name are in its events' names, which have 253 at most."""
TRIES = 3
"""After so many tries an answer that may pass is told as one that does not."""
AGAIN_S, SYNC_S = 0.3, 0.1
ERASES_AT_ONCE = 3
ERASE_S = 60.0
"""So long etcd may take to remove a job's log, before it is asked again."""
Forget = Callable[[str, str, str, Callable[[], None]], Awaitable[None]]
"""Removes what an etcd has of a job: namespace, name, the run that its log began with, and what is called before any goes."""
RIVAL = "dlrover-controller-manager"
OURS = f"{names.LABEL_BY}={names.BY}"

log = structlog.get_logger("dlrover.operator")


class Asked(NamedTuple):
    """What masters refused, and until when they are not asked for it again."""

    why: str
    until: float


class Operator:
    """Keeps the jobs of a namespace, or of all. Run it on one host at a time (`leader`).

    api:       the cluster
    tells:     asks masters
    settings:  what jobs are given
    namespace: whose jobs; empty: those of all namespaces
    look_s:    how often a job's masters are asked
    forget:    removes what an etcd has of a job that is deleted; None: it stays
    """

    def __init__(
        self,
        api: Api,
        tells: Masters,
        settings: Settings,
        namespace: str,
        *,
        now: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        look_s: float = LOOK_S,
        forget: Forget | None = None,
    ) -> None:
        self._api, self._tells, self._settings, self._namespace = api, tells, settings, namespace
        self._now, self._wall, self._look_s, self._log_forgets = now, wall, look_s, forget
        self._jobs = dict[str, Cache]()
        self._masters = self._cache("batch/v1", "Job", OURS, self._heard_masters)
        self._pods = self._cache("v1", "Pod", OURS, self._heard)
        # By uid: who works on the job; when somebody does again, after a fault, and how often that was; who waits for news of it;
        # where its masters are; what they refused.
        self._workers: dict[str, asyncio.Task[None]] = {}
        self._rests: dict[str, asyncio.TimerHandle] = {}
        self._falls: dict[str, BackOff] = {}
        self._news: dict[str, asyncio.Event] = {}
        self._at: dict[str, At] = {}
        self._refused: dict[str, Asked] = {}
        self._unheard: dict[str, str] = {}
        # Whose job a masters' Job is or was, by its uid: it may be gone before its pods are.
        self._owners: dict[str, str] = {}
        self._free, self._erasing = asyncio.Semaphore(AT_ONCE), asyncio.Semaphore(ERASES_AT_ONCE)
        self._half_erased = set[str]()
        self._ends = False

    def _cache(self, version: str, kind: str, selector: str, heard: Callable[[Json], None]) -> Cache:
        path = paths.path_in(version, kind, self._namespace)
        loop = ListWatch(self._api, path, selector, now=self._now)
        return Cache(loop, {"apiVersion": version, "kind": kind}, heard)

    async def run(self) -> None:
        """Until cancelled. Raises `ApiError` for a missing right, `CoreError` where no definition is installed."""
        self._jobs = {group: self._jobs_of(group) for group in await self._served()}
        if not self._settings.annotated and await self._has_rival():
            log.warning(
                "DLRover's own operator runs here: only jobs with the annotation are taken",
                annotation=reconcile.NOTE_TAKE,
            )
            self._settings = self._settings._replace(annotated=True)
        running = [asyncio.ensure_future(one.run()) for one in (*self._jobs.values(), self._masters, self._pods)]
        try:
            done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_EXCEPTION)
            for one in done:
                one.result()
        except Forbidden as error:
            raise CoreError(refused.read(error).why) from error
        finally:
            self._ends = True
            for rest in self._rests.values():
                rest.cancel()
            tasks = [*running, *self._workers.values()]
            for one in tasks:
                one.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._workers.clear()

    def _jobs_of(self, group: str) -> Cache:
        return self._cache(f"{group}/{translate.VERSION}", translate.KIND, "", self._heard_job)

    async def _served(self) -> list[str]:
        """Groups whose ElasticJobs there are: the older one may be missing. Raises `CoreError` where there are none."""
        found = []
        for group in (translate.GROUP, translate.OLD_GROUP):
            path = f"{paths.path_in(f'{group}/{translate.VERSION}', translate.KIND, self._namespace)}?limit=1"
            back_off = BackOff(random.random)
            while True:
                try:
                    await self._api.ask("GET", path)
                    found.append(group)
                except NotFound:
                    pass
                except Forbidden as error:
                    raise CoreError(refused.read(error).why) from error
                except ApiError as error:
                    await asyncio.sleep(back_off.failed(self._now(), error.retry_after_s))
                    continue
                break
        if not found:
            raise CoreError(f"the cluster knows no {translate.KIND}: kubectl apply -k deploy/base")
        return found

    async def _has_rival(self) -> bool:
        """Does DLRover's own operator run where this one looks?"""
        path = paths.path_in("v1", "Pod", self._namespace)
        try:
            found = await self._api.ask("GET", f"{path}?labelSelector=control-plane%3Dcontroller-manager")
        except ApiError as error:
            log.warning("it is not known whether DLRover's own operator runs here", error=str(error))
            return False
        return any(_is_rival(one) for one in found.get("items") or ())

    # ---- news

    def _heard_job(self, job: Json) -> None:
        uid = str(job["metadata"]["uid"])
        self._news.setdefault(uid, asyncio.Event()).set()
        if uid not in self._workers and uid not in self._rests and self._job(uid) is not None:
            self._workers[uid] = asyncio.ensure_future(self._work(uid))
            self._workers[uid].add_done_callback(lambda task: self._ended(uid, task))

    def _heard(self, thing: Json) -> None:
        uid = self._owner_of(thing)
        if uid in self._news:
            self._news[uid].set()

    def _heard_masters(self, made: Json) -> None:
        uid = _elasticjob_of(made)
        if uid:
            self._owners[str(made["metadata"]["uid"])] = uid
        self._heard(made)

    def _owner_of(self, thing: Json) -> str:
        """The uid of the ElasticJob that an object belongs to; empty: to none. Owners alone are believed, by their uids."""
        found = (self._owners.get(str(one.get("uid")), "") for one in thing["metadata"].get("ownerReferences") or ())
        return _elasticjob_of(thing) or next(filter(None, found), "")

    def _job(self, uid: str) -> Json | None:
        return next((one.objects[uid] for one in self._jobs.values() if uid in one.objects), None)

    def _ended(self, uid: str, task: asyncio.Task[None]) -> None:
        """Nobody works on the job now. After a fault that is so for a while: what was wrong with it may be wrong again."""
        self._workers.pop(uid, None)
        error = None if task.cancelled() else task.exception()
        if error is None or self._ends:
            self._forget(uid)
            return
        pause = self._falls.setdefault(uid, BackOff(random.random)).failed(self._now())
        log.error(
            "work on a job has ended by a fault, and begins again", job=uid, pause_s=round(pause, 1), exc_info=error
        )
        self._rests[uid] = asyncio.get_running_loop().call_later(pause, self._rested, uid)

    def _rested(self, uid: str) -> None:
        del self._rests[uid]
        self._falls[uid].went_well(self._now())
        self._forget(uid)

    def _forget(self, uid: str) -> None:
        """Begin again where the job is there, or forget all of it."""
        job = self._job(uid)
        if job is not None and not self._ends:  # it was gone, and is back: nobody else works on it
            self._heard_job(job)
        elif job is None:
            for known in (self._news, self._at, self._refused, self._unheard, self._falls):
                known.pop(uid, None)
            self._half_erased.discard(uid)
            self._owners = {made: one for made, one in self._owners.items() if one != uid}
            self._tells.forget(uid)

    # ---- one job

    async def _work(self, uid: str) -> None:
        """Keep one job true until it is gone."""
        back_off, failures = BackOff(random.random), 0
        while not self._ends and (job := self._job(uid)) is not None:
            pause = self._look_s
            self._news[uid].clear()
            if not (self._masters.synced and self._pods.synced):
                pause = SYNC_S
            elif reconcile.is_ours(job, self._settings):
                try:
                    async with self._free:
                        if await self._once(uid, job, failures):
                            pause = AGAIN_S
                    failures = 0
                    back_off.went_well(self._now())
                except ApiError as error:
                    failures += 1
                    pause = back_off.failed(self._now(), error.retry_after_s)
                    log.warning(
                        "a job is looked at again",
                        job=job["metadata"]["name"],
                        error=refused.read(error).why,
                        pause_s=round(pause, 1),
                    )
                    await asyncio.sleep(pause)
                    continue
                except Exception as error:  # one job that cannot be kept must not stop the others
                    log.exception("a job cannot be kept", job=job["metadata"].get("name"))
                    why = f"{type(error).__name__}: {error}; the operator's log has more"
                    with contextlib.suppress(Exception):
                        await self._tell_blocked(Observed(job, now=self._stamp()), Outcome(), "Fault", why)
            with contextlib.suppress(asyncio.TimeoutError):
                await within(pause, self._news[uid].wait())

    async def _once(self, uid: str, job: Json, failures: int) -> bool:
        """Look, and write what is to be written; was there something that nothing will tell the end of? Raises `ApiError`."""
        seen, outcome = Observed(job, now=self._stamp()), Outcome()
        try:
            seen = await self._observed(uid, job)
            outcome = reconcile.reconcile(seen, self._settings)
            last = outcome.writes[-1] if outcome.writes else None
            if isinstance(last, Make) and await self._owned(paths.path_of(last.object), job) is not None:
                return True  # the masters' Job is there, and only the watch has not told: the status would be wrong
            again = await self._written(uid, job, outcome)
        except ApiError as error:
            found = refused.read(error)
            if found.lasts or failures + 1 >= TRIES:
                await self._tell_blocked(seen, outcome, found.reason, found.why)
            raise
        await self._write_status(job, outcome.status)
        await self._say(job, outcome.events)
        return again

    async def _tell_blocked(self, seen: Observed, outcome: Outcome, reason: str, why: str) -> None:
        """Let the status say what is in the way, as far as it can be written: nobody should look at an empty one."""
        status, events = standing.blocked(reconcile.facts(seen), outcome.status, reason, why)
        with contextlib.suppress(ApiError):
            await self._write_status(seen.job, status if status != seen.job.get("status") else None)
        await self._say(seen.job, (*outcome.events, *events))

    async def _write_status(self, job: Json, status: Json | None) -> None:
        if status is not None:
            with contextlib.suppress(NotFound):
                await self._api.ask("PATCH", f"{paths.path_of(job)}/status", body={"status": status})

    async def _observed(self, uid: str, job: Json) -> Observed:
        made = next((one for one in self._masters.objects.values() if self._owner_of(one) == uid), None)
        own = tuple(one for one in self._pods.objects.values() if self._owner_of(one) == uid)
        told, left = None, False
        if job["metadata"].get("deletionTimestamp"):
            left = made is None and not reconcile.staying(own, self._stamp()) and await self._is_left(job)
        elif made is not None and not standing.ended(made) and not standing.is_over(job):
            told = await self._told(uid, job, made)
        asked = self._refused.get(uid)
        if asked is not None and (asked.until <= self._now() or told is None):
            self._refused.pop(uid)
        why = self._refused[uid].why if uid in self._refused else ""
        return Observed(job, made, own, told, why, left, self._stamp(), self._unheard.get(uid, ""))

    async def _is_left(self, job: Json) -> bool:
        """Is anything that was made for the job still there?"""
        for path in reconcile.belongings(job):
            if await self._owned(path, job) is not None:
                return True
        return False

    async def _owned(self, path: str, job: Json) -> Json | None:
        """The object, if the job owns it."""
        try:
            found = await self._api.ask("GET", path)
        except NotFound:
            return None
        owners = found["metadata"].get("ownerReferences") or ()
        return found if any(one.get("uid") == job["metadata"]["uid"] for one in owners) else None

    async def _told(self, uid: str, job: Json, made: Json) -> Told | None:
        """What the masters say. None where they do not answer."""
        self._unheard.pop(uid, None)
        try:
            at = self._at.get(uid) or await self._find(uid, job, made)
            return await within(TELL_S, self._tells.look(at))
        except Forbidden as error:
            self._unheard[uid] = refused.read(error).why
            return None
        except (CoreError, asyncio.TimeoutError) as error:
            log.debug("masters do not answer", job=job["metadata"]["name"], error=str(error))
            self._at.pop(uid, None)
            return None

    async def _find(self, uid: str, job: Json, made: Json) -> At:
        """Where the job's masters are, and their token. Raises `CoreError`."""
        base = f"/api/v1/namespaces/{made['metadata']['namespace']}"
        called = made["metadata"]["name"]
        service = await self._api.ask("GET", f"{base}/services/{called}")
        secret = await self._api.ask("GET", f"{base}/secrets/{called}")
        try:
            token = base64.b64decode(secret["data"][pods.TOKEN_KEY]).decode()
        except (KeyError, ValueError) as error:
            raise CoreError(f"secret {called} holds no token") from error
        host = str((service.get("spec") or {}).get("clusterIP") or "")
        address = f"[{host}]:{masters.PORT}" if ":" in host else f"{host}:{masters.PORT}"
        self._at[uid] = At(address, token, str(job["metadata"]["name"]), uid)
        return self._at[uid]

    # ---- writing

    async def _written(self, uid: str, job: Json, outcome: Outcome) -> bool:
        """Write it all, in order. Raises `ApiError`."""
        for one in outcome.writes:
            if isinstance(one, Make):
                await self._make(one, job)
            elif isinstance(one, Patch):
                with contextlib.suppress(NotFound):
                    body = _in(await self._api.ask("GET", one.path), one.body) if one.as_read else one.body
                    await self._api.ask("PATCH", one.path, body=body)
            elif isinstance(one, Remove):
                await self._remove(one.path, job)
            elif isinstance(one, Erase):
                await self._erase(one, job)
            else:
                await self._ask_masters(uid, one)
        # Objects that are not watched tell nobody that they are gone.
        return bool(outcome.writes) and all(isinstance(one, Remove) for one in outcome.writes)

    async def _make(self, one: Make, job: Json) -> None:
        body = one.object
        if one.secret:
            text = {**body["stringData"], pods.TOKEN_KEY: secrets.token_urlsafe(24)}
            body = {**body, "stringData": text}
        path, name = paths.collection(body), body["metadata"]["name"]
        try:
            await self._api.ask("POST", path, body=body)
        except Conflict as error:
            found = await self._owned(f"{path}/{name}", job)
            if found is None:
                why = f"{body['kind']} {name} is there, and is not of this job: delete it, or rename the job"
                raise refused.Taken(error.asked, error.status, why, reason=error.reason) from error
            if body["kind"] == "ConfigMap":  # of an attempt that ended half way, before the object was edited
                await self._api.ask("PATCH", f"{path}/{name}", body=_in(found, {"data": body["data"]}))

    async def _remove(self, path: str, job: Json) -> None:
        found = await self._mine(path, job)
        if found is None or found["metadata"].get("deletionTimestamp"):
            return
        options = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Background"}
        body = {**options, "preconditions": {"uid": found["metadata"]["uid"]}}
        with contextlib.suppress(NotFound, Conflict):
            await self._api.ask("DELETE", path, body=body)

    async def _erase(self, one: Erase, job: Json) -> None:
        """Meanwhile other jobs are worked on: an etcd that does not answer is waited for long. Raises `LogStays`."""
        if self._log_forgets is None:
            return
        self._free.release()
        try:
            async with self._erasing:
                now = self._job(one.run)
                if now is not None and reconcile.keeps_log(now):  # somebody said so while this waited
                    return
                begun = functools.partial(self._half_erased.add, one.run)
                await within(ERASE_S, self._log_forgets(one.namespace, one.job, one.run, begun))
        except (CoreError, asyncio.TimeoutError) as error:
            kind = f"{translate.PLURAL}.{job['apiVersion'].partition('/')[0]}"  # both groups may be installed
            why = f"what the etcd has of the job is not removed yet: {str(error) or 'it does not answer'}; "
            if one.run in self._half_erased:
                why += "a part of it has gone, and the rest goes when it can"
            else:
                note = f"{reconcile.NOTE_KEEP_LOG}=true"
                why += f"to leave it there: kubectl -n {one.namespace} annotate {kind} {one.job} {note}"
            asked = Request("DELETE", f"/api/v1/namespaces/{one.namespace}/logs/{one.job}")
            raise refused.LogStays(asked, 0, why) from error
        finally:
            await self._free.acquire()

    async def _mine(self, path: str, job: Json) -> Json | None:
        """The object, if it is the job's: a masters' pod is its Job's."""
        if "/pods/" not in path:
            return await self._owned(path, job)
        name = path.rpartition("/")[2]
        uid = job["metadata"]["uid"]
        own = [one for one in self._pods.objects.values() if one["metadata"]["name"] == name]
        return next((one for one in own if self._owner_of(one) == uid), None)

    async def _ask_masters(self, uid: str, one: Ask) -> None:
        at = self._at.get(uid)
        if at is None:
            return
        try:
            await within(TELL_S, self._tells.tell(at, {**one.command, "job": at.job}))
        except Refused as error:
            self._refused[uid] = Asked(str(error), self._now() + REFUSED_S)
            self._news[uid].set()
        except (CoreError, asyncio.TimeoutError) as error:
            log.info("masters could not be told", job=at.job, command=one.command["command"], error=str(error))
            self._at.pop(uid, None)

    async def _say(self, job: Json, events: tuple[standing.Event, ...]) -> None:
        for one in events:
            with contextlib.suppress(ApiError):
                await self._event(job, one)

    async def _event(self, job: Json, told: tuple[str, str, str]) -> None:
        """One event, once: its name is made from what it says."""
        kind, reason, message = told
        metadata = job["metadata"]
        mark = hashlib.sha256("\0".join((metadata["uid"], *told)).encode()).hexdigest()[:16]
        body = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {
                "name": f"{metadata['name'][:NAMED_MAX].rstrip('.-')}.{mark}",
                "namespace": metadata["namespace"],
            },
            "involvedObject": {
                "apiVersion": job["apiVersion"],
                "kind": translate.KIND,
                "name": metadata["name"],
                "namespace": metadata["namespace"],
                "uid": metadata["uid"],
                "resourceVersion": metadata.get("resourceVersion", ""),
            },
            "type": kind,
            "reason": reason,
            "message": message[: standing.TEXT_MAX],
            "source": {"component": "dlrover-operator"},
            "firstTimestamp": self._stamp(),
            "lastTimestamp": self._stamp(),
            "count": 1,
        }
        with contextlib.suppress(Conflict):
            await self._api.ask("POST", f"/api/v1/namespaces/{metadata['namespace']}/events", body=body)

    def _stamp(self) -> str:
        return datetime.fromtimestamp(self._wall(), timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def _in(found: Json, patch: Json) -> Json:
    """The patch of this object, refused (`Conflict`) where it has changed since, or is another one."""
    version = {key: found["metadata"][key] for key in ("uid", "resourceVersion")}
    return {**patch, "metadata": {**(patch.get("metadata") or {}), **version}}


def _elasticjob_of(thing: Json) -> str:
    """The uid of the ElasticJob that owns an object itself; empty: none does."""
    owners = thing["metadata"].get("ownerReferences") or ()
    return next((str(one["uid"]) for one in owners if one.get("kind") == translate.KIND), "")


def _is_rival(pod: Json) -> bool:
    images = [str(one.get("image") or "") for one in pod["spec"].get("containers") or ()]
    return str(pod["metadata"]["name"]).startswith(RIVAL) or any("elasticjob-controller" in one for one in images)
