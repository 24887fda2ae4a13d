"""Masters as pods, in a cluster: made from a plan, found by the job's name, looked at, removed. `masters` says what they are."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import dataclasses
import time
from typing import NamedTuple
from urllib.parse import quote, urlencode

from dlrover_backends.k8s import endings, masters, names, pods, refusals
from dlrover_backends.k8s.api import Api, Json
from dlrover_backends.k8s.errors import ApiError, Conflict, Forbidden, NotFound
from dlrover_backends.k8s.masters import LABEL_ROLE, ROLE, MasterPlan
from dlrover_backends.k8s.paths import collection
from dlrover_core.errors import CoreError, SpecError

LOOK_S = 0.5
SHOWN_MAX = 20


class Missing(CoreError):
    """There is no such job in the namespace; the message names those there are."""


class Found(NamedTuple):
    """The masters of a job, as they are now.

    namespace: where
    name:      the job's own
    job:       the Job object
    masters:   its pods
    """

    namespace: str
    name: str
    job: Json
    masters: tuple[Json, ...]

    @property
    def called(self) -> str:
        """The name of the Job, and of what belongs to it."""
        return str(self.job["metadata"]["name"])

    @property
    def over(self) -> str:
        """``Complete`` or ``Failed``; empty: it goes on."""
        for one in (self.job.get("status") or {}).get("conditions") or ():
            if one.get("status") == "True" and one.get("type") in {"Complete", "Failed"}:
                return str(one["type"])
        return ""

    @property
    def why(self) -> str:
        """What the Job says of its end."""
        found = [one for one in (self.job.get("status") or {}).get("conditions") or () if one.get("type") == self.over]
        return " ".join(filter(None, (str(one.get("message") or "") for one in found)))

    @property
    def running(self) -> tuple[str, ...]:
        """Names of the masters' pods that run."""
        return tuple(
            str(one["metadata"]["name"])
            for one in self.masters
            if (one.get("status") or {}).get("phase") == "Running" and not endings.is_deleted(one)
        )

    @property
    def waits(self) -> str:
        """Why no master runs yet, in the platform's words."""
        for one in self.masters:
            seen = endings.observation(one, None)
            if seen.phase == "pending" and seen.waits:
                return f"pod {one['metadata']['name']}: {seen.waits}"
            if seen.phase == "failed":
                return f"pod {one['metadata']['name']}: {seen.reason}"
        return f"{len(self.masters)} of its masters' pods are there, and none runs"

    @property
    def owner(self) -> str:
        """Kind and name of what owns the Job; empty: nothing does."""
        for one in self.job["metadata"].get("ownerReferences") or ():
            return f"{one.get('kind', '')} {one.get('name', '')}".strip()
        return ""


async def make(api: Api, plan: MasterPlan) -> MasterPlan:
    """Make everything that the plan says; the plan with the uid of what owns it. All of it, or nothing is left.

    Raises `SpecError` where the job is there already, a right is missing, or the API server does not take an object; `ApiError`.
    """
    made = masters.objects(plan)
    with contextlib.suppress(NotFound):
        await api.ask("GET", f"{collection(made[-1])}/{plan.called}")
        where = f"k8s:{plan.namespace}/{plan.job or plan.name}"
        raise SpecError(
            "job-id",
            f"{plan.job or plan.name!r} is there already; dlrover stop {where} ends and removes it, or name another",
        )
    await _remove_ours(api, made)  # of a command that was killed half way
    try:
        owner = await _made(api, made[0])
        if plan.owner is None:
            plan = dataclasses.replace(plan, uid=str(owner["metadata"]["uid"]))
            made = masters.objects(plan)
        answers = [await _made(api, one) for one in made[1:]]
        if plan.owner is None:
            await _own(api, owner, answers[-1])
    except BaseException:
        with contextlib.suppress(ApiError):
            await asyncio.shield(_remove_ours(api, masters.objects(plan)))
        raise
    return plan


async def _made(api: Api, one: Json) -> Json:
    try:
        return await api.ask("POST", collection(one), body=one)
    except Forbidden as error:
        raise SpecError("backend", refusals.missing_right(error)) from error
    except Conflict as error:
        raise SpecError(
            "job-id", f"{one['kind']} {one['metadata']['name']} is not of this job: delete it, or name another"
        ) from error
    except NotFound as error:
        raise SpecError("backend", f"{error.message}: create it, or say --backend k8s:namespace=NAME") from error


