"""The vault: a Unix socket beside the agent's own, on which ranks get memory for their states, and what is left of older ones.

One msgpack map per packet, every question answered in order, no packet that does not make sense: it ends its connection. Whoever
does not read its answers is hung up on, too. The worker's half is `dlrover_adapters.torch.checkpoint.vault`.

A connection says first which rank it is of (``hello``), and must be one of the workers that run here now. What ranks tell goes to
a `Listener`, and so do questions that take time; the others are answered here, without touching a page of anybody's state.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import structlog

from dlrover_adapters.agent import wire
from dlrover_adapters.agent.cgroup import ROOT
from dlrover_adapters.agent.packet_server import Nonsense, PacketServer
from dlrover_core.checkpoint.arena import ArenaBroken, Geometry
from dlrover_core.job.shards import Terms
from dlrover_core.runtime.checked import checked

from .arenas import MEMORY, Arena, Arenas, NoRoom, Owner

NAME = "vault.sock"
PACKET_BYTES_MAX = 64 * 1024
CONNECTIONS_MAX = 512
TABLE_BYTES_MAX = 256 * 2**20
HOLDINGS_MAX = 512
TEXT_MAX = 2000
FETCH_S_MAX = 3600.0

log = structlog.get_logger("dlrover.agent")

Answer = tuple[dict[str, Any], int]
"""The body, and a descriptor of ours to send along; -1: none."""


class Refused(Exception):
    """The answer is no; the words are for people."""


class Caller(NamedTuple):
    """Who is at the other end: a rank of the workers that run here."""

    generation: int
    rank: int
    local_rank: int
    world: int


class Greeting(NamedTuple):
    """What ranks are told of the job: as in the worker's `Told`."""

    replica: str = ""
    committed: int = -1
    plans: bool = False
    resume_step: int = -1
    lenders: tuple[tuple[str, int, int], ...] = ()
    copies: bool = False


class Wanted(NamedTuple):
    """A slot of another node's, at the saver of ``address``. Not ``whole``: its table and objects only."""

    address: str
    rank: int
    generation: int
    step: int
    layout: int
    within_s: float
    whole: bool = True


class Listener(Protocol):
    """Whoever makes something of what ranks tell. All but the last two must return at once."""

    def greeting(self) -> Greeting:
        """As of now."""

    def greeted(self, caller: Caller) -> None:
        """A rank has come that saves with us."""

    def opened(self, arena: Arena) -> None:
        """A rank was given this memory; it may be its predecessor's."""

    def ready(self, arena: Arena) -> None:
        """Control page and table are written."""

    def dropped(self, arena: Arena) -> None:
        """Nobody needs it any more; it is closed next."""

    def dataset(self, caller: Caller, terms: Terms) -> None:
        """A rank trains on this dataset. Raises `Refused` where the job has another one of that name."""

    def told(self, caller: Caller, body: dict[str, Any]) -> None:
        """``saved``, ``keeping``, ``restored``, ``lost``, ``alarm``, ``acked`` or ``boundary``, unchecked."""

    async def reachable(self) -> None:
        """Wait, a bounded time, until the saver can be reached."""

    async def fetch(self, wanted: Wanted) -> tuple[Arena, int]:
        """Memory with the slot, and the time it took in microseconds (0: it was here). Raises `Refused`."""


