"""The keeper: the actor that is a node. It starts the node's agent, passes on what it is asked, and ends when the agent has.

Ray ends an actor by SIGKILL, so the agent must die with it: it is started from the actor's main thread, whose end is the
process's, with a death signal. Ray calls the constructor and the methods of the default concurrency group in the main thread;
those of `ORDERS` run beside it, and may be called while `run` waits.

The exit status of the agent is the actor's own: Ray writes it into the death cause, where every desk finds it, and behind it
what the agent printed last.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import select
import signal
import socket
import stat
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dlrover_backends.shared.process import LocalCommand, Started

ORDERS = "orders"
KILL_WAIT_S = 5.0
UNPACKED_S, UNPACKED_LOOK_S = 10.0, 0.05
STDERR, WORDS_MAX = 2, 2000
OWN = ("OMP_NUM_THREADS",)
"""Variables that Ray sets for an actor's own process. An agent sets them for its workers."""


class Plan(NamedTuple):
    """How the keeper starts its agent.

    command:   the whole command; used where there are no ``arguments``
    arguments: the words behind ``dlrover-run``, for this host's interpreter
    env:       variables beside those of the Ray worker
    cwd:       where the command is run; empty: where Ray has unpacked the runtime environment
    kept:      variables that Ray's worker has and the runtime environment has set: they stay as they are
    """

    command: tuple[str, ...]
    arguments: tuple[str, ...]
    env: Mapping[str, str]
    cwd: str = ""
    kept: tuple[str, ...] = ()


class Keeper:
    """Holds one agent. ``plan`` is a `Plan` as a dictionary, so that Ray needs no class of ours to carry it."""

    def __init__(self, plan: dict[str, Any]) -> None:
        import ray

        self._lock = threading.RLock()  # a handler of signals may come between
        self._words_from = size_of(STDERR)
        self._started = _start(Plan(**plan))
        self._killer: threading.Timer | None = None
        # Ray's own handler would end this process at once, and the agent with it.
        signal.signal(signal.SIGTERM, lambda *_: self.stop(KILL_WAIT_S))
        # Nobody else needs to live for the agent's end to be told.
        ray.get_runtime_context().current_actor.run.remote()

    def run(self) -> None:
        """Wait for the agent's end, and end in the same way."""
        poll = select.poll()
        poll.register(self._started.pidfd, select.POLLIN)
        host = raylet()
        if host >= 0:
            poll.register(host, select.POLLIN)
        over: list[int] = []
        # In pieces: Python runs handlers of signals between them.
        while self._started.pidfd not in over:
            over = [fd for fd, _ in poll.poll(1000)]
            if host in over:
                # Ray would end this process, which waits here and cannot be told; and a host without its raylet is lost to Ray.
                self._started.signal(signal.SIGKILL)
                poll.unregister(host)
        code, _ = self._started.bury(KILL_WAIT_S)
        raise ended(code, last_words(STDERR, self._words_from))

    def ready(self) -> int:
        """The agent's pid, once it runs."""
        return self._started.child.pid

    def stop(self, grace_s: float) -> None:
        """SIGTERM to the agent, SIGKILL after ``grace_s``; without a grace SIGKILL now. Asking again may shorten the grace."""
        with self._lock:
            if grace_s > 0 and self._killer is None:
                self._started.signal(signal.SIGTERM)
            if self._killer is not None:
                self._killer.cancel()
            self._killer = threading.Timer(max(0.0, grace_s), self._started.signal, (signal.SIGKILL,))
            self._killer.daemon = True
            self._killer.start()


def _start(plan: Plan) -> Started:
    """Start the agent. Raises `OSError`, `RuntimeError`."""
    if plan.cwd and not Path(plan.cwd).is_dir():
        raise FileNotFoundError(
            f"{plan.cwd} is not on host {socket.gethostname()}: share that folder between the hosts, or send it with "
            "--runtime-env FILE, where FILE says working_dir: ."
        )
    if not plan.cwd:
        enter_again()
    words = command(plan.arguments) if plan.arguments else plan.command
    before = dict(os.environ)
    for name in (*OWN, *(name for name in os.environ if name.startswith("DLROVER_"))):
        if name not in plan.kept:
            os.environ.pop(name, None)
    try:
        started = Started(LocalCommand(words, {**_here(), **plan.env}, plan.cwd or None))
    finally:
        os.environ.update(before)
    wrong = _reported(started)
    if wrong:
        started.end()
        raise RuntimeError(wrong)
    return started


