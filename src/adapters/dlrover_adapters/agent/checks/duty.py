"""The duty of being checked: when an order says so, look, run the site's checks, work with the partners, and tell how it went.

One round is at work at a time. A newer one, or an order without any, ends it, with everything that it has started. Whatever
goes wrong here is an answer: a node that cannot be checked has not passed.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence

import structlog

from dlrover_core.job.checks import BASIC, FULL, CheckWork, ReportCheck
from dlrover_core.runtime.duties import Desk, Orders

from . import basic, scripts, workload
from .basic import Place
from .workload import Result, Work

WHAT_MAX = 500
SHARE = 0.9
"""Of the time limit that our parts may use: the rest is for ending them and for telling."""

log = structlog.get_logger("dlrover.agent")


class CheckDuty(Orders):
    """Checks this node; ``env`` is what workers are born with, ``site`` the site's own checks, ``folder`` for passing files.

    ``module``: as `Framework.CHECK`.
    """

    def __init__(
        self,
        place: Place,
        *,
        env: Callable[[], Mapping[str, str]],
        site: Sequence[str] = (),
        folder: str | None = None,
        module: str = "",
    ) -> None:
        super().__init__()
        self._place, self._env, self._site, self._folder, self._module = place, env, tuple(site), folder, module

    async def run(self, desk: Desk) -> None:
        """Until cancelled."""
        told = (0, 0)
        working: asyncio.Task[ReportCheck] | None = None
        at = (0, 0)
        try:
            while True:
                order = self.newest(desk)
                check = order.part(CheckWork) if not order.leave else CheckWork()
                wanted = (check.number, check.round)
                if working is not None and at != wanted:
                    await _ended(working)
                    working = None
                if working is None and wanted > told and wanted[0]:
                    at, working = wanted, asyncio.ensure_future(self._checked(desk, check))
                if working is not None and working.done():
                    desk.send(working.result())
                    told, working = at, None
                    continue
                await _either(self._news, working)
        finally:
            if working is not None:
                await _ended(working)

    async def _checked(self, desk: Desk, check: CheckWork) -> ReportCheck:
        began, limit_s = time.monotonic(), check.within_us / 1e6 * SHARE
        try:
            result = await self._result(desk, check, limit_s)
        except Exception as error:  # noqa: BLE001  # whatever happens, the leader waits for an answer
            result = Result(False, False, what=f"the check itself failed: {type(error).__name__}: {error}")
        took_us = result.took_us if check.kind == FULL else int((time.monotonic() - began) * 1e6)
        log.info("node check", number=check.number, round=check.round, **result._asdict())
        what = result.what[:WHAT_MAX]
        return ReportCheck(desk.node, check.number, check.round, result.ok, result.fit, took_us, result.alone_us, what)

    async def _result(self, desk: Desk, check: CheckWork, limit_s: float) -> Result:
        if desk.generation:
            return Result(False, False, what=f"workers of generation {desk.generation} still run here")
        began = time.monotonic()
        place = self._place._replace(others=check.size > 1, asked_us=check.at)
        found = await looked(place, limit_s)
        env = self._env()
        if check.round == 1:
            found += await scripts.problems(self._site, env, max(0.1, limit_s - (time.monotonic() - began)))
        if check.kind == BASIC:
            return Result(not found, not found, what="; ".join(found))
        index = int(desk.node.rsplit("-", 2)[1])
        task = Work(
            check.number,
            check.round,
            check.rank,
            check.size,
            check.store,
            desk.node,
            index * place.nproc,
            "; ".join(found),
        )
        left_s = max(0.1, limit_s - (time.monotonic() - began))
        return await workload.work(task, place.nproc, env, left_s, module=self._module, folder=self._folder)


async def looked(place: Place, limit_s: float) -> list[str]:
    """What the basic looks find; one that hangs, as on a dead file server, is itself a find."""
    loop = asyncio.get_running_loop()
    found: asyncio.Future[list[str]] = loop.create_future()

    def tell(problems: list[str]) -> None:
        if not found.done():
            found.set_result(problems)

    def look() -> None:
        problems = basic.problems(place)
        with contextlib.suppress(RuntimeError):  # the loop is gone
            loop.call_soon_threadsafe(tell, problems)

    # A daemon, not the loop's executor: nobody waits at the end for a look that never returns.
    threading.Thread(target=look, name="node check", daemon=True).start()
    done, _ = await asyncio.wait([found], timeout=limit_s / 2)
    return found.result() if done else [f"looking at disk, memory and devices did not end within {limit_s / 2:.0f} s"]


async def _either(news: asyncio.Event, working: asyncio.Task[ReportCheck] | None) -> None:
    """Wait for an order, or for the end of the work."""
    waiting = asyncio.ensure_future(news.wait())
    try:
        await asyncio.wait([waiting, *([working] if working is not None else [])], return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()


async def _ended(working: asyncio.Task[ReportCheck]) -> None:
    working.cancel()
    await asyncio.wait([working])
