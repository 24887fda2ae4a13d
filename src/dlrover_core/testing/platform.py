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
from dlrover_core.runtime.backend import AVOIDED
from dlrover_core.testing import virtual_loop

BOOT_S = 2.0
SEEN_LATE_S = 1.0
KILLED, PREEMPTED = "SIGKILL", "preempted"
NO_ROOM = "no room: every host is taken"


class RoomError(CoreError):
    """The machine room did not answer as one would wish: what was asked may have been done, or not."""


class NameTaken(RoomError):
    """A machine of this name was started before. Nothing was done."""


class NoQuota(RoomError):
    """Nothing may be started for now. Nothing was done."""


class Machine(NamedTuple):
    """What the room says of one machine. ``phase``: pending, running, lost, succeeded, failed, gone.

    ``notice``: that it will be taken away, ``notice_us`` from when this was said, at ``said_s`` by the loop's clock. ``waits``:
    why it has no host yet; ``domain``: the failure domain of its host.
    """

    name: str
    phase: str
    exit_code: int = 0
    reason: str = ""
    host: str = ""
    notice: str = ""
    notice_us: int = 0
    waits: str = ""
    domain: str = ""
    said_s: float = 0.0


class Snapshot(NamedTuple):
    """All machines at one moment; `Platform.changes` since ``version`` tell what came after it."""

    version: int
    machines: tuple[Machine, ...]


@dataclass(slots=True)
class _Slot:
    """A machine, with what only the room knows: whose agent runs in it, and on which host it is.

    ``dark``: its host has no power; ``unreached``: the room cannot reach its host; ``unseen``: how it has ended meanwhile.
    """

    launch: NodeLaunch
    host: str = ""
    task: asyncio.Task[str] | None = None
    word: str = ""
    told_after_s: float | None = None
    dark: bool = False
    unreached: bool = False
    unseen: Machine | None = None
    booted: bool = False


class Pool:
    """The hosts of one or several machine rooms, one machine each: whoever waits longest is placed first.

    A ``held`` queue places nobody, and says these words.
    """

    def __init__(self, hosts: Sequence[str]) -> None:
        self.hosts: dict[str, str] = dict.fromkeys(hosts, "")
        self.down: dict[str, int] = {}
        self.held = ""
        self._waiting: list[tuple[Platform, str]] = []

    @property
    def up(self) -> tuple[str, ...]:
        """The hosts that are up."""
        return tuple(host for host in self.hosts if host not in self.down)

    @property
    def free(self) -> list[str]:
        """Those of them on which a machine would start now."""
        return [host for host in self.up if not self.hosts[host]] if not self.held else []

    def queue(self, platform: Platform, name: str) -> None:
        """A machine wants a host."""
        self._waiting.append((platform, name))
        self.place()

    def withdraw(self, platform: Platform, name: str) -> None:
        """It wants none any more."""
        if (platform, name) in self._waiting:
            self._waiting.remove((platform, name))

    def waits(self, platform: Platform, name: str) -> bool:
        """Has it no host yet?"""
        return (platform, name) in self._waiting

    def release(self, host: str, name: str) -> None:
        """A machine has ended."""
        if self.hosts.get(host) == name:
            self.hosts[host] = ""
            self.place()

    def place(self) -> None:
        """Give free hosts to those that wait: the lowest that need not be avoided. The others are told why they have none."""
        for platform, name in list(self._waiting):
            why = platform.placed(name, self.free)
            if not why:
                self._waiting.remove((platform, name))
            else:
                platform.told_to_wait(name, self.held or why)

    def hold(self, words: str) -> None:
        """Place nobody from now on, for this reason; empty: place again."""
        self.held = words
        self.place()


