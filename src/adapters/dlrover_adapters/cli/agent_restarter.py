"""The agent of one host in a joining job, kept: started again whenever it dies or is released, until the job is over."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import structlog

from dlrover_backends.local.blanks import Ahead, watched
from dlrover_backends.shared.process import Started, blank
from dlrover_core.runtime.watchdog import Watch

OVER = ("succeeded", "failed", "stopped")
RELEASED = ("drained", "scaled down", "given up")
"""The job goes on without this host."""

AGAIN_S, AGAIN_MAX_S, STEADY_S = 0.1, 30.0, 60.0
SHORT_LIVES_MAX = 8
CLOSE_S, KILL_WAIT_S = 5.0, 5.0

log = structlog.get_logger("dlrover.launcher")


class Ended(NamedTuple):
    """Why there will be no further agent.

    ``outcome``: one of `OVER` or `RELEASED`, "refused", "broken", or empty: it was asked to go.
    """

    outcome: str
    reason: str
    root: str = ""


class AgentRestarter:
    """Keeps one agent. Also what `Supervisor` wants of a host of nodes: opened, warm, killed, closed.

    ``say`` is told, for people, when no master is heard, and when one is again. An agent that hangs before it is a node is
    killed, and another one follows; later that would end its workers, and the master judges its silence.
    """

    def __init__(self, ahead: Ahead, say: Callable[[str], None]) -> None:
        self._ahead, self._first, self._tell = ahead, list(ahead.first), say
        self._watch: Watch | None = None
        self._now: Started | None = None
        self._said: dict[str, Any] = {}
        self._asked = ""
        self._warm = asyncio.Event()
        self._life: asyncio.Task[Ended] | None = None
        self._wake, self._open = asyncio.Event(), asyncio.Event()

    async def __aenter__(self) -> None:
        self._open.set()
        self._life = asyncio.create_task(self._live(), name="kept agent")

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def ended(self) -> Ended:
        """Wait for the end of the last agent."""
        await self._open.wait()
        assert self._life is not None, "it is open"
        return await asyncio.shield(self._life)

    async def warm(self) -> None:
        """Wait until the first agent can start workers, or has died."""
        await self._warm.wait()

    async def restore(self) -> None:
        """It has no sockets that could be removed."""

    def leave(self, reason: str) -> None:
        """Let the agent stop its workers in their time and go; there will be no further one."""
        self._asked = self._asked or reason
        self._wake.set()
        if self._now is not None:
            self._now.signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL the agent, and with it its workers; another one follows unless it was asked to leave."""
        if self._now is not None:
            self._now.signal(signal.SIGKILL)

    def said(self) -> Mapping[str, Mapping[str, Any]]:
        """Nothing: how the workers of the job's other hosts fare is not known here."""
        return {}

    async def close(self, grace_s: float = 0.0) -> None:
        """Let it end, in short or within the grace if that is longer, and kill it if it does not."""
        if self._life is None:
            return
        self.leave("the launcher ends")
        _, late = await asyncio.wait({self._life}, timeout=max(CLOSE_S, grace_s))
        if late:
            self.kill()
            await asyncio.wait({self._life})

    # ---- lives

    async def _live(self) -> Ended:
        short, pause_s = 0, AGAIN_S
        loop = asyncio.get_running_loop()
        while True:
            began = loop.time()
            code = await self._one_life()
            end = self._verdict(code)
            if end is not None:
                return end
            if "ending" in self._said or loop.time() - began >= STEADY_S:
                short, pause_s = 0, AGAIN_S
            else:
                short += 1
                if short >= SHORT_LIVES_MAX:
                    why = self._said.get("error") or f"the last one ended with {code}"
                    return Ended("broken", f"{short} agents in a row died: {why}")
            if await self._rest(pause_s):
                return Ended("", self._asked)
            pause_s = min(AGAIN_MAX_S, pause_s * 2)

    async def _rest(self, seconds: float) -> bool:
        """Wait before the next one; True when nobody is wanted any more."""
        waiting = asyncio.ensure_future(self._wake.wait())
        done, _ = await asyncio.wait({waiting}, timeout=0.0 if "ending" in self._said else seconds)
        waiting.cancel()
        return bool(done)

    def _verdict(self, code: int | None) -> Ended | None:
        """What the agent's last words mean; None: the next one, please."""
        if "ending" in self._said:
            outcome, reason, root = self._said["ending"]
            if outcome in OVER or outcome in RELEASED:
                return Ended(outcome, reason, root)
            if outcome:
                log.info("agent is released, another one takes its seat", outcome=outcome, reason=reason)
                return Ended("", self._asked) if self._asked else None
            if self._asked:
                return Ended("", self._asked)
            return Ended("broken" if self._said.get("abandoned") else "refused", reason)
        if self._said.get("refused"):
            return Ended("refused", self._said["error"])
        if self._asked:
            return Ended("", self._asked)
        log.warning("agent died", code=code, error=self._said.get("error", ""))
        return None

    async def _one_life(self) -> int | None:
        """Start an agent, hear it out, bury it; its exit code."""
        self._said = {}
        try:
            now = self._now = self._first.pop() if self._first else blank(self._ahead.command)
        except OSError as error:  # a limit, which may pass: the next try comes after a pause, as after a death
            self._said["error"] = f"it cannot be started: {error.strerror or error}"
            self._warm.set()
            return None
        assert now.control is not None, "a blank has a socket"
        loop, dead = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(now.pidfd, dead.set)
        loop.add_reader(now.control, self._hear, now)
        if self._asked:
            now.signal(signal.SIGTERM)
        watch = self._watch = watched(now, self._ahead)
        watch.open()
        try:
            await dead.wait()
            while self._hear(now):
                pass
        finally:
            self._now = None
            watch.close()
            loop.remove_reader(now.pidfd)
            loop.remove_reader(now.control)
            now.signal(signal.SIGKILL)
            code, _ = await asyncio.to_thread(now.bury, KILL_WAIT_S)
            now.close()
            self._warm.set()
        return code

    def _hear(self, now: Started) -> bool:
        """Take one word of it; False when there is none."""
        try:
            said = now.hear()
        except BlockingIOError:
            return False
        if said is None:
            assert now.control is not None
            asyncio.get_running_loop().remove_reader(now.control)
            return False
        self._said.update(said)
        if self._watch is not None:
            self._watch.answered()
            if said.get("node"):
                self._watch.close()
        if said.get("warm"):
            self._warm.set()
        if "alone" in said:
            self._tell("no master is heard; workers go on without" if said["alone"] else "a master is heard again")
        return True
