"""A master's process started before its launcher knows what to tell it: both import what they need at the same time.

In a pod of masters nobody leads the job until the new pod's first master does, so its start is time without decisions. A launcher
there has read its options, its settings and the log after half of what it takes; the master's imports take the other half, and
need nothing of that. Light to import.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import importlib
import json
import os
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from dlrover_adapters.agent.spawn import module_command

MODULE = "dlrover_adapters.cli.master"
AHEAD = "--ahead"
WORDS_BYTES_MAX = 64 * 1024
_SQLITE = "dlrover_core.logs.sqlite"
_BACKENDS = {"k8s": "dlrover_backends.k8s.client"}
_LOGS = {"": _SQLITE, "sqlite": _SQLITE, "etcd": "dlrover_adapters.etcd.log"}


class Descriptors(NamedTuple):
    """What a master inherits, or is sent: its descriptors, by their numbers in the process that has them."""

    port: int
    """The listening socket."""
    papers: int
    """The file with its settings."""
    stop: int
    """The file that says why the job is to stop."""
    asked: int
    """Where the launcher asks whether the master hangs."""

    def words(self) -> tuple[str, ...]:
        """As a master's command line has them."""
        numbers = {"--fd": self.port, "--stop": self.stop, "--asked": self.asked}
        return (
            "--config",
            f"/proc/self/fd/{self.papers}",
            *(word for one in numbers.items() for word in map(str, one)),
        )


class AheadMaster:
    """The launcher's end: a process as asyncio's are, which waits to be told what it is. It dies with the launcher.

    Make it in the main thread. ``load``: modules that it imports beside those that every master needs.
    """

    def __init__(self, job: str, load: Sequence[str], env: Mapping[str, str]) -> None:
        self._link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        loads = (word for one in load for word in ("--load", one))
        words = (AHEAD, str(theirs.fileno()), "--parent", str(os.getpid()), "--job", job, *loads)
        with theirs:
            try:
                self._child = subprocess.Popen(
                    [*module_command(MODULE), *words],
                    stdin=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(),),
                    env=dict(env),
                    start_new_session=True,
                )
            except BaseException:
                self._link.close()
                raise

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._child.pid

    @property
    def returncode(self) -> int | None:
        """Its exit status, negative for a signal; None while it lives, or nobody has waited for it."""
        return self._child.returncode

    def tell(self, words: Sequence[str], env: Mapping[str, str], own: Descriptors) -> bool:
        """Tell it what it is; False: it is dead. ``words``: of its command line but for its descriptors, which are ``own``."""
        said = json.dumps({"words": [*words], "env": dict(env)}).encode()
        with self._link:
            try:
                self._link.sendmsg([said], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", own))])
            except OSError:
                return False
        return self._child.poll() is None

    async def wait(self) -> int:
        """Its exit status, once it has ended."""
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        if self._child.poll() is None:
            pidfd = os.pidfd_open(self.pid)
            try:
                loop.add_reader(pidfd, ended.set)
                await ended.wait()
            finally:
                loop.remove_reader(pidfd)
                os.close(pidfd)
        return self._child.wait()

    def terminate(self) -> None:
        """SIGTERM."""
        self._child.terminate()

    def kill(self) -> None:
        """SIGKILL."""
        self._child.kill()

    def end(self) -> None:
        """Kill it if it lives, and reap it. Idempotent."""
        self._link.close()
        self._child.kill()
        self._child.wait()


def modules(backend: str, log: str) -> tuple[str, ...]:
    """What a master imports for ``--backend`` and ``--log``, beside what every one does."""
    return tuple(
        one for text, known in ((backend, _BACKENDS), (log, _LOGS)) if (one := known.get(text.partition(":")[0]))
    )


@contextlib.contextmanager
def started(job: str, load: Sequence[str], env: Mapping[str, str]) -> Iterator[AheadMaster | None]:
    """A master's process, ended with the context; None where none can be started now: the supervisor tries again."""
    try:
        made = AheadMaster(job, load, env)
    except OSError:
        yield None
        return
    try:
        yield made
    finally:
        made.end()


# ---- in the master's process


def told(link: int, load: Sequence[str]) -> list[str]:
    """Import what will be needed, then wait for the words of the command line; the environment gets what is told of it.

    Empty: the launcher has ended, or needs no master.
    """
    for name in load:
        with contextlib.suppress(ImportError):  # whoever needs it says so
            importlib.import_module(name)
    with socket.socket(fileno=link) as ours:
        said, own, _, _ = socket.recv_fds(ours, WORDS_BYTES_MAX, len(Descriptors._fields))
    for one in own:
        os.set_inheritable(
            one, False
        )  # flags of `recv_fds` are ignored; programs that a master starts need none of these
    if not said:
        return []
    words = json.loads(said)
    os.environ.update(words["env"])
    return [*words["words"], *Descriptors(*own).words()]
