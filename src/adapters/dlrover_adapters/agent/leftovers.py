"""What workers leave running: found, waited for, named, stopped and reaped.

A worker's children stay in its session unless they leave on purpose, as daemons do. The agent is a subreaper: whoever leaves,
with whatever environment, becomes a child of the agent's when its parent is dead. So what a worker left is the rest of its
session, and the children of the agent that nobody here has started, with all that descends from them. Where the workers have
a control group of their own, it is what is in the group, too.

That holds in a process that is an agent and nothing else, which says so by `adopt`. A program that embeds a launcher starts
children of its own, which nobody here knows: there, only the workers' sessions are looked at.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Collection, Sequence

import structlog

from dlrover_core.host.cgroups import Group, own
from dlrover_core.host.procfs import Member, children_of_ours, hold, kill, processes, read_stat, reap
from dlrover_core.words import first_few

from .children import Child, known
from .process import SCANS_MAX, busy_sessions, wait_all

REAP_S, END_S = 5.0, 10.0
ASK_S = 0.5
"""How often it is asked, while leavings have their grace, whether the job is to be stopped."""

SWEEPER = "dlrover-sweeper"
"""Of a node that a scheduler has started, it is a child of its agent's, and removes its folder when all else is dead."""

_adopting = False

_log = structlog.get_logger(__name__)


def adopt() -> None:
    """Take unknown children of this process for orphans of its workers from now on. For a process that is an agent alone."""
    global _adopting  # noqa: PLW0603  # being a parent is the process's affair
    _adopting = True


def left(sessions: Collection[int], ours: Collection[str], group: Group | None = None) -> list[Member]:
    """What dead workers have left alive: in these ``sessions``, whose leaders they were, and beyond them.

    Children of the agent's that go by a name of ``ours`` are being made at this moment, and are nobody's leavings. ``group`` is
    the workers' control group.
    """
    return [one for one in _all_left(sessions, ours, group) if one.lives]


def wait(
    sessions: Collection[int],
    ours: Collection[str],
    bound_s: float,
    group: Group | None = None,
    asked: Callable[[], bool] = lambda: False,
) -> list[Member]:
    """Wait until nothing is left alive, at most ``bound_s``; what still is. Blocks. The dead are reaped as they die.

    ``asked`` says, in any thread, whether the job is to be stopped: then nothing is waited for any longer.
    """
    deadline = time.monotonic() + bound_s
    while found := left(sessions, ours, group):
        wait_all([fd for one in found if (fd := hold(one)) is not None], min(deadline, time.monotonic() + ASK_S))
        for one in found:
            reap(one)
        reap_orphans(ours)
        if time.monotonic() >= deadline or asked():
            return left(sessions, ours, group)
    return []


def end(sessions: Collection[int], ours: Collection[str], bound_s: float, group: Group | None = None) -> list[Member]:
    """SIGKILL what is left, wait for the deaths, reap what became ours; what lives on after ``bound_s``. Blocks."""
    deadline = time.monotonic() + bound_s
    found: list[Member] = []
    for _ in range(SCANS_MAX):
        # Again and again: what is being killed may be starting others, and orphans come only when their parent is dead.
        found = left(sessions, ours, group)
        wait_all([fd for one in found if (fd := kill(one)) is not None], deadline)
        for one in found:
            reap(one)
        reap_orphans(ours)
        if not found or time.monotonic() >= deadline:
            break
    return found


def reap_orphans(ours: Collection[str]) -> int:
    """Take dead children that nobody here has started out of the process table; how many."""
    dead = [one for one in _orphans(ours) if not one.lives]
    for one in dead:
        reap(one)
    return len(dead)


def named(found: Sequence[Member]) -> str:
    """For people."""
    return first_few([f"{_line(one)} (pid {one.pid})" for one in found])


def _line(one: Member) -> str:
    try:
        with open(f"/proc/{one.pid}/cmdline", "rb") as file:
            words = file.read(4096).replace(b"\0", b" ").decode("ascii", "backslashreplace").strip()
    except OSError:
        words = ""
    return "".join(char if char.isprintable() else "?" for char in words)[:80] or one.name