async def _own(api: Api, owner: Json, job: Json) -> None:
    """Let the Secret go with the Job, and with the Secret all else."""
    reference = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "name": job["metadata"]["name"],
        "uid": job["metadata"]["uid"],
        "controller": False,
        "blockOwnerDeletion": False,
    }
    path = f"/api/v1/namespaces/{owner['metadata']['namespace']}/secrets/{owner['metadata']['name']}"
    await api.ask("PATCH", path, body={"metadata": {"ownerReferences": [reference]}})


async def _remove_ours(api: Api, made: list[Json]) -> None:
    """Delete those of these objects that are there and bear our label; the Job first, which would make pods meanwhile."""
    for one in reversed(made):
        path = f"{collection(one)}/{one['metadata']['name']}"
        with contextlib.suppress(NotFound, Conflict):
            found = await api.ask("GET", path)
            if (found["metadata"].get("labels") or {}).get(names.LABEL_BY) == names.BY:
                await api.ask("DELETE", path, body=_options(found))


def _options(one: Json) -> Json:
    told = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Background"}
    return {**told, "preconditions": {"uid": one["metadata"]["uid"]}}


async def find(api: Api, namespace: str, name: str) -> Found:
    """The masters of the job of that name. Raises `Missing`, `SpecError` for a missing right, `ApiError`."""
    path = f"/apis/batch/v1/namespaces/{namespace}/jobs"
    listed = (await _read(api, f"{path}?{_query(ROLE, '')}")).get("items") or ()
    by_name = {(one["metadata"].get("annotations") or {}).get(names.NOTE_JOB, ""): one for one in listed}
    if name not in by_name:
        there = ", ".join(sorted(by_name)[:SHOWN_MAX]) or "none"
        raise Missing(f"no job {name!r} has masters in namespace {namespace}; there are: {there}")
    query = _query(ROLE, names.label_value(name))
    found = (await _read(api, f"/api/v1/namespaces/{namespace}/pods?{query}")).get("items") or ()
    newest = sorted(found, key=lambda one: str(one["metadata"].get("creationTimestamp")), reverse=True)
    return Found(namespace, name, by_name[name], tuple(newest))


def _query(role: str, job: str) -> str:
    told = {names.LABEL_BY: names.BY, LABEL_ROLE: role, names.LABEL_JOB: job}
    return urlencode({"labelSelector": ",".join(f"{key}={value}" for key, value in told.items() if value)})


async def _read(api: Api, path: str) -> Json:
    try:
        return await api.ask("GET", path)
    except Forbidden as error:
        raise SpecError("kubeconfig", refusals.missing_right(error)) from error


async def token(api: Api, found: Found) -> str:
    """The job's token, from its Secret. Raises `SpecError`, `ApiError`."""
    secret = await _read(api, f"/api/v1/namespaces/{found.namespace}/secrets/{found.called}")
    try:
        return base64.b64decode((secret.get("data") or {})[pods.TOKEN_KEY]).decode()
    except (KeyError, ValueError) as error:
        raise SpecError("kubeconfig", f"secret {found.called} in namespace {found.namespace} holds no token") from error


async def await_over(api: Api, found: Found, timeout_s: float) -> Found:
    """Wait until the Job is over; as it is then, or after the time."""
    until = time.monotonic() + timeout_s
    while not found.over and time.monotonic() < until:
        await asyncio.sleep(LOOK_S)
        found = await find(api, found.namespace, found.name)
    return found


async def remove(api: Api, found: Found, timeout_s: float) -> int:
    """Delete the Job and all that it owns; how many of the job's pods are left after the time."""
    base = f"/api/v1/namespaces/{found.namespace}"
    job = f"/apis/batch/v1/namespaces/{found.namespace}/jobs/{found.called}"
    for path in (job, f"{base}/secrets/{found.called}"):
        with contextlib.suppress(NotFound, Conflict):
            there = await _read(api, path)
            await api.ask("DELETE", path, body=_options(there))
    until = time.monotonic() + timeout_s
    query = urlencode(
        {"labelSelector": f"{names.LABEL_BY}={names.BY},{names.LABEL_JOB}={names.label_value(found.name)}"}
    )
    while True:
        left = len((await _read(api, f"{base}/pods?{query}")).get("items") or ())
        if not left or time.monotonic() >= until:
            return left
        await asyncio.sleep(LOOK_S)


def proxy_path(found: Found, pod: str) -> str:
    """Where the API server passes requests on to a master's port."""
    return f"/api/v1/namespaces/{found.namespace}/pods/{quote(pod)}:{masters.PORT}/proxy"
