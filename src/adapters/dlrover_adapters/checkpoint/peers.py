"""States from node to node: a partner's copy in other memory, and back when a node is gone.

Savers do it among themselves, beside training: no rank, no collective, no accelerator's memory. `Server` takes copies into memory
that the agent is handed, in the format of arenas, and serves what the node has; `send` and `fetch` are the other ends.

A copy is whole or not there: it goes into a slot that nobody reads and that is not the newest, every block is compared with the
saver's digest on arrival, table and objects with their HMAC, and only then is the slot published. So what lies in a node's memory
is either the node's own or was written by somebody who knows the job's token: objects from there may be unpickled.

Connections that have not proved yet that they know the token are strangers' (`peer_door`): a bounded number, of which the oldest
makes room for the next, so that nobody can keep the savers of a job from each other by holding connections open.

Fenced twice: another run is a stranger, and so is who speaks for a generation that this node knows to be over. Nothing is
resumed: who was cut off starts again.
"""

from __future__ import annotations

import contextlib
import functools
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from dlrover_adapters.checkpoint import peer_door
from dlrover_adapters.checkpoint.peer_line import (
    IDLE_S,
    PACE_BYTES_S,
    Credentials,
    Line,
    Pace,
    PeerCut,
    PeerFailed,
    PeerRefused,
    StrangerRefused,
    Tls,
    dial,
    greet,
)
from dlrover_adapters.checkpoint.peer_state import Header, Load, Memory, Wanted
from dlrover_adapters.checkpoint.slotview import SlotView, read_table
from dlrover_core.checkpoint.arena import SLOTS_MAX, ArenaBroken, Geometry, Stamp

__all__ = [
    "Copy", "Credentials", "Pace", "PeerCut", "PeerFailed", "PeerRefused", "Received", "Sent", "Server", "StrangerRefused",
    "Tls", "Wanted", "fetch", "send",
]  # fmt: skip

BACKLOG = 4096
COPY_SLOTS = 2
SMALL_BYTES = 1024 * 1024
"""Of data up to this size `SLOTS_MAX` copies are kept, of larger data `COPY_SLOTS`."""
NOTHING = (-1, -1)
TRIES = 2
_JOIN_S = 5.0


class Copy(NamedTuple):
    """Memory with copies of one rank's states, an arena. ``id``: a number in this server. The server owns ``fd``.

    ``light``: without the tensors that are the same on every node.
    """

    fd: int
    id: int
    rank: int
    world: int
    layout: int
    total_bytes: int
    light: bool = False


class Sent(NamedTuple):
    """What a `send` did.

    ``had``: the peer had this copy already.
    ``there``: generation and step of all copies of this rank that the peer has now.
    """

    took_us: int
    size: int
    had: bool
    there: frozenset[tuple[int, int]] = frozenset()


class Received(NamedTuple):
    """An arena with one slot, verified. Whoever gets it closes ``fd``."""

    fd: int
    took_us: int
    size: int


def send(
    address: str,
    view: SlotView,
    credentials: Credentials,
    *,
    generation: int,
    pace: Pace | None = None,
    keep: tuple[int, int] = NOTHING,
    light: bool = False,
    idle_s: float = IDLE_S,
) -> Sent:
    """Leave a copy of a slot, which the caller has pinned, with the saver at ``address``. ``generation``: whom we speak for.

    ``light``: without the tensors that are the same on every node. ``keep``: the generation and step of an older copy
    that this one must not take the place of; without, the newest is kept.
    Raises `PeerRefused` (the peer says why), `StrangerRefused`, `PeerFailed`.
    """
    began, load = time.monotonic(), Load(view, light=light)
    header = load.header
    line = dial(address, credentials, idle_s=idle_s)
    try:
        asked = {"op": "put", "run": credentials.run, "generation": generation, "keep": list(keep)}
        line.say({**asked, "state": header.told()})
        line.allow(header.size)
        answer = line.hear(patient=True)  # it gets its memory first
        had = bool(answer.get("had"))
        if not had:
            load.give(line, pace or Pace(PACE_BYTES_S))
            answer = line.hear()
        return Sent(_us_since(began), 0 if had else header.size, had, _pairs(answer.get("there")))
    finally:
        line.close()