def _all_left(sessions: Collection[int], ours: Collection[str], group: Group | None) -> list[Member]:
    orphans = _orphans(ours)
    if group is not None:
        inside = group.members()
        mine = known()  # asked last: a spare is put in only once it is known
        orphans += [one for pid in inside if pid not in mine and (one := read_stat(pid)) is not None]
    if not sessions and not any(one.lives for one in orphans):
        return []  # mostly; and a restart waits for this
    there = list(processes())
    found = {one.pid: one for one in there if one.session in sessions and one.pid not in sessions}
    found.update((one.pid, one) for one in orphans)
    children: dict[int, list[Member]] = {}
    for one in there:
        children.setdefault(one.parent, []).append(one)
    open_ends = [*found]
    while open_ends:
        for one in children.get(open_ends.pop(), ()):
            if one.pid not in found:
                found[one.pid] = one
                open_ends.append(one.pid)
    return list(found.values())


def _orphans(ours: Collection[str]) -> list[Member]:
    """Children of this process that it has not started: what it starts itself is known, or in its own session."""
    if not _adopting:
        return []
    own = os.getsid(0)
    children = [one for one in children_of_ours() if one.session != own and one.name not in {*ours, SWEEPER}]
    mine = known()  # asked last: what was started meanwhile is among them
    return [one for one in children if one.pid not in mine]


class Leavings:
    """What the dead workers of one node have left running. ``gone`` is told of each that is dead and reaped.

    ``cgroup`` names the control group that is made for the workers, from `begin` to `close`; empty: none.
    """

    def __init__(
        self, ours: Collection[str], gone: Callable[[int], None], say: Callable[[str], None], cgroup: str = ""
    ) -> None:
        self._ours, self._gone, self._say, self._cgroup = ours, gone, say, cgroup
        self._group: Group | None = None
        self._workers: list[Child] = []
        self._reaping: asyncio.Task[None] | None = None

    async def begin(self) -> None:
        """Have the control group, if that can be; reap orphans from now on."""
        if self._cgroup:
            try:
                self._group = await asyncio.to_thread(lambda: Group.made(self._cgroup, own()))
            except OSError as error:
                _log.info("workers have no control group of their own", reason=str(error))
        self._reaping = asyncio.create_task(self._reap(), name="reaping of orphans")

    async def _reap(self) -> None:
        while True:
            await asyncio.sleep(REAP_S)
            with contextlib.suppress(RuntimeError):  # no thread can be started now
                await asyncio.to_thread(reap_orphans, self._ours)

    async def take(self, pid: int) -> None:
        """Put a process that is to be a worker into the control group."""
        if self._group is None:
            return
        try:
            await asyncio.to_thread(self._group.take, pid)
        except ProcessLookupError:
            return  # it has ended, which its pidfd tells
        except OSError as error:
            _log.info("a worker stays outside the control group", pid=pid, reason=str(error))

    async def spare(self, workers: Sequence[Child]) -> list[Child]:
        """Let the sessions of these, who ended well, live on until `end`; those in whose session nobody is left."""
        busy = await asyncio.to_thread(busy_sessions, [one.pid for one in workers])
        self._workers += [one for one in workers if one.pid in busy]
        return [one for one in workers if one.pid not in busy]

    async def end(self, grace_s: float = 0.0, asked: Callable[[], bool] = lambda: False) -> None:
        """End everything, after ``grace_s`` in which it may end by itself; then it is named. ``asked``: as in `wait`."""
        workers, self._workers = self._workers, []
        sessions, group = [one.pid for one in workers], self._group
        found = await asyncio.to_thread(left, sessions, self._ours, group)
        if found and grace_s > 0:
            self._say(f"waiting up to {grace_s:g} s (stop_grace_s) for what the script left running: {named(found)}")
            found = await asyncio.to_thread(wait, sessions, self._ours, grace_s, group, asked)
        if found:
            words = named(found)
            found = await asyncio.to_thread(end, sessions, self._ours, END_S, group)
            if found and group is not None:
                await asyncio.to_thread(group.kill)  # it goes on starting others; so the spares go with it
                found = await asyncio.to_thread(end, sessions, self._ours, END_S, group)
            if grace_s > 0:
                when = "as the job was to stop" if asked() else f"{grace_s:g} s after the script had ended well"
                self._say(f"stopped what still ran {when}: {words}")
            if found:
                self._say(f"cannot be killed, and is left behind: {named(found)}")
        for one in workers:
            one.reap()
            self._gone(one.pid)

    async def close(self) -> None:
        """End everything now, spares in the control group included, and remove the group. Idempotent."""
        await self.end()
        task, self._reaping = self._reaping, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        group, self._group = self._group, None
        if group is not None and not await asyncio.to_thread(group.end, END_S):
            _log.warning("a control group cannot be removed", folder=group.folder)
