"""A worker begins its script again, in a fresh interpreter with nothing imported ahead.

Modules that were imported before the fork saw the environment of the zygote. Where the script sets a variable that one of them
has read, the worker must not go on: that module would keep the value from before. `Beginning.again` notes in the list that
nothing may be imported ahead for this script, and replaces the program of this process. Number, session, streams, seat and agent
stay, so nobody counts a restart. What the script has done so far it does again, as at any restart.

A worker that has peers cannot do that alone: they would wait for the process that they know. It ends instead, and all begin
again as after any failure.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Mapping
from typing import NamedTuple, NoReturn

from . import import_list, slot, wire
from .framework import Framework
from .seat import Seat, to_wire
from .spawn import module_command

ENDED = 1
"""The exit code of a worker whose peers must begin again, too; the error file says why."""


class Preloaded(NamedTuple):
    """The modules that the zygote imported before this worker was forked: those that an earlier worker of the script imported.

    ``reads``: the variables that they read while they were imported, each with its reader.
    ``harmless``: variables that the earlier worker set without harm.
    ``modules``: the names of those that were listed.
    ``path``: the list's file; empty: nothing was imported by a list.
    ``framework``: the framework's name.
    ``born``: the environment before anything was imported.
    """

    reads: Mapping[str, str] = {}
    harmless: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    path: str = ""
    framework: str = ""
    born: Mapping[str, str] = {}


NOTHING = Preloaded()


class ImportedAheadError(Exception):
    """The script sets a variable that a module has read which was imported ahead. Wanted: a restart without the list."""


class Beginning:
    """Keeps, until its first step, all that a worker needs to begin its script again. Make it before the script runs.

    ``fds``: stdout, stderr and step slot, as they came with the seat. Copies are kept: the script may redirect its own.
    """

    def __init__(self, seat: Seat, fds: tuple[int, ...], framework: Framework, preloaded: Preloaded) -> None:
        self._seat, self._framework, self._preloaded = seat, framework, preloaded
        self._fds = tuple(os.dup(one) for one in fds)
        self._folder = ""
        with contextlib.suppress(FileNotFoundError):  # it was removed: there is nothing to go back to
            self._folder = os.getcwd()

    def forget(self) -> None:
        """The first step is done: this worker never begins again. Idempotent."""
        for one in self._fds:
            with contextlib.suppress(OSError):  # the script has closed all that it found
                os.close(one)
        self._fds = ()

    def again(self, variable: str, reader: str) -> NoReturn:
        """The script is about to set ``variable``, which ``reader`` has read: begin again, or end where peers must, too."""
        import_list.refuse(
            self._preloaded.path, f"the script sets {variable}, which {reader} reads when it is imported"
        )
        why = f"the script sets {variable}, which {reader}, imported ahead for it, has read already"
        if not self._framework.has_peers():
            _say(f"{why}: this worker begins again; nothing is imported ahead for this script from now on")
            with contextlib.suppress(OSError):
                self._execute()
        _say(f"{why}: this worker ends, and all begin again; nothing is imported ahead for this script from now on")
        self._framework.record_error(ImportedAheadError(why))
        os._exit(ENDED)

    def _execute(self) -> None:
        """Become a plain worker that waits for this seat, and send it. Raises `OSError` where that fails."""
        link, theirs = wire.pair()
        slot.blank(self._fds[2])
        wire.send(link, to_wire(self._seat._replace(imports="")), self._fds)
        theirs.set_inheritable(True)
        command = [*module_command(f"{__package__}.plain"), "--fd", str(theirs.fileno())]
        command += ["--agent", str(os.getppid()), "--framework", self._preloaded.framework]
        if self._folder:
            os.chdir(self._folder)
        _end_children()
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        os.execve(command[0], command, dict(self._preloaded.born))  # noqa: S606 - no shell is wanted


def _say(words: str) -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # the script may have closed or replaced them
            if stream is sys.stderr:
                stream.write(f"dlrover: {words}\n")
            stream.flush()


def _end_children() -> None:
    """Kill the processes that the script has started: it starts them again. multiprocessing's own end by themselves."""
    started: set[int] = set()
    with contextlib.suppress(OSError):  # a kernel without CONFIG_PROC_CHILDREN: they end with the worker
        for task in os.listdir("/proc/self/task"):
            with open(f"/proc/self/task/{task}/children", encoding="ascii") as file:
                started.update(map(int, file.read().split()))
    for pid in started - servants():
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def servants() -> set[int | None]:
    """Processes that multiprocessing has started for itself."""
    tracker, server = (sys.modules.get(f"multiprocessing.{name}") for name in ("resource_tracker", "forkserver"))
    return {
        *([tracker._resource_tracker._pid] if tracker is not None else []),
        *([server._forkserver._forkserver_pid] if server is not None else []),
    }