def fetch(
    address: str,
    wanted: Wanted,
    credentials: Credentials,
    *,
    generation: int,
    whole: bool = True,
    allow: Callable[[int], str] | None = None,
    idle_s: float = IDLE_S,
) -> Received:
    """Bring one rank's state from the saver at ``address``. ``allow``: of so many bytes, why they are too many (empty: not).

    Not ``whole``: its table and its objects only; the arena that comes has no data then.
    Cut off in the middle, it is tried `TRIES` times. Raises `PeerRefused` (the peer says why, or there is no room),
    `StrangerRefused`, `PeerFailed`.
    """
    began, asked = time.monotonic(), {"op": "get" if whole else "head", "generation": generation}
    for _ in range(TRIES - 1):
        with contextlib.suppress(PeerCut):
            return _fetch(address, wanted, credentials, asked, allow, idle_s, began)
    return _fetch(address, wanted, credentials, asked, allow, idle_s, began)


def _fetch(
    address: str,
    wanted: Wanted,
    credentials: Credentials,
    asked: dict[str, Any],
    allow: Callable[[int], str] | None,
    idle_s: float,
    began: float,
) -> Received:
    line = dial(address, credentials, idle_s=idle_s)
    try:
        line.say({**asked, "run": credentials.run, "wanted": list(wanted)})
        header = Header.heard(line.hear().get("state"))
        if not wanted.fits(header.wanted):
            raise PeerFailed(f"{wanted} was asked for, and {header.wanted} came")
        if asked["op"] == "head" and header.data_bytes:
            raise PeerFailed("table and objects were asked for, and all of a state came")
        memory = _room("dlrover-fetched", header.geometry(1), allow, populated=False)
        try:
            line.say({"ready": True})
            memory.take(line, header, 0, fresh=True)
        except BaseException:
            memory.close()
            raise
        memory.close(keep_fd=True)
        return Received(memory.fd, _us_since(began), header.size)
    except ArenaBroken as error:
        raise PeerFailed(f"{address}: {error}") from error
    finally:
        line.close()


def _room(name: str, geometry: Geometry, allow: Callable[[int], str] | None, *, populated: bool = True) -> Memory:
    why = allow(geometry.total_bytes) if allow is not None else ""
    if why:
        raise PeerRefused(why)
    return Memory(name, geometry, populated=populated)


def _pairs(told: object) -> frozenset[tuple[int, int]]:
    """Generations and steps from a frame. Raises `PeerFailed`."""
    if not isinstance(told, list):
        raise PeerFailed("which copies it has makes no sense")
    found: list[tuple[int, int]] = []
    for one in told:
        if not (isinstance(one, list) and len(one) == 2 and all(type(part) is int for part in one)):
            raise PeerFailed("which copies it has makes no sense")
        found.append((one[0], one[1]))
    return frozenset(found)


def _us_since(began: float) -> int:
    return int((time.monotonic() - began) * 1e6)


@dataclass
class _CopyMemory:
    """One memory of copies, and how many read each slot of it."""

    copy: Copy
    memory: Memory
    readers: list[int] = field(default_factory=lambda: [0] * SLOTS_MAX)

    def newest(self) -> tuple[int, int]:
        return max(((stamp.generation, stamp.step) for _, stamp in self.memory.control.stamps()), default=(-1, -1))

    def fits(self, header: Header, geometry: Geometry) -> bool:
        """Is this memory laid out for that state?"""
        words = self.memory.control
        same = (header.layout, header.world, header.table_digest)
        return self.memory.geometry == geometry and (words.layout, words.world, words.table_digest) == same

    def has(self, stamp: Stamp) -> bool:
        """Is it here, as it was published then?"""
        return any(stamp.same(one) for _, one in self.memory.control.stamps())

    def clear(self, stamp: Stamp) -> None:
        """Let go of what an earlier publication of the same step left. Who reads it finds that it is gone."""
        for slot, one in list(self.memory.control.stamps()):
            if one[:2] == stamp[:2] and not one.same(stamp):
                self.memory.control.begin(slot)

    def free(self, keep: tuple[int, int], offered: tuple[int, int]) -> int:
        """The slot for the next copy: neither read nor that of ``keep``; where that is not here, not the newest. -1: none.

        A step that was saved again takes its own place, so that no two slots have one step.
        """
        stamps = {slot: stamp[:2] for slot, stamp in self.memory.control.stamps()}
        own = next((slot for slot, one in stamps.items() if one == offered), None)
        if own is not None:
            return own if not self.readers[own] else -1
        order = sorted(range(self.memory.geometry.slots), key=lambda slot: stamps.get(slot, NOTHING))
        order.sort(key=lambda slot: stamps.get(slot) == keep)
        return next((slot for slot in order[:-1] if not self.readers[slot]), -1)


