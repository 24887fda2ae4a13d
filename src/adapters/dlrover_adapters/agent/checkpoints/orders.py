"""What the agent orders of its saver, one frame each, and who does it there.

Arenas and copies are handed over and taken back (``arena``, ``forget``, ``copy``, ``uncopy``); ``hold`` says which slots nobody
may overwrite for now; ``hash`` and ``level`` want no answer. An order with a ``key`` is answered once: ``done``, with what came
of it, or ``failed``, with the ``reason``, whether the state was ``lost``, overwritten or damaged, which is nobody else's fault,
and whether another node ``refused`` it. Orders of one kind are done one after the other, light copies beside whole ones, fetches
beside each other. ``speaks``: the generation in whose name another node is asked. After ``haste`` what comes and what waits is
done at usual priority, beside what is under way, but for orders of the same step.

    persist   the parts of a step to storage       send    a copy of a step to another node
    seal      a committed step, and retention      fetch   another node's copy into memory
    serve     take copies, and hand out what is here
"""

from __future__ import annotations

import contextlib
import functools
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from dlrover_adapters.agent import wire
from dlrover_adapters.agent.cgroup import ROOT
from dlrover_core.checkpoint.arena import ArenaBroken
from dlrover_core.errors import CoreError

from . import budget, storing
from .hashing import Hasher
from .priority import hasten, step_back
from .slots import Slots

FETCHES_MAX = 4
QUEUE_MAX = 64
MOVES_S = 5.0
REASON_MAX = 1000
CHAIN_MAX = 16
FAILURES = (OSError, CoreError, ArenaBroken, ValueError, RuntimeError, MemoryError, KeyError, TypeError)


