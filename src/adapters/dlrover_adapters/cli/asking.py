"""How a launcher knows that its masters answer: a socket for each, over which it asks and the master's event loop answers.

Not the port where agents come: only the master that leads listens there, and strangers may crowd it. So the master in reserve is
asked too, and the launcher knows which process does not answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import socket
import sys
from collections.abc import Callable

import structlog

from dlrover_adapters.agent import looks
from dlrover_core.runtime.watchdog import Verdict, Watch

QUESTION, LEADS, STANDS_BY = b"?", b"L", b"S"
UNKILLABLE_S = 5.0
"""A process that lives this long after SIGKILL waits inside the kernel: people are told, for nobody else can help."""

log = structlog.get_logger("dlrover.launcher")


class Asking:
    """The launcher's end for one master of ``job``, which hangs if it does not answer for ``hung_s``.

    ``say`` tells people one line; ``next_words`` what follows when this master, which leads or not, is killed. ``doubted`` is
    called while a master that leads has not answered for long, but does not hang yet.
    """

    def __init__(
        self,
        job: str,
        hung_s: float,
        say: Callable[[str], None],
        next_words: Callable[[bool], str],
        doubted: Callable[[], None],
    ) -> None:
        self._job, self._hung_s, self._say, self._next_words = job, hung_s, say, next_words
        self._doubted = doubted
        self._ours, self.theirs = socket.socketpair()
        self._ours.setblocking(False)
        self._kill: Callable[[], None] = lambda: None
        self._pid, self._leads = 0, False
        self._watch: Watch | None = None
        self._late: asyncio.TimerHandle | None = None

    def begin(self, pid: int, kill: Callable[[], None]) -> None:
        """The master runs, and holds its own copy of ``theirs``."""
        self.theirs.close()
        self._pid, self._kill = pid, kill
        loop = asyncio.get_running_loop()
        loop.add_reader(self._ours, self._hear)
        self._watch = Watch(
            self._hung_s,
            ask=self._ask,
            see=functools.partial(looks.seen, pid),
            judged=self._judged,
            doubted=self._in_doubt,
        )
        self._watch.open()

    def close(self) -> None:
        """The master is dead. Idempotent."""
        if self._watch is not None:
            self._watch.close()
            asyncio.get_running_loop().remove_reader(self._ours)
        if self._late is not None:
            self._late.cancel()
        self._ours.close()
        self.theirs.close()

    def _ask(self) -> bool:
        with contextlib.suppress(OSError):  # it is dying
            return self._ours.send(QUESTION) > 0
        return False

    def _hear(self) -> None:
        try:
            said = self._ours.recv(64)
        except BlockingIOError:
            return
        except OSError:
            said = b""
        if not said:
            asyncio.get_running_loop().remove_reader(self._ours)  # its exit tells the rest
            return
        self._leads = said.endswith(LEADS)
        assert self._watch is not None, "only who is watched is heard"
        self._watch.answered()

    def _in_doubt(self) -> None:
        if self._leads:
            self._doubted()

    def _judged(self, verdict: Verdict) -> None:
        who = f"job {self._job}: the master {'that leads' if self._leads else 'in reserve'} (process {self._pid})"
        silent = f"{who} has not answered for {round(verdict.silent_s, 1):g} s: {verdict.why}"
        log.warning("master hangs", pid=self._pid, leads=self._leads, killed=verdict.kill, why=verdict.why)
        if not verdict.kill:
            self._say(f"{silent}; it is not killed, and failures wait until the debugger lets it go on")
            return
        self._say(f"{silent}; it is killed, and {self._next_words(self._leads)}")
        self._kill()
        self._late = asyncio.get_running_loop().call_later(UNKILLABLE_S, self._unkillable, who)

    def _unkillable(self, who: str) -> None:
        log.error("master cannot be killed", pid=self._pid)
        self._say(
            f"{who} cannot be killed: it waits inside the kernel, as for a dead disk; until it is dead, failures wait"
        )


def answer(fd: int, leads: Callable[[], bool]) -> None:
    """Answer a launcher's questions from this process's event loop, which must run. ``fd`` is owned from now on."""
    line = socket.socket(fileno=fd)
    line.setblocking(False)
    loop = asyncio.get_running_loop()

    def hear() -> None:
        try:
            said = line.recv(64)
        except BlockingIOError:
            return
        except OSError:
            said = b""
        if not said:  # the launcher is dead, and the kernel is about to end this process
            loop.remove_reader(line)
            line.close()
            return
        with contextlib.suppress(OSError):
            line.send(LEADS if leads() else STANDS_BY)

    os.set_inheritable(fd, False)
    loop.add_reader(line, hear)


def on_terminal(command: str) -> Callable[[str], None]:
    """Tells people one line on stderr, over the live line if there is one."""

    def say(words: str) -> None:
        clear = "\r\x1b[K" if sys.stderr.isatty() else ""
        with contextlib.suppress(OSError):  # nobody reads it any more
            print(f"{clear}{command}: {words}", file=sys.stderr)

    return say
