"""Levelling: a scheduler's nodes are made to match the desired state, again and again.

No half-done effect is remembered. Every pass compares what the backend last listed with the desired state: missing nodes
are launched, unnamed nodes are deleted. A new master levels as the old one did.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any, NamedTuple

import structlog

from dlrover_core.diagnosis.classify import REFUSED_WORD
from dlrover_core.errors import LaunchRefused
from dlrover_core.job import notices
from dlrover_core.job.node_lifecycle import COMING
from dlrover_core.job.nodes import REFUSED, Node, Observed, ObserveNodes
from dlrover_core.job.orders import NodeLaunch
from dlrover_core.runtime.backend import Admission, Backend, Changed, Listed, Observation, Reserving
from dlrover_core.runtime.leader import Leader
from dlrover_core.runtime.rooms import Rooms
from dlrover_core.runtime.seats import Seats
from dlrover_core.runtime.sizes import Sizes

CONCURRENT_MAX = 16
BACK_OFF_S = (0.2, 1.0, 5.0, 15.0, 30.0)
FAILED_MAX = 4
"""So often a deletion is tried at the end of a job, six seconds long, until somebody else must see to the node."""
RELEVEL_S = 30.0
HEAR_S = 2.0
"""So often a backend is told which standbys answer: that this master still leads, too."""
WORDS_EVERY_S = 60.0

log = structlog.get_logger("dlrover.master")


class Call(NamedTuple):
    """One request to a backend."""

    verb: str
    name: str


class Leveller:
    """Levels one backend to one master's desired state. ``seats``: names its standbys; None: it has none."""

    def __init__(self, master: Leader, backend: Backend, seats: Seats | None = None) -> None:
        self._master, self._backend, self._seats = master, backend, seats
        if seats is not None:
            seats.reserves = isinstance(backend, Reserving)
        self._wake = asyncio.Event()
        self._listed: dict[str, Observation] = {}
        self._known = self._clearing = self._begun = False
        self._busy: set[str] = set()
        self._accepted: set[str] = set()
        self._failures: dict[Call, int] = {}
        self._not_before: dict[Call, float] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._limit = asyncio.Semaphore(CONCURRENT_MAX)
        self._words_at = 0.0
        self._rooms = Rooms(master, backend, self._room_found)
        self._sizes = Sizes(master, backend, self._wake.set)

    @property
    def empty(self) -> bool:
        """Has the backend said that nothing of the job is left?"""
        return self._known and not self._listed

    @property
    def helpless(self) -> bool:
        """Has the backend failed again and again at the deletion of every node that is left? Its platform is away."""
        failed = (self._failures.get(Call("delete", name), 0) for name in self._listed)
        return bool(self._listed) and all(times >= FAILED_MAX for times in failed)

    def clear(self) -> None:
        """The job is over and has waited long enough: delete whatever is left."""
        self._clearing = True
        self._wake.set()

    def wake(self) -> None:
        """The desired state has changed."""
        self._sizes.news()
        self._wake.set()

    async def run(self) -> None:
        """Observe and level until cancelled."""
        beside = [asyncio.ensure_future(one) for one in self._beside()]
        try:
            while True:
                self._pass()
                await self._wait()
        finally:
            for task in (*beside, *self._tasks):
                task.cancel()
            await asyncio.gather(*beside, *self._tasks, return_exceptions=True)

    def _beside(self) -> tuple[Coroutine[Any, Any, None], ...]:
        return self._observe(), self._rooms.run(), self._sizes.run(), self._hear()

    async def _hear(self) -> None:
        """Tell the backend which standbys answer, again and again, while this master may order."""
        while isinstance(self._backend, Reserving):
            if self._known and self._master.may_order():
                self._tell_heard()
            await asyncio.sleep(HEAR_S)

    def _tell_heard(self) -> None:
        """Not before the job's first nodes have joined: standbys would take room and processors that these start with."""
        if self._seats is None or not isinstance(self._backend, Reserving):
            return
        if not self._begun:
            # A new leader of an old job begins where that is: all its nodes may be dead just now.
            nodes, worlds = self._master.state.nodes.nodes.values(), self._master.state.world
            was = {member.node for world in worlds.worlds.values() for member in world.members}
            been = bool(was) or any(one.joined or one.incarnation for one in nodes)
            self._begun = been and not any(_arrives(one) for one in nodes if one.node not in was)
        if self._begun:
            self._backend.heard(self._seats.heard())

    def _room_found(self) -> None:
        """Launch at once what was refused for want of room."""
        for table in (self._not_before, self._failures):
            for call in [call for call in table if call.verb == "launch" and call.name not in self._accepted]:
                del table[call]
        self._wake.set()

    async def _wait(self) -> None:
        loop = asyncio.get_running_loop()
        pending = [at - loop.time() for at in self._not_before.values() if at > loop.time()]
        # Not wait_for: before Python 3.12 it loses a cancellation that comes together with the event (bpo-37658).
        timer = loop.call_later(min([RELEVEL_S, *pending]), self._wake.set)
        try:
            await self._wake.wait()
        finally:
            timer.cancel()
        self._wake.clear()

    async def _observe(self) -> None:
        attempt = 0
        while True:
            try:
                async for seen in self._backend.observe():
                    attempt = 0
                    self._seen(seen)
            except Exception as error:  # noqa: BLE001  # a backend may raise anything; it is asked again
                log.warning("backend cannot be observed", error=f"{type(error).__name__}: {error}")
            await asyncio.sleep(BACK_OFF_S[min(attempt, len(BACK_OFF_S) - 1)])
            attempt += 1

    def _seen(self, seen: Listed | Changed | Admission) -> None:
        if isinstance(seen, Admission):
            self._sizes.said(seen)
            self._room_found()
            return
        if isinstance(seen, Listed):
            self._known = True
            self._listed = {node.name: node for node in seen.nodes}
            self._accepted &= set(self._listed)
        elif seen.node.phase == "gone":
            self._listed.pop(seen.node.name, None)
        else:
            self._listed[seen.node.name] = seen.node
        nodes = seen.nodes if isinstance(seen, Listed) else (seen.node,)
        self._seat(nodes)
        observed = tuple(self._translate(node) for node in nodes)
        self._master.tell(ObserveNodes(observed, isinstance(seen, Listed)))
        for command in notices.told(self._master.state.notices, observed):
            self._master.tell(command)
        self._rooms.news()
        self._wake.set()
        self._master.left.set()

    def _seat(self, nodes: tuple[Observation, ...]) -> None:
        """Let standbys that have become nodes be told their names."""
        if self._seats is not None:
            for one in nodes:
                if one.seat and one.phase in ("pending", "running"):
                    self._seats.given(one.seat, self._short(one.name))

    def _short(self, name: str) -> str:
        """A node's name within the job."""
        return name.removeprefix(f"{self._master.state.job.name}-")

    def _translate(self, seen: Observation) -> Observed:
        left_us = max(1, seen.notice_us - seen.age_us) if seen.notice_us else 0
        return Observed(
            self._short(seen.name),
            seen.phase,
            seen.exit_code,
            seen.reason,
            seen.host,
            seen.age_us,
            seen.domain,
            seen.waits,
            seen.notice,
            left_us,
        )

    def _pass(self) -> None:
        """One levelling pass. It first asks the local clock whether this master still leads."""
        if not self._known or not self._master.may_order():
            return
        desired, now = self._master.desired, asyncio.get_running_loop().time()
        self._tell_heard()
        if now >= self._words_at:
            self._words_at = now + WORDS_EVERY_S
            self._tell_words()
        for node in desired.launch if self._sizes.known else ():
            if node.name not in self._listed and node.name not in self._accepted:
                self._start(Call("launch", node.name), partial(self._launch, node), now)
        for name in list(self._listed):
            if name not in desired.names or self._clearing:
                self._start(Call("delete", name), partial(self._delete, name), now)

    def _tell_words(self) -> None:
        """Record why nodes wait in the present words: changes that came too soon after others were not recorded."""
        here = self._master.state.nodes.nodes
        said = [self._translate(seen) for seen in self._listed.values() if seen.phase == "pending" and seen.waits]
        news = tuple(one for one in said if one.node in here and here[one.node].waits != one.waits)
        if news:
            self._master.tell(ObserveNodes(news))

    def _start(self, call: Call, action: Callable[[], Awaitable[None]], now: float) -> None:
        if call.name in self._busy or self._not_before.get(call, 0.0) > now:
            return
        self._busy.add(call.name)
        task = asyncio.ensure_future(self._guarded(call, action))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _guarded(self, call: Call, action: Callable[[], Awaitable[None]]) -> None:
        loop = asyncio.get_running_loop()
        try:
            async with self._limit:
                if not self._master.may_order():
                    # The call waited too long for its turn.
                    return
                await action()
            self._failures.pop(call, None)
            # Accepted does not mean done: without an observation, the call is repeated.
            self._not_before[call] = loop.time() + BACK_OFF_S[-1]
        except Exception as error:  # noqa: BLE001  # unknown: level again
            failures = self._failures.get(call, 0)
            self._failures[call] = failures + 1
            self._master.left.set()
            self._not_before[call] = loop.time() + BACK_OFF_S[min(failures, len(BACK_OFF_S) - 1)]
            log.warning(
                "backend call failed, will be tried again",
                call=call.verb,
                node=call.name,
                error=f"{type(error).__name__}: {error}",
            )
        finally:
            self._busy.discard(call.name)
            self._wake.set()
            self._prune()

    def _prune(self) -> None:
        if self._busy:
            # The last call does it for all.
            return
        alive = set(self._listed) | {node.name for node in self._master.desired.launch} | self._busy
        for table in (self._not_before, self._failures):
            for call in [call for call in table if call.name not in alive]:
                del table[call]

    async def _launch(self, node: NodeLaunch) -> None:
        try:
            seat = await self._backend.launch(node, self._master.token)
        except LaunchRefused as refused:
            if not refused.permanent:
                # The node waits and is asked for again. This is no failure.
                waits = refused.reason or "its backend refuses it for now"
                self._master.tell(ObserveNodes((Observed(node.node, REFUSED, waits=waits),)))
                raise
            log.error("backend refuses a node for good", node=node.name, reason=refused.reason)
            self._master.tell(ObserveNodes((Observed(node.node, "failed", -1, f"{REFUSED_WORD}: {refused.reason}"),)))
            return
        self._accepted.add(node.name)
        if seat and self._seats is not None:
            self._seats.given(seat, node.node)

    async def _delete(self, name: str) -> None:
        await self._backend.delete(name, self._master.token, self._master.delete_grace_s(name))


def _arrives(node: Node) -> bool:
    """Is it the first node of its place, on its way to a place that the platform has for it?"""
    return not (node.incarnation or node.joined or node.released or node.waiting) and node.state in COMING