class Orders:
    """All of them, of one saver."""

    def __init__(self, link: socket.socket) -> None:
        self._link, self._sending = link, threading.Lock()
        self._slots = Slots()
        self._hasher = Hasher(self._slots)
        self._queues: dict[str, queue.Queue[dict[str, Any]]] = {}
        self._fetching = threading.BoundedSemaphore(FETCHES_MAX)
        self._generation = 0
        self._progress = storing.Progress()
        self._copies: list[tuple[int, Any]] = []
        self._server: Any = None
        self._credentials: Any = None
        self._root = Path(ROOT)
        self._hasty = False
        self._steps: set[tuple[str, int, int]] = set()
        self._free = threading.Condition()

    def start(self) -> None:
        """Have threads ready."""
        self._thread("hash", self._hasher.work, patient=True)
        for name in ("persist", "send", "light"):
            orders = self._queues[name] = queue.Queue(QUEUE_MAX)
            self._thread(name, functools.partial(self._work, orders), patient=name != "light")
        self._thread("moves", self._tell_moves)

    @staticmethod
    def _thread(name: str, work: Callable[[], None], *, patient: bool = False) -> None:
        """``patient``: nobody waits for its work, so it runs at low priority."""

        def run() -> None:
            if patient:
                step_back()
            work()

        threading.Thread(target=run, name=f"saver-{name}", daemon=True).start()

    def _tell_moves(self) -> None:
        """As long as whoever works for storage moves, the agent is told so: what hangs in a dead file server says nothing."""
        before = moved()
        while True:
            time.sleep(MOVES_S)
            now = moved()
            if now != before:
                self._say({"op": "moves", "written": self._progress.written, "size": self._progress.size})
            before = now

    # ---- frames, in the main thread

    def take(self, body: dict[str, Any], fds: tuple[int, ...]) -> None:
        """One order; what it takes time to do is left to a thread."""
        match body:
            case {"op": "arena", "id": int(number), "place": int(place)} if len(fds) == 1:
                with contextlib.suppress(ArenaBroken):  # whoever wants something of it is told
                    self._slots.add(number, fds[0], place)
                fds = ()
            case {"op": "forget", "id": int(number)}:
                self._hasher.forget(number)
                self._slots.forget(number)
            case {"op": "hold", "slots": list(slots)}:
                self._slots.hold(slots)
            case {"op": "hash", "id": int(number)}:
                self._hasher.want(number)
            case {"op": "level", "generation": int(generation)}:
                self._generation = generation
            case {"op": "copy"} if len(fds) == 1:
                self._adopt(body, fds[0])
                fds = ()
            case {"op": "haste"}:
                self._haste()
            case {"op": "uncopy", "ids": list(ids)}:
                self._uncopy(frozenset(ids))
            case {"op": "serve"}:
                self._do(self._serve, body)
            case {"op": "fetch"}:
                self._thread("fetch", lambda: self._do(self._fetch, body))
            case {"op": "persist" | "seal"}:
                self._put("persist", body)
            case {"op": "send"}:
                self._put("light" if body["light"] else "send", body)
        for fd in fds:
            os.close(fd)

    def here(self) -> None:
        """Answer the agent's `wire.ASK`."""
        self._say({"op": wire.HERE})

    def _put(self, name: str, body: dict[str, Any]) -> None:
        try:
            self._queues[name].put_nowait(body)
        except queue.Full:
            self._say({"op": "failed", "key": body["key"], "reason": f"{QUEUE_MAX} orders wait already", "lost": False})

    def _haste(self) -> None:
        """The node is about to go: nothing is patient any more. Threads made from here on are not, as this one is not."""
        if self._hasty:
            return
        self._hasty = True
        hasten(one.native_id for one in threading.enumerate() if one.native_id is not None)
        for name in ("persist", "send"):
            waiting, orders = self._queues[name], queue.Queue[dict[str, Any]](QUEUE_MAX)
            with contextlib.suppress(queue.Empty):
                while True:
                    orders.put_nowait(waiting.get_nowait())
            self._queues[name] = orders
            self._thread(f"{name}-now", functools.partial(self._work, orders))

    def _say(self, body: dict[str, Any], fds: tuple[int, ...] = ()) -> None:
        with self._sending, contextlib.suppress(OSError):  # the agent is gone, and we are about to be
            wire.send(self._link, body, fds)

    # ---- doing

    def _work(self, orders: queue.Queue[dict[str, Any]]) -> None:
        while True:
            body = orders.get()
            with self._one_at_a_time(body):
                self._do({"persist": self._persist, "seal": self._seal, "send": self._send}[body["op"]], body)

    @contextlib.contextmanager
    def _one_at_a_time(self, body: dict[str, Any]) -> Iterator[None]:
        """Wait until nobody does the same with this step: two threads must not write one part."""
        step = str(body.get("url", body["op"])), int(body.get("generation", 0)), int(body.get("step", -1))
        with self._free:
            self._free.wait_for(lambda: step not in self._steps)
            self._steps.add(step)
        try:
            yield
        finally:
            with self._free:
                self._steps.discard(step)
                self._free.notify_all()

    def _do(self, what: Callable[[dict[str, Any]], dict[str, Any] | None], body: dict[str, Any]) -> None:
        from dlrover_adapters.checkpoint.parts import PartTorn
        from dlrover_adapters.checkpoint.peer_line import PeerRefused

        began = time.monotonic()
        try:
            found = what(body)
        except FAILURES as error:
            lost = isinstance(error, (ArenaBroken, PartTorn))
            told = {"op": "failed", "key": body["key"], "reason": words(error)[:REASON_MAX], "lost": lost}
            self._say({**told, "refused": isinstance(error, PeerRefused)})
            return
        if found is not None:
            took_us = int((time.monotonic() - began) * 1e6)
            self._say({"op": "done", "key": body["key"], "took_us": took_us, **found})

    def _persist(self, body: dict[str, Any]) -> dict[str, Any]:
        """Write this node's parts of a step, and those of the copies that it is to write for others."""
        generation, step, order = body["generation"], body["step"], storing.Order.of(body)
        with contextlib.ExitStack() as stack:
            # All are pinned before the first is written: a step with one part too few is none.
            views = [stack.enter_context(self._slots.get(one).view(generation, step)) for one in body["ids"]]
            for rank, layout in body["copies"]:
                view = stack.enter_context(self._copied(rank, generation, step, layout))
                if view is None:
                    raise OSError(f"the copy of step {step} of rank {rank} is not there any more")
                views.append(view)
            parts, size = storing.write(views, order, self._progress)
            cut, trained = views[0].cut(), storing.trained(views)
        return {"parts": parts, "size": size, "cut": cut, "trained": trained}

    def _copied(self, rank: int, generation: int, step: int, layout: int) -> Any:
        from dlrover_adapters.checkpoint.peers import Wanted

        if self._server is None:
            raise OSError(f"there are no copies here, and none of rank {rank}")
        return self._server.copied(Wanted(rank, generation, step, layout))

    def _seal(self, body: dict[str, Any]) -> dict[str, Any]:
        return {"size": storing.seal(storing.Order.of(body), body["step"], body["generation"])}

    # ---- other nodes

    def _serve(self, body: dict[str, Any]) -> dict[str, Any]:
        """Begin to take copies; the copies of our predecessor's were handed over before."""
        from dlrover_adapters.checkpoint import peers

        tls = peers.Tls(*body["tls"]) if body["tls"] else None
        self._credentials = peers.Credentials(body["run"], body["token"], tls)
        server = peers.Server(
            self._credentials,
            lookup=self._lookup,
            allow=self._allow,
            made=self._made,
            gone=lambda copy: self._say({"op": "gone", "copy": copy.id}),
            generation=lambda: self._generation,
            patient=step_back,
        )
        for arena, one in self._copies:
            known = {copy.id for copy in server.copies()}
            server.adopt([one])
            number = next((copy.id for copy in server.copies() if copy.id not in known), 0)
            self._say({"op": "adopted", "arena": arena, "copy": number})
            os.close(one.fd)
        self._copies = []
        port = server.start(body["bind"])
        self._server = server
        return {"port": port}

    def _adopt(self, body: dict[str, Any], fd: int) -> None:
        from dlrover_adapters.checkpoint.peers import Copy

        total = os.fstat(fd).st_size
        self._copies.append((body["arena"], Copy(fd, 0, body["rank"], body["world"], body["layout"], total)))

    def _uncopy(self, ids: frozenset[int]) -> None:
        if self._server is not None:
            self._server.forget(lambda copy: copy.id in ids)

    def _made(self, copy: Any) -> None:
        body = {"op": "made", "copy": copy.id, "rank": copy.rank, "world": copy.world, "layout": copy.layout}
        self._say({**body, "light": copy.light}, (copy.fd,))

    def _allow(self, total_bytes: int) -> str:
        copies = self._server.copies() if self._server is not None else []
        fds = [*self._slots.fds(), *(one.fd for one in copies)]
        held = sum(os.fstat(fd).st_size for fd in fds)
        return budget.refusal(total_bytes, budget.left(self._root, fds), held)

    @contextlib.contextmanager
    def _lookup(self, wanted: Any) -> Iterator[Any]:
        found = self._slots.of(*wanted)
        if found is None:
            yield None
            return
        with found.view(wanted.generation, wanted.step) as view:
            yield view

    def _send(self, body: dict[str, Any]) -> dict[str, Any]:
        """A copy of all our ranks' states after a step to a partner."""
        from dlrover_adapters.checkpoint import peers

        generation, step, size = body["generation"], body["step"], 0
        there: list[frozenset[tuple[int, int]]] = []
        pace = peers.Pace(float(body["pace"])) if body["pace"] else None
        keep = int(body["keep"][0]), int(body["keep"][1])
        with contextlib.ExitStack() as stack:
            views = [stack.enter_context(self._slots.get(one).view(generation, step)) for one in body["ids"]]
            for view in views:
                told = peers.send(
                    body["address"], view, self._credentials, generation=self._speaks(body), pace=pace, keep=keep,
                    light=body["light"],
                )  # fmt: skip
                size += told.size
                there.append(told.there)
        return {"size": size, "there": sorted(frozenset.intersection(*there)) if there else []}

    def _speaks(self, body: dict[str, Any]) -> int:
        """The generation that we speak for to other nodes: that of the order, which no older level of ours may belie."""
        return max(self._generation, int(body["speaks"]))

    def _fetch(self, body: dict[str, Any]) -> dict[str, Any] | None:
        from dlrover_adapters.checkpoint import peers

        if self._credentials is None:
            raise OSError("this node has not joined yet")
        wanted = peers.Wanted(*body["wanted"])
        with self._fetching:
            found = peers.fetch(
                body["address"],
                wanted,
                self._credentials,
                generation=self._speaks(body),
                whole=body["whole"],
                allow=self._allow,
            )
        try:
            told = {"op": "done", "key": body["key"], "took_us": found.took_us, "size": found.size}
            self._say(told, (found.fd,))
        finally:
            os.close(found.fd)
        return None