class Platform:
    """All machines of one job. They outlive masters.

    ``live`` runs a node's agent on a host until it ends; ``crash`` lets its workers die with it, and tells their peers or not.
    There are the ``hosts`` named, one machine each, or those of a ``pool`` that several rooms share; without any there are as
    many as it takes, called after the nodes' places. A machine that must ``avoid`` all that are free waits, and says so.
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
        pool: Pool | None = None,
        boot_s: float = BOOT_S,
        notice_s: float = 0.0,
    ) -> None:
        self._live, self._crash, self.boot_s, self.notice_s = live, crash, boot_s, notice_s
        self.pool = pool if pool is not None else Pool(hosts)
        self.domains: dict[str, str] = {}
        self._slots: dict[str, _Slot] = {}
        self._there: dict[str, Machine] = {}
        self._booted: dict[str, asyncio.Event] = {}
        self._history: list[tuple[float, Machine]] = []
        self._followers: list[asyncio.Queue[Machine | None]] = []
        self._stops: dict[str, asyncio.Task[None]] = {}
        self._warned: dict[str, int] = {}
        self._warnings = 0
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
        return self.pool.up

    @property
    def free(self) -> int | None:
        """How many more machines would start now; None: there is no end of them."""
        return len(self.pool.free) if self.pool.hosts else None

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
        if self.pool.hosts:
            self.pool.queue(self, name)
            await self._booted[name].wait()
        await asyncio.sleep(self.boot_s)
        if not self.pool.hosts:
            # As many as it takes: a host for each place, and a spare one where that is to be avoided.
            node, host = slot.launch, f"host-{slot.launch.index}"
            slot.host = f"spare-{node.index}-{node.incarnation}" if host in node.avoid else host
        self._change(Machine(name, "running", host=slot.host, domain=self.domains.get(slot.host, "")))
        slot.booted = True
        return await self._live(slot.launch, slot.host)

    def placed(self, name: str, free: Sequence[str]) -> str:
        """Give a machine the first of these hosts that it may have; why it can have none, empty: it has one."""
        slot = self._slots[name]
        fitting = [one for one in free if slot.host in ("", one)]
        if not fitting:
            return NO_ROOM
        host = next((one for one in fitting if one not in slot.launch.avoid), "")
        if not host:
            return f"{AVOIDED}: {', '.join(fitting)}"
        slot.host = host
        self.pool.hosts[host] = name
        seen = self._there.get(name)
        if seen is not None and seen.waits:
            self._change(Machine(name, "pending", host=host))
        self._booted[name].set()
        return ""

    def told_to_wait(self, name: str, words: str) -> None:
        """A machine has no host now, for this reason."""
        seen = self._there.get(name)
        if seen is not None and seen.waits != words:
            self._change(Machine(name, "pending", waits=words))

    def _over(self, name: str, task: asyncio.Task[str]) -> None:
        slot = self._slots[name]
        self.pool.withdraw(self, name)
        self.pool.release(slot.host, name)
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
        slot = self._slots[machine.name]
        if slot.unreached and not slot.dark:
            slot.unseen = machine
            return
        slot.dark = slot.unreached = False
        seen = self._there.get(machine.name)
        if seen is not None and seen.phase in ("pending", "running", "lost"):
            self._change(machine)

    async def _stop(self, name: str, grace_s: float) -> None:
        slot = self._slots[name]
        task = slot.task
        while slot.dark or slot.unreached or slot.launch.node in self.blind:  # noqa: ASYNC110  # what tests change; time is virtual
            await asyncio.sleep(1.0)
        if task is not None:
            if not self.pool.waits(self, name):
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
        return host in self.pool.hosts

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

    def machine_on(self, host: str) -> str:
        """The machine that a host is taken by; empty: none."""
        return self.pool.hosts.get(host, "")

    def occupied(self) -> dict[str, str]:
        """The hosts on which something runs, and which node."""
        return {
            host: self._slots[name].launch.node
            for host, name in self.pool.hosts.items()
            if name and name in self._slots
        }

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
        seen = self._there.get(name)
        if seen is not None and seen.phase in ("pending", "running", "lost"):
            self._warnings += 1
            self._warned[name] = self._warnings
            now = asyncio.get_running_loop().time()
            self._change(seen._replace(notice="preemption", notice_us=round(notice_s * 1_000_000), said_s=now))
            self._later(notice_s, self._take_warned, name, self._warnings)

    def _take_warned(self, name: str, number: int) -> None:
        """Unless it was said later that it stays, or goes at another time."""
        if self._warned.get(name) == number:
            self.kill(name, PREEMPTED)

    def withdraw_notice(self, name: str) -> None:
        """Say that a machine will not be taken away after all; nothing comes of what was said."""
        seen = self._there.get(name)
        if seen is not None and self._warned.pop(name, 0):
            self._change(seen._replace(notice="", notice_us=0, said_s=0.0))

    def reach(self, name: str, *, lost: bool) -> None:
        """The room cannot reach the host of a machine, or can again: it does not know how the machine fares, which runs on."""
        seen, slot = self._there.get(name), self._slots[name]
        if seen is None or seen.phase != ("running" if lost else "lost"):
            return
        slot.unreached = lost
        self._change(
            seen._replace(phase="lost" if lost else "running", reason="its host does not answer" if lost else "")
        )
        if slot.unseen is not None and not lost:
            self._end_seen(slot.unseen)

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
        self.pool.down[host] = self.pool.down.get(host, 0) + 1
        name = self.pool.hosts.get(host)
        if name and name in self._slots:
            # Until it is told nobody can reach it there either.
            self._slots[name].dark = told_after_s is not None
            self.kill(name, word, told_after_s)

    def bring_up(self, host: str) -> None:
        """It is back, if nothing else keeps it down."""
        self.pool.down[host] -= 1
        if not self.pool.down[host]:
            del self.pool.down[host]
            self.pool.place()

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