def enter_again() -> None:
    """Go into the folder that now stands at the path of this process's working directory, if the directory itself was removed.

    Ray 2.60 may remove a ``working_dir`` and unpack it again while processes begin in it: for each raylet of a host, and for a
    second runtime environment with the same folder that is made at the same time. Waits for the folder at most `UNPACKED_S`.
    """
    deadline = time.monotonic() + UNPACKED_S
    while True:
        try:
            Path.cwd()
        except FileNotFoundError:
            if time.monotonic() > deadline:
                return  # the agent says so
            with contextlib.suppress(FileNotFoundError):
                os.chdir(str(Path("/proc/self/cwd").readlink()).removesuffix(" (deleted)"))
                continue
            time.sleep(UNPACKED_LOOK_S)
        else:
            return


def command(arguments: Sequence[str]) -> tuple[str, ...]:
    """``dlrover-run`` with these words, by this process's interpreter. Raises `RuntimeError` where it is not installed."""
    return (sys.executable, "-u", _launcher(), "dlrover_adapters.cli.run", *arguments)


def ended(code: int | None, words: str) -> SystemExit:
    """How the actor ends. ``code``: the agent's, negative for a signal, None where it is unknown; ``words``: its last ones.

    Ray writes into the death cause what it finds on the exception by a name of its own (private); without it, the status alone.
    """
    over = SystemExit(1 if code is None else 128 - code if code < 0 else code)
    if words and code is not None and code > 0:
        over.unexpected_error_traceback = words  # type: ignore[attr-defined]
    return over


def size_of(fd: int) -> int:
    """How much has been written to a file; 0: it is none."""
    try:
        return os.fstat(fd).st_size
    except OSError:
        return 0


def last_words(fd: int, since: int) -> str:
    """The end of what was written to the file of a descriptor after so many bytes, at most `WORDS_MAX` of them.

    Empty where it is no file: Ray gives a worker one for its stderr, which its agent shares.
    """
    try:
        with Path(f"/proc/self/fd/{fd}").open("rb", buffering=0) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                return ""
            end = file.seek(0, os.SEEK_END)
            file.seek(max(since, end - WORDS_MAX) if end >= since else 0)
            return file.read(WORDS_MAX).decode(errors="replace").strip()
    except OSError:
        return ""


def raylet() -> int:
    """A descriptor that ends with the raylet which started this process; -1: it is not to be seen from here."""
    try:
        return os.pidfd_open(int(os.environ["RAY_RAYLET_PID"]))
    except (KeyError, ValueError, OSError):
        return -1


def _launcher() -> str:
    """The file that runs a module of ours, in the installation that this process finds."""
    found = importlib.util.find_spec("dlrover_adapters")
    places = list(found.submodule_search_locations or ()) if found is not None else []
    if not places:
        raise RuntimeError(
            f"dlrover-core is not installed for {sys.executable}: install it on every host of the cluster"
        )
    return str(Path(places[0], "agent", "_module.py"))


def _here() -> dict[str, str]:
    """The names of this host, and where scripts find the cluster."""
    import ray

    context = ray.get_runtime_context()
    host, address = context.get_node_id(), ray.util.get_node_ip_address()
    name = next((one["NodeName"] for one in ray.nodes() if one["NodeID"] == host), "") or address
    return {"DLROVER_HOST": name, "DLROVER_ADDRESS": address, "RAY_ADDRESS": context.gcs_address}


def _reported(started: Started) -> str:
    """What the wrapper says went wrong; empty when the program runs. Blocks until either."""
    fd, started.report = started.report, -1
    os.set_blocking(fd, True)
    with os.fdopen(fd, "rb") as pipe:
        return pipe.read().decode(errors="replace").partition(" ")[2]