def moved() -> tuple[tuple[int, int, int, int], ...]:
    """What the threads that work for storage have read and written, in bytes, and computed, in units of 50 ms.

    fsspec has a thread of its own for what goes over the network.
    """
    found = []
    for one in threading.enumerate():
        storing_ = one.name.startswith(storing.THREAD_NAME) or one.name == "fsspecIO"
        if storing_ and one.native_id is not None and one.ident is not None:
            read = written = 0
            with contextlib.suppress(OSError, ValueError, IndexError):  # a kernel that does not count
                told = Path(f"/proc/self/task/{one.native_id}/io").read_text().split()
                read, written = int(told[1]), int(told[3])
            computed = 0.0
            with contextlib.suppress(OSError):
                computed = time.clock_gettime(time.pthread_getcpuclockid(one.ident))
            found.append((one.native_id, read, written, int(computed * 20)))
    return tuple(found)


def words(error: BaseException) -> str:
    """What went wrong, for people. What a library makes of a full disk is not it: the system's own error comes first."""
    one: BaseException | None = error
    for _ in range(CHAIN_MAX):
        if one is None:
            break
        if isinstance(one, (OSError, CoreError)) and str(one):
            return str(one)
        one = one.__cause__ or one.__context__
    return f"{type(error).__name__}: {error}"