class Vault(PacketServer[Caller]):
    """Listens at ``folder``/vault.sock, mode 0600. ``root`` is where limits of memory are read."""

    def __init__(self, folder: str, root: Path = ROOT) -> None:
        super().__init__(os.path.join(folder, NAME), connections_max=CONNECTIONS_MAX, packet_bytes_max=PACKET_BYTES_MAX)
        self.arenas = Arenas(root)
        self.listener: Listener | None = None
        self._busy: dict[socket.socket, asyncio.Task[None]] = {}
        self._deaf = self._busy

    async def close(self) -> None:
        """Hang up on everybody and let all memory go. Idempotent."""
        for one in list(self._open):
            self._hang_up(one)
        tasks = list(self._busy.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._listener.close()
        self.arenas.forget_heads()
        for arena in self.arenas:
            self.arenas.forget(arena)

    # ---- packets

    async def _later(self, line: socket.socket, body: dict[str, Any], waiting: Awaitable[Answer]) -> None:
        try:
            answer, fd = await waiting
        except Nonsense:
            if line in self._open:
                self._hang_up(line)
            return
        except Refused as refused:
            answer, fd = {"error": str(refused)[:TEXT_MAX]}, -1
        if line in self._open:
            self._send(line, body, answer, fd)
        if line in self._open:
            asyncio.get_running_loop().add_reader(line, self._hear, line)

    def _understood(self, line: socket.socket, body: dict[str, Any]) -> None:
        waiting = self._answered(line, body)
        if waiting is not None:
            # Nothing more is heard from here meanwhile: answers come in order, and nobody can have more than one such at work.
            asyncio.get_running_loop().remove_reader(line)
            task = asyncio.ensure_future(self._later(line, body, waiting))
            self._busy[line] = task
            task.add_done_callback(lambda _: self._busy.pop(line, None))

    def _answered(self, line: socket.socket, body: dict[str, Any]) -> Awaitable[Answer] | None:
        """Do what a packet says; what is left to wait for, if anything. Raises `Nonsense`, `MalformedMessage`."""
        op, caller = body.get("op"), self._open[line]
        if not isinstance(op, str):
            raise Nonsense
        if op in _TOLD:
            if caller is None:
                raise Nonsense
            if self.listener is not None and self._runs(caller):
                self.listener.told(caller, body)
            return None
        if op in _LATER:
            if caller is None:
                raise Nonsense
            return _LATER[op](self, body)
        try:
            if op == "hello":
                answer, fd = self._hello(line, body), -1
            elif caller is not None and op in _AT_ONCE:
                answer, fd = _AT_ONCE[op](self, caller, body)
            else:
                raise Nonsense
        except Refused as refused:
            answer, fd = {"error": str(refused)[:TEXT_MAX]}, -1
        self._send(line, body, answer, fd)
        return None

    def _send(self, line: socket.socket, asked: dict[str, Any], answer: dict[str, Any], fd: int) -> None:
        number = asked.get("n", 0)
        payload = wire.pack({**answer, "n": number if type(number) is int and abs(number) < 2**62 else 0})
        try:
            socket.send_fds(line, [payload], [fd] if fd >= 0 else [])
        except OSError:  # it is gone, or asks and never reads
            self._hang_up(line)

    def _gone(self, line: socket.socket, _caller: Caller | None, _why: str, /) -> None:
        busy = self._busy.get(line)
        if busy is not None:
            busy.cancel()

    def _runs(self, caller: Caller) -> bool:
        return self.launch is not None and caller.generation == self.launch.generation

    # ---- questions

    def _hello(self, line: socket.socket, body: dict[str, Any]) -> dict[str, Any]:
        rank, local_rank, world, nproc = _ints(body, "rank", "local_rank", "world", "nproc")
        launch = self.launch
        if launch is None:
            raise Refused("no workers run here")
        expected = (launch.first_rank + local_rank, launch.world_size, launch.nproc)
        if (rank, world, nproc) != expected or not 0 <= local_rank < launch.nproc:
            raise Refused(
                f"rank {rank} (local rank {local_rank} of {nproc}) of {world} is not one of this agent's workers: ranks "
                f"{launch.first_rank} to {launch.first_rank + launch.nproc - 1} of {launch.world_size} are"
            )
        caller = self._open[line] = Caller(launch.generation, rank, local_rank, world)
        greeting = Greeting()
        if self.listener is not None:
            self.listener.greeted(caller)
            greeting = self.listener.greeting()
        return {
            "generation": launch.generation,
            "node": launch.node,
            "nodes": launch.nodes,
            "node_rank": launch.node_rank,
            "run": launch.run,
            **greeting._asdict(),
            "memory": self.arenas.left().free,
        }

    def _arena(self, caller: Caller, body: dict[str, Any]) -> Answer:
        layout, slots, *sizes = _ints(body, "layout", "slots", "table_bytes", "blob_bytes", "data_bytes", at_most=2**64)
        if not self._runs(caller):
            raise Refused(f"generation {caller.generation} is over")
        if sizes[0] > TABLE_BYTES_MAX or max(sizes) > 2**50:
            raise Refused(f"a table of {sizes[0]:,} and data of {sizes[2]:,} bytes are more than any arena has")
        try:
            (beside,) = _ints({"beside": 0, **body}, "beside", at_most=2**50)
            geometry = Geometry(slots, *sizes)
            owner = Owner(caller.rank, caller.world, layout)
            arena, fresh, idle = self.arenas.open(owner, geometry, caller.generation, caller.local_rank, beside)
        except (ArenaBroken, NoRoom) as error:
            raise Refused(str(error)) from error
        for one in idle:
            self.forget(one)
        if self.listener is not None:
            self.listener.opened(arena)
        return {"id": arena.id, "fresh": fresh}, arena.fd

    def _ready(self, caller: Caller, body: dict[str, Any]) -> Answer:
        (number,) = _ints(body, "id")
        arena = self.arenas.get(number)
        if arena is None or arena.kind != MEMORY or arena.owner.rank != caller.rank:
            raise Refused(f"arena {number} is none of rank {caller.rank}'s")
        members = body.get("members")
        if members is not None and not (isinstance(members, list) and all(type(one) is int for one in members)):
            raise Nonsense
        (arena.spread,) = _ints({"spread": 0, **body}, "spread")
        arena.members = frozenset(members) if members is not None else None
        try:
            arena.look()
        except ArenaBroken as error:
            raise Refused(str(error)) from error
        if self.listener is not None:
            self.listener.ready(arena)
        return {}, -1

    def _dataset(self, caller: Caller, body: dict[str, Any]) -> Answer:
        terms = body.get("terms")
        if not isinstance(terms, list):
            raise Nonsense
        if self.listener is not None and self._runs(caller):
            self.listener.dataset(caller, checked(Terms, tuple(terms)))
        return {}, -1

    def _borrow(self, _caller: Caller, body: dict[str, Any]) -> Answer:
        (number,) = _ints(body, "id")
        arena = self.arenas.get(number)
        if arena is None:
            raise Refused(f"arena {number} is not there any more")
        return {}, arena.fd

    async def _inventory(self, _body: dict[str, Any]) -> Answer:
        greeting = Greeting()
        if self.listener is not None:
            await self.listener.reachable()
            greeting = self.listener.greeting()
        holdings = [
            (
                arena.id,
                arena.kind,
                arena.owner.rank,
                arena.owner.world,
                stamp.generation,
                stamp.step,
                arena.owner.layout,
                slot,
            )
            for arena in self.arenas
            for slot, stamp in arena.stamps()
        ]
        holdings.sort(key=lambda one: one[4:6], reverse=True)
        return {"holdings": holdings[:HOLDINGS_MAX], "replica": greeting.replica, "committed": greeting.committed}, -1

    async def _fetch(self, body: dict[str, Any]) -> Answer:
        address, within_s = body.get("address"), body.get("within_s", 60.0)
        rank, generation, step, layout = _ints(body, "rank", "generation", "step", "layout", at_most=2**64)
        if not isinstance(address, str) or not isinstance(within_s, (int, float)) or not 0 < within_s <= FETCH_S_MAX:
            raise Refused(f"nothing is fetched from {str(address)[:100]!r} within {str(within_s)[:20]} s")
        if self.listener is None:
            raise Refused("nobody here can fetch anything")
        whole = body.get("whole", True) is not False
        wanted = Wanted(address, rank, generation, step, layout, float(within_s), whole)
        found, took_us = await self.listener.fetch(wanted)
        return {"id": found.id, "took_us": took_us}, found.fd

    def forget(self, arena: Arena) -> None:
        """Nobody needs it any more."""
        if self.listener is not None:
            with contextlib.suppress(OSError):
                self.listener.dropped(arena)
        self.arenas.forget(arena)


def _ints(body: dict[str, Any], *names: str, at_most: int = 2**62) -> list[int]:
    found = [body.get(name) for name in names]
    if not all(type(one) is int and 0 <= one < at_most for one in found):
        raise Nonsense
    return [one for one in found if one is not None]


_TOLD = frozenset({"saved", "keeping", "restored", "lost", "alarm", "acked", "boundary"})
_AT_ONCE: dict[str, Callable[[Vault, Caller, dict[str, Any]], Answer]] = {
    "arena": Vault._arena,
    "ready": Vault._ready,
    "borrow": Vault._borrow,
    "dataset": Vault._dataset,
}
_LATER: dict[str, Callable[[Vault, dict[str, Any]], Awaitable[Answer]]] = {
    "inventory": Vault._inventory,
    "fetch": Vault._fetch,
}
