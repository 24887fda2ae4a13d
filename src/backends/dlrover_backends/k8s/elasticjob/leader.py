"""Which of several operators leads: a Lease, as the rest of Kubernetes has it.

A rival's lease is over when it has not changed for its whole duration by this host's own clock; clocks are never compared. Times
have microseconds: a renewal within the second before would else change nothing, keep the version, and a rival could take over.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from datetime import datetime, timezone

import structlog

from dlrover_backends.k8s.api import Api, Json
from dlrover_backends.k8s.errors import ApiError, Conflict, NotFound
from dlrover_core.runtime.within import within

DURATION_S, TRY_S = 15.0, 2.0
NAME = "dlrover-operator"

log = structlog.get_logger("dlrover.operator")


def micros(wall_s: float) -> str:
    """A time as ``MicroTime`` is written."""
    return datetime.fromtimestamp(wall_s, timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


class Leader:
    """Leads while it holds the lease.

    api:       where the lease is
    namespace: in which namespace
    who:       this operator's name
    now, wall: steady seconds, and the time of day
    lease_s:   how long a lease lasts; it is renewed three times as often
    """

    def __init__(
        self,
        api: Api,
        namespace: str,
        who: str,
        *,
        now: Callable[[], float],
        wall: Callable[[], float],
        lease_s: float = DURATION_S,
    ) -> None:
        self._lease_s, self._renew_s = lease_s, lease_s / 3
        self._api, self._who, self._now, self._wall = api, who, now, wall
        self._path = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        self._namespace = namespace
        self._seen: tuple[str, float] = ("", float("-inf"))
        self._held: Json | None = None

    async def lead(self, work: Callable[[], Awaitable[None]]) -> None:
        """Wait for the lease, do ``work`` while it is held, and wait again; until cancelled, when the lease is given up."""
        while True:
            await self._acquired()
            log.info("this operator leads", holder=self._who)
            working, renewing = asyncio.ensure_future(work()), asyncio.ensure_future(self._renewed())
            try:
                await asyncio.wait({working, renewing}, return_when=asyncio.FIRST_COMPLETED)
                if working.done():
                    working.result()
            finally:
                for one in (working, renewing):
                    one.cancel()
                await asyncio.gather(working, renewing, return_exceptions=True)
                await asyncio.shield(self._release())
            log.warning("this operator leads no longer", holder=self._who)

    async def _acquired(self) -> None:
        while True:
            try:
                if await self._try():
                    return
            except ApiError as error:
                log.warning("the lease cannot be had", error=str(error))
            await asyncio.sleep(TRY_S)

    async def _try(self) -> bool:
        """Take the lease, if it is free or over. Raises `ApiError`."""
        try:
            found = await self._api.ask("GET", f"{self._path}/{NAME}")
        except NotFound:
            with contextlib.suppress(Conflict):
                body = {**_KIND, "metadata": {"name": NAME, "namespace": self._namespace}, "spec": self._spec(0, None)}
                self._held = await self._api.ask("POST", self._path, body=body)
                return True
            return False
        spec, version = found.get("spec") or {}, str(found["metadata"].get("resourceVersion") or "")
        if version != self._seen[0]:
            self._seen = (version, self._now())
        holder = spec.get("holderIdentity") or ""
        over = self._now() - self._seen[1] >= float(spec.get("leaseDurationSeconds") or self._lease_s)
        if holder not in {"", self._who} and not over:
            return False
        count = int(spec.get("leaseTransitions") or 0) + (holder != self._who)
        taken = {**found, "spec": self._spec(count, None)}
        with contextlib.suppress(Conflict):
            self._held = await self._api.ask("PUT", f"{self._path}/{NAME}", body=taken)
            return True
        return False

    async def _renewed(self) -> None:
        """Renew the lease; return when it is lost, or may soon be."""
        at = self._now()
        while self._held is not None:
            await asyncio.sleep(self._renew_s if self._now() - at < self._renew_s else min(TRY_S, self._renew_s / 2))
            spec = self._held["spec"]
            body = {**self._held, "spec": self._spec(int(spec.get("leaseTransitions") or 0), spec.get("acquireTime"))}
            left = at + self._lease_s - self._renew_s / 2 - self._now()
            if left <= 0:
                return
            try:
                self._held = await within(left, self._api.ask("PUT", f"{self._path}/{NAME}", body=body))
                at = self._now()
            except (Conflict, asyncio.TimeoutError):
                if not await self._still(left):
                    return
            except NotFound:
                return
            except ApiError as error:
                log.warning("the lease is not renewed yet", error=str(error))

    async def _still(self, left_s: float) -> bool:
        """Is the lease ours, after an answer that was lost? Then its newest version is held."""
        with contextlib.suppress(ApiError, asyncio.TimeoutError):
            found = await within(max(left_s, 0.1), self._api.ask("GET", f"{self._path}/{NAME}"))
            if (found.get("spec") or {}).get("holderIdentity") == self._who:
                self._held = found
                return True
        return False

    async def _release(self) -> None:
        held, self._held = self._held, None
        if held is None:
            return
        body = {**held, "spec": {**held["spec"], "holderIdentity": "", "renewTime": micros(self._wall())}}
        with contextlib.suppress(ApiError, asyncio.TimeoutError):
            await within(TRY_S, self._api.ask("PUT", f"{self._path}/{NAME}", body=body))

    def _spec(self, transitions: int, acquired: str | None) -> Json:
        now = micros(self._wall())
        return {
            "holderIdentity": self._who,
            "leaseDurationSeconds": max(1, round(self._lease_s)),
            "acquireTime": acquired or now,
            "renewTime": now,
            "leaseTransitions": transitions,
        }


_KIND = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease"}
