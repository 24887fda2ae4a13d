"""Masters as pods, in a cluster: found by the job's name, looked at, removed. `making` makes them."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import time
from typing import NamedTuple
from urllib.parse import quote, urlencode

from dlrover_backends.k8s import endings, masters, names, pods, refusals
from dlrover_backends.k8s.api import Api, Json
from dlrover_backends.k8s.errors import Busy, Conflict, Forbidden, NotFound, Unreachable
from dlrover_backends.k8s.masters import LABEL_ROLE, ROLE, RUN
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
    def run(self) -> str:
        """The run's name, as its masters are told it: the uid of what owns the nodes' pods."""
        (container,) = self.job["spec"]["template"]["spec"]["containers"]
        return next((str(one.get("value")) for one in container.get("env") or () if one["name"] == RUN), "")

    @property
    def owner(self) -> str:
        """Kind and name of what owns the Job; empty: nothing does."""
        for one in self.job["metadata"].get("ownerReferences") or ():
            return f"{one.get('kind', '')} {one.get('name', '')}".strip()
        return ""


def deletion(one: Json) -> Json:
    """DeleteOptions for this very object: another one of its name stays."""
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
    """Wait until the Job is over; as it is then, or after the time. Raises `Missing`, `SpecError`, `ApiError`."""
    until = time.monotonic() + timeout_s
    while not found.over and time.monotonic() < until:
        await asyncio.sleep(LOOK_S)
        with contextlib.suppress(Unreachable, Busy):
            found = await find(api, found.namespace, found.name)
    return found


async def remove(api: Api, found: Found, timeout_s: float) -> int:
    """Delete this very Job and all that it owns; how many of the job's pods are left after the time.

    Raises `SpecError` for a missing right, `ApiError`.
    """
    base = f"/api/v1/namespaces/{found.namespace}"
    job = f"/apis/batch/v1/namespaces/{found.namespace}/jobs/{found.called}"
    secret = f"{base}/secrets/{found.called}"
    try:
        with contextlib.suppress(NotFound, Conflict):  # another job may have the name now
            await api.ask("DELETE", job, body=deletion(found.job))
        with contextlib.suppress(NotFound, Conflict):
            there = await api.ask("GET", secret)
            owners = {one.get("uid") for one in there["metadata"].get("ownerReferences") or ()}
            if found.job["metadata"]["uid"] in owners:
                await api.ask("DELETE", secret, body=deletion(there))
    except Forbidden as error:
        raise SpecError("kubeconfig", refusals.missing_right(error)) from error
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
