"""The node host: the half of the local backend that outlives masters.

It lives in the launcher's process, which is the real parent of all agents: a master may die and its standby finds every node
alive. It starts nodes and reaps them, sees their deaths at once (pidfd), and tells whoever observes. When its process ends,
SIGKILL included, the kernel kills the agents.

A name is used once. What was launched, died and was deleted is not started again by a late or repeated order, and orders of
a deposed master (a lower token) are refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

import structlog

from dlrover_backends.local.blanks import Ahead, Blanks
from dlrover_backends.shared import process, wire
from dlrover_backends.shared.asking import StaleToken
from dlrover_backends.shared.conversations import Conversations
from dlrover_backends.shared.observers import Observer
from dlrover_backends.shared.process import LocalCommand, Started
from dlrover_core.errors import LaunchRefused, MalformedMessage
from dlrover_core.job.orders import NodeLaunch
from dlrover_core.logs.place import NO_INODE, inode_of
from dlrover_core.runtime.backend import Observation
from dlrover_core.runtime.within import within
from dlrover_core.words import plain

KILL_WAIT_S = 5.0
MASTERS_MAX = 16
REASON_CHARS_MAX = 500
# What will not be better next time. The rest (memory, processes, descriptors) may.
_FOR_GOOD = frozenset(
    (
        errno.ENOENT,
        errno.EACCES,
        errno.EPERM,
        errno.ENOEXEC,
        errno.ENOTDIR,
        errno.EISDIR,
        errno.E2BIG,
        errno.ELOOP,
        errno.ENAMETOOLONG,
    )
)

log = structlog.get_logger("dlrover.host")


Command = Callable[[NodeLaunch, int], LocalCommand]


@dataclass(slots=True, eq=False)
class _Node:
    """One node, from the order to launch it until it is deleted and dead."""

    name: str
    phase: str = "pending"
    code: int = 0
    reason: str = ""
    changed_at: float = field(default_factory=time.monotonic)
    started: Started | None = None
    settled: asyncio.Event = field(default_factory=asyncio.Event)
    refusal: tuple[str, bool] | None = None
    unwanted: bool = False
    said: dict[str, Any] = field(default_factory=dict)

    @property
    def over(self) -> bool:
        return self.phase in ("succeeded", "failed", "gone")

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the agent; to a dead one, nothing."""
        if self.started is not None:
            self.started.signal(number)


