"""Our line to the master: the core's agent, on a loop in a thread of its own beside torch's elastic agent.

The thread is a daemon and owns no signal: whatever happens to torchrun happens in its main thread. What ends the line ends up
on the desk as one of torch's rendezvous errors.
"""

from __future__ import annotations

import asyncio
import contextvars
import secrets
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

import structlog
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousTimeoutError,
)

from dlrover_core.errors import ConnectionLost, CoreError, TokenRefused
from dlrover_core.runtime.agent import Agent
from dlrover_core.runtime.ending import Ending
from dlrover_core.runtime.transport import Connection, Dialer
from dlrover_core.runtime.unchecked import Unchecked

from .torchrun_desk import ENDED, FINISHED, WAITING, Desk
from .torchrun_launcher import OpenStore, TorchrunLauncher, Words

MIND_S = 0.5
UNMASTERED_S = 3.0
"""Without a word from a master for this long, nothing is waited for at torchrun's end."""
UNPLACED_LOOKS = 6
"""A node that a master has known at so many looks has a place, if there is one."""

# A node that is released for these reasons is welcome again, as another.
AGAIN = ("replaced", "lost", "left")

log = structlog.get_logger("dlrover.torchrun")


class Parts(NamedTuple):
    """What the composition hands over.

    ``address``: where peers reach this host's stores, which are bound to ``bind``. ``join_s``: without a master, or without a
    place in the job, nobody waits longer than this; a ``reserve`` waits for a place without end. ``trouble`` says why masters
    kept here cannot run, ``ended`` whether they have ended with the job, ``close`` ends them after so many seconds, None for
    their own end. ``over`` asks a master whether the job is over, ``stop`` has one stop the job, for a reason; both raise
    `CoreError` where none answers. ``say`` tells people.
    """

    job: str
    masters: tuple[str, ...]
    dialer: Callable[[], Dialer]
    host: str
    bind: str
    address: str
    seat: str
    join_s: float
    reserve: bool
    open_store: OpenStore
    words: Callable[[str], Words]
    trouble: Callable[[], str]
    ended: Callable[[], bool]
    close: Callable[[float | None], None]
    over: Callable[[], bool]
    stop: Callable[[str], None]
    say: Callable[[str], None]


class _Noting:
    """A dialer that remembers why it did not get through."""

    def __init__(self, dialer: Dialer) -> None:
        self._dialer = dialer
        self.trouble = ""

    async def connect(self, address: str) -> Connection:
        """As its dialer."""
        try:
            return await self._dialer.connect(address)
        except ConnectionLost as lost:
            self.trouble = str(lost)
            raise

    async def close(self) -> None:
        """As its dialer."""
        await self._dialer.close()


