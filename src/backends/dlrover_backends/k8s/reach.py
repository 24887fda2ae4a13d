"""A job's masters at a loopback port of this host, through the API server's proxy: a kubeconfig is all that it takes.

The proxy keeps ``Authorization`` for itself, so the job's token travels in a header of its own. Whoever connects here must show
the token all the same: other users of this host can dial the port.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, TypeVar

from aiohttp import web

from dlrover_backends.k8s import jobs, refusals
from dlrover_backends.k8s.errors import ApiError, Forbidden, Request, of_answer
from dlrover_backends.k8s.transport import Transport
from dlrover_core.errors import ConnectionLost, SpecError

T = TypeVar("T")

PLAIN_HEADER = "X-DLRover-Token"
HEALTH = "/v1/healthz"
ELSEWHERE = (421, 502, 503, 504)
"""Statuses of a master that stands by, and of one that cannot be reached: another one may do."""
FRESH_S = 2.0
LINES = 20
CALL_S = 120.0


class Reach:
    """A server in a thread of its own, for `with`; its loop is that of all requests to the API server.

    kubeconfig, context: as `Transport` takes them
    """

    def __init__(self, kubeconfig: str = "", context: str = "") -> None:
        self.api = Transport(kubeconfig, context)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="dlrover-reach", daemon=True)
        self._found: jobs.Found | None = None
        self._found_at = float("-inf")
        self._led = ""
        self._runner: web.ServerRunner | None = None

    def __enter__(self) -> Reach:  # noqa: PYI034  # typing.Self is of Python 3.11
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.call(self._close())
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def call(self, work: Coroutine[Any, Any, T], timeout_s: float | None = CALL_S) -> T:
        """Run a coroutine in the thread, and wait for it."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout_s)

    def serve(self, found: jobs.Found) -> str:
        """Pass requests on to these masters and those that follow them; ``host:port``, the same one each time.

        Raises `ConnectionLost` where none runs or answers, `SpecError` for a missing right, `ApiError`.
        """
        return self.call(self.served(found))

    def last_words(self, found: jobs.Found) -> str:
        """What the newest of the job's masters said last; empty: nothing is kept of it. Raises `ApiError`."""
        return self.call(self._last_words(found))

    async def _last_words(self, found: jobs.Found) -> str:
        for one in found.masters:
            path = f"/api/v1/namespaces/{found.namespace}/pods/{one['metadata']['name']}/log?tailLines={LINES}"
            status, _, data = await self.api.pass_on("GET", path, {}, b"")
            if status == 200 and data.strip():
                return data.decode(errors="replace").strip()
            for told in (one.get("status") or {}).get("containerStatuses") or ():
                if words := ((told.get("state") or {}).get("terminated") or {}).get("message"):
                    return str(words).strip()
        return ""

    async def served(self, found: jobs.Found) -> str:
        """The same, in this thread's loop."""
        self._found, self._found_at = found, self._loop.time()
        await self._check(found)
        if self._runner is None:
            self._runner = web.ServerRunner(web.Server(self._pass_on, access_log=None), shutdown_timeout=0.1)
            await self._runner.setup()
            await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        host, port = self._runner.addresses[0][:2]
        return f"{host}:{port}"

    async def _check(self, found: jobs.Found) -> None:
        """Does a master answer?"""
        if not found.running:
            raise ConnectionLost(f"no master of job {found.name!r} runs: {found.waits}")
        why = ""
        for pod in found.running:
            path = jobs.proxy_path(found, pod) + HEALTH
            status, headers, data = await self.api.pass_on("GET", path, {}, b"")
            error = of_answer(Request("GET", path), status, data.decode(errors="replace"), headers)
            if isinstance(error, Forbidden):
                raise SpecError("kubeconfig", refusals.missing_right(error))
            if status == 200:
                return
            why = error.message or f"HTTP status {status}"
        raise ConnectionLost(f"no master of job {found.name!r} answers yet: {why}")

    async def _pods(self) -> list[str]:
        """Masters' pods that run, the one that answered last first; looked up again now and then."""
        assert self._found is not None
        if self._loop.time() - self._found_at > FRESH_S:
            self._found = await jobs.find(self.api, self._found.namespace, self._found.name)
            self._found_at = self._loop.time()
        return sorted(self._found.running, key=lambda one: one != self._led)

    async def _pass_on(self, raw: web.BaseRequest) -> web.StreamResponse:
        headers = {key: value for key, value in raw.headers.items() if key.lower() in {"content-type", "accept"}}
        shown = raw.headers.get("Authorization", "").removeprefix("Bearer ").strip()
        if shown:
            headers[PLAIN_HEADER] = shown
        body, answer = await raw.read(), (503, {"Content-Type": "text/plain"}, b"no master runs\n")
        try:
            for pod in await self._pods():
                assert self._found is not None
                path = jobs.proxy_path(self._found, pod) + raw.path_qs
                status, told, data = await self.api.pass_on(raw.method, path, headers, body)
                answer = (status, {"Content-Type": told.get("Content-Type", "text/plain")}, data)
                if status not in ELSEWHERE:
                    self._led = pod
                    break
                self._found_at = float("-inf")
        except (ApiError, jobs.Missing) as error:
            answer = (503, {"Content-Type": "text/plain"}, f"{error}\n".encode())
        return web.Response(status=answer[0], headers=answer[1], body=answer[2])

    async def _close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
        await self.api.close()
