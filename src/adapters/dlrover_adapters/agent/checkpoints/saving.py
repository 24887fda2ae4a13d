"""The agent's side of the saver: made when the first rank says that it saves, replaced when it dies, and handed everything again.

What the saver must know at any time is kept here as levels (arenas, copies, which slots are held, whom it serves); orders that
were under way when it died are given to its successor. An order that has killed `DEATHS_MAX` of them fails instead; and where
none lives, the next one is tried when somebody wants something of it again, after a while. A storage that hangs is a storage
that fails: a saver that moves nothing for `STALL_S` is killed, and what it was to do with storage has failed. One that hangs
itself answers no question, and is killed too.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

import structlog

from dlrover_adapters.agent import wire
from dlrover_adapters.agent.children import Child
from dlrover_adapters.agent.config import LaunchConfig
from dlrover_adapters.agent.minding import minded
from dlrover_adapters.agent.nursery import Spare
from dlrover_core.checkpoint.arena import ArenaBroken
from dlrover_core.errors import MalformedMessage
from dlrover_core.runtime.watchdog import Watch
from dlrover_core.runtime.within import within

from .arenas import MEMORY, OBJECTS, REPLICA, Arena, Arenas, NoRoom, Owner

USELESS_MAX = 3
"""Savers in a row that died without having done anything; then there is none for a while."""
REST_S, REST_MAX_S = 1.0, 60.0
DEATHS_MAX = 3
STALL_S, STALL_LOOK_S = 60.0, 5.0
UNKILLABLE_S = 5.0
"""A process that hangs in the kernel for so long after SIGKILL is left to itself: nothing of its own will ever run again."""
STUCK_MAX = 3
"""With so many of them nothing more is tried with storage until one has ended: each keeps the memory that it was reading."""
STORES = ("persist", "seal")
BACKLOG_MAX = 256
RETRY_S = 0.02
HUNG_TIMES = 6
"""A saver has so many times ``hung_s`` to answer: its threads run at low priority, and may hold Python's lock while they wait for
a processor."""

log = structlog.get_logger("dlrover.agent")


class Unsaved(Exception):
    """An order came to nothing; the words are for people. ``lost``: the state is not in memory any more, or damaged there.

    ``refused``: another node, which lives, did not want it.
    """

    def __init__(self, message: str, *, lost: bool = False, refused: bool = False) -> None:
        super().__init__(message)
        self.lost, self.refused = lost, refused


class Done(NamedTuple):
    """The answer to an order, and the descriptor that came with it (ours to close; -1: none)."""

    body: dict[str, Any]
    fd: int


class Serving(NamedTuple):
    """How other nodes reach the saver: it listens on ``bind``, they dial ``host``; they prove ``run`` and ``token``."""

    run: str
    token: bytes
    bind: str
    host: str
    tls: tuple[str, ...] = ()


class _Pending:
    """An order that has no answer yet."""

    def __init__(self, body: dict[str, Any], answer: asyncio.Future[Done]) -> None:
        self.body, self.answer, self.deaths = body, answer, 0


class Saving:
    """One agent's saver. Nothing is made before `begin`. ``changed`` is called when it can be reached at another address."""

    def __init__(
        self,
        config: LaunchConfig,
        arenas: Arenas,
        make: Callable[[], Awaitable[Spare]],
        gone: Callable[[int], None],
    ) -> None:
        self._config, self._arenas, self._make, self._gone = config, arenas, make, gone
        self.changed: Callable[[], None] = lambda: None
        self.address = ""
        self.progress = 0, 0
        """Of what is being written to storage, the bytes that are, of how many, as the saver said last; 0: it has not said."""
        self._saver: Spare | None = None
        self._minding: Watch | None = None
        self._life: asyncio.Task[None] | None = None
        self._rest_until, self._rest_s, self._why = 0.0, REST_S, ""
        self._moved_at = 0.0
        self._stuck: list[Child] = []
        self._answered = self._closing = False
        self._keys = itertools.count(1)
        self._pending: dict[int, _Pending] = {}
        self._backlog: list[tuple[dict[str, Any], tuple[int, ...]]] = []
        self._writing = False
        self._places: dict[int, int] = {}
        self._copies: dict[int, int] = {}  # the server's numbers by arena
        self._held: list[list[int]] = []
        self._generation = 0
        self._hasty = False
        self._serving: Serving | None = None
        self._reachable = asyncio.Event()

    @property
    def pid(self) -> int:
        """The saver's, or 0 while there is none."""
        return self._saver.child.pid if self._saver is not None else 0

    @property
    def begun(self) -> bool:
        """Was one asked for?"""
        return self._life is not None

    def begin(self) -> None:
        """Have one, unless the last ones were of no use just now. Idempotent."""
        if self._closing or (self._life is not None and not self._life.done()):
            return
        if asyncio.get_running_loop().time() >= self._rest_until:
            if self._serving is not None:
                self._reachable.clear()
            self._life = asyncio.create_task(self._live(), name="saver")

    def named(self, node: str) -> None:
        """The node has its name: it is in the saver's title from now on."""
        self._config = self._config._replace(node=node)
        self._send(self._title())

    def _title(self) -> dict[str, Any]:
        return {"op": "title", "title": f"dlrover saver --job {self._config.job} --node {self._config.node}"}

    # ---- its life

    async def _live(self) -> None:
        useless, loop = 0, asyncio.get_running_loop()
        while not self._closing and useless < USELESS_MAX:
            try:
                saver = self._saver = await self._make()
            except Exception as error:  # noqa: BLE001  # whatever it is, there is none, and training goes on
                useless, self._why = useless + 1, str(error) or type(error).__name__
                continue
            loop.add_reader(saver.link, self._hear, saver)
            self._answered, self._moved_at = False, loop.time()
            self._hand_over()
            self._minding = minded("saver", saver.child, HUNG_TIMES * self._config.hung_s, self._ask)
            self._minding.open()
            exit_code = await self._until_dead(saver)
            self._why = "it hangs, and cannot be killed" if exit_code is None else f"it died with exit code {exit_code}"
            dropped = self._bury(saver)
            if self._answered:
                self._rest_s = REST_S
            useless = 0 if self._answered or dropped else useless + 1
            if not self._closing:
                log.warning("saver died", exit_code=exit_code, orders=len(self._pending))
        if not self._closing:
            log.error("no saver: states stay in memory and are not written", reason=self._why, again_in_s=self._rest_s)
            self._rest_until = loop.time() + self._rest_s
            self._rest_s = min(REST_MAX_S, 2 * self._rest_s)
        for one in self._pending.values():
            self._fail(one, f"there is no saver: {self._why}")
        self._pending.clear()
        self._reachable.set()  # nobody shall wait for it

    async def _until_dead(self, saver: Spare) -> int | None:
        """Wait for its end, and bring it about where it hangs; None: it will not end."""
        loop, dead, hangs = asyncio.get_running_loop(), saver.child.dead, False
        while not dead.done() and not hangs:
            await asyncio.wait([dead], timeout=STALL_LOOK_S)
            hangs = self._storing and loop.time() - self._moved_at >= STALL_S
        if not dead.done():
            log.error("storage hangs: the saver is killed", no_byte_for_s=STALL_S)
            saver.child.signal(signal.SIGKILL)
            await asyncio.wait([dead], timeout=UNKILLABLE_S)
        if hangs:
            self._answered = True  # it is not its fault: the next one is not made for nothing
            for key in [key for key, one in self._pending.items() if one.body["op"] in STORES]:
                self._fail(self._pending.pop(key), f"storage hangs: not a byte was written for {STALL_S:g} s")
        return dead.result() if dead.done() else None

    def _ask(self) -> bool:
        self._send({"op": wire.ASK})
        return True  # or it is on the backlog

    @property
    def _storing(self) -> bool:
        return any(one.body["op"] in STORES for one in self._pending.values())

    def _bury(self, saver: Spare) -> bool:
        """Nothing of it is left; whether orders were given up because of it."""
        with contextlib.suppress(MalformedMessage):
            self._hear(saver)
        if self._minding is not None:
            self._minding.close()
        loop = asyncio.get_running_loop()
        loop.remove_reader(saver.link)
        loop.remove_writer(saver.link)
        saver.link.close()
        self._stuck.append(saver.child)
        self._reap()
        self._saver, self._writing = None, False
        self._drop_backlog()
        self._take_pins()
        if self.address:
            self.address = ""
            self._reachable.clear()
        deadly = []
        for key, one in self._pending.items():
            one.deaths += 1
            if one.deaths >= DEATHS_MAX:
                deadly.append(key)
        for key in deadly:
            self._fail(self._pending.pop(key), f"{DEATHS_MAX} savers died over it")
        return bool(deadly)

    def _reap(self) -> None:
        for child in [one for one in self._stuck if not one.alive]:
            self._stuck.remove(child)
            child.reap()
            self._gone(child.pid)

    def _take_pins(self) -> None:
        """There is no saver: what it was reading may be overwritten, and what is held may not."""
        held = {(number, slot) for number, slot, *_ in self._held}
        for arena in self._arenas:
            if arena.kind == MEMORY and arena.control is not None and arena.geometry is not None:
                for slot in range(arena.geometry.slots):
                    (arena.control.pin if (arena.id, slot) in held else arena.control.unpin)(slot)

    def _hand_over(self) -> None:
        """Everything that it must know, in the order in which it can use it."""
        self._send(self._title())
        for arena in self._arenas:
            if arena.id in self._places and arena.ready:
                self._give(arena)
            elif arena.id in self._copies:
                self._send(self._copy(arena), (arena.fd,))
        self._send({"op": "hold", "slots": self._held})
        self._send({"op": "level", "generation": self._generation})
        if self._hasty:
            self._send({"op": "haste"})
        if self._serving is not None:
            self._serve(self._serving)
        for one in self._pending.values():
            if one.body["op"] != "serve":
                self._send(one.body)

    @staticmethod
    def _fail(one: _Pending, reason: str, *, lost: bool = False, refused: bool = False) -> None:
        if not one.answer.done():
            one.answer.set_exception(Unsaved(reason, lost=lost, refused=refused))

    # ---- levels

    def give(self, arena: Arena, place: int) -> None:
        """An arena whose control page is written; its node had this place in that world."""
        self._places[arena.id] = place
        self._give(arena)

    def _give(self, arena: Arena) -> None:
        self._send({"op": "arena", "id": arena.id, "place": self._places[arena.id]}, (arena.fd,))

    def forget(self, arena: Arena) -> None:
        """It is not there any more."""
        if self._places.pop(arena.id, None) is not None:
            self._send({"op": "forget", "id": arena.id})
        copy = self._copies.pop(arena.id, None)
        if copy:
            self._send({"op": "uncopy", "ids": [copy]})

    def hold(self, slots: list[list[int]]) -> None:
        """Nobody may overwrite these slots: ``[arena, slot, generation, step]``. Replaces those that were held before."""
        if slots != self._held:
            self._held = slots
            if self._saver is None:
                self._take_pins()
            self._send({"op": "hold", "slots": slots})

    def level(self, generation: int) -> None:
        """The generation that this node is at; peers that speak for older ones are refused."""
        if generation != self._generation:
            self._generation = generation
            self._send({"op": "level", "generation": generation})

    def hasten(self) -> None:
        """The script has ended, or the node is about to go: storage and copies are waited for from now on. Idempotent."""
        if not self._hasty:
            self._hasty = True
            self._send({"op": "haste"})

    def hash(self, arena: Arena) -> None:
        """Something was published there."""
        self._send({"op": "hash", "id": arena.id})

    def serve(self, serving: Serving) -> None:
        """Have it take copies and hand out what is here, from now on."""
        if self._serving is None:
            self._serving = serving
            if self._saver is not None:
                self._serve(serving)

    def alone(self) -> None:
        """It serves nobody, and nobody is to wait for that."""
        self._reachable.set()

    def _serve(self, serving: Serving) -> None:
        for key in [key for key, one in self._pending.items() if one.body["op"] == "serve"]:
            self._pending.pop(key).answer.cancel()
        told = {"run": serving.run, "token": serving.token, "bind": serving.bind, "tls": list(serving.tls)}
        answer = self._order({"op": "serve", **told})
        answer.add_done_callback(lambda done: self._served(serving.host, done))

    def _served(self, host: str, done: asyncio.Future[Done]) -> None:
        if done.cancelled():
            return
        error = done.exception()
        if error is not None:
            log.warning("no copies are taken from other nodes", reason=str(error))
        else:
            port = int(done.result().body["port"])
            self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._reachable.set()
        self.changed()

    async def reachable(self, bound_s: float) -> None:
        """Wait, at most so long, until it is known whether other nodes can reach it."""
        with contextlib.suppress(asyncio.TimeoutError):
            await within(bound_s, self._reachable.wait())

    # ---- orders

    async def order(self, body: dict[str, Any]) -> Done:
        """Have something done; repeated if the saver dies over it. Raises `Unsaved`."""
        self._reap()
        if len(self._stuck) >= STUCK_MAX and body["op"] in STORES:
            raise Unsaved(f"storage hangs: {STUCK_MAX} processes are stuck in it")
        if self._life is not None:
            self.begin()
        if self._life is None or self._life.done():
            raise Unsaved(f"there is no saver: {self._why}" if self._why else "there is no saver")
        return await self._order({"job": self._config.job, **body})

    def _order(self, body: dict[str, Any]) -> asyncio.Future[Done]:
        key = next(self._keys)
        if body["op"] == "persist":
            self.progress = 0, 0
        answer: asyncio.Future[Done] = asyncio.get_running_loop().create_future()
        if not self._storing:
            self._moved_at = asyncio.get_running_loop().time()
        self._pending[key] = _Pending({**body, "key": key}, answer)
        self._send(self._pending[key].body)
        return answer

    # ---- frames

    def _send(self, body: dict[str, Any], fds: tuple[int, ...] = ()) -> None:
        """At once, or as soon as it listens. What is sent while there is none is handed over to the next one."""
        if self._saver is None:
            return
        if not self._backlog:
            try:
                wire.send(self._saver.link, body, fds)
            except BlockingIOError:
                pass
            except OSError:  # it is dying: its successor is told everything
                return
            else:
                return
        if len(self._backlog) >= BACKLOG_MAX:
            self._saver.child.signal(signal.SIGKILL)  # it has stopped listening
            return
        self._backlog.append((body, tuple(map(os.dup, fds))))
        if not self._writing:
            self._writing = True
            asyncio.get_running_loop().add_writer(self._saver.link, self._write)

    def _write(self) -> None:
        while self._backlog and self._saver is not None:
            body, fds = self._backlog[0]
            try:
                wire.send(self._saver.link, body, fds)
            except BlockingIOError:
                return
            except OSError:
                break
            self._backlog.pop(0)
            for fd in fds:
                os.close(fd)
        self._drop_backlog()
        if self._saver is not None:
            asyncio.get_running_loop().remove_writer(self._saver.link)
        self._writing = False

    def _drop_backlog(self) -> None:
        for _, fds in self._backlog:
            for fd in fds:
                os.close(fd)
        self._backlog.clear()

    def _hear(self, saver: Spare) -> None:
        """Every frame that is there."""
        while True:
            try:
                frame = wire.receive(saver.link)
            except (BlockingIOError, OSError):
                return
            if frame is None:
                asyncio.get_running_loop().remove_reader(saver.link)
                return
            self._heard(frame)

    def _moved(self, body: dict[str, Any]) -> None:
        """It is of use; and if this is about storage, that moves."""
        self._answered = True
        one = self._pending.get(body.get("key", 0))
        if body.get("op") == "moves" or (one is not None and one.body["op"] in STORES):
            self._moved_at = asyncio.get_running_loop().time()
        match body:
            case {"op": "moves", "written": int(written), "size": int(size)}:
                self.progress = written, size

    def _heard(self, frame: wire.Frame) -> None:
        fds = frame.fds
        if frame.body.get("op") == wire.HERE:
            # Only its main loop says this; and it proves that the saver runs, not that it is of any use.
            if self._minding is not None:
                self._minding.answered()
            return
        self._moved(frame.body)
        match frame.body:
            case {"op": "done", "key": int(key)} if key in self._pending:
                one = self._pending.pop(key)
                if not one.answer.done() and len(fds) <= 1:
                    one.answer.set_result(Done(frame.body, fds[0] if fds else -1))
                    fds = ()
            case {"op": "failed", "key": int(key), "reason": str(reason)} if key in self._pending:
                lost, refused = (frame.body.get(name) is True for name in ("lost", "refused"))
                self._fail(self._pending.pop(key), reason, lost=lost, refused=refused)
            case {"op": "made", "copy": int(copy), "rank": int(rank), "world": int(world), "layout": int(layout)}:
                if len(fds) == 1:
                    kind = OBJECTS if frame.body.get("light") is True else REPLICA
                    self._made(copy, Owner(rank, world, layout), fds[0], kind)
                    fds = ()
            case {"op": "adopted", "arena": int(number), "copy": int(copy)} if number in self._copies:
                self._copies[number] = copy
                if not copy:
                    self._lose(number)
            case {"op": "gone", "copy": int(copy)}:
                for number in [number for number, one in self._copies.items() if one == copy]:
                    self._lose(number)
        for fd in fds:
            os.close(fd)

    def _made(self, copy: int, owner: Owner, fd: int, kind: str) -> None:
        try:
            arena = self._arenas.adopt(owner, fd, kind)
        except (NoRoom, ArenaBroken) as error:
            log.warning("a copy of another node's state is not kept", rank=owner.rank, reason=str(error))
            self._send({"op": "uncopy", "ids": [copy]})
            return
        self._copies[arena.id] = copy
        self.changed()

    def _lose(self, number: int) -> None:
        """A copy is not there any more."""
        del self._copies[number]
        arena = self._arenas.get(number)
        if arena is not None:
            self._arenas.forget(arena)

    def _copy(self, arena: Arena) -> dict[str, Any]:
        rank, world, layout = arena.owner
        return {"op": "copy", "arena": arena.id, "rank": rank, "world": world, "layout": layout}

    # ---- the end

    async def close(self) -> None:
        """End the saver; whatever is under way fails."""
        self._closing = True
        if self._saver is not None:
            self._saver.child.signal(signal.SIGKILL)
        elif self._life is not None:
            self._life.cancel()  # it waits for a saver that nobody needs any more
        if self._life is not None:
            await asyncio.wait([self._life], timeout=UNKILLABLE_S)
            self._life.cancel()
            await asyncio.wait([self._life])
        if self._saver is not None:
            self._bury(self._saver)
        for one in self._pending.values():
            self._fail(one, "the agent ends")
            one.answer.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._pending.clear()