class Line:
    """Agents, one after the other, for as long as torchrun wants to take part and the job lives."""

    def __init__(self, desk: Desk, parts: Parts) -> None:
        self._desk, self._parts = desk, parts
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=context.run, args=(self._main,), name="dlrover", daemon=True)
        self._agent: Agent | None = None
        self._unmastered_s = 0.0
        self._placeless, self._unplaced = False, 0

    @property
    def started(self) -> bool:
        """Has it been started?"""
        return self._thread.ident is not None

    def start(self) -> None:
        """Begin to talk, once."""
        if not self.started:
            self._thread.start()

    def wait(self, seconds: float) -> bool:
        """Is the line over, within so many seconds? Where no master has been heard for a while, nothing is waited for."""
        now = time.monotonic()
        until = now + seconds
        # What was looked at before may be old: a master has just been found.
        known_at = now + 2 * MIND_S
        while self._thread.is_alive() and self.started:
            left = until - time.monotonic()
            unmastered = self._unmastered_s > UNMASTERED_S and time.monotonic() > known_at
            if left <= 0 or (unmastered and left > 1.0):
                return False
            self._thread.join(min(left, MIND_S))
        return True

    # ---- in the thread

    def _main(self) -> None:
        try:
            error = asyncio.run(self._serve())
        except TokenRefused as refused:
            error = RendezvousConnectionError(str(refused))
        except CoreError as failed:
            error = RendezvousError(str(failed))
        except BaseException as bug:
            self._desk.close(RendezvousError(f"the line to the master broke: {type(bug).__name__}: {bug}"))
            raise
        log.info("line ends", reason=str(error))
        self._desk.close(error)

    async def _serve(self) -> RendezvousError:
        while True:
            ending = await self._live()
            again = ending.outcome in AGAIN and self._desk.phase not in (FINISHED, ENDED)
            if not again:
                return self._error(ending)
            log.info("released; standing by as another node", outcome=ending.outcome, reason=ending.reason)

    async def _live(self) -> Ending:
        """One identity, from standby to release."""
        parts, noting = self._parts, _Noting(self._parts.dialer())
        launcher = TorchrunLauncher(
            self._desk,
            open_store=parts.open_store,
            bind=parts.bind,
            address=parts.address,
            leave=self._left,
            words=self._words,
        )
        agent = self._agent = Agent(
            "",
            launcher=launcher,
            dialer=noting,
            masters=parts.masters,
            boot=secrets.randbits(62),
            host=parts.host,
            address=parts.address,
            seat=parts.seat,
            # Torch's workers tell none: without a master they train on all the same.
            steps_told=False,
            duties=[Unchecked()],
        )
        minding = asyncio.ensure_future(self._mind(agent, noting))
        try:
            await agent.run()
        finally:
            minding.cancel()
            await asyncio.gather(minding, return_exceptions=True)
        return agent.ending

    async def _words(self, error_file: str) -> Words:
        return await asyncio.get_running_loop().run_in_executor(None, self._parts.words, error_file)

    def _left(self, reason: str) -> None:
        if self._agent is not None:
            self._agent.leave(reason)

    async def _mind(self, agent: Agent, noting: _Noting) -> None:
        """Nobody waits for ever for a master that does not answer."""
        loop = asyncio.get_running_loop()
        waits_since = loop.time()
        while True:
            await asyncio.sleep(MIND_S)
            if self._desk.phase != WAITING:
                waits_since = loop.time()
            self._unmastered_s = agent.unmastered_s
            trouble = self._parts.trouble()
            if trouble and self._desk.phase == WAITING:
                self._desk.close(RendezvousConnectionError(f"job {self._parts.job!r} cannot be led here: {trouble}"))
                agent.leave(trouble)
            if self._parts.ended() and self._desk.phase == WAITING:
                # Nobody listens any more, and so nobody says it.
                self._desk.close(
                    RendezvousClosedError(f"job {self._parts.job!r} is over; there is nothing left to join")
                )
                agent.leave("the job is over")
            self._mind_place(agent, loop.time() - waits_since)
            if min(self._unmastered_s, loop.time() - waits_since) >= self._parts.join_s:
                where = ", ".join(self._parts.masters)
                self._desk.close(
                    RendezvousConnectionError(
                        f"no master of job {self._parts.job!r} answered at {where} within {self._parts.join_s:g} s: "
                        f"{noting.trouble or 'nothing was heard'}. Is torchrun running on that host, with the same endpoint?"
                    )
                )
                agent.leave("no master")

    def _mind_place(self, agent: Agent, waited_s: float) -> None:
        """Tell a node that a master knows and has no place for; it waits for one no longer than a rendezvous may take."""
        parts = self._parts
        heard = self._unmastered_s < min(UNMASTERED_S, waited_s - MIND_S)
        if agent.node or agent.leaving or not heard:
            self._unplaced = 0
            return
        self._unplaced += 1
        if self._unplaced < UNPLACED_LOOKS:
            return
        if not self._placeless:
            self._placeless = True
            bound = "" if parts.reserve else f", for join_timeout={parts.join_s:g} s at most"
            words = f"all nodes of job {parts.job!r} are there (--nnodes MAX); this one waits until one of them goes"
            parts.say(f"{words}{bound}")
        if waited_s >= parts.join_s and not parts.reserve:
            self._desk.close(
                RendezvousTimeoutError(
                    f"job {parts.job!r} had no place for this node within {parts.join_s:g} s: all its nodes are there "
                    "(--nnodes MAX). --rdzv-conf join_timeout=SECONDS waits longer, reserve=true without end"
                )
            )
            agent.leave("no place")

    def _error(self, ending: Ending) -> RendezvousError:
        job = f"job {self._parts.job!r}"
        if ending.outcome == "failed":
            words = f"{job} failed: {ending.root or ending.reason}"
            return RendezvousTimeoutError(words) if "joined within" in words else RendezvousClosedError(words)
        if ending.outcome in ("succeeded", "stopped"):
            return RendezvousClosedError(f"{job} has {ending.outcome}; there is nothing left to join")
        if ending.outcome:
            return RendezvousClosedError(f"this node of {job} was released: {ending.outcome}")
        return RendezvousClosedError(f"this node has left {job}: {ending.reason}")
