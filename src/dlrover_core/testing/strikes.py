"""The faults of level "local", each done to real processes, links and files. `LocalJob` says when, this says how."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

from dlrover_core.errors import PlanError
from dlrover_core.sim.faults import Fault, amount
from dlrover_core.testing import disk, inside, processes
from dlrover_core.testing.processes import Process, Stopped
from dlrover_core.testing.proxy import Proxy

SLOW_S, DUTY_S = 60.0, 0.1
DEAD_S, LOOK_S = 10.0, 0.005
DISK_MIB = 24
"""Room of the disk that `disk_full` fills: less than lets a log keep a reserve of its own."""

ON_DISK = ("disk_full", "torn_write", "bit_flip")
FATAL = ("kill_worker", "fail_worker", "kill_node")
"""After one of these a state like "all running" is one that came after an incident."""


Did = TypeVar("Did")


class Site(NamedTuple):
    """Where a job runs: what its processes bear, its folders, its launcher, its log's file, and its nodes' links."""

    mark: str
    job: str
    launcher: int
    state: Path
    errors: Path
    struck: Path
    database: Path
    proxies: dict[str, Proxy]


class Reader(Protocol):
    """Who reads the log meanwhile."""

    async def leader_pid(self) -> int:
        """The process that leads; 0 while none is known."""
        ...

    async def close(self) -> None:
        """Have the log no longer open."""
        ...


class Strikes:
    """Does faults, and takes back those that heal. ``notes`` is what was done, for people."""

    def __init__(self, site: Site, reader: Reader) -> None:
        self.site, self.reader = site, reader
        self.notes: list[str] = []
        self._stopped: list[Stopped] = []
        self._healing: list[asyncio.TimerHandle] = []
        self._slow: list[asyncio.Task[None]] = []
        self._does: dict[str, Callable[[Fault, Sequence[Process]], Awaitable[str]]] = {
            "kill_worker": self._kill_worker,
            "fail_worker": self._fail_worker,
            "hang_worker": self._hang_worker,
            "slow_worker": self._slow_worker,
            "kill_node": self._kill_node,
            "silence_node": self._silence_node,
            "partition": self._partition,
            "crash_master": self._crash_master,
            "pause_master": self._pause_master,
            "disk_full": self._disk_full,
            "torn_write": self._torn_write,
            "bit_flip": self._bit_flip,
        }

    async def strike(self, fault: Fault, found: Sequence[Process]) -> bool:
        """Do it to a job that has these processes; False: there is nobody to do it to now. Raises `PlanError`."""
        done = await self._does[fault.kind](fault, found)
        if done:
            self.notes.append(f"{fault}: {done}")
        return bool(done)

    async def close(self) -> None:
        """Let everybody go on."""
        for timer in self._healing:
            timer.cancel()
        for task in self._slow:
            task.cancel()
        await asyncio.gather(*self._slow, return_exceptions=True)
        for one in self._stopped:
            one.close()
        disk.empty(self.site.state)

    @property
    def healing(self) -> bool:
        """Is anything still to be taken back?"""
        now = asyncio.get_running_loop().time()
        return any(timer.when() > now for timer in self._healing)

    def _later(self, after_s: float, do: Callable[[], object]) -> None:
        self._healing.append(asyncio.get_running_loop().call_later(after_s, do))

    def _stop(self, pid: int, for_s: float = 0.0) -> Stopped:
        """Stop a process; for ever, where no time is said."""
        one = Stopped(pid)
        self._stopped.append(one)
        if for_s:
            self._later(for_s, one.go_on)
        return one

    # ---- workers

    async def _kill_worker(self, fault: Fault, found: Sequence[Process]) -> str:
        worker = _chosen(fault, processes.workers(found))
        if worker is None:
            return ""
        processes.send(worker.pid, signal.SIGKILL)
        return f"SIGKILL to {worker.name}, pid {worker.pid}"

    async def _fail_worker(self, fault: Fault, found: Sequence[Process]) -> str:
        worker = _chosen(fault, processes.workers(found))
        if worker is None:
            return ""
        (self.site.errors / f"raise-{worker.pid}").write_text(fault.cause or "chaos: fail_worker")
        processes.send(worker.pid, inside.FAIL)
        return f"{worker.name}, pid {worker.pid}, raises"

    async def _hang_worker(self, fault: Fault, found: Sequence[Process]) -> str:
        worker = _chosen(fault, processes.workers(found))
        if worker is None:
            return ""
        self._stop(worker.pid, amount(fault))
        return f"SIGSTOP to {worker.name}, pid {worker.pid}"

    async def _slow_worker(self, fault: Fault, found: Sequence[Process]) -> str:
        worker = _chosen(fault, processes.workers(found))
        if worker is None:
            return ""
        self._slow.append(asyncio.ensure_future(self._slowed(worker.pid, max(1.0, amount(fault)))))
        return f"{worker.name}, pid {worker.pid}, gets 1/{amount(fault):g} of its time"

    async def _slowed(self, pid: int, factor: float) -> None:
        one, loop = self._stop(pid), asyncio.get_running_loop()
        until = loop.time() + SLOW_S
        while loop.time() < until and processes.lives(pid):
            one.stop()
            await asyncio.sleep(DUTY_S * (1 - 1 / factor))
            one.go_on()
            await asyncio.sleep(DUTY_S / factor)

    # ---- nodes

    async def _kill_node(self, fault: Fault, found: Sequence[Process]) -> str:
        agent = _chosen(fault, processes.agents(found))
        if agent is None:
            return ""
        those = processes.family(found, agent.pid)
        for one in those:  # the agent first: it has no time to tell of the others
            processes.send(one.pid, signal.SIGKILL)
        return f"SIGKILL to {agent.node}, pid {agent.pid}, and its {len(those) - 1} processes"

    async def _silence_node(self, fault: Fault, found: Sequence[Process]) -> str:
        agent = _chosen(fault, processes.agents(found))
        if agent is None:
            return ""
        self._stop(agent.pid, amount(fault))
        return f"SIGSTOP to the agent of {agent.node}, pid {agent.pid}"

    async def _partition(self, fault: Fault, found: Sequence[Process]) -> str:
        agent = _chosen(fault, processes.agents(found))
        if agent is None:
            return ""
        proxy = next(proxy for place, proxy in self.site.proxies.items() if _is_at(agent.node, place))
        proxy.refuse()
        self._later(amount(fault), proxy.heal)
        return f"the link of {agent.node} is cut"

    # ---- masters

    async def _crash_master(self, fault: Fault, found: Sequence[Process]) -> str:
        leader = await self._leader(found)
        if leader is None:
            return ""
        if fault.amount:
            # Nobody may lead meanwhile: neither who stands by, nor whoever the launcher would start.
            for pid in (self.site.launcher, *(one.pid for one in _masters(found) if one.pid != leader.pid)):
                self._stop(pid, fault.amount)
        processes.send(leader.pid, signal.SIGKILL)
        return f"SIGKILL to the leading master, pid {leader.pid}"

    async def _pause_master(self, fault: Fault, found: Sequence[Process]) -> str:
        leader = await self._leader(found)
        if leader is None:
            return ""
        self._stop(leader.pid, amount(fault))
        return f"SIGSTOP to the leading master, pid {leader.pid}"

    async def _leader(self, found: Sequence[Process]) -> Process | None:
        pid = await self.reader.leader_pid()
        return next((one for one in _masters(found) if one.pid == pid), None)

    # ---- the log's file

    async def _disk_full(self, fault: Fault, found: Sequence[Process]) -> str:  # noqa: ARG002  # as the others
        ballast = await _aside(lambda: disk.fill(self.site.state))
        self._later(amount(fault), lambda: disk.empty(self.site.state))
        return f"{ballast} takes all room, {ballast.stat().st_size} bytes"

    async def _torn_write(self, fault: Fault, found: Sequence[Process]) -> str:  # noqa: ARG002  # as the others
        return await self._while_dead(found, lambda: disk.tear(self.site.database, self.site.job))

    async def _bit_flip(self, fault: Fault, found: Sequence[Process]) -> str:
        seq = fault.target if isinstance(fault.target, int) else 0
        copies = round(fault.amount) or 1
        return await self._while_dead(found, lambda: disk.flip(self.site.database, self.site.job, seq, copies=copies))

    async def _while_dead(self, found: Sequence[Process], do: Callable[[], str]) -> str:
        """Kill every master, do something to the log while nobody has it open, and let the launcher start others."""
        masters = _masters(found)
        if not masters:
            return ""
        with self._held(self.site.launcher):
            stopped = [self._stop(master.pid) for master in masters]
            # Before they die: whoever closes a database last moves its write-ahead log into it.
            await self.reader.close()
            for one in stopped:
                one.kill()
            deadline = asyncio.get_running_loop().time() + DEAD_S
            while any(processes.lives(one.pid) for one in masters):
                if asyncio.get_running_loop().time() > deadline:
                    raise TimeoutError(f"masters {[one.pid for one in masters]} survive SIGKILL for {DEAD_S:g} s")
                await asyncio.sleep(LOOK_S)
            return await _aside(do)

    @contextmanager
    def _held(self, pid: int) -> Iterator[None]:
        one = Stopped(pid)
        try:
            yield
        finally:
            one.close()


async def _aside(do: Callable[[], Did]) -> Did:
    """Disks are slow, and proxies must not wait for them."""
    return await asyncio.get_running_loop().run_in_executor(None, do)


def _masters(found: Sequence[Process]) -> list[Process]:
    return [one for one in found if one.name == "dlrover-master"]


def _is_at(node: str, place: str) -> bool:
    return node == place or node.startswith(f"{place}-")


def _chosen(fault: Fault, those: Sequence[Process]) -> Process | None:
    """The how-manyeth of those there are, counted around, or the one of that name."""
    target = fault.target
    if isinstance(target, int):
        return those[target % len(those)] if those else None
    return next((one for one in those if target == one.name or _is_at(one.node, target)), None)


def check(faults: Sequence[Fault], log: str) -> None:
    """Raises `PlanError` for what cannot be done to this log."""
    on_disk = [fault for fault in faults if fault.kind in ON_DISK]
    if on_disk and log:
        raise PlanError(f"{on_disk[0]}: needs the log in a file of the job's folder; this job's is {log}")


def routes(proxies: dict[str, Proxy]) -> str:
    """What agents are told about them."""
    return ",".join(f"{place}={proxy.address.rpartition(':')[2]}" for place, proxy in proxies.items())


def install(folder: Path, path: str) -> str:
    """Have the job's interpreters run `inside` first; what PYTHONPATH is to be, which was ``path``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sitecustomize.py").write_text(Path(inside.__file__).read_text(encoding="utf-8"), encoding="utf-8")
    return os.pathsep.join(filter(None, [str(folder), path]))
