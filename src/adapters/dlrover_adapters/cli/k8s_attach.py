"""`dlrover attach k8s:NAMESPACE/JOB`: what the nodes of a job in a cluster print from now on, until the job ends."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from dlrover_adapters.cli.places import FAILED, INTERRUPTED
from dlrover_core.errors import ConnectionLost

if TYPE_CHECKING:
    from dlrover_backends.k8s import jobs
    from dlrover_backends.k8s.reach import Reach

WHO = "dlrover attach"
LOOK_S = 2.0
"""How often the job is asked for its end, and its masters for the live line."""


def run(reach: Reach, found: jobs.Found, over: Callable[[jobs.Found], int]) -> int:
    """Show the job until it ends, or until Ctrl-C. ``over`` says how it ended, and returns the exit status.

    Raises `SpecError` for a missing right, `ApiError`.
    """
    from dlrover_backends.k8s import jobs as kept

    showing = _Showing(reach, found)
    _say(f"attached to job {found.name}; Ctrl-C detaches, and the job goes on")
    if not found.running:
        _say(f"no master of it runs: {found.waits}")
    try:
        ended = reach.call(showing.run(), None)
    except KeyboardInterrupt:
        reach.call(showing.end())
        _say(f"detached from job {found.name}, which goes on")
        return INTERRUPTED
    except kept.Missing:
        _say(f"job {found.name} has been removed")
        return FAILED
    return over(ended)


class _Showing:
    """Runs in the thread of `Reach`."""

    def __init__(self, reach: Reach, found: jobs.Found) -> None:
        self._reach, self._found = reach, found
        self._over = asyncio.Event()
        self._running: asyncio.Task[Any] | None = None

    async def run(self) -> jobs.Found:
        """Until the job is over; as it is then. Raises `jobs.Missing`, `SpecError`, `ApiError`."""
        self._running = asyncio.current_task()
        outputs = asyncio.ensure_future(self._outputs())
        tasks: list[asyncio.Future[Any]] = [outputs]
        if sys.stderr.isatty():
            tasks.append(asyncio.ensure_future(self._line()))
        try:
            return await self._until_over(outputs)
        finally:
            for one in tasks:
                one.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._over.set()

    async def end(self) -> None:
        """End it now: an API server that does not answer is not waited for."""
        if self._running is not None:
            self._running.cancel()
            await self._over.wait()

    async def _until_over(self, outputs: asyncio.Future[None]) -> jobs.Found:
        from dlrover_backends.k8s import jobs
        from dlrover_backends.k8s.api import uid_of
        from dlrover_backends.k8s.errors import Busy, Unreachable

        found = self._found
        while not found.over:
            if outputs.done():
                outputs.result()
            await asyncio.sleep(LOOK_S)
            with contextlib.suppress(Unreachable, Busy):
                found = await jobs.find(self._reach.api, found.namespace, found.name)
            if uid_of(found.job) != uid_of(self._found.job):
                raise jobs.Missing(f"another job has the name {found.name} now")
        return found

    async def _outputs(self) -> None:
        from dlrover_backends.k8s import names
        from dlrover_backends.k8s.outputs import Outputs

        run, pods = self._found.run, f"/api/v1/namespaces/{self._found.namespace}/pods"

        def is_ours(pod: Mapping[str, Any]) -> bool:
            return any(one.get("uid") == run for one in pod["metadata"].get("ownerReferences") or ())

        def write(line: bytes) -> None:
            sys.stdout.buffer.write(line)
            sys.stdout.flush()

        selector = names.selector(self._found.name, run)
        await Outputs(self._reach.api, pods, selector, is_ours, write, earlier=False, who=WHO).run()

    async def _line(self) -> None:
        """The live line, while masters answer."""
        from dlrover_adapters.cli.line import Line
        from dlrover_adapters.cli.supervisor import watch
        from dlrover_backends.k8s import jobs

        line, token = Line(self._found.name), await jobs.token(self._reach.api, self._found)

        def show(status: Mapping[str, Any], _now: float) -> None:
            line.show(status, time.monotonic())

        try:
            while True:
                with contextlib.suppress(ConnectionLost):
                    await watch(await self._reach.served(self._found), token, None, show, LOOK_S)
                await asyncio.sleep(LOOK_S)
        finally:
            line.end()


def _say(words: str) -> None:
    print(f"{WHO}: {words}", file=sys.stderr, flush=True)
