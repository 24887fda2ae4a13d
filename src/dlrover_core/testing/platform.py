"""A simulated machine room: what a backend drives in place of its scheduler's API, and where schedulers' faults are made.

It starts and stops *machines*, each of which runs one node's agent, on hosts that can fail; it shows what there is, and tells
every change. It lies where it is told to: a start that raises though it happened, a list that is old, a stream of changes that
breaks off. Who writes a backend writes one over this, and plays plans against it:

```python
class MyBackend:
    def __init__(self, room: Platform) -> None: ...
    async def launch(self, node, token): ...   # await room.start(node.name, node)
    async def delete(self, name, token, grace_s): ...   # await room.stop(name, grace_s)
    async def observe(self): ...   # room.snapshot(), then room.changes(since)
    async def room(self, group): ...   # room.free
run = stage.play(plan, backend=MyBackend)
```

Each master gets a backend of its own, as it would in a process of its own: what a backend remembers dies with its master.
Names of machines are used once, for ever, as a scheduler's are that keeps books.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextvars import Context
from dataclasses import dataclass
from typing import Any, NamedTuple

from dlrover_core.errors import CoreError
from dlrover_core.job.orders import NodeLaunch
from dlrover_core.testing import virtual_loop

BOOT_S = 2.0
SEEN_LATE_S = 1.0
KILLED, PREEMPTED = "SIGKILL", "preempted"


class RoomError(CoreError):
    """The machine room did not answer as one would wish: what was asked may have been done, or not."""


class NameTaken(RoomError):
    """A machine of this name was started before. Nothing was done."""


class NoQuota(RoomError):
    """Nothing may be started for now. Nothing was done."""


class Machine(NamedTuple):
    """What the room says of one machine. ``phase``: pending, running, succeeded, failed, gone.

    ``notice``: that it will be taken away, ``notice_us`` from when this was said.
    """

    name: str
    phase: str
    exit_code: int = 0
    reason: str = ""
    host: str = ""
    notice: str = ""
    notice_us: int = 0


class Snapshot(NamedTuple):
    """All machines at one moment; `Platform.changes` since ``version`` tell what came after it."""

    version: int
    machines: tuple[Machine, ...]


@dataclass(slots=True)
class _Slot:
    """A machine, with what only the room knows: whose agent runs in it, and on which host it is."""

    launch: NodeLaunch
    host: str = ""
    task: asyncio.Task[str] | None = None
    word: str = ""
    told_after_s: float | None = None
    dark: bool = False
    booted: bool = False


class Platform:
    """All machines of one job. They outlive masters.

    ``live`` runs a node's agent on a host until it ends; ``crash`` lets its workers die with it, and tells their peers or not.
    There are the ``hosts`` named, one machine each; without any there are as many as it takes, called after the nodes' places.
    A machine boots for ``boot_s``; its end is seen ``notice_s`` later.

    ``notes`` are for backends: they outlive masters, as labels do that one hangs on things at a scheduler.

    ``blind`` names nodes whose host cannot be reached: nothing new is seen of them, and stopping them waits.
    """

    def __init__(
        self,
        live: Callable[[NodeLaunch, str], Coroutine[Any, Any, str]],
        *,
        crash: Callable[[str, bool], None] = lambda _node, _told: None,
        hosts: Sequence[str] = (),
        boot_s: float = BOOT_S,
        notice_s: float = 0.0,
    ) -> None:
        self._live, self._crash, self.boot_s, self.notice_s = live, crash, boot_s, notice_s
        self._hosts: dict[str, str] = dict.fromkeys(hosts, "")
        self._down: dict[str, int] = {}
        self._slots: dict[str, _Slot] = {}
        self._there: dict[str, Machine] = {}
        self._waiting: list[str] = []
        self._booted: dict[str, asyncio.Event] = {}
        self._history: list[tuple[float, Machine]] = []
        self._followers: list[asyncio.Queue[Machine | None]] = []
        self._stops: dict[str, asyncio.Task[None]] = {}
        self._errands: set[asyncio.Task[None]] = set()
        self.launched: list[str] = []
        self.ended: dict[str, str] = {}
        self.blind: set[str] = set()
        self.notes: dict[str, int] = {}
        # Lies, and the nodes that were told of so.
        self.denied: set[str] = set()
        self.errors = self.stuck = 0
        self.no_quota = False
        self.stale_s = 0.0

    # ---- what a backend asks

    @property
    def hosts(self) -> tuple[str, ...]:
        """The hosts that are up; none where there is no end of them."""
        return tuple(host for host in self._hosts if host not in self._down)

    @property
    def free(self) -> int | None:
        """How many more machines would start now; None: there is no end of them."""
        return sum(not self._hosts[host] for host in self.hosts) if self._hosts else None

    async def start(self, name: str, node: NodeLaunch, host: str = "") -> None:
        """Start a machine for a node, on a host of that name or on any that it need not avoid, as soon as one is free.

        Raises `NameTaken`, `NoQuota`, and `RoomError` where nobody knows whether it was started.
        """
        if self.no_quota:
            raise NoQuota(f"{name}: no machine may be started for now")
        if name in self._slots:
            raise NameTaken(f"{name} was started before")
        slot = self._slots[name] = _Slot(node, host)
        self.launched.append(node.node)
        if not self.errors:
            self._appear(name, slot)
            return
        # Whoever asks again at once does not see it yet.
        self.errors -= 1
        self._later(SEEN_LATE_S, self._appear, name, slot)
        raise RoomError(f"{name}: the answer was lost")

    def _appear(self, name: str, slot: _Slot) -> None:
        self._change(Machine(name, "pending"))
        if self.stuck:
            self.stuck -= 1
            return
        self._booted[name] = asyncio.Event()
        slot.task = virtual_loop.spawn(slot.launch.node, self._boot(name, slot))
        slot.task.add_done_callback(lambda task: self._over(name, task), context=Context())

    async def stop(self, name: str, grace_s: float) -> None:
        """End a machine, by itself within the grace, else by force; then forget it. An unknown name is fine."""
        if name in self._there and name not in self._stops:
            self._stops[name] = virtual_loop.spawn("room", self._stop(name, grace_s))

    def snapshot(self) -> Snapshot:
        """All machines there are."""
        if not self.stale_s:
            return Snapshot(len(self._history), tuple(self._there.values()))
        since, self.stale_s = asyncio.get_running_loop().time() - self.stale_s, 0.0
        old = [machine for at, machine in self._history if at <= since]
        there = {machine.name: machine for machine in old}
        return Snapshot(len(old), tuple(one for one in there.values() if one.phase != "gone"))

    async def changes(self, since: int) -> AsyncIterator[Machine]:
        """Every change after a `Snapshot` of that version. Ends when the stream breaks: what comes then is not told."""
        queue: asyncio.Queue[Machine | None] = asyncio.Queue()
        for _, machine in self._history[since:]:
            queue.put_nowait(machine)
        self._followers.append(queue)
        try:
            while (told := await queue.get()) is not None:
                yield told
        finally:
            self._followers.remove(queue)

    # ---- how machines live

    async def _boot(self, name: str, slot: _Slot) -> str:
        if self._hosts:
            self._waiting.append(name)
            self._place()
            await self._booted[name].wait()
        await asyncio.sleep(self.boot_s)
        if not self._hosts:
            # As many as it takes: a host for each place, and a spare one where that is to be avoided.
            node, host = slot.launch, f"host-{slot.launch.index}"
            slot.host = f"spare-{node.index}-{node.incarnation}" if host in node.avoid else host
        self._change(Machine(name, "running", host=slot.host))
        slot.booted = True
        return await self._live(slot.launch, slot.host)

    def _place(self) -> None:
        """Give free hosts to those that wait: the lowest that need not be avoided. Where all others are taken, any serves."""
        for name in list(self._waiting):
            slot = self._slots[name]
            free = [one for one in self.hosts if not self._hosts[one] and slot.host in ("", one)]
            if free:
                slot.host = next((one for one in free if one not in slot.launch.avoid), free[0])
                self._hosts[slot.host] = name
                self._waiting.remove(name)
                self._booted[name].set()

    def _over(self, name: str, task: asyncio.Task[str]) -> None:
        slot = self._slots[name]
        if name in self._waiting:
            self._waiting.remove(name)
        if self._hosts.get(slot.host) == name:
            self._hosts[slot.host] = ""
            self._place()
        if task.cancelled():
            machine = Machine(name, "failed", -9, slot.word or KILLED, slot.host)
        elif task.exception() is not None:
            machine = Machine(name, "failed", 1, str(task.exception()), slot.host)
        else:
            self.ended[slot.launch.node] = task.result()
            machine = Machine(name, "succeeded", host=slot.host)
        told_after_s = self.notice_s if slot.told_after_s is None else slot.told_after_s
        if told_after_s:
            self._later(told_after_s, self._end_seen, machine)
        else:
            self._end_seen(machine)

    def _end_seen(self, machine: Machine) -> None:
        self._slots[machine.name].dark = False
        seen = self._there.get(machine.name)
        if seen is not None and seen.phase in ("pending", "running"):
            self._change(machine)

    async def _stop(self, name: str, grace_s: float) -> None:
        slot = self._slots[name]
        task = slot.task
        while slot.dark or slot.launch.node in self.blind:  # noqa: ASYNC110  # what tests change; time is virtual
            await asyncio.sleep(1.0)
        if task is not None:
            if name not in self._waiting:
                await asyncio.wait({task}, timeout=grace_s)
            if not task.done():
                self.kill(name)
                await asyncio.gather(task, return_exceptions=True)
        self._change(Machine(name, "gone"))

    def _change(self, machine: Machine) -> None:
        if self._slots[machine.name].launch.node in self.blind:
            return
        self._there[machine.name] = machine
        if machine.phase == "gone":
            del self._there[machine.name]
        self._history.append((asyncio.get_running_loop().time(), machine))
        for follower in self._followers:
            follower.put_nowait(machine)

    def _later(self, after_s: float, call: Callable[..., None], *args: Any) -> None:
        Context().run(asyncio.get_running_loop().call_later, after_s, call, *args)

    # ---- what happens to machines

    def has(self, host: str) -> bool:
        """Is there such a host, up or down?"""
        return host in self._hosts

    @property
    def living(self) -> list[str]:
        """The nodes whose machines have not ended, in the order of their start."""
        return [slot.launch.node for slot in self._slots.values() if slot.task is not None and not slot.task.done()]

    @property
    def booted(self) -> list[str]:
        """Those of them whose agents have begun."""
        return [node for node in self.living if self._slots[self.of(node)].booted]

    def of(self, node: str) -> str:
        """The newest machine of a node that has not ended. Raises `LookupError`."""
        for name, slot in reversed(self._slots.items()):
            if slot.launch.node == node and slot.task is not None and not slot.task.done():
                return name
        raise LookupError(f"no machine of {node} lives")

    def host_of(self, node: str) -> str:
        """Where a node runs; empty: nowhere yet."""
        return self._slots[self.of(node)].host

    def occupied(self) -> dict[str, str]:
        """The hosts on which something runs, and which node."""
        return {host: self._slots[name].launch.node for host, name in self._hosts.items() if name}

    def kill(self, name: str, word: str = KILLED, told_after_s: float | None = None) -> None:
        """End a machine by force; the room has a word for it, and tells of it after ``notice_s`` or whatever is said here."""
        slot = self._slots[name]
        if slot.task is None or slot.task.done():
            return
        slot.word, slot.told_after_s = word, told_after_s
        slot.task.cancel()
        self._crash(slot.launch.node, not slot.dark)

    def lose(self, name: str) -> None:
        """Forget a machine without its having ended: somebody deleted it behind our back."""
        self._change(Machine(name, "gone"))

    def take(self, name: str) -> None:
        """Take a machine away without a word: when it is missed, it is gone."""
        if name in self._there:
            self._change(Machine(name, "gone", reason=PREEMPTED))
        self.kill(name, PREEMPTED)

    def give_notice(self, name: str, notice_s: float) -> None:
        """Say that a machine will be taken away, and do it then."""
        if name in self._there:
            self._change(self._there[name]._replace(notice="preemption", notice_us=round(notice_s * 1_000_000)))
            self._later(notice_s, self.kill, name, PREEMPTED)

    def flap(self, name: str, for_s: float) -> None:
        """Call a machine gone that is not, and there again after so long."""
        seen = self._there.get(name)
        if seen is not None:
            self.denied.add(self._slots[name].launch.node)
            self._change(Machine(name, "gone", reason="lost", host=seen.host))
            self._later(for_s, self._flapped, seen)

    def _flapped(self, seen: Machine) -> None:
        task = self._slots[seen.name].task
        if seen.name not in self._stops and seen.name not in self._there and task is not None and not task.done():
            self._change(seen)

    def take_down(self, host: str, word: str = "host down", told_after_s: float | None = None) -> None:
        """A host is gone, with what runs on it, until `bring_up`."""
        self._down[host] = self._down.get(host, 0) + 1
        name = self._hosts.get(host)
        if name:
            # Until it is told nobody can reach it there either.
            self._slots[name].dark = told_after_s is not None
            self.kill(name, word, told_after_s)

    def bring_up(self, host: str) -> None:
        """It is back, if nothing else keeps it down."""
        self._down[host] -= 1
        if not self._down[host]:
            del self._down[host]
            self._place()

    def break_streams(self) -> None:
        """Every stream of changes ends."""
        for follower in self._followers:
            follower.put_nowait(None)

    async def close(self) -> None:
        """End everything."""
        tasks = [*(slot.task for slot in self._slots.values() if slot.task is not None), *self._stops.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