@final
class LocalNodeHost:
    """Nodes as processes of this host, served to masters at the Unix socket ``path``.

    ``command`` says how a node's agent is started, given the token of the master that ordered it; or how agents of each group are
    started ahead (`Ahead`), which are told ``node``, its name in the job, when one is launched. ``limit`` is how many nodes may
    live at once; None: as many as come. ``masters`` are those that agents are started with: where whoever observes names others,
    all agents that were started ahead are told ``masters``. Open and close it in the main thread.
    """

    def __init__(
        self,
        path: str | Path,
        command: Command | Mapping[str, Ahead],
        *,
        limit: int | None = None,
        masters: Sequence[str] = (),
    ) -> None:
        self._path, self._limit = Path(path), limit
        self._masters, self._moved = tuple(masters), False
        self._command = None if isinstance(command, Mapping) else command
        self._blanks = {group: Blanks(one) for group, one in command.items()} if isinstance(command, Mapping) else {}
        self._hostname = plain(os.environ.get("DLROVER_HOST") or socket.gethostname())
        self._nodes: dict[str, _Node] = {}
        self._used: set[str] = set()
        self._token = 0
        self._observers: set[Observer] = set()
        self._server: asyncio.AbstractServer | None = None
        self._inode = NO_INODE
        self._conversations = Conversations(self._answer, self._observed)
        self._burials: set[asyncio.Task[None]] = set()
        self._empty = asyncio.Event()
        self._closing = False

    # ---- for the process it lives in

    async def open(self) -> None:
        """Serve masters. Raises `CoreError` when another launcher does already."""
        # The death signal of a child is sent at the end of the *thread* that started it.
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("a node host must run in the main thread: its nodes would die with any other")
        await self._listen()
        for blanks in self._blanks.values():
            blanks.open()

    async def restore(self) -> None:
        """Listen again where the socket was removed; conversations that there are go on. Raises `CoreError`."""
        if self._server is None or inode_of(self._path) == self._inode:
            return
        before = self._server
        await self._listen()
        before.close()
        log.warning("the socket was removed, and is made anew", path=str(self._path))

    async def _listen(self) -> None:
        self._server = await asyncio.start_unix_server(self._conversations.take, sock=wire.listen(self._path))
        self._inode = inode_of(self._path)

    async def warm(self) -> None:
        """Wait until no agent that was started ahead is still getting warm."""
        for blanks in self._blanks.values():
            await blanks.settled.wait()

    async def close(self, grace_s: float = 0.0) -> None:
        """Kill every node, SIGTERM first where there is a grace, wait until all are dead, and stop serving. Idempotent."""
        self._closing = True
        if self._server is None:
            return
        self._server.close()
        self._server = None
        with contextlib.suppress(OSError):  # gone with its folder, or on a disk that is read-only by now
            self._path.unlink()
        for blanks in self._blanks.values():
            await blanks.close()
        for node in list(self._nodes.values()):
            self._end(node, grace_s)
        if self._nodes:
            try:
                await within(grace_s + 2 * KILL_WAIT_S, self._empty.wait())
            except asyncio.TimeoutError:
                log.error("nodes cannot be killed", nodes=sorted(self._nodes))
        tasks = self._conversations.tasks | self._burials
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def __aenter__(self) -> LocalNodeHost:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def pid(self, name: str) -> int | None:
        """The process that is the node, for whoever wants to do something to it; None if it does not live."""
        node = self._nodes.get(name)
        return node.started.child.pid if node is not None and node.started is not None and not node.over else None

    def said(self) -> Mapping[str, Mapping[str, Any]]:
        """What the agent of each node that is wanted said of itself, and the node's ``phase``."""
        return {name: {**node.said, "phase": node.phase} for name, node in self._nodes.items() if not node.unwanted}

    def kill(self) -> None:
        """SIGKILL every node. Whoever observes is told; new ones are still taken."""
        for node in self._nodes.values():
            node.signal(signal.SIGKILL)

    # ---- orders

    def _fence(self, token: int) -> None:
        if token < self._token:
            raise StaleToken(token, self._token)
        self._token = token

    async def _launch(self, launch: NodeLaunch, token: int) -> None:
        self._fence(token)
        node = self._nodes.get(launch.name)
        if node is None:
            node = self._admit(launch.name)
            try:
                await self._start(node, launch, token)
            finally:
                node.settled.set()
        await node.settled.wait()
        if node.refusal is not None:
            reason, permanent = node.refusal
            raise LaunchRefused(reason, permanent=permanent)

    def _admit(self, name: str) -> _Node:
        """A place for a new node. Raises `LaunchRefused`."""
        if self._closing:
            raise LaunchRefused("the launcher is ending", permanent=False)
        if name in self._used:
            raise LaunchRefused(f"{name} was here and was deleted; a name is used once", permanent=True)
        if self._room() == 0:
            raise LaunchRefused(f"this host takes at most {self._limit} nodes at once", permanent=False)
        node = self._nodes[name] = _Node(name)
        self._empty.clear()
        self._turn(node, "pending")
        return node

    async def _start(self, node: _Node, launch: NodeLaunch, token: int) -> None:
        try:
            started = node.started = self._executed(launch, token)
        except Exception as error:  # noqa: BLE001  # whoever composes us may say nonsense in any way
            self._refuse(node, f"{type(error).__name__}: {error}", getattr(error, "errno", None))
            self._forget(node)
            return
        asyncio.get_running_loop().add_reader(started.pidfd, self._died, node)
        if started.control is not None:
            asyncio.get_running_loop().add_reader(started.control, self._hear, node, started)
        number, reason = await _reported(started)
        if reason:
            # The wrapper has ended or is about to; its burial takes it off the list.
            self._refuse(node, reason, number or None)
            return
        self._used.add(node.name)
        if node.phase == "pending":
            self._turn(node, "running")
            log.info("node started", node=node.name, pid=started.child.pid)

    @staticmethod
    def _hear(node: _Node, started: Started) -> None:
        try:
            said = started.hear()
        except BlockingIOError:
            return
        if said is not None:
            node.said.update(said)
        elif started.control is not None:
            asyncio.get_running_loop().remove_reader(started.control)  # its pidfd tells the rest

    def _executed(self, launch: NodeLaunch, token: int) -> Started:
        if self._command is not None:
            return Started(self._command(launch, token))
        blanks = self._blanks.get(launch.group)
        if blanks is None:
            raise ValueError(f"this host starts nodes of {', '.join(sorted(self._blanks))}, not of {launch.group!r}")
        news = {"masters": self._masters} if self._moved else {}
        return blanks.take(node=launch.node, **news)

    def _masters_are(self, masters: tuple[str, ...]) -> None:
        """Tell every agent where the masters have moved to. Whom to believe is the agent's to decide: by fencing tokens."""
        if not masters or masters == self._masters:
            return
        self._masters, self._moved = masters, True
        log.info("masters have moved", masters=", ".join(masters))
        for node in self._nodes.values():
            if node.started is not None and node.started.control is not None and not node.over:
                with contextlib.suppress(OSError):  # dead, or about to be
                    node.started.tell(masters=masters)

    @staticmethod
    def _refuse(node: _Node, reason: str, number: int | None) -> None:
        node.refusal = (reason[:REASON_CHARS_MAX], number is None or number in _FOR_GOOD)
        node.unwanted = True
        log.warning("node cannot be started", node=node.name, reason=node.refusal[0])

    def _delete(self, name: str, token: int, grace_s: float) -> None:
        self._fence(token)
        node = self._nodes.get(name)
        if node is not None:
            log.info("node is deleted", node=name, phase=node.phase, grace_s=grace_s)
            self._end(node, grace_s)

    def _end(self, node: _Node, grace_s: float) -> None:
        """Let a node be gone: now, or SIGTERM now and the rest after ``grace_s``."""
        again, node.unwanted = node.unwanted, True
        if node.over:
            self._forget(node)
        elif grace_s <= 0:
            node.signal(signal.SIGKILL)
        else:
            # To the agent alone: it knows how to stop what it started. Whatever it leaves is killed when it has ended.
            if not again:
                node.signal(signal.SIGTERM)
            asyncio.get_running_loop().call_later(grace_s, node.signal, signal.SIGKILL)

    # ---- deaths

    def _died(self, node: _Node) -> None:
        assert node.started is not None
        asyncio.get_running_loop().remove_reader(node.started.pidfd)
        if node.started.control is not None:
            asyncio.get_running_loop().remove_reader(node.started.control)
        burial = asyncio.ensure_future(self._bury(node))
        self._burials.add(burial)
        burial.add_done_callback(self._burials.discard)

    async def _bury(self, node: _Node) -> None:
        """The agent is dead: nothing of its node may be left when that is told."""
        assert node.started is not None
        code, alive = await asyncio.to_thread(node.started.bury, KILL_WAIT_S)
        node.started.close()
        node.code, node.reason = (code, process.told(code)) if code is not None else (-1, "reaped by somebody else")
        if alive:
            node.reason += f"; {alive} of its processes cannot be killed"
            log.error("processes cannot be killed", node=node.name, count=alive)
        if node.refusal is not None:
            node.reason = node.refusal[0]
        log.info("node ended", node=node.name, reason=node.reason)
        if node.unwanted:
            self._forget(node)
        else:
            self._turn(node, "succeeded" if node.code == 0 else "failed")

    def _forget(self, node: _Node) -> None:
        """Take a dead node off the list."""
        if self._nodes.pop(node.name, None) is not None:
            self._turn(node, "gone")
        if not self._nodes:
            self._empty.set()

    # ---- what is seen

    def _room(self) -> int | None:
        if self._limit is None:
            return None
        return max(0, self._limit - sum(not node.over for node in self._nodes.values()))

    def _turn(self, node: _Node, phase: str) -> None:
        node.phase, node.changed_at = phase, time.monotonic()
        for observer in self._observers:
            observer.tell(self._observation(node))

    def _observation(self, node: _Node) -> Observation:
        age_us = int((time.monotonic() - node.changed_at) * 1e6)
        return Observation(node.name, node.phase, node.code, node.reason, self._hostname, age_us=age_us)

    # ---- conversations

    async def _answer(self, request: tuple[Any, ...]) -> tuple[object, ...]:
        match request:
            case ("launch", int(token), (str(), *_) as fields):
                await self._launch(NodeLaunch(*fields), token)
                return ("done", None)
            case ("delete", int(token), str(name), grace_s):
                self._delete(name, token, float(grace_s))
                return ("done", None)
            case ("room", str()):
                return ("done", self._room())
        raise MalformedMessage(f"there is no order {request[0]!r} with {len(request) - 1} fields like these")

    async def _observed(
        self, words: tuple[Any, ...], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Tell one client everything from now on, until it goes away."""
        self._masters_are(_addresses(words))
        observer = Observer(writer)
        listed = [self._observation(node) for node in self._nodes.values()]
        self._observers.add(observer)
        try:
            await wire.write(writer, "listed", listed)
            await observer.serve(reader)
        finally:
            self._observers.discard(observer)


def _addresses(words: tuple[Any, ...]) -> tuple[str, ...]:
    """The masters that an observer names; none where it names none. Raises `MalformedMessage`."""
    match words:
        case () | ((),):
            return ()
        case (tuple(masters),) if len(masters) <= MASTERS_MAX and all(isinstance(one, str) for one in masters):
            return masters
    raise MalformedMessage("an observer names its masters as a list of addresses, or not at all")


async def _reported(started: Started) -> tuple[int, str]:
    """What the wrapper says went wrong; nothing when the program runs."""
    loop, ended, pieces = asyncio.get_running_loop(), asyncio.Event(), list[bytes]()
    fd, started.report = started.report, -1

    def readable() -> None:
        piece = os.read(fd, 4096)
        pieces.append(piece)
        if not piece:
            ended.set()
            loop.remove_reader(fd)

    loop.add_reader(fd, readable)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(fd)
        os.close(fd)
    number, _, reason = b"".join(pieces).decode(errors="replace").partition(" ")
    return (int(number), reason) if reason else (0, "")