class Server:
    """Takes copies and serves states, in threads of this process, from `start` to `stop`.

    ``lookup`` finds one of the node's own states and keeps it pinned as long as it is read; ``allow`` says why so many bytes more
    are too many (empty: they are not); ``made`` and ``gone`` tell of memory with copies, which is ours: whoever wants to keep it
    duplicates its descriptor; ``generation`` is the one that the node is at; ``patient`` is called in a thread that is going to
    receive a copy of more than `SMALL_BYTES`: nobody waits for that one.
    """

    def __init__(
        self,
        credentials: Credentials,
        *,
        lookup: Callable[[Wanted], AbstractContextManager[SlotView | None]],
        allow: Callable[[int], str] = lambda _size: "",
        made: Callable[[Copy], None] = lambda _copy: None,
        gone: Callable[[Copy], None] = lambda _copy: None,
        generation: Callable[[], int] = lambda: 0,
        refused: Callable[[str, str], None] = lambda _address, _why: None,
        patient: Callable[[], None] = lambda: None,
        pace_bytes_s: float = PACE_BYTES_S,
        idle_s: float = IDLE_S,
    ) -> None:
        self._credentials, self._lookup, self._allow = credentials, lookup, allow
        self._made, self._gone, self._generation, self._refused = made, gone, generation, refused
        self._patient = patient
        self._stopped = threading.Event()
        self._pace, self._idle_s = Pace(pace_bytes_s, self._stopped), idle_s
        self._lock = threading.RLock()
        self._kept: dict[int, list[_CopyMemory]] = {}
        self._coming: set[int] = set()
        self._made_count = 0
        self._listener: socket.socket | None = None
        self._context: ssl.SSLContext | None = None
        self._threads: set[threading.Thread] = set()
        self._door = peer_door.Door()

    # ---- its life

    def start(self, bind: str = "0.0.0.0", port: int = 0) -> int:  # noqa: S104  # other hosts are who it is for
        """Listen; the port. Raises OSError, ssl.SSLError (certificates that cannot be used)."""
        self._context = self._credentials.tls.serving() if self._credentials.tls is not None else None
        family = socket.AF_INET6 if ":" in bind else socket.AF_INET
        listener = socket.create_server((bind, port), family=family, backlog=BACKLOG)
        self._listener = listener
        self._thread("peers", lambda: self._accept(listener))
        return int(listener.getsockname()[1])

    def stop(self) -> None:
        """End every connection and thread, and let all copies go; descriptors that others duplicated live on."""
        self._stopped.set()
        if self._listener is not None:
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)  # wakes accept
            self._listener.close()
        with self._lock:
            threads = list(self._threads)
        self._door.shut()
        for thread in threads:
            thread.join(_JOIN_S)
        self.forget(lambda _copy: True)

    def forget(self, which: Callable[[Copy], bool]) -> None:
        """Let these copies go; one that is in use goes the next time it is asked for."""
        with self._lock:
            for rank, kept in list(self._kept.items()):
                self._drop(rank, [one for one in kept if which(one.copy)])

    def adopt(self, copies: Iterable[Copy]) -> None:
        """Take over what a predecessor of this process has left; descriptors stay the caller's. What is no arena is left out.

        Ids are told anew: `copies` says them.
        """
        for copy in copies:
            try:
                memory = Memory.of(copy.fd)
            except (OSError, ValueError):
                continue
            with self._lock:
                self._made_count += 1
                ours = copy._replace(fd=memory.fd, id=self._made_count)
                self._kept.setdefault(copy.rank, []).append(_CopyMemory(ours, memory))
                self._kept[copy.rank].sort(key=_CopyMemory.newest)

    def copies(self) -> list[Copy]:
        """What there is."""
        with self._lock:
            return [one.copy for kept in self._kept.values() for one in kept]

    def _drop(self, rank: int, these: list[_CopyMemory]) -> None:
        for one in these:
            if rank in self._coming or any(one.readers):
                continue
            self._kept[rank].remove(one)
            self._gone(one.copy)
            one.memory.close()

    def _thread(self, name: str, work: Callable[[], None]) -> None:
        def run() -> None:
            try:
                work()
            finally:
                with self._lock:
                    self._threads.discard(threading.current_thread())

        thread = threading.Thread(target=run, name=name, daemon=True)
        with self._lock:
            thread.start()  # before it is one that `stop` joins
            self._threads.add(thread)

    def _accept(self, listener: socket.socket) -> None:
        while not self._stopped.is_set():
            try:
                sock, address = listener.accept()
            except OSError:
                # Out of descriptors, or stopped: the next round tells which.
                if self._stopped.wait(0.1):
                    return
                continue
            try:
                number = self._door.came(sock)
            except OSError:  # out of descriptors
                sock.close()
                continue
            if self._stopped.is_set():  # it has come too late to be hung up on by `stop`
                self._door.left(number)
                sock.close()
                return
            try:
                self._thread("peer", functools.partial(self._serve, sock, number, str(address[0])))
            except RuntimeError:  # no thread can be started now: this one may come again
                self._door.left(number)
                sock.close()

    # ---- a connection

    def _serve(self, sock: socket.socket, number: int, address: str) -> None:
        line: Line | None = None
        try:
            line = greet(sock, self._credentials, self._context, idle_s=self._idle_s)
            room = self._door.admitted(number)
            asked = line.hear()
            try:
                if not room:
                    raise PeerRefused(f"{peer_door.CONNECTIONS_MAX} other savers are connected; try again later")
                self._answer(line, asked)
            except (PeerFailed, ArenaBroken) as error:
                self._refused(address, str(error))
                with contextlib.suppress(PeerFailed):
                    line.say({"error": str(error)})
        except PeerFailed as error:
            self._refused(address, str(error))
        finally:
            if line is not None:
                line.close()
            self._door.left(number)

    def _answer(self, line: Line, asked: dict[str, Any]) -> None:
        if asked.get("run") != self._credentials.run:
            raise PeerRefused("this is another run of the job")
        speaks, knows = asked.get("generation"), self._generation()
        if type(speaks) is not int or speaks < knows:
            raise PeerRefused(f"generation {speaks} is over, this node is at {knows}")
        if asked.get("op") == "put":
            keep = asked.get("keep", NOTHING)
            if not isinstance(keep, (list, tuple)) or len(keep) != 2 or not all(type(one) is int for one in keep):
                raise PeerFailed("what it wants kept makes no sense")
            self._take(line, Header.heard(asked.get("state")), (keep[0], keep[1]))
        elif asked.get("op") in {"get", "head"}:
            told = asked.get("wanted")
            if not isinstance(told, list) or len(told) != 4 or not all(type(one) is int for one in told):
                raise PeerFailed("what it wants makes no sense")
            self._hand_out(line, Wanted(*told), whole=asked["op"] == "get")
        else:
            raise PeerFailed("a request that this version does not know")

    def _hand_out(self, line: Line, wanted: Wanted, *, whole: bool) -> None:
        with self.copied(wanted) as copied, self._lookup(wanted) if copied is None else _nothing() as own:
            view = copied or own
            if view is None:
                raise PeerRefused(
                    f"this node has no step {wanted.step} of generation {wanted.generation} of rank {wanted.rank}"
                )
            load = Load(view, whole=whole)
            line.say({"state": load.header.told()})
            line.allow(load.header.size)
            line.hear(patient=True)  # it gets its memory first
            load.give(line, self._pace)

    @contextlib.contextmanager
    def copied(self, wanted: Wanted) -> Iterator[SlotView | None]:
        """A copy of another node's state, kept from being overwritten inside; None where there is none."""
        with self._lock:
            found = next(
                (
                    (kept, slot)
                    for kept in self._kept.get(wanted.rank, ())
                    for slot, stamp in kept.memory.control.stamps()
                    if wanted.fits(Wanted(wanted.rank, stamp.generation, stamp.step, kept.copy.layout))
                ),
                None,
            )
            if found is not None:
                found[0].readers[found[1]] += 1
        if found is None:
            yield None
            return
        kept, slot = found
        try:
            view = SlotView(kept.memory.map, slot)
            try:
                yield view
            finally:
                view.release()
        finally:
            with self._lock:
                kept.readers[slot] -= 1

    # ---- copies

    def _take(self, line: Line, header: Header, keep: tuple[int, int]) -> None:
        rank, offered = header.rank, header.stamp[:2]
        if header.data_bytes > SMALL_BYTES:
            self._patient()
        with self._lock:
            kept = self._kept.setdefault(rank, [])
            newest = max((one.newest() for one in kept), default=(-1, -1))
            if rank in self._coming:
                raise PeerRefused(f"another copy of rank {rank} is on its way")
            same = bool(kept) and kept[-1].copy.layout == header.layout
            have = same and kept[-1].has(header.stamp)
            # An older step of the same workers is wanted where the others have only that one. It does not replace the newest.
            if offered < newest and not (same and offered[0] == newest[0]):
                raise PeerRefused(f"step {offered[1]} of generation {offered[0]} is older than what is here, {newest}")
            if not have:
                self._coming.add(rank)
        if have:
            line.say({"had": True, "there": self._steps(rank)})
            return
        try:
            self._receive(line, header, kept, keep)
        finally:
            with self._lock:
                self._coming.discard(rank)
        line.say({"there": self._steps(rank)})

    def _steps(self, rank: int) -> list[tuple[int, int]]:
        """Generation and step of each copy of a rank, in the memory that the next one goes to."""
        with self._lock:
            kept = self._kept.get(rank)
            return [stamp[:2] for _, stamp in kept[-1].memory.control.stamps()] if kept else []

    def _receive(self, line: Line, header: Header, kept: list[_CopyMemory], keep: tuple[int, int]) -> None:
        """Into the slot that is not to be kept of the last memory, if the state fits there, else into new memory."""
        # Who is lost may have been several saves behind.
        last, geometry = (
            kept[-1] if kept else None,
            header.geometry(COPY_SLOTS if header.data_bytes > SMALL_BYTES else SLOTS_MAX),
        )
        if last is not None and last.fits(header, geometry):
            with self._lock:
                slot = last.free(keep, header.stamp[:2])
            if slot < 0:
                raise PeerRefused(f"all copies of rank {header.rank} are being read")
            line.say({})
            last.memory.take(line, header, slot, fresh=False)
            with self._lock:
                self._coming.discard(header.rank)
                if len(list(last.memory.control.stamps())) > 1:  # what lies in the others is not needed any more
                    self._drop(header.rank, kept[:-1])
            return
        if last is not None and header.stamp[:2] < last.newest():
            raise PeerRefused(f"what is here of rank {header.rank} is newer, and laid out in another way")
        memory = _room("dlrover-copy", geometry, self._allow)
        try:
            line.say({})
            memory.take(line, header, 0, fresh=True)
        except BaseException:
            memory.close()
            raise
        with self._lock:
            self._made_count += 1
            light = bool(read_table(memory.map, memory.control).elsewhere)
            copy = Copy(
                memory.fd, self._made_count, header.rank, header.world, header.layout, geometry.total_bytes, light
            )
            for one in kept:
                one.clear(header.stamp)
            kept.append(_CopyMemory(copy, memory))
            self._made(copy)


@contextlib.contextmanager
def _nothing() -> Iterator[None]:
    yield None
