"""What the platform has to know of the job as a whole, and what it says of it: sizes go out, admission comes in.

Platforms that start gangs, or keep queues, decide about a job and not about its nodes (`backend.Sizing`). A job that its
platform no longer admits is suspended, with its nodes given back, and goes on when the platform says so; a suspension that a
person has asked for stays the person's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from dlrover_core.job import job, nodes, notices
from dlrover_core.job.state import JobState
from dlrover_core.kernel.engine import Accepted, Command
from dlrover_core.rules import suspension
from dlrover_core.runtime.backend import HELD, RUNNING, SUSPENDED, Admission, Backend, Sizing, Wanted, sizes_of
from dlrover_core.runtime.leader import Leader
from dlrover_core.runtime.within import within

ANSWER_S = 30.0
AGAIN_S = 60.0
"""A platform may lose what it was told: it is told again after so long."""
REFUSED_S = 5.0
"""Seconds until a refused command is tried again: a set may be failing."""
BACK_OFF_S = (0.2, 1.0, 5.0, 15.0, 30.0)

log = structlog.get_logger("dlrover.master")


class Sizes:
    """Tells one backend what the job wants, and heeds its admissions. ``heard`` is called once the backend knows."""

    def __init__(self, master: Leader, backend: Backend, heard: Callable[[], None]) -> None:
        self._master, self._heard = master, heard
        self._sizing = backend if isinstance(backend, Sizing) else None
        self._news = asyncio.Event()
        self._told: Wanted | None = None
        self._said: Admission | None = None
        self._failures = 0
        self._tell_at = self._heed_at = 0.0

    @property
    def known(self) -> bool:
        """Does the backend know what the job wants, as far as it has to?"""
        return self._sizing is None or self._told is not None

    def news(self) -> None:
        """The state has changed."""
        self._news.set()

    def said(self, admission: Admission) -> None:
        """The platform has spoken."""
        self._said = admission
        self._news.set()

    async def run(self) -> None:
        """Until cancelled."""
        if self._sizing is None:
            return
        while True:
            if self._master.may_order():
                try:
                    await self._tell()
                    await self._heed()
                    self._failures = 0
                except Exception as error:  # noqa: BLE001  # a backend may raise anything; it is asked again
                    log.warning("the platform is not told the sizes", error=f"{type(error).__name__}: {error}")
                    await asyncio.sleep(BACK_OFF_S[min(self._failures, len(BACK_OFF_S) - 1)])
                    self._failures += 1
                    continue
            await self._wait()

    async def _wait(self) -> None:
        loop = asyncio.get_running_loop()
        due = [at for at in (self._tell_at, self._heed_at) if at > loop.time()]
        timer = loop.call_at(min(due, default=loop.time() + AGAIN_S), self._news.set)
        try:
            await self._news.wait()
        finally:
            timer.cancel()
        self._news.clear()

    async def _tell(self) -> None:
        wanted, loop = wanted_by(self._master.state), asyncio.get_running_loop()
        if self._sizing is None or (wanted == self._told and loop.time() < self._tell_at):
            return
        await within(ANSWER_S, self._sizing.sized(wanted, self._master.token))
        self._told, self._tell_at = wanted, loop.time() + AGAIN_S
        self._heard()

    async def _heed(self) -> None:
        """Suspend a job that is not admitted and has nodes; let one go on that is."""
        said, state, loop = self._said, self._master.state, asyncio.get_running_loop()
        if said is None or loop.time() < self._heed_at:
            return
        reason = f"{notices.SAYS}{said.reason}"[: nodes.TEXT_MAX]
        if said.admitted:
            if held(state):
                await self._submit(job.ResumeJob(reason))
        elif state.job.forms and not state.job.pausing and _holds(state):
            # What is on no storage is lost either way: the platform has given the quota to others.
            lose = any(True for _ in suspension.losses(state))
            await self._submit(job.SuspendJob(reason, keep_nodes=False, lose=lose))

    async def _submit(self, command: Command) -> None:
        reply = await self._master.submit(command)
        if not isinstance(reply, Accepted):
            self._heed_at = asyncio.get_running_loop().time() + REFUSED_S
            log.warning("what the platform says is refused for now", command=type(command).__name__, reason=str(reply))


def wanted_by(state: JobState) -> Wanted:
    """What a job in this state wants."""
    now = SUSPENDED if state.job.freed or state.job.pausing else RUNNING
    if now == SUSPENDED and held(state):
        now = HELD
    if not state.job.live:
        now = state.job.state if state.job.over else "stopped"
    raised = state.incidents.memory
    sizes = (
        # Standbys are to fit the nodes to come. Quotas and gangs are asked for what the spec says.
        one._replace(memory_mib=raised.get(one.name, one.memory_mib)) if one.standby else one
        for one in sizes_of(state.job.spec)
    )
    return Wanted(tuple(sizes), now, state.job.reason)


def held(state: JobState) -> bool:
    """Is the job without nodes, or about to be, because its platform says so?"""
    return state.job.suspension is not None and state.job.suspension.reason.startswith(notices.SAYS)


def _holds(state: JobState) -> bool:
    """Has the platform anything of this job?"""
    return any(node.state != "planned" and not node.released for node in state.nodes.nodes.values())
